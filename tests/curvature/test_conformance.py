"""The contract of a rule, answered by every rule alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim.curvature.group import Group
from kaisa_optim.curvature.lengths import AdamLength, FallLength, SGDLength
from kaisa_optim.curvature.refresh import FAILED, Refresher
from kaisa_optim.curvature.rules import (
    RULES,
    CholeskyRule,
    EigenRule,
    PolarRule,
    Rule,
    StoredProductRule,
)
from kaisa_optim.layers import Layer, LinearLayer
from kaisa_optim.plan.assignment import Placement, Task
from kaisa_optim.plan.facts import LayerFacts
from kaisa_optim.plan.moves import OF_AVERAGES
from kaisa_optim.plan.routes import cargo_bytes
from tests.support.training import assert_near, assert_same

Make = Callable[[torch.dtype | None], Rule]
DAMPING, G, A = 0.1, 4, 6  # of the layers: four outputs, five inputs and a bias
CASES: dict[str, Make] = {
    **{
        f"polar, {length.__name__}": lambda dtype, length=length: PolarRule(dtype, length())
        for length in (AdamLength, FallLength, SGDLength)
    },
    "eigen": EigenRule,
    "stored product": StoredProductRule,
    "cholesky, pi": lambda dtype: CholeskyRule(dtype, "pi"),
    "cholesky, full": lambda dtype: CholeskyRule(dtype, "full"),
}
KEPT = {  # of each factor, and of each layer; a basis is left out where the factor is diagonal
    PolarRule: ({"root": (0, 0)}, {}),
    EigenRule: ({"values": (0,), "vectors": (0, 0)}, {}),
    StoredProductRule: ({"values": (0,), "vectors": (0, 0)}, {"scale": (G, A)}),
    CholeskyRule: ({"inverse": (0, 0)}, {}),
}
every_rule = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def covariance(n: int, seed: int) -> Tensor:
    x = random(3 * n, n, seed=seed)
    return x.mT @ x / len(x)


def layers(count: int, diagonal: str = "") -> list[Layer]:
    """Linear layers of one shape; the wider side A may be diagonal, or both."""
    found = []
    for i in range(count):
        layer = LinearLayer(f"layer{i}", nn.Linear(A - 1, G, dtype=torch.float64))
        layer.cover((True, True))
        layer.wide = {"": math.inf, "a": A - 1, "ag": 1}[diagonal]
        found.append(layer)
    return found


class Applied:
    """One rule with factors of its own, as an owner of all of them has it."""

    def __init__(
        self,
        rule: Rule,
        factors: Sequence[tuple[Tensor, Tensor]],
        diagonal: str = "",
        damping: Callable[[int], float] = lambda i: DAMPING,
    ) -> None:
        self.rule, self.layers = rule, layers(len(factors), diagonal)
        self.group = Group(self.layers, applied=True)
        self.group.allocate(rule.sizes, None, rule.dtype, lambda *_: True, at_identity=False)
        self.group_of = dict.fromkeys(self.layers, self.group)
        self.damping_of = lambda x: damping(self.layers.index(x))
        self.refresh(factors)

    def refresh(self, factors: Sequence[tuple[Tensor, Tensor]]) -> set[str]:
        """Decompose new averages; return the layers that failed."""
        for layer, (a, g) in zip(self.layers, factors, strict=True):
            for side, matrix in (("a", a), ("g", g)):
                own = getattr(self.group, side)
                value = matrix.diagonal() if own.key.diagonal else matrix
                own.averages["average"][own.owned[layer]] = value
                own.averages["weight"][own.owned[layer]] = 1
        rule, damping_of = self.rule, self.damping_of
        names = [layer.name for layer in self.layers]
        shifts = rule.shifts(self.group_of, self.layers, damping_of, None)
        refresher = Refresher(rule)
        refresher.decompose([self.group], self.layers, (), shifts)
        rule.renew(self.group_of, self.layers, damping_of)
        answers = refresher.answers(self.group_of, self.layers)
        both = zip(names, answers[::2], answers[1::2], strict=True)
        return {name for name, a, g in both if FAILED in (a, g)}

    def apply(self, gradient: Tensor) -> Tensor:
        return self.rule.apply(self.group, gradient, self.damping_of)

    def state(self, layer: int) -> dict[str, Tensor]:
        names = {spec.name for spec in (*self.rule.sizes.of_factor, *self.rule.sizes.of_gradient)}
        views = self.group.views(self.layers[layer])
        return {k: t.clone() for k, t in views if k.removeprefix("a_").removeprefix("g_") in names}


def pairs(count: int, first: int = 0) -> list[tuple[Tensor, Tensor]]:
    return [(covariance(A, 2 * i), covariance(G, 2 * i + 1)) for i in range(first, first + count)]


def test_every_rule_is_here():
    assert {type(make(None)) for make in CASES.values()} == set(RULES) == set(KEPT)


# ---- state ----


@every_rule
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("diagonal", ["", "a"])
def test_state_is_what_the_sizes_say(make, dtype, diagonal):
    """Names, shapes and dtypes, and the bytes that the account adds up."""
    rule = make(dtype)
    one = Applied(rule, pairs(2), diagonal)
    of_factor, of_layer = KEPT[type(rule)]
    expected: dict[str, tuple[int, ...]] = {}
    for side, n in (("a", A), ("g", G)):
        for name, dims in of_factor.items():
            if side in diagonal:
                dims = dims[:1] if name != "vectors" else None
            if dims is not None:
                expected[f"{side}_{name}"] = (1, *[n] * len(dims))
    expected |= {name: (1, *shape) for name, shape in of_layer.items()}
    if rule.length is not None:
        expected |= {spec.name: (1,) for spec in rule.length.specs}
    state = one.state(1)
    assert {name: tuple(t.shape) for name, t in state.items()} == expected
    own = {spec.name for spec in rule.sizes.specs if spec.dtype == "own"}
    for name, tensor in state.items():
        whole = name.removeprefix("a_").removeprefix("g_") in own
        assert tensor.dtype == (torch.float64 if dtype is None or whole else dtype)
    task = Task("layer1", A, G, "a" in diagonal, False)
    facts = LayerFacts(task, Placement(0, 0), itemsize=8)
    held = [t for _, t in one.group.views(one.layers[1])]
    told = sum(size for _, _, size in rule.sizes.kept(facts))
    assert told == sum(t.numel() * t.element_size() for t in held)


@every_rule
def test_facts_about_a_rule_agree_with_each_other(make):
    rule = make(None)
    assert rule.makes_directions == (rule.length is not None) == isinstance(rule, PolarRule)
    assert rule.sizes.of_owner[: len(OF_AVERAGES)] == OF_AVERAGES
    names = [spec.name for spec in rule.sizes.specs]
    assert len(set(names)) == len(names)


@every_rule
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("diagonal", ["", "a"])
def test_a_gradient_worker_receives_the_owners_state(make, dtype, diagonal):
    """Bit for bit, in as many bytes as the account says."""
    rule = make(dtype)
    owner, worker = (Applied(rule, pairs(1, first), diagonal) for first in (0, 5))
    task = Task("layer0", A, G, "a" in diagonal, False)
    of_side = dict(zip("ag", LayerFacts(task, Placement(0, 0), itemsize=8).factors, strict=True))
    for side in "ag":
        mine, its = (getattr(one.group, side) for one in (owner, worker))
        kept = dict(mine.state)
        slots = slice(0, 1)
        sent = [t.clone() for t in rule.outgoing(mine, slots)]
        room = rule.outgoing(its, slots)
        for tensor, arrived in zip(room, sent, strict=True):
            tensor.copy_(arrived)
        rule.incoming(its, slots, room)
        rule.incoming(mine, slots, sent)
        assert_same(dict(its.state), kept)
        bytes_ = cargo_bytes(t.numel() * t.element_size() for t in sent)
        assert bytes_ == rule.sizes.state(of_side[side])


@every_rule
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_broken_state_is_told(make, number):
    rule = make(None)
    one = Applied(rule, pairs(1))
    for spec in rule.sizes.of_factor:
        tensor = one.group.a.state[spec.name].clone()
        assert not [*rule.faults(spec, tensor)]
        tensor.view(-1)[0] = number
        assert [*rule.faults(spec, tensor)] == ["not finite"]


@every_rule
@pytest.mark.parametrize("side", ["a", "g"])
@pytest.mark.parametrize("diagonal", ["", "ag"])
def test_state_that_fails_keeps_the_older_one(make, side, diagonal):
    """Of its own layer alone: the layer beside it in the stack has the new state."""
    one = Applied(make(None), pairs(2), diagonal)
    before = [one.state(i) for i in range(2)]
    new = pairs(2, first=7)
    fine = Applied(make(None), new, diagonal)
    new[0][side == "g"][0, 0] = math.nan
    assert one.refresh(new) == {"layer0"}
    after, whole = [one.state(i) for i in range(2)], fine.state(1)
    for name, tensor in before[0].items():
        if name.startswith(f"{side}_"):
            assert_same(after[0][name], tensor)
    assert_near(after[1], whole, 1e-12, 1e-14)
    assert any(not torch.equal(after[1][name], tensor) for name, tensor in before[1].items())


# ---- application ----


@every_rule
def test_an_update_of_zero_is_zero_and_changes_nothing(make):
    one = Applied(make(None), pairs(2))
    gradient = random(2, G, A)
    gradient[0] = 0
    given, state = gradient.clone(), [one.state(i) for i in range(2)]
    found = one.apply(gradient)
    assert not found[0].any() and found[1].any()
    assert found.shape == gradient.shape and found.dtype == gradient.dtype
    assert_same(gradient, given)
    assert_same([one.state(i) for i in range(2)], state)


@every_rule
def test_a_scale_of_the_gradient(make):
    """Directions know none; new gradients are linear in the gradient."""
    rule = make(None)
    one = Applied(rule, pairs(1))
    first, second = random(1, G, A), random(1, G, A, seed=1)
    if rule.makes_directions:
        assert rule.scale_free
        assert_near(one.apply(1e3 * first), one.apply(first), 1e-6, 1e-9)
        assert_near(one.apply(-first), -one.apply(first), 1e-9)
    else:
        both = one.apply(first) * 3 - one.apply(second)
        assert_near(one.apply(3 * first - second), both, 1e-9, 1e-12)


@every_rule
@pytest.mark.parametrize("unit", [1e-3, 50.0])
def test_factors_in_another_unit(make, unit):
    """A rule is free of the factors' scale, or its damping goes with it."""
    rule, ((a, g),) = make(None), pairs(1)
    one, gradient = Applied(rule, [(a, g)]), random(1, G, A)
    if rule.scale_free:
        other = Applied(rule, [(unit * a, g / unit**2)])
        assert_near(other.apply(gradient), one.apply(gradient), 1e-7, 1e-10)
        return
    # A damping that is added to both factors goes with both in one unit.
    alone = rule.sizes.of_factor[0].name == "inverse" and not rule.sizes.tells_means
    on_a, on_g, on_damping = (unit, unit, unit) if alone else (unit**2, 1 / unit, unit)
    factors = [(on_a * a, on_g * g)]
    other = Applied(rule, factors, damping=lambda i: on_damping * DAMPING)
    assert_near(other.apply(gradient) * on_a * on_g, one.apply(gradient), 1e-8, 1e-12)


@every_rule
def test_orders_of_outputs_and_inputs_change_nothing(make):
    """Permuted rows and columns of the factors and the gradient permute the update."""
    (a, g), gradient = pairs(1)[0], random(1, G, A)
    rows, columns = torch.tensor([2, 0, 3, 1]), torch.tensor([5, 1, 0, 4, 2, 3])
    one = Applied(make(None), [(a, g)])
    other = Applied(make(None), [(a[columns][:, columns], g[rows][:, rows])])
    found = other.apply(gradient[:, rows][:, :, columns])
    assert_near(found, one.apply(gradient)[:, rows][:, :, columns], 1e-8, 1e-10)


@every_rule
@pytest.mark.parametrize("diagonal", ["a", "ag"])
def test_a_diagonal_side_is_the_dense_matrix_of_it(make, diagonal):
    factors = [
        (a.diagonal().diag(), g.diagonal().diag() if "g" in diagonal else g) for a, g in pairs(2)
    ]
    vectors, dense = Applied(make(None), factors, diagonal), Applied(make(None), factors)
    gradient = random(2, G, A)
    assert_near(vectors.apply(gradient), dense.apply(gradient), 1e-8, 1e-10)


@every_rule
def test_layers_together_are_each_alone(make):
    """Each has its own damping."""
    dampings, factors, gradients = (0.1, 0.02, 0.5), pairs(3), random(3, G, A)
    together = Applied(make(None), factors, damping=lambda i: dampings[i])
    alone = torch.cat(
        [
            Applied(make(None), [factors[i]], damping=lambda _, i=i: dampings[i]).apply(
                gradients[i : i + 1]
            )
            for i in range(3)
        ]
    )
    assert_near(together.apply(gradients), alone, 1e-9, 1e-12)
    assert (alone[0] - Applied(make(None), factors[:1]).apply(gradients[:1])).abs().max() == 0


@every_rule
def test_a_new_damping_acts_at_once_or_at_the_next_refresh(make):
    """Only the eigenvalues' product is damped where it is applied."""
    rule = make(None)
    one, gradient = Applied(rule, pairs(1)), random(1, G, A)
    before = one.apply(gradient)
    one.damping_of = lambda x: 10 * DAMPING
    assert torch.equal(one.apply(gradient), before) == (type(rule) is not EigenRule)
    one.refresh(pairs(1))
    anew = Applied(make(None), pairs(1), damping=lambda i: 10 * DAMPING)
    assert_near(one.apply(gradient), anew.apply(gradient), 1e-12, 1e-14)
