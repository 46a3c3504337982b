"""Rules: how running averages become state, and state turns gradients into new ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layers import Layer
from ..linalg import moments, products
from ..linalg.products import FAR, FROM_FURTHER, TOWARDS_ONE
from ..plan.facts import Sizes, TensorSpec, Work
from .group import Group, Key, Side, StackKey, per_block
from .lengths import SHARD_SUMS, SQUARE_SUM, Length

DampingOf = Callable[[Layer], float]
GroupOf = Mapping[Layer, Group]
Reduce = Callable[[Tensor], Tensor] | None


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
    makes_directions = False  # new gradients are directions of steps
    length: Length | None = None  # which gives these their length
    renews = False  # some tensors follow from new state, by :meth:`renew`
    reads_damping = False  # new gradients go by the damping of their step
    wants_half_products = False  # some products are asked for in bfloat16, whatever the dtype

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype  # the dtype of storage; None: the arithmetic's dtype
        self.sizes = self.sizes._replace(stored=None if dtype is None else dtype.itemsize)
        # Whether all ranks multiply in bfloat16, as they agreed; None: one process decides alone.
        self.half_products: bool | None = None

    # ---- state ----

    def faults(self, spec: TensorSpec, tensor: Tensor) -> Iterator[str]:
        """Yield why loaded state can't be used: weights would turn NaN."""
        if spec in self.sizes.of_factor and not tensor.isfinite().all():
            yield "not finite"

    def outgoing(self, side: Side, slots: slice) -> list[Tensor]:
        """Return the tensors that a factor's owner sends and the other gradient workers fill."""
        state = [tensor[slots] for tensor in side.state.values()]
        is_packed = self.sizes.packed and not side.key.diagonal
        return [moments.pack(x) for x in state] if is_packed else state

    def incoming(self, side: Side, slots: slice, tensors: list[Tensor]) -> None:
        """Store the tensors of :meth:`outgoing`; the owner does so, too."""
        # The owner unpacks its own triangle, too, so that all ranks have the same bits.
        if self.sizes.packed and not side.key.diagonal:
            for state, tensor in zip(side.state.values(), tensors, strict=True):
                state[slots] = moments.unpack(tensor, side.key.size)

    def measure(self, key: StackKey, average: Tensor, state: Tensor, damping: float) -> Tensor:
        """Return the quality of a factor's state, ``[blocks]``, on the device."""
        raise NotImplementedError

    # ---- refresh ----

    def shifts(
        self, group_of: GroupOf, layers: Sequence[Layer], damping_of: DampingOf, reduce: Reduce
    ) -> dict[Key, Tensor]:
        """Return the damping of each factor's diagonal, ``[blocks]``.

        ``reduce`` adds mean eigenvalues up over the ranks, if owners lack those of other owners.
        """
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

    @abstractmethod
    def apply(self, group: Group, gradients: Tensor, damping_of: DampingOf) -> Tensor:
        """Return a group's new gradients, or directions, ``[k, g, a]``."""

    def lacks_half_products(self, devices: Iterable[torch.device]) -> bool:
        """Return whether products are asked for in bfloat16 that some device does not have."""
        if not (self.wants_half_products or self.dtype == torch.bfloat16):
            return False
        return not all(products.multiplies_in_half(torch.float32, device) for device in devices)

    def in_half(self, key: StackKey) -> bool:
        """Return whether float32 stacks there are multiplied with bfloat16 in bfloat16."""
        if self.half_products is None:
            return products.multiplies_in_half(key.dtype, key.device)
        # Do as agreed, even if this rank's device has changed: weights must not drift apart.
        return self.half_products and key.dtype == torch.float32

    def _states(self, group: Group, name: str) -> tuple[Any, Any]:
        """Return a group's tensors of G and of A, ready for arithmetic with its gradients.

        ``None`` stands for a tensor that a diagonal factor does not have.
        """
        g, a = group.g.state.get(name), group.a.state.get(name)
        halves = torch.bfloat16 if group.in_half else group.dtype
        if g is not None and g.dtype not in (group.dtype, halves):
            g = g.to(group.dtype)
        if a is not None and a.dtype not in (group.dtype, halves):
            a = a.to(group.dtype)
        return g, a


class TriangleRule(Rule):
    """A rule whose state is one matrix a factor, made with damping; it travels as a triangle."""

    def shifts(
        self, group_of: GroupOf, layers: Sequence[Layer], damping_of: DampingOf, reduce: Reduce
    ) -> dict[Key, Tensor]:
        """Return the layers' damping for both of their factors, or split by mean eigenvalues."""
        shifts: dict[Key, Tensor] = {}
        places: dict[Any, list[Layer]] = {}
        for layer in layers:
            places.setdefault(group_of[layer].g.key[2:], []).append(layer)
        for same in places.values():
            like, means = group_of[same[0]].g.key, []
            damping = per_block(same, damping_of, like)
            split = damping, damping
            if self.sizes.tells_means:
                for layer, side in [(x, group_of[x].sides[i]) for i in range(2) for x in same]:
                    if layer in side.owned:
                        average = side.averages["average"][side.owned[layer]].to(like.dtype)
                        values = average if side.key.diagonal else average.diagonal(0, 1, 2)
                        mean = values.mean(-1)
                    else:  # the owner adds it
                        mean = damping.new_zeros(layer.blocks)
                    means.append(mean)
                pair = torch.cat(means).view(2, -1)
                pair = pair if reduce is None else reduce(pair)
                split = products.split_damping(damping, *pair)
            for name, values in zip("ag", split, strict=True):
                parts = values.split([layer.blocks for layer in same])
                shifts |= {(x, name): part for x, part in zip(same, parts, strict=True)}
        return shifts


def triangles(name: str, kind: str) -> Sizes:
    """Return what a :class:`TriangleRule` keeps."""
    return Sizes((TensorSpec(name, kind),), packed=True)


def stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the dtype of storage; finite numbers stay finite in half precision."""
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(tensor.dtype).max:
        tensor = tensor.clamp(-limit, limit)
    return tensor.to(dtype)


class CholeskyRule(TriangleRule):
    """Multiply by damped inverses; ``split`` says how A and G share the damping."""

    sizes = triangles("inverse", "inverses")
    work = Work("inverses", 1)

    def __init__(self, dtype: torch.dtype | None, split: str) -> None:
        super().__init__(dtype)
        # "pi": γ_A γ_G = γ; "full": γ on both
        self.sizes = self.sizes._replace(tells_means=split == "pi")

    def solve(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        assert damping is not None
        if diagonal:
            return (1 / (factors + damping[:, None]),)
        return (products.damped_inverse(factors, damping),)

    def apply(self, group: Group, gradients: Tensor, damping_of: DampingOf) -> Tensor:
        g, a = self._states(group, "inverse")
        return products.between(g, gradients, a.mT if a.dim() == 3 else a)


_ORTHONORMAL = 0.1  # far above the error of rounding to half precision


class EigenRule(Rule):
    """Divide by the eigenvalues' product, with the current damping."""

    work = Work("eigenvectors", 2)
    sizes = Sizes(
        (
            TensorSpec("values", "eigenvalues", "spectrum", "own"),
            TensorSpec("vectors", "eigenvectors", "basis"),
        )
    )
    quality = "condition"
    reads_damping = True
    slow_above = 4096  # a core of a CPU then takes a quarter of a minute or more

    def faults(self, spec: TensorSpec, tensor: Tensor) -> Iterator[str]:
        found = [*super().faults(spec, tensor)]
        yield from found
        if spec.name == "vectors" and not found:
            wide = tensor.float()
            off = wide.mT @ wide - torch.eye(wide.shape[-1], device=wide.device)
            if not off.abs().max() <= _ORTHONORMAL:  # infinities of both signs make NaN
                yield "not orthonormal"

    def measure(self, key: StackKey, average: Tensor, state: Tensor, damping: float) -> Tensor:
        """Return condition numbers of a factor with the damping."""
        values = state.double() + damping
        return values.amax(1) / values.amin(1)

    def solve(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        return (factors.clamp(min=0),) if diagonal else products.eigendecompose(factors)

    def apply(self, group: Group, gradients: Tensor, damping_of: DampingOf) -> Tensor:
        g, a = self._states(group, "vectors")
        projected = products.between(None if g is None else g.mT, gradients, a)
        if projected is gradients:  # both factors are diagonal, and the caller needs the gradients
            projected = gradients.clone()
        self._divide(group, projected, damping_of)
        return products.between(g, projected, None if a is None else a.mT)

    def _divide(self, group: Group, new: Tensor, damping_of: DampingOf) -> None:
        values = {*map(damping_of, group.layers)}
        damping: Tensor | float = values.pop()
        if values:  # most often, all are alike
            damping = per_block(group.layers, damping_of, group.g.key)[:, None, None]
        g, a = self._states(group, "values")
        new.div_(products.damped_product(g, a, damping))


class StoredProductRule(EigenRule):
    """Multiply by 1 / (v_G v_Aᵀ + γ), formed at the refresh with the damping of that step."""

    renews = True
    sizes = EigenRule.sizes._replace(
        of_gradient=(TensorSpec("scale", "eigenvalue_products", "gradient"),)
    )

    def renew(self, group_of: GroupOf, layers: Sequence[Layer], damping_of: DampingOf) -> None:
        for layer in [x for x in layers if x in group_of and group_of[x].applied]:
            group = group_of[layer]
            slots = group.slots[layer]
            a, g = (side.state["values"][slots] for side in group.sides)
            product = products.damped_product(g, a, damping_of(layer))
            scale = group.tensors["scale"]
            scale[slots] = stored(product.reciprocal_(), scale.dtype)

    def _divide(self, group: Group, new: Tensor, damping_of: DampingOf) -> None:
        new.mul_(group.tensors["scale"].to(new.dtype))


# The outer roots are mixed with the identity: αI + (1 - α) F̂^-½. The mixture is near F̂^-⅛, and
# needs no root of its own.
_KEPT = 0.8

_LARGEST = 1e9  # in a root: its entries are at most 1 / √λ


class PolarRule(TriangleRule):
    """Keep a symmetric root of each factor; the base keeps the momentum."""

    sizes = triangles("root", "roots")._replace(of_gradient=(SQUARE_SUM,), units=True)
    work = Work("roots", 2, lambda n: len(FROM_FURTHER if n > FAR else TOWARDS_ONE))
    scale_free = makes_directions = True
    wants_half_products = True
    quality = "residual"

    def __init__(self, dtype: torch.dtype | None, length: Length) -> None:
        super().__init__(dtype)
        self.length = length
        self.sizes = self.sizes._replace(of_gradient=length.specs, shard_sums=SHARD_SUMS)

    def faults(self, spec: TensorSpec, tensor: Tensor) -> Iterator[str]:
        found = [*super().faults(spec, tensor)]
        yield from found
        if spec.name == "root" and not found and tensor.abs().max() > _LARGEST:
            yield f"larger than {_LARGEST:g}, as no root of a damped factor is"

    def measure(self, key: StackKey, average: Tensor, state: Tensor, damping: float) -> Tensor:
        """Return the residuals of a root, with the average of now."""
        shifts = average.new_full((len(average),), damping)
        return products.residual(average, state, shifts, diagonal=key.diagonal)

    def solve(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        assert damping is not None
        root, good = products.inverse_root(factors, damping, diagonal=diagonal)
        return (root if diagonal else root.masked_fill_(~good[:, None, None], torch.nan),)

    def apply(self, group: Group, gradients: Tensor, damping_of: DampingOf) -> Tensor:
        """Return the directions of these momenta, without their lengths."""
        g, a = group.g.state["root"], group.a.state["root"]
        left, right = g.to(gradients.dtype), a.to(gradients.dtype)
        # In full precision: a first gradient has few directions, and roots enlarge rounding errors
        # in all others. In bfloat16, KFACSGD's first 15 steps on digits took the loss from 9.1 to
        # 8.2, and not to 5.6.
        white = products.between(left, gradients, right.mT if a.dim() == 3 else right)
        found = products.orthogonalized(white, in_half=group.in_half)
        return products.softened(found, left, right, _KEPT).to(gradients.dtype)


RULES: tuple[type[Rule], ...] = (PolarRule, EigenRule, StoredProductRule, CholeskyRule)
