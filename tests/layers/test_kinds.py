"""Linear layers and tables against the dense reference, and single parameters as layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kaisa_optim import KFACSGD
from kaisa_optim.layers import SCALES
from kaisa_optim.layers.kinds import LinearLayer
from tests.layers.cases import Case, build, check, each, freeze, loss_of, tokens
from tests.layers.test_uses import Scaled, headed
from tests.layers.test_uses import loss_of as squares
from tests.support import reference as ref
from tests.support.training import descend
from tests.support.watch import PAPERS, Body, assert_close, exact, normal, seeded, solved, taken

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")


LINEAR = {
    "2d": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 4)),
    "3d": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 2, 4)),
    "4d": Case(lambda: nn.Linear(4, 3), lambda: normal(3, 2, 3, 4)),
    "1d": Case(lambda: nn.Linear(4, 3), lambda: normal(4), terms=1.0),
    "one example": Case(lambda: nn.Linear(4, 3), lambda: normal(1, 4)),
    "no bias": Case(lambda: nn.Linear(4, 3, bias=False), lambda: normal(5, 4)),
    "no bias 3d": Case(lambda: nn.Linear(4, 3, bias=False), lambda: normal(5, 2, 4)),
    "one output": Case(lambda: nn.Linear(4, 1), lambda: normal(5, 4)),
    "frozen weight": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 4), prepare=freeze("weight")),
    "frozen bias": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 4), prepare=freeze("bias")),
    "non-contiguous": Case(lambda: nn.Linear(4, 3), lambda: normal(4, 10).T[::2]),
    "transposed 3d": Case(lambda: nn.Linear(4, 3), lambda: normal(2, 5, 4).transpose(0, 1)),
    "expanded": Case(lambda: nn.Linear(4, 3), lambda: normal(1, 2, 4).expand(5, 2, 4)),
    "input with gradient": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 4).requires_grad_()),
}


@each(LINEAR)
def test_linear(case):
    check(case)


def test_a_number_of_terms_is_that_of_the_whole_step():
    """Not of each micro-batch: a user who masks counts what all of them average."""
    net, x = build(LINEAR["3d"])
    g = ref.gradient_rows(net.layer, loss_of, x)
    opt = KFACSGD(net, lr=1.0, **PAPERS, loss_terms=4.0)
    out = net(x)
    opt.zero_grad()
    for rows in range(len(x)):
        (gradient,) = torch.autograd.grad(loss_of(leaf := out.detach().requires_grad_()), leaf)
        net(x[rows : rows + 1]).backward(gradient[rows : rows + 1])
    opt.step()
    ref.assert_close(opt.preconditioner.factors("layer")[1], ref.factors(g, g, 4.0)[1])


def test_a_sum_has_one_term():
    net, x = build(LINEAR["3d"])
    g = ref.gradient_rows(net.layer, loss_of, x)
    opt = KFACSGD(net, lr=1.0, **PAPERS, loss_reduction="sum")
    descend(opt, loss_of(net(x)))
    ref.assert_close(opt.preconditioner.factors("layer")[1], ref.factors(g, g, 1.0)[1])


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_linear_layer_of_gpt2_is_a_linear_layer(width, reentrant):
    """Its weight is stored the other way round."""
    library = pytest.importorskip("transformers.pytorch_utils")

    def run(body: nn.Module) -> dict[str, Tensor]:
        net = nn.Sequential(body, nn.Tanh(), seeded(lambda: nn.Linear(width, 2)))
        opt = exact(net)
        assert list(opt.preconditioner.layers) == ["0", "2"]
        x = normal(6, 4).requires_grad_()
        hidden = net[0](x) if reentrant is None else checkpoint(net[0], x, use_reentrant=reentrant)
        loss_of(net[1:](hidden)).backward()
        return taken(opt, net)

    linear = seeded(lambda: nn.Linear(4, width))
    other = seeded(lambda: library.Conv1D(width, 4))
    other.weight.data, other.bias.data = linear.weight.data.T.clone(), linear.bias.data.clone()
    expected, found = run(linear), run(other)
    assert_close(found["0.weight"].T, expected["0.weight"], 1e-9)
    assert_close(found["0.bias"], expected["0.bias"], 1e-9)


EMBEDDING = {
    "indices": Case(lambda: nn.Embedding(6, 3), lambda: tokens(5, high=6)),
    "sequences": Case(lambda: nn.Embedding(6, 3), lambda: tokens(3, 4, high=6)),
    "4d": Case(lambda: nn.Embedding(4, 2), lambda: tokens(2, 3, 2, high=4)),
    "repeated": Case(lambda: nn.Embedding(6, 3), lambda: torch.tensor([[1, 1, 4], [1, 4, 4]])),
    "padding_idx": Case(
        lambda: nn.Embedding(6, 3, padding_idx=2), lambda: torch.tensor([[1, 2, 4], [2, 2, 0]])
    ),
    "last padding_idx": Case(
        lambda: nn.Embedding(6, 3, padding_idx=-1), lambda: torch.tensor([[5, 2, 4], [2, 5, 0]])
    ),
}


@each(EMBEDDING)
def test_embedding(case):
    check(case, diagonal=(True, False))


class Projections(nn.Module):
    """Query, key and value of one input; then of another one, and of one that is overwritten."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.body = nn.Linear(5, 6)
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
        self.value = nn.Linear(6, 4, bias=False)

    def project(self, x: Tensor) -> Tensor:
        return self.query(x) * self.key(x) + self.value(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).tanh()
        if self.way == "checkpointed":
            return checkpoint(self.project, x, use_reentrant=False)
        if self.way == "twice":
            return self.project(x) + self.project(2 * x)
        return self.project(x)


def factors(way: str, passes: int = 1, **options) -> tuple[dict[str, Tensor], int]:
    """Factors A after a step, and how many moments of inputs were made."""
    torch.manual_seed(0)
    model = Projections(way).double()
    calls = []
    real = LinearLayer.input_moment

    def counted(layer, *args, **kwargs):
        calls.append(layer.name)
        return real(layer, *args, **kwargs)

    opt = KFACSGD(model, lr=0.1, compute_method="eigen", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearLayer, "input_moment", counted)
        for i in range(passes):
            x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
            (model(x).square().sum() / 7 / passes).backward()
    opt.step()
    kfac = opt.preconditioner
    return {name: kfac.factors(name)[0].clone() for name in kfac.layers}, len(calls)


@pytest.mark.parametrize("way", ["once", "twice", "checkpointed"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("normalization", ["fisher", "kaisa"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_shared_moment_is_each_layers_own(way, passes, normalization, fraction, monkeypatch):
    options = {"normalization": normalization, "statistics_fraction": fraction}
    shared, made = factors(way, passes, **options)
    monkeypatch.setattr(LinearLayer, "input_rows_key", lambda layer: None)
    apart, made_apart = factors(way, passes, **options)
    assert shared.keys() == apart.keys()
    for name, factor in apart.items():
        torch.testing.assert_close(shared[name], factor, rtol=1e-12, atol=1e-14)
    if way == "once" and normalization == "fisher":
        # The body's, one of two layers with a bias, and that of the one without.
        assert (made, made_apart) == (3 * passes, 4 * passes)


def test_another_part_of_an_input_is_another_moment():
    model = Projections("once").double()
    opt = KFACSGD(model, lr=0.1, skip_layers="body|value", statistics_fraction=0.5)
    x = torch.randn(4, 6, dtype=torch.float64)
    rows = torch.cat([x, torch.ones(4, 1, dtype=torch.float64)], 1)
    for layer, fraction in ((model.query, 0.5), (model.key, 1.0)):
        opt.preconditioner.statistics_fraction = fraction
        layer(x).sum().backward()
    opt.step()
    for name, part in (("query", rows[::2]), ("key", rows)):
        a = opt.preconditioner.factors(name)[0][0]
        torch.testing.assert_close(a, part.mT @ part / len(part))


def test_an_input_that_is_written_into_is_another_one():
    torch.manual_seed(0)
    model = Projections("once").double()
    opt = KFACSGD(model, lr=0.1, skip_layers="body|value")
    x = torch.randn(3, 6, dtype=torch.float64)
    before = x.clone()
    model.query(x).sum().backward()
    with torch.no_grad():
        x.mul_(3)
    descend(opt, model.key(x).sum())
    a_query, a_key = (opt.preconditioner.factors(name)[0][0] for name in ("query", "key"))
    rows = torch.cat([before, torch.ones(3, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(a_query, rows.mT @ rows / 3)
    rows[:, :-1] *= 3
    torch.testing.assert_close(a_key, rows.mT @ rows / 3)


def routed(x: Tensor) -> Tensor:
    return torch.tensor([0, 1, 0, 1, 1, 0])[: len(x)]


def one_by_one(m: nn.Module, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), m.w.shape[1])
    for expert in range(2):
        (at,) = torch.where(routed(x) == expert)
        out = out.index_add(0, at, F.linear(x[at], m.w[expert]))
    return out


def all_at_once(m: nn.Module, x: Tensor) -> Tensor:
    order = routed(x).argsort(stable=True)
    out = torch.bmm(x[order].view(2, 3, 4), m.w.mT)
    return torch.empty_like(out).view(6, 3).index_copy(0, order, out.view(6, 3))


@pytest.mark.parametrize("forward", [one_by_one, all_at_once])
def test_each_expert_is_a_block_with_the_rows_that_it_was_given(forward):
    x, weight = normal(6, 4), normal(2, 3, 4, seed=5)
    net = headed(Body(forward, w=weight))
    opt = exact(net)
    outputs: list[Tensor] = []
    net[0].register_forward_hook(lambda module, args, out: outputs.append(out))
    prediction = net(x)
    outputs[0].retain_grad()
    squares(prediction).backward()
    (out,), gradient = outputs, net[0].w.grad.clone()
    step = taken(opt, net)["0.w"]
    for expert in range(2):
        at = routed(x) == expert
        a, g = x[at].T @ x[at] / at.sum(), 6 * out.grad[at].T @ out.grad[at]
        for found, wanted in zip(opt.preconditioner.factors("0.w"), (a, g), strict=True):
            assert_close(found[expert], wanted)
        assert_close(step[expert], solved(a[None], g[None], gradient[expert][None])[0], 1e-8)


def test_an_expert_without_rows_keeps_its_averages_and_begins_with_those_of_the_others():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([x[:2] @ m.w[used[0]].T, x[2:] @ m.w[used[1]].T])

    net = headed(Body(forward, w=normal(3, 3, 4, seed=5)))
    opt = exact(net, factor_update_steps=1, factor_decay=0.5)
    factors = []
    for used in ((0, 1), (0, 2), (1, 2)):
        descend(opt, squares(net(normal(6, 4, seed=used[1]))))
        factors.append([side.clone() for side in opt.preconditioner.factors("0.w")])
    for first, second, third in zip(*factors, strict=True):
        assert_close(first[2], first[:2].mean(0))
        assert_close(second[1], first[1])
        assert_close(third[0], second[0])
        for before, after, expert in ((first, second, 2), (second, third, 1)):
            assert not torch.allclose(before[expert], after[expert])


def in_turn(m: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([x[:2] @ m.w[0], x[2:] @ m.w[1]])


# Weights whose stored rows are inputs: a forward, the weight, an input, and its rows by block.
STORED = {
    "a matrix": (lambda m, x: x @ m.w, (4, 3), (6, 4), lambda x: [x]),
    "experts": (in_turn, (2, 4, 3), (6, 4), lambda x: [x[:2], x[2:]]),
    "places": (
        lambda m, x: x + m.w[torch.arange(4).expand(6, 4)],
        (4, 3),
        (6, 4, 3),
        lambda x: [torch.eye(4, dtype=x.dtype).repeat(6, 1)],
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_a_is_of_inputs_and_g_of_output_gradients_however_the_weight_is_stored(name):
    forward, shape, of_input, rows_of = STORED[name]
    net, x = headed(Body(forward, w=normal(*shape, seed=5))), normal(*of_input)
    opt, outputs = exact(net), []
    net[0].register_forward_hook(lambda module, args, out: outputs.append(out))
    prediction = net(x)
    outputs[0].retain_grad()
    squares(prediction).backward()
    opt.step()
    a, g = opt.preconditioner.factors("0.w")
    rows = rows_of(x)
    parts = outputs[0].grad.flatten(0, -2).split([len(x) for x in rows])
    for block, (inputs, gradients) in enumerate(zip(rows, parts, strict=True)):
        assert_close(a[block], inputs.T @ inputs / len(inputs))
        assert_close(g[block], 6 * gradients.T @ gradients)


@pytest.mark.parametrize("name", [*STORED, "a table that is tied"])
def test_a_scale_of_the_loss_that_changes_leaves_the_averages(name):
    averages = []
    for base in (1.0, 10.0):
        if name in STORED:
            forward, shape, of_input, _ = STORED[name]
            net = headed(Body(forward, w=normal(*shape, seed=5)))
            inputs = [normal(*of_input, seed=i) for i in range(3)]
        else:
            net = seeded(lambda: nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Linear(3, 7)))
            net[2].weight = net[0].weight
            inputs = [torch.arange(7).roll(i)[: 4 + i] for i in range(3)]
        opt = KFACSGD(net, lr=1e-3, factor_update_steps=1, inv_update_steps=1, factor_decay=0.5)
        before = [p.detach().clone() for p in net.parameters()]
        for i, x in enumerate(inputs):
            descend(opt, base**i * squares(net(x)))
            for p, value in zip(net.parameters(), before, strict=True):
                p.data.copy_(value)
        averages.append(opt.preconditioner.factors("0.w" if name in STORED else "0"))
    for found, wanted in zip(*averages, strict=True):
        assert_close(found, wanted, 1e-9)


def test_groups_of_rows_are_those_of_the_experts():
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch multiplies no groups")

    def in_groups(m: nn.Module, x: Tensor) -> Tensor:
        ends = torch.tensor([3, 3, 8], dtype=torch.int32)
        return torch._grouped_mm(x, m.w.mT, offs=ends)

    def in_loops(m: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([x[:3] @ m.w[0].T, x[3:] @ m.w[2].T])

    x, weight = normal(8, 4).float(), normal(3, 4, 4, seed=5).float()
    factors = []
    for forward in (in_groups, in_loops):
        net = headed(Body(forward, w=weight.clone()), 4).float()
        opt = exact(net)
        descend(opt, squares(net(x)))
        factors.append(opt.preconditioner.factors("0.w"))
    for found, wanted in zip(*factors, strict=True):
        assert_close(found, wanted, 1e-4)


@pytest.mark.parametrize("kaisa", [False, True])
def test_the_base_steps_what_scales_or_shifts_entries(kaisa):
    """Under a rate of 1, with the loss's raw gradient, and without a warning."""
    net = seeded(Scaled)
    opt = exact(net, **({"normalization": "kaisa"} if kaisa else {}))
    assert list(opt.preconditioner.layers) == ["first.0", "head"]
    squares(net(normal(5, 2, 4, 3))).backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    steps = taken(opt, net)
    report = opt.preconditioner.coverage()
    names = {name for name in steps if not name.startswith(("first.0", "head"))}
    assert {name: one.reason for name, one in report.left.items()} == dict.fromkeys(names, SCALES)
    for name in names:
        assert_close(steps[name], gradients[name])
