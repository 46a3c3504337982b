"""K-FAC state that is spread over ranks, in checkpoints: at the same ranks, and at others."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

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
    set_model_state_dict,
    set_optimizer_state_dict,
)

from kaisa_optim import KFACSGD, KFACAdam, with_kfac
from tests.optim.test_checkpoint import quietly_load
from tests.support import groups
from tests.support.cluster import average, kept, rank, share, taken_by, weights, world
from tests.support.ranks import run
from tests.support.training import assert_near, assert_same, recorded_warnings, warnings_as

ROWS = 48  # of a batch, over all ranks: as many for each of 2, 3 or 4
# A stop after three steps is within both intervals, and half way through the layers' turns.
OPTIONS: dict[str, Any] = {"factor_update_steps": 2, "inv_update_steps": 4, "kl_clip": 1e-2}
RMSprop = with_kfac(torch.optim.RMSprop)
# Its class, its arguments, and the name of its momentum.
FAMILY: dict[str, tuple[type[Any], dict[str, Any], str]] = {
    "sgd": (KFACSGD, {"lr": 0.1, "momentum": 0.9}, "momentum_buffer"),
    "adam": (KFACAdam, {"lr": 0.01, "eps": 1e-2}, "exp_avg"),
    "rmsprop": (RMSprop, {"lr": 0.01, "eps": 1e-2}, "kfac-momentum"),
}
PLAIN: dict[str, type[Any]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
METHODS: dict[str, dict[str, Any]] = {
    "polar": {},
    "polar at once": {"staggered": False},
    "eigen": {"compute_method": "eigen", "staggered": False},
    "products": {"compute_method": "eigen", "compute_eigenvalue_outer_product": True},
    "inverse": {"compute_method": "inverse"},
    "inverse in float32": {"compute_method": "inverse", "factor_dtype": torch.float32},
}
SPREADS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "default": (2, {}),
    "opt": (2, {"assignment": "opt"}),
    "layer-wise": (2, {"assignment": "layer-wise"}),
    "layer-wise of 4": (4, {"assignment": "layer-wise"}),
    "opt of 3, parted": (3, {"assignment": "opt", "colocate_factors": False}),
    "opt of 4": (4, {"assignment": "opt"}),
    "hybrid": (4, {"grad_worker_fraction": 0.5}),
    "hybrid, parted": (4, {"grad_worker_fraction": 0.5, "colocate_factors": False}),
}
EVERY = ("opt", "layer-wise", "hybrid, parted")
every_spread = pytest.mark.parametrize("spread", EVERY)
# With as many gradient workers of each layer.
WORKERS = {"layer-wise of 4": 1, "layer-wise": 1, "hybrid": 2, "opt": 2}
every_share = pytest.mark.parametrize("spread", WORKERS)


@dataclass(frozen=True)
class Plan:
    optimizer: str = "sgd"
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def build(self) -> tuple[nn.Sequential, Any]:
        model = net(self.seed)
        cls, base, _ = FAMILY[self.optimizer]
        return model, cls(model, **taken_by({**base, **OPTIONS, **self.options}))

    def momenta(self, model: nn.Module, opt: Any) -> dict[int, Tensor]:
        """The momenta that this rank keeps, by the parameter's place in the model."""
        (_, _, key), entries = FAMILY[self.optimizer], map(opt.state.get, model.parameters())
        return {i: entry[key].clone() for i, entry in enumerate(entries) if key in (entry or {})}


def on_ranks(
    spread: str,
    function: Callable[..., Any],
    *args: Any,
    optimizer: str = "sgd",
    method: str = "polar",
    seed: int = 0,
) -> list[Any]:
    """What a plan comes to on each rank of a spread; one process is that of the tests."""
    ranks, options = SPREADS[spread]
    plan = Plan(optimizer, METHODS[method] | options, seed)
    return run(ranks, function, plan, *args) if ranks > 1 else [function(plan, *args)]


def net(seed: int = 0) -> nn.Sequential:
    """Four layers, of which two are of one shape; one of their factors is diagonal."""
    torch.manual_seed(seed)
    layers = [nn.Embedding(9, 5), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6)]
    return nn.Sequential(*layers).double()


LAYERS = [name.rpartition(".")[0] for name, _ in net().named_parameters()]


def learn(model: nn.Module, opt: Any, steps: range) -> None:
    for i in steps:
        generator = torch.Generator().manual_seed(i)
        x = torch.randint(9, (ROWS,), generator=generator)
        x, y = share(x, torch.randn(ROWS, 6, generator=generator, dtype=torch.float64))
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        average(model.parameters())
        opt.step()


def state_of(opt: Any, action: Any = "error") -> dict[str, Any]:
    """A state dict that must not warn, or may."""
    with warnings_as(action):
        return opt.state_dict()


def whole_state(opt: Any) -> Any:
    """The consolidated state, on all ranks."""
    opt.consolidate_state_dict(to=0)
    box = [copy.deepcopy(state_of(opt)) if rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    return box[0]


def refusal(act: Callable[..., Any], *args: Any) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        act(*args)
    return str(caught.value)


# ---- a rank's share ----


def averages(state: dict[str, Any]) -> dict[tuple[str, str], Tensor]:
    """The running averages in a state dict, by layer and side."""
    return {
        (LAYERS[index], key[len("kfac_")]): value
        for index, entry in state["state"].items()
        for key, value in entry.items()
        if key.endswith("_average")
    }


def takes_shares(plan: Plan) -> Any:
    """Return the averages that this rank owns, and of state dicts; warnings, errors and weights.

    It has a state dict to itself, a consolidated one on rank 1, and one after another step.
    """
    model, opt = plan.build()
    learn(model, opt, range(3))
    owned, received = kept(opt), opt.preconditioner.ranks.received
    found: list[Any] = []
    before = dict(received)
    with recorded_warnings() as texts:
        # One rank after the other, each alone: an exchange would not find the others.
        for turn in range(world()):
            if rank() == turn:
                found.append(set(averages(opt.state_dict())))
                assert set(averages(opt.state_dict())) == found[-1]
            dist.barrier()
    assert dict(received) == before
    refusals = [refusal(opt.consolidate_state_dict, to) for to in (world(), -1, "0")]
    opt.consolidate_state_dict(to=1)
    gathered = {key: value.clone() for key, value in averages(state_of(opt)).items()}
    learn(model, opt, range(3, 5))
    found += [gathered, set(averages(state_of(opt, "ignore")))]
    return owned, found, texts, refusals, weights(model)


@every_spread
def test_a_state_dict_is_the_ranks_share_until_it_is_consolidated(spread):
    ranks = on_ranks(spread, takes_shares)
    everything = {key: value for owned, *_ in ranks for key, value in owned.items()}
    assert len(everything) == sum(len(owned) for owned, *_ in ranks) == 8
    for i, (owned, (alone, gathered, later), texts, refusals, parameters) in enumerate(ranks):
        assert alone == later == set(owned)
        assert_same(gathered, everything if i == 1 else owned)
        assert_same(parameters, ranks[0][-1])
        for to, text in zip((len(ranks), -1, "0"), refusals, strict=True):
            last = f"it must be a rank of the process group, 0 to {len(ranks) - 1}"
            assert f"Invalid to: {to!r}; {last}" in text
        text, again = texts  # a warning for each call, with what others keep
        assert text == again
        assert f"rank {i}'s share" in text and "consolidate_state_dict(to=rank)" in text
        for name, side in everything:
            assert (f"{side.upper()} of {name!r}" in text) == ((name, side) not in owned)


def says_so(plan: Plan) -> dict[str, list[str]]:
    """Warnings of a share, as Python's default filter shows them: a repeated text is hidden."""
    model, opt = plan.build()
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


@pytest.mark.parametrize(
    ("optimizer", "method"),
    [("sgd", "polar"), ("adam", "polar"), ("adam", "eigen"), ("rmsprop", "polar")],
)
def test_a_share_says_so_each_time_unless_it_is_saved_with_the_others(optimizer, method):
    """With the default assignment, each momentum is on one rank."""
    momenta = []
    for i, texts in enumerate(on_ranks("default", says_so, optimizer=optimizer, method=method)):
        said = {name for name, lines in texts.items() if lines}
        assert said == {"saves", "dcp, full", "a step later"}
        first, second = texts["saves"]
        assert f"after 1 steps has only rank {i}'s share" in first
        assert f"after 2 steps has only rank {i}'s share" in second
        momenta.append(set(re.findall(r"'(\d\.\w+)'", texts["a step later"][0])))
    names = {name for name, _ in net().named_parameters()}
    assert momenta[0] | momenta[1] == (set() if method == "eigen" else names)
    assert not momenta[0] & momenta[1]


# ---- ways to save ----

FILES = ("shares", "whole")  # of each rank, or of the last one
# And what ``torch.distributed.checkpoint`` offers.
WAYS: dict[str, StateDictOptions | None] = {
    "shares": None,
    "whole": None,
    "dcp": StateDictOptions(),
    "dcp, flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),  # torch sets no flattened full state
    "full, from rank 0": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}


def state_dicts(model: nn.Module, opt: Any, way: str) -> dict[str, Any]:
    how = WAYS[way]
    if how is None:
        return {"model": model.state_dict(), "optimizer": opt.state_dict()}
    return dict(zip(("model", "optimizer"), get_state_dict(model, opt, options=how), strict=True))


def save(model: nn.Module, opt: Any, way: str, path: str) -> None:
    keeper = world() - 1 if way == "whole" else 0
    if way.startswith(("whole", "full")):
        opt.consolidate_state_dict(to=keeper)
    with warnings_as("error" if way == "whole" and rank() == keeper else "ignore"):
        saved = state_dicts(model, opt, way)
    if way.startswith("dcp"):
        dcp.save(saved, checkpoint_id=path)
    elif way == "shares":
        torch.save(saved, f"{path}{rank()}")
    elif rank() == keeper:
        torch.save(saved, path)
    if world() > 1:
        dist.barrier()


def load(model: nn.Module, opt: Any, way: str, path: str) -> None:
    """Load what was saved, without a warning."""
    if way.startswith("dcp"):
        before = weights(model)
        with warnings_as("ignore"):
            saved = state_dicts(model, opt, way)
        # It steps once, with zero gradients and lr 0.
        assert_same(weights(model), before)
        assert opt.preconditioner.steps == 0
        dcp.load(saved, checkpoint_id=path)
    else:
        saved = torch.load(f"{path}{rank()}" if way == "shares" else path, weights_only=True)
    how = WAYS[way]
    if how is None:
        model.load_state_dict(saved["model"])
        quietly_load(opt, saved["optimizer"])
        return
    if how.broadcast_from_rank0 and rank() > 0:
        saved = {"model": {}, "optimizer": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        set_model_state_dict(model, saved["model"], options=how)
        set_optimizer_state_dict(model, opt, saved["optimizer"], options=how)


def goes_on(plan: Plan, way: str, path: str, at: int, frozen: tuple[str, ...]) -> list[Any]:
    """Return what a run comes to that nothing interrupts, and one that is resumed ``at`` a step.

    Some parameters of one of two linear layers of a shape are frozen from two steps before to two
    steps after that.
    """
    straight = plan.build()
    learn(*straight, range(at - 2))
    require(straight[0], frozen, False)
    learn(*straight, range(at - 2, at))
    save(*straight, way, path)
    resumed = replace(plan, seed=1).build()
    require(resumed[0], frozen, False)
    load(*resumed, way, path)
    results = []
    for model, opt in (straight, resumed):
        learn(model, opt, range(at, at + 2))
        require(model, frozen, True)
        learn(model, opt, range(at + 2, at + 6))
        results.append((state_of(opt, "ignore")["state"], weights(model)))
    return results


def require(model: nn.Sequential, names: tuple[str, ...], required: bool) -> None:
    for name in names:
        model[3].get_parameter(name).requires_grad_(required)


@pytest.mark.parametrize(
    ("spread", "way", "optimizer", "method", "at", "frozen"),
    [
        *(("opt", way, "sgd", x, 6, ()) for way in FILES for x in ("polar", "eigen")),
        *(("layer-wise", way, "adam", "polar", 3, ()) for way in FILES),
        *((x, way, "adam", "inverse in float32", 3, ()) for way in FILES for x in EVERY[1:]),
        *(
            (EVERY[2], way, "adam", x, 3, ())
            for way in FILES
            for x in ("polar", "eigen", "products")
        ),
        ("hybrid, parted", "dcp, flat", "sgd", "polar", 3, ()),
        *((spread, "full", "adam", "polar", 3, ()) for spread in EVERY),
        *((spread, "full, from rank 0", "sgd", "polar", 3, ()) for spread in EVERY),
        *(("default", "whole", "sgd", "polar", 4, x) for x in (("weight", "bias"), ("bias",))),
    ],
)
def test_the_same_ranks_go_on_bit_for_bit(spread, way, optimizer, method, at, frozen, tmp_path):
    args = way, str(tmp_path / "state"), at, frozen
    results = on_ranks(spread, goes_on, *args, optimizer=optimizer, method=method)
    for straight, resumed in results:
        assert_same(resumed, straight)
        assert_same(resumed[1], results[0][0][1])


def section(plan: Plan, steps: range, way: str, source: str | None, target: str | None) -> Any:
    """A part of the training on these ranks, between two checkpoints."""
    model, opt = plan.build()
    if source is not None:
        load(model, opt, way, source)
    learn(model, opt, steps)
    if target is not None:
        save(model, opt, way, target)
    return weights(model), opt.preconditioner.steps


TOUR = ("layer-wise of 4", "alone", "opt of 3, parted", "hybrid", "layer-wise")


@pytest.mark.parametrize(
    ("way", "optimizer", "method", "spreads"),
    [
        *(("whole", "adam", x, TOUR) for x in ("polar", "eigen", "products", "inverse")),
        ("dcp", "sgd", "polar", ("layer-wise", "opt of 4", "opt of 4")),
        ("dcp, flat", "adam", "polar", ("hybrid, parted", "layer-wise", "layer-wise")),
        ("dcp, flat", "adam", "eigen", ("hybrid, parted", "layer-wise", "layer-wise")),
    ],
)
def test_other_ranks_go_on_as_one_process(way, optimizer, method, spreads, tmp_path):
    """Each part is three steps long; against a run that nothing interrupts."""
    source = None
    of = {"optimizer": optimizer, "method": method}
    for i, spread in enumerate(spreads):
        target = str(tmp_path / str(i))
        steps = range(3 * i, 3 * i + 3)
        results = on_ranks(spread, section, steps, way, source, target, seed=i, **of)
        assert_same(results, results[:1] * len(results))
        source = target
    (expected,) = on_ranks("alone", section, range(3 * len(spreads)), way, None, None, **of)
    near = (1e-8, 1e-10) if method == "polar" else (1e-9, 1e-11)
    assert_near(results[0], expected, *near)


# ---- what is missing ----


def loads_one_share(plan: Plan, path: str, paused: bool) -> Any:
    """All load what rank 0 had.

    Return warnings, layers with averages at once and after the next step, and weights; with the
    averages on this rank, those of a run that nothing interrupts, and of one that begins there.
    """
    model, opt = plan.build()
    learn(model, opt, range(3))
    if rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": state_of(opt, "ignore")}, path)
    dist.barrier()
    saved = torch.load(path, weights_only=True)
    other, target = plan.build()
    other.load_state_dict(saved["model"])
    with recorded_warnings() as texts:
        target.load_state_dict(saved["optimizer"])
    registry = target.preconditioner.registry
    with_average = [{layer.name for layer in registry.with_average}]
    # What some ranks lack is lacking on all of them, also while nothing is gathered; else the ranks
    # that lack it gather it alone, which must not count.
    with target.preconditioner.paused() if paused else contextlib.nullcontext():
        learn(other, target, range(3, 4))
    learn(model, opt, range(3, 4))
    begun, new = plan.build()
    for one in (model, begun):
        one.load_state_dict(other.state_dict())
    for one, its in ((other, target), (model, opt), (begun, new)):
        learn(one, its, range(4, 5))
    with_average.append({layer.name for layer in registry.with_average})
    return texts, with_average, weights(other), [kept(x) for x in (target, opt, new)]


@pytest.mark.parametrize("spread", ["layer-wise", "opt"])
@pytest.mark.parametrize("paused", [True, False])
def test_factors_that_are_missing_are_named_and_estimated_anew(spread, paused, tmp_path):
    ranks = on_ranks(
        spread, loads_one_share, str(tmp_path / "state"), paused, method="polar at once"
    )
    every = set(LAYERS)
    (nothing, first, parameters, _), ((text,), second, _, _) = ranks
    missing = every - second[0]
    assert missing and (missing < every or spread == "opt")
    assert first[0] == every and not nothing
    assert ", which rank 1 keeps (was it saved without consolidate_state_dict()?)" in text
    assert all((repr(name) in text) == (name in missing) for name in every)
    for _, with_average, found, (loaded, straight, begun) in ranks:
        assert with_average[1] == every
        for key, value in loaded.items():
            whole = key[0] not in missing  # of the others, one side may be in the file
            assert_near(value, (straight if whole else begun)[key], 1e-12)
        assert_same(found, parameters)


def misreads(plan: Plan) -> list[str]:
    """Rank 1's copy of a state is spoilt, or all are; errors, and what steps do afterwards."""
    model, opt = plan.build()
    learn(model, opt, range(3))
    good = whole_state(opt)
    spoilt = copy.deepcopy(good)
    spoilt["state"][1]["kfac_g_average"] = torch.ones(3)
    errors = [refusal(opt.load_state_dict, spoilt)]  # by all: they go on with what they have
    learn(model, opt, range(3, 4))
    assert opt.preconditioner.steps == 4
    if rank() == 1:
        errors.append(refusal(opt.load_state_dict, spoilt))
    else:
        quietly_load(opt, good)
    errors.append(refusal(learn, model, opt, range(3, 4)))
    errors.append(refusal(opt.consolidate_state_dict, 0))
    quietly_load(opt, good)
    learn(model, opt, range(3, 6))
    assert opt.preconditioner.steps == 6
    return errors


@every_spread
def test_what_one_rank_misreads_is_raised_by_all(spread):
    """Until a state is loaded that all can read."""
    for i, errors in enumerate(on_ranks(spread, misreads)):
        for error in errors:
            assert "Invalid state_dict: " in error and "kfac_g_average is (3,)" in error
        told = ["loading a state failed on rank 1: ValueError" in error for error in errors]
        assert told == ([False] * 4 if i == 1 else [False, True, True])


# ---- momenta of "polar" ----


def goes_on_from_the_base(plan: Plan) -> list[Tensor]:
    """Train the base for three steps, and K-FAC over it from its state."""
    _, settings, momentum = FAMILY[plan.optimizer]
    model = net()
    plain = PLAIN[plan.optimizer](model.parameters(), **settings)
    learn(model, plain, range(3))
    other, opt = plan.build()
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
            assert_near(opt.state[p][momentum], entry[momentum])
        if plan.optimizer == "adam":
            total = sum(entry["exp_avg_sq"].sum() for entry in entries.values())
            assert_near(opt.state[layer.parameters[0]]["kfac_square_sum"], total.view(1))
    learn(other, opt, range(4, 7))
    return weights(other)


@every_share
@pytest.mark.parametrize("optimizer", PLAIN)
def test_a_plain_checkpoint_goes_on_as_on_one_process(spread, optimizer):
    ranks = on_ranks(spread, goes_on_from_the_base, optimizer=optimizer)
    (alone,) = on_ranks("alone", goes_on_from_the_base, optimizer=optimizer)
    for result in ranks:
        assert_same(result, ranks[0])
    assert_near(ranks[0], alone, 1e-8, 1e-10)


def works(model: nn.Module, opt: Any) -> set[int]:
    """Places of the parameters whose gradient worker this rank is."""
    here = {p for layer in groups.applied(opt) for p in layer.parameters}
    return {i for i, p in enumerate(model.parameters()) if p in here}


def saves_momenta(plan: Plan, path: str) -> dict[int, Tensor]:
    model, opt = plan.build()
    learn(model, opt, range(3))
    save(model, opt, "whole", path)
    momenta = plan.momenta(model, opt)
    assert momenta.keys() == works(model, opt)
    return momenta


def loads_whole(plan: Plan, path: str) -> tuple[dict[int, Tensor], Any]:
    """Momenta as loaded, and the state as gathered from there."""
    model, opt = plan.build()
    learn(model, opt, range(1))
    whole_state(opt)
    load(model, opt, "whole", path)
    # What was gathered before is forgotten.
    assert averages(state_of(opt, "ignore")).keys() == kept(opt).keys()
    loaded, gathered = plan.momenta(model, opt), whole_state(opt)["state"]
    learn(model, opt, range(3, 4))
    assert plan.momenta(model, opt).keys() == works(model, opt)
    return loaded, gathered


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize(("before", "after"), [*pairwise([*WORKERS, "layer-wise of 4"])])
def test_a_state_loads_at_another_number_of_ranks_bit_for_bit(optimizer, before, after, tmp_path):
    """Momenta are on gradient workers alone, from the first step after the load on."""
    path = str(tmp_path / "state")
    momenta = on_ranks(before, saves_momenta, path, optimizer=optimizer)
    places = [place for of_rank in momenta for place in of_rank]
    assert {i: places.count(i) for i in places} == dict.fromkeys(range(7), WORKERS[before])
    whole = {place: momentum for of_rank in momenta for place, momentum in of_rank.items()}
    assert all(momentum.any() for momentum in whole.values())
    for of_rank in momenta:
        assert_same(of_rank, {i: whole[i] for i in of_rank})
    saved = torch.load(path, weights_only=True)["optimizer"]["state"]
    for loaded, gathered in on_ranks(after, loads_whole, path, optimizer=optimizer):
        assert_same(loaded, whole)
        assert_same(gathered, saved)


def exports(plan: Plan) -> tuple[list[str], dict[str, Any] | None]:
    """The state for the base, on rank 0 or alone; errors where it is not whole."""
    model, opt = plan.build()
    learn(model, opt, range(3))
    errors = [refusal(opt.base_state_dict)] if world() > 1 else []
    opt.consolidate_state_dict(to=0)
    if rank() > 0:
        return [*errors, refusal(opt.base_state_dict)], None
    state = opt.base_state_dict()
    plain = PLAIN[plan.optimizer](net().parameters(), **FAMILY[plan.optimizer][1])
    keys = sorted(plain.state_dict()["param_groups"][0])
    assert sorted(state["param_groups"][0]) == keys
    plain.load_state_dict(copy.deepcopy(state))
    for p in plain.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    plain.step()
    return errors, state["state"]


@every_share
@pytest.mark.parametrize("optimizer", PLAIN)
def test_the_base_loads_a_consolidated_state(spread, optimizer):
    ranks = on_ranks(spread, exports, optimizer=optimizer)
    ((_, alone),) = on_ranks("alone", exports, optimizer=optimizer)
    for i, (errors, _) in enumerate(ranks):
        assert len(errors) == 1 + (i > 0)
        assert all("call consolidate_state_dict(to=rank)" in error for error in errors)
    of_ranks = ranks[0][1]
    assert of_ranks.keys() == alone.keys() == set(range(7))
    for index, entry in alone.items():
        assert_near(of_ranks[index], entry, 1e-8, 1e-10)


def turns_to(before: Plan, method: str) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Weights of a run that goes on with another method, and of one that begins there."""
    model, opt = before.build()
    learn(model, opt, range(3))
    state = whole_state(opt)
    other, target = replace(before, options=before.options | {"compute_method": method}).build()
    other.load_state_dict(model.state_dict())
    with recorded_warnings() as texts:
        target.load_state_dict(state)
    learn(other, target, range(3, 6))
    return texts, weights(other), weights(model)


@every_share
@pytest.mark.parametrize(("before", "after"), [("eigen", "polar"), ("polar", "eigen")])
def test_momenta_of_another_method_begin_anew_on_all_ranks(spread, before, after):
    ranks = on_ranks(spread, turns_to, after, optimizer="adam", method=before)
    for texts, result, start in ranks:
        (text,) = [text for text in texts if text.startswith("this state lacks the momenta of ")]
        assert all(repr(name) in text for name in LAYERS)
        assert_same(result, ranks[0][1])
        assert all(not torch.equal(a, b) for a, b in zip(result, start, strict=True))
