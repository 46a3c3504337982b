"""What a step needs: a rank's groups, and the plan that is compiled from seldom changing facts.

New gradients come to the parameters from shares of groups: made and used on this rank, handed out
along a row of ranks (:class:`Rows`), or brought to owners and back in shards (:class:`Shards`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .comm.ranks import Ranks
from .comm.sharding import is_sharded, local
from .curvature.group import Group, ParameterStack, by_shape, device_of, stack_key, strides
from .curvature.lengths import SHARD_SUMS, Share, are_alike
from .curvature.rules import Rule
from .layers import Layer
from .options import Group as ParamGroup
from .options import Options
from .plan.facts import ShardPlaces, Sizes
from .plan.routes import CopyItem, Round, chunks, gradient_rounds, grouped
from .registry import Placements, Registry
from .stages import stage

Entry = dict[str, Any]
Make = Callable[[Share], None]  # fills the directions and terms of a share
Rows_ = Mapping[Tensor, tuple[ParameterStack, int]]  # each parameter's stack and row
ShareOf = Callable[[Sequence[Group]], Share]

CLIP_TERMS = 2  # numbers of each block that the clip needs
_AT_ONCE = 1 << 25  # numbers of the groups that are stepped together
# A scale of the clip's terms. With a loss of 1e20, gradients are as long, and plain terms would
# overflow float32. A power of two changes no digit of the clip. Products that become zero by the
# scale are far below any clip.
_SCALE = 2.0**-64


class CompiledPlan:
    """The parameters that K-FAC gives new gradients or steps, and how.

    ``rest`` has, for each of the optimizer's groups, the parameters that the base alone steps.
    ``stacks`` are in the order of the plan's parameters.
    """

    def __init__(self, stacks: Sequence[ParameterStack], rest: list[list[Tensor]]) -> None:
        self.stacks, self.rest = list(stacks), rest
        self.parameters = [p for stack in stacks for p in stack.parameters]
        self.has_shards = any([is_sharded(p) for p in self.parameters])
        self.index = {p: i for i, p in enumerate(self.parameters)}
        self.numbers = [stack.number for stack in stacks for _ in stack.parameters]
        start = 0
        for stack in stacks:
            stack.at = slice(start, start + len(stack.parameters))
            start = stack.at.stop
        self.local: list[Share] = []  # made here, and for this rank alone
        self.made: list[Share] = []  # all that are made here of whole parameters
        self.shares: list[Share] = []  # those that are written into the buffers here
        self.rows: Rows | None = None
        self.shards: Shards | None = None
        self.nu: Tensor | None = None  # of the last step's clip
        self.whole: Share | None = None  # all blocks, where a clip goes by all of them
        self.entries: list[Entry] = []  # of the parameters, in the optimizer's state
        self.present: list[bool] | None = None  # which have a gradient in this step; None: all
        self.counts: Tensor | None = None  # of the parameters' steps, if the base counts them
        self.count_rows: Sequence[Tensor] = ()  # as the entries have them
        # Parameters that K-FAC stepped before, and the base is to step from now on.
        self.leaving: list[Tensor] = []
        # Parameters of one kind, which foreach calls take: their group's number, and their places.
        kinds: dict[Any, list[int]] = {}
        for i, (p, number) in enumerate(zip(self.parameters, self.numbers, strict=True)):
            kinds.setdefault((number, p.device, p.dtype, type(p)), []).append(i)
        self.kinds = [(number, places) for (number, *_), places in kinds.items()]

    def take_former(self) -> None:
        """Add the second moments that the base kept to the numbers of the blocks.

        Those of shards are left to their measures: owners need the sums of all ranks.
        """
        stacks = [x for share in self.made for g in share.groups for x, *_ in g.places]
        for stack in stacks:
            stack.former = stack.empty().zero_() if stack.former is None else stack.former
        for share in self.made:
            sums = share.block_sums([], "former", squares=False).split(share.sizes)
            torch._foreach_add_([group.tensors["square_sum"] for group in share.groups], list(sums))
        for stack in stacks:
            stack.former = None

    def clip(self, terms: list[Tensor], limit: float, alphas: list[Any]) -> list[Tensor]:
        """Return the scale ν = min(1, √(κ / |Σ α²⟨v, ∇⟩|)) for the blocks of each of the terms.

        ``alphas`` has the α of each of the optimizer's groups. The host does not wait. The layers'
        terms, rows of :func:`products`, are added up in the layers' order, so that ν has the same
        bits on all ranks.
        """
        assert self.whole is not None
        share = self.whole
        each = torch.cat([x.to(share.like.device) for x in terms]).index_select(0, share.order)
        order = share.ordered
        of_layers = each.split([share.counts[i] for i in order])
        rows = torch.stack([x[0] if len(x) == 1 else x.sum(0) for x in of_layers])
        weights, biases = ([[*alphas, 0.0][i] for i in part] for part in share.numbers)
        if are_alike([*weights, *biases]):
            total: Any = rows.select(1, 0).sum() * _squared(weights[0])
        else:  # a layer's weight, and its bias, the last column, may have an α each
            total = sum(
                (row[0] - row[1]) * _squared(weights[i]) + row[1] * _squared(biases[i])
                for i, row in zip(order, rows, strict=True)
            )
        self.nu = (limit * _SCALE / total.abs()).sqrt_().clamp_(max=1)
        return [self.nu.expand(len(x)) for x in terms]

    def missing(self, present: list[bool]) -> list[tuple[ParameterStack, list[int]]]:
        """Return stacks of momenta with rows whose parameters have no gradient."""
        each = [(stack, present[stack.at]) for stack in self.stacks if stack.mine]
        rows = [(stack, [i for i, x in enumerate(flags) if not x]) for stack, flags in each]
        return [(stack, own) for stack, own in rows if own]


def products(raw: Tensor, new: Tensor) -> Tensor:
    """Return the clip's terms, ``[blocks, 2]``: ⟨new, raw⟩, and ⟨new, raw⟩ of the last column.

    Both are multiplied by :data:`_SCALE`. ``raw`` is overwritten.
    """
    columns = raw.mul_(_SCALE).mul_(new).sum(1)
    return torch.stack([columns.sum(1), columns.select(1, -1)], 1)


def _squared(alpha: Any) -> Any:
    """Return α² as a scalar: only a scalar CPU tensor goes with tensors of other devices."""
    return alpha.reshape(()) ** 2 if isinstance(alpha, Tensor) else alpha**2


class Groups:
    """The groups of all active layers, and the plans that are compiled from them."""

    def __init__(self, registry: Registry, ranks: Ranks, rule: Rule, options: Options) -> None:
        self._registry, self._ranks, self._options = registry, ranks, options
        self._rule, self.sizes = rule, sizes_of(rule, options)
        self.all: list[Group] = []
        self.of: dict[Layer, Group] = {}
        self.places: list[tuple[torch.device, torch.dtype]] = []  # of the layers, when laid out
        self._rounds: list[tuple[torch.device, list[Round]]] = []  # of new gradients to receivers
        self._chunks: list[list[Layer]] = []  # sharded layers whose gradients travel together
        self.plan = CompiledPlan((), [])
        self.compilations = 0
        self.published: dict[Layer, list[int]] = {}  # flags as the optimizer's state has them
        self.facts: Any = None  # that the plan stands for; None: it is compiled anew

    def allocate(self) -> None:
        """Make all groups anew; layers that have an average keep their values."""
        registry, ranks, options, known = self._registry, self._ranks, self._options, self.of
        placements, active = registry.placements, registry.active
        values = {x: dict(known[x].views(x)) for x in registry.with_average if x in known}
        whole = [layer for layer in active if layer not in placements.sharded]
        columns, facts, self._rounds = ranks.grid.columns, placements.facts, []
        lists = by_shape(whole) if columns == 1 else []
        for same in grouped(whole, device_of).values() if columns > 1 else ():
            row, limit = ranks.grid.receivers_of(ranks.rank), ranks.bucket_bytes
            rounds = gradient_rounds(same, facts.__getitem__, self.sizes, row, limit)
            self._rounds.append((same[0].parameters[0].device, rounds))
            lists += [x for (bucket,) in rounds for item in bucket.items for x in item.content]
        sharded = [layer for layer in active if layer in placements.sharded]
        # Each rank has only a part of the bytes of a chunk.
        limit = ranks.bucket_bytes * ranks.world
        parts = chunks(sharded, lambda x: facts[x].gradient * facts[x].itemsize, limit)
        self._chunks = [*parts]
        for chunk in self._chunks:
            owned = grouped(chunk, lambda x: placements.owner(x, "g")).values()
            lists += [same for layers in owned for same in by_shape(layers)]
        self.all = []
        for layers in lists:
            owner = placements.owner(layers[0], "g")
            group = Group(layers, applied=owner % columns == ranks.rank % columns)
            self.all.append(group)
            if group.applied:
                group.allocate(
                    self.sizes,
                    options.factor_dtype,
                    self._rule.dtype,
                    lambda layer, side: placements.owner(layer, side) == ranks.rank,
                    at_identity=options.kaisa_scaling,
                )
        self.published.clear()
        self.of = {layer: group for group in self.all for layer in group.layers}
        self.places = registry.devices
        for layer in values.keys() & self.of.keys():
            for name, view in self.of[layer].views(layer):
                if name in values[layer]:
                    view.copy_(values[layer][name])

    def stepped(self) -> tuple[set[Tensor], set[Tensor]]:
        """Return the parameters that K-FAC steps in the base's place, and those with momenta here.

        All layers of these parameters have a state.
        """
        if not self._rule.makes_directions:
            return set(), set()
        return self._ready(self._registry.with_state)

    def _ready(self, layers: Collection[Layer]) -> tuple[set[Tensor], set[Tensor]]:
        """Return parameters without other layers than these, and those that are collected here.

        The papers' rules take a parameter of several layers for ready when one of them is.
        """
        chosen, sharded = set(layers), self._registry.placements.sharded
        raw: set[Tensor] = set()
        if self._rule.makes_directions:
            raw.update(p for x in self._registry.active if x not in chosen for p in x.parameters)
        ready: set[Tensor] = {p for x in layers for p in x.parameters if p not in raw}
        here = [x for x in layers if x in sharded or self.of[x].applied]
        return ready, {p for x in here for p in x.parameters if p in ready}

    def compile(self, groups: list[ParamGroup], base: Any, *, all_layers: bool = False) -> None:
        """Make the plan of the steps to come, for the layers that have a state."""
        registry, ranks, sharded = self._registry, self._ranks, self._registry.placements.sharded
        layers = dict.fromkeys(registry.active if all_layers else registry.with_state)
        ready, mine = self._ready(layers)
        number_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        # Stacks of parameters that lie alike, in one of the optimizer's groups. A stack of the
        # former plan is used again, so that its tensors stay where they are.
        kinds: dict[Any, dict[Tensor, Tensor]] = {}  # parameters, and this rank's parts
        placed = [p for g in self.all for x in g.layers if x in layers for p in x.parameters]
        for p in [p for p in placed if p in ready and p in number_of]:
            part, apart = (local(p), id(p)) if is_sharded(p) else (p, None)
            layout = part.shape, strides(part), part.dtype, part.device
            kinds.setdefault((layout, number_of[p], p in mine, apart), {})[p] = part
        former, stacks = {x.key: x for x in self.plan.stacks}, []
        for (_, number, keeps, _), parts in kinds.items():
            stack = ParameterStack([*parts], next(iter(parts.values())), number, keeps=keeps)
            stacks.append(former.get(stack.key, stack))
        rows = {p: (stack, i) for stack in stacks for i, p in enumerate(stack.parameters)}
        room: dict[Tensor, int] = {}
        for group in self.all:
            if group.layers[0] not in sharded:
                group.place([x for x in group.layers if x in layers], rows, room)
        for stack in stacks:
            whole = math.prod(stack.shape[1:])
            stack.is_partial = any(room.get(p, 0) < whole for p in stack.parameters)
        rest = [[p for p in group["params"] if p not in rows] for group in groups]
        plan = CompiledPlan(stacks, rest)
        share_of = functools.partial(Share, index=plan.index, number_of=number_of)
        terms, every = self.sizes.terms, list[Group]()
        if self._rounds and layers:
            plan.rows = Rows(self._rounds, ranks, terms, self.of, share_of)
            plan.shares = plan.rows.shares
            plan.made = [share for share in plan.shares if share.groups[0].applied]
        elif ranks.grid.columns == 1:
            placed_groups = [group for group in self.all if group.places]
            size = lambda group: math.prod(group.shape)  # noqa: E731
            for same in grouped(placed_groups, lambda group: group.g.key[2:]).values():
                plan.local += [share_of(part) for part in chunks(same, size, _AT_ONCE)]
            plan.shares = plan.made = plan.local
        every += [group for share in plan.shares for group in share.groups]
        begun = [chunk for chunk in self._chunks if not layers.keys().isdisjoint(chunk)]
        if begun:
            plan.shards = Shards(
                *(begun, registry.placements, ranks, terms, rows, self.of, share_of),
                measures=self._rule.makes_directions,
            )
            every += plan.shards.groups
        plan.whole = share_of(every) if every and terms else None
        for group in self.all:
            group.in_half = self._rule.in_half(group.g.key)
        base.adopt(plan)
        if self._rule.makes_directions:
            plan.leaving = [p for p in base.stepped if p not in plan.index]
            base.stepped.update(plan.parameters)
        if any(stack.former is not None for stack in stacks):
            plan.take_former()
        self.plan = plan
        self.compilations += 1


def sizes_of(rule: Rule, options: Options) -> Sizes:
    """Return what the bytes of this rule depend on under these options."""
    dtypes, clips = (options.factor_dtype, options.comm_dtype), options.kl_clip is not None
    average, wire = (None if dtype is None else dtype.itemsize for dtype in dtypes)
    terms = CLIP_TERMS * (clips and not rule.makes_directions)
    return rule.sizes._replace(average=average, wire=wire, terms=terms)


# ---- new gradients on their way ----


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


class Rows:
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
            groups = [*dict.fromkeys(group_of[x] for x in layers)]
            self.groups += groups
            own = [group for group in groups if group.applied]
            whole: dict[Tensor, tuple[ParameterStack, int]] = {}
            for group in own:  # room for the whole parameters
                parts: list[Tensor] = [p for x in group.layers for p in x.parameters if p in rows]
                for (shape, dtype), same in grouped(parts, lambda p: (p.shape, p.dtype)).items():
                    like = torch.empty(shape, dtype=dtype, device=group.device)
                    stack = ParameterStack(same, like, -1, keeps=True)
                    whole.update({p: (stack, row) for row, p in enumerate(same)})
                group.place(group.layers, whole, {})
            share = share_of(own) if own else None
            self._chunks.append(Chunk([*layers], share, whole))
        self._layers = [layer for group in self.groups for layer in group.layers]

    def measure(self, tensors: list[Tensor], *, squares: bool) -> None:
        """Sum this rank's parts over blocks."""
        for layer in self._layers if self._measures else ():
            key, parts = stack_key(layer, "g"), self._placements.shards(layer)
            sums = torch.zeros(SHARD_SUMS, layer.blocks, dtype=key.dtype, device=key.device)
            blocks = torch.arange(layer.blocks, dtype=key.dtype, device=key.device)
            for p, of_block in self._spread(layer, parts, blocks):
                if p not in self._rows:
                    continue
                stack, _ = self._rows[p]
                own = stack.buffer[0] if tensors else None
                former = None if stack.former is None else stack.former[0]
                rows = (own, squares), (former, False), (local(p), True)
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
                    chunk.share.deliver(None)
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
            terms = chunk.share.terms.split(chunk.share.counts)
            self._terms_of.update(zip(chunk.share.layers, terms, strict=True))
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

    def terms(self) -> list[Tensor]:
        return [torch.cat([self._terms_of[x] for x in self._layers])] if self._terms else []

    def deliver(self, scales: Tensor | None) -> None:
        """Multiply this rank's shards by ``scales`` of the blocks."""
        if scales is not None and self._layers:
            parts = scales.split([layer.blocks for layer in self._layers])
            for layer, part in zip(self._layers, parts, strict=True):
                own = part.to(stack_key(layer, "g").device)
                for p, scale in self._spread(layer, self._placements.shards(layer), own):
                    if p in self._rows:
                        self._rows[p][0].buffer[0].mul_(scale)

    def _spread(
        self, layer: Layer, parts: list[ShardPlaces], values: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a layer's parameters, each with the blocks' values of this rank's part."""
        if layer.blocks == 1:
            yield from ((p, values) for p in layer.parameters)
            return
        matrix = values[:, None, None].expand(-1, layer.size_of("g")[0], layer.size_of("a")[0])
        whole = zip(layer.matrix_parts(matrix), layer.parameters, parts, strict=True)
        for part, p, shards in whole:
            yield p, shards.part(part.reshape(shards.shape), self._ranks.rank)
