"""K-FAC state that is spread over ranks, in checkpoints: at the same ranks, and at others."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

from kaisa_optim import KFACSGD, KFACAdam, with_kfac
from tests.optim.test_checkpoint import quietly_load
from tests.support import groups
from tests.support.cluster import average, kept, rank, share, taken_by, weights, world
from tests.support.ranks import run
from tests.support.training import assert_near, assert_same, descend, recorded_warnings, warnings_as

ROWS = 48  # of a batch, over all ranks: as many for each of 2, 3 or 4
# A stop after three steps is within both intervals, and half way through the layers' turns.
OPTIONS: dict[str, Any] = {"factor_update_steps": 2, "inv_update_steps": 4, "kl_clip": 1e-2}
FAMILY: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "sgd": (KFACSGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (KFACAdam, {"lr": 0.01, "eps": 1e-2}),
    "eigen": (KFACAdam, {"lr": 0.01, "eps": 1e-2, "compute_method": "eigen"}),
    "rmsprop": (with_kfac(torch.optim.RMSprop), {"lr": 0.01, "eps": 1e-2}),
}
SPREADS: list[tuple[int, dict[str, Any]]] = [
    (2, {"assignment": "opt"}),
    (2, {"assignment": "layer-wise"}),
    (4, {"grad_worker_fraction": 0.5, "colocate_factors": False}),
]
every_spread = pytest.mark.parametrize(("world", "spread"), SPREADS)


@dataclass(frozen=True)
class Plan:
    optimizer: str = "sgd"
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


def net(seed: int = 0) -> nn.Sequential:
    """Four layers, of which two are of one shape; one of their factors is diagonal."""
    torch.manual_seed(seed)
    layers = [nn.Embedding(9, 5), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6)]
    return nn.Sequential(*layers).double()


def pair(plan: Plan) -> tuple[nn.Sequential, Any]:
    model = net(plan.seed)
    cls, base = FAMILY[plan.optimizer]
    return model, cls(model, **taken_by({**base, **OPTIONS, **plan.options}))


def part(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x = torch.randint(9, (ROWS,), generator=generator)
    x, y = share(x, torch.randn(ROWS, 6, generator=generator, dtype=torch.float64))
    return x, y


def learn(model: nn.Module, opt: Any, steps: range) -> list[float]:
    """The losses of the joined batches."""
    losses = []
    for i in steps:
        x, y = part(i)
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        average(model.parameters())
        opt.step()
        total = loss.detach()
        if world() > 1:
            dist.all_reduce(total)
        losses.append(float(total / world()))
    return losses


def quiet_state(opt: Any) -> dict[str, Any]:
    """A state dict that must not warn."""
    with warnings_as("error"):
        return opt.state_dict()


def whole_state(opt: Any) -> Any:
    """The consolidated state, on all ranks."""
    opt.consolidate_state_dict(to=0)
    box = [copy.deepcopy(quiet_state(opt)) if rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    return box[0]


# ---- a rank's share ----


def averages(state: dict[str, Any]) -> set[tuple[int, str]]:
    """The running averages in a state dict, by the layer's place in the model and side."""
    return {
        (index, key[len("kfac_")])
        for index, entry in state["state"].items()
        for key in entry
        if key.endswith("_average")
    }


class Shares(NamedTuple):
    owned: set[tuple[int, str]]
    found: list[set[tuple[int, str]]]  # alone, consolidated to rank 1, after another step
    texts: list[str]
    tensors: dict[tuple[int, str], Tensor]  # what is owned
    gathered: dict[tuple[int, str], Tensor]  # what the consolidated state says
    weights: list[Tensor]


def takes_shares(plan: Plan) -> Shares:
    model, opt = pair(plan)
    kfac = opt.preconditioner
    learn(model, opt, range(3))
    at = {id(p): i for i, p in enumerate(model.parameters())}
    places = {layer: at[id(layer.parameters[0])] for layer in kfac.layers.values()}
    tensors = {
        (places[kfac.layers[name]], side): average.clone()
        for (name, side), average in groups.averages(opt).items()
    }
    received = dict(kfac.ranks.received)
    found = []
    with recorded_warnings() as texts:
        # One rank after the other, each alone: an exchange would not find the others.
        for turn in range(world()):
            if rank() == turn:
                found.append(averages(opt.state_dict()))
                assert averages(opt.state_dict()) == found[-1]
            dist.barrier()
    assert dict(kfac.ranks.received) == received
    opt.consolidate_state_dict(to=1)
    state = quiet_state(opt)
    found.append(averages(state))
    gathered = {key: state["state"][key[0]][f"kfac_{key[1]}_average"] for key in found[-1]}
    gathered = {key: value.clone() for key, value in gathered.items()}
    learn(model, opt, range(3, 5))
    found.append(averages(shares(opt)))
    owned = {(places[x], s) for x in places for s in "ag" if kfac.registry.owner(x, s) == rank()}
    return Shares(owned, found, texts, tensors, gathered, weights(model))


@every_spread
def test_a_state_dict_is_the_ranks_share_until_it_is_consolidated(world, spread):
    ranks = run(world, takes_shares, Plan(options=spread))
    everything = set().union(*(one.owned for one in ranks))
    tensors = {key: value for one in ranks for key, value in one.tensors.items()}
    assert len(everything) == sum(len(one.owned) for one in ranks) == 8
    for i, one in enumerate(ranks):
        alone, consolidated, later = one.found
        assert alone == later == one.owned
        assert consolidated == (everything if i == 1 else one.owned)
        assert_same(one.gathered, {key: tensors[key] for key in one.gathered})
        assert_same(one.weights, ranks[0].weights)
        text, again = one.texts  # a warning for each call, with what others keep
        assert text == again
        assert f"rank {i}'s share" in text and "consolidate_state_dict(to=rank)" in text
        names = {0: "0", 1: "1", 3: "3", 5: "4"}  # of layers, by their weights' places
        for place, side in everything:
            absent = (place, side) not in one.owned
            assert (f"{side.upper()} of {names[place]!r}" in text) == absent


def says_so(plan: Plan) -> dict[str, list[str]]:
    """Warnings of a share, as Python's default filter shows them: a repeated text is hidden."""
    model, opt = pair(plan)
    texts: dict[str, list[str]] = {}

    def note(name: str, ask: Callable[[], Any]) -> None:
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("default")
            ask()
        said = [str(w.message) for w in record]
        texts[name] = [text for text in said if text.startswith("state_dict()")]

    def saves() -> None:
        for step in range(1, 3):
            learn(model, opt, range(step, step + 1))
            opt.state_dict()

    full = StateDictOptions(full_state_dict=True)
    note("before a step", opt.state_dict)
    note("saves", saves)
    note("dcp", lambda: get_optimizer_state_dict(model, opt))
    note("dcp, with the model", lambda: get_state_dict(model, opt))
    note("dcp, full", lambda: get_optimizer_state_dict(model, opt, options=full))
    opt.consolidate_state_dict(to=0)
    note("consolidated", opt.state_dict)
    note("consolidated, full", lambda: get_optimizer_state_dict(model, opt, options=full))
    learn(model, opt, range(3, 4))
    note("a step later", opt.state_dict)
    return texts


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "eigen", "rmsprop"])
def test_a_share_says_so_each_time_unless_it_is_saved_with_the_others(optimizer):
    """With the default assignment, each momentum is on one rank."""
    ranks = run(2, says_so, Plan(optimizer))
    momenta = []
    for i, texts in enumerate(ranks):
        said = {name for name, lines in texts.items() if lines}
        assert said == {"saves", "dcp, full", "a step later"}
        first, second = texts["saves"]
        assert f"after 1 steps has only rank {i}'s share" in first
        assert f"after 2 steps has only rank {i}'s share" in second
        momenta.append(set(re.findall(r"'(\d\.\w+)'", texts["a step later"][0])))
    names = {name for name, _ in net().named_parameters()}
    assert momenta[0] | momenta[1] == (set() if optimizer == "eigen" else names)
    assert not momenta[0] & momenta[1]


def consolidates_to(to: Any) -> str:
    model, opt = pair(Plan())
    learn(model, opt, range(1))
    with pytest.raises(ValueError) as caught:
        opt.consolidate_state_dict(to)
    learn(model, opt, range(1, 2))
    return str(caught.value)


@pytest.mark.parametrize("to", [2, -1, "0"])
def test_a_rank_that_is_none_is_refused(to):
    for text in run(2, consolidates_to, to):
        assert f"Invalid to: {to!r}; it must be a rank of the process group, 0 to 1" in text


def reloads(plan: Plan) -> tuple[Any, Any]:
    """Return a whole state, and that of a run which has loaded it after another was gathered."""
    model, opt = pair(plan)
    learn(model, opt, range(1))
    first = whole_state(opt)
    learn(model, opt, range(1, 2))
    whole_state(opt)
    quietly_load(opt, copy.deepcopy(first))
    return first["state"], whole_state(opt)["state"]


def test_what_was_gathered_before_a_load_is_forgotten():
    for first, loaded in run(2, reloads, Plan(options={"assignment": "layer-wise"})):
        assert_same(loaded, first)


# ---- the same ranks ----


def interrupted(plan: Plan, path: str, at: int, save_model: int) -> list[Tensor]:
    """Up to ``at``, and on from a file or from each rank's share, as without an interruption."""
    model, opt = pair(plan)
    learn(model, opt, range(at))
    own = copy.deepcopy(shares(opt))
    opt.consolidate_state_dict(to=save_model)
    if rank() == save_model:
        torch.save({"model": model.state_dict(), "optimizer": quiet_state(opt)}, path)
    dist.barrier()
    saved = torch.load(path, weights_only=True)
    dist.barrier()
    losses = learn(model, opt, range(at, at + 6))
    for state in (own, saved["optimizer"]):
        other, resumed = pair(Plan(plan.optimizer, plan.options, seed=1))
        other.load_state_dict(saved["model"])
        quietly_load(resumed, state)
        assert learn(other, resumed, range(at, at + 6)) == losses
        assert_same(shares(resumed)["state"], shares(opt)["state"])
        assert_same(weights(other), weights(model))
    return weights(model)


def shares(opt: Any) -> dict[str, Any]:
    with warnings_as("ignore"):
        return opt.state_dict()


METHODS: dict[str, dict[str, Any]] = {
    "polar": {},
    "eigen": {"compute_method": "eigen", "staggered": False},
    "products": {"compute_method": "eigen", "compute_eigenvalue_outer_product": True},
    "inverse": {"compute_method": "inverse", "factor_dtype": torch.float32},
}


@pytest.mark.parametrize(
    ("world", "spread", "at", "method"),
    [
        (*SPREADS[0], 6, "eigen"),
        (*SPREADS[0], 6, "polar"),
        *((*SPREADS[1], 3, method) for method in ("polar", "inverse")),
        *((*SPREADS[2], 3, method) for method in METHODS),
    ],
)
def test_the_same_ranks_go_on_bit_for_bit(world, spread, method, at, tmp_path):
    plan = Plan("adam" if at == 3 else "sgd", {**METHODS[method], **spread})
    results = run(world, interrupted, plan, str(tmp_path / "state"), at, at % 2)
    assert_same(results, results[:1] * world)


# ---- other ranks ----


def section(plan: Plan, steps: range, source: str | None, target: str) -> Any:
    """A part of the training on these ranks, between two files."""
    model, opt = pair(plan)
    if source is not None:
        saved = torch.load(source, weights_only=True)
        model.load_state_dict(saved["model"])
        quietly_load(opt, saved["optimizer"])
    losses = learn(model, opt, steps)
    opt.consolidate_state_dict(to=world() - 1)
    if rank() == world() - 1:
        torch.save({"model": model.state_dict(), "optimizer": quiet_state(opt)}, target)
    return losses, weights(model), opt.preconditioner.steps


def alone(plan: Plan, steps: int) -> Any:
    model, opt = pair(plan)
    return learn(model, opt, range(steps)), weights(model), steps


@pytest.mark.parametrize("method", ["polar", "eigen", "products", "inverse"])
def test_from_four_ranks_over_one_to_three_and_back(method, tmp_path):
    """Each part is three steps long; against a run that nothing interrupts."""
    options = {k: v for k, v in METHODS[method].items() if k != "factor_dtype"}
    sections: list[tuple[int, dict[str, Any]]] = [
        (4, {"assignment": "layer-wise"}),
        (1, {}),
        (3, {"assignment": "opt", "colocate_factors": False}),
        (4, {"grad_worker_fraction": 0.5}),
        (2, {"assignment": "layer-wise"}),
    ]
    losses: list[float] = []
    source = None
    for i, (ranks, spread) in enumerate(sections):
        args = Plan("adam", {**options, **spread}, seed=i), range(3 * i, 3 * i + 3), source
        source = str(tmp_path / str(i))
        results = run(ranks, section, *args, source) if ranks > 1 else [section(*args, source)]
        assert_same(results, results[:1] * ranks)
        losses += results[0][0]
    expected = alone(Plan("adam", options), 3 * len(sections))
    near = (1e-8, 1e-10) if "compute_method" not in options else (1e-9, 1e-11)
    assert_near((losses, *results[0][1:]), expected, *near)


# ---- what is missing ----


class Loaded(NamedTuple):
    texts: list[str]
    fed: list[set[str]]  # the layers with running averages, at once and after the next step
    tensors: dict[tuple[str, str], Tensor]  # running averages that are kept here, after the step
    weights: list[Tensor]


def loads_one_share(
    plan: Plan, path: str, paused: bool
) -> tuple[Loaded, list[dict[tuple[str, str], Tensor]]]:
    """All load what rank 0 had; with the averages of a run that nothing interrupts, and of one that
    begins where the other goes on."""
    model, opt = pair(plan)
    learn(model, opt, range(3))
    if rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, path)
    dist.barrier()
    saved = torch.load(path, weights_only=True)
    other, target = pair(plan)
    other.load_state_dict(saved["model"])
    with recorded_warnings() as texts:
        target.load_state_dict(saved["optimizer"])
    fed = [{layer.name for layer in target.preconditioner.registry.with_average}]
    # What some ranks lack is lacking on all of them, also while nothing is gathered; else the ranks
    # that lack it gather it alone, which must not count.
    with target.preconditioner.paused() if paused else contextlib.nullcontext():
        learn(other, target, range(3, 4))
    learn(model, opt, range(3, 4))
    begun, new = pair(plan)
    for one in (model, begun):
        one.load_state_dict(other.state_dict())
    for one, its in ((other, target), (model, opt), (begun, new)):
        learn(one, its, range(4, 5))
    fed.append({layer.name for layer in target.preconditioner.registry.with_average})
    loaded = Loaded(texts, fed, kept(target), weights(other))
    return loaded, [kept(opt), kept(new)]


@pytest.mark.parametrize("spread", [{"assignment": "layer-wise"}, {"assignment": "opt"}])
@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.filterwarnings("ignore:state_dict")
def test_factors_that_are_missing_are_named_and_estimated_anew(spread, paused, tmp_path):
    plan = Plan(options={**spread, "staggered": False})
    ranks = run(2, loads_one_share, plan, str(tmp_path / "state"), paused)
    every = {"0", "1", "3", "4"}
    missing = every - ranks[1][0].fed[0]
    assert missing and (missing < every or spread["assignment"] == "opt")
    assert ranks[0][0].fed[0] == every and not ranks[0][0].texts
    (text,) = ranks[1][0].texts
    assert ", which rank 1 keeps (was it saved without consolidate_state_dict()?)" in text
    assert all((repr(name) in text) == (name in missing) for name in every)
    for loaded, (straight, begun) in ranks:
        assert loaded.fed[1] == every
        for key, value in loaded.tensors.items():
            whole = key[0] not in missing  # of the others, one side may be in the file
            assert_near(value, (straight if whole else begun)[key], 1e-12)
        assert_same(loaded.weights, ranks[0][0].weights)


def misreads(rank_of_it: int, spread: dict[str, Any]) -> list[str]:
    """One rank's copy of a state is spoilt, or all are; errors, and what steps do afterwards."""
    model, opt = pair(Plan(options=spread))
    learn(model, opt, range(3))
    good = whole_state(opt)
    spoilt = copy.deepcopy(good)
    spoilt["state"][1]["kfac_g_average"] = torch.ones(3)
    errors = []

    def refused() -> None:
        with pytest.raises(ValueError, match="Invalid state_dict: ") as caught:
            opt.load_state_dict(spoilt)
        errors.append(str(caught.value))

    refused()  # by all: they go on with what they have
    learn(model, opt, range(3, 4))
    assert opt.preconditioner.steps == 4
    if rank() == rank_of_it:
        refused()
    else:
        quietly_load(opt, good)
    for act in (lambda: learn(model, opt, range(3, 4)), lambda: opt.consolidate_state_dict(to=0)):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            act()
        errors.append(str(caught.value))
    quietly_load(opt, good)
    learn(model, opt, range(3, 6))
    assert opt.preconditioner.steps == 6
    return errors


@every_spread
def test_what_one_rank_misreads_is_raised_by_all(world, spread):
    """Until a state is loaded that all can read."""
    for i, errors in enumerate(run(world, misreads, 1, spread)):
        for error in errors:
            assert "Invalid state_dict: " in error and "kfac_g_average is (3,)" in error
        told = ["loading a state failed on rank 1: ValueError" in error for error in errors]
        assert told == ([False] * 4 if i == 1 else [False, True, True])


def loads_another(key: str, index: Any, value: int) -> str:
    """Rank 1's state differs in one number; the error, after which the good state goes on."""
    model, opt = pair(Plan())
    learn(model, opt, range(3))
    good = whole_state(opt)
    changed = copy.deepcopy(good)
    for entry in changed["state"].values() if rank() == 1 else ():
        if key in entry:
            entry[key][index] = value
    quietly_load(opt, changed)
    with pytest.raises(ValueError) as caught:
        learn(model, opt, range(3, 4))
    quietly_load(opt, good)
    learn(model, opt, range(3, 6))
    assert opt.preconditioner.steps == 6
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "index", "value", "name"),
    [
        ("kfac_step", ..., 2, "steps"),
        ("kfac_status", 4, 1, "missed slots, failures of '0'"),
        ("kfac_status", 0, 5, "missed slots, failures of '0'"),
    ],
)
def test_ranks_that_load_other_numbers_are_named(key, index, value, name):
    for error in run(2, loads_another, key, index, value):
        assert f"Invalid {name}: " in error and "on rank 1" in error
        assert "call consolidate_state_dict() before a save" in error


# ---- momenta of "polar" ----

MOMENTA = {
    "sgd": "momentum_buffer",
    "adam": "exp_avg",
    "rmsprop": "kfac-momentum",
}
PLAIN: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, FAMILY["sgd"][1]),
    "adam": (torch.optim.Adam, FAMILY["adam"][1]),
}
# With as many gradient workers of each layer.
WORKERS: list[tuple[int, dict[str, Any], int]] = [
    (2, {"assignment": "layer-wise"}, 1),
    (4, {"assignment": "layer-wise"}, 1),
    (4, {"grad_worker_fraction": 0.5}, 2),
    (2, {"assignment": "opt"}, 2),
]
every_share = pytest.mark.parametrize(("world", "spread", "workers"), WORKERS)


def momenta_here(plan: Plan, model: nn.Module, opt: Any) -> dict[int, Tensor]:
    """The momenta that this rank keeps, by the parameter's place in the model."""
    key = MOMENTA[plan.optimizer]
    entries = {i: opt.state[p] for i, p in enumerate(model.parameters())}
    return {i: entry[key].clone() for i, entry in entries.items() if key in entry}


def keeps_momenta(plan: Plan) -> tuple[list[set[int]], set[int]]:
    """Places of momenta after some steps, and after a whole state was loaded; those it owes."""
    model, opt = pair(plan)
    learn(model, opt, range(2))
    found = [set(momenta_here(plan, model, opt))]
    quietly_load(opt, whole_state(opt))
    learn(model, opt, range(2, 3))
    found.append(set(momenta_here(plan, model, opt)))
    works = {p for layer in groups.applied(opt) for p in layer.parameters}
    return found, {i for i, p in enumerate(model.parameters()) if p in works}


@every_share
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop"])
def test_momenta_are_on_gradient_workers_alone(world, spread, workers, optimizer):
    ranks = run(world, keeps_momenta, Plan(optimizer, spread))
    for found, works in ranks:
        assert found == [works, works]
    places = [place for _, works in ranks for place in works]
    assert {place: places.count(place) for place in places} == dict.fromkeys(range(7), workers)


def goes_on_from_the_base(plan: Plan) -> list[Tensor]:
    """Train the base for three steps, and K-FAC over it from its state."""
    cls, settings = PLAIN[plan.optimizer]
    model = net()
    plain = cls(model.parameters(), **settings)
    learn(model, plain, range(3))
    other, opt = pair(plan)
    other.load_state_dict(model.state_dict())
    keeps = f".* which rank {rank()} keeps" if world() > 1 else ""
    with pytest.warns(UserWarning, match=f"no K-FAC factors of this kind for{keeps}"):
        opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    # From equal weights, both meet equal gradients in this step.
    learn(model, plain, range(3, 4))
    learn(other, opt, range(3, 4))
    twins = dict(zip(other.parameters(), model.parameters(), strict=True))
    for layer in groups.applied(opt):
        entries = {p: plain.state[twins[p]] for p in layer.parameters}
        for p, entry in entries.items():
            assert_near(opt.state[p][MOMENTA[plan.optimizer]], entry[MOMENTA[plan.optimizer]])
        if plan.optimizer == "adam":
            total = sum(entry["exp_avg_sq"].sum() for entry in entries.values())
            assert_near(opt.state[layer.parameters[0]]["kfac_square_sum"], total.view(1))
    learn(other, opt, range(4, 7))
    return weights(other)


@every_share
@pytest.mark.parametrize("optimizer", PLAIN)
def test_a_plain_checkpoint_goes_on_as_on_one_process(world, spread, workers, optimizer):
    ranks = run(world, goes_on_from_the_base, Plan(optimizer, spread))
    alone = goes_on_from_the_base(Plan(optimizer))
    for result in ranks:
        assert_same(result, ranks[0])
    assert_near(ranks[0], alone, 1e-8, 1e-10)


def saves_momenta(plan: Plan, path: str) -> dict[int, Tensor]:
    model, opt = pair(plan)
    learn(model, opt, range(3))
    opt.consolidate_state_dict(to=0)
    if rank() == 0:
        torch.save(quiet_state(opt), path)
    return momenta_here(plan, model, opt)


def loads_momenta(plan: Plan, path: str) -> list[dict[int, Tensor]]:
    """Momenta as loaded, and as gathered from there before any step."""
    model, opt = pair(plan)
    quietly_load(opt, torch.load(path, weights_only=True))
    found = [momenta_here(plan, model, opt)]
    opt.consolidate_state_dict(to=0)
    if rank() == 0:
        state, key = quiet_state(opt)["state"], MOMENTA[plan.optimizer]
        found.append({i: entry[key] for i, entry in state.items() if key in entry})
    return found


@pytest.mark.parametrize("optimizer", MOMENTA)
@pytest.mark.parametrize(
    ("before", "after"),
    [(WORKERS[1], WORKERS[0]), (WORKERS[0], WORKERS[2]), (WORKERS[2], WORKERS[3])],
)
def test_momenta_load_at_another_number_of_ranks_bit_for_bit(optimizer, before, after, tmp_path):
    path = str(tmp_path / "state")
    kept: dict[int, Tensor] = {}
    for one in run(before[0], saves_momenta, Plan(optimizer, before[1]), path):
        assert_same(
            {i: kept[i] for i in kept.keys() & one.keys()},
            {i: one[i] for i in kept.keys() & one.keys()},
        )
        kept |= one
    assert len(kept) == 7 and all(momentum.any() for momentum in kept.values())
    for found in run(after[0], loads_momenta, Plan(optimizer, after[1]), path):
        for momenta in found:
            assert_same(dict(sorted(momenta.items())), dict(sorted(kept.items())))


def exports(plan: Plan) -> tuple[list[str], dict[str, Any] | None]:
    """The state for the base, on rank 0 or alone; errors where it is not whole."""
    model, opt = pair(plan)
    learn(model, opt, range(3))
    errors = []
    for consolidates in (False, True) if world() > 1 else (True,):
        if consolidates and world() > 1:
            opt.consolidate_state_dict(to=0)
        if not consolidates or rank() > 0:
            with pytest.raises(RuntimeError) as caught:
                opt.base_state_dict()
            errors.append(str(caught.value))
    if rank() > 0:
        return errors, None
    state = opt.base_state_dict()
    cls, settings = PLAIN[plan.optimizer]
    plain = cls(net().parameters(), **settings)
    plain.load_state_dict(copy.deepcopy(state))
    for p in plain.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    plain.step()
    return errors, {"state": state["state"], "keys": sorted(state["param_groups"][0])}


@every_share
@pytest.mark.parametrize("optimizer", PLAIN)
def test_the_base_loads_a_consolidated_state(world, spread, workers, optimizer):
    ranks = run(world, exports, Plan(optimizer, spread))
    (_, alone) = exports(Plan(optimizer))
    cls, settings = PLAIN[optimizer]
    plain = cls(net().parameters(), **settings).state_dict()["param_groups"][0]
    assert alone is not None and alone["keys"] == sorted(plain)
    for i, (errors, _) in enumerate(ranks):
        assert len(errors) == 1 + (i > 0)
        assert all("call consolidate_state_dict(to=rank)" in error for error in errors)
    of_ranks = ranks[0][1]
    assert of_ranks is not None and of_ranks["keys"] == alone["keys"]
    assert of_ranks["state"].keys() == alone["state"].keys() == set(range(7))
    for index, entry in alone["state"].items():
        assert_near(of_ranks["state"][index], entry, 1e-8, 1e-10)


def turns_to(before: Plan, after: Plan) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Weights of a run that goes on with another method, and of one that begins there."""
    model, opt = pair(before)
    learn(model, opt, range(3))
    state = whole_state(opt)
    other, target = pair(after)
    other.load_state_dict(model.state_dict())
    with recorded_warnings() as texts:
        target.load_state_dict(state)
    learn(other, target, range(3, 6))
    return texts, weights(other), weights(model)


@every_share
@pytest.mark.parametrize("names", [("eigen", "adam"), ("adam", "eigen")], ids=str)
def test_momenta_of_another_method_begin_anew_on_all_ranks(world, spread, workers, names):
    before, after = (Plan(name, spread) for name in names)
    ranks = run(world, turns_to, before, after)
    for texts, result, start in ranks:
        (text,) = [text for text in texts if text.startswith("this state lacks the momenta of ")]
        assert all(repr(name) in text for name in ("0", "1", "3", "4"))
        assert_same(result, ranks[0][1])
        assert all(not torch.equal(a, b) for a, b in zip(result, start, strict=True))


# ---- torch.distributed.checkpoint ----


def saves_with_dcp(plan: Plan, flatten: bool, path: str) -> None:
    model, opt = pair(plan)
    learn(model, opt, range(3))
    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    with warnings_as("ignore"):
        state = get_optimizer_state_dict(model, opt, options=how)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=path)


def loads_with_dcp(plan: Plan, flatten: bool, path: str) -> Any:
    model, opt = pair(plan)
    before = weights(model)
    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    with warnings_as("ignore"):
        template = get_optimizer_state_dict(model, opt, options=how)
    # It steps once, with zero gradients and lr 0.
    assert_same(weights(model), before)
    assert opt.preconditioner.steps == 0
    loaded = {"model": model.state_dict(), "optimizer": template}
    dcp.load(loaded, checkpoint_id=path)
    model.load_state_dict(loaded["model"])
    with recorded_warnings("factors") as texts:
        set_optimizer_state_dict(model, opt, loaded["optimizer"], options=how)
    losses = learn(model, opt, range(3, 9))
    return losses, weights(model), texts


@pytest.mark.parametrize(
    ("optimizer", "before", "after", "flatten"),
    [
        ("sgd", SPREADS[2], SPREADS[2], True),
        ("sgd", SPREADS[1], (4, {"assignment": "opt"}), False),
        ("adam", SPREADS[2], SPREADS[1], True),
        ("eigen", SPREADS[2], SPREADS[1], True),
    ],
)
def test_distributed_checkpoints_load_at_any_ranks(optimizer, before, after, flatten, tmp_path):
    path = str(tmp_path / "state")
    first, then = (Plan(optimizer, x) for _, x in (before, after))
    run(before[0], saves_with_dcp, first, flatten, path)
    results = run(after[0], loads_with_dcp, dataclasses.replace(then, seed=1), flatten, path)
    losses, parameters, _ = alone(Plan(optimizer), 9)
    assert_same(results, results[:1] * after[0])
    assert_near(results[0], (losses[3:], parameters, []), 1e-9, 1e-11)


def full_state(plan: Plan, broadcast: bool) -> Any:
    model, opt = pair(plan)
    learn(model, opt, range(3))
    opt.consolidate_state_dict(to=0)
    how = StateDictOptions(full_state_dict=True)  # torch sets no flattened full state
    with warnings_as("ignore"):
        state = copy.deepcopy(get_optimizer_state_dict(model, opt, options=how))
    things = [[model.state_dict(), state] if rank() == 0 else None]
    dist.broadcast_object_list(things, src=0)
    other, target = pair(Plan(plan.optimizer, plan.options, seed=1))
    other.load_state_dict(things[0][0])
    state = things[0][1] if rank() == 0 or not broadcast else {}
    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        set_optimizer_state_dict(other, target, state, options=how)
    learn(model, opt, range(3, 8))
    learn(other, target, range(3, 8))
    return weights(other), weights(model)


@pytest.mark.parametrize(("broadcast", "optimizer"), [(False, "adam"), (True, "sgd")])
@every_spread
def test_a_full_state_of_a_consolidated_optimizer(world, spread, optimizer, broadcast):
    results = run(world, full_state, Plan(optimizer, spread), broadcast)
    for resumed, straight in results:
        assert_same(resumed, straight)
        assert_same(resumed, results[0][0])


# ---- frozen layers ----

FROZEN = 3  # one of two linear layers of one shape


def frozen(names: tuple[str, ...]) -> tuple[list[Tensor], Any]:
    model, opt = pair(Plan())

    def require(module: nn.Module, required: bool) -> None:
        for name in names:
            module[FROZEN].get_parameter(name).requires_grad_(required)

    def learn_alike(net: nn.Module, optimizer: Any, steps: range) -> None:
        for i in steps:  # the whole batch on each rank, so that no gradient is missing
            x = torch.randint(9, (ROWS,), generator=torch.Generator().manual_seed(i))
            descend(optimizer, net(x).square().mean())

    learn_alike(model, opt, range(2))
    require(model, False)
    learn_alike(model, opt, range(2, 4))
    state = whole_state(opt)
    other, fresh = pair(Plan(seed=5))
    require(other, False)
    other.load_state_dict(model.state_dict())
    with warnings_as("ignore"):
        fresh.load_state_dict(state)
    for steps in (range(4, 6), range(6, 8)):
        for one, its in ((model, opt), (other, fresh)):
            learn_alike(one, its, steps)
            require(one, True)
    return weights(other), weights(model)


@pytest.mark.parametrize("names", [("weight", "bias"), ("bias",)], ids=["layer", "bias"])
def test_frozen_layers_go_on_alike_on_all_ranks(names):
    (one, saved), (two, _) = run(2, frozen, names)
    assert_same(one, two)
    assert_same(one, saved)
