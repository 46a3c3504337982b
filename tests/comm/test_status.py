"""What ranks tell each other: differences, slots that were missed, errors, intervals, weights."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from kaisa_optim import KFACSGD, KFACAdam
from tests.core.test_rank_checkpoints import refusal
from tests.support import branches, training
from tests.support.branches import Branches, gathering, output_factor
from tests.support.ranks import run
from tests.support.training import (
    ANEW,
    assert_same,
    descend,
    early,
    network,
    recorded_warnings,
    warnings_as,
)
from tests.support.watch import Body, normal

EIGEN = {"compute_method": "eigen"}

# ---- what differs between ranks ----


def ordered_otherwise() -> None:
    names = ("first", "second") if dist.get_rank() == 0 else ("second", "first")
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(3, 3))
    KFACSGD(model, lr=0.1)


def with_a_scaler_on_one_rank() -> None:
    scaler = 8.0 if dist.get_rank() == 1 else None
    KFACSGD(nn.Linear(3, 2), lr=0.1, grad_scaler=scaler, **EIGEN)


def with_a_tensor_rate_that_one_rank_changed() -> None:
    model = nn.Linear(3, 2)
    opt = KFACAdam(model, lr=torch.tensor(0.1))
    opt.param_groups[0]["lr"].fill_(0.1 if dist.get_rank() else 0.2)
    descend(opt, model(torch.ones(4, 3)).sum())


@pytest.mark.parametrize(
    ("work", "texts"),
    [
        (ordered_otherwise, ["'second'\" stands on rank 1 where rank 0 has", "in one order"]),
        (with_a_scaler_on_one_rank, ["Invalid grad_scaler: 'given' on rank 1, None on rank 0"]),
        (with_a_tensor_rate_that_one_rank_changed, ["lr of parameter group 0", "0.2"]),
    ],
)
def test_what_differs_is_named_on_all_ranks(work, texts):
    for refused in run(2, refusal, work):
        assert all(text in refused for text in texts)


def warned() -> list[str]:
    """Return the warnings of an uncovered parameter, and of a pattern that matches nothing."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model.register_module("cell", nn.RNNCell(3, 3, dtype=torch.float64))
    with recorded_warnings() as texts:
        opt = KFACSGD(model, lr=0.1, skip_layers="nothing", **EIGEN)
        x = torch.ones(8, 4, dtype=torch.float64)
        descend(opt, model.cell(model(x)).square().mean())
    return texts


def test_what_all_ranks_would_say_one_says():
    first, second = run(2, warned)
    assert second == []
    said = "raw gradients:\n  cell", "'nothing'"
    assert all(any(text in message for message in first) for text in said)
    assert len(first) == len(said)


# ---- layers that are in use in some steps alone ----


def train(model: Branches, opt: Any, steps: range, period: int) -> list[set[str]]:
    """By one way, and in every ``period``-th step by the other; of which layers G has changed."""
    found = []
    for i in steps:
        opt.zero_grad()
        covered = opt.preconditioner.registry
        before = {x.name: output_factor(opt, x.name).clone() for x in covered.with_average}
        branches.backward(model, i, "b" if i % period == period - 1 else "a")
        opt.step()
        after = {x.name: output_factor(opt, x.name) for x in covered.with_average}
        found.append({n for n in after if n not in before or not torch.equal(before[n], after[n])})
    return found


@pytest.mark.parametrize("options", [{}, {"staggered": False}], ids=["staggered", "at once"])
@pytest.mark.parametrize("period", [2, 5])
def test_a_slot_that_met_no_pass_is_made_up_for(period, options):
    """Else a layer whose use shares a period with the slots would gather once, or never again."""
    model = Branches()
    opt = KFACSGD(model, lr=0.1, factor_update_steps=10, inv_update_steps=10, **options, **EIGEN)
    found = train(model, opt, range(100), period)
    for name, least in (("a", 9), ("b", 2), ("head", 9)):
        assert least <= sum(name in new for new in found) <= 12, name


def missed(opt: Any) -> dict[str, int]:
    """Return for how many gathering steps layers have missed their slot."""
    states = opt.preconditioner.registry.states
    return {name: state.missed for name, state in states.items() if state.missed}


def now_and_then_on_one_rank(fraction: float) -> list[list[dict[str, int]]]:
    """By way of b in every fifth step of the last rank; what is overdue on each after each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Branches()
    wrapped = DDP(model, find_unused_parameters=True)
    opt = KFACSGD(wrapped, lr=0.1, factor_update_steps=10, grad_worker_fraction=fraction)
    found = []
    for i in range(90):
        opt.zero_grad()
        way = "b" if i % 5 == 4 and rank == world - 1 else "a"
        branches.backward(wrapped, 10 * i + rank, way)
        opt.step()
        everywhere: list[Any] = [None] * world
        mine = missed(opt)
        dist.all_gather_object(everywhere, mine)
        found.append(everywhere)
    return found


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_ranks_wait_alike_for_what_is_overdue(fraction):
    found = run(2, now_and_then_on_one_rank, fraction)[0]
    assert all(one == other for one, other in found)
    late = ["b" in one for one, _ in found]
    assert late[40:89] == [True] * 49 and not late[89]  # and no longer once it has been seen


def test_a_missed_slot_is_saved():
    model, other = Branches(), Branches()
    options = {"factor_update_steps": 4, "staggered": False, "inv_update_steps": 10}
    opt = KFACSGD(model, lr=0.1, **options, **EIGEN)
    train(model, opt, range(4), 2)
    train(model, opt, range(4, 5), 2)  # it was the slot of b, too
    other.load_state_dict(model.state_dict())
    resumed = KFACSGD(other, lr=0.1, **options, **EIGEN)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert missed(resumed) == missed(opt) == {"b": 1}
    found = train(model, opt, range(5, 12), 2)
    assert found == train(other, resumed, range(5, 12), 2) and "b" in found[-1]
    assert_same(model, other)


def test_what_is_not_seen_for_long_is_waited_for_in_its_own_slot_alone():
    model = Branches()
    opt = KFACSGD(model, lr=0.01, factor_update_steps=2, staggered=False)
    train(model, opt, range(2), 2)
    asked = []
    for i in range(2, 60):
        asked += [i] if "b" in gathering(opt) else []
        train(model, opt, range(i, i + 1), 1000)
    assert [i for i in asked if i % 2] == [*range(5, 44, 4)]  # steps for late layers alone
    assert [i for i in asked if i % 2 == 0] == [*range(2, 60, 2)]
    resumed = KFACSGD(model, lr=0.01, factor_update_steps=2, staggered=False)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert gathering(resumed) == gathering(opt)
    train(model, opt, range(1), 1)  # by way of b, in its slot
    assert "b" not in missed(opt)


@pytest.mark.parametrize("length", [3, 5, 7])
def test_steps_beside_the_covered_layers_count_in_turns_alone(length):
    """A layer that is overdue is asked in each step: those without a pass are no fault."""

    def use(m: nn.Module, x: Tensor, covered: bool) -> Tensor:
        return sum(layer(x) for layer in m.layers) if covered else m.own * x[:, :3]

    layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
    model = Body(use, layers=layers, own=torch.ones(3))
    with warnings_as("ignore"), early(5, 25):
        opt = KFACSGD(model, lr=0.01, factor_update_steps=10)
    gathered = dict.fromkeys(opt.preconditioner.layers, 0)
    for i in range(60):
        opt.zero_grad(set_to_none=False)
        out = model(normal(8, 6, seed=i).float(), i // length % 2 == 0)
        out.square().mean().backward()
        opt.step()
        for layer in opt.preconditioner.work.average:
            gathered[layer] += 1
    assert opt.preconditioner.steps == 60 and model.own.abs().max() < 1
    assert all(6 <= count <= 12 for count in gathered.values()), gathered


def test_a_layer_that_is_no_longer_seen_is_named():
    model = Branches()
    opt = KFACSGD(model, lr=0.01, factor_update_steps=1)
    train(model, opt, range(3), 1000)
    plain = model.a.weight, model.a.bias
    del model._modules["a"]
    object.__setattr__(model, "a", lambda x: nn.functional.linear(x, *plain))
    with warnings_as("error"):
        train(model, opt, range(3, 22), 1000)
    with pytest.warns(
        UserWarning, match="layer 'a' has had a gradient in 20 gathering steps.* older facto"
    ):
        train(model, opt, range(22, 24), 1000)


# ---- what one rank alone does ----


def first_refresh() -> int:
    """Return the step in which a shorter interval acts that all ranks set after the second."""
    model = network()
    opt = KFACSGD(model, lr=0.0, factor_update_steps=4, inv_update_steps=4, staggered=False)
    training.train(model, opt, range(2))
    opt.preconditioner.inv_update_steps = 1
    while not opt.preconditioner.work.refresh:
        training.train(model, opt, [0])
    return opt.preconditioner.steps - 1


def test_an_interval_that_all_ranks_change_acts_where_all_exchange():
    assert run(2, first_refresh) == [4, 4]


def raises(*args: Any) -> None:
    raise MemoryError("planted")


def fails_alone(what: str) -> tuple[str, int]:
    model = nn.Sequential(*network(), nn.LayerNorm(3, dtype=torch.float64))  # for the base
    opt = KFACSGD(model, lr=0.1, **ANEW)
    state: dict[str, Any] = {}
    for i in range(4):
        opt.zero_grad()
        training.backward(model, i)
        odd = i == 2 and dist.get_rank() == 1
        if what == "load" and odd:
            opt.load_state_dict(state)
        broken = mock.patch.object(torch.optim.SGD, "step", raises)
        try:
            with broken if what == "base" and odd else nullcontext():
                opt.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}", i
        state = copy.deepcopy(opt.state_dict())
    return "", 4


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_error_of_the_bases_step_is_told_to_all_ranks():
    """The others lost a connection, and did not know why."""
    first, second = run(2, fails_alone, "base")
    text = (
        "RuntimeError: K-FAC stops on all ranks, since the base optimizer's step failed on rank 1"
    )
    assert first == (f"{text}: MemoryError: planted", 3)
    assert second == ("MemoryError: planted", 3)


def test_a_load_on_one_rank_alone_is_named():
    """It ended in gloo's abort of a process."""
    first, second = run(2, fails_alone, "load")
    assert first[0].startswith("RuntimeError: K-FAC stops on all ranks, since loading failed on")
    assert "call load_state_dict() on all of them" in first[0] and first[1] == second[1] == 2
