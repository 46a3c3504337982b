"""The data layout: layers of one shape are a group, whose factors and gradients are stacks.

A :class:`ParameterStack` has parameters of one shape. Groups and stacks know each other by places,
so that one copy brings a kind of parameter of all layers to its group's ``[k, g, a]``.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers import Layer
from ..linalg.moments import pack, unpack
from ..plan.facts import Sizes, TensorSpec, grouped

WITH_STREAMS = {"cuda"}  # devices that copy from and to the host while other work goes on

Key = tuple[Layer, str]  # a layer's factor: side "a" or "g"
# A view of a stack, by the arguments of ``as_strided``: size, strides and offset.
Region = tuple[tuple[int, ...], tuple[int, ...], int]
Specs = Iterable[TensorSpec]


class StackKey(NamedTuple):
    size: int
    diagonal: bool
    device: torch.device
    dtype: torch.dtype  # of the arithmetic


def strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides in which all numbers of a parameter lie side by side."""
    sizes = zip(parameter.shape, parameter.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in sizes)
    if parameter.layout is torch.strided and reach + 1 == parameter.numel():
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def blueprints(layer: Layer) -> list[Tensor]:
    """Return a layer's parameters as they lie in their stacks, without numbers."""
    return [torch.empty_strided(p.shape, strides(p), device="meta") for p in layer.parameters]


class ParameterStack:
    """Parameters of one shape and layout, all in one of the optimizer's groups: ``[n, *shape]``.

    ``like`` is what is stacked: a parameter, or this rank's part of a sharded one. The momenta are
    rows of one tensor in its strides and dtype. The other stacks live for one step.
    """

    def __init__(self, parameters: list[Tensor], like: Tensor, number: int, *, keeps: bool) -> None:
        self.parameters, self.number = parameters, number  # the number is the group's
        self.keeps_momenta = keeps  # whether this rank keeps the momenta
        self.dtype, self.device = like.dtype, like.device
        self.shape = (len(parameters), *like.shape)
        self.strides = (like.numel(), *strides(like))
        plain = torch.empty_strided(self.shape, self.strides, device="meta")
        self._is_contiguous = plain.is_contiguous()
        # Ids are safe here, since the stack holds the parameters: none is freed and its id reused.
        self.key = tuple(map(id, parameters)), self.dtype, self.device, self.strides, number, keeps
        self.at = slice(0)  # the parameters' places among all of a plan
        self.is_partial = False  # whether layers cover less than all of it
        self.momentum: Tensor | None = None
        self.momenta: list[Any] = []  # rows, as the optimizer's entries have them
        self.fresh: list[int] = []  # rows whose entries wait for a first gradient
        self.former: Any = None  # second moments that the base kept
        self.buffer: Any = None  # gradients at first, and in the end what the parameters step along
        self.ahead: Any = None  # what directions are made of

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def stacked(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return a copy of tensors like the parameters as one; a missing one is zero."""
        parts: Any = tensors
        # By identity: ``in`` would ask each tensor whether it equals None.
        if any(map(operator.is_, tensors, itertools.repeat(None))):
            zero = torch.zeros(self.shape[1:], dtype=self.dtype, device=self.device)
            parts = [zero if x is None else x for x in tensors]
        if self._is_contiguous:
            return torch.stack(parts)
        stack = self.empty()
        torch._foreach_copy_(list(stack.unbind()), parts)
        return stack

    def adopt(self, key: str, entries: Sequence[dict[str, Any]]) -> None:
        """Take over the entries' momenta, and give them rows; an absent one begins at zero."""
        if self.momentum is None:
            self.momentum = self.empty().zero_()
            self.momenta = list(self.momentum.unbind())
        row_of = {id(row): i for i, row in enumerate(self.momenta)}
        former: list[Any] = [entry.get(key) for entry in entries]
        # An entry may hold another's row, which the loop below would overwrite before it is read.
        former = [x.clone() if row_of.get(id(x), i) != i else x for i, x in enumerate(former)]
        # An entry without a momentum gets its row with the first gradient.
        self.fresh = [i for i, momentum in enumerate(former) if momentum is None]
        for row, momentum, entry in zip(self.momenta, former, entries, strict=True):
            if momentum is None:
                row.zero_()
                continue
            if momentum is not row:
                row.copy_(momentum)
            entry[key] = row


Rows = Mapping[Tensor, tuple[ParameterStack, int]]  # each parameter's stack and row


class Side:
    """The factors of one side of a group's layers: ``[k, n, n]``, or ``[k, n]`` if diagonal."""

    def __init__(self, name: str, key: StackKey) -> None:
        self.name, self.key = name, key  # name: "a" or "g"
        self.owned: dict[Layer, slice] = {}  # places of this rank's factors in the averages
        self.averages: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}  # of all layers of the group

    def outgoing(self, slots: slice, sizes: Sizes) -> list[Tensor]:
        """Return the tensors that a factor's owner sends and the other gradient workers fill."""
        state = [tensor[slots] for tensor in self.state.values()]
        return [pack(x) for x in state] if sizes.packed and not self.key.diagonal else state

    def incoming(self, slots: slice, sizes: Sizes, tensors: list[Tensor]) -> None:
        """Store the tensors of :meth:`outgoing`, on the owner, too."""
        # The owner unpacks its own triangle as the others do: its matrix before may differ in the
        # last bits of the other half, and weights of the gradient workers would part.
        if sizes.packed and not self.key.diagonal:
            for state, tensor in zip(self.state.values(), tensors, strict=True):
                state[slots] = unpack(tensor, self.key.size)


class Group:
    """Layers whose matrix gradients are stacked as ``[k, g, a]``; each is a range of the k blocks.

    Where ranks receive directions, all layers of a group have theirs from one rank.
    """

    def __init__(self, layers: Sequence[Layer], *, applied: bool) -> None:
        self.layers = list(layers)
        self.applied = applied  # whether this rank has the state, and makes new gradients by it
        self.a = Side("a", stack_key(layers[0], "a"))
        self.g = Side("g", stack_key(layers[0], "g"))
        self.sides = self.a, self.g
        self.slots: dict[Layer, slice] = {}
        self.count = 0
        for layer in layers:
            self.slots[layer] = slice(self.count, self.count + layer.blocks)
            self.count += layer.blocks
        self.shape = (self.count, self.g.key.size, self.a.key.size)
        self.dtype, self.device = self.g.key.dtype, self.g.key.device
        self.in_half = False  # whether its stacks are multiplied with bfloat16 in bfloat16
        self.tensors: dict[str, Tensor] = {}  # numbers or matrices of each block
        # Kinds of parameters: a stack, its region, and the region of [k, g, a] with these numbers.
        self.places: list[tuple[ParameterStack, Region, Region]] = []
        self._is_full = False  # whether the places are all of [k, g, a]

    def allocate(
        self,
        sizes: Sizes,
        average: torch.dtype | None,
        stored: torch.dtype | None,
        owns: Callable[[Layer, str], bool],
        *,
        at_identity: bool,
    ) -> None:
        """Make the tensors; ``average`` and ``stored`` are dtypes, ``None`` the arithmetic's."""
        # State is the identity until a refresh: a first root that fails leaves raw directions.
        for side in self.sides:
            start = 0
            for layer in self.layers:
                if owns(layer, side.name):
                    side.owned[layer] = slice(start, start + layer.blocks)
                    start += layer.blocks
            side.averages = self._zeros(sizes.of_owner, start, side.key[:2], average)
            side.state = self._zeros(sizes.of_factor, self.count, side.key[:2], stored)
            ones = list(side.state.values())
            if at_identity and start:  # at full weight: the papers correct no bias
                side.averages["weight"].fill_(1.0)
                ones.append(side.averages["average"])
            for tensor in ones:
                (tensor.diagonal(dim1=1, dim2=2) if tensor.dim() == 3 else tensor).fill_(1)
        self.tensors = self._zeros(sizes.of_gradient, self.count, self.shape[1:], stored)

    def _zeros(
        self, specs: Specs, count: int, sides: tuple[int, int], stored: torch.dtype | None
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for spec, (shape, dtype) in specs_of(specs, count, sides, stored, self.dtype).items():
            if count:
                tensors[spec.name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return tensors

    def _parts(self) -> list[tuple[str, dict[str, Tensor], dict[Layer, slice]]]:
        # All tensors, with the beginnings of their names and the layers' places.
        averages = [(f"{x.name}_", x.averages, x.owned) for x in self.sides]
        state = [(f"{x.name}_", x.state, self.slots) for x in self.sides]
        return [*averages, *state, ("", self.tensors, self.slots)]

    def all_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for _, tensors, _ in self._parts():
            yield from tensors.items()

    def views(self, layer: Layer) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of one layer, as views with stable names."""
        for prefix, tensors, places in self._parts():
            for name, tensor in tensors.items() if layer in places else ():
                yield prefix + name, tensor[places[layer]]

    def place(self, layers: Iterable[Layer], rows: Rows, room: dict[Tensor, int]) -> None:
        """Find the parameters of these layers in stacks; count their placed numbers in ``room``."""
        _, g, a = self.shape
        kinds: dict[tuple[ParameterStack, Region, Region], list[tuple[int, int]]] = {}
        placed = 0
        for layer in layers:
            # The layer's own methods say which part of the matrix a parameter is, on tensors
            # without numbers; views of these have the strides and offsets of the copies.
            matrix = torch.empty(layer.blocks, g, a, device="meta")
            parts = layer.parameter_parts(blueprints(layer))
            for p, x, y in zip(layer.parameters, parts, layer.matrix_parts(matrix), strict=True):
                if p in rows:
                    stack, row = rows[p]
                    of_stack = tuple(x.shape), x.stride(), int(x.storage_offset())
                    of_group = tuple(y.shape), y.stride(), int(y.storage_offset())
                    at = kinds.setdefault((stack, of_stack, of_group), [])
                    at.append((row, self.slots[layer].start))
                    placed += y.numel()
                    room[p] = room.get(p, 0) + y.numel()
        self._is_full = placed == math.prod(self.shape)
        self.places = []
        for (stack, of_stack, of_group), at in kinds.items():
            whole, block = math.prod(stack.shape[1:]), g * a
            (size, stride, start), (block_size, block_stride, block_start) = of_stack, of_group
            while at:
                # The first parameters at one distance from each other, in rows of their stack and
                # in slots of the group, are one place, with the distances as outer strides.
                row, slot = at[0]
                across, down = (at[1][0] - row, at[1][1] - slot) if at[1:] else (0, 0)
                count = 1
                while count < len(at) and at[count] == (row + count * across, slot + count * down):
                    count += 1
                source = (count, *size), (across * whole, *stride), start + row * whole
                outer = down * block
                target = (count, *block_size), (outer, *block_stride), block_start + slot * block
                self.places.append((stack, source, target))
                at = at[count:]

    def collect(self, name: str) -> Tensor:
        """Return stacks of this name as ``[k, g, a]``, or the "parameters"; others are zero."""
        make = torch.empty if self._is_full else torch.zeros
        matrices = make(self.shape, dtype=self.dtype, device=self.device)
        for stack, of_stack, of_group in self.places:
            tensor = getattr(stack, name)
            tensor = stack.stacked(tensor) if name == "parameters" else tensor
            matrices.as_strided(*of_group).copy_(tensor.as_strided(*of_stack))
        return matrices

    def deliver(self, matrices: Tensor) -> None:
        """Write new gradients, ``[k, g, a]``, into the buffers of the stacks."""
        # Regions are of contiguous stacks: a rule's result may be a transposed view. ``as_strided``
        # counts from the start of the storage, where a part of a split stack does not begin.
        matrices = matrices.contiguous()
        first = matrices.storage_offset()
        for stack, of_stack, (size, stride, start) in self.places:
            part = matrices.as_strided(size, stride, first + start)
            stack.buffer.as_strided(*of_stack).copy_(part)


def specs_of(
    specs: Specs, count: int, sides: tuple[int, int], stored: torch.dtype | None, wide: torch.dtype
) -> dict[TensorSpec, tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of ``count`` blocks' tensors; ``wide`` is the arithmetic's dtype."""
    dtypes = {"stored": stored or wide, "own": wide, "int32": torch.int32}
    shapes = [(spec, spec.shape_of(sides)) for spec in specs]
    return {x: ((count, *shape), dtypes[x.dtype]) for x, shape in shapes if shape is not None}


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy the host's values to a device without waiting; the host may free them at once."""
    if device.type == "cuda":  # with unpinned memory the driver may wait, or read freed memory
        values = values.pin_memory()
    return values.to(device, non_blocking=device.type in WITH_STREAMS)


def per_block(layers: Sequence[Layer], values: Sequence[float], like: StackKey) -> Tensor:
    """Return a number of each layer, repeated for each of its blocks."""
    blocks = [x.blocks for x in layers]
    if len(set(values)) == 1:
        return torch.full((sum(blocks),), values[0], dtype=like.dtype, device=like.device)
    numbers = torch.tensor(values, dtype=like.dtype, device="cpu")
    return sent(numbers.repeat_interleave(torch.tensor(blocks, device="cpu")), like.device)


def device_of(layer: Layer) -> torch.device:
    """Return the layer's device, also if it is frozen."""
    parameter = layer.parameters[0] if layer.parameters else layer.weight
    return (layer.bias if parameter is None else parameter).device  # type: ignore[union-attr]


def stack_key(layer: Layer, side: str) -> StackKey:
    # Float32 at least: averages of rounded products would lose small eigenvalues.
    dtype = torch.promote_types(layer.parameters[0].dtype, torch.float32)
    return StackKey(*layer.size_of(side), device_of(layer), dtype)


def by_shape(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Return layers grouped by both factors' shapes, in the order of each group's first layer."""
    return [*grouped(layers, lambda x: (stack_key(x, "g"), stack_key(x, "a"))).values()]


def by_place(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Return layers of one device and dtype of arithmetic together."""
    return [*grouped(layers, lambda x: stack_key(x, "g")[2:]).values()]
