"""What a step needs: a rank's groups, and the plan that is compiled from seldom changing facts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .account import Round, gradient_rounds
from .comm.ranks import Ranks
from .comm.sharding import is_sharded, local
from .curvature.group import Group, ParameterStack, by_shape, device_of, stack_key, strides
from .curvature.lengths import SHARD_SUMS, Share, are_alike
from .curvature.rules import Rule
from .layers import Layer
from .model import Registry
from .options import Group as ParamGroup
from .options import Options
from .plan.facts import ShardPlaces, Sizes, chunks, grouped
from .stages import stage

Make = Callable[[Share], None]  # fills the directions and terms of a share
Places = Mapping[Tensor, tuple[ParameterStack, int]]  # each parameter's stack and row
ShareOf = Callable[[Sequence[Group]], Share]

CLIP_TERMS = 2  # numbers of each block that the clip needs
_AT_ONCE = 1 << 25  # numbers of the groups that are stepped together
# A scale of the clip's terms. With a loss of 1e20, plain terms would overflow float32. A power of
# two changes no digit. Products that become zero by the scale are far below any clip.
_SCALE = 2.0**-64


class CompiledPlan:
    """The parameters that K-FAC gives new gradients or steps, and how."""

    def __init__(self, stacks: Sequence[ParameterStack], groups: list[ParamGroup]) -> None:
        self.stacks = list(stacks)  # they hold the parameters, whose ids the facts compare
        self.parameters = [p for stack in stacks for p in stack.parameters]
        self.has_shards = any([is_sharded(p) for p in self.parameters])
        self.index = {p: i for i, p in enumerate(self.parameters)}
        # For each of the optimizer's groups, the parameters that the base alone steps.
        self.uncovered: list[list[Tensor]] = []
        for group in groups:
            self.uncovered.append([p for p in group["params"] if p not in self.index])
        self.numbers = [stack.number for stack in stacks for _ in stack.parameters]
        start = 0
        for stack in stacks:
            stack.at = slice(start, start + len(stack.parameters))
            start = stack.at.stop
        self.made: list[Share] = []  # all that this rank makes of whole parameters
        self.rows: Rows | None = None
        self.shards: Shards | None = None
        self.ends: list[Share | Shards] = []  # what writes new gradients into this rank's buffers
        self.whole: Share | None = None  # all blocks, where a clip goes by all of them
        self.nu: Tensor | None = None  # of the last step's clip
        self.entries: list[dict[str, Any]] = []  # of the parameters, in the optimizer's state
        self.present: list[bool] | None = None  # which have a gradient in this step; None: all
        self.counts: Tensor | None = None  # of the parameters' steps, if the base counts them
        self.steps: list[Tensor] = []  # the counts of the entries: facts go by ids, so hold them
        # Parameters that K-FAC stepped before, and the base is to step from now on.
        self.leaving: list[Tensor] = []
        # Parameters of one kind, which foreach calls take: their group's number, and their places.
        kinds: dict[Any, list[int]] = {}
        for i, (p, number) in enumerate(zip(self.parameters, self.numbers, strict=True)):
            kinds.setdefault((number, p.device, p.dtype, type(p)), []).append(i)
        self.kinds = [(number, places) for (number, *_), places in kinds.items()]

    def clip(self, terms: list[Tensor], limit: float, alphas: list[Any]) -> list[Tensor]:
        """Return the scale ν = min(1, √(κ / |Σ α²⟨v, ∇⟩|)) for the blocks of each of the terms."""
        assert self.whole is not None
        share = self.whole
        # Every rank adds the layers' terms up in the layers' order. In the order of arrival, ν
        # would have other bits on each rank, and weights would drift apart.
        each = torch.cat([x.to(share.like.device) for x in terms]).index_select(0, share.order)
        order = share.ordered
        of_layers = each.split([share.counts[i] for i in order])
        rows = torch.stack([x[0] if len(x) == 1 else x.sum(0) for x in of_layers])
        # The last is of a parameter without a place. Only scalars on the CPU go with all devices.
        squares = [x.reshape(()) ** 2 if isinstance(x, Tensor) else x**2 for x in (*alphas, 0.0)]
        weights, biases = share.numbers
        if are_alike([squares[i] for i in (*weights, *biases)]):
            total: Any = rows.select(1, 0).sum() * squares[weights[0]]
        else:  # a layer's weight, and its bias, the last column, may have an α each
            total = sum(
                (row[0] - row[1]) * squares[weights[i]] + row[1] * squares[biases[i]]
                for i, row in zip(order, rows, strict=True)
            )
        # On the device: a comparison on the host would wait for all products of the step.
        self.nu = (limit * _SCALE / total.abs()).sqrt_().clamp_(max=1)
        return [self.nu.expand(len(x)) for x in terms]


def products(raw: Tensor, new: Tensor) -> Tensor:
    """Return ⟨new, raw⟩, and its last column's part, ``[blocks, 2]``; ``raw`` is overwritten."""
    columns = raw.mul_(_SCALE).mul_(new).sum(1)
    return torch.stack([columns.sum(1), columns.select(1, -1)], 1)


def sizes_of(rule: Rule, options: Options) -> Sizes:
    """Return what the bytes of this rule depend on under these options."""
    dtypes, clips = (options.factor_dtype, options.comm_dtype), options.kl_clip is not None
    average, wire = (None if dtype is None else dtype.itemsize for dtype in dtypes)
    terms = CLIP_TERMS * (clips and not rule.makes_directions)
    return rule.sizes._replace(average=average, wire=wire, terms=terms)


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
        self.facts: Any = None  # that the plan stands for; None: it is compiled anew

    def allocate(self) -> None:
        """Make all groups anew; layers that have an average keep their values."""
        registry, ranks, options, known = self._registry, self._ranks, self._options, self.of
        sharded = registry.sharded
        values = {x: dict(known[x].views(x)) for x in registry.with_average if x in known}
        whole = [layer for layer in registry.active if layer not in sharded]
        columns, facts, self._rounds = ranks.grid.columns, registry.facts, []
        lists = by_shape(whole) if columns == 1 else []
        for same in grouped(whole, device_of).values() if columns > 1 else ():
            grid, limit = ranks.grid, ranks.bucket_bytes
            rounds = gradient_rounds(same, facts.__getitem__, self.sizes, grid, ranks.rank, limit)
            self._rounds.append((device_of(same[0]), rounds))
            lists += [x for (bucket,) in rounds for item in bucket.items for x in item.content]
        # Each rank has only a part of the bytes of a chunk.
        in_shards = [x for x in registry.active if x in sharded]
        limit = ranks.bucket_bytes * ranks.world
        self._chunks = [*chunks(in_shards, lambda x: facts[x].gradient * facts[x].itemsize, limit)]
        for chunk in self._chunks:
            for owned in grouped(chunk, lambda x: registry.owner(x, "g")).values():
                lists += by_shape(owned)
        self.all = []
        for layers in lists:
            owner = registry.owner(layers[0], "g")
            group = Group(layers, applied=owner % columns == ranks.rank % columns)
            self.all.append(group)
            if group.applied:
                group.allocate(
                    self.sizes,
                    options.factor_dtype,
                    self._rule.dtype,
                    lambda layer, side: registry.owner(layer, side) == ranks.rank,
                    at_identity=options.kaisa_scaling,
                )
        self.of = {layer: group for group in self.all for layer in group.layers}
        self.places = registry.devices
        for layer in values.keys() & self.of.keys():
            for name, view in self.of[layer].views(layer):
                if name in values[layer]:
                    view.copy_(values[layer][name])

    def stepped(self) -> tuple[set[Tensor], set[Tensor]]:
        """Return parameters that K-FAC steps in the base's place, and those with momenta here."""
        if not self._rule.makes_directions:
            return set(), set()
        ready, collected = self._ready(self._registry.with_state)
        for layer in self._registry.with_state:  # a frozen part of a layer rests, with its momentum
            resting = set(layer.trainable).difference(layer.parameters)
            ready |= resting
            collected |= resting if layer.parameters[0] in collected else set()
        return ready, collected

    def _ready(self, layers: Collection[Layer]) -> tuple[set[Tensor], set[Tensor]]:
        # Return parameters without other layers than these, and those that this rank collects.
        chosen, sharded = set(layers), self._registry.sharded
        raw: set[Tensor] = set()
        if self._rule.makes_directions:  # the papers' rules make do with one of several layers
            raw.update(p for x in self._registry.active if x not in chosen for p in x.parameters)
        ready: set[Tensor] = {p for x in layers for p in x.parameters if p not in raw}
        collected = [x for x in layers if x in sharded or self.of[x].applied]
        return ready, {p for x in collected for p in x.parameters if p in ready}

    def compile(self, groups: list[ParamGroup], base: Any, *, all_layers: bool = False) -> None:
        """Make the plan of the steps to come, for the layers that have a state."""
        registry, ranks = self._registry, self._ranks
        layers = dict.fromkeys(registry.active if all_layers else registry.with_state)
        number_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        # From here to the end, only facts that all ranks have agreed on may decide what travels.
        ready, collected = self._ready(layers)
        kinds: dict[Any, dict[Tensor, Tensor]] = {}  # parameters that lie alike, and their parts
        placed = [p for g in self.all for x in g.layers if x in layers for p in x.parameters]
        for p in [p for p in placed if p in ready and p in number_of]:
            # A sharded parameter has a stack of its own: ranks' parts differ in size.
            part, alone = (local(p), id(p)) if is_sharded(p) else (p, None)
            layout = part.shape, strides(part), part.dtype, part.device
            kinds.setdefault((number_of[p], p in collected, layout, alone), {})[p] = part
        # A stack of the former plan is used again, so that its tensors stay where they are.
        former, stacks = {x.key: x for x in self.plan.stacks}, []
        for (number, keeps, *_), parts_of in kinds.items():
            like = next(iter(parts_of.values()))
            stack = ParameterStack([*parts_of], like, number, keeps=keeps)
            stacks.append(former.get(stack.key, stack))
        rows = {p: (stack, i) for stack in stacks for i, p in enumerate(stack.parameters)}
        room: dict[Tensor, int] = {}
        for group in self.all:
            if group.layers[0] not in registry.sharded:
                group.place([x for x in group.layers if x in layers], rows, room)
            group.in_half = self._rule.in_half(group.g.key)
        for stack in stacks:
            whole = math.prod(stack.shape[1:])
            stack.is_partial = any(room.get(p, 0) < whole for p in stack.parameters)
        plan = CompiledPlan(stacks, groups)
        share_of = functools.partial(Share, index=plan.index, number_of=number_of)
        terms = self.sizes.terms
        if self._rounds and layers:
            plan.rows = Rows(ranks, self._rounds, terms, self.of, share_of)
            plan.made = [share for share in plan.rows.shares if share.groups[0].applied]
        elif ranks.grid.columns == 1:
            made = [group for group in self.all if group.places]
            for same in grouped(made, lambda group: group.g.key[2:]).values():
                parts = chunks(same, lambda group: math.prod(group.shape), _AT_ONCE)
                plan.made += [share_of(part) for part in parts]
        shares = plan.made if plan.rows is None else plan.rows.shares
        every, plan.ends = [group for share in shares for group in share.groups], [*shares]
        for chunk in self._chunks:
            if not layers.keys().isdisjoint(chunk):
                if plan.shards is None:
                    measures = self._rule.makes_directions
                    plan.shards = Shards(ranks, registry, terms, rows, measures=measures)
                    plan.ends.append(plan.shards)
                every += plan.shards.add(chunk, self.of, share_of)
        plan.whole = share_of(every) if every and terms else None
        base.adopt(plan)  # before ``former`` is read, which it takes from the entries
        if self._rule.makes_directions:
            plan.leaving = [p for p in base.stepped if p not in plan.index]
            base.stepped.update(plan.parameters)
        # Second moments of the base become numbers of blocks; those of shards need all ranks' sums.
        if any(stack.former is not None for stack in stacks):
            used = [x for share in plan.made for group in share.groups for x, *_ in group.places]
            for stack in used:
                stack.former = stack.empty().zero_() if stack.former is None else stack.former
            for share in plan.made:
                sums = share.block_sums([], "former", squares=False).split(share.sizes)
                torch._foreach_add_([x.tensors["square_sum"] for x in share.groups], list(sums))
            for stack in used:
                stack.former = None
        self.plan = plan
        self.compilations += 1


class Packet(NamedTuple):
    """Tensors on their way, alike on all members: their owner sends them, the others fill them."""

    place: Any  # what they belong to: a share, or a factor's side and slots
    tensors: list[Tensor]


class Rows:
    """New gradients go along each row of ranks, from the gradient workers in the row."""

    def __init__(
        self,
        ranks: Ranks,
        rounds_of: list[tuple[torch.device, list[Round]]],
        terms: int,
        group_of: Mapping[Layer, Group],
        share_of: ShareOf,
    ) -> None:
        self._ranks, self._terms = ranks, terms
        self.shares: list[Share] = []
        # Rounds on a device, and the shares of each of their items with the rank that sends them.
        # The layers' state decides which gradients travel, and never a rank's own gradients: the
        # other ranks would wait. A missing gradient counts as zero.
        self._ways: list[tuple[torch.device, list[Round], list[tuple[int, list[Share]]]]] = []
        for device, rounds in rounds_of:
            items = []
            for item in [item for (bucket,) in rounds for item in bucket.items]:
                groups = grouped([group_of[x[0]] for x in item.content], lambda group: group.dtype)
                items.append((item.owner, [share_of(same) for same in groups.values()]))
                self.shares += items[-1][1]
            self._ways.append((device, rounds, items))

    def exchange(self, make: Make) -> None:
        """Make the shares of this rank, and receive the others."""
        with stage("hand out"):
            for device, rounds, items in self._ways:
                # A generator: products of a bucket run while earlier buckets are on their way.
                packets = (self._packed(owner, shares, make) for owner, shares in items)
                for share, tensors in self._ranks.broadcast(
                    rounds, packets, device, "gradients", ahead=True
                ):
                    count = len(share.groups)
                    share.directions = [x.to(share.like.dtype) for x in tensors[:count]]
                    if self._terms:
                        share.terms = torch.cat(tensors[count:])

    def _packed(self, owner: int, shares: list[Share], make: Make) -> list[Packet]:
        packets, wire = [], self._ranks.comm_dtype
        for share in shares:
            if owner == self._ranks.rank:
                make(share)
                # The sender goes on with the rounded directions, too: with others, its weights
                # would drift apart from the receivers' weights.
                new = [x.to(wire or x.dtype) for x in share.directions]
            else:
                like, shapes = share.like, [group.shape for group in share.groups]
                new = [share.roots.new_empty(x, dtype=wire or like.dtype) for x in shapes]
                share.terms = share.roots.new_empty(sum(share.sizes), self._terms)
            # Each group's terms are a tensor on the wire, as the account counts their bytes.
            terms = share.terms.split(share.sizes) if self._terms else ()
            packets.append(Packet(share, [*new, *terms]))
        return packets


class Shards:
    """Layers' owners gather gradients, and return to every rank its shards of the new ones."""

    # ``rows`` has this rank's parts of the parameters, each a stack of its own. Where a length
    # ``measures`` momenta, owners receive sums over each block from all ranks.
    def __init__(
        self, ranks: Ranks, registry: Registry, terms: int, rows: Places, *, measures: bool
    ) -> None:
        self._ranks, self._registry, self._terms = ranks, registry, terms
        self._rows, self._measures = rows, measures
        # Layers that travel together, the share of those that this rank owns, and whole parameters.
        self._chunks: list[tuple[list[Layer], Share | None, Places]] = []
        self._layers: list[Layer] = []
        # Numbers of each block: this rank's sums, for the owners; the clip's terms, for all ranks.
        self._sums: dict[Layer, Tensor] = {}
        self._terms_of: dict[Layer, Tensor] = {}

    def add(
        self, layers: list[Layer], group_of: Mapping[Layer, Group], share_of: ShareOf
    ) -> list[Group]:
        groups = [*dict.fromkeys(group_of[x] for x in layers)]
        owned = [group for group in groups if group.applied]
        whole: dict[Tensor, tuple[ParameterStack, int]] = {}
        for group in owned:  # room for the whole parameters
            parts: list[Tensor] = [p for x in group.layers for p in x.parameters if p in self._rows]
            for (shape, dtype), same in grouped(parts, lambda p: (p.shape, p.dtype)).items():
                like = torch.empty(shape, dtype=dtype, device=group.device)
                stack = ParameterStack(same, like, -1, keeps=True)
                whole |= {p: (stack, row) for row, p in enumerate(same)}
            group.place(group.layers, whole, {})
        self._chunks.append((layers, share_of(owned) if owned else None, whole))
        self._layers += [layer for group in groups for layer in group.layers]
        return groups

    def measure(self, tensors: list[Tensor], *, squares: bool) -> None:
        for layer in self._layers if self._measures else ():
            key = stack_key(layer, "g")
            sums = torch.zeros(SHARD_SUMS, layer.blocks, dtype=key.dtype, device=key.device)
            blocks = torch.arange(layer.blocks, dtype=key.dtype, device=key.device)
            for p, of_block in self._spread(layer, blocks):
                stack, _ = self._rows[p]
                measured = stack.buffer[0] if tensors else None
                former = None if stack.former is None else stack.former[0]
                terms = (measured, squares), (former, False), (local(p), True)
                for row, (part, is_squared) in zip(sums, terms, strict=True):
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
        """Bring momenta or gradients to owners, and new gradients back, chunk by chunk."""
        with stage("hand out"):
            for layers, share, whole in self._chunks:
                stacks = {stack for stack, _ in whole.values()}
                for stack in stacks:
                    stack.ahead, stack.buffer = stack.empty(), stack.empty()
                self._travel(layers, share, whole, "ahead")
                if share is not None:
                    make(share)
                    share.deliver(None)
                    terms = share.terms.split(share.counts)
                    self._terms_of.update(zip(share.layers, terms, strict=True))
                self._travel(layers, share, whole, "buffer")
                for stack in stacks:
                    stack.buffer = stack.ahead = None

    def _travel(self, layers: list[Layer], share: Share | None, whole: Places, name: str) -> None:
        # Bring this rank's parts "ahead" to the layers' owners, or fill its parts of "buffer". Sums
        # over blocks go with the first, and the clip's terms with the second.
        me, world, returns = self._ranks.rank, range(self._ranks.world), name == "buffer"
        at_owners: list[list[Tensor]] = [[] for _ in world]  # this rank's tensors, by owner
        at_ranks: list[list[Tensor]] = [[] for _ in world]  # the owner's tensors, by rank
        sums: dict[Layer, Tensor] = {}
        # Both ends must list their tensors in one order: the bytes have no names.
        for layer in layers:
            owner, members = self._registry.owner(layer, "g"), set[int]()
            for p, shards in self._parts(layer):
                for rank in world if owner == me else (me,):
                    if not (returns or shards.sends(rank, owner)):
                        continue
                    members.add(rank)
                    if rank == me:
                        at_owners[owner].append(getattr(self._rows[p][0], name)[0])
                    if owner == me:
                        stack, row = whole[p]
                        at_ranks[rank].append(shards.part(getattr(stack, name)[row], rank))
            if returns and self._terms:
                if owner == me:
                    for rank in world:
                        at_ranks[rank].append(self._terms_of[layer])
                shape, key = (layer.blocks, self._terms), stack_key(layer, "g")
                self._terms_of[layer] = torch.empty(shape, dtype=key.dtype, device=key.device)
                at_owners[owner].append(self._terms_of[layer])
            elif self._measures and not returns:
                if me in members:
                    at_owners[owner].append(self._sums[layer])
                if owner == me:
                    shape = len(members), *self._sums[layer].shape
                    sums[layer] = self._sums[layer].new_empty(shape)
                    for rank, room in zip(sorted(members), sums[layer], strict=True):
                        at_ranks[rank].append(room)
        outgoing, incoming = (at_ranks, at_owners) if returns else (at_owners, at_ranks)
        self._ranks.all_to_all(outgoing, incoming, device_of(layers[0]), "gradients")
        if sums and share is not None:
            each = torch.cat([sums[x].sum(0) for x in share.layers])
            share.measured, former, share.squares = each.unbind(1)
            for group, part in zip(share.groups, former.split(share.sizes), strict=True):
                if "square_sum" in group.tensors:
                    group.tensors["square_sum"].add_(part)

    @property
    def terms(self) -> Tensor:
        """The clip's terms of all blocks, ``[blocks, 2]``."""
        return torch.cat([self._terms_of[x] for x in self._layers])

    def deliver(self, scales: Tensor | None) -> None:
        """Multiply this rank's shards by ``scales`` of the blocks."""
        parts = () if scales is None else scales.split([layer.blocks for layer in self._layers])
        for layer, part in zip(self._layers, parts, strict=False):
            for p, scale in self._spread(layer, part.to(device_of(layer))):
                self._rows[p][0].buffer[0].mul_(scale)

    def _parts(self, layer: Layer) -> list[tuple[Tensor, ShardPlaces]]:
        pairs = zip(layer.parameters, self._registry.shards(layer), strict=True)
        return [(p, shards) for p, shards in pairs if p in self._rows]

    def _spread(self, layer: Layer, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        # Yield a layer's parameters, each with the blocks' values of this rank's part.
        if layer.blocks == 1:
            yield from [(p, values) for p, _ in self._parts(layer)]
            return
        matrix = values[:, None, None].expand(-1, layer.size_of("g")[0], layer.size_of("a")[0])
        parts = zip(layer.parameters, layer.matrix_parts(matrix), strict=True)
        whole_of: dict[Any, Tensor] = dict(parts)
        for p, shards in self._parts(layer):
            yield p, shards.part(whole_of[p].reshape(shards.shape), self._ranks.rank)
