"""How bytes move among the ranks: sums to their owners, copies from one rank to a group.

Nothing here knows what the bytes mean. All ranks call the same methods in the same order: the order
follows from facts that all of them know.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import invalid, invalid_because
from ..plan import routes
from ..plan.assignment import Grid
from ..plan.routes import (
    Bucket,
    Moves,
    Shard,
    adder_to_all,
    cargo_bytes,
    chunks,
    grouped,
    owner_to_adder,
    route,
)

_IN_FLIGHT = 3  # buckets on their way at once: bounds the memory of buckets that wait


class ReduceItem(NamedTuple):
    """A flat tensor that is summed over all ranks for its owner."""

    key: Any  # the name under which the sum is returned
    owner: int
    size: int
    device: torch.device
    dtype: torch.dtype  # of the sum


class BroadcastItem(NamedTuple):
    """Bytes that ``root`` sends to the other members of its group."""

    root: int
    size: int  # bytes of all its cargo, by cargo_bytes


class Cargo(Protocol):
    """Tensors of an item, alike on all members: the root sends them, the others fill them."""

    @property
    def tensors(self) -> list[Tensor]: ...


C = TypeVar("C", bound=Cargo)


class RankGroup(NamedTuple):
    """Ranks that share items; each item starts on one of them."""

    members: Sequence[int]
    items: list[BroadcastItem]


class GatherItem(NamedTuple):
    """A tensor that one rank has, as all ranks know it."""

    key: Any
    source: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensor: Tensor | None  # on its source

    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def like(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class _Flight(NamedTuple):
    bucket: Bucket[ReduceItem]
    sent: Tensor  # kept alive until the exchange ends
    received: Tensor
    work: Any


class _Added(NamedTuple):
    bucket: Bucket[ReduceItem]
    part: Tensor  # the sum of this rank's share of the bucket


class _Move(NamedTuple):
    """Parts of a flat buffer that are on their way in from other ranks."""

    flat: Tensor
    parts: list[tuple[int, int]]  # ranges of the buffer that the received bytes fill
    received: Tensor
    sent: Tensor  # kept alive until the work is done
    work: Any
    kind: str

    def finish(self) -> None:
        """Wait for the bytes, and put them into the buffer."""
        with _named(f"receiving {self.kind}"):
            self.work.wait()
        at = 0
        for start, stop in self.parts:
            self.flat[start:stop] = self.received[at : at + stop - start]
            at += stop - start


class _Round(NamedTuple, Generic[C]):
    """Items that travel together."""

    flat: Tensor
    relay: _Move | None  # brings the bytes that this rank is to pass on
    moves: Moves  # from the ranks that pass bytes on to all members
    targets: list[tuple[Tensor, Tensor]]  # tensors to fill, each with its part of the buffer
    cargo: list[C]


class _Arrival(NamedTuple, Generic[C]):
    """A round on its last way."""

    move: _Move
    targets: list[tuple[Tensor, Tensor]]
    cargo: list[C]

    def unload(self) -> list[C]:
        """Wait for the round; return its cargo, filled."""
        self.move.finish()
        if self.targets:
            tensors, parts = zip(*self.targets, strict=True)
            torch._foreach_copy_(tensors, parts)
        return self.cargo


def _is_group(group: Any) -> bool:
    if not dist.is_available():
        return False
    # Ranks outside the group hold a placeholder.
    return isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER


class Ranks:
    """The ranks of one K-FAC world, over one process group; in one process, nothing moves.

    Copies within a column or a row of the grid go over the whole group, too: groups of their own
    would be many, and ranks that are not in ``group`` would have to take part in making them.
    """

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
        if group is not None and not _is_group(group):
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

    @property
    def status_device(self) -> str | None:
        """The device whose backend carries the status numbers, if the CPU has no backend."""
        return None if self._host.type == "cpu" else self._host.type

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
        self.received["status"] += 2 * total.nbytes * (self.world - 1) // self.world
        return total

    def sum_on_device(self, numbers: Tensor, kind: str) -> Tensor:
        """Return sums over all ranks of a few numbers on their device; the host does not wait."""
        if self.world == 1:
            return numbers
        with _named(f"exchanging {kind}"):
            dist.all_reduce(numbers, group=self.group)
        self.received[kind] += 2 * numbers.nbytes * (self.world - 1) // self.world
        return numbers

    def largest(self, numbers: Tensor, kind: str) -> Tensor:
        """Return the largest of a few numbers on any rank, in place; the host does not wait."""
        with _named(f"exchanging {kind}"):
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
        self.received[kind] += 2 * numbers.nbytes * (self.world - 1) // self.world
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
        self, loads: Iterable[tuple[Bucket[ReduceItem], list[Tensor]]], kind: str
    ) -> Iterator[dict[Any, Tensor]]:
        """Bring every item's sum to its owner; yield this rank's sums of some buckets at a time.

        ``loads`` are the :meth:`buckets`, each with this rank's terms. The next load is asked for
        while earlier ones are on their way. Every element is added up in one order of the ranks,
        whichever rank adds, so that the bits depend neither on the owners nor on the buckets.
        """
        added: list[_Added] = []
        coming: Counter[int] = Counter()  # bytes of these buckets that each owner is to receive
        for one in self._buckets_added_up(loads, kind):
            if not one.bucket.passed_on:
                yield self._pass_on([one], kind)
                del one  # free this receive buffer before the next bucket is filled
                continue
            itemsize = one.part.element_size()
            more = Counter({owner: n * itemsize for owner, n in one.bucket.passed_on.items()})
            most = max(coming.values(), default=0)
            if added and (
                max((coming + more).values()) > max(most, self.bucket_bytes)
                or one.part.device != added[0].part.device
            ):
                yield self._pass_on(added, kind)
                coming.clear()
            added.append(one)
            coming += more
        if added:
            yield self._pass_on(added, kind)

    def _buckets_added_up(
        self, loads: Iterable[tuple[Bucket[ReduceItem], list[Tensor]]], kind: str
    ) -> Iterator[_Added]:
        """Yield one bucket after the other, while the terms of the next are on their way."""
        on_the_way: deque[_Flight] = deque()
        for bucket, terms in loads:
            on_the_way.append(self._send(bucket, terms, kind))
            del terms  # free them before the next load is made
            if len(on_the_way) == _IN_FLIGHT:
                yield self._add_up(on_the_way.popleft(), kind)
        while on_the_way:
            yield self._add_up(on_the_way.popleft(), kind)

    def buckets(self, items: list[ReduceItem]) -> Iterator[Bucket[ReduceItem]]:
        """Return items of one device and dtype together, up to the size that the user has set."""
        return (
            Bucket(some, self.world)
            for some in routes.in_buckets(
                items,
                lambda item: (item.device, item.dtype),
                lambda item: (self.comm_dtype or item.dtype).itemsize,
                self.bucket_bytes,
            )
        )

    def _send(self, bucket: Bucket[ReduceItem], terms: list[Tensor], kind: str) -> _Flight:
        place = bucket.items[0]
        wire = self.comm_dtype or place.dtype
        flat = torch.zeros(bucket.size, dtype=wire, device=place.device)
        targets = [flat[bucket.start[i] :][: x.size] for i, x in enumerate(bucket.items)]
        torch._foreach_copy_(targets, terms)
        ordered = [piece for pieces in bucket.to_add for piece in pieces]
        if any(a.stop != b.start for a, b in itertools.pairwise(ordered)):
            flat = torch.cat([flat[p.start : p.stop] for p in ordered])
        sizes = bucket.sizes
        mine = sizes[self.rank]
        received = torch.empty(self.world * mine, dtype=wire, device=place.device)
        work = self._exchange(received, [mine] * self.world, flat, sizes, kind)
        return _Flight(bucket, flat, received, work)

    def _add_up(self, flight: _Flight, kind: str) -> _Added:
        bucket, dtype = flight.bucket, flight.bucket.items[0].dtype
        with _named(f"receiving {kind}"):
            flight.work.wait()
        part = _added_up(flight.received.view(self.world, -1).to(dtype))
        if bucket.passed_on:  # the sum may wait: do not keep the whole receive buffer with it
            part = part.clone()
        return _Added(bucket, part)

    def _pass_on(self, added: list[_Added], kind: str) -> dict[Any, Tensor]:
        """Send other owners their sums, and return this rank's, of several buckets at once.

        The list is emptied. A large factor's bucket has one owner: bucket by bucket, all others
        would wait for that owner alone.
        """
        outgoing: list[list[Tensor]] = [[] for _ in range(self.world)]
        incoming: list[list[Tensor]] = [[] for _ in range(self.world)]
        kept: list[tuple[Tensor, Tensor]] = []
        mine: dict[Any, Tensor] = {}
        for bucket, part in added:
            coming = bool(bucket.passed_on)
            start, stop = bucket.owned[self.rank]
            own = part.new_empty(stop - start) if coming else part  # all that this rank owns
            sizes = [piece.stop - piece.start for piece in bucket.to_add[self.rank]]
            for piece, numbers in zip(bucket.to_add[self.rank], part.split(sizes), strict=True):
                if piece.owner != self.rank:
                    outgoing[piece.owner].append(numbers)
                elif coming:
                    kept.append((own[piece.start - start : piece.stop - start], numbers))
            for piece in bucket.pieces if coming else ():
                if piece.owner == self.rank != piece.adder:
                    incoming[piece.adder].append(own[piece.start - start : piece.stop - start])
            for i, item in [(i, x) for i, x in enumerate(bucket.items) if x.owner == self.rank]:
                at = bucket.start[i] - start
                mine[item.key] = own[at : at + item.size]
        if kept:
            targets, sources = zip(*kept, strict=True)
            torch._foreach_copy_(targets, sources)
        if any(one.bucket.passed_on for one in added):
            self.all_to_all(outgoing, incoming, added[0].part.device, kind)
        added.clear()
        return mine

    def _move(self, flat: Tensor, moves: Moves, kind: str) -> _Move:
        """Send parts of ``flat`` to other ranks, and begin to take others in."""
        parts = [flat[start:stop] for start, stop in moves.outgoing]
        sent = torch.cat(parts) if parts else flat.new_empty(0)
        received = flat.new_empty(sum(moves.sizes_in))
        work = self._exchange(received, list(moves.sizes_in), sent, list(moves.sizes_out), kind)
        return _Move(flat, moves.incoming, received, sent, work, kind)

    def _exchange(
        self, received: Tensor, sizes_in: list[int], sent: Tensor, sizes_out: list[int], kind: str
    ) -> Any:
        """Start an all-to-all; as bytes, since not every backend takes every dtype."""
        item = sent.dtype.itemsize
        self.received[kind] += (sum(sizes_in) - sizes_in[self.rank]) * item
        with _named(f"sending {kind}"):
            return dist.all_to_all_single(
                received.view(torch.uint8),
                sent.view(torch.uint8),
                [n * item for n in sizes_in],
                [n * item for n in sizes_out],
                group=self.group,
                async_op=True,
            )

    # ---- copies ----

    def broadcast_from(self, root: int, tensors: list[Tensor], kind: str) -> None:
        """Give ``root``'s tensors to all ranks."""
        if tensors:
            item = BroadcastItem(root, cargo_bytes(tensor.nbytes for tensor in tensors))
            group, device = RankGroup(range(self.world), [item]), tensors[0].device
            for _ in self.broadcast([group], iter([[_Tensors(tensors)]]), device, kind):
                pass

    def all_to_all(
        self,
        outgoing: list[list[Tensor]],
        incoming: list[list[Tensor]],
        device: torch.device,
        kind: str,
    ) -> None:
        """Send each rank its tensors and fill what each rank sends here; lists are by rank."""
        if self.world == 1:
            torch._foreach_copy_(incoming[0], outgoing[0])
            return
        sent, views = _carve([t for tensors in outgoing for t in tensors], device)
        if views:
            torch._foreach_copy_(views, [t for tensors in outgoing for t in tensors])
        sizes = [[cargo_bytes(t.nbytes for t in x) for x in part] for part in (outgoing, incoming)]
        received = sent.new_empty(sum(sizes[1]))
        work = self._exchange(received, sizes[1], sent, sizes[0], kind)
        with _named(f"exchanging {kind}"):
            work.wait()
        targets = [t for tensors in incoming for t in tensors]
        if targets:
            torch._foreach_copy_(targets, _views(received, targets))

    def gather_to(self, items: list[GatherItem], to: int, kind: str) -> dict[Any, Tensor]:
        """Bring tensors that single ranks have to rank ``to``, on the CPU; others get nothing."""
        found: dict[Any, Tensor] = {}
        for same in grouped(items, lambda item: item.device).values():
            for chunk in chunks(same, GatherItem.bytes, self.bucket_bytes):
                mine = [x for x in chunk if x.source == self.rank]
                sizes_in = [
                    cargo_bytes(x.bytes() for x in chunk if x.source == rank and to == self.rank)
                    for rank in range(self.world)
                ]
                sizes_out = [0] * self.world
                sent = torch.empty(0, dtype=torch.uint8, device=chunk[0].device)
                if mine:
                    sent, views = _carve([x.like() for x in mine], sent.device)
                    torch._foreach_copy_(views, [x.tensor for x in mine if x.tensor is not None])
                    sizes_out[to] = sent.numel()
                received = sent.new_empty(sum(sizes_in))
                work = self._exchange(received, sizes_in, sent, sizes_out, kind)
                with _named(f"collecting {kind}"):
                    work.wait()
                if to == self.rank:
                    received = received.cpu()
                    came = sorted(chunk, key=lambda x: x.source)
                    views = _views(received, [x.like() for x in came])
                    found.update((x.key, v.clone()) for x, v in zip(came, views, strict=True))
        return found

    def broadcast(
        self,
        groups: Sequence[RankGroup],
        cargo: Iterator[list[C]],
        device: torch.device,
        kind: str,
        *,
        ahead: bool = False,
    ) -> Iterator[C]:
        """Give each group's items from their roots to all its members; yield cargo as it arrives.

        All ranks exhaust the iterator. Groups have no rank in common. One group may stand for all
        groups if their items have the same sizes. ``cargo`` yields the cargo of each item of this
        rank's group, in the order of the items. An item's cargo is made when its round begins,
        while earlier rounds are still on their way. With ``ahead``, all remaining cargo is made
        before this rank first waits for another. If a root could not send its bytes to all in time,
        other members pass them on, and meanwhile the next round begins.
        """
        rounds = [list(chunks(g.items, lambda x: x.size, self.bucket_bytes)) for g in groups]
        begun: deque[_Round[C]] = deque()
        on_the_way: deque[_Arrival[C]] = deque()
        for parts in itertools.zip_longest(*rounds):
            begun.append(self._begin(groups, parts, cargo, device, kind))
            while begun and (begun[0].relay is None or len(begun) > 1):
                if ahead and begun[0].relay is not None:
                    cargo = iter(list(cargo))
                on_the_way.append(self._send_on(begun, kind))
            if len(begun) + len(on_the_way) == _IN_FLIGHT:
                if ahead:
                    cargo = iter(list(cargo))
                yield from on_the_way.popleft().unload()
        while begun:
            on_the_way.append(self._send_on(begun, kind))
        while on_the_way:
            yield from on_the_way.popleft().unload()

    def _begin(
        self,
        groups: Sequence[RankGroup],
        parts: Sequence[list[BroadcastItem] | None],
        cargo: Iterator[list[C]],
        device: torch.device,
        kind: str,
    ) -> _Round[C]:
        """Load this rank's items of a round, and send the bytes that others are to pass on."""
        pieces: tuple[Shard, ...] = ()
        members: Sequence[int] = ()
        items: list[BroadcastItem] = []
        relayed = False
        for group, own in zip(groups, parts, strict=True):
            if own is not None:
                segments = tuple((x.root, x.size) for x in own)
                ways = route(tuple(group.members), segments)
                relayed = relayed or any(p.adder != p.owner for p in ways)
                if self.rank in group.members:
                    members, items, pieces = group.members, own, ways
        flat = torch.empty(sum(x.size for x in items), dtype=torch.uint8, device=device)
        targets: list[tuple[Tensor, Tensor]] = []
        loaded: list[C] = []
        at = 0
        for item in items:
            own_cargo = next(cargo)
            tensors = [tensor for one in own_cargo for tensor in one.tensors]
            views = _views(flat[at : at + item.size], tensors)
            at += item.size
            if item.root == self.rank:
                torch._foreach_copy_(views, tensors)
            else:
                targets += zip(tensors, views, strict=True)
            loaded += own_cargo
        relay = None
        if relayed:
            relay = self._move(flat, owner_to_adder(pieces, self.rank, self.world), kind)
        moves = adder_to_all(pieces, tuple(members), self.rank, self.world)
        return _Round(flat, relay, moves, targets, loaded)

    def _send_on(self, begun: deque[_Round[C]], kind: str) -> _Arrival[C]:
        """Send the first of these rounds to all, once its relayed bytes are here."""
        flat, relay, moves, targets, cargo = begun.popleft()
        if relay is not None:
            relay.finish()
            relay = None  # free the relayed bytes
        return _Arrival(self._move(flat, moves, kind), targets, cargo)


class _Tensors(NamedTuple):
    tensors: list[Tensor]


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


def _carve(tensors: list[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return one buffer of bytes for all tensors, and views of it that are shaped like them."""
    size = cargo_bytes(tensor.nbytes for tensor in tensors)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    return buffer, _views(buffer, tensors)


def _views(buffer: Tensor, tensors: list[Tensor]) -> list[Tensor]:
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
