"""How new gradients come to the parameters: made here, received from a row of ranks, or in shards.

A transport has shares of groups. ``measure`` sums over blocks, ``exchange`` lets ``make`` fill the
directions and terms of shares, on the ranks that have their state, and ``deliver`` writes them into
the buffers of the parameters' stacks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import sharding
from ..comm.ranks import Ranks
from ..curvature.group import Group, ParameterStack, device_of, stack_key
from ..curvature.lengths import SHARD_SUMS, Share
from ..layers import Layer
from ..plan.routes import CopyItem, Round, chunks, grouped
from ..stages import stage
from .placements import Placements

Make = Callable[[Share], None]
Rows_ = Mapping[Tensor, tuple[ParameterStack, int]]  # each parameter's stack and row
ShareOf = Callable[[Sequence[Group]], Share]

_AT_ONCE = 1 << 25  # numbers of the groups that are stepped together


class Local:
    """All new gradients are made on this rank."""

    def __init__(self, groups: Sequence[Group], share_of: ShareOf) -> None:
        alike = grouped([x for x in groups if x.places], lambda x: x.g.key[2:]).values()
        size = lambda group: group.count * group.shape[1] * group.shape[2]  # noqa: E731
        parts = itertools.chain.from_iterable(chunks(same, size, _AT_ONCE) for same in alike)
        self.shares = [share_of(part) for part in parts]
        self.made = self.shares  # those whose new gradients are made on this rank

    @property
    def groups(self) -> list[Group]:
        return [group for share in self.shares for group in share.groups]

    def measure(self, tensors: list[Tensor], parameters: list[Tensor], *, squares: bool) -> None:
        """Sum the buffers' ``tensors`` over blocks, and squares of the parameters."""
        for share in self.made:
            if tensors:
                share.measured = share.block_sums(tensors, "buffer", squares=squares)
            share.squares = share.block_sums(parameters, "weights", squares=True)

    def take_former(self) -> None:
        """Add the second moments that the base kept to the numbers of the blocks."""
        stacks = [x for share in self.made for g in share.groups for x, *_ in g.places]
        if all(stack.former is None for stack in stacks):
            return
        for stack in stacks:
            stack.former = stack.empty().zero_() if stack.former is None else stack.former
        for share in self.made:
            sums = share.block_sums([], "former", squares=False).split(share.sizes)
            torch._foreach_add_([group.tensors["square_sum"] for group in share.groups], list(sums))
        for stack in stacks:
            stack.former = None

    def exchange(self, make: Make) -> None:
        for share in self.shares:
            make(share)

    def terms(self) -> list[Tensor]:
        return [share.terms for share in self.shares]

    def deliver(self, scales: Iterator[Tensor] | None) -> None:
        """Write directions into buffers, times ``scales`` of each share's blocks."""
        for share in self.shares:
            if scales is not None:
                share.scale(share.directions, next(scales))
            for group, directions in zip(share.groups, share.directions, strict=True):
                group.deliver(directions)
            share.directions = []


class _Wire:
    """A share's new gradients as they travel, in ``comm_dtype``."""

    def __init__(self, share: Share, dtype: torch.dtype | None, terms: int, make: Make | None):
        self.share = share
        if make is not None:
            make(share)
            # The sender uses the rounded ones, too, so that all ranks agree.
            self.new = [x.to(dtype or x.dtype) for x in share.directions]
            self.terms = list(share.terms.split(share.sizes))
        else:
            like = [(g, dtype or g.dtype) for g in share.groups]
            self.new = [torch.empty(g.shape, dtype=own, device=g.device) for g, own in like]
            self.terms = [
                torch.empty(g.count, terms, dtype=g.dtype, device=g.device) for g in share.groups
            ]

    @property
    def tensors(self) -> list[Tensor]:
        pairs = zip(self.new, self.terms, strict=True)
        return [x for new, terms in pairs for x in (new, terms) if x.numel()]

    def unpack(self) -> None:
        self.share.directions = [x.to(self.share.like.dtype) for x in self.new]
        self.share.terms = torch.cat(self.terms)


class Rows(Local):
    """New gradients go along each row of ranks, from the gradient workers in the row.

    The layers' state decides which gradients travel, not a rank's gradients: a missing gradient
    counts as zero. Columns send side by side, and no column waits for another's products.
    """

    def __init__(
        self,
        rounds: Sequence[tuple[torch.device, list[Round]]],
        ranks: Ranks,
        terms: int,
        group_of: Mapping[Layer, Group],
        share_of: ShareOf,
    ) -> None:
        self._rounds, self._ranks, self._terms = rounds, ranks, terms
        items = [x for _, one in rounds for (bucket,) in one for x in bucket.items]
        self._shares_of: dict[int, list[Share]] = {}
        for item in items:
            groups = [group_of[layers[0]] for layers in item.content]
            alike = grouped(groups, lambda group: group.dtype).values()
            self._shares_of[id(item)] = [share_of(same) for same in alike]
        self.shares = [*itertools.chain.from_iterable(self._shares_of.values())]
        self.made = [share for share in self.shares if share.groups[0].applied]

    def exchange(self, make: Make) -> None:
        def cargo(item: CopyItem) -> list[_Wire]:
            maker, dtype = make if item.owner == self._ranks.rank else None, self._ranks.comm_dtype
            shares = self._shares_of[id(item)]
            return [_Wire(share, dtype, self._terms, maker) for share in shares]

        with stage("hand out"):
            for device, rounds in self._rounds:
                items = itertools.chain.from_iterable([bucket.items for (bucket,) in rounds])
                arrived = self._ranks.broadcast(
                    rounds, map(cargo, items), device, "gradients", ahead=True
                )
                for wire in arrived:
                    wire.unpack()


class Chunk(NamedTuple):
    """Sharded layers whose gradients travel together."""

    layers: list[Layer]
    share: Share | None  # of the layers that this rank owns
    whole: Rows_  # the whole parameters of these


class Shards:
    """Each layer's owner gathers its gradient, and returns to every rank its shard of the new one.

    ``rows`` has this rank's parts of the parameters, each a stack of its own.
    """

    def __init__(
        self,
        chunks_of_layers: Sequence[Sequence[Layer]],
        placements: Placements,
        ranks: Ranks,
        terms: int,
        rows: Rows_,
        group_of: Mapping[Layer, Group],
        share_of: ShareOf,
        *,
        measures: bool,
    ) -> None:
        self._placements, self._ranks, self._terms = placements, ranks, terms
        self._rows, self._measures = rows, measures
        self._chunks: list[Chunk] = []
        self.groups: list[Group] = []
        self._sums: dict[Layer, Tensor] = {}  # this rank's part of each layer's, [blocks, 3]
        self._terms_of: dict[Layer, Tensor] = {}
        for layers in chunks_of_layers:
            groups = list({id(group_of[x]): group_of[x] for x in layers}.values())
            self.groups += groups
            own = [group for group in groups if group.applied]
            whole: dict[Tensor, tuple[ParameterStack, int]] = {}
            for group in own:
                self._stack_whole(group, whole)
            share = share_of(own) if own else None
            self._chunks.append(Chunk([*layers], share, whole))

    def _stack_whole(self, group: Group, whole: dict[Tensor, tuple[ParameterStack, int]]) -> None:
        """Make room for the whole parameters of a group that this rank owns."""
        layers = group.layers
        parameters: list[Tensor] = [p for x in layers for p in x.parameters if p in self._rows]
        for (shape, dtype), same in grouped(parameters, lambda p: (p.shape, p.dtype)).items():
            like = torch.empty(shape, dtype=dtype, device=group.device)
            stack = ParameterStack(same, like, -1, mine=True)
            whole.update({p: (stack, row) for row, p in enumerate(same)})
        group.place(group.layers, whole, {})

    def measure(self, tensors: list[Tensor], parameters: list[Tensor], *, squares: bool) -> None:
        """Sum this rank's parts over blocks."""
        for layer in [x for chunk in self._chunks for x in chunk.layers] if self._measures else ():
            key, parts = stack_key(layer, "g"), self._placements.shards(layer)
            sums = torch.zeros(SHARD_SUMS, layer.blocks, dtype=key.dtype, device=key.device)
            blocks = torch.arange(layer.blocks, dtype=key.dtype, device=key.device)
            for p, of_block in self._spread(layer, parts, blocks):
                if p not in self._rows:
                    continue
                stack, _ = self._rows[p]
                own = stack.buffer[0] if tensors else None
                former = None if stack.former is None else stack.former[0]
                rows = (own, squares), (former, False), (sharding.local(p), True)
                for row, (part, is_squared) in zip(sums, rows, strict=True):
                    if part is None or not part.numel():
                        continue
                    part = part.to(key.dtype)
                    part = part.square() if is_squared else part
                    if layer.blocks == 1:
                        row += part.sum()
                    else:
                        row.index_add_(0, of_block.long().flatten(), part.flatten())
            self._sums[layer] = sums.mT.contiguous()
        for stack, _ in self._rows.values():
            stack.former = None

    def exchange(self, make: Make) -> None:
        with stage("hand out"):
            for chunk in self._chunks:
                self._gather(chunk)
                if chunk.share is not None:
                    make(chunk.share)
                    for group, new in zip(chunk.share.groups, chunk.share.directions, strict=True):
                        group.deliver(new)
                    chunk.share.directions = []
                self._scatter(chunk)

    def _gather(self, chunk: Chunk) -> None:
        """Bring what directions are made of to the layers' owners, with the lengths' sums."""
        me, world = self._ranks.rank, range(self._ranks.world)
        outgoing: list[list[Tensor]] = [[] for _ in world]
        incoming: list[list[Tensor]] = [[] for _ in world]
        sums: dict[Layer, Tensor] = {}
        for stack in {id(stack): stack for stack, _ in chunk.whole.values()}.values():
            stack.ahead, stack.buffer = stack.empty(), stack.empty()
        for layer in chunk.layers:
            owner, parts = self._placements.owner(layer, "g"), self._placements.shards(layer)
            both = zip(layer.parameters, parts, strict=True)
            pairs = [(p, shards) for p, shards in both if p in self._rows]
            senders = [r for r in world if any(x.sends(r, owner) for _, x in pairs)]
            own = [self._rows[p][0].ahead[0] for p, shards in pairs if shards.sends(me, owner)]
            outgoing[owner] += own
            for p, shards in pairs if owner == me else ():
                stack, row = chunk.whole[p]
                for rank in [rank for rank in world if shards.sends(rank, me)]:
                    incoming[rank].append(shards.part(stack.ahead[row], rank))
            if self._measures and me in senders:
                outgoing[owner].append(self._sums[layer])
            if self._measures and owner == me:
                sums[layer] = self._sums[layer].new_empty(len(senders), layer.blocks, SHARD_SUMS)
                for rank, row in zip(senders, sums[layer], strict=True):
                    incoming[rank].append(row)
        self._ranks.all_to_all(outgoing, incoming, device_of(chunk.layers[0]), "gradients")
        if sums and chunk.share is not None:
            each = torch.cat([sums[x].sum(0) for x in chunk.share.layers])
            chunk.share.measured, former, chunk.share.squares = each.unbind(1)
            former_parts = zip(chunk.share.groups, former.split(chunk.share.sizes), strict=True)
            for group, part in [x for x in former_parts if "square_sum" in x[0].tensors]:
                group.tensors["square_sum"].add_(part)

    def _scatter(self, chunk: Chunk) -> None:
        """Fill this rank's shards of the new gradients, and the layers' terms."""
        me, world = self._ranks.rank, range(self._ranks.world)
        outgoing: list[list[Tensor]] = [[] for _ in world]
        incoming: list[list[Tensor]] = [[] for _ in world]
        if chunk.share is not None:
            counts = chunk.share.counts
            of_layer = zip(chunk.share.layers, chunk.share.terms.split(counts), strict=True)
            self._terms_of.update(of_layer)
        for layer in chunk.layers:
            owner = self._placements.owner(layer, "g")
            parts = zip(layer.parameters, self._placements.shards(layer), strict=True)
            for p, shards in [(p, shards) for p, shards in parts if p in self._rows]:
                incoming[owner].append(self._rows[p][0].buffer[0])
                for rank in world if owner == me else ():
                    stack, row = chunk.whole[p]
                    outgoing[rank].append(shards.part(stack.buffer[row], rank))
            if not self._terms:
                continue
            if owner == me:
                for rank in world:
                    outgoing[rank].append(self._terms_of[layer])
            key = stack_key(layer, "g")
            room = torch.empty(layer.blocks, self._terms, dtype=key.dtype, device=key.device)
            self._terms_of[layer] = room
            incoming[owner].append(room)
        self._ranks.all_to_all(outgoing, incoming, device_of(chunk.layers[0]), "gradients")
        for stack, _ in chunk.whole.values():
            stack.buffer = stack.ahead = None

    def take_former(self) -> None:
        """Leave the second moments to :meth:`measure`: the owners need those of all ranks."""

    def terms(self) -> list[Tensor]:
        layers = [layer for group in self.groups for layer in group.layers]
        return [torch.cat([self._terms_of[x] for x in layers])] if self._terms else []

    def deliver(self, scales: Iterator[Tensor] | None) -> None:
        """Multiply this rank's shards by ``scales`` of the blocks."""
        layers = [layer for group in self.groups for layer in group.layers]
        if scales is not None and layers:
            parts = next(scales).split([layer.blocks for layer in layers])
            for layer, part in zip(layers, parts, strict=True):
                own = part.to(stack_key(layer, "g").device)
                for p, scale in self._spread(layer, self._placements.shards(layer), own):
                    if p in self._rows:
                        self._rows[p][0].buffer[0].mul_(scale)

    def _spread(
        self, layer: Layer, parts: list[sharding.ShardPlaces], values: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a layer's parameters, each with the blocks' values of this rank's part."""
        if layer.blocks == 1:
            yield from ((p, values) for p in layer.parameters)
            return
        matrix = values[:, None, None].expand(-1, layer.size_of("g")[0], layer.size_of("a")[0])
        whole = zip(layer.matrix_parts(matrix), layer.parameters, parts, strict=True)
        for part, p, shards in whole:
            yield p, shards.part(part.reshape(shards.shape), self._ranks.rank)
