"""How bytes move among the ranks: sums to their owners, copies from one rank to a group.

Nothing here knows what the bytes mean. All ranks call the same methods in the same order: the order
follows from facts that all of them know.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import invalid_because
from ..plan.assignment import Grid
from ..plan.facts import all_reduced, cargo_bytes, chunks, grouped, padded

Lists = Sequence[Sequence[Tensor]]  # tensors of each rank
_AT_ONCE = 3  # buckets that are on their way at the same time: bounds their memory


class CopyItem(NamedTuple):
    """Tensors that their owner sends to the other members of its group, all at once."""

    owner: int
    size: int  # in bytes
    content: Any


class Bucket:
    """Items that travel together, cut into an equal piece for each member of a group."""

    # An item has a size, and an owner: the rank that its sum goes to, or that its bytes come from.
    # Items travel in two hops, so that every member carries the same load, whoever owns the items.
    # Sums: each member receives all terms of its piece, and sends the sum on to the owners. Copies:
    # each member receives its piece from the owners, and sends it on to all members.

    def __init__(self, items: Iterable[Any], members: Sequence[int], world: int) -> None:
        # Members ascend, and so must the items' owners: what an owner has is one interval.
        self.items = sorted(items, key=lambda item: item.owner)
        self.starts: list[int] = []
        self.size, self.world = 0, world
        self.sizes = dict.fromkeys(members, 0)  # of all items of each owner
        for item in self.items:
            self.starts.append(self.size)
            self.size += padded(item.size)
            self.sizes[item.owner] += padded(item.size)
        self.straight = False  # the owners' parts are the pieces, and need no first hop

    @functools.cached_property
    def owned(self) -> list[int]:
        """The bounds of each rank's items; ranks that are no members have none."""
        bounds = [0]
        for rank in range(self.world):
            bounds.append(bounds[-1] + self.sizes.get(rank, 0))
        return bounds

    @functools.cached_property
    def pieces(self) -> list[int]:
        """The bounds of each rank's piece."""
        length, bounds = padded(-(-self.size // len(self.sizes))), [0]
        for rank in range(self.world):
            bounds.append(min(self.size, bounds[-1] + length * (rank in self.sizes)))
        return self.owned if self.straight else bounds


def overlaps(bounds: Sequence[int], at: int, intervals: Sequence[int]) -> list[int]:
    """Return how much of the interval ``at`` between bounds lies in each of the intervals."""
    start, stop = bounds[at], bounds[at + 1]
    return [max(0, min(stop, b) - max(start, a)) for a, b in itertools.pairwise(intervals)]


class GatherItem(NamedTuple):
    """A tensor that one rank has, as all ranks know it."""

    key: Any
    source: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensor: Tensor | None  # on its source


class _Flight(NamedTuple):
    sent: Tensor  # must live until the exchange ends
    received: Tensor
    work: Any
    kind: str

    def wait(self) -> Tensor:
        with _named(f"receiving {self.kind}"):
            self.work.wait()
        return self.received


class Ranks:
    """The ranks of one K-FAC world, over one process group; in one process, nothing moves."""

    # Copies within a column or a row of the grid go over the whole group, too: groups of their own
    # would be many, and ranks that are not in ``group`` would have to take part in making them.
    def __init__(
        self,
        group: Any,
        *,
        bucket_cap_mb: float,
        comm_dtype: torch.dtype | None,
        device: torch.device | None = None,  # of the model
    ) -> None:
        self.bucket_bytes, self.comm_dtype = int(bucket_cap_mb * 2**20), comm_dtype
        self.received: Counter[str] = Counter()  # bytes from other ranks, by kind
        self.group, self.rank, self.world = group, 0, 1
        if group is not None or (dist.is_available() and dist.is_initialized()):
            self.group = dist.group.WORLD if group is None else group
            self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            why = "this rank is not in it; build the optimizer on its members only"
            raise invalid_because("process_group", why)
        self.grid = Grid(1, 1)
        # The host reads the status numbers: exchange them on the CPU if its backend can.
        self._host = torch.device("cpu")
        if self.world > 1 and "cpu" not in [device.type for device in self.group._device_types]:
            self._host = torch.device(self.group._device_types[0])
            if device is not None and device.type == self._host.type:
                self._host = device

    def members(self) -> list[int]:
        """Return the global ranks, in the order of this group's ranks."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    # ---- on the host ----

    def sum_numbers(self, numbers: Tensor, during: str) -> Tensor:
        """Return the sums over all ranks of a few numbers, float64 on the CPU, ``[n]``."""
        if self.world == 1:
            return numbers
        # A copy, since all_reduce works in place: ranks compare their own numbers with the sums.
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

    def gather_objects(self, value: Any, during: str) -> list[Any]:
        """Return all ranks' objects, in the order of ranks; the exchange is slow: use it rarely."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            with _named(during):
                dist.all_gather_object(values, value, group=self.group)
        return values

    # ---- sums ----

    def reduce_to_owners(
        self, loads: Iterable[tuple[Bucket, list[Tensor]]], kind: str
    ) -> Iterator[list[tuple[Any, Tensor]]]:
        """Bring every item's sum to its owner; yield this rank's sums of some buckets at a time.

        ``loads`` are buckets, each with this rank's terms, flat and of one dtype and device.
        """
        # Sums of several buckets go on together, up to a bucket for each owner. A large factor's
        # bucket has one owner: bucket by bucket, all other ranks would wait for it.
        added: list[tuple[Bucket, Tensor]] = []
        coming = [0] * self.world  # bytes of these buckets that each owner is to receive
        for bucket, piece in self._sums(loads, kind):
            sizes = [size * piece.itemsize for size in bucket.sizes.values()]
            grown = [a + b for a, b in zip(coming, sizes, strict=True)]
            is_full = max(grown) > max(self.bucket_bytes, *coming)
            if added and (is_full or piece.device != added[0][1].device):
                yield self._to_owners(added, kind)
                grown = sizes
            added.append((bucket, piece))
            coming = grown
            del piece  # the list alone keeps it
        if added:
            yield self._to_owners(added, kind)

    def _sums(
        self, loads: Iterable[tuple[Bucket, list[Tensor]]], kind: str
    ) -> Iterator[tuple[Bucket, Tensor]]:
        # Send every rank its piece of this rank's terms; yield buckets with this rank's piece.
        flights: deque[tuple[Bucket, torch.dtype, _Flight]] = deque()
        for bucket, terms in loads:
            dtype = terms[0].dtype
            flat = terms[0].new_zeros(bucket.size, dtype=self.comm_dtype or dtype)
            places = zip(bucket.items, bucket.starts, strict=True)
            torch._foreach_copy_([flat[start : start + x.size] for x, start in places], terms)
            del terms  # a name would keep them while the next load is made, and so would ``flat``
            sizes = [stop - start for start, stop in itertools.pairwise(bucket.pieces)]
            arriving = [sizes[self.rank]] * self.world
            flights.append((bucket, dtype, self._exchange(flat, sizes, arriving, kind)))
            del flat
            if len(flights) == _AT_ONCE:
                yield self._added(flights)
        while flights:
            yield self._added(flights)

    def _added(self, flights: deque[tuple[Bucket, torch.dtype, _Flight]]) -> tuple[Bucket, Tensor]:
        bucket, dtype, flight = flights.popleft()  # no longer in the queue, which would keep bytes
        rows = flight.wait().view(self.world, -1).to(dtype)
        return bucket, _added_up(rows).clone()  # a view would keep all rows

    def _to_owners(self, added: list[tuple[Bucket, Tensor]], kind: str) -> list[tuple[Any, Tensor]]:
        # Send the sums of this rank's pieces to their owners; return the sums that it owns.
        outgoing: list[list[Tensor]] = [[] for _ in range(self.world)]
        incoming: list[list[Tensor]] = [[] for _ in range(self.world)]
        sums: list[tuple[Any, Tensor]] = []
        for bucket, piece in added:
            room, first = piece.new_empty(bucket.sizes[self.rank]), bucket.owned[self.rank]
            leaving = piece.split(overlaps(bucket.pieces, self.rank, bucket.owned))
            arriving = room.split(overlaps(bucket.owned, self.rank, bucket.pieces))
            for rank in range(self.world):
                outgoing[rank].append(leaving[rank])
                incoming[rank].append(arriving[rank])
            for item, start in zip(bucket.items, bucket.starts, strict=True):
                if item.owner == self.rank:
                    sums.append((item, room[start - first : start - first + item.size]))
        device = added[0][1].device
        added.clear()  # the caller's list would keep the pieces while sums are used
        self.all_to_all(outgoing, incoming, device, kind)
        return sums

    def _exchange(
        self, sent: Tensor, sizes_out: list[int], sizes_in: list[int], kind: str
    ) -> _Flight:
        # Start an all-to-all; as bytes, since not every backend takes every dtype. Also where this
        # rank sends and receives nothing: the other ranks wait for its call.
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

    def all_to_all(self, outgoing: Lists, incoming: Lists, device: torch.device, kind: str) -> None:
        """Send each rank its tensors and fill what each rank sends here; lists are by rank."""
        if self.world == 1:
            torch._foreach_copy_([*incoming[0]], [*outgoing[0]])
            return
        sent = _packed([tensor for tensors in outgoing for tensor in tensors], device)
        sizes_out = [_bytes_of(tensors) for tensors in outgoing]
        sizes_in = [_bytes_of(tensors) for tensors in incoming]
        received = self._exchange(sent, sizes_out, sizes_in, kind).wait()
        _unpack(received, [tensor for tensors in incoming for tensor in tensors])

    def gather_to(self, items: list[GatherItem], to: int, kind: str) -> dict[Any, Tensor]:
        """Bring tensors that single ranks have to rank ``to``, on the CPU; others get nothing."""
        gathered: dict[Any, Tensor] = {}
        for same in grouped(items, lambda item: item.device).values():
            # Chunks bound what rank ``to`` holds on a device beside its own state.
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
        rounds: Iterable[list[Bucket]],
        cargo: Iterator[list[Any]],
        device: torch.device,
        kind: str,
        *,
        ahead: bool = False,
    ) -> Iterator[Any]:
        """Give items from their owners to all members of their groups; yield cargo as it arrives.

        All ranks exhaust the iterator. A round has a bucket for each group of ranks; one group may
        stand for all groups if their items have the same sizes. ``cargo`` yields a list for each
        item of this rank's buckets, in their order. A cargo has ``tensors``: its owner sends them,
        and the other members fill them. With ``ahead``, all cargo is made before this rank first
        waits for another; else each when its bucket is loaded.
        """
        running: deque[Iterator[list[Any]]] = deque()
        turns: list[list[Bucket]] = [*rounds, *[[]] * (_AT_ONCE - 1)]
        for turn, buckets in enumerate(turns, 1):
            for bucket in buckets:
                if self.rank in bucket.sizes:
                    loaded = [next(cargo) for _ in bucket.items]
                    running.append(self._copy(bucket, loaded, device, kind))
            # Each bucket on its way takes a step, the newest first. All ranks must do so, those
            # with an empty bucket, too: collectives are matched by their order alone.
            for number in reversed(range(len(running))):
                yield from next(running[number])  # a name would keep tensors of an ended one
            if turn >= _AT_ONCE:
                running.popleft()
            # The next turn may wait: for a first hop, or for the oldest bucket.
            if ahead and (turn == _AT_ONCE - 1 or not all(x.straight for x in buckets)):
                cargo = iter(list(cargo))

    def _copy(
        self, bucket: Bucket, cargo: list[list[Any]], device: torch.device, kind: str
    ) -> Iterator[list[Any]]:
        # Send each member its piece of this rank's items, and all members this rank's piece. There
        # are three steps in either case, since ``broadcast`` counts them; the last yields cargo.
        outgoing: list[Tensor] = []
        incoming: list[Tensor] = []
        for item, parts in zip(bucket.items, cargo, strict=True):
            for part in parts:
                (outgoing if item.owner == self.rank else incoming).extend(part.tensors)
        piece = _packed(outgoing, device)
        del outgoing  # packed triangles, which nothing else keeps
        of_owners = overlaps(bucket.pieces, self.rank, bucket.owned)  # parts of this rank's piece
        of_pieces = overlaps(bucket.owned, self.rank, bucket.pieces)  # parts of this rank's items
        if not bucket.straight:
            flight = self._exchange(piece, of_pieces, of_owners, kind)
            yield []
            piece = flight.wait()
        # A member does not get back the bytes that came from it.
        first, sent = bucket.pieces[self.rank], list[Tensor]()
        sizes_out, sizes_in = [0] * self.world, [0] * self.world
        for rank in bucket.sizes:
            start, stop = bucket.owned[rank] - first, bucket.owned[rank + 1] - first
            sent += [piece[: max(0, start)], piece[max(0, stop) :]]
            sizes_out[rank] = len(piece) - of_owners[rank]
            sizes_in[rank] = bucket.pieces[rank + 1] - bucket.pieces[rank] - of_pieces[rank]
        flight = self._exchange(torch.cat(sent), sizes_out, sizes_in, kind)
        del piece, sent
        yield []
        if bucket.straight:
            yield []
        _unpack(flight.wait(), incoming)
        del flight
        yield [part for parts in cargo for part in parts]


def _added_up(rows: Tensor) -> Tensor:
    # Every element is added up in one tree of the ranks, whichever rank adds; rows are overwritten.
    # The bits of ``rows.sum(0)`` would depend on an element's place, and so on the buckets.
    count = rows.shape[0]
    while count > 1:
        half = count // 2
        rows[:half] += rows[count - half : count]
        count -= half
    return rows[0]


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return cargo_bytes(tensor.nbytes for tensor in tensors)


def _packed(tensors: list[Tensor], device: torch.device) -> Tensor:
    buffer = torch.empty(_bytes_of(tensors), dtype=torch.uint8, device=device)
    if tensors:
        torch._foreach_copy_(_views(buffer, tensors), tensors)
    return buffer


def _unpack(buffer: Tensor, tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(tensors, _views(buffer, tensors))


def _views(buffer: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    views, start = [], 0
    for tensor in tensors:
        views.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += padded(tensor.nbytes)
    return views


@contextmanager
def _named(action: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = f"K-FAC lost other ranks while {action}: one of them has failed, left, timed out or "
        text += "did not make this call, or skipped step(); its own log says why"
        raise RuntimeError(text) from error
