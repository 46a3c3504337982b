"""The contract of a rule."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...layers import Layer
from ...linalg import kronecker, moments, precision
from ...plan.facts import Sizes, TensorSpec, Work
from ..group import Group, Key, Side, StackKey, by_place, per_block
from ..group import stack_key as key_of
from ..lengths import Length

DampingOf = Callable[[Layer], float]
GroupOf = Mapping[Layer, Group]


class Rule(ABC):
    """One way from running averages to new gradients.

    A rule keeps no tensors: state lies in the stacks of the factors and in the layers' groups,
    under the names that the specs give.
    """

    sizes: Sizes  # the tensors that it keeps and sends
    work: Work  # its operations, which plans price
    scale_free = False  # a scale of the loss changes nothing
    quality = ""  # what :meth:`measure` returns; nothing: users get no such number
    slow_above = math.inf  # columns beyond which a decomposition holds a CPU up
    length: Length | None = None  # new gradients are steps' directions, of this length
    reads_damping = False  # new gradients go by the damping of their step
    wants_half_products = False  # some products are asked for in bfloat16, whatever the dtype

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype  # the dtype of storage; None: the arithmetic's dtype
        self.sizes = self.sizes._replace(stored=None if dtype is None else dtype.itemsize)
        # Whether all ranks multiply in bfloat16, as they agreed; None: one process decides alone.
        self.half_products: bool | None = None

    @property
    def makes_directions(self) -> bool:
        return self.length is not None

    # ---- state ----

    def faults(self, spec: TensorSpec, tensor: Tensor) -> Iterator[str]:
        """Yield why loaded state can't be used: weights would turn NaN."""
        if spec in self.sizes.of_factor and not tensor.isfinite().all():
            yield "not finite"

    def outgoing(self, side: Side, slots: slice) -> list[Tensor]:
        """Return the tensors that a factor's owner sends and the other gradient workers fill."""
        return [tensor[slots] for tensor in side.state.values()]

    def incoming(self, side: Side, slots: slice, tensors: list[Tensor]) -> None:
        """Store the tensors of :meth:`outgoing`; the owner does so, too."""
        return None

    def measure(self, key: StackKey, average: Tensor, state: Tensor, damping: float) -> Tensor:
        """Return the quality of a factor's state, ``[blocks]``, on the device."""
        raise NotImplementedError

    # ---- refresh ----

    def means(self, group_of: GroupOf, layers: Sequence[Layer]) -> list[Tensor]:
        """Return the mean eigenvalues that the owners of A and of G must tell each other."""
        return []

    def shifts(
        self, layers: Sequence[Layer], damping_of: DampingOf, means: list[Tensor]
    ) -> dict[Key, Tensor]:
        """Return the damping of each factor's diagonal, ``[blocks]``, from all ranks' means."""
        return {}

    @abstractmethod
    def solve(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        """Return the decomposition of a batch of factors; ``damping``, ``[k]``, is :meth:`shifts`.

        Diagonal factors, ``[k, n]``, have the first result alone; failed ones may be NaN.
        """

    def renew(self, group_of: GroupOf, layers: Sequence[Layer], damping_of: DampingOf) -> None:
        """Form the tensors that follow from these layers' new state."""
        return None

    # ---- application ----

    def precision(self, device: torch.device) -> AbstractContextManager[None]:
        """Return the context in which :meth:`apply` runs, for several stacks of a device."""
        return nullcontext()

    @abstractmethod
    def apply(self, group: Group, gradients: Tensor, damping_of: DampingOf) -> Tensor:
        """Return a group's new gradients, or directions, ``[k, g, a]``."""

    def lacks_half_products(self, devices: Iterable[torch.device]) -> bool:
        """Return whether products are asked for in bfloat16 that some device does not have."""
        if not (self.wants_half_products or self.dtype == torch.bfloat16):
            return False
        ones = [torch.empty(0, dtype=torch.float32, device=device) for device in devices]
        return not all(precision.multiplies_in_half(torch.bfloat16, one) for one in ones)

    def _states(self, group: Group, name: str, like: Tensor) -> tuple[Any, Any]:
        """Return a group's tensors of G and of A, ready for arithmetic with ``like``.

        ``None`` stands for a tensor that a diagonal factor does not have.
        """
        g, a = group.g.state.get(name), group.a.state.get(name)
        if g is not None and g.dtype != like.dtype and not self._in_half(g.dtype, like):
            g = g.to(like.dtype)
        if a is not None and a.dtype != like.dtype and not self._in_half(a.dtype, like):
            a = a.to(like.dtype)
        return g, a

    def _in_half(self, dtype: torch.dtype, like: Tensor) -> bool:
        if self.half_products is None:
            return precision.multiplies_in_half(dtype, like)
        # Do as agreed, even if this rank's device has changed: weights must not drift apart.
        return self.half_products and (dtype, like.dtype) == (torch.bfloat16, torch.float32)


class TriangleRule(Rule):
    """A rule whose state is one matrix a factor; it travels as a triangle."""

    def shifts(
        self, layers: Sequence[Layer], damping_of: DampingOf, means: list[Tensor]
    ) -> dict[Key, Tensor]:
        """Return the layers' damping for both of their factors, or split by ``means``."""
        shifts: dict[Key, Tensor] = {}
        for same, both in itertools.zip_longest(by_place(layers), means):
            damping = per_block(same, damping_of, key_of(same[0], "g"))
            split = (damping, damping) if both is None else kronecker.split_damping(damping, *both)
            for side, values in zip("ag", split, strict=True):
                parts = values.split([layer.blocks for layer in same])
                shifts |= {(x, side): part for x, part in zip(same, parts, strict=True)}
        return shifts

    def outgoing(self, side: Side, slots: slice) -> list[Tensor]:
        if side.key.diagonal:
            return super().outgoing(side, slots)
        return [moments.pack(side.state[self.sizes.of_factor[0].name][slots])]

    def incoming(self, side: Side, slots: slice, tensors: list[Tensor]) -> None:
        # The owner unpacks its own triangle, too, so that all ranks have the same bits.
        if not side.key.diagonal:
            whole = moments.unpack(tensors[0], side.key.size)
            side.state[self.sizes.of_factor[0].name][slots] = whole


def triangles(name: str, kind: str) -> Sizes:
    """Return what a :class:`TriangleRule` keeps."""
    return Sizes((TensorSpec(name, kind),), packed=True)


def stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the dtype of storage; finite numbers stay finite in half precision."""
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(tensor.dtype).max:
        tensor = tensor.clamp(-limit, limit)
    return tensor.to(dtype)
