"""The data layout: factors of equal shape are one stacked tensor, for all layers together.

A :class:`FactorStack` holds the tensors of all factors of one shape, :class:`Factors` the stacks of
some factors, a :class:`LayerGroup` the tensors of all layers whose gradients have one shape. In
:class:`AppliedFactors`, every group sees its factors as one slice of a stack, without a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..layers import Layer
from ..plan.moves import TensorSpec
from ..plan.routes import grouped

WHOLE = slice(None)  # the slots of all that a stack or a group has
WITH_STREAMS = {"cuda"}  # devices that copy from and to the host while other work goes on

Key = tuple[Layer, str]  # a layer's factor: side "a" or "g"
Slots = slice | Tensor


class StackKey(NamedTuple):
    size: int
    diagonal: bool
    device: torch.device
    dtype: torch.dtype  # of the arithmetic

    def shape(self, count: int) -> tuple[int, ...]:
        return (count, self.size) if self.diagonal else (count, self.size, self.size)


# Shapes and dtypes of the tensors of a stack, or of a part of one.
Specs = dict[TensorSpec, tuple[tuple[int, ...], torch.dtype]]


def specs_of(
    kept: Iterable[TensorSpec],
    count: int,
    sides: tuple[int, int],
    stored: torch.dtype | None,
    own: torch.dtype,
) -> Specs:
    """Return the tensors of ``count`` blocks; ``own`` is the arithmetic's dtype."""
    dtypes = {"stored": stored or own, "own": own, "int32": torch.int32}
    shapes = [(spec, spec.shape_of(sides)) for spec in kept]
    return {
        spec: ((count, *shape), dtypes[spec.dtype]) for spec, shape in shapes if shape is not None
    }


def allocated(specs: Specs, device: torch.device) -> dict[str, Tensor]:
    """Return zeros by name."""
    return {
        spec.name: torch.zeros(shape, dtype=dtype, device=device)
        for spec, (shape, dtype) in specs.items()
    }


class Factor:
    """One factor of one layer: its place in a stack, and the stack's key and tensors.

    The factor has no reference to the stack: a circle of references would outlive a layout.
    """

    def __init__(self, layer: Layer, side: str, stack: FactorStack) -> None:
        self.layer = layer
        self.side = side  # "a" or "g"
        self.key = stack.key
        self.tensors = stack.tensors
        self.slots = slice(stack.count, stack.count + layer.blocks)
        self.name = layer.name, side  # as plans name it
        self.place = stack.key.device, stack.key.dtype
        stack.factors.append(self)
        stack.count += layer.blocks

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key][self.slots]


@dataclass(eq=False)
class FactorStack:
    """Factors of one shape; every tensor has one entry a slot: ``[count, ...]``."""

    key: StackKey
    count: int = 0
    factors: list[Factor] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def allocate(self, kept: Iterable[TensorSpec], stored: torch.dtype | None) -> None:
        specs = specs_of(kept, self.count, self.key[:2], stored, self.key.dtype)
        self.tensors |= allocated(specs, self.key.device)


@dataclass(eq=False)
class LayerGroup:
    """Layers whose matrix gradients are stacked as ``[count, g, a]``."""

    g: FactorStack
    a: FactorStack
    layers: list[Layer] = field(default_factory=list)
    count: int = 0
    slots: dict[Layer, slice] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    g_slots: slice = field(default_factory=lambda: slice(0))
    a_slots: slice = field(default_factory=lambda: slice(0))
    # Views of the factors' tensors, of G and of A.
    _views: dict[str, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.count, self.g.key.size, self.a.key.size)

    def allocate(self, kept: Iterable[TensorSpec], stored: torch.dtype | None) -> None:
        key = self.g.key
        specs = specs_of(kept, self.count, self.shape[1:], stored, key.dtype)
        self.tensors |= allocated(specs, key.device)

    def slots_of(self, members: list[Layer]) -> Slots:
        """Return where these layers, in order, are in the group's tensors."""
        if len(members) == len(self.layers):
            return WHOLE
        return joined([self.slots[layer] for layer in members], self.g.key.device)

    def states(self, name: str, members: list[Layer]) -> tuple[Tensor | None, Tensor | None]:
        """Return these layers' tensors of G and of A; ``None`` where a diagonal factor has none."""
        if name not in self._views:
            g, a = self.g.tensors.get(name), self.a.tensors.get(name)
            views = None if g is None else g[self.g_slots], None if a is None else a[self.a_slots]
            self._views[name] = views
        g, a = self._views[name]
        if len(members) == len(self.layers):
            return g, a
        slots = self.slots_of(members)
        return None if g is None else g[slots], None if a is None else a[slots]

    def common_or_each(
        self, members: list[Layer], value_of: Callable[[Layer], float]
    ) -> Tensor | float:
        """Return one number if it is the same for all, else ``[count, 1, 1]``."""
        found = common_or_each(members, value_of, self.g.key)
        return found[:, None, None] if isinstance(found, Tensor) else found


class Factors:
    """The stacks of the factors that this rank owns."""

    def __init__(self) -> None:
        self.stacks: dict[StackKey, FactorStack] = {}
        self.by_key: dict[Key, Factor] = {}

    def put(self, layer: Layer, side: str) -> Factor:
        key = stack_key(layer, side)
        factor = Factor(layer, side, self.stacks.setdefault(key, FactorStack(key)))
        self.by_key[layer, side] = factor
        return factor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for stack in self.stacks.values():
            yield from stack.tensors.items()

    def views(self, layer: Layer) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of one layer, as views with stable names."""
        for side in "ag":
            factor = self.by_key.get((layer, side))
            if factor is not None:
                for name, tensor in factor.tensors.items():
                    yield f"{side}_{name}", tensor[factor.slots]


class AppliedFactors(Factors):
    """The factors of the layers that this rank preconditions, side by side for each group."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        super().__init__()
        self.groups: list[LayerGroup] = []
        self.group_of: dict[Layer, LayerGroup] = {}
        for members in alike(layers):
            # First all A, then all G: each side stays one slice, even if both have one shape.
            a_factors = [self.put(layer, "a") for layer in members]
            g_factors = [self.put(layer, "g") for layer in members]
            stacks = self.stacks[g_factors[0].key], self.stacks[a_factors[0].key]
            group = LayerGroup(*stacks, members)
            for layer in members:
                self.group_of[layer] = group
                group.slots[layer] = slice(group.count, group.count + layer.blocks)
                group.count += layer.blocks
            group.a_slots = slice(a_factors[0].slots.start, a_factors[-1].slots.stop)
            group.g_slots = slice(g_factors[0].slots.start, g_factors[-1].slots.stop)
            self.groups.append(group)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors()
        for group in self.groups:
            yield from group.tensors.items()

    def views(self, layer: Layer) -> Iterator[tuple[str, Tensor]]:
        yield from super().views(layer)
        group = self.group_of.get(layer)
        if group is not None:
            for name, tensor in group.tensors.items():
                yield name, tensor[group.slots[layer]]


# ---- places in a stack ----


def at(tensor: Tensor, slots: Slots) -> Tensor:
    """Return the entries of these slots, as a view if they lie side by side."""
    return tensor if slots is WHOLE else tensor[slots]


def joined(slices: Sequence[slice], device: torch.device) -> Slots:
    """Return ascending slices as one where they touch, else as indices."""
    if all([one.stop == other.start for one, other in itertools.pairwise(slices)]):
        return slice(slices[0].start, slices[-1].stop)
    indices = torch.cat([torch.arange(s.start, s.stop, device="cpu") for s in slices])
    return sent(indices, device)


def slots_of(factors: Sequence[Factor]) -> Slots:
    """Return where these factors are in their stack."""
    return joined([factor.slots for factor in factors], factors[0].key.device)


# ---- numbers for each block ----


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy the host's values to a device without waiting; the host may free them at once."""
    if device.type == "cuda":  # with unpinned memory the driver may wait, or read freed memory
        values = values.pin_memory()
    return values.to(device, non_blocking=device.type in WITH_STREAMS)


def per_block(
    layers: Sequence[Layer], value_of: Callable[[Layer], float], like: StackKey
) -> Tensor:
    """Return a number of each layer, repeated for each of its blocks."""
    values, blocks = [*map(value_of, layers)], [x.blocks for x in layers]
    if len(set(values)) == 1:
        return torch.full((sum(blocks),), values[0], dtype=like.dtype, device=like.device)
    numbers = torch.tensor(values, dtype=like.dtype, device="cpu")
    repeats = torch.tensor(blocks, device="cpu")
    return sent(numbers.repeat_interleave(repeats), like.device)


def common_or_each(
    layers: Sequence[Layer], value_of: Callable[[Layer], float], like: StackKey
) -> Tensor | float:
    """Return one number if it is the same for all, else a tensor with one for each block."""
    values = set(map(value_of, layers))
    return values.pop() if len(values) == 1 else per_block(layers, value_of, like)


# ---- layers of a kind ----


def arithmetic_dtype(layer: Layer) -> torch.dtype:
    """Return float32 at least, and float64 for float64 parameters."""
    return torch.promote_types(layer.parameters[0].dtype, torch.float32)


def device_of(layer: Layer) -> torch.device:
    """Return the layer's device, also if it is frozen."""
    own = layer.parameters[0] if layer.parameters else layer.weight
    if own is None:
        own = layer.bias
    assert own is not None
    return own.device


def stack_key(layer: Layer, side: str) -> StackKey:
    size, diagonal = (
        (layer.a_dim, layer.diagonal_a) if side == "a" else (layer.g_dim, layer.diagonal_g)
    )
    return StackKey(size, diagonal, device_of(layer), arithmetic_dtype(layer))


def alike(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Return layers grouped by both factors' shapes, in the order of each group's first layer."""
    return [*grouped(layers, lambda x: (stack_key(x, "g"), stack_key(x, "a"))).values()]


def by_place(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Return layers of one device and dtype of arithmetic together."""
    return [*grouped(layers, lambda x: (device_of(x), arithmetic_dtype(x))).values()]


def by_device(layers: Iterable[Layer]) -> list[list[Layer]]:
    return [*grouped(layers, device_of).values()]
