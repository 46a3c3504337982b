"""Gradients between the parameters and their stacks, and the clip over all of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.sharding import local
from ..curvature.stacks import stack_key
from ..layers import Layer

GradientOf = Callable[[Tensor], Tensor | None]
# This rank's parts of a layer's numbers for each block, by parameter.
ShardsOf = Callable[[Layer, Tensor], Iterator[tuple[Tensor, Tensor]]]

# A scale of the clip's terms. With a loss of 1e20, gradients are as long, and plain terms would
# overflow float32. A power of two changes no digit of the clip. Products that become zero by the
# scale are far below any clip.
_SHARE = 2.0**-64

CLIP_TERMS = 2  # numbers of each block that the clip needs

own_gradient: GradientOf = operator.attrgetter("grad")
_stride, _dtype = operator.methodcaller("stride"), operator.attrgetter("dtype")
_PLAIN = {Tensor, nn.Parameter}  # exactly these types: subclasses may take views in other ways


class _View(NamedTuple):
    """A view of a contiguous tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        if tensor.shape == self.size and self.offset == 0 and tensor.stride() == self.stride:
            return tensor
        return tensor.as_strided(self.size, self.stride, self.offset + tensor.storage_offset())

    def of_one(self) -> _View:
        """Return the view of a single block, without that dimension."""
        return _View(self.size[1:], self.stride[1:], self.offset)

    def of_each(self, count: int, apart: int) -> _View:
        """Return the views of ``count`` tensors that lie ``apart``, with a dimension for them."""
        return _View(torch.Size((count, *self.size)), (apart, *self.stride), self.offset)


def strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides in which all numbers of a parameter lie side by side."""
    sizes = zip(parameter.shape, parameter.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in sizes)
    if parameter.layout is torch.strided and reach + 1 == parameter.numel():
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


class Places(NamedTuple):
    """The places of a layer's parameters in its matrix gradient.

    They are found once, since finding them takes as long as a small layer's products. Views follow
    the memory layout of the parameters, channels last or first.
    """

    matrix: list[_View]  # each parameter's view of the layer's ``[blocks, g, a]``
    own: list[_View]  # the same numbers' view of a tensor like the parameter

    @classmethod
    def of(cls, layer: Layer) -> Places:
        matrix = torch.empty(layer.blocks, layer.g_dim, layer.a_dim, device="meta")
        like = [torch.empty_strided(p.shape, strides(p), device="meta") for p in layer.parameters]
        both = [
            [_View(x.shape, x.stride(), int(x.storage_offset())) for x in parts]
            for parts in (layer.matrix_parts(matrix), layer.parameter_parts(like))
        ]
        if all(view.size[:1] == (1,) for view in both[0]):
            both = [[view.of_one() for view in views] for views in both]
        return cls(*both)

    def of_block(self, layer: Layer) -> Places | None:
        """Return the places of one block; ``None`` unless parameters are blocks side by side.

        A layer may cover only a part of a parameter, or have its blocks in another order.
        """
        whole = zip(self.own, layer.parameters, strict=True)
        if any(view.offset or view.size.numel() != p.numel() for view, p in whole):
            return None
        if layer.blocks == 1:
            return self
        if any(view.stride[0] != view.size[1:].numel() for view in self.own):
            return None
        return Places(*([view.of_one() for view in views] for views in self))


class GradientStack:
    """Layers of one shape, whose gradients make one tensor ``[count, g, a]``."""

    def __init__(self, layers: list[Layer], places: Mapping[Layer, Places]) -> None:
        self.layers = layers
        self.blocks = [layer.blocks for layer in layers]
        g, a = stack_key(layers[0], "g"), stack_key(layers[0], "a")
        self.dtype, self.device = g.dtype, g.device
        self.shape = torch.Size((sum(self.blocks), g.size, a.size))
        self.parameters = [p for layer in layers for p in layer.parameters]
        self._layouts = [_View(p.shape, strides(p), 0) for p in self.parameters]
        self._strides = [view.stride for view in self._layouts]
        # Strides of dimensions of size 1 say nothing.
        self._contiguous = [
            torch.empty_strided(view.size, view.stride, device="meta").is_contiguous()
            for view in self._layouts
        ]
        starts = itertools.accumulate(self.blocks, initial=0)
        self._matrix = [
            view._replace(offset=view.offset + start * g.size * a.size)
            for layer, start in zip(layers, starts, strict=False)
            for view in places[layer].matrix
        ]
        self._own = [view for layer in layers for view in places[layer].own]
        self._are_whole = self._own == self._layouts  # each part is a whole parameter
        whole = iter([own == view for own, view in zip(self._own, self._layouts, strict=True)])
        # Whether each layer is one block, made of whole parameters.
        self.are_plain = [
            all([*itertools.islice(whole, len(layer.parameters))]) and layer.blocks == 1
            for layer in layers
        ]
        self.plain = [x.parameters for x in itertools.compress(layers, self.are_plain)]
        # One view for all blocks is as fast as the view of a single layer.
        of_block = places[layers[0]].of_block(layers[0])
        self._are_alike = of_block is not None and all(
            places[x].of_block(x) == of_block for x in layers
        )
        if of_block is not None:
            count, apart = sum(self.blocks), g.size * a.size
            self._matrix_of_each = [view.of_each(count, apart) for view in of_block.matrix]
            self._own_of_each = [view.of_each(count, view.size.numel()) for view in of_block.own]

    def collect(self, gradient_of: GradientOf) -> Tensor:
        """Return the layers' gradients as one tensor; a missing gradient is zero there."""
        raw = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        gradients: Any = [*map(gradient_of, self.parameters)]
        if any(map(operator.is_, gradients, itertools.repeat(None))):
            both = zip(gradients, self.parameters, strict=True)
            gradients = [torch.zeros_like(p) if x is None else x for x, p in both]
        parts = gradients if self._are_whole else self.parameter_parts(gradients)
        if not self._are_alike or len(self.layers) == 1:
            torch._foreach_copy_([raw.as_strided(*view) for view in self._matrix], parts)
            return raw
        # Join the parts of all layers first: then one copy brings them to their places.
        kinds = len(self._matrix_of_each)
        for i, view in enumerate(self._matrix_of_each):
            some = parts[i::kinds]
            if self.shape[0] == len(some):
                joined = torch.stack(some)
            else:
                counted = zip(some, self.blocks, strict=True)
                joined = torch.cat([x if count > 1 else x[None] for x, count in counted])
            raw.as_strided(*view).copy_(joined)
        return raw

    def matrix_parts(self, stacked: Tensor) -> list[Tensor]:
        """Return views of the stacked tensor, one for each parameter."""
        if self._are_alike:
            parts = [self._by_layer(view.of(stacked)) for view in self._matrix_of_each]
            return list(itertools.chain.from_iterable(zip(*parts, strict=True)))
        return [view.of(stacked) for view in self._matrix]

    def _by_layer(self, blocks: Tensor) -> Sequence[Tensor]:
        if len(blocks) == len(self.layers):
            return blocks.unbind()
        # Drop the dimension of a single block, as Places does.
        return [part[0] if len(part) == 1 else part for part in blocks.split(self.blocks)]

    def parameter_parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return views of tensors like the parameters, shaped like their part of the stack."""
        if self._are_whole:
            return tensors
        if set(map(type, tensors)) == {Tensor} and self._lie_alike(tensors):
            return [view.of(t) for view, t in zip(self._own, tensors, strict=True)]
        counts = [len(layer.parameters) for layer in self.layers]
        own = iter(tensors)
        parts = [
            part
            for layer, count in zip(self.layers, counts, strict=True)
            for part in layer.parameter_parts(list(itertools.islice(own, count)))
        ]
        both = zip(parts, self._own, strict=True)
        return [part if part.dim() == len(view.size) else part[0] for part, view in both]

    def _lie_alike(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the tensors lie in memory as the parameters did."""
        return [*map(_stride, tensors)] == self._strides or all(
            t.stride() == stride or (is_contiguous and t.is_contiguous())
            for t, stride, is_contiguous in zip(
                tensors, self._strides, self._contiguous, strict=True
            )
        )

    def copies(self, stacked: Tensor, like: list[Tensor]) -> list[Tensor] | None:
        """Return a copy of each parameter's part, shaped like it, or ``None``.

        It makes one call for each kind of parameter; ``None`` if the layouts do not allow that.
        """
        dtype = like[0].dtype
        plain = set(map(type, like)) <= _PLAIN and len(set(map(_dtype, like))) == 1
        if not (self._are_alike and plain):
            return None
        for tensors in (like, self.parameters):
            if [*map(_stride, tensors)] != self._strides and not self._lie_alike(tensors):
                return None
        result = list(like)
        kinds = len(self._own_of_each)
        for i, (there, here) in enumerate(
            zip(self._matrix_of_each, self._own_of_each, strict=True)
        ):
            room = torch.empty_strided(here.size, here.stride, dtype=dtype, device=like[i].device)
            start = stacked.storage_offset() + there.offset
            room.copy_(stacked.as_strided(there.size, there.stride, start))
            if self._are_whole:
                one_each = len(room) == len(self.layers)
                result[i::kinds] = room.unbind() if one_each else self._by_layer(room)
                continue
            layouts = self._layouts[i::kinds]  # the blocks of each layer lie side by side
            numbers = room.as_strided((room.numel(),), (1,))
            pieces = numbers.split([x.size.numel() for x in layouts])
            result[i::kinds] = [x.of(piece) for x, piece in zip(layouts, pieces, strict=True)]
        return result


class NewGradients(NamedTuple):
    """New gradients of the layers of a stack."""

    stack: GradientStack
    new: Tensor
    terms: Tensor  # numbers of each block, [blocks, count], of the clip or of the lengths

    @classmethod
    def awaited(cls, stack: GradientStack, terms: int) -> NewGradients:
        """Return room for gradients that another rank preconditions."""
        new = torch.empty(stack.shape, dtype=stack.dtype, device=stack.device)
        return cls(stack, new, new.new_empty(len(new), terms))

    def terms_of(self) -> dict[Layer, Tensor]:
        """Return each layer's terms, ``[blocks, count]``."""
        return dict(zip(self.stack.layers, self.terms.split(self.stack.blocks), strict=True))


def products(raw: Tensor, new: Tensor) -> Tensor:
    """Return the clip's terms, ``[blocks, 2]``: ⟨new, raw⟩, and ⟨new, raw⟩ of the last column.

    Both are multiplied by :data:`_SHARE`. ``raw`` is overwritten.
    """
    columns = raw.mul_(_SHARE).mul_(new).sum(1)
    return torch.stack([columns.sum(1), columns.select(1, -1)], 1)


def block_sums(stacks: list[GradientStack], tensor_of: GradientOf, *, squares: bool) -> Tensor:
    """Return the sums over each block, ``[blocks]``, of tensors like the stacks' parameters.

    ``squares``: of their squares. A tensor that is ``None`` counts as zero.
    """
    plain = [*itertools.chain.from_iterable([x.plain for x in stacks])] if squares else []
    norms = torch.empty(0, dtype=stacks[0].dtype, device=stacks[0].device)
    if plain:  # no copy is needed
        tensors = list(map(tensor_of, itertools.chain.from_iterable(plain)))
        norms = _square_sums(tensors, list(map(len, plain)), norms)
    if len(plain) == sum([len(stack.layers) for stack in stacks]):
        return norms
    # A layer's sum has the same bits in any stack, since each rank stacks its own layers.
    rows = iter(norms.split(1))
    found: list[Tensor] = []
    for stack in stacks:
        if squares and all(stack.are_plain):
            found += itertools.islice(rows, len(stack.layers))
            continue
        whole = stack.collect(tensor_of)
        sums = (whole.square_() if squares else whole).sum((1, 2))
        own = zip(stack.are_plain, sums.split(stack.blocks), strict=True)
        found += [next(rows) if squares and is_plain else row for is_plain, row in own]
    return torch.cat(found)


def _square_sums(tensors: list[Tensor | None], counts: list[int], like: Tensor) -> Tensor:
    """Return each layer's sum of squares, ``[layers]``; ``counts`` are of a layer's tensors."""
    found = [x for x in tensors if x is not None]
    each = [*torch._foreach_norm(found, 2, dtype=like.dtype)] if found else []
    zero, most = like.new_zeros(()), max(counts)
    if len(found) < len(tensors):
        norms = iter(each)
        each = [zero if x is None else next(norms) for x in tensors]
    if most == 1:
        return torch.stack(each).square_()
    if min(counts) < most:
        own = iter(each)
        each = [next(own) if i < count else zero for count in counts for i in range(most)]
    return torch.stack(each).square_().view(len(counts), most).sum(1)


# ---- new gradients on the wire ----


class Wire:
    """New gradients as they travel, in ``comm_dtype``."""

    def __init__(self, one: NewGradients, comm_dtype: torch.dtype | None) -> None:
        self.one = one
        self.new = one.new.to(comm_dtype or one.new.dtype)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.new, self.one.terms] if self.one.terms.numel() else [self.new]

    def unpack(self) -> NewGradients:
        """Return the received gradients; the sender uses the rounded ones, too: all ranks agree."""
        return self.one._replace(new=self.new.to(self.one.new.dtype))


# ---- all new gradients of a step ----


class Updates:
    """The new gradients of one step: stacks of whole gradients, and this rank's shards."""

    def __init__(self) -> None:
        self.stacks: list[NewGradients] = []
        self.shards: dict[Tensor, Tensor] = {}
        self.terms: dict[Layer, Tensor] = {}  # of sharded layers

    def clip(
        self, limit: float, alphas: list[Any], group_of: Mapping[Tensor, int]
    ) -> Tensor | None:
        """Scale all by ν = min(1, √(κ / |Σ α²⟨v, ∇⟩|)), and return ν; the host does not wait.

        ``alphas`` has the α of each parameter group. Terms, rows of :func:`products`, are added up
        in the layers' order, so that ν has the same bits on all ranks.
        """
        all_terms = dict(self.terms)
        for x in self.stacks:
            all_terms |= x.terms_of()
        if not all_terms:
            return None
        layers = sorted(all_terms, key=lambda layer: layer.number)
        terms = [x[0] if len(x) == 1 else x.sum(0) for x in map(all_terms.__getitem__, layers)]
        rows = torch.stack([row.to(terms[0].device) for row in terms])
        if not _are_same(alphas):  # leave out groups without covered parameters
            alphas_of = [[alphas[group_of[p]] for p in layer.parameters] for layer in layers]
            alphas = [*itertools.chain(*alphas_of)]
        if _are_same(alphas):
            total: Any = rows.select(1, 0).sum() * _squared(alphas[0])
        else:  # a layer's weight, and its bias, the last column, may have an α each
            total = sum(
                (row[0] - row[1]) * _squared(of_layer[0]) + row[1] * _squared(of_layer[-1])
                for of_layer, row in zip(alphas_of, rows, strict=True)
            )
        scale: Tensor = (limit * _SHARE / total.abs()).sqrt_().clamp_(max=1)
        for one in self.stacks:
            one.new.mul_(scale.to(one.new.device, one.new.dtype))
        for shard in map(local, self.shards.values()):
            shard.mul_(scale.to(shard.device, shard.dtype))
        return scale

    def all_terms(self) -> tuple[list[Layer], Tensor]:
        """Return the layers of stacks and of shards, in order, and their terms as one tensor."""
        layers = [x for one in self.stacks for x in one.stack.layers] + list(self.terms)
        terms = [one.terms for one in self.stacks] + list(self.terms.values())
        if len({part.device for part in terms}) > 1:
            terms = [part.to(terms[0].device) for part in terms]
        return layers, torch.cat(terms) if terms else torch.empty(0, 0, device="cpu")

    def scale(self, scales: Tensor, shards_of: ShardsOf) -> None:
        """Multiply each block by its scale, in the order of :meth:`all_terms`."""
        sizes = [len(one.new) for one in self.stacks] + [len(x) for x in self.terms.values()]
        parts = scales.split(sizes)
        for one, part in zip(self.stacks, parts, strict=False):
            one.new.mul_(part[:, None, None].to(one.new.device, one.new.dtype))
        for layer, part in zip(self.terms, parts[len(self.stacks) :], strict=True):
            for p, own in shards_of(layer, part.to(self.terms[layer].device)):
                local(self.shards[p]).mul_(own)

    def by_parameter(self, in_parts: Set[Tensor]) -> dict[Tensor, Tensor]:
        """Return new gradients for the parameters that have one.

        Parameters ``in_parts`` are covered by several layers, each by a part. A part whose layer is
        not among the stacks keeps its raw gradient.
        """
        new = unstack(self.stacks, in_parts)
        return new | {p: shard for p, shard in self.shards.items() if p.grad is not None}


def with_gradient(layers: Iterable[Layer]) -> list[bool]:
    """Return which layers have a gradient: of the weight, of the bias, or of both."""
    return [
        bool(own := layer.parameters) and (own[0].grad is not None or own[-1].grad is not None)
        for layer in layers
    ]


def unstack(
    stacks: list[NewGradients],
    in_parts: Set[Tensor] = frozenset(),
    gradient_of: GradientOf = own_gradient,
) -> dict[Tensor, Tensor]:
    """Return new gradients, shaped like their parameters."""
    new: dict[Tensor, Tensor] = {}
    targets, sources, absent = [], [], []
    for one in stacks:
        parameters, stacked = one.stack.parameters, one.new.contiguous()
        like: Any = [*map(gradient_of, parameters)]
        if any(map(operator.is_, like, itertools.repeat(None))):
            absent += [p for p, old in zip(parameters, like, strict=True) if old is None]
            like = [p if old is None else old for p, old in zip(parameters, like, strict=True)]
        whole = not in_parts or in_parts.isdisjoint(parameters)
        copies = one.stack.copies(stacked, like) if whole else None
        if copies is not None:
            new.update(zip(parameters, copies, strict=True))
            continue
        for p, gradient in zip(parameters, like, strict=True):
            if p in new:
                continue
            if p in in_parts:
                new[p] = gradient.clone()
            else:  # laid out as the parameter: other layouts may lack its views
                same = gradient.stride() == p.stride()
                layout = torch.preserve_format if same else torch.contiguous_format
                new[p] = torch.empty_like(gradient, memory_format=layout)
        targets += one.stack.parameter_parts([new[p] for p in parameters])
        sources += one.stack.matrix_parts(stacked)
    for dtype in dict.fromkeys(map(_dtype, targets)):
        # One call a dtype: before torch 2.11, CUDA took all targets for the first one's dtype.
        same = [(t, s) for t, s in zip(targets, sources, strict=True) if t.dtype == dtype]
        torch._foreach_copy_([t for t, _ in same], [s for _, s in same])
    for p in set(absent):
        del new[p]
    return new


def _squared(alpha: Any) -> Any:
    """Return α² as a scalar: only a scalar CPU tensor goes with tensors of other devices."""
    return alpha.reshape(()) ** 2 if isinstance(alpha, Tensor) else alpha**2


def _are_same(values: list[Any]) -> bool:
    """Compare without a comparison of tensors, which would wait for the device."""
    first, plain = values[0], not any(isinstance(value, Tensor) for value in values)
    return all(value is first or (plain and bool(value == first)) for value in values)
