"""The exchanges of a step: sums to owners, state to gradient workers, gradients to receivers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..comm import sharding
from ..comm.ranks import Ranks
from ..curvature.lengths import Blocks, BlockSums, Kept, Length, OfBase, Stepped, peaks_of
from ..curvature.rules import Rule, StepValues
from ..curvature.stacks import (
    AppliedFactors,
    Factor,
    Factors,
    Key,
    LayerGroup,
    Slots,
    alike,
    at,
    by_device,
    device_of,
    per_block,
    stack_key,
)
from ..curvature.sums import FactorSums
from ..layers import Layer
from ..linalg.moments import unpack
from ..plan.facts import FactorFacts
from ..plan.moves import Sizes, gradient_rounds, state_rounds, sum_buckets
from ..plan.routes import Bucket, Round, chunks, grouped
from ..plan.step_plan import AgreedStep
from ..stages import stage
from . import gradients
from .gradients import (
    GradientStack,
    NewGradients,
    Places,
    Updates,
    Wire,
    own_gradient,
    with_gradient,
)
from .registry import Registry

# Takes stacks, and a reader of their gradients.
Precondition = Callable[..., list[NewGradients]]
_AT_ONCE = 1 << 25  # numbers of the stacks that are stepped together


class _PackedState(NamedTuple):
    """One factor's state as it travels."""

    factor: Factor
    tensors: list[Tensor]


class BaseSide(Protocol):
    """The base optimizer, as steps along directions need it."""

    def follow(self, ready: Collection[Tensor], mine: Collection[Tensor]) -> OfBase:
        """Take gradients into the momenta of ``mine``; K-FAC steps all of ``ready``."""

    def open(self, ready: Collection[Tensor], mine: Collection[Tensor]) -> None:
        """Make entries, and momenta of ``mine``, without a step."""


class Exchange:
    """Brings sums to owners and state to gradient workers, and new gradients to receivers."""

    def __init__(self, ranks: Ranks, registry: Registry, rule: Rule, sizes: Sizes) -> None:
        self._ranks = ranks
        self._registry, self._placements = registry, registry.placements
        self._rule = rule
        self._sizes = sizes
        # Numbers of the last step; the clip is on its device.
        self.clip: Tensor | None = None  # ν
        self.damping_of: Callable[[Layer], float] | None = None
        self.allocate(AppliedFactors())

    def allocate(self, applied: AppliedFactors) -> None:
        self._applied = applied
        self._places: dict[Layer, Places] = {}
        self._stacks: dict[Layer, GradientStack] = {}  # the last step's stacks, by first layer
        # The rounds of the layers on one device, by the first of these layers.
        self._rounds: dict[Layer, tuple[list[Layer], list[Round]]] = {}
        # The last step's, by first layer and count: all layers begin as the first of their parts.
        self._blocks: dict[tuple[Layer, int], Blocks] = {}
        self._together: dict[tuple[Layer, int], tuple[list[GradientStack], list[Together]]] = {}
        # The layers with a gradient in the last step, and their stacks.
        self._ready: tuple[list[Layer], list[GradientStack]] = [], []

    # ---- sums ----

    def sums(
        self, sums: FactorSums, layers: Sequence[Layer], agreed: AgreedStep
    ) -> Iterator[dict[Key, Tensor]]:
        """Yield new values of the factors that this rank owns, as they arrive."""
        ranks, registry = self._ranks, self._registry
        tied = [layer for layer in layers if layer.name in agreed.crossed]
        leveled = tied if ranks.world == 1 else layers
        if sums.units and leveled:
            largest = functools.partial(ranks.reduce_on_device, kind="factors", op="MAX")
            sums.level(leveled, largest)
        sums.mix(tied, agreed, functools.partial(ranks.reduce_on_device, kind="factors"))
        if ranks.world == 1:
            keys = [(layer, side) for layer in layers for side in "ag"]
            yield dict(zip(keys, sums.take(keys, agreed), strict=True))
            return
        facts = [self._placements.facts[layer] for layer in layers]
        wire = None if ranks.comm_dtype is None else ranks.comm_dtype.itemsize
        buckets = sum_buckets(facts, wire, ranks.world, ranks.bucket_bytes)

        def terms(bucket: Bucket[FactorFacts]) -> list[Tensor]:
            keys = [(registry.layers[factor.layer.name], factor.side) for factor in bucket.items]
            return [term.flatten() for term in sums.take(keys, agreed)]

        loads = ((bucket, terms(bucket)) for bucket in buckets)
        for arrived in ranks.reduce_to_owners(loads, "factors"):
            values = {}
            for factor, total in arrived:
                layer = registry.layers[factor.layer.name]
                key = stack_key(layer, factor.side)
                total = total.unflatten(0, (layer.blocks, -1))
                values[layer, factor.side] = total if key.diagonal else unpack(total, key.size)
            yield values

    def damping_shifts(
        self, owned: Factors, layers: Sequence[Layer], damping_of: Callable[[Layer], float]
    ) -> dict[Key, Tensor]:
        """Return the damping of each factor's diagonal, on all ranks."""
        means = self._rule.means(owned, layers)
        if self._placements.splits_owners:  # each owner needs the other owner's mean
            means = [self._ranks.reduce_on_device(both, "second_order") for both in means]
        return self._rule.shifts(layers, damping_of, means)

    # ---- state ----

    def share_state(self, layers: list[Layer], damping_of: Callable[[Layer], float]) -> None:
        """Bring the owners' new state of these layers to all gradient workers."""
        with stage("share"):
            if self._ranks.grid.workers > 1:
                for same in by_device(layers):
                    self._broadcast_state(same)
            self._rule.renew(self._applied, layers, damping_of)

    def _broadcast_state(self, same: list[Layer]) -> None:
        """Broadcast the state of layers on one device along their columns."""
        ranks, rule, layers = self._ranks, self._rule, self._registry.layers
        facts = self._placements.facts
        renewed = [factor for layer in same for factor in facts[layer].factors]
        rounds = state_rounds(renewed, self._sizes, ranks.grid, ranks.bucket_bytes)
        contents = [
            item.content
            for bucket in itertools.chain(*rounds)
            if ranks.rank in bucket.sizes
            for item in bucket.items
        ]
        # Generators, so that a packed triangle lives only until it has arrived.
        by_key = self._applied.by_key
        factors = ([by_key[layers[f.layer.name], f.side] for f in x] for x in contents)
        cargo = ([_PackedState(f, rule.outgoing(f)) for f in each] for each in factors)
        for packed in ranks.broadcast(rounds, cargo, device_of(same[0]), "second_order"):
            rule.incoming(packed.factor, packed.tensors)

    # ---- gradients ----

    def updates(self, values: StepValues) -> Updates:
        """Return the new gradients of all layers with a state; all ranks call it alike."""
        updates = Updates()
        self.clip, self.damping_of = None, values.damping_of
        precondition = functools.partial(self._precondition, values)
        whole = [x for x in self._registry.with_state if x not in self._placements.sharded]
        if self._ranks.grid.columns == 1:
            ready = [*itertools.compress(whole, with_gradient(whole))]
            if ready != self._ready[0]:
                chosen = set(ready)
                members = [[x for x in g.layers if x in chosen] for g in self._applied.groups]
                self._ready = ready, [self.stack_of(some) for some in members if some]
            updates.stacks = precondition(self._ready[1])
        else:
            with stage("hand out"):
                self._broadcast(whole, updates, precondition)
        if self._placements.sharded:
            with stage("hand out"):
                self._precondition_shards(updates, precondition, values.base)
        return updates

    def directions(self, base: BaseSide, values: StepValues) -> dict[Tensor, Tensor]:
        """Return the directions of the parameters whose layers all have a state."""
        ready, mine = self.stepped()
        of_base = base.follow(ready, mine)
        updates = self.updates(replace(values, base=of_base))
        length = self._rule.length
        assert length is not None
        layers, terms = updates.all_terms() if length.terms else ([], torch.empty(0))
        if layers:  # give all directions a length that goes by all of them
            key = layers[0], len(layers)
            if key not in self._blocks or self._blocks[key].layers != layers:
                self._blocks[key] = Blocks(layers)
            with stage("length"):
                scales = length.finish(terms, self._blocks[key], of_base)
                assert scales is not None
                updates.scale(scales, self.shards_of)
        new = updates.by_parameter(self._registry.in_parts)
        return {p: direction for p, direction in new.items() if p in ready}

    def stepped(self, *, all_layers: bool = False) -> tuple[set[Tensor], set[Tensor]]:
        """Return the parameters that K-FAC steps in the base's place, and those with momenta here.

        All layers of these parameters have a state; ``all_layers`` takes all for ready.
        """
        registry, applied = self._registry, self._applied.group_of
        if not self._rule.makes_directions:
            return set(), set()
        layers = registry.active if all_layers else registry.with_state
        chosen, sharded = set(layers), registry.placements.sharded
        raw = {p for x in registry.active if x not in chosen for p in x.parameters}
        ready: set[Tensor] = {p for x in layers for p in x.parameters if p not in raw}
        here = [x for x in layers if x in applied or x in sharded]
        return ready, {p for x in here for p in x.parameters if p in ready}

    def stack_of(self, layers: list[Layer]) -> GradientStack:
        """Return the stack of these layers of one shape."""
        found = self._stacks.get(layers[0])
        if found is None or found.layers != layers:
            for layer in layers:
                if layer not in self._places:
                    self._places[layer] = Places.of(layer)
            found = self._stacks[layers[0]] = GradientStack(layers, self._places)
        return found

    def _precondition(
        self,
        values: StepValues,
        stacks: list[GradientStack],
        gathered: FromShards | None = None,
    ) -> list[NewGradients]:
        """Return the new gradients of stacks; sharded ones were ``gathered``."""
        base, found = values.base, []
        with stage("precondition"):
            if base is None:
                return [self._preconditioned(values, stack, gathered) for stack in stacks]
            for some in self._divided(stacks):
                found += self._directed(values, base, some, gathered)
        return found

    def _divided(self, stacks: list[GradientStack]) -> list[Together]:
        """Return the stacks that are stepped together; worked out once."""
        key = (stacks[0].layers[0], len(stacks)) if stacks else None
        known = None if key is None else self._together.get(key)
        if key is None or (known is not None and known[0] == stacks):
            return [] if known is None else known[1]
        parts: list[Together] = []
        for same in grouped(stacks, lambda stack: (stack.device, stack.dtype)).values():
            for some in chunks(same, lambda stack: stack.shape.numel(), _AT_ONCE):
                groups = [self._applied.group_of[stack.layers[0]] for stack in some]
                slots = [group.slots_of(x.layers) for group, x in zip(groups, some, strict=True)]
                blocks = Blocks([x for stack in some for x in stack.layers])
                sizes = [stack.shape[0] for stack in some]
                parts.append(Together(some, blocks, groups, slots, sizes))
        self._together[key] = stacks, parts
        return parts

    def _preconditioned(
        self, values: StepValues, stack: GradientStack, gathered: FromShards | None
    ) -> NewGradients:
        group = self._applied.group_of[stack.layers[0]]
        raw = stack.collect(own_gradient if gathered is None else gathered.whole.get)
        new = self._rule.apply(group, raw, stack.layers, values)
        terms = gradients.products(raw, new) if self._sizes.terms else raw.new_empty(len(raw), 0)
        return NewGradients(stack, new, terms)

    def _directed(
        self,
        values: StepValues,
        base: OfBase,
        together: Together,
        gathered: FromShards | None,
    ) -> list[NewGradients]:
        """Return the directions of stacks on one device, each block with its length."""
        stacks, blocks, groups, slots, sizes = together
        rule, length = self._rule, self._rule.length
        assert length is not None
        momentum_of = base.momenta.get if gathered is None else gathered.whole.get
        momenta = [stack.collect(momentum_of) for stack in stacks]
        # Squares of tiny and of huge numbers would be zero or infinite.
        peaks = peaks_of(momenta)
        torch._foreach_div_(momenta, list(peaks[:, None, None].split(sizes)))
        with rule.precision(blocks.like.device):
            directions = [
                rule.apply(group, momentum, stack.layers, values)
                for group, momentum, stack in zip(groups, momenta, stacks, strict=True)
            ]
        with stage("length"):
            if gathered is None:
                sums = _sums(stacks, base, length)
            else:
                sums = BlockSums(*torch.cat([gathered.sums[x] for x in blocks.layers]).unbind(1))
            kept, present = _kept(groups, slots, sizes), _present(blocks, base)
            one = Stepped(blocks, directions, momenta, peaks, sums, kept, present)
            terms = length.give(one, base)
        return list(map(NewGradients, stacks, directions, terms.split(sizes)))

    def _broadcast(self, layers: list[Layer], updates: Updates, precondition: Precondition) -> None:
        """Send new gradients along each row of ranks, from the gradient workers in the row.

        The layers' state decides which gradients travel, not a rank's gradients: a missing gradient
        counts as zero. Columns send side by side, and no column waits for another's products.
        """
        for same in by_device(layers):
            rounds = self._rounds_of(same)
            copies = itertools.chain.from_iterable([bucket.items for (bucket,) in rounds])
            cargo = (self._wires(x.owner, x.content, precondition) for x in copies)
            arrived = self._ranks.broadcast(
                rounds, cargo, device_of(same[0]), "gradients", ahead=True
            )
            updates.stacks += [one.unpack() for one in arrived]

    def _rounds_of(self, layers: list[Layer]) -> list[Round]:
        """Return the rounds of layers on one device; worked out once."""
        known = self._rounds.get(layers[0])
        if known is None or known[0] != layers:
            ranks, facts = self._ranks, self._placements.facts
            row = ranks.grid.receivers_of(ranks.rank)
            rounds = gradient_rounds(
                layers, facts.__getitem__, self._sizes, row, ranks.bucket_bytes
            )
            known = self._rounds[layers[0]] = layers, rounds
        return known[1]

    def _wires(
        self, root: int, shapes: list[list[Layer]], precondition: Precondition
    ) -> list[Wire]:
        """Return the new gradients that a root sends; on other ranks, empty tensors for them."""
        stacks = [self.stack_of(layers) for layers in shapes]
        if root == self._ranks.rank:
            new = precondition(stacks)
        else:
            new = [NewGradients.awaited(stack, self._sizes.terms) for stack in stacks]
        return [Wire(one, self._ranks.comm_dtype) for one in new]

    # ---- sharded gradients ----

    def _precondition_shards(
        self, updates: Updates, precondition: Precondition, base: OfBase | None
    ) -> None:
        """Precondition sharded gradients, or momenta.

        A layer's owner gathers its gradient, preconditions it, and returns to every rank its shard.
        """
        ready = set(self._registry.with_state)
        layers = [layer for layer in self._placements.sharded if layer in ready]
        # Each rank has only a part of the bytes of a chunk.
        limit = self._ranks.bucket_bytes * self._ranks.world
        facts = self._placements.facts
        for chunk in chunks(layers, lambda x: facts[x].gradient * facts[x].itemsize, limit):
            gathered = self._gather(chunk, base)
            new: dict[Tensor, Tensor] = {}
            terms: dict[Layer, Tensor] = {}
            mine = (x for x in chunk if self._placements.owner(x, "g") == self._ranks.rank)
            for one in precondition([self.stack_of(same) for same in alike(mine)], gathered):
                new |= gradients.unstack([one], frozenset(), gathered.whole.get)
                terms |= one.terms_of()
            updates.shards |= self._scatter(chunk, new, terms)
            updates.terms |= terms

    def _gather(self, layers: list[Layer], base: OfBase | None) -> FromShards:
        """Return the whole gradients, or momenta, of the layers that this rank owns.

        A missing one is zero. With a ``base``, each rank sends its part of the lengths' sums along.
        """
        me, world = self._ranks.rank, range(self._ranks.world)
        outgoing: list[list[Tensor]] = [[] for _ in world]
        incoming: list[list[Tensor]] = [[] for _ in world]
        found = FromShards({}, {})
        for layer in layers:
            owner = self._placements.owner(layer, "g")
            parts = self._placements.shards(layer)
            for p, shards in zip(layer.parameters, parts, strict=True):
                if shards.sends(me, owner):
                    outgoing[owner].append(_part_here(p, base))
                if owner == me:
                    found.whole[p] = torch.empty(shards.shape, dtype=p.dtype, device=p.device)
                    for rank in world:
                        if shards.sends(rank, me):
                            incoming[rank].append(shards.part(found.whole[p], rank))
            if base is None:
                continue
            if any(shards.sends(me, owner) for shards in parts):
                outgoing[owner].append(self._sums_here(layer, parts, base))
            if owner == me:
                senders = [r for r in world if any(shards.sends(r, me) for shards in parts)]
                key = stack_key(layer, "g")
                room = torch.empty(
                    len(senders), layer.blocks, 3, dtype=key.dtype, device=key.device
                )
                for rank, row in zip(senders, room, strict=True):
                    incoming[rank].append(row)
                found.sums[layer] = room
        self._ranks.all_to_all(outgoing, incoming, device_of(layers[0]), "gradients")
        return found._replace(sums={x: rows.sum(0) for x, rows in found.sums.items()})

    def _sums_here(self, layer: Layer, parts: list[sharding.Shards], base: OfBase) -> Tensor:
        """Return this rank's part of a layer's sums, ``[blocks, 3]``."""
        key = stack_key(layer, "g")
        sums = torch.zeros(3, layer.blocks, dtype=key.dtype, device=key.device)
        blocks = torch.arange(layer.blocks, dtype=key.dtype, device=key.device)
        length = self._rule.length
        assert length is not None
        for p, of_block in self._spread(layer, parts, blocks):
            kinds = (
                (base.measured.get(p), length.measures == "squares"),
                (base.former.get(p), False),
                (sharding.local(p), True),
            )
            for row, (here, squared) in zip(sums, kinds, strict=True):
                if here is None or not here.numel():
                    continue
                here = here.to(key.dtype)
                here = here.square() if squared else here
                if layer.blocks == 1:
                    row += here.sum()
                else:
                    row.index_add_(0, of_block.long().flatten(), here.flatten())
        return sums.mT.contiguous()

    def shards_of(self, layer: Layer, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the sharded parameters of a layer, each with its blocks' values of this rank."""
        return self._spread(layer, self._placements.shards(layer), values)

    def _spread(
        self, layer: Layer, parts: list[sharding.Shards], values: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if layer.blocks == 1:
            yield from ((p, values) for p in layer.parameters)
            return
        matrix = values[:, None, None].expand(-1, layer.g_dim, layer.a_dim)
        whole = zip(layer.matrix_parts(matrix), layer.parameters, parts, strict=True)
        for part, p, shards in whole:
            yield p, shards.part(part.reshape(shards.shape), self._ranks.rank)

    def _scatter(
        self, layers: list[Layer], whole: dict[Tensor, Tensor], terms: dict[Layer, Tensor]
    ) -> dict[Tensor, Tensor]:
        """Return this rank's shards of the new gradients; fill in the layers' terms."""
        me, world = self._ranks.rank, range(self._ranks.world)
        outgoing: list[list[Tensor]] = [[] for _ in world]
        incoming: list[list[Tensor]] = [[] for _ in world]
        new: dict[Tensor, Tensor] = {}
        for layer in layers:
            owner = self._placements.owner(layer, "g")
            for p, shards in zip(layer.parameters, self._placements.shards(layer), strict=True):
                new[p] = torch.empty_like(p)
                incoming[owner].append(sharding.local(new[p]))
                if owner == me:
                    for rank in world:
                        outgoing[rank].append(shards.part(whole[p], rank))
            if not self._sizes.terms:
                continue
            if owner == me:
                for rank in world:
                    outgoing[rank].append(terms[layer])
            else:
                key = stack_key(layer, "g")
                terms[layer] = torch.empty(
                    layer.blocks, self._sizes.terms, dtype=key.dtype, device=key.device
                )
            incoming[owner].append(terms[layer])
        self._ranks.all_to_all(outgoing, incoming, device_of(layers[0]), "gradients")
        return new


class Together(NamedTuple):
    """Stacks on one device that are stepped together, and their places among the factors."""

    stacks: list[GradientStack]
    blocks: Blocks
    groups: list[LayerGroup]
    slots: list[Slots]
    sizes: list[int]  # blocks of each stack


class FromShards(NamedTuple):
    """Sharded gradients or momenta, whole on the rank that owns their layers."""

    whole: dict[Tensor, Tensor]
    sums: dict[Layer, Tensor]  # the lengths' sums, [blocks, 3]


def _part_here(p: Tensor, base: OfBase | None) -> Tensor:
    """Return this rank's part of a gradient, or of a momentum; zero where there is none."""
    if base is not None:
        found = base.momenta.get(p)
        here = None if found is None else found.to(p.dtype)
    else:
        here = None if p.grad is None else sharding.local(p.grad)
    return torch.zeros_like(sharding.local(p)) if here is None else here


def _sums(stacks: list[GradientStack], base: OfBase, length: Length) -> BlockSums:
    """Return the sums over each block that the length needs."""
    parameters = [*itertools.chain.from_iterable([stack.parameters for stack in stacks])]
    measured = former = None
    if length.measures:
        squares = length.measures == "squares"
        measured = gradients.block_sums(stacks, base.measured.get, squares=squares)
    if not base.former.keys().isdisjoint(parameters):
        former = gradients.block_sums(stacks, base.former.get, squares=False)
    own: dict[Tensor, Tensor] = dict(zip(parameters, parameters, strict=True))
    weights = gradients.block_sums(stacks, own.get, squares=True)
    return BlockSums(measured, former, weights)


def _kept(groups: list[LayerGroup], slots: list[Slots], sizes: list[int]) -> Kept:
    """Return how to read and write the numbers of all blocks that lie in these groups."""

    def read(name: str) -> Tensor:
        both = zip(groups, slots, strict=True)
        return torch.cat([at(group.tensors[name], own) for group, own in both])

    def write(name: str, values: Tensor) -> None:
        kept, parts = [group.tensors[name] for group in groups], list(values.split(sizes))
        if all([isinstance(own, slice) for own in slots]):
            torch._foreach_copy_([x[own] for x, own in zip(kept, slots, strict=True)], parts)
            return
        for tensor, own, part in zip(kept, slots, parts, strict=True):
            tensor[own] = part

    return Kept(read, write)


def _present(blocks: Blocks, base: OfBase) -> Tensor | None:
    """Return for each block whether it has a gradient; ``None`` if all have one."""
    both = zip(blocks.weights, blocks.biases, strict=True)
    present = [weight in base.momenta or bias in base.momenta for weight, bias in both]
    if all(present):
        return None
    of_layer = dict(zip(blocks.layers, present, strict=True))
    return per_block(blocks.layers, of_layer.__getitem__, blocks.like) > 0
