"""Several ranks do what one process does with the joined batch, however the work is spread.

The ranks are real: processes with gloo between them, from a pool that stays. Hypothesis draws in
the process of the tests and sends what it has drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kaisa_optim import KFACSGD, KFACAdam, LayerWise, Opt
from kaisa_optim.agree import are_equal, checksum
from kaisa_optim.comm.ranks import Bucket, CopyItem, Ranks
from kaisa_optim.curvature import refresh
from kaisa_optim.curvature.rules import PolarRule
from tests.support import groups
from tests.support.close import assert_close
from tests.support.cluster import (
    CLASSES,
    INPUTS,
    OPTIMIZERS,
    Plan,
    Scattered,
    Trained,
    assert_alike,
    average,
    batch,
    build,
    error,
    even,
    kept,
    micro_batches,
    network,
    share,
    taken_by,
    train,
    train_alone,
    values,
)
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import ANEW, assert_same, descend, early

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")

WORLDS = (2, 3, 4)
PAPERS: dict[str, dict[str, Any]] = {
    "eigen": {"compute_method": "eigen"},
    "product": {"compute_method": "eigen", "compute_eigenvalue_outer_product": True},
    "inverse-pi": {"compute_method": "inverse"},
    "inverse-full": {"compute_method": "inverse", "damping_split": "full"},
}
CURVATURES: dict[str, dict[str, Any]] = {"polar": {}, **PAPERS}
METHODS = ["polar", "eigen"]
# Of "polar", a rank's batch has more rows than any layer is wide.
ROWS, FEW = 12, 2
INTERVALS = {"factor_update_steps": 2, "inv_update_steps": 3}


def divisors(world: int) -> list[int]:
    return [n for n in range(1, world + 1) if world % n == 0]


def check(
    plan: Plan, *spreads: dict[str, Any], tolerance: float | None = None
) -> list[dict[str, Tensor]]:
    """Train the plan with its work spread in some ways; return the parameters of each.

    Ranks have the same bits, and the parameters of one process.
    """
    alone, parameters = train_alone(plan).parameters, []
    for spread in spreads or (plan.spread,):
        ranks = run(plan.world, train, dataclasses.replace(plan, spread=spread))
        assert_alike([rank.parameters for rank in ranks])
        limit = tolerance or (1e-8 if plan.is_polar else 1e-9)
        assert error(ranks[0].parameters, alone) < limit
        parameters.append(ranks[0].parameters)
    return parameters


def assert_as_alone(ranks: list[Trained], alone: Trained, tolerance: float) -> None:
    """Parameters are alike on all ranks, each factor is kept by one, and both are those of one
    process."""
    assert_alike([rank.parameters for rank in ranks])
    assert error(ranks[0].parameters, alone.parameters) < tolerance
    factors = {key: factor for rank in ranks for key, factor in rank.factors.items()}
    assert len(factors) == sum(len(rank.factors) for rank in ranks)
    assert factors.keys() == alone.factors.keys()
    for key, factor in alone.factors.items():  # some are zero
        assert_close(factors[key], factor, tolerance, str(key), floor=0)


def learn(model: nn.Module, opts: Sequence[Any], *batch: Tensor, averaged: Any = ()) -> None:
    """Step along this rank's part of a batch; ``averaged`` are what no wrapper averages."""
    *inputs, labels = batch
    for opt in opts:
        opt.zero_grad()
    F.cross_entropy(model(*inputs), labels).backward()
    average(averaged)
    for opt in reversed(opts):
        opt.step()


# ---- the same update as one process ----


@st.composite
def spreads(draw, world: int) -> dict[str, Any]:
    """Where the work goes: strategy, fraction, colocation, buckets."""
    workers = draw(st.sampled_from(divisors(world)))
    fraction = {"grad_worker_fraction": workers / world}
    ways = [
        *((x, workers) for x in (fraction, {"assignment": "hybrid", **fraction})),
        ({"assignment": Scattered(workers)}, workers),
        *(({"assignment": x}, world) for x in ("opt", Opt())),
        *((x, 1) for x in ({}, {"assignment": "layer-wise"}, {"assignment": LayerWise()})),
    ]
    chosen, workers = draw(st.sampled_from(ways))
    colocations = [None, True, False] if workers > 1 else [None, True]
    return {
        **chosen,
        "colocate_factors": draw(st.sampled_from(colocations)),
        "bucket_cap_mb": draw(st.sampled_from([1e-4, 1e-3, 5e-3, 25.0])),
    }


@st.composite
def curvatures(draw) -> dict[str, Any]:
    return {
        **CURVATURES[draw(st.sampled_from(list(CURVATURES)))],
        "damping": draw(st.sampled_from([0.01, 0.1, 1.0])),
        "factor_decay": draw(st.sampled_from([0.5, 0.95, 1.0])),
        "kl_clip": draw(st.sampled_from([None, 1e-5])),
        "factor_update_steps": draw(st.integers(1, 3)),
        "inv_update_steps": draw(st.integers(1, 4)),
        "staggered": draw(st.sampled_from([None, True, False])),
        "max_factor_size": draw(st.sampled_from([16384, 7])),
    }


@st.composite
def plans(draw) -> Plan:
    world = draw(st.sampled_from(WORLDS))
    name = draw(st.sampled_from(["images", "tokens", "chain"]))
    options, alone = draw(curvatures()), {}
    optimizer = draw(st.sampled_from(list(OPTIMIZERS)))
    is_polar = Plan((), optimizer=optimizer, options=options).is_polar
    rows = (9, ROWS) if is_polar else (1, 3)
    # Of "polar", no option tells how losses of ragged batches are weighed.
    weighed = not is_polar and draw(st.booleans())
    if not weighed and not is_polar and draw(st.integers(0, 3)) == 0:
        # The papers' code leaves K out: what each rank averages over its own examples is then
        # larger by the number of ranks, as if the joined loss had been scaled down.
        options["normalization"] = "kaisa"
        alone = {"grad_scaler": 1 / world}
    else:
        # Reduced gradients of attention's keys are zero but for rounding; "polar" has them divided
        # by their mean.
        reduces = ["reduce"] if not is_polar or name != "tokens" else []
        options["weight_sharing"] = draw(st.sampled_from(["expand", *reduces]))
        if not weighed:
            options["loss_terms"] = draw(st.sampled_from(["examples", "positions"]))
    micro = draw(st.integers(1, 3))
    if weighed:
        part = st.tuples(*[st.integers(*rows)] * micro)
        sizes = draw(st.tuples(*[part] * world))
    else:
        sizes = even(world, draw(st.integers(*rows)), micro)
    return Plan(
        sizes,
        name,
        optimizer,
        options=options,
        alone=alone,
        spread=draw(spreads(world)),
        wrapper=draw(st.sampled_from([{}, {"gradient_as_bucket_view": True}, None])),
        groups=draw(st.booleans()),
        weighed=weighed,
        steps=6,
    )


@given(plans())
@settings(max_examples=16)
def test_ranks_take_the_steps_of_one_process(plan):
    check(plan)


def fractions(world: int, together: bool = True) -> list[dict[str, Any]]:
    """All fractions, from layer-wise to opt; with factors in one place where they may part."""
    return [
        {"grad_worker_fraction": workers / world, "colocate_factors": together}
        for workers in divisors(world)
        if together or workers > 1
    ]


@pytest.mark.parametrize(
    ("world", "name", "curvature", "optimizer"),
    [
        *((4, "images", curvature, "sgd") for curvature in CURVATURES),
        *((2, "tokens", curvature, "sgd") for curvature in CURVATURES),
        (3, "images", "polar", "sgd"),
        (4, "tokens", "eigen", "sgd"),
        # Along directions: lengths go by the base.
        *((4, "images", "polar", base) for base in ("adam", "lamb")),
        *((2, name, "polar", base) for base in ("adam", "lamb") for name in ("tokens", "chain")),
    ],
)
def test_every_fraction_takes_the_same_steps(world, name, curvature, optimizer):
    """Ten of them; with the same bits where sums run in one order."""
    options = {**CURVATURES[curvature], **INTERVALS, "kl_clip": 1e-5, "max_factor_size": 14}
    rows = ROWS if curvature == "polar" else FEW
    plan = Plan(even(world, rows), name, optimizer, options=options)
    parameters = check(plan, *fractions(world))
    if world != 3:
        assert_alike(parameters)
    if name == "images":
        check(plan, fractions(world, together=False)[-1])


@pytest.mark.parametrize("world", WORLDS)
def test_sums_of_terms_are_one_term_a_rank(world):
    how: dict[str, Any] = {
        "base": {"lr": 0.05 / (2 * world)},  # gradients are those of sums, too
        "options": {**PAPERS["eigen"], "loss_reduction": "sum", "kl_clip": None},
        "alone": {"loss_reduction": "mean", "loss_terms": world},
        "loss_scale": 2,  # each rank's loss is then the sum over its own examples
    }
    check(Plan(even(world, 2), "images", **how), tolerance=1e-7)


@pytest.mark.parametrize("strategy", ["layer-wise", "opt"])
@pytest.mark.parametrize("name", ["images", "tokens"])
def test_factors_of_ragged_batches_are_those_of_the_joined_batch(name, strategy):
    # The losses are not weighed: gradients differ from the joined batch's, factors do not.
    spread, sharing = {"assignment": strategy}, "expand" if strategy == "opt" else "reduce"
    sizes = ((1, 2), (4,), (2, 1, 1))
    options = {"weight_sharing": sharing, "factor_update_steps": 1, "factor_decay": 0.7}
    options = {**PAPERS["eigen"], **options}
    how: dict[str, Any] = {"wrapper": None, "weighs": False, "steps": 3}
    plan = Plan(sizes, name, base={"lr": 0.0}, options=options, spread=spread, **how)
    assert_as_alone(run(plan.world, train, plan), train_alone(plan), 1e-12)


@given(st.data())
@settings(max_examples=8)
def test_all_ways_to_spread_have_the_same_bits(data):
    # LAPACK's bits follow the alignment of each matrix of a batch, and the batch is what one rank
    # decomposes at once: matrices of 32 bytes or a multiple are aligned in every batch.
    world = data.draw(st.sampled_from(WORLDS))
    options = {**data.draw(curvatures()), "max_factor_size": 16384}
    plan = Plan(even(world, 2), "chain", options=options, steps=6)
    two = [dataclasses.replace(plan, spread=data.draw(spreads(world))) for _ in range(2)]
    assert_alike([rank.parameters for each in two for rank in run(world, train, each)])


ONE_STEP: dict[str, Any] = {"steps": 1, "base": {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}}


def updates(plan: Plan, spread: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Return how far a run of one process moves the parameters, or one of ranks, alike on all."""
    ranks = (
        [train_alone(plan)]
        if spread is None
        else run(plan.world, train, dataclasses.replace(plan, spread=spread))
    )
    assert_alike([rank.parameters for rank in ranks])
    before = values(network(plan.network, dtype=plan.dtype))
    return {name: before[name] - p for name, p in ranks[0].parameters.items()}


@pytest.mark.parametrize("curvature", list(CURVATURES))
@pytest.mark.parametrize(("world", "name"), [(3, "images"), (4, "tokens")])
def test_the_first_update_in_float32(world, name, curvature):
    # Rounding errors of float32 grow by the largest eigenvalue over the damping. The full split has
    # that on both sides, so that its square is in the result. A polar factor has errors of the
    # least singular value, too, to which the roots add.
    damping = {"inverse-full": 0.1, "polar": 1.0}.get(curvature, 0.05)
    options = {**CURVATURES[curvature], "kl_clip": None, "damping": damping}
    sizes = even(world, ROWS if curvature == "polar" else FEW)
    plan = Plan(sizes, name, options=options, dtype=torch.float32, **ONE_STEP)
    expected = updates(plan)
    for spread in fractions(world):
        assert error(updates(plan, spread), expected) < 1e-4


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("world", WORLDS)
def test_half_precision_on_the_wire(world, scale):
    """Rounded to ``unit``, A and G are off by no more than that times their trace, so F = G ⊗ A by
    2 unit tr A tr G, and (F + γI)⁻¹∇ relatively by that over γ; and once more when it travels.

    The loss × c with the damping × c² is the same in other units.
    """
    damping, unit = 2.0, 2**-8
    options = {**PAPERS["eigen"], "damping": damping * scale**2, "kl_clip": None}
    # Parameters that move by 1 / c lose nothing of that to their own rounding in float64.
    plan = Plan(even(world, 4), "chain", options=options, loss_scale=scale, **ONE_STEP)
    expected, factors = updates(plan), train_alone(plan).factors
    for fraction in fractions(world):
        actual = updates(plan, {"comm_dtype": torch.bfloat16, **fraction})
        assert error(actual, expected) > 0  # it did travel in half precision
        for layer in {name for name, _ in factors}:
            traces = [float(factors[layer, side].diagonal(0, 1, 2).sum()) for side in "ag"]
            bound = unit * (1 + 2 * math.prod(traces) / options["damping"])
            assert bound < 0.05
            own = {name: p for name, p in expected.items() if name.startswith(f"{layer}.")}
            assert error({name: actual[name] for name in own}, own) <= 1.1 * bound


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_ten_steps_with_half_precision_on_the_wire(optimizer, method):
    spread = {"comm_dtype": torch.bfloat16, "assignment": "layer-wise", "bucket_cap_mb": 1e-3}
    options = {**CURVATURES[method], "damping": 1.0, **INTERVALS}
    plan = Plan(even(4, ROWS if method == "polar" else FEW), "images", optimizer, options=options)
    check(plan, spread, tolerance=0.02)


def factors_of_ranks_apart(power: int, apart: int, options: dict[str, Any]) -> dict[Any, Tensor]:
    """Return this rank's factors; the losses of neighbouring ranks are 2^``apart`` apart."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    opt = KFACSGD(net, lr=0.1, **options)
    torch.manual_seed(rank)
    (net(torch.randn(8, 5)).square().mean() * 2.0 ** (power + rank * apart)).backward()
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    return groups.averages(opt)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_ranks_whose_gradients_are_apart_by_any_factor(world, wire):
    """The squares of the small ones are zero, or those of the large ones infinite, on the wire."""
    options = {"assignment": "layer-wise", "comm_dtype": wire}
    for apart, powers in ((10, (-100, 50)), (66 // (world - 1), (-100, -66, 40))):
        plain = run(world, factors_of_ranks_apart, -30, apart, options)
        for power in powers:
            assert_same(run(world, factors_of_ranks_apart, power, apart, options), plain)


def alive(things: list[weakref.ref[Any]], at_most: int) -> int:
    """How many are in memory, once the backend has let go of what has arrived.

    Its own thread drops them after it has woken who waits, and on a busy machine it may be later.
    """
    until = time.monotonic() + 60  # ends a hang
    while (n := sum(one() is not None for one in things)) > at_most and time.monotonic() < until:
        time.sleep(0.001)
    return n


def alive_when_filled(owners: list[int]) -> int:
    """The most buckets that are still in memory when the next one is filled."""
    ranks, size = Ranks(None, bucket_cap_mb=4096 * 4 / 2**20, comm_dtype=None), 4096
    received: list[weakref.ref[torch.UntypedStorage]] = []
    counts = []
    exchange = ranks._exchange

    def noted(*args: Any) -> Any:
        flight = exchange(*args)
        received.append(weakref.ref(flight.received.untyped_storage()))
        return flight

    def loads() -> Iterator[tuple[Any, list[Tensor]]]:
        for i, owner in enumerate(owners):
            counts.append(alive(received, at_most=2))
            item = CopyItem(owner, size, i)
            yield Bucket([item], range(ranks.world), ranks.world), [torch.ones(size)]

    with mock.patch.object(ranks, "_exchange", noted):
        for sums in ranks.reduce_to_owners(loads(), "x"):
            del sums
    return max(counts)


@pytest.mark.parametrize("owners", [[0, 1] * 4, [0] * 8])
def test_no_more_buckets_stay_in_memory_than_are_on_their_way(owners):
    for world in (2, 4):
        assert run(world, alive_when_filled, owners) == [2] * world


# ---- what happens on the way ----


@pytest.mark.parametrize(("micro", "fraction"), [(1, 1.0), (2, 0.5)])
def test_a_static_graph_of_ddp(micro, fraction):
    wrapper = {"static_graph": True}
    plan = Plan(even(2, ROWS, micro), "images", options=INTERVALS, wrapper=wrapper, steps=6)
    check(plan, {"grad_worker_fraction": fraction})


# Which of three ranks use the branch, step by step.
USES = {
    "all": ["111", "111", "111", "111", "111", "111"],
    "some": ["101", "110", "010", "111", "001", "111"],
    "nobody": ["111", "000", "111", "000", "000", "101"],
    "late": ["000", "000", "010", "000", "111", "100"],
}
STEPS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "damping": 0.1}


def branched(
    options: dict[str, Any], uses: list[str], frozen: tuple[str, ...] = (), with_ddp: bool = False
) -> Trained:
    """Some examples a rank, or those of all ranks; what is ``frozen`` is not from step 2 on."""
    model = network("branched")
    parameters = dict(model.named_parameters())
    for name in frozen:
        parameters[name].requires_grad_(False)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if with_ddp else model
    opt = KFACSGD(wrapped, **STEPS, **options)
    rows = ROWS if opt.preconditioner.rule.makes_directions else FEW
    for step, used in enumerate(uses):
        if step == 2:
            model.requires_grad_(True)
        x, y = batch("branched", step, rows * 3)
        through = torch.tensor([flag == "1" for flag in used]).repeat_interleave(rows)
        averaged = [p for n, p in parameters.items() if "1" in used or "branch" not in n]
        learn(wrapped, [opt], *share(x, through, y), averaged=() if with_ddp else averaged)
    return Trained(values(model), kept(opt))


WHOLE, BIAS = ("branch.weight", "branch.bias"), ("branch.bias",)
# Uses, what is frozen at first, the assignment, steps between sums, and whether DDP averages. In a
# step that updates no factors only ranks that see the new layer know how many terms their losses
# average.
BRANCHES = [
    *((uses, (), "layer-wise", 1, True) for uses in USES),
    *((uses, (), "opt", 2, False) for uses in USES),
    *(("all", frozen, "layer-wise", 3, False) for frozen in (WHOLE, BIAS)),
    *(("all", frozen, "opt", 1, False) for frozen in (WHOLE, BIAS)),
    *(("some", frozen, x, 1, False) for frozen in (WHOLE, BIAS) for x in ("layer-wise", "opt")),
]


@pytest.mark.parametrize(("uses", "frozen", "assignment", "often", "with_ddp"), BRANCHES)
@pytest.mark.parametrize("method", METHODS)
def test_a_branch_that_ranks_leave_out_or_unfreeze(
    method, uses, frozen, assignment, often, with_ddp
):
    options = {"factor_update_steps": often, "inv_update_steps": 2, "kl_clip": 1e-3}
    options = taken_by({**options, **CURVATURES[method], "assignment": assignment})
    alone = branched(options, USES[uses], frozen)
    ranks = run(3, branched, options, USES[uses], frozen, with_ddp)
    assert_as_alone(ranks, alone, 1e-9 if method == "eigen" else 1e-8)


def parted(options: dict[str, Any]) -> Trained:
    """Two optimizers, each on its part of the model; three ranks, or their examples together."""
    model = network("images")
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    body = [p for n, p in trained.items() if n.startswith(("first", "norm", "grouped"))]
    rest = [p for n, p in trained.items() if not n.startswith(("first", "norm", "grouped"))]
    one = KFACSGD(body, **STEPS, model=wrapped, **options, **INTERVALS)
    other = KFACSGD(rest, **STEPS, model=wrapped, **{**options, "compute_method": "inverse"})
    rows = ROWS if one.preconditioner.rule.makes_directions else FEW
    for step in range(6):
        learn(wrapped, [one, other], *share(*batch("images", step, 3 * rows)))
    return Trained(values(model), kept(one) | kept(other))


@pytest.mark.parametrize("assignment", ["layer-wise", "opt"])
@pytest.mark.parametrize(("method", "tolerance"), [("polar", 1e-8), ("eigen", 1e-9)])
def test_two_optimizers_on_one_model(method, tolerance, assignment):
    options = {**CURVATURES[method], "assignment": assignment}
    assert_as_alone(run(3, parted, options), parted(options), tolerance)


def halves(plans: list[Plan]) -> dict[str, Tensor]:
    """Two ranks train one model, two another, at the same time."""
    half, place = divmod(dist.get_rank(), 2)
    plan, group = plans[half], two_groups()[half]
    model = network(plan.network)
    wrapped = DistributedDataParallel(model, process_group=group)
    opt = build(plan, model, wrapped, process_group=group, **plan.spread)
    for step in range(plan.steps):
        for x, y, _ in micro_batches(plan, step, place):
            descend(opt, F.cross_entropy(wrapped(x), y))
    return values(model)


@functools.cache  # the ranks stay, and each group takes sockets
def two_groups() -> list[Any]:
    return [dist.new_group(members) for members in ([0, 1], [2, 3])]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_groups_that_train_different_models(fraction):
    how: dict[str, Any] = {"options": INTERVALS, "spread": {"grad_worker_fraction": fraction}}
    plans = [Plan(even(2, ROWS), "images", steps=6, **how)]
    plans.append(Plan(even(2, ROWS), "tokens", steps=5, **how))
    ranks = run(4, halves, plans)
    for plan, pair in zip(plans, (ranks[:2], ranks[2:]), strict=True):
        assert_alike(pair)
        assert error(pair[0], train_alone(plan).parameters) < 1e-8


def grown(options: dict[str, Any], change: str, world: int) -> Trained:
    """A model that gets another layer, or another head, while it is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES)
    ).double()
    opt = KFACSGD(model, **STEPS, **options, **INTERVALS)
    for step in range(8):
        if step == 4:
            new = [nn.Linear(6, CLASSES).double()]
            if change == "layer":
                new = [nn.Linear(CLASSES, 6).double(), *new]
                model.extend([nn.Tanh(), *new])
            else:
                model[4] = new[0]
            for layer in new:
                opt.add_param_group({"params": layer.parameters(), "lr": 0.05})
        examples = share(*batch("chain", step, ROWS * world))
        learn(model, [opt], *examples, averaged=model.parameters())
    return Trained(values(model), kept(opt))


@pytest.mark.parametrize("change", ["layer", "head"])
@pytest.mark.parametrize("world", [3, 4])
def test_layers_that_come_later(world, change):
    alone = grown({}, change, world)
    for spread in fractions(world):
        assert_as_alone(run(world, grown, spread, change, world), alone, 1e-8)


@pytest.mark.parametrize("thing", [0, 1, 77, "steps"])
def test_equal_checksums_are_found_equal_in_every_world(thing):
    code = checksum(thing)
    for world in range(1, 4097):
        # As sums of floats over the ranks give them.
        assert are_equal(world, float(world * code), float(world * code**2))
    for world in (2, 3, 1000, 4096):
        other = checksum("other")
        total, squares = (world - 1) * code + other, (world - 1) * code**2 + other**2
        assert not are_equal(world, float(total), float(squares))


# ---- who waits for whom ----


def stage(name: str) -> nn.Sequential:
    """Layers of one shape, or of eight shapes, which may be sharded."""
    torch.manual_seed(0)
    if name == "alike":
        return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(16)))
    model = nn.Sequential(*(nn.Linear(n, n + 1) for n in range(4, 12)))
    for layer in (*model, model) if name == "sharded" else ():
        fully_shard(layer)
    return model


def events(name: str, options: dict[str, Any], steps: int = 1) -> list[str]:
    """What this rank does in steps of which the first gathers and refreshes all, in its order."""
    seen: list[str] = []
    exchange = Ranks._exchange

    class Waiting:
        def __init__(self, kind: str, work: Any) -> None:
            self.kind, self.work = kind, work

        def wait(self) -> Tensor:
            seen.append(f"wait for {self.kind}")
            return self.work.wait()

    def exchanged(self: Ranks, *args: Any) -> Waiting:
        seen.append(f"send {args[-1]}")
        return Waiting(args[-1], exchange(self, *args))

    def noting(word: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            seen.append(word)
            return function(*args, **options)

        return noted

    model = stage(name)
    opt = KFACSGD(model, **STEPS, **options)
    for _ in range(steps):
        seen.append("step")
        model(torch.randn(4, model[0].in_features)).square().mean().backward()
        if name != "sharded":
            average(model.parameters())
        with (
            mock.patch.object(Ranks, "_exchange", exchanged),
            mock.patch.object(PolarRule, "apply", noting("multiply", PolarRule.apply)),
            mock.patch.object(refresh, "attempt", noting("decompose", refresh.attempt)),
        ):
            opt.step()
    return seen


@pytest.mark.parametrize(("world", "fraction"), [(2, 0.0), (4, 0.0), (4, 0.5)])
def test_no_rank_waits_for_the_work_of_another_before_its_own(world, fraction):
    """In buckets that take one layer each, of which three are on their way at a time."""
    options = {"grad_worker_fraction": fraction, "bucket_cap_mb": 1e-5}
    ranks = run(world, events, "different", options)
    for seen in ranks:
        sums, new = "wait for factors", "wait for gradients"
        assert seen.count(sums) > 6 and seen.count(new) > 6
        assert "decompose" not in seen[: len(seen) - seen[::-1].index(sums)]
        assert "multiply" in seen and "multiply" not in seen[seen.index(new) :]
    # Nor does what is there wait for the rest of it.
    assert any("multiply" in seen[seen.index("send gradients") :] for seen in ranks)


@pytest.mark.parametrize(
    ("method", "gradient", "state"),
    [
        ("polar", 16 * 16 * 4 + 32, 16 * 17 // 2 * 4),
        ("eigen", 16 * 16 * 4 + 16, (16 * 16 + 16) * 4),
    ],
)
def test_ranks_send_side_by_side_what_is_theirs(method, gradient, state):
    """Gradients of 16 equal layers in a plain step, and their state in one that refreshes all."""
    # Four ranks have a quarter each. A call takes four layers' gradients, or states of four
    # factors, one of each rank's: no first hop is needed, and no rank waits for another. A bucket
    # takes a little more than that many bytes.
    expected = (("layer-wise", gradient, (4, 0)), ("opt", state, (0, 8)))
    for strategy, size, (of_gradients, of_state) in expected:
        options = {"assignment": strategy, "bucket_cap_mb": (4 * size + 1) / 2**20}
        for seen in run(4, events, "alike", CURVATURES[method] | options, 2):
            second = seen.index("step", 1)
            assert seen[second:].count("send gradients") == of_gradients
            assert seen[:second].count("send second_order") == of_state


@pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")
def test_sharded_gradients_travel_by_what_a_rank_has_of_them():
    size = sum(4 * p.numel() for p in stage("different").parameters())
    for part, count in ((0.6, 2), (0.3, 4)):  # of the whole; each there and back
        for seen in run(2, events, "sharded", {"bucket_cap_mb": part * size / 2**20}):
            assert seen.count("wait for gradients") == count


WIDE = 64
TRIANGLE = WIDE * (WIDE + 1) // 2 * 4  # bytes of a packed triangle


def bytes_sent(layers: int, step: int, cap: float, options: dict[str, Any]) -> list[int]:
    """Return the bytes that leave this rank in each call of one step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(layers)))
    options = {"assignment": "opt", "staggered": False, "bucket_cap_mb": cap / 2**20, **options}
    with early():
        opt = KFACSGD(model, lr=0.1, **options)
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def noted(output: Any, input: Any, sizes_in: Any, sizes_out: list[int], **how: Any) -> Any:
        sent.append((sum(sizes_out) - sizes_out[dist.get_rank()]) * input.element_size())
        return exchange(output, input, sizes_in, sizes_out, **how)

    for _ in range(step + 1):
        sent.clear()
        with mock.patch.object(dist, "all_to_all_single", noted):
            descend(opt, model(torch.randn(8, WIDE)).square().mean())
    return sent


def test_every_rank_carries_a_quarter_of_what_one_of_four_owns():
    """The sums of a layer on their way to its owner, and the state on its way back."""
    calls = run(4, bytes_sent, 1, 0, 4 * TRIANGLE, {"colocate_factors": True})
    assert [len(sent) for sent in calls] == [4] * 4
    assert max(max(sent) for sent in calls) <= 3 / 4 * 2 * TRIANGLE


def test_sums_for_several_owners_travel_together():
    """Eight factors in buckets of their own, whose owners take turns: two calls for the owners.

    To one owner no more travels at once than a bucket.
    """
    quiet = {**ANEW, "inv_update_steps": 100}
    calls = run(4, bytes_sent, 4, 1, TRIANGLE + 1, quiet)
    assert [len(sent) for sent in calls] == [8 + 2] * 4


# ---- steps that exchange nothing ----

BOTH = pytest.mark.parametrize("cls", [KFACAdam, KFACSGD])


def passes(cls: Any, uses: range, parts: int, steps: int) -> tuple[Any, list[int]]:
    """Train with a branch that one of ``parts`` of the examples goes through, in some steps.

    Return weights, and the steps in which the branch gathered.
    """
    model = network("branched")
    opt = cls(model, lr=0.01)
    kfac, gathered = opt.preconditioner, []
    for step in range(steps):
        x, y = batch("branched", step, 2 * ROWS)
        through = torch.arange(len(x)) >= len(x) - (step in uses) * len(x) // parts
        averaged = (p for n, p in model.named_parameters() if step in uses or "branch" not in n)
        learn(model, [opt], *share(x, through, y), averaged=averaged)
        if "branch" in kfac.work.average:
            gathered.append(step)
            assert "branch" in kfac.work.refresh or len(gathered) > 1
        assert kfac.registry.states["branch"].has_state == bool(gathered)
    return values(model), gathered


@BOTH
@pytest.mark.parametrize("parts", [1, 4])
def test_a_head_that_comes_late_and_an_expert_of_one_rank(cls, parts):
    """Either is first used in step 47; the same weights on any number of ranks."""
    alone, gathered = passes(cls, range(47, 70), parts, 70)
    assert gathered == [50, 55, 60, 65]  # its slot is in the middle of an interval
    for ranks in (2, 4):
        results = run(ranks, passes, cls, range(47, 70), parts, 70)
        assert_alike([weights for weights, _ in results])
        assert all(steps == gathered for _, steps in results)
        assert error(results[0][0], alone) < 1e-8


def test_a_layer_in_use_in_one_step_of_ten_is_met_at_last():
    """The extra step of late layers moves on from interval to interval."""
    _, gathered = passes(KFACAdam, range(7, 80, 10), 1, 80)
    assert gathered == [67]


def lacks(cls: Any, step: int) -> tuple[str, int]:
    """Lose gradients on the last rank in one step; return the error, and the step of it."""
    model = network("chain")
    opt = cls(model, lr=0.01)
    for i in range(64):
        x, y = batch("chain", i, 2 * ROWS)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for layer in (model.middle[1], model.head) if i == step and dist.get_rank() == 1 else ():
            layer.weight.grad = None
        try:
            opt.step()
        except RuntimeError as problem:
            return str(problem), i
    return "", 64


@BOTH
@pytest.mark.parametrize(("step", "named"), [(3, 5), (57, 60), (59, 60), (55, 55)])
def test_a_gradient_that_one_rank_lacks_is_named(cls, step, named):
    """In the step that lacks it, if it gathers, or in the next one that does."""
    later = f"may have drifted apart since step {step}"
    said = later if step < named else "would drift apart"
    for text, at in run(2, lacks, cls, step):
        assert "layer 'middle.1' has no gradient on ranks [1], but has one on other" in text
        assert f"weights {said}" in text and at == named


def lives(cls: Any, name: str) -> list[tuple[bool, bool, bool]]:
    """Return of 20 steps whether ranks exchange numbers, take sums, and change factors."""
    model = network(name)
    opt = cls(model, lr=0.001)
    kfac, lived = opt.preconditioner, []
    for step in range(71):
        x, y = batch(name, step, 2 * ROWS)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before, sums = kfac.ranks.received["status"], kfac.memory_usage()["pending"] > 0
        opt.step()
        exchanges = kfac.ranks.received["status"] > before
        assert exchanges == (kfac.work.exchanges and dist.is_initialized())
        lived.append((kfac.work.exchanges, sums, bool(kfac.work.average or kfac.work.refresh)))
    return lived[51:]


@BOTH
@pytest.mark.parametrize("name", ["images", "tokens", "chain"])
def test_most_steps_exchange_nothing_and_take_no_sums(cls, name):
    """By default, after the first early ones, on one process and on several ranks."""
    alone = lives(cls, name)
    assert run(2, lives, cls, name) == [alone] * 2
    assert all(step in ((False, False, False), (True, True, step[2])) for step in alone)
    quiet = [not any(step) for step in alone]
    assert sum(quiet[:10]) >= 7 and sum(quiet[10:]) >= 7
