"""What a work assignment costs: the bytes that every rank keeps, and those that arrive there.

Plain numbers from shapes: nothing here knows a tensor, or needs more than one process. Every byte
that arrives at a rank has been sent by another, so the means over the ranks of what is received and
of what is sent are the same; a single rank may send more than it receives, or less.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .assignment import Grid, Placement, Task, WorkAssignment
from .routes import Bucket, cargo_bytes, chunks, side_by_side
from .schedule import rounds, turns

if TYPE_CHECKING:
    from ..comm.sharding import Shards

# By kind, "total" too, as the preconditioner's own answers.
Usage = dict[str, int]
Means = dict[str, float]

N = TypeVar("N", int, float)

_STATE = (
    "eigenvectors",
    "eigenvalues",
    "corrected_eigenvalues",
    "inverses",
    "roots",
    "eigenvalue_products",
    "moments",
)
KEPT = ("factors", *_STATE, "counters")
MOVED = ("factors", "second_order", "gradients", "status")

_STATUS_HEAD = 9  # numbers of a step's first exchange that belong to no layer


class Work(NamedTuple):
    """One layer's task, and where it is done."""

    task: Task
    placement: Placement
    itemsize: int = 4  # bytes of a number in its arithmetic
    device: Hashable = None  # layers of one device travel together
    sections: int = 1  # counts of rows that ranks compare
    frozen: bool = False  # then it costs no more than a question after it
    shards: tuple[tuple[Shards, int], ...] = ()  # of its parameters, each with its itemsize


class _Factor(NamedTuple):
    """One side of a layer; a parcel to :class:`Bucket`."""

    work: Work
    owner: int
    n: int
    diagonal: bool

    @property
    def size(self) -> int:
        """Numbers that say all of it."""
        return self.work.task.blocks * (self.n if self.diagonal else self.n * (self.n + 1) // 2)

    @property
    def elements(self) -> int:
        return self.work.task.blocks * self.n ** (1 if self.diagonal else 2)

    @property
    def values(self) -> int:
        return self.work.task.blocks * self.n

    @property
    def operations(self) -> int:
        """Of a decomposition, but for a number that is about the same for all."""
        return self.elements * (1 if self.diagonal else self.n)


def _factors(work: Work) -> tuple[_Factor, _Factor]:
    task, placement = work.task, work.placement
    return (
        _Factor(work, placement.a, task.a, task.diagonal_a),
        _Factor(work, placement.g, task.g, task.diagonal_g),
    )


def _gradient(work: Work) -> int:
    """Numbers in a layer's gradient."""
    return work.task.blocks * work.task.g * work.task.a


@dataclass(frozen=True)
class Account:
    """The bytes of K-FAC over a grid of ranks; answers are lists by rank.

    ``layers`` are in the model's order, which the buckets and the turns to gather follow. Sizes of
    stored and sent numbers that are ``None`` are those of the arithmetic.
    """

    layers: Sequence[Work]
    grid: Grid
    method: str = "eigen"
    split: str | None = "pi"  # of the damping, for inverses
    stored_product: bool = False
    moments: int = 0  # for each number of a gradient; Adam's have a count, too
    noted: bool = False  # owners note what is to be decomposed again
    tracked: bool = False  # hosts hear in the next step what a refresh has to do again
    truncated: bool = False  # leading eigenvectors are counted
    correction: str | None = None  # of the eigenvalues: by "examples", by "gradients"
    factor_bytes: int | None = None  # of a number in a running average
    state_bytes: int | None = None  # of one in eigenvectors, inverses, products
    wire_bytes: int | None = None  # of one in factors and gradients on their way
    scaled: bool = False  # each of these travels with its scale, as float16 needs it
    bucket_bytes: int = 25 * 2**20

    @property
    def names(self) -> list[str]:
        """The layers that a refresh of everything means."""
        return [work.task.name for work in self.active]

    @property
    def active(self) -> list[Work]:
        """The layers that are trained."""
        return [work for work in self.layers if not work.frozen]

    # ---- memory ----

    def memory(self) -> list[Usage]:
        """What each rank keeps, by kind."""
        usage = [dict.fromkeys(KEPT, 0) for _ in range(self.grid.world)]
        applied = [dict.fromkeys(KEPT, 0) for _ in range(self.grid.columns)]
        for work in self.active:
            column = applied[work.placement.g % self.grid.columns]
            for factor in _factors(work):
                own = usage[factor.owner]
                own["factors"] += factor.elements * (self.factor_bytes or work.itemsize)
                own["counters"] += work.task.blocks * (work.itemsize + 4 + 4 * self.noted)
                for kind, size in self._state(factor).items():
                    column[kind] += size
            column["moments"] += self.moments * _gradient(work) * work.itemsize
            if self.moments == 2:
                column["counters"] += work.task.blocks * work.itemsize
            if self.correction:
                column["corrected_eigenvalues"] += _gradient(work) * work.itemsize
                column["counters"] += work.task.blocks * work.itemsize
            if self.truncated:
                column["counters"] += work.task.blocks * 5 * 4
            if self.stored_product:
                stored = self.state_bytes or work.itemsize
                column["eigenvalue_products"] += _gradient(work) * stored
        for rank, own in enumerate(usage):
            for kind, size in applied[rank % self.grid.columns].items():
                own[kind] += size
            own["total"] = sum(own.values())
        return usage

    def _state(self, factor: _Factor) -> Usage:
        """What every gradient worker has of a factor."""
        stored = self.state_bytes or factor.work.itemsize
        if self.method != "eigen":
            return {f"{self.method}s": factor.elements * stored}
        values = {"eigenvalues": factor.values * factor.work.itemsize}
        return values if factor.diagonal else values | {"eigenvectors": factor.elements * stored}

    def pending(self, names: Collection[str]) -> int:
        """Sums of these layers on each rank, from their backward pass to the step, at most."""
        alone = self.grid.world == 1
        chosen = self._chosen(names)
        factors = sum(
            (factor.elements if alone else factor.size) * work.itemsize
            for work in chosen
            for factor in _factors(work)
        )
        by_examples = self.correction == "examples"
        return factors + by_examples * sum(_gradient(work) * work.itemsize for work in chosen)

    # ---- communication ----

    def step(
        self,
        *,
        factors: Collection[str] = (),
        refresh: Collection[str] = (),
        asked: Collection[str] = (),
        first: bool = False,
    ) -> list[Usage]:
        """What arrives at each rank in one step, by kind.

        A plain step has gradients alone. ``factors`` says of which layers it updates the factors,
        ``refresh`` which it refreshes, ``asked`` which hosts did not wait for in the step before:
        bases that followed, inverses on a GPU. In the ``first`` of all, there is no eigenbasis yet.
        """
        got = {kind: sizes.copy() for kind, sizes in self._gradients.items()}
        if self.grid.world > 1:
            fed, due = self._chosen(factors), self._chosen(refresh)
            self._add(got["status"], self._words(fed, due, len(set(asked))))
            self._add(got["factors"], self._sums(fed))
            for numbers in self._projected(fed) if not first else ():
                self._add(got["second_order"], [self._ring(numbers)] * self.grid.world)
            for numbers in self._refreshed_together(due):
                self._add(got["second_order"], [self._ring(numbers)] * self.grid.world)
            self._add(got["second_order"], self._shared(due))
        return _by_rank(got)

    def _chosen(self, names: Collection[str]) -> list[Work]:
        chosen = set(names)
        return [work for work in self.active if work.task.name in chosen]

    def per_step(
        self, factor_update_steps: int, inv_update_steps: int, staggered: bool | int = True
    ) -> list[Means]:
        """What arrives at each rank in a step, by kind, as a mean over whole intervals.

        Where hosts hear of a refresh in the step after it, it is the most that it can be, but for
        inverses that fail: nothing else would have been asked there, and all bases that followed
        are decomposed.
        """
        both = math.gcd(factor_update_steps, inv_update_steps)
        together = factor_update_steps * inv_update_steps // both
        fed = self.gathering_turns(factor_update_steps, staggered)
        due = self.refresh_turns(inv_update_steps, staggered)
        # A turn of the one kind meets one of the other once in ``together`` steps, or never.
        Turns = tuple[int | None, int | None]
        shares: dict[Turns, float] = {(f, None): 1 / factor_update_steps for f in fed}
        shares.update({(None, d): 1 / inv_update_steps for d in due})
        for f, d in itertools.product(fed, due):
            if (f - d) % both == 0:
                shares[f, d] = 1 / together
                shares[f, None] -= 1 / together
                shares[None, d] -= 1 / together
        shares[None, None] = 1 - sum(shares.values())
        mean = [dict.fromkeys((*MOVED, "total"), 0.0) for _ in range(self.grid.world)]
        for (at_fed, at_due), share in shares.items():
            if share > 1e-12:
                factors = () if at_fed is None else fed[at_fed]
                refresh = () if at_due is None else due[at_due]
                _weigh(mean, self.step(factors=factors, refresh=refresh), share)
        for asked in due.values() if self.tracked else ():
            _weigh(mean, self._found_anew(asked), 1 / inv_update_steps)
        return mean

    def _found_anew(self, asked: Collection[str]) -> list[Usage]:
        """What a step has to do with what the step before refreshed: bases might not fit."""
        anew = asked if self.method == "eigen" else ()
        plain, step = self.step(), self.step(refresh=anew, asked=asked)
        return [
            {kind: size - other[kind] for kind, size in one.items()}
            for one, other in zip(step, plain, strict=True)
        ]

    def gathering_turns(self, interval: int, staggered: bool | int = True) -> dict[int, list[str]]:
        """The layers that gather statistics in each step of an interval, where any does.

        Their sums wait for a reduction, so turns are of about equal size.
        """
        sizes = [sum(factor.size for factor in _factors(work)) for work in self.layers]
        return self._by_turn(turns(sizes, interval) if staggered else [0] * len(sizes))

    def refresh_turns(self, interval: int, staggered: bool | int = True) -> dict[int, list[str]]:
        """The layers that are refreshed in each step of an interval, where any is.

        As many at once as ``staggered`` says, or as there are ranks: these decompose them side by
        side. Frozen ones count, so that no turn depends on when others are frozen.
        """
        at_once = self.grid.world if staggered is True else staggered
        if not at_once:
            return self._by_turn([0] * len(self.layers))
        costs = [sum(factor.operations for factor in _factors(work)) for work in self.layers]
        together = rounds(costs, at_once)
        turn_of = turns([1] * len(set(together)), interval)
        return self._by_turn([turn_of[number] for number in together])

    def operations(self, refresh: Collection[str]) -> list[int]:
        """What each rank has to do where these layers are decomposed anew: cubes of widths."""
        got = [0] * self.grid.world
        for work in self._chosen(refresh):
            for factor in _factors(work):
                got[factor.owner] += factor.operations
        return got

    def _by_turn(self, numbers: list[int]) -> dict[int, list[str]]:
        result = defaultdict(list)
        for work, turn in zip(self.layers, numbers, strict=True):
            if not work.frozen:
                result[turn].append(work.task.name)
        return dict(result)

    def _words(self, fed: list[Work], due: list[Work], asked: int) -> list[int]:
        """What the hosts ask each other."""
        size = 0
        # As long as some layer has no statistics, every step might bring them.
        if fed or due or asked or len(self.active) < len(self.layers):
            sections = sum(work.sections for work in self.layers)
            size += self._ring(8 * (_STATUS_HEAD + len(self.layers) + 2 * sections + 2 * asked))
        if due:
            size += self._ring(8 * (1 + 3 * len(due)))
        return [size] * self.grid.world

    def _sums(self, fed: list[Work]) -> list[int]:
        """Factors on their way to where they are kept."""
        world = self.grid.world
        got = [0] * world
        for itemsize, parcels, bucket in self._buckets(fed):
            wire = self.wire_bytes or itemsize
            scales = self._ring(len(parcels) * itemsize) if self.scaled else 0
            # From every other rank its term of what this one adds up.
            self._add(got, [scales + (world - 1) * wire * size for size in bucket.sizes])
            for piece in bucket.pieces:
                if piece.adder != piece.owner:
                    got[piece.owner] += (piece.stop - piece.start) * itemsize
        return got

    def _buckets(self, fed: list[Work]) -> Iterator[tuple[int, list[_Factor], Bucket[_Factor]]]:
        """Factors that travel together: the itemsize of their sums, themselves, their ways."""
        for (_, itemsize), works in _grouped(fed, lambda work: (work.device, work.itemsize)):
            parcels = [factor for work in works for factor in _factors(work)]
            limit = self.bucket_bytes // (self.wire_bytes or itemsize)
            for chunk in chunks(parcels, lambda factor: factor.size, limit):
                yield itemsize, chunk, Bucket(chunk, self.grid.world)

    def _projected(self, fed: list[Work]) -> Iterator[int]:
        """Bytes of the second moments in eigenbases that are added up together."""
        if self.correction != "examples":
            return
        for (_, itemsize), works in _grouped(fed, lambda work: (work.device, work.itemsize)):
            for chunk in chunks(works, _gradient, self.bucket_bytes // itemsize):
                yield itemsize * sum(map(_gradient, chunk))

    def _refreshed_together(self, due: list[Work]) -> Iterator[int]:
        """Bytes of mean eigenvalues that owners compare, for each time that they do."""
        parted = any(work.placement.a != work.placement.g for work in self.layers)
        if not (parted and self.method == "inverse" and self.split == "pi"):
            return
        for (_, itemsize), works in _grouped(due, lambda work: (work.device, work.itemsize)):
            yield 2 * itemsize * sum(work.task.blocks for work in works)

    def _shared(self, due: list[Work]) -> list[int]:
        """New second-order state on its way from its owners to the gradient workers."""
        got = [0] * self.grid.world
        everywhere = [0] * self.grid.columns
        for work in due:
            for factor in _factors(work):
                size = self._sent(factor)
                everywhere[factor.owner % self.grid.columns] += size
                got[factor.owner] -= size
        self._add(got, [everywhere[rank % self.grid.columns] for rank in range(self.grid.world)])
        return got

    def _sent(self, factor: _Factor) -> int:
        """A factor's state on the wire; of an inverse or a root, half."""
        if self.method != "eigen":
            return cargo_bytes([factor.size * (self.state_bytes or factor.work.itemsize)])
        return cargo_bytes(self._state(factor).values())

    @functools.cached_property
    def _gradients(self) -> dict[str, list[int]]:
        """In every step."""
        got = {kind: [0] * self.grid.world for kind in MOVED}
        whole = [work for work in self.active if not work.shards]
        sizes = [0] * self.grid.columns
        for _, same in _grouped(whole, lambda work: work.device):
            columns = _grouped(same, lambda work: work.placement.g % self.grid.columns)
            total = sum(self._wire([work]) for work in same)
            limit = side_by_side(total, len(columns), self.bucket_bytes)
            for column, works in columns:
                for _, alike in _grouped(works, lambda work: (*work.task[1:5], work.itemsize)):
                    for part in chunks(alike, lambda work: self._wire([work]), limit):
                        sizes[column] += self._wire(part)
        total = sum(sizes)
        received = [total - sizes[rank % self.grid.columns] for rank in range(self.grid.world)]
        self._add(got["gradients"], received)
        for work in self.active:
            if work.shards and self.grid.world > 1:
                self._add(got["gradients"], self._returned(work))
        return got

    def _wire(self, alike: list[Work]) -> int:
        """New gradients of layers of one shape on the wire, with what the clip needs of them."""
        own = alike[0].itemsize
        sizes = [sum(map(_gradient, alike)) * (self.wire_bytes or own), 2 * len(alike) * own]
        if self.scaled:
            sizes.append(sum(work.task.blocks for work in alike) * own)
        return cargo_bytes(sizes)

    def _returned(self, work: Work) -> list[int]:
        """A sharded gradient: its parts to the owner, and back as new ones."""
        got, owner = [0] * self.grid.world, work.placement.g
        for shards, itemsize in work.shards:
            for rank in range(self.grid.world):
                size = cargo_bytes([math.prod(shards.part_shape(rank)) * itemsize])
                if rank != owner:
                    got[rank] += size
                    got[owner] += size * shards.sends(rank, owner)
        for rank in range(self.grid.world):
            if rank != owner:
                got[rank] += cargo_bytes([2 * work.itemsize])  # terms of the clip
        return got

    def _ring(self, size: int) -> int:
        """What an all-reduce brings to a rank."""
        return 2 * size * (self.grid.world - 1) // self.grid.world

    @staticmethod
    def _add(to: list[int], sizes: list[int]) -> None:
        to[:] = [a + b for a, b in zip(to, sizes, strict=True)]


@dataclass(frozen=True)
class Papers:
    """The same layers under the papers' scheme, on the same ranks, for comparison.

    All-reduce gives every factor to every rank, where its running average is kept; inverse workers
    broadcast decompositions to the gradient workers, and these the gradients to their receivers.
    Numbers are kept and sent in the arithmetic's precision. With ``packed``, factors and inverses
    travel as triangles.
    """

    account: Account
    packed: bool = False

    def memory(self) -> list[Usage]:
        grid, kept = self.account.grid, dict.fromkeys(KEPT, 0)
        usage = [dict.fromkeys(KEPT, 0) for _ in range(grid.world)]
        for work in self.account.active:
            kept["factors"] += sum(factor.elements for factor in _factors(work)) * work.itemsize
            for rank in grid.workers_of(work.placement.g):
                for _, kind, size in self._state(work, packed=False):
                    usage[rank][kind] += size
        for own in usage:
            own["factors"] += kept["factors"]
            own["total"] = sum(own.values())
        return usage

    def per_step(self, factor_update_steps: int, inv_update_steps: int) -> list[Means]:
        """What arrives at each rank in a step, by kind, as a mean over whole intervals."""
        grid = self.account.grid
        got = {kind: [0.0] * grid.world for kind in MOVED}
        for work in self.account.active:
            sizes = [f.size if self.packed else f.elements for f in _factors(work)]
            reduced = 2 * (grid.world - 1) / grid.world * sum(sizes) * work.itemsize
            workers = grid.workers_of(work.placement.g)
            for rank in range(grid.world):
                got["factors"][rank] += reduced / factor_update_steps
                if rank not in workers:
                    got["gradients"][rank] += _gradient(work) * work.itemsize
            for root, _, size in self._state(work, self.packed):
                for rank in workers:
                    if rank != root:
                        got["second_order"][rank] += size / inv_update_steps
        return _by_rank(got)

    def _state(self, work: Work, packed: bool) -> Iterator[tuple[int, str, int]]:
        """A decomposition's parts: the rank that makes it, its kind, its bytes."""
        for factor in _factors(work):
            if self.account.method != "eigen":
                numbers = factor.size if packed else factor.elements
                yield factor.owner, f"{self.account.method}s", numbers * work.itemsize
                continue
            if not factor.diagonal:
                yield factor.owner, "eigenvectors", factor.elements * work.itemsize
            if not self.account.stored_product:
                yield factor.owner, "eigenvalues", factor.values * work.itemsize
        if self.account.stored_product:  # it takes the eigenvalues' place
            yield work.placement.g, "eigenvalue_products", _gradient(work) * work.itemsize


class Assigned(Mapping[str, Placement]):
    """Which rank keeps and decomposes the factors of which layer; its ``repr`` is a table."""

    def __init__(
        self,
        strategy: WorkAssignment,
        grid: Grid,
        tasks: Sequence[Task],
        placements: Mapping[str, Placement],
    ) -> None:
        self.strategy = strategy
        self.grid = grid
        self.tasks = tuple(tasks)
        self._placements = {task.name: placements[task.name] for task in tasks}

    def __getitem__(self, name: str) -> Placement:
        return self._placements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)

    def workers(self, name: str) -> range:
        """The ranks that precondition a layer's gradient."""
        return self.grid.workers_of(self[name].g)

    def __repr__(self) -> str:
        rows = [("layer", "A", "on rank", "G", "on rank", "gradient workers")]
        for task in self.tasks:
            a = _size(task.a, task.diagonal_a, task.blocks)
            g = _size(task.g, task.diagonal_g, task.blocks)
            at = self[task.name]
            rows.append((task.name, a, str(at.a), g, str(at.g), _ranks(self.workers(task.name))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        count = f"{self.grid.workers} gradient worker{'s' * (self.grid.workers > 1)} a layer"
        ranks = f"{self.grid.world} rank{'s' * (self.grid.world > 1)}"
        return "\n".join([f"{self.strategy!r} over {ranks}: {count}", *lines])


def _size(n: int, diagonal: bool, blocks: int) -> str:
    return f"{f'{blocks} x ' if blocks > 1 else ''}{n}{' diagonal' if diagonal else ''}"


def _ranks(ranks: range) -> str:
    if len(ranks) > 2 and ranks.step == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "...", shown[-1]])


def _grouped(works: Sequence[Work], key: Any) -> list[tuple[Any, list[Work]]]:
    groups: dict[Any, list[Work]] = {}
    for work in works:
        groups.setdefault(key(work), []).append(work)
    return list(groups.items())


def _by_rank(got: Mapping[str, Sequence[N]]) -> list[dict[str, N]]:
    """Lists by rank of each kind, as one list, with totals."""
    ranks = [dict(zip(got, sizes, strict=True)) for sizes in zip(*got.values(), strict=True)]
    return [own | {"total": sum(own.values())} for own in ranks]


def _weigh(mean: list[Means], step: list[Usage], share: float) -> None:
    for own, sizes in zip(mean, step, strict=True):
        for kind, size in sizes.items():
            own[kind] += share * size
