"""The account of bytes against real runs, against a spy on torch.distributed, and by hand."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from tests.support.cluster import Scattered, average, batch, network, rank, world
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import early
from tests.support.watch import Body

MOVED = ("factors", "second_order", "gradients", "status")
KEPT = ["factors", "eigenvectors", "eigenvalues", "inverses", "roots"]
KEPT += ["eigenvalue_products", "counters"]


def mixed() -> nn.Module:
    """Return layers of two precisions."""

    def use(m: nn.Module, x: Tensor) -> Tensor:
        x = m.second(m.first(x.float()).tanh().double()).tanh()
        return m.head(m.third(x.float()).double())

    parts = {"first": nn.Linear(7, 9), "second": nn.Linear(9, 9).double()}
    return Body(use, **parts, third=nn.Linear(9, 9), head=nn.Linear(9, 5).double())


class Tied(nn.Module):
    """A table that is the head's weight, and a matrix that two layers use in one direction.

    By code, the table has no head, and the account learns of its use in the first step.
    """

    def __init__(self, *, by_code: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.first, self.again = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.again.weight = self.first.weight
        self.head = None if by_code else nn.Linear(4, 9)
        if self.head is not None:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.first(self.words(x)).tanh()).mean(1)
        return F.linear(x, self.words.weight) if self.head is None else self.head(x)


class Case(NamedTuple):
    network: str = "images"
    options: dict[str, Any] = {}  # noqa: RUF012 (nobody writes into it)
    intervals: tuple[int, int] = (1, 2)
    dtype: torch.dtype = torch.float32
    frozen: str = ""
    sharded: bool = False
    optimizer: Any = KFACSGD


def build(case: Case) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    apart = {"mixed": mixed, "tied": Tied, "coded": functools.partial(Tied, by_code=True)}
    model = apart.get(case.network, lambda: network(case.network, dtype=case.dtype))()
    if case.frozen:
        model.get_submodule(case.frozen).requires_grad_(False)
    if case.sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world(),)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the base optimizer updates these")
        every, refreshed = case.intervals
        options = {"factor_update_steps": every, "inv_update_steps": refreshed}
        if not case.sharded and "grad_worker_fraction" not in case.options:
            options["assignment"] = "opt"  # which sends roots to all ranks, and may part A from G
        with early():  # prices are of intervals alone
            return model, case.optimizer(model, lr=0.01, damping=0.1, **{**options, **case.options})


@contextlib.contextmanager
def spy() -> Iterator[Counter[str]]:
    """Count what collectives are asked to move, by their names; each still does its work."""
    counts: Counter[str] = Counter()
    exchange, reduce = dist.all_to_all_single, dist.all_reduce

    def all_to_all_single(output, input, output_split_sizes, input_split_sizes, **options):
        assert output.numel() == sum(output_split_sizes)
        assert input.numel() == sum(input_split_sizes)
        arriving = sum(output_split_sizes) - output_split_sizes[rank()]
        leaving = sum(input_split_sizes) - input_split_sizes[rank()]
        counts["all_to_all_single"] += arriving * output.element_size()
        counts["sent"] += leaving * input.element_size()
        return exchange(output, input, output_split_sizes, input_split_sizes, **options)

    def all_reduce(tensor, **options):
        counts["all_reduce"] += 2 * tensor.nbytes * (world() - 1) // world()
        return reduce(tensor, **options)

    spies = {"all_to_all_single": all_to_all_single, "all_reduce": all_reduce}
    others = "all_gather all_gather_into_tensor all_gather_object all_to_all broadcast gather"
    others += " broadcast_object_list irecv isend recv reduce reduce_scatter_tensor scatter send"
    for name in others.split():
        spies[name] = lambda *_, name=name, **__: pytest.fail(f"{name} is not in the account")
    with mock.patch.multiple(dist, **spies):
        yield counts


def train(case: Case, model: nn.Module, opt: Any, steps: range) -> tuple[Any, Any, list[int]]:
    kfac, pending = opt.preconditioner, []
    before, spied = Counter(kfac.ranks.received), Counter[str]()
    for step in steps:
        assert kfac.steps == step
        of = {"mixed": "chain", "tied": "tokens", "coded": "tokens"}
        inputs = of.get(case.network, case.network)
        x, y = batch(inputs, step, 4, torch.float64 if case.network == "mixed" else case.dtype)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        pending.append(kfac.memory_usage()["pending"])
        if not case.sharded:
            average(model.parameters())
        with spy() if world() > 1 else contextlib.nullcontext(Counter()) as counts:
            opt.step()
        spied += counts
    return Counter(kfac.ranks.received) - before, spied, pending


def measure(case: Case) -> SimpleNamespace:
    model, opt = build(case)
    period = math.lcm(*case.intervals)
    first, *_ = train(case, model, opt, range(1))
    # Two numbers for each weight and each gradient, compared by an all-reduce in the first step.
    covered = [p for layer in opt.preconditioner.registry.active for p in layer.parameters]
    compared = 2 * (2 * 16 * len(covered) * (not case.sharded) * (world() - 1) // world())
    *_, pending = train(case, model, opt, range(1, period + 1))
    counted, spied, _ = train(case, model, opt, range(period + 1, 1 + 2 * period))
    kfac = opt.preconditioner
    memory = {kind: size for kind, size in kfac.memory_usage().items() if kind != "pending"}
    momenta = [opt.state[p].get(opt.base_part.momentum) for p in covered]
    momenta = [x.to_local() if case.sharded else x for x in momenta if x is not None]
    return SimpleNamespace(
        account=kfac.account,
        schedule=kfac.schedule,
        memory=memory,
        momenta=sum(x.nbytes for x in momenta),  # of covered parameters
        first=first,  # received in the first step, but for
        compared=compared,  # to compare weights and gradients
        counted=counted,  # received in one interval
        pending=pending,  # sums that wait, in each step of an interval
        sent=spied.pop("sent", 0),
        spied=spied,  # what was received, as the arguments of torch.distributed tell
        volume=kfac.communication_volume(),
    )


def momenta_of(case: Case, account: Any, owner: int) -> int:
    """Bytes of the momenta on a rank: gradient workers keep them, or each its shards."""
    if case.optimizer is KFACSGD and not case.options.get("momentum"):
        return 0
    if case.sharded:
        shards = [one for layer in account.active for one in layer.shards]
        return sum(x.count(owner) * itemsize for x, itemsize in shards)
    columns = account.grid.columns
    mine = (x for x in account.active if x.placement.g % columns == owner % columns)
    return sum(layer.gradient * layer.itemsize for layer in mine)


def arriving(account: Any, average: Any, refresh: Any, answered: Any) -> list[Counter[str]]:
    """What arrives at each rank in a step; it gathers nothing if ``average`` is None."""
    status = 0 if average is None else account.status(answered)
    columns = account.sums(average or ()), account.state(refresh), account.gradients
    each = [dict(zip(MOVED, (*sizes, status), strict=True)) for sizes in zip(*columns, strict=True)]
    return [Counter({kind: size for kind, size in sizes.items() if size}) for sizes in each]


def check(case: Case, ranks: list[SimpleNamespace]) -> None:
    account = ranks[0].account
    assert all(one.account == account for one in ranks)
    every, refreshed = case.intervals
    period = math.lcm(every, refreshed)
    fed = ranks[0].schedule.gathering_slots(every)
    due = ranks[0].schedule.refresh_slots(every, refreshed)
    steps, answered = [], set()
    for step in range(2 * period):
        average, refresh = fed.get(step % every), due.get(step % refreshed, ())
        steps.append(arriving(account, average, refresh, answered))
        answered = {*(answered if average is None else ()), *refresh}
    steps = steps[period:]
    # The first interval's steps from 1 on; its last is the next one's first.
    sums = [account.pending(fed.get(step % every, ())) for step in range(1, period + 1)]
    names = account.names
    everything = arriving(account, names, names, ())
    for number, one in enumerate(ranks):
        kept = account.memory()[number]
        # A rank that keeps nothing says so.
        shown = {kind: size for kind, size in kept.items() if size or kind == "total"}
        assert shown == one.memory
        assert list(kept) == [*KEPT, "total"]
        assert one.momenta == momenta_of(case, account, number)
        assert one.first == everything[number] + Counter(status=one.compared)
        expected = sum((step[number] for step in steps), Counter[str]())
        assert one.counted == expected
        for waiting, most, step in zip(one.pending, sums, range(1, period + 1), strict=True):
            # An A of ones, of a frozen weight, waits as one number.
            turn = fed.get(step % every, ())
            ones = [w.task.blocks for w in account.active if w.task.a == 1 and w.name in turn]
            assert most - sum(ones) * case.dtype.itemsize <= waiting <= most
            assert bool(waiting) == bool(turn)
        assert one.counted.total() == one.spied.total()
        assert one.counted["status"] <= one.spied["all_reduce"]
        assert list(one.volume) == [*MOVED, "total"]
        for kind in MOVED:
            # Each exchange of numbers rounds to whole bytes.
            rounding = 1 if kind == "status" else 1e-9
            assert one.volume[kind] == pytest.approx(expected[kind] / period, abs=rounding)
        assert one.volume["total"] == pytest.approx(sum(one.volume[kind] for kind in MOVED))
    assert sum(one.sent for one in ranks) == sum(one.spied["all_to_all_single"] for one in ranks)


half, brain = torch.float16, torch.bfloat16
eigen = {"compute_method": "eigen"}
inverse = {"compute_method": "inverse"}
CASES = {
    "defaults": Case(options={"assignment": None}, intervals=(2, 3)),
    "eigen": Case(options=eigen, intervals=(2, 3)),
    "eigen, layer-wise": Case("tokens", eigen | {"assignment": "layer-wise"}),
    "Adam": Case("tokens", optimizer=KFACAdam),
    "Adam, layer-wise": Case(options={"assignment": "layer-wise"}, optimizer=KFACAdam),
    "LAMB": Case(options={"bucket_cap_mb": 1e-3}, optimizer=KFACLAMB),
    "layer-wise tokens": Case("tokens", {"assignment": "layer-wise", "bucket_cap_mb": 2e-4}),
    "all at once": Case(options={"staggered": False}, intervals=(2, 4)),
    "intervals": Case("chain", {"bucket_cap_mb": 3e-4}, intervals=(3, 2)),
    "parts": Case(options={"bucket_cap_mb": 1e-3}),
    "colocated": Case(options={"colocate_factors": True, "bucket_cap_mb": 5e-4}),
    "bfloat16": Case(options={"comm_dtype": brain}),
    "inverse": Case("tokens", inverse),
    "inverse in parts": Case(options=inverse | {"bucket_cap_mb": 5e-4}, intervals=(1, 3)),
    "inverse, layer-wise": Case(options=inverse | {"assignment": "layer-wise"}),
    "products": Case(
        options=eigen | {"compute_eigenvalue_outer_product": True, "inv_dtype": brain}
    ),
    "stored": Case("tokens", {"factor_dtype": torch.float64, "inv_dtype": half}),
    "stored inverses": Case(options=inverse | {"factor_dtype": torch.float64, "inv_dtype": half}),
    "diagonal": Case(options={"max_factor_size": 6}),
    "diagonal inverses": Case(options=inverse | {"max_factor_size": 6, "comm_dtype": brain}),
    "papers": Case(options=eigen | {"normalization": "kaisa"}, dtype=torch.float64),
    "mixed": Case("mixed", {"bucket_cap_mb": 2e-4}),
    "tied": Case("tied"),
    "tied by code": Case("coded"),
    "tied inverses": Case("tied", inverse | {"max_factor_size": 3}),
    "frozen": Case(frozen="again"),
    "frozen attention": Case("tokens", {"assignment": "layer-wise"}, frozen="attention"),
}
AT_FOUR = {
    "half": Case(options={"grad_worker_fraction": 0.5}),
    "half apart": Case("tokens", {"grad_worker_fraction": 0.5, "colocate_factors": False}),
    "half inverse": Case(
        options=inverse | {"grad_worker_fraction": 0.5, "colocate_factors": False}
    ),
    "a user's": Case("chain", {"assignment": Scattered(2), "colocate_factors": False}),
    "half tied": Case("tied", {"grad_worker_fraction": 0.5, "colocate_factors": False}),
    "half mixed": Case("mixed", {"grad_worker_fraction": 0.5, "bucket_cap_mb": 2e-4}),
}
SHARDED = {
    "sharded": Case("chain", {"bucket_cap_mb": 2e-4}, sharded=True),
    "sharded bfloat16": Case("images", {"inv_dtype": brain}, sharded=True),
    "sharded eigen": Case("images", eigen, sharded=True),
    "sharded Adam": Case("images", sharded=True, optimizer=KFACAdam),
    "sharded SGD with momentum": Case("chain", {"momentum": 0.9}, sharded=True),
}


# The bases of the default method: each has its own momentum, and other numbers travel.
HeavySGD = functools.partial(KFACSGD, momentum=0.9)


def over_rmsprop(*args: Any, **kwargs: Any) -> Any:
    return with_kfac(torch.optim.RMSprop)(*args, **kwargs)


POLAR = {
    "SGD": Case(intervals=(2, 3)),
    "SGD with momentum": Case("tokens", optimizer=HeavySGD),
    "Adam": Case(intervals=(2, 3), optimizer=KFACAdam),
    "LAMB": Case("mixed", optimizer=KFACLAMB),
    "RMSprop": Case(optimizer=over_rmsprop),
    "default intervals": Case("chain", intervals=(10, 20), optimizer=KFACAdam),
    "bfloat16": Case(
        options={"comm_dtype": brain, "inv_dtype": brain, "max_factor_size": 6},
        optimizer=HeavySGD,
    ),
}


POLAR = {
    f"{name}, {share}": case._replace(options={**case.options, "grad_worker_fraction": share})
    for name, case in POLAR.items()
    for share in (0.5, 1.0)
}
ALONE = "eigen", "inverse", "products", "stored inverses", "diagonal", "tied", "frozen"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 1) for name in ALONE),
        # Three ranks divide nothing evenly.
        *((name, 3) for name in (*CASES, *SHARDED)),
        *((name, 4) for name in ("defaults", "layer-wise tokens", *AT_FOUR)),
        *((name, count) for name in POLAR for count in ((1, 2, 4) if "0.5" in name else (2,))),
    ],
)
def test_ranks(name, count):
    if name in SHARDED and not CAN_SHARD:
        pytest.skip("fully_shard on CPUs needs torch 2.7")
    case = {**CASES, **AT_FOUR, **SHARDED, **POLAR}[name]
    ranks = run(count, measure, case) if count > 1 else [measure(case)]
    kinds = {x.kind for x in ranks[0].account.sizes.of_factor}
    assert (kinds == {"roots"}) == ("compute_method" not in case.options)
    check(case, ranks)
    assert bool(ranks[0].counted) == (count > 1)
