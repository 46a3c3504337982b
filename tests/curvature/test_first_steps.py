"""Early refreshes: all for the first steps."""

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
    solved,
    taken,
)

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")

EIGEN: dict[str, Any] = {"compute_method": "eigen"}
FREE = {**EIGEN, "kl_clip": None}
EARLY = (2, 5)
INTERVALS = {"factor_update_steps": 3, "inv_update_steps": 4}


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
        even(2, 2), name, options={**FREE, **INTERVALS}, spread={"assignment": assignment}, steps=8
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
    both = account.price(average=account.names, refresh=account.names)[rank]
    return found, both, kfac.communication_volume()


def test_what_travels():
    """An early refresh brings what a step of all brings, and other steps bring what they did."""
    plan = Plan(
        even(2, 2), "images", options={**FREE, **INTERVALS}, spread={"assignment": "layer-wise"}
    )
    pairs = zip(run(2, received, plan, ()), run(2, received, plan, EARLY), strict=True)
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
            return model, KFACSGD(model, lr=0.1, momentum=0.9, **INTERVALS, **FREE)

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
