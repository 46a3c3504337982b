"""Rules: how running averages become state, and state turns gradients into new ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layers import Layer
from ..linalg import products
from ..linalg.products import FAR, FROM_FURTHER, TOWARDS_ONE
from ..plan.facts import Sizes, TensorSpec, Work
from .group import Group, StackKey, per_block
from .lengths import SHARD_SUMS, SQUARE_SUM, Length

DampingOf = Mapping[Layer, float]
GroupOf = Mapping[Layer, Group]
_ORTHONORMAL = 0.1  # far above the error of rounding to half precision


class Rule(ABC):
    """One way from running averages to new gradients; state lies in groups, and not in the rule."""

    # A new rule also needs a name among the values of compute_method, and a branch in make_rule;
    # another kind of tensor a name in account.KEPT, another decomposition one in tools.hardware.

    sizes: Sizes  # the tensors that it keeps and sends
    work: Work  # its operations, which plans price
    scale_free = False  # a scale of the loss changes nothing
    damps = True  # :meth:`solve` adds damping to the factors; else :meth:`apply` reads it
    quality = ""  # what :meth:`measure` returns; nothing: users get no such number
    largest = math.inf  # number in a state that is no fault
    makes_directions = False  # new gradients are directions of steps
    length: Length | None = None  # which gives these their length
    renews = False  # some tensors follow from new state, by :meth:`renew`

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype  # the dtype of storage; None: the arithmetic's dtype
        self.sizes = self.sizes._replace(stored=None if dtype is None else dtype.itemsize)
        # Whether all ranks multiply in bfloat16, as they agreed; None: one process decides alone.
        self.half_products: bool | None = None

    @abstractmethod
    def solve(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        """Return the state of factors, ``[k, n, n]`` or ``[k, n]``; ``damping`` is ``[k]``."""

    def renew(self, group_of: GroupOf, layers: Sequence[Layer], damping_of: DampingOf) -> None:
        """Form the tensors that follow from these layers' new state."""
        return None

    def measure(self, key: StackKey, average: Tensor, state: Tensor, damping: float) -> Tensor:
        """Return the quality of a factor's state, ``[blocks]``, on the device."""
        raise NotImplementedError

    def faults(self, spec: TensorSpec, tensor: Tensor) -> list[str]:
        """Return why loaded state can't be used: weights would turn NaN."""
        if spec not in self.sizes.of_factor:
            return []
        if not tensor.isfinite().all():
            return ["not finite"]
        if tensor.abs().max() > self.largest:
            return [f"larger than {self.largest:g}, as no root of a damped factor is"]
        if spec.shape == "basis":
            square = tensor.float().mT @ tensor.float()
            errors = square - torch.eye(square.shape[-1], device=square.device)
            if not errors.abs().max() <= _ORTHONORMAL:  # infinities of both signs make NaN
                return ["not orthonormal"]
        return []

    @abstractmethod
    def apply(self, group: Group, gradients: Tensor, damping_of: DampingOf) -> Tensor:
        """Return a group's new gradients, or directions, ``[k, g, a]``."""

    def lacks_half_products(self, devices: Iterable[torch.device]) -> bool:
        """Return whether products are asked for in bfloat16 that some device does not have."""
        asks = self.makes_directions or self.dtype == torch.bfloat16
        return asks and not all([products.multiplies_in_half(torch.float32, x) for x in devices])

    def in_half(self, key: StackKey) -> bool:
        """Return whether float32 stacks there are multiplied with bfloat16 in bfloat16."""
        if self.half_products is None:
            return products.multiplies_in_half(key.dtype, key.device)
        # Do as agreed, even if this rank's device has changed: weights must not drift apart.
        return self.half_products and key.dtype == torch.float32


def states(group: Group, name: str) -> list[Any]:
    """Return a group's tensors of G and of A for arithmetic with gradients; None: it has none."""
    pair = group.g.state.get(name), group.a.state.get(name)
    dtype = torch.bfloat16 if group.in_half else group.dtype
    return [x if x is None or x.dtype == dtype else x.to(group.dtype) for x in pair]


def stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the dtype of storage; finite numbers stay finite in half precision."""
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(tensor.dtype).max:
        tensor = tensor.clamp(-limit, limit)
    return tensor.to(dtype)


class CholeskyRule(Rule):
    """Multiply by damped inverses; ``split`` says how A and G share the damping."""

    sizes = Sizes((TensorSpec("inverse", "inverses"),), packed=True)
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
        g, a = states(group, "inverse")
        return products.between(g, gradients, a.mT if a.dim() == 3 else a)


class EigenRule(Rule):
    """Divide by the eigenvalues' product, with the current damping."""

    work = Work("eigenvectors", 2)
    values = TensorSpec("values", "eigenvalues", "spectrum", "own")
    sizes = Sizes((values, TensorSpec("vectors", "eigenvectors", "basis")))
    damps = False
    quality = "condition"

    def solve(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        return (factors.clamp(min=0),) if diagonal else products.eigendecompose(factors)

    def measure(self, key: StackKey, average: Tensor, state: Tensor, damping: float) -> Tensor:
        """Return condition numbers of a factor with the damping."""
        values = state.double() + damping
        return values.amax(1) / values.amin(1)

    def apply(self, group: Group, gradients: Tensor, damping_of: DampingOf) -> Tensor:
        g, a = states(group, "vectors")
        projected = products.between(None if g is None else g.mT, gradients, a)
        # Both factors may be diagonal. A division in place would overwrite what the clip compares.
        if projected is gradients:
            projected = gradients.clone()
        self._divide(group, projected, damping_of)
        return products.between(g, projected, None if a is None else a.mT)

    def _divide(self, group: Group, new: Tensor, damping_of: DampingOf) -> None:
        dampings = [damping_of[layer] for layer in group.layers]
        damping: Tensor | float = dampings[0]
        if len(set(dampings)) > 1:
            damping = per_block(group.layers, dampings, group.g.key)[:, None, None]
        g, a = states(group, "values")
        new.div_((g[:, :, None] * a[:, None, :]).add_(damping))


class StoredProductRule(EigenRule):
    """Multiply by 1 / (v_G v_Aᵀ + γ), formed at the refresh with the damping of that step."""

    renews = True
    scale = TensorSpec("scale", "eigenvalue_products", "gradient")
    sizes = EigenRule.sizes._replace(of_gradient=(scale,))

    def renew(self, group_of: GroupOf, layers: Sequence[Layer], damping_of: DampingOf) -> None:
        for layer in [x for x in layers if x in group_of and group_of[x].applied]:
            group = group_of[layer]
            slots, scale = group.slots[layer], group.tensors["scale"]
            a, g = (side.state["values"][slots] for side in group.sides)
            product = (g[:, :, None] * a[:, None, :]).add_(damping_of[layer])
            scale[slots] = stored(product.reciprocal_(), scale.dtype)

    def _divide(self, group: Group, new: Tensor, damping_of: DampingOf) -> None:
        new.mul_(group.tensors["scale"].to(new.dtype))


# The outer roots are αI + (1 - α) F̂^-½: this is near F̂^-⅛, and needs no root of its own.
_KEPT = 0.8


class PolarRule(Rule):
    """Keep a symmetric root of each factor; the base keeps the momentum."""

    sizes = Sizes((TensorSpec("root", "roots"),), (SQUARE_SUM,), packed=True, units=True)
    work = Work("roots", 2, lambda n: len(FROM_FURTHER if n > FAR else TOWARDS_ONE))
    scale_free = makes_directions = True
    quality = "residual"
    largest = 1e9  # entries of a root are at most 1 / √λ

    def __init__(self, dtype: torch.dtype | None, length: Length) -> None:
        super().__init__(dtype)
        self.length = length
        self.sizes = self.sizes._replace(of_gradient=length.specs, shard_sums=SHARD_SUMS)

    def solve(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        assert damping is not None
        root, good = products.inverse_root(factors, damping, diagonal=diagonal)
        return (root if diagonal else root.masked_fill_(~good[:, None, None], torch.nan),)

    def measure(self, key: StackKey, average: Tensor, state: Tensor, damping: float) -> Tensor:
        """Return the residuals of a root, with the average of now."""
        dampings = average.new_full((len(average),), damping)
        return products.residual(average, state, dampings, diagonal=key.diagonal)

    def apply(self, group: Group, gradients: Tensor, damping_of: DampingOf) -> Tensor:
        """Return the directions of these momenta, without their lengths."""
        g, a = group.g.state["root"], group.a.state["root"]
        left, right = g.to(gradients.dtype), a.to(gradients.dtype)
        # In full precision: a first gradient has few directions, and roots enlarge rounding errors
        # in all others. In bfloat16, KFACSGD's first 15 steps on digits took the loss from 9.1 to
        # 8.2, and not to 5.6.
        white = products.between(left, gradients, right.mT if a.dim() == 3 else right)
        orthogonal = products.orthogonalized(white, in_half=group.in_half)
        return products.softened(orthogonal, left, right, _KEPT).to(gradients.dtype)
