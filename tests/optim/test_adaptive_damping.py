"""Damping that adapts: what the quadratic model foresees, and what follows from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from kaisa_optim import KFACLAMB, KFACSGD, AdaptiveDamping, KFACParamScheduler, with_kfac
from kaisa_optim.optim.scheduler import decay_at
from tests.support.cluster import Plan, average, build, even, micro_batches
from tests.support.cluster import network as network_of
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import assert_same, backward, batch, network, values
from tests.support.watch import matrix_of

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")

KFACAdamW = with_kfac(torch.optim.AdamW)


def net() -> nn.Sequential:
    """Blocks, a parameter without a layer, a frozen bias."""
    torch.manual_seed(3)
    layers = [nn.Conv2d(2, 4, 2, groups=2), nn.PReLU(), nn.Flatten(), nn.Linear(16, 5)]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(5, 3)).double()
    model[3].bias.requires_grad_(False)
    return model


def images(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(6, 2, 3, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (6,), generator=generator)


def dense(factor: Tensor) -> Tensor:
    return torch.diag_embed(factor) if factor.dim() == 2 else factor


def slope_and_curvature(
    model: nn.Module, before: dict[str, Tensor], factors: dict[str, tuple[Tensor, Tensor]]
) -> tuple[float, float]:
    """∇ᵀδ over all parameters and δᵀ(G ⊗ A)δ over the layers, by one dense matrix a block."""
    delta = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    trained = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
    slope = sum(float((p.grad * delta[name]).sum()) for name, p in trained)
    curvature = 0.0
    for name, (a, g) in factors.items():
        change = matrix_of(
            model.get_submodule(name), delta[f"{name}.weight"], delta.get(f"{name}.bias")
        )
        for one_a, one_g, one in zip(dense(a), dense(g), change, strict=True):
            curvature += float(one.flatten() @ torch.kron(one_g, one_a) @ one.flatten())
    return slope, curvature


KINDS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "plain": (KFACSGD, {"lr": 0.1, "kl_clip": None}),
    "momentum": (KFACSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "kl_clip": 1e-3}),
    "grafting": (
        KFACSGD,
        {"lr": 0.3, "grafting": True, "kl_clip": None, "warmup_steps": 3, "early_refreshes": [5]},
    ),
    "diagonal": (KFACSGD, {"lr": 0.1, "kl_clip": None, "max_factor_size": 4}),
    "adamw": (KFACAdamW, {"lr": 0.01}),
    "lamb": (KFACLAMB, {"lr": 0.05}),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_ratio_is_that_of_the_dense_model(kind):
    cls, options = KINDS[kind]
    model = net()
    intervals = {"factor_update_steps": 1, "inv_update_steps": 4, "staggered": False}
    opt = cls(model, **options, **intervals, damping=0.1)
    adaptive = AdaptiveDamping(opt, interval=2)
    kfac = opt.preconditioner
    used: dict[str, tuple[Tensor, Tensor]] = {}
    curved = False
    for i in range(8):
        x, y = images(i)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        before, damping = values(model), opt.param_groups[0]["damping"]
        opt.step()
        if i % 4 == 0 or i in options.get("early_refreshes", ()):
            used = {n: tuple(f.clone() for f in kfac.factors(n)) for n in kfac.layers}
        adaptive.step(loss, lambda x=x, y=y: F.cross_entropy(model(x), y))
        if i % 2 == 0:
            assert opt.param_groups[0]["damping"] == damping
            continue
        slope, curvature = slope_and_curvature(model, before, used)
        with torch.no_grad():
            change = float(F.cross_entropy(model(x), y) - loss)
        foreseen = slope + curvature / 2
        if foreseen < 0:
            assert adaptive.ratio == pytest.approx(change / foreseen, rel=1e-7)
        else:
            assert math.isnan(adaptive.ratio)
        curved = curved or curvature > 1e-3 * abs(slope)
    assert curved


def test_a_plain_step_has_the_model_of_its_own_direction():
    """δ = -α v with v = (F + γI)⁻¹ ∇: the change is -α⟨v, ∇⟩ + ½ α² (⟨v, ∇⟩ - γ‖v‖²)."""
    lr, damping = 0.5, 0.03
    model = network()
    opt = KFACSGD(model, lr=lr, damping=damping, kl_clip=None)
    adaptive = AdaptiveDamping(opt, interval=1)
    before = values(model)
    loss = backward(model, 0)
    opt.step()
    v = {name: (before[name] - p.detach()) / lr for name, p in model.named_parameters()}
    product = sum(float((p.grad * v[name]).sum()) for name, p in model.named_parameters())
    square = sum(float(x.square().sum()) for x in v.values())
    foreseen = -lr * product + lr**2 / 2 * (product - damping * square)
    adaptive.step(loss, lambda: loss - 1.0)
    assert adaptive.ratio == pytest.approx(-1.0 / foreseen, rel=1e-9)


# ---- the rule ----


def stepped(**options: Any) -> tuple[Any, AdaptiveDamping]:
    """After a step that decides; all of them are alike."""
    model = network()
    groups = [
        {"params": model[0].parameters(), "damping": 0.1},
        {"params": model[2].parameters(), "damping": 0.4},
    ]
    opt = KFACSGD(groups, lr=0.1, kl_clip=None, model=model)
    adaptive = AdaptiveDamping(opt, interval=3, decay=0.9, **options)
    for i in range(3):
        opt.zero_grad()
        backward(model, i)
        opt.step()
        if i < 2:
            adaptive.step(0.0, lambda: pytest.fail("a step that decides nothing"))
    return opt, adaptive


def foreseen() -> float:
    _, adaptive = stepped()
    adaptive.step(0.0, lambda: -1.0)
    assert adaptive.ratio > 0
    return -1.0 / adaptive.ratio


LOWER, SAME, HIGHER = 0.9**3, 1.0, 0.9**-3


def test_it_comes_after_the_step_and_once_for_each():
    model = network().double()
    opt = KFACSGD(model, lr=0.1)
    adaptive = AdaptiveDamping(opt)
    with pytest.raises(RuntimeError, match=r"comes after optimizer\.step\(\), once for each"):
        adaptive.step(1.0, lambda: 1.0)
    for i in range(7):  # a decision among them
        opt.zero_grad()
        backward(model, i)
        opt.step()
        adaptive.step(1.0, lambda: 1.0)
        with pytest.raises(RuntimeError, match=r"none since the last call"):
            adaptive.step(1.0, lambda: 1.0)
    opt.preconditioner.grad_scaler = 1.0  # whose owner may have left a step out
    adaptive.step(1.0, lambda: 1.0)
    opt.preconditioner.grad_scaler = None
    adaptive.remove()
    adaptive.step(1.0, lambda: 1.0)


@pytest.mark.parametrize(("name", "value"), [("closure", None), ("loss", torch.ones(2))])
def test_what_is_no_loss_is_named(name, value):
    model = network().double()
    opt = KFACSGD(model, lr=0.1)
    adaptive = AdaptiveDamping(opt, interval=1)
    backward(model, 0)
    opt.step()
    loss, again = (value, 1.0) if name == "loss" else (1.0, value)
    with pytest.raises(
        ValueError, match=rf"(?s)Invalid {name}: .* the loss of the step's batch, a n"
    ):
        adaptive.step(loss, lambda: again)


@pytest.mark.parametrize(
    ("ratio", "factor"),
    [
        (2.0, LOWER),
        (0.7501, LOWER),
        (0.7499, SAME),
        (0.2501, SAME),
        (0.2499, HIGHER),
        (-1.0, HIGHER),
        (-math.inf, HIGHER),
        (math.nan, HIGHER),
    ],
)
def test_the_rule(ratio, factor):
    change = ratio * foreseen()
    opt, adaptive = stepped()
    adaptive.step(torch.tensor(5.0), lambda: torch.tensor(5.0 + change, dtype=torch.float64))
    assert adaptive.ratio == pytest.approx(ratio, nan_ok=True)
    assert [g["damping"] for g in opt.param_groups] == pytest.approx([0.1 * factor, 0.4 * factor])
    with pytest.raises(RuntimeError, match="none since the last call"):
        adaptive.step(0.0, lambda: pytest.fail("no step since"))


def test_damping_stays_within_its_bounds():
    opt, adaptive = stepped(minimum=0.09, maximum=0.2)
    adaptive.step(0.0, lambda: -100.0)
    lowered = 0.4 * adaptive.decay**adaptive.interval
    # What is beyond a bound moves towards it, and is never put there against the decision.
    assert [g["damping"] for g in opt.param_groups] == pytest.approx([0.09, lowered])
    opt, adaptive = stepped(maximum=0.12)
    adaptive.step(0.0, lambda: 1.0)
    assert [g["damping"] for g in opt.param_groups] == [0.12, 0.4]


def test_a_step_that_is_not_to_lower_the_loss_decides_nothing():
    model = network()
    opt = KFACSGD(model, lr=-0.0, damping=0.1, kl_clip=None)
    adaptive = AdaptiveDamping(opt, interval=1)
    loss = backward(model, 0)
    opt.step()
    adaptive.step(loss, lambda: loss - 1.0)
    assert math.isnan(adaptive.ratio)
    assert opt.param_groups[0]["damping"] == 0.1


def test_a_step_uphill_decides_nothing():
    """Momentum goes on along a gradient that has turned."""
    model = network()
    opt = KFACSGD(model, lr=0.01, momentum=0.9, damping=0.1)
    adaptive = AdaptiveDamping(opt, interval=2)
    for scale in (1, -0.01):
        opt.zero_grad()
        loss = backward(model, 0, scale=lambda loss, scale=scale: loss * scale)
        opt.step()
        adaptive.step(loss, lambda loss=loss: loss + 1.0)
    assert math.isnan(adaptive.ratio)
    assert opt.param_groups[0]["damping"] == 0.1


@pytest.mark.parametrize(("start", "rises"), [(1e-4, True), (5.0, False)])
def test_damping_goes_where_the_model_holds(start, rises):
    """On one batch: far too bold steps meet more damping, far too timid ones less."""
    model = network()
    opt = KFACSGD(model, lr=1.0, kl_clip=None, damping=start, inv_update_steps=1)
    adaptive = AdaptiveDamping(opt, interval=1, decay=0.7)
    for _ in range(10):
        opt.zero_grad()
        loss = backward(model, 0)
        opt.step()
        adaptive.step(loss, lambda: F.mse_loss(model(batch(0)[0]), batch(0)[1]))
    assert (opt.param_groups[0]["damping"] > 2 * start) == rises
    assert (opt.param_groups[0]["damping"] < start / 2) == (not rises)


# ---- several ranks ----


def course(plan: Plan, **spread: Any) -> list[tuple[float, float | None]]:
    """Damping and ratio after each step; on a rank with its share of the batch."""
    together = dist.is_initialized()
    model = network_of(plan.network)
    opt = build(plan, model, model, **spread)
    adaptive = AdaptiveDamping(opt, interval=2)
    found = []
    for step in range(plan.steps):
        opt.zero_grad()
        parts = [
            part
            for rank in ([dist.get_rank()] if together else range(plan.world))
            for part in micro_batches(plan, step, rank)
        ]

        def mean(model=model, parts=parts) -> Tensor:
            losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y, _ in parts]
            return sum(losses) / sum(len(y) for _, y, _ in parts)

        if together:
            loss = mean()
            loss.backward()
            average(model.parameters())
        else:
            x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        opt.step()
        adaptive.step(loss, mean)
        found.append((opt.param_groups[0]["damping"], adaptive.ratio))
    return found


def course_on_rank(plan: Plan) -> list[tuple[float, float | None]]:
    return course(plan, **plan.spread)


@pytest.mark.parametrize(
    ("name", "spread"),
    [("images", {"assignment": "layer-wise"}), ("tokens", {"colocate_factors": False})],
)
def test_ranks_decide_as_one_process(name, spread):
    options = {"damping": 0.1, "factor_update_steps": 2, "inv_update_steps": 3, "kl_clip": None}
    base = {"lr": 0.1, "momentum": 0.5}
    plan = Plan(even(2, 3), name, base=base, options=options, spread=spread, steps=8)
    first, second = run(2, course_on_rank, plan)
    assert list(map(repr, first)) == list(map(repr, second))
    alone = course(plan, staggered=2)
    assert len({damping for damping, _ in alone}) > 1 and not math.isnan(alone[3][1])
    for (damping, ratio), (expected, wanted) in zip(first, alone, strict=True):
        assert damping == pytest.approx(expected, rel=1e-12)
        assert ratio == (None if wanted is None else pytest.approx(wanted, rel=1e-6, nan_ok=True))


def joined() -> str:
    model = DistributedDataParallel(network())
    opt = KFACSGD(model, lr=0.1)
    adaptive = AdaptiveDamping(opt, interval=1)
    with Join([model, opt]):
        loss = F.mse_loss(model(batch(0)[0]), batch(0)[1])
        loss.backward()
        opt.step()
        with pytest.raises(RuntimeError) as error:
            adaptive.step(loss, lambda: 0.0)
    return str(error.value)


def test_ranks_without_data_are_refused():
    for text in run(2, joined):
        assert text.startswith("AdaptiveDamping can't be used inside Join")


def sharded() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network(dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(ValueError) as error:
        AdaptiveDamping(KFACSGD(model, lr=0.1))
    return str(error.value)


@pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")
def test_sharded_parameters_are_refused():
    for text in run(2, sharded):
        assert "can't work with parameters sharded by fully_shard; no rank has a whole" in text


# ---- state ----


def go_on(model: nn.Module, opt: Any, adaptive: AdaptiveDamping, steps: range) -> list[float]:
    found = []
    for i in steps:
        opt.zero_grad()
        loss = backward(model, i)
        opt.step()
        adaptive.step(loss, lambda i=i: F.mse_loss(model(batch(i)[0]), batch(i)[1]))
        found.append(opt.param_groups[0]["damping"])
    return found


def made() -> tuple[nn.Module, Any, AdaptiveDamping]:
    model = network()
    opt = KFACSGD(model, lr=0.5, momentum=0.5, damping=0.1, kl_clip=None, early_refreshes=())
    return model, opt, AdaptiveDamping(opt, interval=3)


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    saved = 5
    model, opt, adaptive = made()
    go_on(model, opt, adaptive, range(saved))
    states = [x.state_dict() for x in (model, opt, adaptive)]
    torch.save(states, tmp_path / "state")
    copies = copy.deepcopy((model, opt, adaptive))
    others = made()
    for x, state in zip(others, torch.load(tmp_path / "state", weights_only=True), strict=True):
        x.load_state_dict(state)
    expected = go_on(model, opt, adaptive, range(saved, 12))
    assert len(set(expected)) > 1
    for other in (others, copies):
        assert go_on(*other, range(saved, 12)) == expected
        assert_same(other[0], model)
        assert other[2].ratio == adaptive.ratio


def test_a_loaded_state_sets_the_damping():
    _, opt, adaptive = made()
    adaptive.load_state_dict({"damping": [0.7], "ratio": 0.5})
    assert opt.param_groups[0]["damping"] == 0.7 and adaptive.ratio == 0.5
    with pytest.raises(ValueError, match="dampings of 2 parameter groups, the optimizer has 1"):
        adaptive.load_state_dict({"damping": [0.7, 0.7], "ratio": None})


def test_it_can_be_taken_off():
    model, opt, adaptive = made()
    go_on(model, opt, adaptive, range(3))
    adaptive.remove()
    damping, ratio = opt.param_groups[0]["damping"], adaptive.ratio
    assert ratio is not None
    copied_model, copied, gone = copy.deepcopy((model, opt, adaptive))
    for parts in ((model, opt, adaptive), (copied_model, copied, gone)):
        go_on(*parts, range(3, 9))
        assert parts[1].param_groups[0]["damping"] == damping and parts[2].ratio == ratio
    with pytest.raises(RuntimeError, match=r"taken off by remove\(\); build a new one"):
        adaptive.load_state_dict(adaptive.state_dict())
    assert AdaptiveDamping(opt).optimizer is opt


# ---- errors ----


def test_one_alone_writes_the_damping():
    _, opt, adaptive = made()
    wanted = "its damping is set by an AdaptiveDamping already.* call its remove.. first"
    with pytest.raises(ValueError, match=wanted):
        AdaptiveDamping(opt)
    with pytest.raises(ValueError, match=wanted):
        KFACParamScheduler(opt, damping=decay_at([2], 0.5))
    KFACParamScheduler(opt, inv_update_steps=decay_at([2], 2))
    adaptive.remove()
    first = KFACParamScheduler(opt, damping=decay_at([2], 0.5))
    with pytest.raises(ValueError, match="set by a KFACParamScheduler already"):
        AdaptiveDamping(opt)
    second = KFACParamScheduler(opt, damping=decay_at([2], 0.5))  # as one that is built anew
    copied, _ = copy.deepcopy((opt, second))
    del second
    for scheduled in (opt, copied):
        with pytest.raises(ValueError, match="set by a KFACParamScheduler already"):
            AdaptiveDamping(scheduled)
    del first
    AdaptiveDamping(opt)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda m: KFACSGD(m, lr=0.1, damping=lambda step: 0.1), "callable damping; it would be"),
        (lambda m: KFACSGD(m, lr=0.1, compute_method="inverse"), "damping of their refresh"),
        (lambda m: KFACSGD(m, lr=0.1, compute_eigenvalue_outer_product=True), "damping of their"),
        (lambda m: KFACSGD(m, lr=0.1, normalization="kaisa"), "not on the scale of the loss"),
        (lambda m: KFACSGD(m, lr=0.1, maximize=True), "maximize=True; negate the loss"),
    ],
)
def test_optimizers_that_are_refused(make: Callable[[nn.Module], Any], wanted: str):
    with pytest.raises(ValueError, match=f"Invalid optimizer: AdaptiveDamping can't .*{wanted}"):
        AdaptiveDamping(make(network()))


def test_other_bad_input():
    with pytest.raises(TypeError, match="Invalid optimizer: SGD has no K-FAC"):
        AdaptiveDamping(torch.optim.SGD(network().parameters()))
    opt = KFACSGD(network(), lr=0.1)
    for decay in (0, 1, 1.5, "0.9", math.nan):
        with pytest.raises(ValueError, match=f"Invalid decay: {decay!r}; it must be in"):
            AdaptiveDamping(opt, decay=decay)
    with pytest.raises(ValueError, match="Invalid interval: 0; it must be a whole number"):
        AdaptiveDamping(opt, interval=0)
    for name in ("minimum", "maximum"):
        with pytest.raises(ValueError, match=f"Invalid {name}: -1; it must be a number above 0"):
            AdaptiveDamping(opt, **{name: -1})
    with pytest.raises(ValueError, match="Invalid minimum: 2 is above maximum=1; exchange them"):
        AdaptiveDamping(opt, minimum=2, maximum=1)
