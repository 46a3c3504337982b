"""Adam's moments in the eigenbasis: against the equations, plain optimizers, and other ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from kaisa_optim.core.preconditioner import rates
from kaisa_optim.curvature.refresh import OlderBases
from kaisa_optim.curvature.rules import AdamRule
from kaisa_optim.curvature.rules import adam as eigenbasis
from kaisa_optim.linalg import kronecker, orthogonal, products
from tests.comm.test_sharded import Plan as Sharding
from tests.comm.test_sharded import check as check_sharded
from tests.comm.test_sharded import each, some
from tests.support import reference as ref
from tests.support.cluster import (
    Plan,
    assert_alike,
    batch,
    build,
    error,
    even,
    network,
    train_alone,
    train_share,
    values,
)
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import assert_near, assert_same
from tests.support.watch import Watch, factors_of, normal, rows_of

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")

KFACAdamW = with_kfac(torch.optim.AdamW)
FAMILY = [KFACAdam, KFACAdamW, KFACLAMB]
every_base = pytest.mark.parametrize("cls", FAMILY, ids=lambda cls: cls._base.__name__)

INTERVAL = 4
EIGENBASIS: dict[str, Any] = {
    "moments": "eigenbasis",
    "factor_update_steps": 1,
    "inv_update_steps": INTERVAL,
    "basis_tolerance": 0,  # eigenvectors that the reference can find, too
    "early_refreshes": (),
    "staggered": False,
}
MOMENTS = ("exp_avg", "exp_avg_sq", "adam_steps")

# As many rows as make every factor's eigenvalues differ: no basis is then a matter of rounding.
ROWS = 24


class Net(nn.Module):
    """Two layers of one shape, one of them used in some steps only; a parameter for the base."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.slopes = nn.PReLU(5)
        self.branch = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor, branched: bool = True) -> Tensor:
        x = self.slopes(self.first(x))
        return self.head(x + self.branch(x).tanh() if branched else x)


LAYERS = ("first", "branch", "head")


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def always(i: int) -> bool:
    return True


def at_times(i: int) -> bool:
    """Both a refresh and the steps after it are among those without."""
    return i not in (2, 4, 5, 9)


def backward(model: nn.Module, i: int, branched: bool = True, scale: Any = None) -> None:
    generator = torch.Generator().manual_seed(100 + i)
    dtype = next(model.parameters()).dtype
    x, y = (torch.randn(ROWS, k, generator=generator, dtype=torch.float64) for k in (5, 3))
    loss = F.mse_loss(model(x.to(dtype), branched), y.to(dtype))
    (loss if scale is None else scale(loss)).backward()


def learn(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    steps: Iterable[int],
    branched: Callable[[int], bool] = always,
) -> None:
    for i in steps:
        opt.zero_grad()
        backward(model, i, branched(i))
        opt.step()


def pair(cls: Any = KFACAdam, **options: Any) -> tuple[Net, Any]:
    model = net()
    return model, cls(model, **{"lr": 0.01, **EIGENBASIS, **options})


def moments(opt: Any) -> dict[str, dict[str, Tensor]]:
    """What this rank keeps of each layer."""
    kfac = opt.preconditioner
    return {
        layer.name: {name: v.clone() for name, v in kfac.applied.views(layer) if name in MOMENTS}
        for layer in kfac.applied.group_of
    }


def counts(opt: Any) -> dict[str, int]:
    return {name: int(kept["adam_steps"].max()) for name, kept in moments(opt).items()}


# ---- the default ----


@pytest.mark.parametrize("cls", FAMILY, ids=lambda cls: cls._base.__name__)
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {"nesterov": True, "orthogonal": True}),
        ({"nesterov": False}, {"nesterov": False, "orthogonal": True}),
        ({"orthogonal": False}, {"nesterov": True, "orthogonal": False}),
        ({"moments": "eigenbasis"}, {"nesterov": False, "orthogonal": False}),
        ({"moments": "eigenbasis", "orthogonal": True}, {"nesterov": False, "orthogonal": True}),
    ],
    ids=str,
)
def test_moments_live_in_the_eigenbasis_unless_told_otherwise(cls, given, meant):
    """With Nesterov's momentum and orthogonal directions; by name it is Adam's own direction."""
    (model, opt), (other, named) = (
        pair(cls, **{"moments": None, **given}),
        pair(cls, **{**given, "moments": "eigenbasis", **meant}),
    )
    for trained, optimizer in ((model, opt), (other, named)):
        learn(trained, optimizer, range(INTERVAL + 2))
    assert_same(values(model), values(other))
    assert moments(opt).keys() == set(LAYERS)
    how = "Nesterov's momentum, " if meant["nesterov"] else ""
    how += "orthogonal directions, " if meant["orthogonal"] else ""
    assert f"Preconditioner(eigen, moments in the eigenbasis, {how}" in repr(opt.preconditioner)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("damping", 0.1),
        ("damping", lambda step: 0.01),
        ("kl_clip", None),
        ("kl_clip_lr", "current"),
        ("compute_method", "inverse"),
        ("compute_eigenvalue_outer_product", True),
        ("truncation", 0.1),
        ("eigenvalue_correction", "gradients"),
        ("warmup_steps", 3),
        ("normalization", "kaisa"),
    ],
)
def test_what_belongs_to_preconditioned_gradients_gets_them(option, value):
    with pytest.warns(UserWarning, match=f'{option}=.* leads to moments="parameters"'):
        opt = KFACAdam(net(), **{option: value})
    assert opt.preconditioner.options.moments == "parameters"
    assert (
        opt.preconditioner.options
        == KFACAdam(net(), **{option: value}, moments="parameters").preconditioner.options
    )


def test_groups_that_are_used_again_say_nothing_new():
    """Optimizers write into the groups that they are given."""
    model = net()
    groups = [{"params": model.parameters()}]
    for _ in range(2):
        groups = KFACAdam(groups, model=model).param_groups
        assert KFACAdam(groups, model=model).preconditioner.options.moments == "eigenbasis"


@pytest.mark.parametrize(
    "kind", [list, tuple, iter, lambda groups: dict(enumerate(groups)).values()]
)
@pytest.mark.parametrize(
    ("option", "value", "moments"),
    [
        ("damping", 0.1, "parameters"),
        ("damping", 0.005, "eigenbasis"),  # as it is anyway
        ("kl_clip_lr", "current", "parameters"),
        ("lr", 0.1, "eigenbasis"),
        ("factor_decay", 0.5, "eigenbasis"),
    ],
)
def test_so_does_what_a_group_of_its_own_asks_for(kind, option, value, moments):
    model = net()
    first, *rest = model.children()
    groups = [{"params": first.parameters(), option: value}]
    groups += [{"params": layer.parameters()} for layer in rest]
    warns = pytest.warns(UserWarning, match=f"{option}=.* in a parameter group leads to moments=")
    with warns if moments == "parameters" else contextlib.nullcontext():
        opt = KFACAdam(kind(groups), model=model)
    assert opt.preconditioner.options.moments == moments
    assert opt.param_groups[0][option] == value
    known = {id(p) for group in opt.param_groups for p in group["params"]}
    assert known == {id(p) for p in model.parameters()}


HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("asked", "tolerance", "interval"),
    [
        ({}, 0.1, 10),
        ({"basis_tolerance": 0}, 0.0, 50),
        ({"inv_update_steps": 7}, 0.1, 7),
        ({"moments": "parameters"}, 0.0, 50),
        ({"moments": "parameters", "basis_tolerance": 0.1}, 0.1, 50),
        *(({"inv_dtype": dtype}, 0.0, 50) for dtype in HALVES),
        ({"inv_dtype": torch.float32}, 0.1, 10),
        ({"moments": "eigenbasis", "normalization": "kaisa"}, 0.0, 50),
    ],
)
def test_bases_of_these_moments_are_followed_and_often_where_they_can_be(
    asked, tolerance, interval
):
    kfac = KFACAdam(net(), **asked).preconditioner
    assert (kfac.options.tolerance, kfac.inv_update_steps) == (tolerance, interval)
    plain = KFACSGD(net(), lr=0.1).preconditioner
    assert (plain.options.tolerance, plain.inv_update_steps) == (0.0, 50)


class OwnStep(torch.optim.Adam):
    """Whose step would not be called for what the eigenbasis steps."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    "base", [{"amsgrad": True}, {"betas": (torch.tensor(0.9), torch.tensor(0.99))}]
)
def test_what_the_eigenbasis_refuses_is_had_without_it(base):
    with pytest.warns(UserWarning, match='leads to moments="parameters"'):
        opt = KFACAdam(net(), **base)
    assert opt.preconditioner.options.moments == "parameters"


def test_a_damping_that_is_none_is_told_in_its_own_words():
    with pytest.raises(ValueError, match="Invalid damping"):
        KFACAdam(net(), damping=torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize("cls", [KFACSGD, with_kfac(torch.optim.RAdam), with_kfac(OwnStep)])
def test_bases_without_these_moments_see_preconditioned_gradients(cls):
    assert cls(net()).preconditioner.options.moments == "parameters"


# ---- the equations ----


class Kept(NamedTuple):
    """Of one layer."""

    a: Tensor
    g: Tensor
    weight: float
    bases: tuple[Tensor, Tensor] | None = None  # of G, of A
    first: Tensor | None = None
    second: Tensor | None = None
    steps: int = 0


class Reference:
    """The equations for one layer after another; ``plain`` steps what no layer covers."""

    def __init__(
        self,
        cls: Any,
        due: Callable[[int], Iterable[str]],
        nesterov: bool = False,
        orthogonal: bool = False,
        **options: Any,
    ) -> None:
        self.model = net()
        self.watch = Watch(self.model, *LAYERS)
        self.due = due
        self.lamb = cls is KFACLAMB
        self.plain = cls._base([self.model.slopes.weight], **options)  # its moments stay plain
        self.group = dict(self.plain.param_groups[0])
        self.plain.param_groups[0]["max_grad_norm"] = None  # this class has all gradients' norm
        self.nesterov = nesterov
        self.orthogonal = orthogonal
        self.decoupled = cls is KFACAdamW or bool(
            self.group["adam_w_mode"] if self.lamb else self.group.get("decoupled_weight_decay")
        )
        self.kept: dict[str, Kept] = {}

    def step(self, i: int, branched: bool) -> None:
        for calls in self.watch.calls.values():
            calls.clear()
        self.model.zero_grad()
        backward(self.model, i, branched)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        limit = self.group.get("max_grad_norm")
        if limit is not None and limit > 0:
            norm = math.sqrt(sum(float((p.grad**2).sum()) for p in parameters))
            for p in parameters:
                p.grad = p.grad / max(1.0, norm / limit)
        with torch.no_grad():
            for name in LAYERS:
                self.step_layer(name, name in self.due(i))
        self.plain.step()

    def step_layer(self, name: str, due: bool) -> None:
        module = self.model.get_submodule(name)
        calls = self.watch.trained(name)
        kept = self.kept.get(name)
        if calls:
            a, g = (f[0] for f in factors_of(*rows_of(module, calls), ROWS))
            kept = kept or Kept(0 * a, 0 * g, 0.0)
            kept = kept._replace(
                a=0.95 * kept.a + 0.05 * a,
                g=0.95 * kept.g + 0.05 * g,
                weight=0.95 * kept.weight + 0.05,
            )
        assert kept is not None
        if due:
            kept = turned(kept)
        if module.weight.grad is not None:
            direction, kept = self.direction(module, kept)
            self.descend(module.weight, direction[:, : module.in_features])
            if module.bias is not None:
                self.descend(module.bias, direction[:, -1])
        self.kept[name] = kept

    def direction(self, module: nn.Module, kept: Kept) -> tuple[Tensor, Kept]:
        beta1, beta2 = self.group["betas"]
        columns = [self.taken_in(p) for p in module.parameters()]
        gradient = torch.cat([c.reshape(len(columns[0]), -1) for c in columns], dim=1)
        assert kept.bases is not None
        q_g, q_a = kept.bases
        projected = q_g.T @ gradient @ q_a
        zero = torch.zeros_like(projected)
        first, second = (zero if m is None else m for m in (kept.first, kept.second))
        averaged = self.group.get("grad_averaging", True)
        take = 1 - beta1 if averaged else 1
        first = beta1 * first + take * projected
        second = beta2 * second + (1 - beta2) * projected**2
        steps = kept.steps + 1
        # Nesterov's: the moment that would be if the same gradient came once more.
        ahead = beta1 * first + take * projected if self.nesterov else first
        corrected = self.group.get("bias_correction", True)
        c1 = 1 - beta1 ** (steps + self.nesterov) if corrected else 1
        c2 = 1 - beta2**steps if corrected else 1
        divisors = (second / c2).sqrt() + self.group["eps"]
        found = q_g @ (ahead / c1 / divisors) @ q_a.T
        if self.orthogonal:
            limit = max(0.003 / float(self.group["lr"]), 0.2)
            found = sized(evened(found), q_g @ (ahead / c1) @ q_a.T, divisors, limit)
        return found, kept._replace(first=first, second=second, steps=steps)

    def taken_in(self, p: Tensor) -> Tensor:
        gradient = -p.grad if self.group["maximize"] else p.grad
        return gradient if self.decoupled else gradient + self.group["weight_decay"] * p

    def descend(self, p: Tensor, direction: Tensor) -> None:
        lr, decay = float(self.group["lr"]), self.group["weight_decay"]
        if self.lamb:
            if self.decoupled:
                direction = direction + decay * p
            if decay != 0 or self.group["use_nvlamb"]:
                direction = direction * p.norm() / direction.norm()
        elif self.decoupled:
            p.mul_(1 - lr * decay)
        p.sub_(lr * direction)


TOWARDS_ONE = (7.7110, -22.1138, 16.2488), (3.2153, -2.4112, 0.5013), (2.2183, -1.5940, 0.4107)
FROM_FURTHER = (
    (8.2987, -24.4305, 18.0903),
    (3.9152, -2.9211, 0.5592),
    (3.1746, -2.3804, 0.4978),
    (2.1895, -1.5672, 0.4079),
)


def evened(matrix: Tensor) -> Tensor:
    """Return the matrix with singular values that polynomials make alike."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    even = 0.98 * s / s.norm()
    for a, b, c in FROM_FURTHER if min(matrix.shape) > 256 else TOWARDS_ONE:
        even = a * even + b * even**3 + c * even**5
    return u @ even.diag() @ v


def sized(direction: Tensor, momentum: Tensor, divisors: Tensor, limit: float) -> Tensor:
    """Give a direction the root mean square at which losses fall as they do by Adam's steps."""
    cosine = float((direction / direction.norm() * momentum / momentum.norm()).sum())
    cosine = max(cosine, 0.01) if cosine > 0 else 0.8
    size = 0.8 * float(momentum.norm() / divisors.norm()) / cosine
    return direction * min(size, limit) / direction.square().mean().sqrt()


def turned(kept: Kept) -> Kept:
    """Moments go over to the bases of the factors as they are now."""
    new_g, new_a = (torch.linalg.eigh(f / kept.weight)[1] for f in (kept.g, kept.a))
    first, second = kept.first, kept.second
    if first is not None and second is not None and kept.bases is not None:
        r_g, r_a = new_g.T @ kept.bases[0], new_a.T @ kept.bases[1]
        first = r_g @ first @ r_a.T
        # The diagonal of the turned matrix whose diagonal the second moment is.
        whole = torch.kron(r_g, r_a)
        second = (whole @ second.flatten().diag() @ whole.T).diagonal().view_as(second)
    return kept._replace(bases=(new_g, new_a), first=first, second=second)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (KFACAdam, {}),
    "Adam betas": (KFACAdam, {"betas": (0.7, 0.8), "eps": 1e-3}),
    "Adam L2": (KFACAdam, {"weight_decay": 0.1}),
    "Adam maximize": (KFACAdam, {"maximize": True}),
    "Adam maximize L2": (KFACAdam, {"maximize": True, "weight_decay": 0.1}),
    "Adam Tensor lr": (KFACAdam, {"lr": torch.tensor(0.02)}),
    "Adam Nesterov": (KFACAdam, {"nesterov": True, "weight_decay": 0.1}),
    "Adam orthogonal": (KFACAdam, {"orthogonal": True, "eps": 1e-3}),
    "Adam orthogonal, short steps": (KFACAdam, {"orthogonal": True, "lr": 1e-4}),
    "Adam orthogonal, long steps": (KFACAdam, {"orthogonal": True, "lr": torch.tensor(0.03)}),
    "AdamW": (KFACAdamW, {"weight_decay": 0.5}),
    "AdamW orthogonal": (KFACAdamW, {"orthogonal": True, "nesterov": True, "weight_decay": 0.5}),
    "AdamW maximize": (KFACAdamW, {"maximize": True, "weight_decay": 0.5}),
    "AdamW Tensor lr": (KFACAdamW, {"lr": torch.tensor(0.02), "weight_decay": 0.5}),
    # Clipped in every step, by different amounts.
    "LAMB": (KFACLAMB, {"max_grad_norm": 0.05}),
    "LAMB free": (KFACLAMB, {"max_grad_norm": None, "eps": 1e-2}),
    "LAMB loose": (KFACLAMB, {"max_grad_norm": 0.45, "eps": 1e-2}),
    "LAMB L2": (KFACLAMB, {"max_grad_norm": 0.05, "adam_w_mode": False, "weight_decay": 0.1}),
    "LAMB without decay": (KFACLAMB, {"weight_decay": 0.0}),
    "LAMB nvlamb": (KFACLAMB, {"weight_decay": 0.0, "use_nvlamb": True}),
    "LAMB uncorrected": (KFACLAMB, {"bias_correction": False, "weight_decay": 0.0}),
    "LAMB unaveraged": (KFACLAMB, {"grad_averaging": False, "weight_decay": 0.0}),
    "LAMB Nesterov": (KFACLAMB, {"nesterov": True, "grad_averaging": False}),
    "LAMB uncorrected Nesterov": (KFACLAMB, {"nesterov": True, "bias_correction": False}),
    "LAMB orthogonal": (KFACLAMB, {"orthogonal": True, "nesterov": True, "eps": 1e-3}),
    "LAMB maximize": (KFACLAMB, {"maximize": True, "adam_w_mode": False}),
    "LAMB Tensor lr": (KFACLAMB, {"lr": torch.tensor(0.02)}),
}
every_case = pytest.mark.parametrize("case", list(CASES))


def of_case(case: str) -> tuple[Any, dict[str, Any]]:
    cls, options = CASES[case]
    return cls, copy.deepcopy({"lr": 0.01, **options})


def all_at_once(i: int) -> Iterable[str]:
    return LAYERS if i % INTERVAL == 0 else ()


def compare(opt: Any, model: nn.Module, reference: Reference, what: str) -> None:
    assert_near(model, reference.model, rtol=1e-9, atol=1e-11)
    assert counts(opt) == {name: kept.steps for name, kept in reference.kept.items()}, what


@every_case
def test_steps_follow_the_equations(case):
    cls, options = of_case(case)
    model, opt = pair(cls, **options)
    reference = Reference(cls, all_at_once, **options)
    for i in range(12):
        learn(model, opt, [i], at_times)
        reference.step(i, at_times(i))
        compare(opt, model, reference, f"step {i}")


@every_case
def test_uncovered_parameters_follow_the_plain_base(case):
    """Bit for bit, with its whole state; it sees all gradients, for the norm that LAMB limits."""
    cls, options = of_case(case)
    model, opt = pair(cls, **options)
    twin = net()
    ours = ("nesterov", "orthogonal")
    of_base = {name: v for name, v in copy.deepcopy(options).items() if name not in ours}
    plain = cls._base(twin.parameters(), **of_base)
    for i in range(6):
        with torch.no_grad():  # or the gradients would not be those of the same place
            for own, p in zip(twin.parameters(), model.parameters(), strict=True):
                own.copy_(p)
        learn(model, opt, [i])
        for own, p in zip(twin.parameters(), model.parameters(), strict=True):
            own.grad = p.grad.clone()
        plain.step()
        assert_same(model.slopes.weight.detach(), twin.slopes.weight.detach())
    state = {k: v for k, v in opt.state[model.slopes.weight].items() if k[:5] != "kfac_"}
    assert_same(state, plain.state[twin.slopes.weight])
    assert opt.param_groups[0].get("step") == plain.param_groups[0].get("step")
    # The base has nothing of the others.
    assert not any("exp_avg" in opt.state[p] for p in model.first.parameters())


def test_the_options_that_the_cases_vary_matter():
    """A control: were one of them ignored on both sides, the comparisons would not tell."""
    results = []
    for case in CASES:
        cls, options = of_case(case)
        model, opt = pair(cls, **options)
        learn(model, opt, range(6))
        results.append(torch.cat([p.detach().flatten() for p in model.first.parameters()]))
    for one, two in itertools.combinations(results, 2):
        assert not torch.allclose(one, two, rtol=1e-6)


def test_layers_that_take_turns():
    model, opt = pair(staggered=True)
    turns = opt.preconditioner.schedule.refresh_slots(INTERVAL)
    assert len(turns) > 1
    reference = Reference(KFACAdam, lambda i: turns.get(i % INTERVAL, ()) if i else LAYERS, lr=0.01)
    for i in range(12):
        learn(model, opt, [i])
        reference.step(i, True)
        compare(opt, model, reference, f"step {i}")


@pytest.mark.filterwarnings("ignore:.* of no use to moments=")
@pytest.mark.parametrize("change", [{"damping": 10.0}, {"kl_clip": 1e-12}, {"kl_clip": None}])
def test_neither_damping_nor_the_clip_has_a_part(change):
    """The second moment stands in place of eigenvalues, and Adam's direction has a size."""
    runs = [pair(), pair(**change)]
    for model, opt in runs:
        learn(model, opt, range(6))
    assert_same(runs[0][0], runs[1][0])


FREE = {"max_grad_norm": None}


@pytest.mark.parametrize(
    ("cls", "own"),
    [
        (KFACAdam, {"betas": (0.5, 0.999)}),
        (KFACAdam, {"betas": (0.9, 0.9)}),
        (KFACAdam, {"eps": 0.1}),
        (KFACAdam, {"lr": 0.03, "weight_decay": 0.3, "maximize": True}),
        (KFACAdamW, {"lr": 0.03, "weight_decay": 0.9}),
        (KFACLAMB, {"bias_correction": False, **FREE}),
        (KFACLAMB, {"grad_averaging": False, **FREE}),
        (KFACLAMB, {"adam_w_mode": False, "max_grad_norm": 0.1}),
    ],
)
def test_groups_have_their_own_settings(cls, own):
    """Layers of one shape are stacked, whatever their groups say."""
    models = []
    for first, others in ((own, own), ({}, {}), (own, {})):
        model = net()
        rest = [*model.branch.parameters(), *model.head.parameters(), *model.slopes.parameters()]
        groups = [
            {"params": list(model.first.parameters()), **first},
            {"params": rest, **others},
        ]
        common = {"lr": 0.01, "weight_decay": 0.0 if cls is KFACLAMB else 0.01}
        opt = cls(groups, model=model, **common, **EIGENBASIS)
        # Each time from the same place, where a layer's step depends on its own group alone.
        start = copy.deepcopy(model.state_dict())
        for i in range(3):
            model.load_state_dict(start)
            learn(model, opt, [i])
        models.append(model)
    as_one, as_other, mixed = models
    for name, expected in (("first", as_one), ("branch", as_other), ("head", as_other)):
        one, other = (m.get_submodule(name).weight.detach() for m in (as_one, as_other))
        assert not torch.allclose(one, other, rtol=1e-6)
        assert_near(mixed.get_submodule(name), expected.get_submodule(name))


def test_gradients_and_groups_are_left_as_they_were():
    for cls, options in ((KFACLAMB, {"max_grad_norm": 0.01}), (KFACAdam, {"maximize": True})):
        model, opt = pair(cls, weight_decay=0.1, **options)
        backward(model, 0)
        before = {p: (p.grad, p.grad.clone()) for p in model.parameters()}
        groups = [{k: v for k, v in g.items() if k != "step"} for g in opt.param_groups]
        opt.step()
        after = [{k: v for k, v in g.items() if k != "step"} for g in opt.param_groups]
        assert_same(after, groups)
        for p, (own, copied) in before.items():
            assert p.grad is own and torch.equal(own, copied)


def test_an_error_in_the_step_leaves_gradients_and_groups():
    model, opt = pair(KFACLAMB, max_grad_norm=0.01)
    learn(model, opt, [0])
    opt.zero_grad()
    backward(model, 1)
    grads = [p.grad for p in model.parameters()]
    opt.preconditioner.rule.apply = None
    with pytest.raises(TypeError):
        opt.step()
    assert opt.param_groups[0]["max_grad_norm"] == 0.01
    assert all(p.grad is own for p, own in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("beta2", [0.9, 0.999, 0.99999])
def test_the_first_direction_in_float32_is_one_of_signs(beta2, nesterov):
    """1 - β² must not come from a difference of rounded numbers."""
    for apart in (False, True):  # a number for all blocks, or one for each
        state = {
            name: torch.zeros(shape, dtype=dtype)
            for name, (shape, dtype) in RULE.group_specs(2, 3, 4, torch.float32).items()
        }
        gradient = normal(2, 3, 4).float()
        adam = eigenbasis.settings({"betas": (0.9, beta2), "eps": 0.0})
        if apart:
            adam = eigenbasis.Settings(*(torch.full((2, 1, 1), number) for number in adam))
        first, divisors = eigenbasis.moved(state, slice(None), gradient, None, adam, nesterov)
        torch.testing.assert_close(first / divisors, gradient.sign(), rtol=1e-5, atol=0)


# ---- plain Adam where the basis is the parameters' own ----


@pytest.mark.parametrize("name", ["images", "tokens"])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (KFACAdam, {"weight_decay": 0.01}),
        (KFACAdamW, {"weight_decay": 0.1}),
        (KFACLAMB, {"max_grad_norm": 0.3}),
    ],
    ids=lambda x: x._base.__name__ if isinstance(x, type) else "",
)
def test_diagonal_factors_are_the_plain_base(name, cls, options):
    """Every layer kind, with all its options, is Adam itself where no side has another basis."""
    models = [network(name) for _ in range(2)]
    # A gradient that is zero but for its rounding, that of an attention key's bias, stays so.
    options = {"lr": 0.01, "eps": 1e-2, **options}
    ours = cls(models[0], max_factor_size=1, **options, **EIGENBASIS)
    theirs = cls._base((p for p in models[1].parameters() if p.requires_grad), **options)
    stacks = ours.preconditioner.applied.stacks
    assert {key.size for key in stacks if not key.diagonal} == {1}
    for i in range(8):
        x, y = batch(name, i, 8)
        for model, opt in zip(models, (ours, theirs), strict=True):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    assert_near(models[0], models[1], rtol=1e-7, atol=1e-9)


# ---- turning the basis ----


def orthonormal(n: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(2, n, n, seed=seed))[0]


def fresh_moments(g: int, a: int, seed: int) -> dict[str, Tensor]:
    """Of four blocks, of which tests turn the two in the middle."""
    first, noise = normal(2, 4, g, a, seed=seed)
    return {"exp_avg": first, "exp_avg_sq": noise.square(), "adam_steps": torch.ones(4)}


sizes = st.integers(1, 6)
seeds = st.integers(0, 10_000)
turning = settings(max_examples=60)
MIDDLE = slice(1, 3)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), seeds)
def test_orthogonalized_matrices(k, g, a, seed):
    """As by a decomposition, each for itself, whatever its scale and shape."""
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(k, g, a, generator=generator, dtype=torch.float64)
    scales = 10.0 ** torch.arange(-60, -60 + 60 * k, 60, dtype=torch.float64)
    found = orthogonal.orthogonalized(matrices * scales[:, None, None], in_half=False)
    for matrix, one in zip(matrices, found, strict=True):
        ref.assert_close(one, evened(matrix), what="a matrix")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), seeds, st.floats(-1, 1))
def test_steps_as_steep_as_adams(dtype, k, g, a, seed, power):
    """Each for itself, whatever the scale of its gradients."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, k, g, a, generator=generator, dtype=torch.float64)
    directions, momenta, divisors = drawn.to(dtype).double()
    momenta, divisors = momenta + directions, divisors.abs() + 0.1
    limit, scale = 1.5, 10 ** (power * (17 if dtype == torch.float32 else 140))
    found = orthogonal.as_steep_as_adams(
        directions.to(dtype), (momenta * scale).to(dtype), (divisors * scale).to(dtype), limit
    )
    for one, direction, momentum, divisor in zip(found, directions, momenta, divisors, strict=True):
        wanted = sized(direction, momentum, divisor, limit)
        close = {"rtol": 1e-3, "atol": 1e-5} if dtype == torch.float32 else {}
        torch.testing.assert_close(one.double(), wanted, **close)
        assert one.square().mean().sqrt() <= limit * (1 + 1e-5)


def test_lengths_where_squares_are_zero_or_infinite():
    """As gradients die away, and where the second moment is infinite already."""
    torch.manual_seed(0)
    directions = torch.randn(1, 5, 4)
    for scale, divisor in ((1e-30, 1e-8), (1e-42, 1e-8), (1e25, math.inf)):
        found = orthogonal.as_steep_as_adams(
            directions.clone(), directions * scale, torch.full((1, 5, 4), divisor), math.inf
        )
        wanted = min(scale / divisor * 0.8, 1.0)
        torch.testing.assert_close(
            found.square().mean().sqrt().item(), wanted, rtol=0.3, atol=1e-30
        )


@pytest.mark.parametrize(
    "cosine, size", [(0.16, 0.8 / 0.16), (1e-3, 0.8 / 0.01), (-0.16, 1.0), (0.0, 1.0)]
)
def test_lengths_by_the_cosine(cosine, size):
    """Where the first step has Adam's signs; one against the momentum has Adam's own length."""
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    across = torch.tensor([[-0.8, -0.6], [0.6, -0.8]], dtype=torch.float64)  # of cosine 0
    momentum = (cosine * turn + (1 - cosine**2) ** 0.5 * across)[None]
    for limit in (math.inf, size / 2):
        found = orthogonal.as_steep_as_adams(
            turn[None].clone(), momentum.clone(), momentum.abs(), limit
        )
        torch.testing.assert_close(found.square().mean().sqrt().item(), min(size, limit))


@pytest.mark.parametrize("kind", [float, torch.tensor, lambda rate: torch.tensor([rate])])
def test_limits_by_the_learning_rate(kind):
    """Each layer has its own, for each of its blocks; a rate of zero, which moves nothing, none."""
    layers = [nn.Conv2d(4, 6, 2, groups=2, padding=1) for _ in range(3)]
    rates = {"0": 0.0, "1": 0.001, "2": 0.1}
    groups = [{"params": layers[int(name)].parameters(), "lr": lr} for name, lr in rates.items()]
    kfac = KFACAdam(groups, model=nn.Sequential(*layers), lr=0.01).preconditioner
    (group,) = kfac.applied.groups
    values: Any = SimpleNamespace(rate_of=lambda layer: kind(rates[layer.name]))
    found = eigenbasis._limit(group.layers, group, values)
    wanted = {"0": math.inf, "1": 3.0, "2": 0.2}
    both = [wanted[x.name] for x in group.layers for _ in range(2)]
    assert found.flatten().tolist() == pytest.approx(both)
    same = eigenbasis._limit(group.layers[1:2], group, values)
    one = wanted[group.layers[1].name]
    assert all(x == pytest.approx(one) for x in torch.as_tensor(same).flatten().tolist())


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("of_weight, of_bias", [(0.5, 0.25), (0.25, 0.5)])
def test_the_largest_rate_of_a_layer_limits_it(kind, of_weight, of_bias):
    """One direction of both is limited, and each takes its own rate of it."""
    model = nn.Sequential(nn.Linear(3, 3))
    groups = [
        {"params": [model[0].bias], "lr": kind(of_bias)},
        {"params": [model[0].weight], "lr": kind(of_weight)},
    ]
    opt = KFACAdam(groups, model=model)
    registry = opt.preconditioner.registry
    found = rates(registry, opt.param_groups)(registry.layers["0"])
    assert isinstance(found, float) and found == 0.5


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_layers_of_one_shape_step_within_limits_of_their_own(kind):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).double()
    rates = (1e-4, 0.01, 0.1)
    groups = [
        {"params": layer.parameters(), "lr": kind(lr)}
        for layer, lr in zip(model, rates, strict=True)
    ]
    opt = KFACAdam(groups, model=model, orthogonal=True)
    before = [torch.cat([p.detach().flatten() for p in layer.parameters()]) for layer in model]
    model(torch.randn(16, 8).double()).pow(2).sum().backward()
    opt.step()
    lengths = [
        (torch.cat([p.detach().flatten() for p in layer.parameters()]) - old).square().mean().sqrt()
        for layer, old in zip(model, before, strict=True)
    ]
    assert 1e-4 < lengths[0] < 0.002
    assert [float(x) for x in lengths[1:]] == pytest.approx([0.003, 0.02])


IN_HALF = pytest.mark.parametrize("half", [True, False], ids=["bf16", "full"])


@IN_HALF
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthogonalized_at_the_ends_of_a_dtype(dtype, half):
    """Where squares are not there any more: a moment without gradients comes to any number."""
    half = half and dtype == torch.float32
    torch.manual_seed(0)
    matrix = torch.randn(6, 4, dtype=dtype)
    info = torch.finfo(dtype)
    wanted = evened(matrix)
    for scale in (info.tiny * 10, info.tiny**0.5, 1e-20, 1e10, info.max**0.5, info.max / 10):
        found = orthogonal.orthogonalized(matrix[None] * scale, in_half=half)[0]
        coarse = {"rtol": 0.1, "atol": 0.02} if half else {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(found, wanted, **coarse)


def test_directions_die_away_without_gradients():
    """Beyond what float32 can square, and what it can say; weights stay numbers, and still."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    opt = KFACAdam(model, lr=0.01, orthogonal=True)
    for step in range(1100):
        opt.zero_grad()
        loss = model(torch.randn(16, 6)).square().mean()
        (loss if step < 20 else 0 * loss).backward()
        opt.step()
        if step == 1000:
            before = copy.deepcopy(model.state_dict())
    assert all(p.isfinite().all() for p in model.parameters())
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("widest", [35, 16384])
def test_what_is_too_wide_for_a_factor_is_not_made_orthogonal(widest):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40, bias=False)).double()
    opt = KFACAdam(model, lr=1.0, orthogonal=True, max_factor_size=widest)
    before = model[0].weight.detach().clone()
    model(torch.randn(64, 20).double()).pow(3).mean().backward()
    opt.step()
    s = torch.linalg.svdvals(model[0].weight.detach() - before)
    assert (s.max() < 2 * s.min()) == (widest > 40)


@IN_HALF
@pytest.mark.parametrize(("g", "a"), [(64, 64), (300, 64), (64, 300), (1, 5), (280, 257)])
def test_orthogonalized_in_float32(g, a, half):
    """Nearly equal singular values where they differ by ten, of wide matrices by 28; nothing
    stays nothing."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, n)).Q[:, : min(g, a)] for n in (g, a))
    matrix = u * torch.logspace(0, -1.45 if a == 257 else -1, min(g, a)) @ v.T
    rows = torch.stack([matrix, 0 * matrix, matrix * math.nan])
    found = orthogonal.orthogonalized(rows, in_half=half)
    s = torch.linalg.svdvals(found[0])
    assert s.max() <= (1.25 if half else 1.21) * s.min()
    wanted = evened(matrix.double()).float()
    assert (found[0] - wanted).norm() < (0.05 if half else 1e-3) * wanted.norm()
    assert torch.equal(found[1], 0 * matrix) and found[2].isnan().all()
    with mock.patch.object(orthogonal, "_AT_ONCE", 1):  # one after the other
        again = orthogonal.orthogonalized(rows[:2], in_half=half)
    assert (again - found[:2]).norm() < (0.02 if half else 1e-5) * wanted.norm()


@IN_HALF
def test_orthogonalized_of_rank_one(half, monkeypatch):
    """What is rounded must not take the singular value beyond 1, where polynomials grow fast."""
    norms: list[float] = []
    real = orthogonal._towards_one

    def watched(wide: Tensor, polynomials: Any, in_half: bool) -> Tensor:
        found = real(wide, polynomials, in_half)
        norms.append(float(found.norm()))
        return found

    monkeypatch.setattr(orthogonal, "_towards_one", watched)
    for g in range(65, 130):
        ones = torch.ones(1, g, 130)
        orthogonal.orthogonalized(ones, in_half=half)
    assert min(norms) > 0.85 and max(norms) < 1.15


@pytest.mark.parametrize(
    "has, outputs, half", [(True, 65, True), (True, 64, False), (False, 65, False)]
)
def test_directions_are_orthogonal_and_turned_back_in_what_multiplies_faster(
    has, outputs, half, monkeypatch
):
    monkeypatch.setattr(products, "_multiplies_brain_floats", lambda device: has)
    found: list[Any] = []
    real, back = orthogonal.orthogonalized, kronecker.out_of_basis
    monkeypatch.setattr(
        orthogonal,
        "orthogonalized",
        lambda x, in_half: found.append(in_half) or real(x, in_half=in_half),
    )
    monkeypatch.setattr(
        kronecker, "out_of_basis", lambda x, g, a: found.append((g.dtype, a.dtype)) or back(x, g, a)
    )
    model = nn.Sequential(nn.Linear(80, outputs))
    opt = KFACAdam(model, lr=0.01, orthogonal=True)
    model(torch.randn(16, 80)).square().mean().backward()
    opt.step()
    assert found == [half, (torch.bfloat16,) * 2 if half else (torch.float32,) * 2]


RULE = AdamRule(None, nesterov=False, orthogonal=False)


def rotate(state: dict[str, Tensor], slots: slice, *rotations: Tensor | None) -> None:
    applied: Any = SimpleNamespace(group_of={None: SimpleNamespace(tensors=state)})
    layer: Any = None
    RULE.rotate(applied, layer, slots, rotations)


@given(sizes, sizes, seeds, st.booleans(), st.booleans())
@turning
def test_a_turn_keeps_what_variances_have_in_common(g, a, seed, with_g, with_a):
    state = fresh_moments(g, a, seed)
    before = copy.deepcopy(state)
    turns = [
        orthonormal(n, seed + k) if chosen else None
        for k, (n, chosen) in enumerate(((g, with_g), (a, with_a)))
    ]
    rotate(state, MIDDLE, *turns)
    assert (state["exp_avg_sq"] >= 0).all()
    for name, power in (("exp_avg", 2), ("exp_avg_sq", 1)):
        sums = [(s[name] ** power).sum((1, 2)) for s in (state, before)]
        torch.testing.assert_close(*sums)
    # A side without a turn keeps its own sums.
    for chosen, dim in ((with_g, 1), (with_a, 2)):
        if not chosen:
            torch.testing.assert_close(
                state["exp_avg_sq"].sum(3 - dim), before["exp_avg_sq"].sum(3 - dim)
            )
    # Blocks that are not turned, and the count, have no part in it.
    for name in MOMENTS:
        outside = slice(None) if name == "adam_steps" else [0, 3]
        assert torch.equal(state[name][outside], before[name][outside])
    back = [None if turn is None else turn.mT for turn in turns]
    rotate(state, MIDDLE, *back)
    torch.testing.assert_close(state["exp_avg"], before["exp_avg"])


@given(sizes, sizes, seeds)
@turning
def test_the_second_moment_turns_as_the_diagonal_of_a_matrix(g, a, seed):
    state = fresh_moments(g, a, seed)
    first, second = state["exp_avg"][MIDDLE].clone(), state["exp_avg_sq"][MIDDLE].clone()
    turns = orthonormal(g, seed), orthonormal(a, seed + 1)
    rotate(state, MIDDLE, *turns)
    for block, (turn_g, turn_a) in enumerate(zip(*turns, strict=True)):
        whole = torch.kron(turn_g, turn_a)
        mean = (whole @ first[block].flatten()).view(g, a)
        variance = (whole @ second[block].flatten().diag() @ whole.T).diagonal().view(g, a)
        torch.testing.assert_close(state["exp_avg"][1 + block], mean)
        torch.testing.assert_close(state["exp_avg_sq"][1 + block], variance)


@given(st.permutations(range(4)), st.permutations(range(3)), seeds)
@turning
def test_a_turn_by_a_permutation_permutes(rows, columns, seed):
    state = fresh_moments(4, 3, seed)
    before = copy.deepcopy(state)
    # Row i of the new basis is row rows[i] of the old one, whatever its sign.
    signs = [torch.sign(normal(n, seed=seed)) for n in (4, 3)]
    turn_g, turn_a = (
        (sign[:, None] * torch.eye(len(order), dtype=torch.float64)[list(order)]).expand(2, -1, -1)
        for order, sign in zip((rows, columns), signs, strict=True)
    )
    rotate(state, MIDDLE, turn_g, turn_a)
    moved = {name: before[name][MIDDLE][:, list(rows)][:, :, list(columns)] for name in MOMENTS[:2]}
    assert torch.equal(state["exp_avg_sq"][MIDDLE], moved["exp_avg_sq"])
    mixed = signs[0][:, None] * signs[1] * moved["exp_avg"]
    assert torch.equal(state["exp_avg"][MIDDLE], mixed)


def test_nothing_turns_without_a_turn():
    state = fresh_moments(3, 2, 0)
    before = copy.deepcopy(state)
    rotate(state, slice(None), None, None)
    assert_same(state, before)


# ---- layer kinds ----


class Around(nn.Module):
    """A layer with a loss that is not linear in what it gives."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        attends = isinstance(self.layer, nn.MultiheadAttention)
        out = self.layer(x, x, x, need_weights=False)[0] if attends else self.layer(x)
        mix = torch.linspace(-1.0, 1.3, out.numel(), dtype=torch.float64).view(out.shape)
        return torch.sum(torch.sin(out + mix) * (1 + mix))


def words(seed: int) -> Tensor:
    return torch.randint(7, (9, 2), generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda seed: normal(*shape, seed=seed)


def projections(layer: nn.Module, weight: Tensor, bias: Tensor) -> Tensor:
    """Three blocks in one packed weight."""
    return torch.cat([weight.unflatten(0, (3, -1)), bias.view(3, -1, 1)], dim=2)


Parts = dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]]
OWN: Parts = {"layer": (ref.matrix, ("weight", "bias"))}
ATTENTION: Parts = {
    "layer.in_proj": (projections, ("in_proj_weight", "in_proj_bias")),
    "layer.out_proj": (ref.matrix, ("out_proj.weight", "out_proj.bias")),
}
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], Parts]] = {
    "linear": (lambda: nn.Linear(4, 3), numbers(9, 2, 4), OWN),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), numbers(9, 4), OWN),
    "conv": (lambda: nn.Conv2d(2, 3, 2), numbers(9, 2, 4, 4), OWN),
    "grouped conv": (lambda: nn.Conv2d(4, 6, 2, groups=2), numbers(9, 4, 4, 4), OWN),
    "embedding": (lambda: nn.Embedding(7, 4), words, OWN),
    "layer norm": (lambda: nn.LayerNorm(4), numbers(9, 3, 4), OWN),
    "batch norm": (lambda: nn.BatchNorm2d(3), numbers(9, 3, 2, 2), OWN),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        numbers(9, 3, 4),
        ATTENTION,
    ),
}
DIAGONAL = {("embedding", "a")}


def matrices(model: Around, parts: Parts, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, (matrix, keys) in parts.items():
        module = model.layer.out_proj if name.endswith("out_proj") else model.layer
        found[name] = matrix(module, *(tensors.get(f"layer.{key}") for key in keys))
    return found


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_layer_kind(kind, orthogonal):
    """Two steps in one basis, which is one of the factors' eigenvectors.

    Matrices are made orthogonal, each block for itself; no vectors, and no table's rows.
    """
    make, inputs, parts = KINDS[kind]
    torch.manual_seed(2)
    model = Around(make()).double()
    with torch.no_grad():
        for p in model.parameters():  # a fresh norm's 1 and 0 would hide a mistaken scale
            p.add_(0.3 * torch.randn_like(p))
    eps, (beta1, beta2) = 1e-3, (0.8, 0.9)
    how = {"moments": "eigenbasis", "orthogonal": orthogonal}
    opt = KFACAdam(model, lr=1.0, eps=eps, betas=(beta1, beta2), **how)
    kfac = opt.preconditioner
    assert set(kfac.layers) == set(parts)
    projected: dict[str, list[Tensor]] = {name: [] for name in parts}
    for i in range(2):
        opt.zero_grad()
        model(inputs(i)).backward()
        gradients = matrices(model, parts, ref.gradients_of(model))
        steps = matrices(model, parts, ref.take_step(opt, model))
        for name, gradient in gradients.items():
            q_g, q_a = bases_of(opt, name, kind)
            projected[name].append(q_g.mT @ gradient @ q_a)
            first = second = torch.zeros_like(gradient)
            for p in projected[name]:
                first = beta1 * first + (1 - beta1) * p
                second = beta2 * second + (1 - beta2) * p**2
            first, second = first / (1 - beta1 ** (i + 1)), second / (1 - beta2 ** (i + 1))
            divisors = second.sqrt() + eps
            expected = q_g @ (first / divisors) @ q_a.mT
            vectors = 1 in expected.shape[1:]
            if orthogonal and not vectors and not {(kind, "a"), (kind, "g")} & DIAGONAL:
                momenta = q_g @ first @ q_a.mT
                wanted = map(sized, map(evened, expected), momenta, divisors, itertools.repeat(0.2))
                ref.assert_close(steps[name], torch.stack(list(wanted)), what=name)
                continue
            ref.assert_close(steps[name], expected, what=f"{name}, step {i}")
            if i == 0:
                signs = projected[name][0] / (projected[name][0].abs() + eps)
                ref.assert_close(expected, q_g @ signs @ q_a.mT, what=name)


def bases_of(opt: Any, name: str, kind: str) -> tuple[Tensor, Tensor]:
    kfac = opt.preconditioner
    layer = kfac.layers[name]
    found = []
    for side, average_ in zip("ga", reversed(kfac.factors(name)), strict=True):
        factor = kfac.applied.by_key[layer, side]
        assert factor.key.diagonal == ((kind, side) in DIAGONAL)
        size = torch.eye(factor.key.size, dtype=torch.float64).expand(layer.blocks, -1, -1)
        if factor.key.diagonal:
            found.append(size)
            continue
        vectors = factor["vectors"]
        ref.assert_close(vectors.mT @ vectors, size, what=f"{name}: {side} is not orthogonal")
        if opt.preconditioner.steps == 1:  # later, the average has moved on
            inside = vectors.mT @ average_ @ vectors
            ref.assert_close(inside, torch.diag_embed(inside.diagonal(0, 1, 2)), what=name)
        found.append(vectors)
    return found[0], found[1]


# ---- several ranks ----


class Spread(NamedTuple):
    parameters: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    memory: dict[str, int]
    expected_memory: dict[str, int]


def spread(plan: Plan) -> Spread:
    """A rank's part of a run."""
    model, opt = train_share(plan)
    kfac, rank = opt.preconditioner, dist.get_rank()
    return Spread(values(model), moments(opt), kfac.memory_usage(), kfac.account.memory()[rank])


def plan_of(world: int, name: str, where: dict[str, Any], optimizer: str = "adam") -> Plan:
    return Plan(
        even(world, ROWS // world),
        name,
        optimizer,
        options=EIGENBASIS,
        spread=where,
        steps=INTERVAL + 2,
    )


@functools.lru_cache
def alone(world: int, name: str, optimizer: str) -> dict[str, Tensor]:
    return train_alone(plan_of(world, name, {}, optimizer)).parameters


WHERE: dict[str, tuple[int, dict[str, Any]]] = {
    "layer-wise 2": (2, {"assignment": "layer-wise"}),
    "layer-wise 3": (3, {"assignment": "layer-wise"}),
    "opt 2": (2, {"assignment": "opt"}),
    "opt 3": (3, {"assignment": "opt"}),
    "hybrid 4": (4, {"assignment": "hybrid", "grad_worker_fraction": 0.5}),
    "parted 4": (4, {"grad_worker_fraction": 0.5, "colocate_factors": False}),
    "opt 3, a layer at a time": (3, {"assignment": "opt", "bucket_cap_mb": 1e-5}),
}


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *((where, "images") for where in WHERE),
        ("layer-wise 2", "tokens"),
        ("hybrid 4", "tokens"),
    ],
)
def test_ranks_take_the_steps_of_one_process(where, name):
    world, options = WHERE[where]
    ranks = run(world, spread, plan_of(world, name, options))
    assert_alike([rank.parameters for rank in ranks])
    assert error(ranks[0].parameters, alone(world, name, "adam")) < 1e-9
    check_moments(ranks, 1 if "opt" in where else world if "layer" in where else world // 2)


def check_moments(ranks: list[Spread], columns: int) -> None:
    """Their bytes are those that the account tells, and each column has its own layers'."""
    whole = {name for rank in ranks for name in rank.moments}
    sizes = []
    for rank in ranks:
        expected = {kind: size for kind, size in rank.expected_memory.items() if size}
        assert {kind: rank.memory[kind] for kind in expected} == expected
        sizes.append(rank.memory["moments"])
    for first, second in itertools.combinations(range(len(ranks)), 2):
        one, other = ranks[first].moments, ranks[second].moments
        if (second - first) % columns:
            assert not one.keys() & other.keys()
        else:
            assert_same(one, other)
    assert set().union(*(rank.moments for rank in ranks[:columns])) == whole
    assert max(sizes) < 1.7 * sum(sizes[:columns]) / columns


def first_moments(opt: Any) -> dict[str, Tensor]:
    """As they are outside of the bases."""
    found = {}
    for name, kept in moments(opt).items():
        layer = opt.preconditioner.layers[name]
        sides = [opt.preconditioner.applied.by_key[layer, side] for side in "ga"]
        assert not any(factor.key.diagonal for factor in sides)
        g, a = (factor["vectors"] for factor in sides)
        found[name] = g @ kept["exp_avg"] @ a.mT
    return found


@pytest.mark.parametrize("at", [1, 2])
def test_a_failure_between_layers_whose_moments_turn(at):
    """Bases of which moments have not turned are back then, and no others."""
    model, opt = pair(bucket_cap_mb=1e-5)  # one layer at a time
    learn(model, opt, range(INTERVAL))
    before, calls, turn = first_moments(opt), itertools.count(1), AdamRule.rotate

    def fails(*args: Any) -> None:
        if next(calls) == at:
            raise RuntimeError("no more")
        turn(*args)

    with mock.patch.object(AdamRule, "rotate", fails), pytest.raises(RuntimeError, match="no mo"):
        learn(model, opt, [INTERVAL])
    assert_near(first_moments(opt), before, 1e-12, 1e-14)
    learn(model, opt, range(INTERVAL, 2 * INTERVAL))


def held_bases(name: str) -> list[tuple[set[str], set[str], set[str]]]:
    """When moments turn: of which layers, of whose bases there are copies, which it owns."""
    model = network(name)
    opt = build(plan_of(2, name, {}), model, model, bucket_cap_mb=1e-5)
    seen, rotate = [], OlderBases.rotate

    def rotated(older: OlderBases, layers: Any) -> None:
        kept = {layer.name for layer, _ in older._bases}
        own = {layer.name for layer, _ in opt.preconditioner.owned.by_key}
        seen.append(({layer.name for layer in layers}, kept, own))
        rotate(older, layers)

    with mock.patch.object(OlderBases, "rotate", rotated):
        for step in range(INTERVAL + 1):
            x, y = batch(name, step, ROWS)
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    return seen[-len(opt.preconditioner.layers) :]


def test_older_bases_are_held_of_a_few_layers_at_a_time():
    for seen in run(2, held_bases, "images"):
        done: set[str] = set()
        for layers, kept, own in seen:
            assert len(layers) == 1 and kept - own <= layers
            assert not kept & done  # what has turned is let go
            done |= layers
        assert len(done) == len(seen) and any(kept & layers for layers, kept, _ in seen)


@pytest.mark.parametrize("where", ["layer-wise 2", "opt 3"])
def test_ranks_that_step_with_lamb(where):
    """The trust ratio and the limit on the norm are of whole tensors, wherever they come from."""
    world, options = WHERE[where]
    ranks = run(world, spread, plan_of(world, "images", options, "lamb"))
    assert_alike([rank.parameters for rank in ranks])
    assert error(ranks[0].parameters, alone(world, "images", "lamb")) < 1e-9


@pytest.mark.parametrize("where", ["layer-wise 2", "hybrid 4"])
def test_ranks_with_orthogonal_directions(where):
    world, spread_ = WHERE[where]
    options = {**EIGENBASIS, "nesterov": True, "orthogonal": True}
    plan = dataclasses.replace(plan_of(world, "images", spread_), options=options)
    ranks = run(world, spread, plan)
    assert_alike([rank.parameters for rank in ranks])
    one = train_alone(dataclasses.replace(plan, spread={})).parameters
    assert error(ranks[0].parameters, one) < 1e-9
    assert error(one, alone(world, "images", "adam")) > 1e-3


def test_one_process_has_a_rank_s_moments_in_sum():
    """The memory of moments under "layer-wise" is that of one process, spread."""
    world = 3
    plan = plan_of(world, "chain", {"assignment": "layer-wise"})
    ranks = run(world, spread, plan)
    model = network("chain")
    opt = build(plan, model, model)
    usage = opt.preconditioner.memory_usage()
    gradients = sum(p.numel() for p in model.parameters()) * 8
    assert usage["moments"] == 2 * gradients == opt.preconditioner.account.memory()[0]["moments"]
    assert sum(rank.memory["moments"] for rank in ranks) == usage["moments"]
    assert all(0 < rank.memory["moments"] < 0.5 * usage["moments"] for rank in ranks)


# ---- a step without a gradient ----


class Steps(NamedTuple):
    parameters: dict[str, Tensor]
    history: list[dict[str, dict[str, Tensor]]]


def goes_without(options: dict[str, Any]) -> Steps:
    """On any number of ranks, all with the same batch: gradients are then their own mean."""
    model, opt = pair(**options)
    history = []
    for i in range(12):
        learn(model, opt, [i], at_times)
        history.append(moments(opt))
    return Steps(values(model), history)


def check_pause(history: list[dict[str, dict[str, Tensor]]], name: str = "branch") -> None:
    for i in range(1, 12):
        before, after = history[i - 1].get(name), history[i].get(name)
        if before is None or after is None:
            continue
        if at_times(i):
            assert int(after["adam_steps"]) == int(before["adam_steps"]) + 1
            assert not torch.equal(after["exp_avg"], before["exp_avg"])
        elif i % INTERVAL:
            assert_same(after, before)
        else:  # a refresh: they turn, and that is all
            assert_near(after["exp_avg"].norm(), before["exp_avg"].norm())
            assert_near(after["exp_avg_sq"].sum(), before["exp_avg_sq"].sum())
            assert_same(after["adam_steps"], before["adam_steps"])
            assert not torch.equal(after["exp_avg"], before["exp_avg"])


@pytest.mark.parametrize("where", ["layer-wise", "opt"])
def test_a_layer_without_a_gradient_waits(where):
    single = goes_without({})
    check_pause(single.history)
    assert int(single.history[-1]["branch"]["adam_steps"]) == sum(map(at_times, range(12)))
    assert int(single.history[-1]["first"]["adam_steps"]) == 12
    ranks = run(2, goes_without, {"assignment": where})
    assert_alike([rank.parameters for rank in ranks])
    assert error(ranks[0].parameters, single.parameters) < 1e-9
    keepers = 0
    for rank in ranks:
        keepers += "branch" in rank.history[-1]
        check_pause(rank.history)
    assert keepers == (1 if where == "layer-wise" else 2)


# ---- fully_shard ----


@pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")
@pytest.mark.filterwarnings("ignore:.* of no use to moments=")
@pytest.mark.parametrize(
    ("parts", "optimizer", "options"),
    [
        (each, "adam", {}),
        (each, "adam", {"lr": torch.tensor(0.005), "weight_decay": 0.1, "maximize": True}),
        (each, "lamb", {}),
        (some, "adam", {"weight_decay": 0.1, "maximize": True}),
        (each, "adam", {"orthogonal": True}),
    ],
)
def test_sharded_parameters(parts, optimizer, options):
    check_sharded(Sharding((2,), parts, optimizer, {**options, "moments": "eigenbasis"}))


# ---- checkpoints ----


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def loaded(
    cls: Any,
    model: nn.Module,
    state: dict[str, Any],
    *,
    warns: bool = False,
    moved: bool = False,
    **options: Any,
) -> tuple[Net, Any]:
    other, fresh = pair(cls, **options)
    other.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        fresh.load_state_dict(state)
    # It must warn where K-FAC's state is not in it, or not its moments, and nowhere else.
    texts = [str(w.message) for w in record]
    if moved:
        (text,) = texts
        assert text.startswith("the moments of 'first', 'branch', 'head'")
        assert "are missing in this state, or of another kind than this optimizer's" in text
        assert ", and begin at zero; for a run to go on, build it with the class and the" in text
        return other, fresh
    assert [text[:40] for text in texts] == ["the checkpoint holds no K-FAC factors of"] * warns
    assert all(text.endswith(", and their moments begin at zero") for text in texts)
    return other, fresh


@every_base
@pytest.mark.parametrize("stop", [1, 6])
def test_a_state_dict_goes_on_bit_for_bit(cls, stop):
    """From the middle of an interval, with a layer that is one step behind."""
    model, opt = pair(cls)
    learn(model, opt, range(stop), at_times)
    other, fresh = loaded(cls, model, through_a_file(opt.state_dict()))
    assert_same(moments(fresh), moments(opt))
    for own, steps in ((model, opt), (other, fresh)):
        learn(own, steps, range(stop, 12), at_times)
    assert_same(other, model)
    assert_same(moments(fresh), moments(opt))
    assert_same(fresh.state_dict(), opt.state_dict())


@every_base
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_bit_for_bit(cls, copied):
    model, opt = pair(cls)
    learn(model, opt, range(6), at_times)
    other, twin = copied((model, opt))
    assert_same(moments(twin), moments(opt))
    learn(model, opt, range(6, 12))
    before = moments(twin)
    assert before["first"]["adam_steps"] == 6  # it shares no tensor
    learn(other, twin, range(6, 12))
    assert_same(other, model)


def consolidated(options: dict[str, Any]) -> tuple[Any, Any]:
    """Rank 1's state after 6 steps, gathered; and its parameters after those to come."""
    model, opt = pair(assignment="layer-wise", **options)
    learn(model, opt, range(6))
    opt.consolidate_state_dict(to=1)
    state = copy.deepcopy((model.state_dict(), opt.state_dict())) if dist.get_rank() else None
    learn(model, opt, range(6, 12))
    return state, values(model)


@pytest.mark.filterwarnings("ignore:state_dict")
def test_a_consolidated_state_goes_on_alone():
    _, (state, expected) = run(2, consolidated, {})
    straight, opt = pair()
    learn(straight, opt, range(6))
    straight.load_state_dict(state[0])  # bit for bit where the ranks were
    other, fresh = loaded(KFACAdam, straight, state[1])
    assert_near(moments(fresh), moments(opt))
    learn(other, fresh, range(6, 12))
    assert_near(other, expected)


def resumes(state: tuple[Any, Any]) -> tuple[dict[str, Tensor], int]:
    model, opt = pair(assignment="layer-wise")
    model.load_state_dict(state[0])
    opt.load_state_dict(state[1])
    learn(model, opt, range(6, 12))
    return values(model), len(moments(opt))


@pytest.mark.parametrize("world", [2, 3])
def test_a_state_of_one_process_goes_on_at_ranks(world):
    model, opt = pair()
    learn(model, opt, range(6))
    state = copy.deepcopy((model.state_dict(), opt.state_dict()))
    learn(model, opt, range(6, 12))
    results = run(world, resumes, state)
    assert sum(layers for _, layers in results) == len(LAYERS)
    for parameters, _ in results:
        assert_near(parameters, values(model))


def saves(path: str) -> tuple[Any, dict[str, Tensor]]:
    model, opt = pair(assignment="layer-wise")
    learn(model, opt, range(6))
    state = copy.deepcopy(model.state_dict())
    dcp.save({"optimizer": get_optimizer_state_dict(model, opt)}, checkpoint_id=path)
    learn(model, opt, range(6, 12))
    return state, values(model)


def loads(path: str, state: Any) -> dict[str, Tensor]:
    model, opt = pair(assignment="layer-wise")
    model.load_state_dict(state)
    found = {"optimizer": get_optimizer_state_dict(model, opt)}
    dcp.load(found, checkpoint_id=path)
    set_optimizer_state_dict(model, opt, found["optimizer"])
    learn(model, opt, range(6, 12))
    return values(model)


@pytest.mark.filterwarnings("ignore:state_dict")
def test_distributed_checkpoints(tmp_path):
    """Into a fresh optimizer, of which torch takes the names of what it is to load."""
    (state, expected), _ = run(2, saves, str(tmp_path / "state"))
    for parameters in run(2, loads, str(tmp_path / "state"), state):
        assert_same(parameters, expected)


def check_goes_on(model: nn.Module, opt: Any, known: dict[str, Tensor]) -> None:
    """Training goes on from where it is, with finite weights."""
    assert_same(values(model), known)
    learn(model, opt, range(6, 12))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    moved = [(known[name] - p.detach()).abs().max() for name, p in model.named_parameters()]
    assert all(0 < distance < 0.2 for distance in moved)  # six steps of 0.01, at most a few each


@every_base
def test_states_of_other_moments_load(cls):
    """From the parameters' moments to the basis, and back: the other's are estimated anew."""
    for saved, here in itertools.permutations(("parameters", "eigenbasis")):
        model, opt = pair(cls, moments=saved)
        learn(model, opt, range(6))
        other, fresh = loaded(
            cls, model, through_a_file(opt.state_dict()), moved=True, moments=here
        )
        if here == "eigenbasis":
            assert all(not kept["exp_avg"].any() for kept in moments(fresh).values())
        check_goes_on(other, fresh, values(model))
        if here == "eigenbasis":
            assert set(counts(fresh).values()) == {6}


def test_layers_without_factors_are_named_once():
    """As in another rank's share, and not for their moments, too."""
    model, opt = pair(KFACAdam)
    learn(model, opt, range(6))
    state = through_a_file(opt.state_dict())
    for entry in state["state"].values():
        for key in [
            k for k in entry if k.startswith("kfac_") and not k.endswith(("step", "status"))
        ]:
            del entry[key]
    loaded(KFACAdam, model, state, warns=True)


@every_base
def test_a_state_of_the_plain_base_loads(cls):
    model = net()
    plain = cls._base(model.parameters(), lr=0.01)
    learn(model, plain, range(6))
    other, fresh = loaded(cls, model, through_a_file(plain.state_dict()), warns=True)
    slopes = fresh.state[other.slopes.weight]["exp_avg"]
    assert_same(slopes, plain.state[model.slopes.weight]["exp_avg"])
    check_goes_on(other, fresh, values(model))
    assert set(counts(fresh).values()) == {6}


@every_base
def test_a_k_that_is_off_in_all_steps_alike_changes_nothing(cls):
    model, opt = pair(cls)
    other, told = pair(cls, loss_terms=1000)
    for own, optimizer in ((model, opt), (other, told)):
        learn(own, optimizer, range(6))
    assert opt.preconditioner.loss_terms != 1000
    # Eigenvectors of G are those of any multiple of it, but for rounding.
    assert_near(values(other), values(model), 1e-4)


# ---- a layer that loses its state ----


@every_base
@pytest.mark.parametrize("name", ["branch", "head"])
def test_a_forgotten_layer_goes_to_the_base_and_comes_back(cls, name):
    """With a forward pass that leaves no statistics, the base has to step it for once."""
    model, opt = pair(cls)
    learn(model, opt, range(6))
    kfac, weight = opt.preconditioner, model.get_submodule(name).weight
    assert "exp_avg" not in opt.state[weight]
    for _ in range(2):  # what the base has made of it must be no trouble the next time
        before, steps = moments(opt), counts(opt)
        kfac.reset(kfac.layers[name])
        place = weight.detach().clone()
        with kfac.paused(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            learn(model, opt, [6])
        assert not torch.equal(weight, place)
        assert "exp_avg" in opt.state[weight]
        assert_same(moments(opt)[name], before[name])  # not in use
        learn(model, opt, range(7, 10))
        assert counts(opt) == {layer: 3 if layer == name else n + 4 for layer, n in steps.items()}
        assert all(torch.isfinite(p).all() for p in model.parameters())
        # A checkpoint and a copy of such a mixture go on, too.
        other, fresh = loaded(cls, model, through_a_file(opt.state_dict()))
        twin, copied = copy.deepcopy((model, opt))
        for own, own_opt in ((model, opt), (other, fresh), (twin, copied)):
            learn(own, own_opt, [10, 11])
        assert_same(other, model)
        assert_same(twin, model)


class Separate(nn.Module):
    """Three layers in one module, with parts of one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.layer(q, k, v, need_weights=False)[0].square().sum()


def test_a_bias_of_which_a_part_is_forgotten_goes_to_the_base():
    """A part of it that is a direction and a part that is a gradient make neither."""
    torch.manual_seed(0)
    model = Separate().double()
    opt = KFACAdam(model, lr=0.01, eps=1e-3, weight_decay=0.1, **EIGENBASIS)
    kfac = opt.preconditioner
    inputs = [normal(9, 2, n, seed=n) for n in (4, 3, 5)]
    for i in range(6):
        opt.zero_grad()
        with kfac.paused() if i == 4 else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(*inputs).backward()
            if i == 4:
                kfac.reset(kfac.layers["layer.q_proj"])
            bias = model.layer.in_proj_bias
            twin = nn.Parameter(bias.detach().clone())
            twin.grad = bias.grad.clone()
            opt.step()
        torch.optim.Adam([twin], lr=0.01, eps=1e-3, weight_decay=0.1).step()
        assert torch.equal(bias, twin) == (i == 4)


@every_base
def test_frozen_and_unfrozen(cls):
    model, opt = pair(cls)
    learn(model, opt, range(5))
    model.branch.requires_grad_(False)
    frozen = values(model.branch)
    kept = moments(opt)["branch"]
    learn(model, opt, range(5, 8))
    assert_same(values(model.branch), frozen)
    model.branch.requires_grad_(True)
    learn(model, opt, range(8, 10))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    # Frozen as a whole it had no gradient, and waited.
    assert counts(opt)["branch"] == int(kept["adam_steps"]) + 2


@every_base
def test_a_frozen_bias_starts_its_layer_anew(cls):
    model, opt = pair(cls)
    learn(model, opt, range(5))
    model.first.bias.requires_grad_(False)
    learn(model, opt, range(5, 7))
    assert counts(opt) == {"first": 2, "branch": 7, "head": 7}
    assert moments(opt)["first"]["exp_avg"].shape == (1, 5, 5)
    bias = model.first.bias.detach().clone()
    model.first.bias.requires_grad_(True)
    learn(model, opt, range(7, 10))
    assert counts(opt) == {"first": 3, "branch": 10, "head": 10}
    assert moments(opt)["first"]["exp_avg"].shape == (1, 5, 6)
    assert not torch.equal(model.first.bias, bias)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_another_dtype_keeps_the_moments():
    model = net()
    # The base would not step a parameter whose state has another dtype.
    model.slopes.requires_grad_(False)
    opt = KFACAdam(model, lr=0.01, **EIGENBASIS)
    learn(model, opt, range(6))
    kept = moments(opt)
    model.float()
    learn(model, opt, [6])
    assert set(counts(opt).values()) == {7}
    for name, before in kept.items():
        after = moments(opt)[name]
        assert after["exp_avg"].dtype == after["exp_avg_sq"].dtype == torch.float32
        # What has come in one step, beside what was there.
        torch.testing.assert_close(
            after["exp_avg"].double(), before["exp_avg"] * 0.9, rtol=0, atol=0.1
        )
        assert (after["exp_avg_sq"] >= 0.99 * before["exp_avg_sq"]).all()


# ---- errors ----


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        make()
    return str(caught.value)


def in_groups(model: nn.Module, **other: Any) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("first.bias")]
    rest = [p for name, p in named.items() if not name.endswith("first.bias")]
    return [{"params": rest}, {"params": biases, **other}]


@pytest.mark.parametrize(
    ("cls", "options", "words_"),
    [
        (with_kfac(torch.optim.SGD), {}, ["moments", '"eigenbasis"', "SGD", 'moments="param']),
        (with_kfac(torch.optim.RMSprop), {}, ["moments", '"eigenbasis"', "RMSprop", 'moments="p']),
        (with_kfac(torch.optim.NAdam), {}, ["moments", '"eigenbasis"', "NAdam", 'moments="param']),
        (KFACAdam, {"amsgrad": True}, ["amsgrad", "True", 'moments="parameters"']),
        (KFACAdamW, {"amsgrad": True}, ["amsgrad", "True", 'moments="parameters"']),
        (
            KFACAdam,
            {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "capturable": True},
            ["betas", "0.99", "numbers"],
        ),
        (
            KFACAdam,
            {"compute_method": "inverse"},
            ["compute_method", "eigenbasis", "leave one of the two out"],
        ),
        (
            KFACAdam,
            {"compute_eigenvalue_outer_product": True},
            ["compute_eigenvalue_outer_product", "eigenbasis", "leave one of the two out"],
        ),
        (KFACAdam, {"moments": "typo"}, ["moments", "'typo'", "eigenbasis", "parameters"]),
    ],
)
def test_what_cannot_work_is_refused(cls, options, words_):
    text = refusal(lambda: pair(cls, **options))
    assert text.startswith(f"Invalid {words_[0]}")
    for word in words_:
        assert word in text


@pytest.mark.parametrize(
    ("cls", "other", "value"),
    [
        (KFACAdam, {"betas": (0.5, 0.6)}, "0.5, 0.6"),
        (KFACAdam, {"eps": 0.125}, "0.125"),
        (KFACLAMB, {"bias_correction": False}, "bias_correction"),
    ],
)
def test_one_layer_has_one_setting(cls, other, value):
    """It is known when the optimizer is built, not in the first step of some rank."""
    model = net()
    make = functools.partial(cls, in_groups(model, **other), model=model, lr=0.01, **EIGENBASIS)
    text = refusal(make)
    assert text.startswith("Invalid ") and next(iter(other)) in text
    for word in ("'first'", "parameter groups", value):
        assert word in text


def differs() -> str:
    model = net()
    groups = in_groups(model, betas=(0.5, 0.6))

    def make() -> None:
        opt = KFACAdam(groups, model=model, lr=0.01, assignment="layer-wise", **EIGENBASIS)
        learn(model, opt, [0])

    return refusal(make)


def test_all_ranks_refuse_what_one_layer_cannot_have():
    for text in run(3, differs):
        assert "'first'" in text


@pytest.mark.parametrize(
    ("other", "value"),
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"betas": (torch.tensor(0.5), torch.tensor(0.9))}, "betas"),
        ({"betas": (0.5, 0.9, 0.9)}, "betas"),
    ],
)
def test_later_groups_are_refused_alike(other, value):
    model = net()
    parts = [[*model.first.parameters(), *model.slopes.parameters()], [*model.head.parameters()]]
    opt = KFACAdam(parts[0], model=model, lr=0.01, **EIGENBASIS)
    assert refusal(lambda: opt.add_param_group({"params": parts[1], **other})).startswith(
        f"Invalid {value}"
    )
    learn(model, opt, range(2))  # what is refused leaves nothing
    assert len(opt.param_groups) == 1


# ---- a gradient scaler ----


@every_base
def test_an_overflow_leaves_moments_alone(cls):
    model, opt = pair(cls)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    opt.preconditioner.grad_scaler = scaler
    plain, straight = pair(cls)
    for i in range(9):
        opt.zero_grad()
        backward(model, i, scale=scaler.scale)
        overflow = i in (3, 4)  # one of them due for a refresh
        before, count = moments(opt), opt.preconditioner.steps
        if overflow:
            model.head.weight.grad[0, 0] = torch.inf
        else:
            learn(plain, straight, [i])
        scaler.step(opt)
        scaler.update()
        if overflow:
            assert_same(moments(opt), before)
            assert opt.preconditioner.steps == count
        else:
            assert opt.preconditioner.steps == count + 1
    assert set(counts(opt).values()) == {7}
    assert_near(model, plain, rtol=1e-9)


def test_a_schedule_that_starts_at_zero_is_no_trouble(recwarn):
    pair(lr=0.0)  # there is no clip whose α would be 0
    assert not [w for w in recwarn if "KL clip" in str(w.message)]
