"""Second-order state: what a refresh makes of the running averages, and how it is applied."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import algebra
from .layers import Layer
from .stacks import Factor, Layout, Pair, Stack, joined, per_block, slots_of

LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
DampingOf = Callable[[Layer], float]


class SecondOrder:
    """Eigendecompositions or damped inverses of a layout's factors."""

    def __init__(
        self,
        *,
        method: str,
        split: str | None,
        stored_product: bool,
        dtype: torch.dtype | None,
        max_failures: int,
    ) -> None:
        self.method = method
        self.split = split
        self.stored_product = stored_product
        self.dtype = dtype
        self.max_failures = max_failures
        self.ready: set[Layer] = set()
        self.failures: dict[Layer, int] = {}  # in a row

    def allocate(self, layout: Layout) -> None:
        for stack in layout.stacks:
            dtype = self.dtype or stack.key.dtype
            if self.method == "inverse":
                stack.new("inverse", stack.shape, dtype)
                continue
            stack.new("values", stack.shape[:2], stack.key.dtype)
            if not stack.key.diagonal:
                stack.new("vectors", stack.shape, dtype)
        if self.stored_product:
            for pair in layout.pairs:
                pair.new("scale", pair.shape, self.dtype or pair.g.key.dtype)

    # ---- refresh ----

    def refresh(self, layout: Layout, due: list[Layer], damping_of: DampingOf) -> set[Layer]:
        """Decompose the factors of the layers in ``due``; a failure keeps the older state.

        Returned are layers that have no statistics after all: none of theirs was finite.
        """
        rejections = _rejections(layout, set(due))
        empty = {layer for layer, nothing in rejections.items() if nothing}
        wanted = set(due) - empty
        failed = set(empty)
        with algebra.full_precision():
            damping = self._split_damping(layout, wanted, damping_of)
            for stack in layout.stacks:
                factors = [f for f in stack.factors if f.layer in wanted]
                if factors:
                    failed |= self._refresh_stack(stack, factors, damping.get(stack))
        self.ready |= wanted - failed
        if self.stored_product:
            for layer in due:
                # Also where one factor failed: its older state goes with the other's new one.
                if layer in self.ready:
                    a, g = layout.factors[layer]
                    pair = layout.pair_of[layer]
                    product = algebra.outer_reciprocal(g["values"], a["values"], damping_of(layer))
                    pair.tensors["scale"][pair.slots[layer]] = _stored(product, self._store(pair.g))
        self._count(failed, wanted - failed)
        if rejections:
            names = ", ".join(repr(layer.name) for layer in due if layer in rejections)
            warnings.warn(
                f"statistics that were not finite have been left out for {names}", stacklevel=2
            )
        return empty

    def _store(self, stack: Stack) -> torch.dtype:
        return self.dtype or stack.key.dtype

    def _split_damping(
        self, layout: Layout, due: set[Layer], damping_of: DampingOf
    ) -> dict[Stack, Tensor]:
        """What to add to each slot's diagonal, for every stack; nothing for eigen."""
        if self.method != "inverse":
            return {}
        result = {
            s: torch.ones(s.count, dtype=s.key.dtype, device=s.key.device) for s in layout.stacks
        }
        for pair in layout.pairs:
            layers = [layer for layer in pair.layers if layer in due]
            if not layers:
                continue
            damping = per_block(pair.layers, damping_of, pair.g.key)
            if self.split == "full":
                on_a = on_g = damping
            else:
                means = [
                    algebra.mean_eigenvalue(
                        stack.tensors["average"][slots].to(stack.key.dtype),
                        diagonal=stack.key.diagonal,
                    )
                    for stack, slots in ((pair.a, pair.a_slots), (pair.g, pair.g_slots))
                ]
                on_a, on_g = algebra.split_damping(damping, *means)
            result[pair.a][pair.a_slots] = on_a
            result[pair.g][pair.g_slots] = on_g
        return result

    def _refresh_stack(
        self, stack: Stack, factors: list[Factor], damping: Tensor | None
    ) -> set[Layer]:
        """Refresh these factors; the layers of those that failed every attempt."""
        slots = slots_of(factors, stack)
        average = stack.tensors["average"][slots].to(stack.key.dtype)
        if stack.key.diagonal:
            if damping is None:
                stack.tensors["values"][slots] = average.clamp(min=0)
            else:
                inverse = 1 / (average + damping[slots][:, None])
                stack.tensors["inverse"][slots] = _stored(inverse, self._store(stack))
            return set()
        names = ("values", "vectors") if damping is None else ("inverse",)
        current = tuple(stack.tensors[name][slots] for name in names)
        shift = None if damping is None else damping[slots]
        results, good = _robustly(average, shift, current)
        for name, result in zip(names, results, strict=True):
            stack.tensors[name][slots] = _stored(result, stack.tensors[name].dtype)
        parts = good.split([f.layer.blocks for f in factors])
        return {f.layer for f, part in zip(factors, parts, strict=True) if not part.all()}

    def _count(self, failed: set[Layer], succeeded: set[Layer]) -> None:
        for layer in succeeded:
            self.failures.pop(layer, None)
        for layer in failed:
            count = self.failures[layer] = self.failures.get(layer, 0) + 1
            what = f"the decomposition of layer {layer.name!r} failed, {count} in a row"
            if count > self.max_failures:
                raise RuntimeError(
                    f"{what} (max_failures={self.max_failures}): its statistics are not finite or "
                    "too ill-conditioned; look for diverging activations, raise damping, store "
                    "factors in float32 or skip the layer with skip_layers"
                )
            kept = "its older state" if layer in self.ready else "its raw gradient"
            warnings.warn(f"{what}; {kept} stays in use", stacklevel=2)

    # ---- application ----

    def precondition(
        self, pair: Pair, gradient: Tensor, members: list[Layer], damping_of: DampingOf
    ) -> Tensor:
        """The preconditioned gradients of ``members``, stacked like ``gradient``."""
        dtype = gradient.dtype
        pick: slice | Tensor = slice(None)
        if len(members) < len(pair.layers):
            pick = joined([pair.slots[layer] for layer in members], gradient.device)

        def of(stack: Stack, slots: slice, name: str) -> Tensor | None:
            tensor = stack.tensors.get(name)
            return None if tensor is None else tensor[slots][pick].to(dtype)

        g, a = (pair.g, pair.g_slots), (pair.a, pair.a_slots)
        if self.method == "inverse":
            inverse_g, inverse_a = of(*g, "inverse"), of(*a, "inverse")
            assert inverse_g is not None and inverse_a is not None
            return algebra.apply_inverse(gradient, inverse_g, inverse_a)
        if self.stored_product:
            scale = pair.tensors["scale"][pick].to(dtype)
        else:
            values_g, values_a = of(*g, "values"), of(*a, "values")
            assert values_g is not None and values_a is not None
            scale = algebra.outer_reciprocal(
                values_g, values_a, _common_or_each(members, damping_of, pair)
            )
        return algebra.apply_eigen(gradient, of(*g, "vectors"), of(*a, "vectors"), scale)


def _common_or_each(members: list[Layer], damping_of: DampingOf, pair: Pair) -> Tensor | float:
    """The damping as a number where it is one for all, else for each block."""
    values = {damping_of(layer) for layer in members}
    if len(values) == 1:
        return values.pop()
    return per_block(members, damping_of, pair.g.key)[:, None, None]


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of storage; a finite number stays finite in half precision."""
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(tensor.dtype).max:
        tensor = tensor.clamp(-limit, limit)
    return tensor.to(dtype)


def _decompose(matrices: Tensor, damping: Tensor | None) -> tuple[Tensor, ...]:
    if damping is None:
        return algebra.eigendecompose(matrices)
    return (algebra.damped_inverse(matrices, damping),)


def _robustly(
    matrices: Tensor, damping: Tensor | None, current: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Decompose a batch; retry what fails, one by one, then keep ``current`` there.

    With the results come flags, on the host: which of the batch are new.
    """
    try:
        results = _decompose(matrices, damping)
        good = torch.stack([r.isfinite().flatten(1).all(1) for r in results]).all(0).cpu()
    except LinAlgError:
        results = tuple(c.to(matrices.dtype, copy=True) for c in current)
        good = torch.zeros(len(matrices), dtype=torch.bool, device="cpu")
    for i in good.logical_not().nonzero().flatten().tolist():
        shift = None if damping is None else damping[i : i + 1]
        for result, kept in zip(results, current, strict=True):
            result[i] = kept[i]
        for attempt in _attempts(matrices[i : i + 1], shift):
            if all(part.isfinite().all() for part in attempt):
                for result, part in zip(results, attempt, strict=True):
                    result[i] = part[0]
                good[i] = True
                break
    return results, good


def _attempts(matrix: Tensor, damping: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
    """Alone, in float64, with jitter on the diagonal, and on the CPU."""
    double = matrix.double()
    scale = double.diagonal(dim1=-2, dim2=-1).mean()
    jittered = double + 1e-8 * scale * torch.eye(matrix.shape[-1], device=matrix.device).double()
    for candidate in (matrix, double, jittered, jittered.cpu()):
        shift = None if damping is None else damping.to(candidate)
        try:
            yield _decompose(candidate, shift)
        except LinAlgError:
            continue


def _rejections(layout: Layout, due: set[Layer]) -> dict[Layer, bool]:
    """Layers with sums that were not finite since their last refresh; True: they have no others."""
    stacks = [s for s in layout.stacks if any(f.layer in due for f in s.factors)]
    counts = [stack.tensors["rejected"] for stack in stacks]
    if not torch.stack([count.any().to(counts[0].device) for count in counts]).any():
        return {}  # one look from the host, for all that is well
    found: dict[Layer, bool] = {}
    for stack in stacks:
        rejected = stack.tensors["rejected"].cpu() > 0
        nothing = rejected & (stack.tensors["weight"].cpu() == 0)
        for factor in stack.factors:
            if factor.layer in due and rejected[factor.slots].any():
                empty = bool(nothing[factor.slots].any())
                found[factor.layer] = found.get(factor.layer, False) or empty
                factor["rejected"].zero_()
    return found
