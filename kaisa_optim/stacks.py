"""The data layout: factors of equal shape are one stacked tensor, for all layers together.

A :class:`Stack` holds what belongs to all factors of one shape, a :class:`Pair` what belongs to all
layers of one shape of gradient. A layer's factors lie side by side in their stacks, layers of one
pair too, so that every pair sees its factors as one slice, without a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .layers import Layer


class _StackKey(NamedTuple):
    size: int
    diagonal: bool
    device: torch.device
    dtype: torch.dtype  # of the arithmetic


class Factor:
    """One side of one layer: its place in a stack."""

    def __init__(self, layer: Layer, side: str, stack: Stack) -> None:
        self.layer = layer
        self.side = side  # "a" or "g"
        self.stack = stack
        self.slots = slice(stack.count, stack.count + layer.blocks)
        stack.factors.append(self)
        stack.count += layer.blocks

    def __getitem__(self, key: str) -> Tensor:
        return self.stack.tensors[key][self.slots]


@dataclass(eq=False)
class Stack:
    """Factors of one shape; every tensor has one entry a slot: ``[count, ...]``."""

    key: _StackKey
    count: int = 0
    factors: list[Factor] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        n = self.key.size
        return (self.count, n) if self.key.diagonal else (self.count, n, n)

    def new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = self.tensors[name] = torch.zeros(shape, dtype=dtype, device=self.key.device)
        return tensor


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

    def new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = self.tensors[name] = torch.zeros(shape, dtype=dtype, device=self.g.key.device)
        return tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.count, self.g.key.size, self.a.key.size)


def joined(slices: Sequence[slice], device: torch.device) -> slice | Tensor:
    """Ascending slices as one where they touch, else as indices."""
    if all(one.stop == other.start for one, other in itertools.pairwise(slices)):
        return slice(slices[0].start, slices[-1].stop)
    indices = torch.cat([torch.arange(s.start, s.stop, device="cpu") for s in slices])
    return indices.to(device)


def slots_of(factors: Sequence[Factor], stack: Stack) -> slice | Tensor:
    """Where these factors are in their stack."""
    return joined([factor.slots for factor in factors], stack.key.device)


def per_block(
    layers: Sequence[Layer], value_of: Callable[[Layer], float], like: _StackKey
) -> Tensor:
    """A number of each layer, repeated for each of its blocks."""
    values, blocks = [value_of(x) for x in layers], [x.blocks for x in layers]
    if len(set(values)) == 1:
        return torch.full((sum(blocks),), values[0], dtype=like.dtype, device=like.device)
    numbers = torch.tensor(values, dtype=like.dtype, device="cpu")
    repeats = torch.tensor(blocks, device="cpu")
    return numbers.repeat_interleave(repeats).to(like.device, non_blocking=True)


@dataclass
class Layout:
    stacks: list[Stack]
    pairs: list[Pair]
    factors: dict[Layer, tuple[Factor, Factor]]  # A, G
    pair_of: dict[Layer, Pair]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for stack in self.stacks:
            yield from stack.tensors.items()
        for pair in self.pairs:
            yield from pair.tensors.items()

    def views(self, layer: Layer) -> Iterator[tuple[str, Tensor]]:
        """Everything that belongs to one layer, as views with stable names."""
        for factor in self.factors[layer]:
            for name, tensor in factor.stack.tensors.items():
                yield f"{factor.side}_{name}", tensor[factor.slots]
        pair = self.pair_of[layer]
        for name, tensor in pair.tensors.items():
            yield name, tensor[pair.slots[layer]]


def arithmetic_dtype(layer: Layer) -> torch.dtype:
    """Float32 at least; float64 for float64 parameters."""
    return torch.promote_types(layer.parameters[0].dtype, torch.float32)


def lay_out(layers: Iterable[Layer]) -> Layout:
    stacks: dict[_StackKey, Stack] = {}
    grouped: dict[tuple[_StackKey, _StackKey], list[Layer]] = {}
    for layer in layers:
        device, dtype = layer.parameters[0].device, arithmetic_dtype(layer)
        g_key = _StackKey(layer.g_dim, layer.diagonal_g, device, dtype)
        a_key = _StackKey(layer.a_dim, layer.diagonal_a, device, dtype)
        grouped.setdefault((g_key, a_key), []).append(layer)
    layout = Layout([], [], {}, {})
    for (g_key, a_key), members in grouped.items():
        g = stacks.setdefault(g_key, Stack(g_key))
        a = stacks.setdefault(a_key, Stack(a_key))
        pair = Pair(g, a, members)
        pair.count = sum(layer.blocks for layer in members)
        # First all A, then all G: each pair's stay one slice where both are of one shape.
        pair.a_slots = slice(a.count, a.count + pair.count)
        a_factors = [Factor(layer, "a", a) for layer in members]
        pair.g_slots = slice(g.count, g.count + pair.count)
        g_factors = [Factor(layer, "g", g) for layer in members]
        at = 0
        for layer, factor_a, factor_g in zip(members, a_factors, g_factors, strict=True):
            layout.factors[layer] = (factor_a, factor_g)
            layout.pair_of[layer] = pair
            pair.slots[layer] = slice(at, at + layer.blocks)
            at += layer.blocks
        layout.pairs.append(pair)
    layout.stacks = list(stacks.values())
    return layout
