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
from collections.abc import Iterator
from typing import Any, NamedTuple
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

from kaisa_optim import KFACSGD, LayerWise, Opt
from kaisa_optim.agree import are_equal, checksum
from kaisa_optim.comm.ranks import Bucket, Ranks
from kaisa_optim.curvature import refresh
from kaisa_optim.curvature.rules import PolarRule
from kaisa_optim.plan.facts import chunks
from tests.support import groups
from tests.support.cluster import (
    CLASSES,
    INPUTS,
    OPTIMIZERS,
    Plan,
    Scattered,
    assert_alike,
    average,
    batch,
    error,
    even,
    kept,
    network,
    share,
    taken_by,
    train,
    train_alone,
    values,
)
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import descend

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


def check(plan: Plan, tolerance: float | None = None) -> None:
    check_spreads(plan, [plan.spread], tolerance)


def check_spreads(
    plan: Plan, spreads: list[dict[str, Any]], tolerance: float | None = None
) -> list[dict[str, Tensor]]:
    """Train the plan with its work spread in some ways; return the parameters of each.

    Ranks have the same bits, and the parameters of one process.
    """
    alone, found = train_alone(plan).parameters, []
    if tolerance is None:
        tolerance = 1e-8 if plan.is_polar else 1e-9
    for spread in spreads:
        ranks = run(plan.world, train, dataclasses.replace(plan, spread=spread))
        assert_alike([rank.parameters for rank in ranks])
        assert error(ranks[0].parameters, alone) < tolerance
        found.append(ranks[0].parameters)
    return found


# ---- the same update as one process ----


@st.composite
def spreads(draw, world: int) -> dict[str, Any]:
    """Where the work goes: strategy, fraction, colocation, buckets."""
    workers = draw(st.sampled_from(divisors(world)))
    kind = draw(st.sampled_from(["default", "layer-wise", "opt", "fraction", "hybrid", "own"]))
    chosen: dict[str, Any] = {}
    if kind == "fraction":
        chosen = {"grad_worker_fraction": workers / world}
    elif kind == "hybrid":
        chosen = {"assignment": "hybrid", "grad_worker_fraction": workers / world}
    elif kind == "own":
        chosen = {"assignment": Scattered(workers)}
    elif kind == "opt":
        chosen, workers = {"assignment": draw(st.sampled_from([kind, Opt()]))}, world
    else:
        named = {"assignment": draw(st.sampled_from([kind, LayerWise()]))}
        chosen, workers = named if kind == "layer-wise" else {}, 1
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
    weighed = draw(st.booleans())
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
    found = check_spreads(plan, fractions(world))
    if world != 3:
        assert_alike(found)
    if name == "images":
        check_spreads(plan, fractions(world, together=False)[-1:])


@pytest.mark.parametrize("world", WORLDS)
def test_sums_of_terms_are_one_term_a_rank(world):
    sizes = even(world, 2)
    rows = 2 * world
    alone = {"loss_reduction": "mean", "loss_terms": world}
    options = {**PAPERS["eigen"], "loss_reduction": "sum", "kl_clip": None}
    scale = rows / world  # each rank's loss is then the sum over its own examples
    # Gradients are those of sums, too.
    base = {"lr": 0.05 / rows}
    plan = Plan(sizes, "images", base=base, options=options, alone=alone, loss_scale=scale)
    check(plan, 1e-7)


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
    expected = train_alone(plan).factors
    found: dict[Any, Tensor] = {}
    for rank in run(plan.world, train, plan):
        assert not found.keys() & rank.factors.keys()  # each is kept once
        found |= rank.factors
    assert error(found, expected) < 1e-12


# ---- the same bits ----


@given(st.data())
@settings(max_examples=8)
def test_all_ways_to_spread_have_the_same_bits(data):
    # LAPACK's bits follow the alignment of each matrix of a batch, and the batch is what one rank
    # decomposes at once: matrices of 32 bytes or a multiple are aligned in every batch.
    world = data.draw(st.sampled_from(WORLDS))
    options = {**data.draw(curvatures()), "max_factor_size": 16384}
    plan = Plan(even(world, 2), "chain", options=options, steps=6)
    found = [
        run(world, train, dataclasses.replace(plan, spread=data.draw(spreads(world))))
        for _ in range(2)
    ]
    assert_alike([rank.parameters for ranks in found for rank in ranks])


# ---- less precision ----


ONE_UPDATE: dict[str, Any] = {
    "base": {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0},
    "steps": 1,
}


def updates(plan: Plan, spread: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Return how far a run of one process moves the parameters, or one of ranks, alike on all."""
    if spread is None:
        after = train_alone(plan).parameters
    else:
        ranks = run(plan.world, train, dataclasses.replace(plan, spread=spread))
        assert_alike([rank.parameters for rank in ranks])
        after = ranks[0].parameters
    before = values(network(plan.network, dtype=plan.dtype))
    return {name: before[name] - p for name, p in after.items()}


@pytest.mark.parametrize("curvature", list(CURVATURES))
@pytest.mark.parametrize(("world", "name"), [(3, "images"), (4, "tokens")])
def test_the_first_update_in_float32(world, name, curvature):
    # Rounding errors of float32 grow by the largest eigenvalue over the damping. The full split has
    # that on both sides, so that its square is in the result. A polar factor has errors of the
    # least singular value, too, to which the roots add.
    damping = {"inverse-full": 0.1, "polar": 1.0}.get(curvature, 0.05)
    options = {**CURVATURES[curvature], "kl_clip": None, "damping": damping}
    sizes = even(world, ROWS if curvature == "polar" else FEW)
    plan = Plan(sizes, name, options=options, dtype=torch.float32, **ONE_UPDATE)
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
    plan = Plan(even(world, 4), "chain", options=options, loss_scale=scale, **ONE_UPDATE)
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
    rows = ROWS if method == "polar" else FEW
    check(Plan(even(4, rows), "images", optimizer, options=options, spread=spread), 0.02)


# ---- ranks whose gradients have other magnitudes ----


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
            results = run(world, factors_of_ranks_apart, power, apart, options)
            for ours, theirs in zip(results, plain, strict=True):
                assert ours.keys() == theirs.keys()
                assert all(torch.equal(ours[key], theirs[key]) for key in ours), power


# ---- parts ----


class Sum(NamedTuple):
    """A sum on the way to its owner."""

    owner: int
    size: int
    key: int


def exchanged(parcels: list[tuple[int, int, torch.dtype]], cap: float) -> int:
    """How often the ranks exchange something for these sums."""
    ranks = Ranks(None, bucket_cap_mb=cap, comm_dtype=None)
    sums = [Sum(owner, size, i) for i, (owner, size, _) in enumerate(parcels)]
    buckets = [
        Bucket(chunk, range(ranks.world), ranks.world)
        for chunk in chunks(sums, lambda x: x.size * 4, cap * 2**20)
    ]
    loads = ((bucket, [torch.ones(x.size) for x in bucket.items]) for bucket in buckets)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        for _ in ranks.reduce_to_owners(loads, "x"):
            pass
    return exchange.call_count


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
    sums = [Sum(owner, size, i) for i, owner in enumerate(owners)]
    buckets = [Bucket([x], range(ranks.world), ranks.world) for x in sums]
    received: list[weakref.ref[torch.UntypedStorage]] = []
    counts = []
    exchange = ranks._exchange

    def noted(*args: Any) -> Any:
        flight = exchange(*args)
        received.append(weakref.ref(flight.received.untyped_storage()))
        return flight

    def loads() -> Iterator[tuple[Any, list[Tensor]]]:
        for bucket in buckets:
            counts.append(alive(received, at_most=2))
            yield bucket, [torch.ones(size)]

    with mock.patch.object(ranks, "_exchange", noted):
        for sums in ranks.reduce_to_owners(loads(), "x"):
            del sums
    return max(counts)


@pytest.mark.parametrize("owners", [[0, 1] * 4, [0] * 8])
def test_no_more_buckets_stay_in_memory_than_are_on_their_way(owners):
    for world in (2, 4):
        assert run(world, alive_when_filled, owners) == [2] * world


def exchanges_of_steps(method: str, strategy: str, cap: int) -> tuple[int, int]:
    """How often gradients of 16 equal layers are exchanged in a plain step, and their state in one
    that refreshes all of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(16)))
    # A little more than that many bytes.
    options: dict[str, Any] = {"assignment": strategy, "bucket_cap_mb": (cap + 1) / 2**20}
    options |= CURVATURES[method]
    opt = KFACSGD(DistributedDataParallel(model), **STEPS, **options)
    calls = []
    exchange = Ranks._exchange

    def noted(*args: Any) -> Any:
        calls.append(args[-1])
        return exchange(*args)

    with mock.patch.object(Ranks, "_exchange", noted):
        for _ in range(2):
            calls.append("step")
            model(torch.randn(4, 16)).square().mean().backward()
            opt.step()
    second = calls.index("step", 1)
    return calls[second:].count("gradients"), calls[:second].count("second_order")


@pytest.mark.parametrize(
    ("method", "gradient", "state"),
    [
        ("polar", 16 * 16 * 4 + 32, 16 * 17 // 2 * 4),
        ("eigen", 16 * 16 * 4 + 16, (16 * 16 + 16) * 4),
    ],
)
def test_ranks_send_side_by_side_what_is_theirs(method, gradient, state):
    # Four ranks have a quarter each. A call takes four layers' gradients, or states of four
    # factors, one of each rank's: no first hop is needed, and no rank waits for another.
    assert run(4, exchanges_of_steps, method, "layer-wise", 4 * gradient) == [(4, 0)] * 4
    assert run(4, exchanges_of_steps, method, "opt", 4 * state) == [(0, 8)] * 4


# ---- what DistributedDataParallel may be told ----


@pytest.mark.parametrize(("micro", "fraction"), [(1, 1.0), (2, 0.5)])
def test_a_static_graph_of_ddp(micro, fraction):
    spread = {"grad_worker_fraction": fraction}
    wrapper = {"static_graph": True}
    plan = Plan(even(2, ROWS, micro), "images", options=INTERVALS, spread=spread, wrapper=wrapper)
    check(dataclasses.replace(plan, steps=6))


# Which of three ranks use the branch, step by step.
USES = {
    "all": ["111", "111", "111", "111", "111", "111"],
    "some": ["101", "110", "010", "111", "001", "111"],
    "nobody": ["111", "000", "111", "000", "000", "101"],
    "late": ["000", "000", "010", "000", "111", "100"],
}
STEPS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "damping": 0.1}

Result = tuple[dict[str, Tensor], dict[tuple[str, str], Tensor]]  # parameters and factors


def branched(
    uses: list[str],
    options: dict[str, Any],
    frozen: tuple[str, ...] = (),
    with_ddp: bool = False,
    world: int = 3,
) -> Result:
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
        x, y = batch("branched", step, rows * world)
        through = torch.tensor([flag == "1" for flag in used]).repeat_interleave(rows)
        x, y, through = share(x, y, through)
        opt.zero_grad()
        F.cross_entropy(wrapped(x, through), y).backward()
        if not with_ddp:
            average(p for n, p in parameters.items() if "1" in used or "branch" not in n)
        opt.step()
    return values(model), kept(opt)


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
    tolerance = 1e-9 if method == "eigen" else 1e-8
    ranks = run(3, branched, USES[uses], options, frozen, with_ddp)
    assert_alike([parameters for parameters, _ in ranks])
    parameters, factors = branched(USES[uses], options, frozen)
    assert error(ranks[0][0], parameters) < tolerance
    assert error({k: v for _, own in ranks for k, v in own.items()}, factors) < tolerance


# ---- other ways to build ----


def parted(options: dict[str, Any], world: int) -> dict[str, Tensor]:
    """Two optimizers, each on its part of the model."""
    model = network("images")
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    names = ("first", "norm", "grouped")
    body = [p for n, p in model.named_parameters() if n.startswith(names)]
    rest = [p for n, p in model.named_parameters() if not n.startswith(names)]
    rest = [p for p in rest if p.requires_grad]
    one = KFACSGD(body, **STEPS, model=wrapped, **options, **INTERVALS)
    other = KFACSGD(rest, **STEPS, model=wrapped, **{**options, "compute_method": "inverse"})
    rows = ROWS if one.preconditioner.rule.makes_directions else FEW
    for step in range(6):
        x, y = share(*batch("images", step, rows * world))
        for opt in (one, other):
            opt.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        for opt in (other, one):
            opt.step()
    return values(model)


@pytest.mark.parametrize("assignment", ["layer-wise", "opt"])
@pytest.mark.parametrize(("method", "tolerance"), [("polar", 1e-8), ("eigen", 1e-9)])
def test_two_optimizers_on_one_model(method, tolerance, assignment):
    options = {**CURVATURES[method], "assignment": assignment}
    ranks = run(3, parted, options, 3)
    assert_alike(ranks)
    assert error(ranks[0], parted(options, 3)) < tolerance


def halves(options: dict[str, Any]) -> dict[str, Tensor]:
    """Two ranks train one model, two another, at the same time."""
    groups = two_groups()
    rank = dist.get_rank()
    half, group = rank // 2, groups[rank // 2]
    name = ("images", "tokens")[half]
    model = network(name)
    wrapped = DistributedDataParallel(model, process_group=group)
    opt = KFACSGD(wrapped, **STEPS, process_group=group, **options)
    for step in range(6 - half):  # nor do they take as many steps
        x, y = (t.chunk(2)[rank % 2] for t in batch(name, step, 2 * ROWS))
        descend(opt, F.cross_entropy(wrapped(x), y))
    return values(model)


@functools.cache  # the ranks stay, and each group takes sockets
def two_groups() -> list[Any]:
    return [dist.new_group(members) for members in ([0, 1], [2, 3])]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_groups_that_train_different_models(fraction):
    options = {**INTERVALS, "grad_worker_fraction": fraction}
    ranks = run(4, halves, options)
    for half, name in enumerate(("images", "tokens")):
        both = ranks[2 * half : 2 * half + 2]
        assert_alike(both)
        plan = Plan(even(2, ROWS), name, base=STEPS_OF_SGD, options={"damping": 0.1, **INTERVALS})
        alone = train_alone(dataclasses.replace(plan, steps=6 - half))
        assert error(both[0], alone.parameters) < 1e-8


STEPS_OF_SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}


def grown(options: dict[str, Any], change: str, world: int) -> dict[str, Tensor]:
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
                new = [nn.Linear(CLASSES, 6).double(), nn.Linear(6, CLASSES).double()]
                model.extend([nn.Tanh(), *new])
            else:
                model[4] = new[0]
            for layer in new:
                opt.add_param_group({"params": layer.parameters(), "lr": 0.05})
        x, y = share(*batch("chain", step, ROWS * world))
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        average(model.parameters())
        opt.step()
    return values(model)


@pytest.mark.parametrize("change", ["layer", "head"])
@pytest.mark.parametrize("world", [3, 4])
def test_layers_that_come_later(world, change):
    alone = grown({}, change, world)
    for spread in fractions(world):
        ranks = run(world, grown, spread, change, world)
        assert_alike(ranks)
        assert error(ranks[0], alone) < 1e-8


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


def different_shapes(sharded: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(n, n + 1) for n in range(4, 12)))
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model


def events(options: dict[str, Any], sharded: bool = False) -> list[str]:
    """What this rank does in a step that gathers and refreshes everything, in its order."""
    seen: list[str] = []
    exchange, precondition = Ranks._exchange, PolarRule.apply
    attempt = refresh.attempt

    class Waiting:
        def __init__(self, kind: str, work: Any) -> None:
            self.kind, self.work = kind, work

        def wait(self) -> Tensor:
            seen.append(f"wait for {self.kind}")
            return self.work.wait()

    def exchanged(self: Ranks, *args: Any) -> Waiting:
        seen.append(f"send {args[-1]}")
        return Waiting(args[-1], exchange(self, *args))

    def preconditioned(*args: Any) -> Tensor:
        seen.append("multiply")
        return precondition(*args)

    def decomposed(*args: Any, **options: Any) -> Any:
        seen.append("decompose")
        return attempt(*args, **options)

    model = different_shapes(sharded)
    opt = KFACSGD(model, lr=0.1, **options)
    model(torch.randn(4, 4)).square().mean().backward()
    if not sharded:
        average(model.parameters())
    with (
        mock.patch.object(Ranks, "_exchange", exchanged),
        mock.patch.object(PolarRule, "apply", preconditioned),
        mock.patch.object(refresh, "attempt", decomposed),
    ):
        opt.step()
    return seen


@pytest.mark.parametrize(("world", "fraction"), [(2, 0.0), (4, 0.0), (4, 0.5)])
def test_no_rank_waits_for_the_work_of_another_before_its_own(world, fraction):
    """In buckets that take one layer each, of which three are on their way at a time."""
    options = {"grad_worker_fraction": fraction, "bucket_cap_mb": 1e-5}
    ranks = run(world, events, options)
    for seen in ranks:
        sums, new = "wait for factors", "wait for gradients"
        assert seen.count(sums) > 6 and seen.count(new) > 6
        assert "decompose" not in seen[: len(seen) - seen[::-1].index(sums)]
        assert "multiply" in seen and "multiply" not in seen[seen.index(new) :]
    # Nor does what is there wait for the rest of it.
    assert any("multiply" in seen[seen.index("send gradients") :] for seen in ranks)


@pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")
def test_sharded_gradients_travel_by_what_a_rank_has_of_them():
    size = sum(4 * p.numel() for p in different_shapes().parameters())
    for part, count in ((0.6, 2), (0.3, 4)):  # of the whole; each there and back
        for seen in run(2, events, {"bucket_cap_mb": part * size / 2**20}, True):
            assert seen.count("wait for gradients") == count
