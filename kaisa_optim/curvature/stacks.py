"""The data layout: factors of equal shape are one stacked tensor, for all layers together.

A :class:`Stack` holds what belongs to all factors of one shape, a :class:`Shelf` the stacks of the
factors that a rank has, a :class:`Pair` what belongs to all layers of one shape of gradient. On the
shelf of a :class:`Layout`, every pair sees its factors as one slice of a stack, without a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..layers import Layer

WITH_STREAMS = {"cuda"}  # devices that copy from and to the host while it goes on


class StackKey(NamedTuple):
    size: int
    diagonal: bool
    device: torch.device
    dtype: torch.dtype  # of the arithmetic

    def shape(self, count: int) -> tuple[int, ...]:
        return (count, self.size) if self.diagonal else (count, self.size, self.size)


# The tensors of a stack, or of a part of one: shape and dtype by name.
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Factor:
    """One side of one layer: its place in a stack, of which it knows the key and the tensors.

    Not the stack itself, which knows its factors: that circle would outlive its layout.
    """

    def __init__(self, layer: Layer, side: str, stack: Stack) -> None:
        self.layer = layer
        self.side = side  # "a" or "g"
        self.key = stack.key
        self.tensors = stack.tensors
        self.slots = slice(stack.count, stack.count + layer.blocks)
        stack.factors.append(self)
        stack.count += layer.blocks

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key][self.slots]


@dataclass(eq=False)
class Stack:
    """Factors of one shape; every tensor has one entry a slot: ``[count, ...]``."""

    key: StackKey
    count: int = 0
    factors: list[Factor] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def new(self, specs: Specs) -> None:
        for name, (shape, dtype) in specs.items():
            self.tensors[name] = torch.zeros(shape, dtype=dtype, device=self.key.device)


@dataclass(eq=False)
class Pair:
    """Layers whose matrix gradients are stacked as ``[count, g, a]``."""

    g: Stack
    a: Stack
    layers: list[Layer] = field(default_factory=list)
    count: int = 0
    slots: dict[Layer, slice] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    g_slots: slice = field(default_factory=lambda: slice(0))
    a_slots: slice = field(default_factory=lambda: slice(0))

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.count, self.g.key.size, self.a.key.size)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A copy of what the host has, which goes on where it may let go of its own at once."""
    if device.type == "cuda":  # from other memory the driver may wait, or read what is gone
        values = values.pin_memory()
    return values.to(device, non_blocking=device.type in WITH_STREAMS)


def joined(slices: Sequence[slice], device: torch.device) -> slice | Tensor:
    """Ascending slices as one where they touch, else as indices."""
    if all(one.stop == other.start for one, other in itertools.pairwise(slices)):
        return slice(slices[0].start, slices[-1].stop)
    indices = torch.cat([torch.arange(s.start, s.stop, device="cpu") for s in slices])
    return sent(indices, device)


def slots_of(factors: Sequence[Factor]) -> slice | Tensor:
    """Where these factors are in their stack."""
    return joined([factor.slots for factor in factors], factors[0].key.device)


def per_block(
    layers: Sequence[Layer], value_of: Callable[[Layer], float], like: StackKey
) -> Tensor:
    """A number of each layer, repeated for each of its blocks."""
    values, blocks = [value_of(x) for x in layers], [x.blocks for x in layers]
    if len(set(values)) == 1:
        return torch.full((sum(blocks),), values[0], dtype=like.dtype, device=like.device)
    numbers = torch.tensor(values, dtype=like.dtype, device="cpu")
    repeats = torch.tensor(blocks, device="cpu")
    return sent(numbers.repeat_interleave(repeats), like.device)


def common_or_each(
    layers: Sequence[Layer], value_of: Callable[[Layer], float], like: StackKey
) -> Tensor | float:
    """A number where it is one for all, else one for each block."""
    values = {value_of(layer) for layer in layers}
    return values.pop() if len(values) == 1 else per_block(layers, value_of, like)


class Shelf:
    """The stacks of some factors: those that this rank keeps, or those that it applies."""

    def __init__(self) -> None:
        self.stacks: dict[StackKey, Stack] = {}
        self.factors: dict[tuple[Layer, str], Factor] = {}  # by layer and side

    def put(self, layer: Layer, side: str) -> Factor:
        key = stack_key(layer, side)
        factor = Factor(layer, side, self.stacks.setdefault(key, Stack(key)))
        self.factors[layer, side] = factor
        return factor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for stack in self.stacks.values():
            yield from stack.tensors.items()

    def views(self, layer: Layer) -> Iterator[tuple[str, Tensor]]:
        """Everything that belongs to one layer, as views with stable names."""
        for side in "ag":
            factor = self.factors.get((layer, side))
            if factor is not None:
                for name, tensor in factor.tensors.items():
                    yield f"{side}_{name}", tensor[factor.slots]


class Layout(Shelf):
    """A shelf with both factors of each of its layers, side by side for the layers of a pair."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        super().__init__()
        self.pairs: list[Pair] = []
        self.pair_of: dict[Layer, Pair] = {}
        for members in alike(layers):
            self._put_pair(members)

    def _put_pair(self, layers: list[Layer]) -> None:
        # First all A, then all G: each pair's stay one slice where both are of one shape.
        a_factors = [self.put(layer, "a") for layer in layers]
        g_factors = [self.put(layer, "g") for layer in layers]
        pair = Pair(self.stacks[g_factors[0].key], self.stacks[a_factors[0].key], layers)
        for layer in layers:
            self.pair_of[layer] = pair
            pair.slots[layer] = slice(pair.count, pair.count + layer.blocks)
            pair.count += layer.blocks
        pair.a_slots = slice(a_factors[0].slots.start, a_factors[-1].slots.stop)
        pair.g_slots = slice(g_factors[0].slots.start, g_factors[-1].slots.stop)
        self.pairs.append(pair)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors()
        for pair in self.pairs:
            yield from pair.tensors.items()

    def views(self, layer: Layer) -> Iterator[tuple[str, Tensor]]:
        yield from super().views(layer)
        pair = self.pair_of.get(layer)
        if pair is not None:
            for name, tensor in pair.tensors.items():
                yield name, tensor[pair.slots[layer]]


def arithmetic_dtype(layer: Layer) -> torch.dtype:
    """Float32 at least; float64 for float64 parameters."""
    return torch.promote_types(layer.parameters[0].dtype, torch.float32)


def device_of(layer: Layer) -> torch.device:
    """Also of one that is frozen."""
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
    """Layers by the shape of both their factors, in the order of their first."""
    grouped: dict[tuple[StackKey, StackKey], list[Layer]] = {}
    for layer in layers:
        grouped.setdefault((stack_key(layer, "g"), stack_key(layer, "a")), []).append(layer)
    return list(grouped.values())


def by_place(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Layers of one device and dtype of arithmetic together."""
    places: dict[tuple[torch.device, torch.dtype], list[Layer]] = {}
    for layer in layers:
        key = stack_key(layer, "g")
        places.setdefault((key.device, key.dtype), []).append(layer)
    return list(places.values())


def by_device(layers: Iterable[Layer]) -> list[list[Layer]]:
    devices: dict[torch.device, list[Layer]] = {}
    for layer in layers:
        devices.setdefault(stack_key(layer, "g").device, []).append(layer)
    return list(devices.values())
