"""The data layout: layers of one shape are a group, whose factors and gradients are stacks.

A :class:`Group` has the averages of its factors that this rank owns, and the state of all of them,
if this rank applies it. A :class:`ParameterStack` has parameters of one shape, with their momenta.
Both know each other by places, so that one copy brings a kind of parameter of all layers to its
group's ``[k, g, a]``. Nothing here knows ranks.
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
from ..plan.facts import Sizes, TensorSpec, grouped

WITH_STREAMS = {"cuda"}  # devices that copy from and to the host while other work goes on

Key = tuple[Layer, str]  # a layer's factor: side "a" or "g"


class StackKey(NamedTuple):
    size: int
    diagonal: bool
    device: torch.device
    dtype: torch.dtype  # of the arithmetic

    def shape(self, count: int) -> tuple[int, ...]:
        return (count, self.size) if self.diagonal else (count, self.size, self.size)


# A view of a stack: size, strides and offset, as ``as_strided`` takes them.
Region = tuple[tuple[int, ...], tuple[int, ...], int]


# ---- parameters of one shape ----


def strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides in which all numbers of a parameter lie side by side."""
    sizes = zip(parameter.shape, parameter.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in sizes)
    if parameter.layout is torch.strided and reach + 1 == parameter.numel():
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


class ParameterStack:
    """Parameters of one shape and layout, all in one of the optimizer's groups: ``[n, *shape]``.

    ``like`` are the tensors that are stacked: the parameters, or this rank's part of a sharded one.
    ``number`` is the group's. The momenta are rows of one tensor, in the parameters' own strides
    and dtype. The other stacks live for one step: ``buffer`` has gradients at first, and in the end
    directions, or preconditioned gradients.
    """

    def __init__(self, parameters: list[Tensor], like: Tensor, number: int, *, mine: bool) -> None:
        self.parameters, self.number = parameters, number
        self.mine = mine  # whether this rank keeps the momenta
        self.dtype, self.device = like.dtype, like.device
        self.shape = (len(parameters), *like.shape)
        self.strides = (like.numel(), *strides(like))
        plain = torch.empty_strided(self.shape, self.strides, device="meta")
        self._is_contiguous = plain.is_contiguous()
        ids = tuple(map(id, parameters))
        self.key = ids, self.dtype, self.device, self.strides, number, mine
        self.at = slice(0)  # the parameters' places among all of a plan
        self.is_partial = False  # whether layers cover less than all of it
        self.momentum: Tensor | None = None
        self.momenta: list[Any] = []  # rows, as the optimizer's entries have them
        self.fresh: list[int] = []  # rows whose entries wait for a first gradient
        self.former: Any = None  # second moments that the base kept
        self.buffer: Any = None
        self.ahead: Any = None  # what directions are made of

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def stacked(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return a copy of tensors like the parameters as one; a missing one is zero."""
        parts: Any = tensors
        if any(map(operator.is_, tensors, itertools.repeat(None))):
            zero = torch.zeros(self.shape[1:], dtype=self.dtype, device=self.device)
            parts = [zero if x is None else x for x in tensors]
        if self._is_contiguous:
            return torch.stack(parts)
        stack = self.empty()
        torch._foreach_copy_(list(stack.unbind()), parts)
        return stack

    def adopt(self, key: str, entries: Sequence[dict[str, Any]]) -> None:
        """Take over the entries' momenta, and give them rows; an absent one begins at zero.

        The entry of such a one gets its row with the first gradient.
        """
        former: list[Any] = [entry.get(key) for entry in entries]
        if self.momentum is None:
            self.momentum = self.empty().zero_()
            self.momenta = list(self.momentum.unbind())
        # An entry may hold another's row, which is overwritten before it is read.
        own = {id(row): i for i, row in enumerate(self.momenta)}
        former = [x.clone() if own.get(id(x), i) != i else x for i, x in enumerate(former)]
        self.fresh = [i for i, momentum in enumerate(former) if momentum is None]
        for row, momentum, entry in zip(self.momenta, former, entries, strict=True):
            if momentum is None:
                row.zero_()
                continue
            if momentum is not row:
                row.copy_(momentum)
            entry[key] = row


# ---- layers of one shape ----


class Side:
    """The factors of one side of a group's layers: ``[k, n, n]``, or ``[k, n]`` if diagonal."""

    def __init__(self, name: str, key: StackKey) -> None:
        self.name, self.key = name, key  # name: "a" or "g"
        self.owned: dict[Layer, slice] = {}  # places of this rank's factors in the averages
        self.averages: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}  # of all layers of the group


class Group:
    """Layers whose matrix gradients are stacked as ``[k, g, a]``, k blocks of all layers.

    Each layer is a range of blocks. Where ranks receive directions, all layers of a group have
    theirs from one rank.
    """

    def __init__(self, layers: Sequence[Layer], *, applied: bool) -> None:
        self.layers = list(layers)
        self.applied = applied  # whether this rank has the state, and makes new gradients by it
        self.a = Side("a", stack_key(layers[0], "a"))
        self.g = Side("g", stack_key(layers[0], "g"))
        ends = itertools.accumulate(layer.blocks for layer in layers)
        self.slots = {x: slice(end - x.blocks, end) for x, end in zip(layers, ends, strict=True)}
        self.count = self.slots[layers[-1]].stop
        self.shape = (self.count, self.g.key.size, self.a.key.size)
        self.dtype, self.device = self.g.key.dtype, self.g.key.device
        self.in_half = False  # whether its stacks are multiplied with bfloat16 in bfloat16
        self.tensors: dict[str, Tensor] = {}  # numbers or matrices of each block
        # Kinds of parameters: a stack, its view, and the view of [k, g, a].
        self.places: list[tuple[ParameterStack, Region, Region]] = []
        self._is_full = False  # whether the places are all of [k, g, a]

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.a, self.g

    def allocate(
        self,
        sizes: Sizes,
        average: torch.dtype | None,
        stored: torch.dtype | None,
        owns: Callable[[Layer, str], bool],
        *,
        at_identity: bool,
    ) -> None:
        """Make the tensors; state is the identity until a refresh.

        ``average`` and ``stored`` are dtypes of storage, ``None`` the arithmetic's. Averages may
        begin ``at_identity``, at full weight: the papers correct no bias.
        """
        for side in self.sides:
            start = 0
            for layer in self.layers:
                if owns(layer, side.name):
                    side.owned[layer] = slice(start, start + layer.blocks)
                    start += layer.blocks
            side.averages = _zeros(sizes.of_owner, start, side.key[:2], average, side.key)
            side.state = _zeros(sizes.of_factor, self.count, side.key[:2], stored, side.key)
            ones = list(side.state.values())
            if at_identity and start:
                side.averages["weight"].fill_(1.0)
                ones.append(side.averages["average"])
            for tensor in ones:
                (tensor.diagonal(dim1=1, dim2=2) if tensor.dim() == 3 else tensor).fill_(1)
        self.tensors = _zeros(sizes.of_gradient, self.count, self.shape[1:], stored, self.g.key)

    def all_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for part in (*(x.averages for x in self.sides), *(x.state for x in self.sides)):
            yield from part.items()
        yield from self.tensors.items()

    def views(self, layer: Layer) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of one layer, as views with stable names."""
        for side in self.sides:
            if layer in side.owned:
                for name, tensor in side.averages.items():
                    yield f"{side.name}_{name}", tensor[side.owned[layer]]
        for side in self.sides:
            for name, tensor in side.state.items():
                yield f"{side.name}_{name}", tensor[self.slots[layer]]
        for name, tensor in self.tensors.items():
            yield name, tensor[self.slots[layer]]

    # ---- gradients ----

    def place(
        self,
        layers: Iterable[Layer],
        rows: Mapping[Tensor, tuple[ParameterStack, int]],
        room: dict[Tensor, int],
    ) -> None:
        """Find the parameters of these layers in stacks; ``rows`` has each one's stack and row.

        Parameters that lie evenly, in their stack and in ``[k, g, a]``, are one place. The numbers
        that have a place are counted in ``room``.
        """
        _, g, a = self.shape
        kinds: dict[tuple[ParameterStack, Region, Region], list[tuple[int, int]]] = {}
        placed = 0
        for layer in layers:
            matrix = torch.empty(layer.blocks, g, a, device="meta")
            like = [
                torch.empty_strided(p.shape, strides(p), device="meta") for p in layer.parameters
            ]
            views = zip(layer.parameter_parts(like), layer.matrix_parts(matrix), strict=True)
            for p, pair in zip(layer.parameters, views, strict=True):
                if p in rows:
                    stack, row = rows[p]
                    here, there = (
                        (tuple(x.shape), x.stride(), int(x.storage_offset())) for x in pair
                    )
                    places = kinds.setdefault((stack, here, there), [])
                    places.append((row, self.slots[layer].start))
                    placed += pair[1].numel()
                    room[p] = room.get(p, 0) + pair[1].numel()
        self._is_full = placed == math.prod(self.shape)
        self.places = []
        for (stack, here, there), pairs in kinds.items():
            whole = math.prod(stack.shape[1:])
            while pairs:
                # The first that follow each other at one distance.
                steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(pairs)]
                steps, count = steps or [(0, 0)], 1
                while count < len(pairs) and steps[count - 1] == steps[0]:
                    count += 1
                (row, slot), (across, down) = pairs[0], steps[0]
                of_stack = (count, *here[0]), (across * whole, *here[1]), here[2] + row * whole
                block = g * a
                of_group = (count, *there[0]), (down * block, *there[1]), there[2] + slot * block
                self.places.append((stack, of_stack, of_group))
                pairs = pairs[count:]

    def collect(self, name: str) -> Tensor:
        """Return stacks of this name as ``[k, g, a]``, or the "parameters" themselves.

        What has no place is zero.
        """
        make = torch.empty if self._is_full else torch.zeros
        matrices = make(self.shape, dtype=self.dtype, device=self.device)
        for stack, (size, stride, start), (to_size, to_stride, to_start) in self.places:
            tensor = getattr(stack, name)
            tensor = stack.stacked(tensor) if name == "parameters" else tensor
            part = tensor.as_strided(size, stride, start)
            matrices.as_strided(to_size, to_stride, to_start).copy_(part)
        return matrices

    def deliver(self, matrices: Tensor) -> None:
        """Write new gradients, ``[k, g, a]``, into the buffers of the stacks."""
        matrices = matrices.contiguous()
        first = matrices.storage_offset()
        for stack, (to_size, to_stride, to_start), (size, stride, start) in self.places:
            part = matrices.as_strided(size, stride, first + start)
            stack.buffer.as_strided(to_size, to_stride, to_start).copy_(part)


def specs_of(
    specs: Iterable[TensorSpec],
    count: int,
    sides: tuple[int, int],
    stored: torch.dtype | None,
    own: torch.dtype,
) -> dict[TensorSpec, tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of ``count`` blocks' tensors; ``own`` is the arithmetic's dtype."""
    dtypes = {"stored": stored or own, "own": own, "int32": torch.int32}
    shapes = [(spec, spec.shape_of(sides)) for spec in specs]
    return {
        spec: ((count, *shape), dtypes[spec.dtype]) for spec, shape in shapes if shape is not None
    }


def _zeros(
    specs: Iterable[TensorSpec],
    count: int,
    sides: tuple[int, int],
    stored: torch.dtype | None,
    key: StackKey,
) -> dict[str, Tensor]:
    """Return zeros by name; nothing without blocks."""
    return {
        spec.name: torch.zeros(shape, dtype=dtype, device=key.device)
        for spec, (shape, dtype) in specs_of(specs, count, sides, stored, key.dtype).items()
        if count
    }


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
    return StackKey(*layer.size_of(side), device_of(layer), arithmetic_dtype(layer))


def alike(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Return layers grouped by both factors' shapes, in the order of each group's first layer."""
    return [*grouped(layers, lambda x: (stack_key(x, "g"), stack_key(x, "a"))).values()]


def by_place(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Return layers of one device and dtype of arithmetic together."""
    return [*grouped(layers, lambda x: (device_of(x), arithmetic_dtype(x))).values()]


def by_device(layers: Iterable[Layer]) -> list[list[Layer]]:
    return [*grouped(layers, device_of).values()]
