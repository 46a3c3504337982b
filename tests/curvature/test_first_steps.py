"""Grafting and warm-up of the papers' gradients; early refreshes: all for the first steps."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from tests.support.cluster import (
    Plan,
    Trained,
    assert_alike,
    build,
    error,
    even,
    micro_batches,
    train,
    train_alone,
)
from tests.support.cluster import average as average_gradients
from tests.support.cluster import network as network_of
from tests.support.ranks import run
from tests.support.training import (
    Probe,
    assert_near,
    assert_same,
    backward,
    batch,
    difference,
    network,
    values,
)
from tests.support.training import early as refreshing_early
from tests.support.training import train as train_plainly
from tests.support.watch import (
    Watch,
    assert_close,
    exact,
    factors_of,
    matrix_of,
    rows_of,
    seeded,
    solved,
    taken,
)

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")

EIGEN: dict[str, Any] = {"compute_method": "eigen"}
FREE = {**EIGEN, "kl_clip": None}
GRAFTED = {**FREE, "grafting": True}
ALL = {**GRAFTED, "warmup_steps": 4}
EARLY = (2, 5)
INTERVALS = {"factor_update_steps": 3, "inv_update_steps": 4}


# ---- grafting ----


class Mixed(nn.Module):
    """Blocks of one shape in layers of one, two and three blocks; a parameter without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(2, 3, 2)
        self.three = nn.Conv2d(6, 9, 2, groups=3)
        self.two = nn.Conv2d(4, 6, 2, groups=2)
        self.act = nn.PReLU()
        self.inner = nn.Linear(7, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.plain(x[:, :2]), self.three(x), self.two(x[:, 2:])
        x = torch.cat([part.tanh().mean((2, 3)) for part in parts], 1)
        return self.head(self.act(self.inner(x[:, ::3][:, :7].repeat(1, 2)[:, :7])))


LAYERS = ["plain", "three", "two", "inner", "head"]


def of_images(model: nn.Module) -> None:
    x = torch.randn(4, 6, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model(x).square().mean().backward()


def test_grafted_steps_are_the_dense_solution_as_long_as_the_gradient():
    model = seeded(Mixed)
    twin = copy.deepcopy(model)
    watch = Watch(twin, *LAYERS)
    of_images(twin)
    opt = exact(model, grafting=True)
    assert (
        len(
            {
                opt.preconditioner.store.applied.group_of[x]
                for x in opt.preconditioner.registry.active[:3]
            }
        )
        == 1
    )
    of_images(model)
    steps = taken(opt, model)
    for name in LAYERS:
        module = twin.get_submodule(name)
        gradient = matrix_of(module, module.weight.grad, getattr(module.bias, "grad", None))
        v = solved(*factors_of(*rows_of(module, watch.trained(name)), 4), gradient)
        step = matrix_of(module, steps[f"{name}.weight"], steps.get(f"{name}.bias"))
        assert_close(step, v * gradient.norm() / v.norm(), 1e-8, name)
        assert v.norm() > 1.1 * gradient.norm(), name
    assert_close(steps["act.weight"], twin.act.weight.grad)


@pytest.mark.parametrize(
    "options",
    [
        {"compute_method": "inverse"},
        {"compute_method": "inverse", "damping_split": "full"},
        {"compute_eigenvalue_outer_product": True},
        {"max_factor_size": 5},
        {"normalization": "kaisa"},
    ],
)
def test_grafting_changes_lengths_alone(options):
    models = [seeded(Mixed) for _ in range(2)]
    opts = [exact(model, grafting=i == 1, **options) for i, model in enumerate(models)]
    for model in models:
        of_images(model)
    free, grafted = (taken(opt, model) for opt, model in zip(opts, models, strict=True))
    for layer in opts[1].preconditioner.registry.active:
        names = [f"{layer.name}.{key}" for key, _ in layer.module.named_parameters()]
        old, new = (torch.cat([s[n].flatten() for n in names]) for s in (free, grafted))
        raw = torch.cat([models[1].get_parameter(n).grad.flatten() for n in names])
        assert_close(new, old * raw.norm() / old.norm(), 1e-9, layer.name)


def test_the_projections_into_an_attention_keep_one_length():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(4, 2, batch_first=True).double()
    opt = exact(model, grafting=True)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    model(x, x.flip(1), x.square(), need_weights=False)[0].square().mean().backward()
    steps = taken(opt, model)
    for part in ("in_proj_", "out_proj."):
        names = [f"{part}weight", f"{part}bias"]
        step = torch.cat([steps[name].flatten() for name in names])
        gradient = torch.cat([model.get_parameter(name).grad.flatten() for name in names])
        assert_close(step.norm(), gradient.norm(), 1e-9)
        assert F.cosine_similarity(step, gradient, 0) < 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_of_zero_leads_to_no_step(dtype):
    model = network(dtype=dtype)
    nn.init.zeros_(model[2].weight)  # so that nothing reaches the first layer
    opt = KFACSGD(model, lr=1.0, **GRAFTED)
    backward(model, 0)
    steps = taken(opt, model)
    assert not steps["0.weight"].any() and not steps["0.bias"].any()
    assert steps["2.weight"].isfinite().all() and steps["2.weight"].any()
    opt.zero_grad()
    backward(model, 1, scale=lambda loss: loss * 0)
    before = values(model)
    opt.step()
    assert_same(values(model), before)


def test_the_base_sees_grafted_gradients():
    """A multiple of the loss has other factors; beside no damping, v alone would shrink with it."""
    model, scaled = network(), network()
    opts = [
        KFACSGD(m, lr=0.1, momentum=0.9, damping=damping, **GRAFTED)
        for m, damping in ((model, 0.1), (scaled, 10.0))
    ]
    for i in range(4):
        for m, opt, factor in zip((model, scaled), opts, (1, 10), strict=True):
            opt.param_groups[0]["lr"] = 0.1 / factor
            opt.zero_grad()
            backward(m, i, scale=lambda loss, factor=factor: loss * factor)
            opt.step()
    assert_near(model, scaled)


def test_grafting_and_the_clip_exclude_each_other():
    with pytest.raises(ValueError, match=r"Invalid kl_clip: 0\.00015 with grafting.*kl_clip=None"):
        KFACSGD(network(), lr=0.1, grafting=True, **EIGEN)
    with pytest.raises(ValueError, match=r"Invalid kl_clip: <function.*with grafting"):
        KFACSGD(network(), lr=0.1, grafting=True, kl_clip=lambda step: None, **EIGEN)
    kfac = KFACSGD(network(), lr=0.1, **GRAFTED).preconditioner
    with pytest.raises(ValueError, match=r"Invalid kl_clip: 0\.1 with grafting"):
        kfac.kl_clip = 0.1
    assert kfac.kl_clip is None


# ---- warm-up ----


@pytest.mark.parametrize("kl_clip", [None, 1e-4])
def test_the_base_sees_more_and_more_of_the_preconditioned_gradient(kl_clip):
    """Shares 0, 1/3, 2/3, 1, 1: the clip, whose α is lr, holds for the preconditioned part."""
    lr, steps = 0.1, 3
    model = network()
    by_hand = copy.deepcopy(model)
    base = {"lr": lr, "momentum": 0.9, "weight_decay": 0.01}
    every = {"factor_update_steps": 1, "inv_update_steps": 2, "damping": 0.03}
    opt = KFACSGD(model, **EIGEN, **base, **every, kl_clip=kl_clip, warmup_steps=steps)
    sgd = torch.optim.SGD(by_hand.parameters(), **base)
    probe = Probe(model, **every, kl_clip=kl_clip and kl_clip / lr**2)
    for i in range(5):
        sgd.zero_grad()
        backward(by_hand, i)
        v = probe.step(by_hand, i)
        for name, p in by_hand.named_parameters():
            share = min(1, i / steps)
            p.grad = (1 - share) * p.grad + share * v[name]
        sgd.step()
        opt.zero_grad()
        backward(model, i)
        raw = [p.grad.clone() for p in model.parameters()]
        opt.step()
        assert_same([p.grad for p in model.parameters()], raw)
        assert_near(model, by_hand)


def test_the_first_step_is_the_bases():
    model, plain = network(), network()
    train_plainly(model, KFACSGD(model, lr=0.1, warmup_steps=1, **EIGEN), [0])
    train_plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.1), [0])
    assert_same(model, plain)


def test_statistics_do_not_wait_for_the_warm_up():
    model, warmed = network(), network()
    opts = [
        KFACSGD(m, lr=0.0, factor_update_steps=1, warmup_steps=n, **FREE)
        for m, n in ((model, 0), (warmed, 9))
    ]
    for m, opt in zip((model, warmed), opts, strict=True):
        train_plainly(m, opt, range(3))
    for name in ("0", "2"):
        assert_same(*(opt.preconditioner.factors(name) for opt in opts))


# ---- early refreshes ----


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ({}, (5, 10, 25, 50)),
        ({"inv_update_steps": 40}, (5, 10, 25, 50)),
        (EIGEN, (5, 10, 25, 50)),
        ({**EIGEN, "inv_update_steps": 40}, ()),
    ],
)
def test_bases_and_roots_are_found_anew_early(options, early):
    """By default, and all of them together; in other steps none or one of the two."""
    model = network()
    opt = KFACAdam(model, lr=0.01, **options)
    name = "a_vectors" if options.get("compute_method") == "eigen" else "a_root"

    def bases() -> list[Tensor]:
        kfac = opt.preconditioner
        return [dict(kfac.store.views(x))[name].clone() for x in kfac.layers.values()]

    before, together = None, []
    for i in range(60):
        train_plainly(model, opt, [i])
        now = bases()
        if before is not None and not any(map(torch.equal, now, before)):
            together.append(i)
        before = now
    assert tuple(together) == early


@pytest.mark.parametrize("normalization", ["fisher", "kaisa"])
def test_early_refreshes_take_in_their_steps_statistics(normalization):
    """Against running averages and dense solutions by hand, all layers at once."""
    decay, damping, early = 0.7, 0.1, (2, 3, 7)
    gathering, refreshed = {0, 4, 8, *early}, {0, 5, *early}
    papers = normalization == "kaisa"
    model = network()
    with refreshing_early(*early):
        opt = exact(
            model,
            damping=damping,
            factor_decay=decay,
            factor_update_steps=4,
            inv_update_steps=5,
            staggered=False,
            normalization=normalization,
            compute_method="inverse" if papers else "eigen",  # the papers' full split has no kron
        )
    averages: dict[str, tuple[Tensor, Tensor]] = {}
    used: dict[str, tuple[Tensor, Tensor]] = {}
    weight = 1.0 if papers else 0.0
    for i in range(9):
        twin = copy.deepcopy(nn.Sequential(*model))
        watch = Watch(twin, "0", "2")
        x, y = batch(i)
        twin.zero_grad()
        F.mse_loss(twin(x), y).backward()
        if i in gathering:
            weight = decay * weight + 1 - decay
            for name in ("0", "2"):
                rows = rows_of(twin.get_submodule(name), watch.trained(name))
                new = factors_of(*rows, 1 / len(x) if papers else len(x))
                start = [torch.eye(f.shape[-1], dtype=f.dtype)[None] for f in new]
                old = averages.get(name, start)
                share = (1 - decay) / weight
                pairs = zip(old, new, strict=True)
                averages[name] = tuple(a + share * (b - a) for a, b in pairs)
        if i in refreshed:
            used = dict(averages)
        opt.zero_grad()
        backward(model, i)
        steps = taken(opt, model)
        for name in ("0", "2"):
            module = twin.get_submodule(name)
            gradient = matrix_of(module, module.weight.grad, module.bias.grad)
            a, g = used[name]
            if papers:
                a, g = (f + damping * torch.eye(f.shape[-1], dtype=f.dtype) for f in (a, g))
            expected = solved(a, g, gradient, 0.0 if papers else damping)
            step = matrix_of(module, steps[f"{name}.weight"], steps[f"{name}.bias"])
            assert_close(step, expected, 1e-8, f"step {i}, layer {name}")


def test_turns_stay_as_they_are():
    """The same as intervals of one step where all is early, which leave the others their turns."""
    early = (2, 3, 9)
    models = [network_of("chain") for _ in range(3)]
    every, refreshed = 4, 6
    plain = {**EIGEN, "factor_update_steps": every, "inv_update_steps": refreshed}
    scheduled = {
        **EIGEN,
        "factor_update_steps": lambda step: 1 if step in early else every,
        "inv_update_steps": lambda step: 1 if step in early else refreshed,
    }
    with refreshing_early(*early):
        opts: list[Any] = [KFACSGD(models[0], lr=0.1, kl_clip=None, **plain)]
    for model, options in zip(models[1:], (scheduled, plain), strict=True):
        opts.append(KFACSGD(model, lr=0.1, kl_clip=None, **options))
    for i in range(14):
        for model, opt in zip(models, opts, strict=True):
            x = torch.randn(5, 7, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
        assert_same(models[0], models[1])
        assert (i < early[0]) == torch.equal(models[0].head.weight, models[2].head.weight)


# ---- several ranks ----


@pytest.mark.parametrize("assignment", ["layer-wise", "opt"])
@pytest.mark.parametrize("name", ["images", "tokens"])
def test_ranks_take_the_steps_of_one_process(name, assignment):
    plan = Plan(
        even(2, 2), name, options={**ALL, **INTERVALS}, spread={"assignment": assignment}, steps=8
    )
    ranks = run(2, train_with_early_steps, plan)
    assert_alike([rank.parameters for rank in ranks])
    assert error(ranks[0].parameters, train_with_early_steps(plan, alone=True).parameters) < 1e-9


def train_with_early_steps(plan: Plan, alone: bool = False) -> Trained:
    with refreshing_early(*EARLY):
        return train_alone(plan) if alone else train(plan)


def received(
    plan: Plan, early: tuple[int, ...]
) -> tuple[list[Counter[str]], dict[str, int], dict[str, float]]:
    """What arrived here in each step; what the account says of a step of all; the means."""
    rank = dist.get_rank()
    model = network_of(plan.network)
    with refreshing_early(*early):
        opt = build(plan, model, model, **plan.spread)
    kfac, found = opt.preconditioner, []
    for step in range(plan.steps):
        opt.zero_grad()
        for x, y, weight in micro_batches(plan, step, rank):
            (F.cross_entropy(model(x), y) * weight).backward()
        average_gradients(model.parameters())
        before = Counter(kfac.ranks.received)
        opt.step()
        found.append(Counter(kfac.ranks.received) - before)
    account = kfac.view.account
    both = account.price(account.plan(average=account.names, refresh=account.names))[rank]
    return found, both, kfac.communication_volume()


def test_what_travels():
    """An early refresh brings what a step of all brings; grafting and warm-up bring nothing."""
    plan = Plan(
        even(2, 2), "images", options={**FREE, **INTERVALS}, spread={"assignment": "layer-wise"}
    )
    helped = Plan(plan.sizes, plan.network, options={**INTERVALS, **ALL}, spread=plan.spread)
    pairs = zip(run(2, received, plan, ()), run(2, received, helped, EARLY), strict=True)
    for (plain, both, volume), (other, same, again) in pairs:
        assert volume == again and both == same
        for i, (without, found) in enumerate(zip(plain, other, strict=True)):
            if i in EARLY:
                assert found == +Counter({k: n for k, n in both.items() if k != "total"})
            else:
                assert found == without


# ---- state ----


@pytest.mark.parametrize("saved", [1, 2, 3, 5])
def test_a_checkpoint_goes_on_bit_for_bit(saved, tmp_path):
    def make() -> tuple[nn.Module, Any]:
        model = network()
        with refreshing_early(*EARLY):
            return model, KFACSGD(model, lr=0.1, momentum=0.9, **INTERVALS, **ALL)

    model, opt = make()
    train_plainly(model, opt, range(saved))
    torch.save([model.state_dict(), opt.state_dict()], tmp_path / "state")
    copied_model, copied = copy.deepcopy((model, opt))
    train_plainly(model, opt, range(saved, 9))
    other, resumed = make()
    weights, state = torch.load(tmp_path / "state", weights_only=True)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for m, o in ((other, resumed), (copied_model, copied)):
        before = values(m)
        train_plainly(m, o, range(saved, 9))
        assert all(d.any() for d in difference(before, m).values())
        assert_same(m, model)
