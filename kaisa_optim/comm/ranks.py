"""How bytes move among the ranks: sums to their owners, copies from one rank to a group.

Nothing here knows what the bytes mean. All ranks call the same methods in the same order: the order
follows from facts that all of them know.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import invalid, invalid_because
from ..plan.assignment import Grid
from ..plan.facts import FactorFacts, cargo_bytes
from ..plan.routes import Bucket, CopyItem, Round, all_reduced, chunks, grouped, overlaps

_STEPS = 3  # of a bucket, and so the buckets on their way at once: bounds their memory


class Cargo(Protocol):
    """Tensors of an item, alike on all members: the owner sends them, the others fill them."""

    @property
    def tensors(self) -> list[Tensor]: ...


C = TypeVar("C", bound=Cargo)
T = TypeVar("T")
P = TypeVar("P", bound=CopyItem | FactorFacts)


class GatherItem(NamedTuple):
    """A tensor that one rank has, as all ranks know it."""

    key: Any
    source: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensor: Tensor | None  # on its source


class _Flight(NamedTuple):
    """Bytes on their way from and to all ranks."""

    sent: Tensor  # kept alive until the exchange ends
    received: Tensor
    work: Any
    kind: str

    def wait(self) -> Tensor:
        """Return what has arrived, once it is all there."""
        with _named(f"receiving {self.kind}"):
            self.work.wait()
        return self.received


class Ranks:
    """The ranks of one K-FAC world, over one process group; in one process, nothing moves.

    Copies within a column or a row of the grid go over the whole group, too: groups of their own
    would be many, and ranks that are not in ``group`` would have to take part in making them.
    """

    status_device: str | None = None  # that carries the status numbers, if the CPU has no backend

    def __init__(
        self,
        group: Any,
        *,
        bucket_cap_mb: float,
        comm_dtype: torch.dtype | None,
        device: torch.device | None = None,  # of the model
    ) -> None:
        self.bucket_bytes = int(bucket_cap_mb * 2**20)
        self.comm_dtype = comm_dtype
        self.received: Counter[str] = Counter()  # bytes from other ranks, by kind
        self.group = group
        # Ranks outside the group hold a placeholder.
        if group is not None and not (
            dist.is_available()
            and (isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER)
        ):
            must = (
                "it must be a torch.distributed process group, as new_group() makes one or a "
                "DeviceMesh's get_group(), or None for the default group"
            )
            raise invalid("process_group", group, must)
        self.rank, self.world = 0, 1
        if group is not None or (dist.is_available() and dist.is_initialized()):
            self.group = group if group is not None else dist.group.WORLD
            self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise invalid_because(
                "process_group", "this rank is not in it; build the optimizer on its members only"
            )
        self.grid = Grid(1, 1)
        # The host reads the status numbers: exchange them on the CPU if its backend can.
        self._host = torch.device("cpu")
        if self.world > 1 and "cpu" not in [device.type for device in self.group._device_types]:
            self._host = torch.device(self.group._device_types[0])
            if device is not None and device.type == self._host.type:
                self._host = device
            self.status_device = self._host.type

    def members(self) -> list[int]:
        """Return the global ranks, in the order of this group's ranks."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    # ---- on the host ----

    def sum_numbers(self, numbers: Tensor, during: str) -> Tensor:
        """Return the sums over all ranks of a few numbers, float64 on the CPU, ``[n]``."""
        if self.world == 1:
            return numbers
        total = numbers.to(self._host, copy=True)
        with _named(during):
            dist.all_reduce(total, group=self.group)
            total = total.cpu()
        self.received["status"] += all_reduced(total.nbytes, self.world)
        return total

    def reduce_on_device(self, numbers: Tensor, kind: str, op: str = "SUM") -> Tensor:
        """Reduce a few numbers over all ranks, in place on their device; the host does not wait."""
        if self.world == 1:
            return numbers
        with _named(f"exchanging {kind}"):
            dist.all_reduce(numbers, op=getattr(dist.ReduceOp, op), group=self.group)
        self.received[kind] += all_reduced(numbers.nbytes, self.world)
        return numbers

    def gather_objects(self, mine: Any, during: str) -> list[Any]:
        """Return all ranks' objects, in the order of ranks; the exchange is slow: use it rarely."""
        if self.world == 1:
            return [mine]
        all_ranks: list[Any] = [None] * self.world
        with _named(during):
            dist.all_gather_object(all_ranks, mine, group=self.group)
        return all_ranks

    # ---- sums ----

    def reduce_to_owners(
        self, loads: Iterable[tuple[Bucket[P], list[Tensor]]], kind: str
    ) -> Iterator[list[tuple[P, Tensor]]]:
        """Bring every item's sum to its owner; yield this rank's sums of some buckets at a time.

        ``loads`` are buckets, each with this rank's terms, flat and of one dtype and device. The
        next load is asked for while earlier ones are on their way. Every element is added up in one
        order of the ranks, whichever rank adds, so that the bits depend neither on the owners nor
        on the buckets. Sums of several buckets go on together, up to a bucket for each owner: a
        large factor's bucket has one owner, and bucket by bucket all others would wait for it.
        """
        added: list[tuple[Bucket[P], Tensor]] = []
        coming = [0] * self.world  # bytes of these buckets that each owner is to receive
        for bucket, piece in _in_turns(map(functools.partial(self._sum, kind), loads)):
            sizes = [size * piece.itemsize for size in bucket.sizes.values()]
            most = max(map(sum, zip(coming, sizes, strict=True)))
            if added and (
                most > max(self.bucket_bytes, *coming) or piece.device != added[0][1].device
            ):
                yield self._to_owners(added, kind)
                coming = [0] * self.world
            added.append((bucket, piece))
            coming = [*map(sum, zip(coming, sizes, strict=True))]
            del piece
        if added:
            yield self._to_owners(added, kind)

    def _sum(
        self, kind: str, load: tuple[Bucket[P], list[Tensor]]
    ) -> Iterator[list[tuple[Bucket[P], Tensor]]]:
        """Send every rank this rank's terms of its piece; yield the sum of this rank's piece."""
        bucket, terms = load
        dtype, wire = terms[0].dtype, self.comm_dtype or terms[0].dtype
        flat = terms[0].new_zeros(bucket.size, dtype=wire)
        places = zip(bucket.items, bucket.starts, strict=True)
        torch._foreach_copy_([flat[start : start + x.size] for x, start in places], terms)
        del load, terms  # free them before the next load is made
        sizes = [stop - start for start, stop in itertools.pairwise(bucket.pieces)]
        flight = self._exchange(flat, sizes, [sizes[self.rank]] * self.world, kind)
        del flat
        yield []
        yield []
        rows = flight.wait().view(self.world, -1).to(dtype)
        del flight
        piece = _added_up(rows).clone()  # a view would keep all rows
        del rows
        yield [(bucket, piece)]

    def _to_owners(
        self, added: list[tuple[Bucket[P], Tensor]], kind: str
    ) -> list[tuple[P, Tensor]]:
        """Send the sums of this rank's pieces to their owners; return the sums that it owns.

        The list is emptied.
        """
        leaving: list[tuple[Tensor, ...]] = []
        arriving: list[tuple[Tensor, ...]] = []
        sums: list[tuple[P, Tensor]] = []
        for bucket, piece in added:
            room, first = piece.new_empty(bucket.sizes[self.rank]), bucket.owned[self.rank]
            leaving.append(piece.split(overlaps(bucket.pieces, self.rank, bucket.owned)))
            arriving.append(room.split(overlaps(bucket.owned, self.rank, bucket.pieces)))
            for item, start in zip(bucket.items, bucket.starts, strict=True):
                if item.owner == self.rank:
                    sums.append((item, room[start - first : start - first + item.size]))
        device = added[0][1].device
        added.clear()
        self.all_to_all([*zip(*leaving, strict=True)], [*zip(*arriving, strict=True)], device, kind)
        return sums

    def _exchange(
        self, sent: Tensor, sizes_out: list[int], sizes_in: list[int], kind: str
    ) -> _Flight:
        """Start an all-to-all; as bytes, since not every backend takes every dtype."""
        received, item = sent.new_empty(sum(sizes_in)), sent.dtype.itemsize
        self.received[kind] += (sum(sizes_in) - sizes_in[self.rank]) * item
        with _named(f"sending {kind}"):
            work = dist.all_to_all_single(
                received.view(torch.uint8),
                sent.view(torch.uint8),
                [n * item for n in sizes_in],
                [n * item for n in sizes_out],
                group=self.group,
                async_op=True,
            )
        return _Flight(sent, received, work, kind)

    # ---- copies ----

    def all_to_all(
        self,
        outgoing: Sequence[Sequence[Tensor]],
        incoming: Sequence[Sequence[Tensor]],
        device: torch.device,
        kind: str,
    ) -> None:
        """Send each rank its tensors and fill what each rank sends here; lists are by rank."""
        if self.world == 1:
            torch._foreach_copy_([*incoming[0]], [*outgoing[0]])
            return
        sent = _carved([t for tensors in outgoing for t in tensors], device)
        sizes_out, sizes_in = [*map(_bytes_of, outgoing)], [*map(_bytes_of, incoming)]
        received = self._exchange(sent, sizes_out, sizes_in, kind).wait()
        _unload(received, [t for tensors in incoming for t in tensors])

    def gather_to(self, items: list[GatherItem], to: int, kind: str) -> dict[Any, Tensor]:
        """Bring tensors that single ranks have to rank ``to``, on the CPU; others get nothing."""
        gathered: dict[Any, Tensor] = {}
        for same in grouped(items, lambda item: item.device).values():
            parts = chunks(same, lambda x: math.prod(x.shape) * x.dtype.itemsize, self.bucket_bytes)
            for chunk in parts:
                outgoing: list[list[Tensor]] = [[] for _ in range(self.world)]
                incoming: list[list[Tensor]] = [[] for _ in range(self.world)]
                for x in chunk:
                    if x.source == self.rank and x.tensor is not None:
                        outgoing[to].append(x.tensor)
                    if to == self.rank:
                        gathered[x.key] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
                        incoming[x.source].append(gathered[x.key])
                self.all_to_all(outgoing, incoming, chunk[0].device, kind)
                if to == self.rank:
                    gathered.update({x.key: gathered[x.key].cpu() for x in chunk})
        return gathered

    def broadcast(
        self,
        rounds: Iterable[Round],
        cargo: Iterator[list[C]],
        device: torch.device,
        kind: str,
        *,
        ahead: bool = False,
    ) -> Iterator[C]:
        """Give items from their owners to all members of their groups; yield cargo as it arrives.

        All ranks exhaust the iterator. One group may stand for all groups if their items have the
        same sizes. ``cargo`` yields the cargo of each item of this rank's buckets, in the order
        of their items. An item's cargo is made when its bucket is loaded, while earlier buckets
        are still on their way. With ``ahead``, all remaining cargo is made before this rank first
        waits for another. The first hop is left out if every member owns its piece.
        """

        def tasks() -> Iterator[Iterator[list[C]]]:
            nonlocal cargo
            for number, buckets in enumerate(rounds):
                members = [bucket for bucket in buckets if self.rank in bucket.sizes]
                bucket: Bucket[CopyItem] = members[0] if members else Bucket([], [self.rank])
                straight = all(each.pieces == each.owned for each in buckets)
                loaded = list(itertools.islice(cargo, len(bucket.items)))
                yield self._copy(bucket, loaded, device, kind, straight)
                if ahead and (not straight or number + 2 == _STEPS):  # the next turn may wait
                    cargo = iter(list(cargo))

        yield from _in_turns(tasks())

    def _copy(
        self,
        bucket: Bucket[CopyItem],
        cargo: list[list[C]],
        device: torch.device,
        kind: str,
        straight: bool,
    ) -> Iterator[list[C]]:
        """Send each member its piece of this rank's items, and all members this rank's piece."""
        tensors: dict[bool, list[Tensor]] = {True: [], False: []}
        for item, parts in zip(bucket.items, cargo, strict=True):
            tensors[item.owner == self.rank] += [t for part in parts for t in part.tensors]
        piece, at = _carved(tensors.pop(True), device), list(bucket.sizes).index(self.rank)
        of_owners = overlaps(bucket.pieces, at, bucket.owned)  # parts of this rank's piece
        of_pieces = overlaps(bucket.owned, at, bucket.pieces)  # parts of this rank's items
        if not straight:  # else every member has its piece
            sizes = self._by_rank(bucket, of_pieces), self._by_rank(bucket, of_owners)
            flight = self._exchange(piece, *sizes, kind)
            yield []
            piece = flight.wait()
        # A member does not get back the bytes that came from it.
        first, sent = bucket.pieces[at], list[Tensor]()
        for start, stop in itertools.pairwise(bucket.owned):
            sent += [piece[: max(0, start - first)], piece[max(0, stop - first) :]]
        lengths = [stop - start for start, stop in itertools.pairwise(bucket.pieces)]
        sizes_in = self._by_rank(bucket, [*map(operator.sub, lengths, of_pieces)])
        sizes_out = self._by_rank(bucket, [len(piece) - size for size in of_owners])
        flight = self._exchange(torch.cat(sent), sizes_out, sizes_in, kind)
        del piece, sent
        yield []
        if straight:
            yield []
        _unload(flight.wait(), tensors[False])
        del flight
        yield [part for parts in cargo for part in parts]

    def _by_rank(self, bucket: Bucket[CopyItem], sizes: list[int]) -> list[int]:
        """Return sizes of a bucket's members as sizes of all ranks."""
        every = [0] * self.world
        for member, size in zip(bucket.sizes, sizes, strict=True):
            every[member] = size
        return every


def _in_turns(tasks: Iterable[Iterator[list[T]]]) -> Iterator[T]:
    """Yield what the steps of each task yield; in a turn, each task on its way takes one step.

    All ranks run the same tasks, so that they send in one order.
    """
    running: deque[Iterator[list[T]]] = deque()
    for turn, task in enumerate(itertools.chain(tasks, [None] * (_STEPS - 1)), 1):
        if task is not None:
            running.append(task)
        # By number: a variable would keep the tensors of a task that has ended.
        for number in reversed(range(len(running))):
            yield from next(running[number])
        if turn >= _STEPS:
            running.popleft()


def _added_up(rows: Tensor) -> Tensor:
    """Return the sum of the ranks' rows, always added in the same tree; overwrite the rows.

    The sums are elementwise: the bits of ``sum(0)`` would depend on an element's place in the
    buffer.
    """
    count = rows.shape[0]
    while count > 1:
        half = count // 2
        rows[:half] += rows[count - half : count]
        count -= half
    return rows[0]


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return cargo_bytes(tensor.nbytes for tensor in tensors)


def _carved(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return one buffer with the bytes of all tensors."""
    buffer = torch.empty(_bytes_of(tensors), dtype=torch.uint8, device=device)
    if tensors:
        torch._foreach_copy_(_views(buffer, tensors), tensors)
    return buffer


def _unload(buffer: Tensor, tensors: list[Tensor]) -> None:
    """Fill tensors with the bytes of a buffer."""
    if tensors:
        torch._foreach_copy_(tensors, _views(buffer, tensors))


def _views(buffer: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return views of a buffer of bytes that are shaped like these tensors."""
    views, start = [], 0
    for tensor in tensors:
        view = buffer[start : start + tensor.nbytes]
        views.append(view.view(tensor.dtype).view(tensor.shape))
        start += cargo_bytes([tensor.nbytes])
    return views


@contextmanager
def _named(action: str) -> Iterator[None]:
    """Name in errors the action during which other ranks did not answer."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"K-FAC lost other ranks while {action}: one of them has failed, left, timed out or "
            "did not make this call, or skipped step(); its own log says why"
        ) from error
