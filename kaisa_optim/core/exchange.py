"""The exchanges of a step: sums to owners, state to gradient workers, gradients to receivers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import sharding
from ..comm.ranks import BroadcastItem, RankGroup, Ranks, ReduceItem
from ..curvature.rules import Rule, StepValues
from ..curvature.stacks import (
    AppliedFactors,
    Factor,
    Factors,
    Key,
    alike,
    by_device,
    device_of,
    stack_key,
)
from ..curvature.sums import FactorSums, width
from ..layers import Layer
from ..linalg.moments import unpack
from ..plan.routes import chunks, in_turn, side_by_side
from ..plan.step_plan import AgreedStep
from . import gradients
from .gradients import GradientStack, NewGradients, Places, Updates, Wire
from .registry import Registry

Precondition = Callable[..., NewGradients]  # takes a stack, and a reader of its gradients

# ---- sums ----


def reduce_to_owners(
    ranks: Ranks, registry: Registry, sums: FactorSums, layers: Sequence[Layer], agreed: AgreedStep
) -> Iterator[dict[Key, Tensor]]:
    """Yield new values of the factors that this rank owns, as they arrive."""
    keys = [(layer, side) for layer in layers for side in "ag"]
    if ranks.world == 1:
        yield dict(zip(keys, sums.take(keys, agreed), strict=True))
        return
    items = []
    for layer, side in keys:
        key = stack_key(layer, side)
        size = layer.blocks * width(key)
        owner = registry.owner(layer, side)
        items.append(ReduceItem((layer, side), owner, size, key.device, key.dtype))

    loads = (
        (bucket, [v.flatten() for v in sums.take([item.key for item in bucket.items], agreed)])
        for bucket in ranks.buckets(items)
    )
    for arrived in ranks.reduce_to_owners(loads, "factors"):
        values = {}
        for (layer, side), total in arrived.items():
            key = stack_key(layer, side)
            total = total.unflatten(0, (layer.blocks, -1))
            values[layer, side] = total if key.diagonal else unpack(total, key.size)
        yield values


def damping_shifts(
    ranks: Ranks,
    registry: Registry,
    rule: Rule,
    owned: Factors,
    layers: Sequence[Layer],
    damping_of: Callable[[Layer], float],
) -> dict[Key, Tensor]:
    """Return the damping of each factor's diagonal, on all ranks."""
    means = rule.means(owned, layers)
    if registry.splits_owners:  # each owner needs the other owner's mean
        means = [ranks.sum_on_device(both, "second_order") for both in means]
    return rule.shifts(layers, damping_of, means)


# ---- state ----


def share_state(
    ranks: Ranks,
    registry: Registry,
    rule: Rule,
    applied: AppliedFactors,
    keys_of: dict[Layer, list[Key]],
    damping_of: Callable[[Layer], float],
) -> None:
    """Bring the owners' new state to all gradient workers.

    ``keys_of`` are the renewed factors of each layer.
    """
    keys = [key for keys in keys_of.values() for key in keys]
    _broadcast_state(ranks, registry, rule, applied, keys)
    rule.renew(applied, list(keys_of), damping_of)


def _broadcast_state(
    ranks: Ranks, registry: Registry, rule: Rule, applied: AppliedFactors, keys: list[Key]
) -> None:
    grid = ranks.grid
    if grid.workers == 1:
        return
    devices: dict[torch.device, list[Key]] = {}
    for key in keys:
        devices.setdefault(device_of(key[0]), []).append(key)
    for device, same in devices.items():
        columns: dict[int, dict[int, list[Key]]] = {}
        for layer, side in same:
            root = registry.owner(layer, side)
            own = columns.setdefault(root % grid.columns, {}).setdefault(root, [])
            own.append((layer, side))
        groups = []
        mine: list[list[Key]] = []  # the factors of each item of this rank's column
        for column, by_root in columns.items():
            total = sum(rule.state_bytes(key) for own in by_root.values() for key in own)
            limit = side_by_side(total, len(by_root), ranks.bucket_bytes)
            order = in_turn(
                [(root, some) for some in chunks(own, rule.state_bytes, limit)]
                for root, own in by_root.items()
            )
            if column == ranks.rank % grid.columns:
                mine = [keys for _, keys in order]
            items = [BroadcastItem(root, sum(map(rule.state_bytes, keys))) for root, keys in order]
            groups.append(RankGroup(grid.workers_of(column), items))
        # A generator, so that a packed triangle lives only until it has arrived.
        cargo = ([_packed(rule, applied.by_key[key]) for key in keys] for keys in mine)
        for packed in ranks.broadcast(groups, cargo, device, "second_order"):
            rule.incoming(packed.factor, packed.tensors)


class _PackedState(NamedTuple):
    """One factor's state as it travels."""

    factor: Factor
    tensors: list[Tensor]


def _packed(rule: Rule, factor: Factor) -> _PackedState:
    return _PackedState(factor, rule.outgoing(factor))


# ---- gradients ----


class GradientExchange:
    """Preconditions the gradients of this rank's layers, and hands them to receivers."""

    def __init__(
        self,
        ranks: Ranks,
        registry: Registry,
        rule: Rule,
        *,
        comm_dtype: torch.dtype | None,
        grafting: bool,
    ) -> None:
        self._ranks = ranks
        self._registry = registry
        self._rule = rule
        self._comm_dtype = comm_dtype
        self._grafting = grafting
        self.allocate(AppliedFactors())

    def allocate(self, applied: AppliedFactors) -> None:
        self._applied = applied
        self._places: dict[Layer, Places] = {}
        self._stacks: dict[Layer, GradientStack] = {}  # the last step's stacks, by first layer
        # Each column's buckets of the layers on one device, by the first of these layers.
        self._buckets: dict[Layer, tuple[list[Layer], list[tuple[int, list[list[list[Layer]]]]]]]
        self._buckets = {}

    def updates(self, values: StepValues, *, clips: bool) -> Updates:
        """Return the new gradients of all layers with a state; all ranks call it alike.

        ``clips`` says whether the KL clip needs its terms.
        """
        updates = Updates()
        precondition = functools.partial(self._precondition, values, clips)
        whole = [x for x in self._registry.with_state if x not in self._registry.sharded]
        if self._ranks.grid.columns == 1:
            ready = set(whole)
            for group in self._applied.groups:
                members = [x for x in group.layers if x in ready and _has_gradient(x)]
                if members:
                    updates.add(precondition(self.stack_of(members)))
        else:
            self._broadcast(whole, updates, precondition)
        self._precondition_shards(updates, precondition)
        return updates

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
        clips: bool,
        stack: GradientStack,
        gradient_of: gradients.GradientOf = gradients.own_gradient,
    ) -> NewGradients:
        group = self._applied.group_of[stack.layers[0]]
        raw = stack.collect(gradient_of)
        new = self._rule.apply(group, raw, stack.layers, values)
        if self._grafting:
            gradients.graft(stack, raw, new)
        if clips:
            return NewGradients(stack, new, gradients.products(stack, raw, new))
        return NewGradients(stack, new, raw.new_zeros(len(stack.layers), 2))

    def _broadcast(self, layers: list[Layer], updates: Updates, precondition: Precondition) -> None:
        """Send new gradients along each row of ranks, from the gradient workers in the row.

        The layers' state decides which gradients travel, not a rank's gradients: a missing gradient
        counts as zero. Columns send side by side, and no column waits for another's products.
        """
        dtype = self._comm_dtype
        members = self._ranks.grid.receivers_of(self._ranks.rank)
        for same in by_device(layers):
            order = in_turn(
                [(members[column], shapes) for shapes in buckets]
                for column, buckets in self._buckets_of(same)
            )
            items = [
                BroadcastItem(root, sum(gradients.wire_bytes(one, dtype) for one in shapes))
                for root, shapes in order
            ]
            cargo = (self._wires(root, shapes, precondition) for root, shapes in order)
            arrived = self._ranks.broadcast(
                [RankGroup(members, items)], cargo, device_of(same[0]), "gradients", ahead=True
            )
            for wire in arrived:
                updates.add(wire.unpack())

    def _buckets_of(self, layers: list[Layer]) -> list[tuple[int, list[list[list[Layer]]]]]:
        """Return each column's buckets of layers on one device; worked out once."""
        known = self._buckets.get(layers[0])
        if known is None or known[0] != layers:
            columns: dict[int, list[Layer]] = {}
            for layer in layers:
                columns.setdefault(self._registry.column(layer), []).append(layer)
            dtype = self._comm_dtype
            total = sum(gradients.wire_bytes([layer], dtype) for layer in layers)
            limit = side_by_side(total, len(columns), self._ranks.bucket_bytes)
            divided = [
                (column, list(gradients.wire_buckets(columns[column], dtype, limit)))
                for column in sorted(columns)
            ]
            known = self._buckets[layers[0]] = layers, divided
        return known[1]

    def _wires(
        self, root: int, shapes: list[list[Layer]], precondition: Precondition
    ) -> list[Wire]:
        """Return the new gradients that a root sends; on other ranks, empty tensors for them."""
        own = root == self._ranks.rank
        stacks = map(self.stack_of, shapes)
        new = (precondition(x) if own else NewGradients.awaited(x) for x in stacks)
        return [Wire(one, self._comm_dtype) for one in new]

    # ---- sharded gradients ----

    def _precondition_shards(self, updates: Updates, precondition: Precondition) -> None:
        """Precondition sharded gradients.

        A layer's owner gathers its gradient, preconditions it, and returns to every rank its shard.
        """
        if not self._registry.sharded:
            return
        ready = set(self._registry.with_state)
        layers = [layer for layer in self._registry.sharded if layer in ready]
        # Each rank has only a part of the bytes of a chunk.
        limit = self._ranks.bucket_bytes * self._ranks.world
        for chunk in chunks(layers, _gradient_bytes, limit):
            whole = self._gather(chunk)
            new: dict[Tensor, Tensor] = {}
            terms: dict[Layer, Tensor] = {}
            mine = (x for x in chunk if self._registry.owner(x, "g") == self._ranks.rank)
            for members in alike(mine):
                one = precondition(self.stack_of(members), whole.get)
                new |= gradients.unstack([one], (), whole.get)
                terms |= one.terms()
            updates.add_shards(self._scatter(chunk, new, terms), terms)

    def _gather(self, layers: list[Layer]) -> dict[Tensor, Tensor]:
        """Return the whole gradients of the layers that this rank owns; a missing one is zero."""
        me, world = self._ranks.rank, range(self._ranks.world)
        outgoing: list[list[Tensor]] = [[] for _ in world]
        incoming: list[list[Tensor]] = [[] for _ in world]
        whole: dict[Tensor, Tensor] = {}
        for layer in layers:
            owner = self._registry.owner(layer, "g")
            for p, shards in zip(layer.parameters, self._registry.shards(layer), strict=True):
                if shards.sends(me, owner):
                    mine = sharding.local(p if p.grad is None else p.grad)
                    outgoing[owner].append(torch.zeros_like(mine) if p.grad is None else mine)
                if owner == me:
                    whole[p] = torch.empty(shards.shape, dtype=p.dtype, device=p.device)
                    for rank in world:
                        if shards.sends(rank, me):
                            incoming[rank].append(shards.part(whole[p], rank))
        self._ranks.all_to_all(outgoing, incoming, device_of(layers[0]), "gradients")
        return whole

    def _scatter(
        self, layers: list[Layer], whole: dict[Tensor, Tensor], terms: dict[Layer, Tensor]
    ) -> dict[Tensor, Tensor]:
        """Return this rank's shards of the new gradients; fill in the layers' terms of the clip."""
        me, world = self._ranks.rank, range(self._ranks.world)
        outgoing: list[list[Tensor]] = [[] for _ in world]
        incoming: list[list[Tensor]] = [[] for _ in world]
        new: dict[Tensor, Tensor] = {}
        for layer in layers:
            owner = self._registry.owner(layer, "g")
            for p, shards in zip(layer.parameters, self._registry.shards(layer), strict=True):
                new[p] = torch.empty_like(p)
                incoming[owner].append(sharding.local(new[p]))
                if owner == me:
                    for rank in world:
                        outgoing[rank].append(shards.part(whole[p], rank))
            if owner == me:
                for rank in world:
                    outgoing[rank].append(terms[layer])
            else:
                dtype = stack_key(layer, "g").dtype
                terms[layer] = torch.empty(2, dtype=dtype, device=device_of(layer))
            incoming[owner].append(terms[layer])
        self._ranks.all_to_all(outgoing, incoming, device_of(layers[0]), "gradients")
        return new


def _has_gradient(layer: Layer) -> bool:
    return any(p.grad is not None for p in layer.parameters)


def _gradient_bytes(layer: Layer) -> int:
    return gradients.elements([layer]) * stack_key(layer, "g").dtype.itemsize
