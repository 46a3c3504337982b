"""From moments to running averages: counts, K, normalization, bias correction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .algebra import full_precision
from .capture import Run
from .layers import Layer, Moments
from .stacks import Factor, Layout, Stack, slots_of


class Gathered:
    """One layer's sums since the last step."""

    def __init__(self, covers: tuple[bool, bool], blocks: int) -> None:
        self.covers = covers
        self.a: Tensor | None = None
        self.g: Tensor | None = None
        # Of rows, for each block; of passes under the papers' normalization.
        self.count = torch.zeros(blocks, dtype=torch.float64, device="cpu")
        self.runs: set[Run] = set()

    def add(self, moments: Moments, count: float) -> None:
        whole = moments.blocks == slice(None)
        self.a = _add(self.a, moments.a, len(self.count), moments.blocks, whole)
        self.g = _add(self.g, moments.g, len(self.count), moments.blocks, whole)
        self.count[moments.blocks] += count

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.a, self.g) if t is not None)


def _add(total: Tensor | None, term: Tensor, blocks: int, at: slice, whole: bool) -> Tensor:
    if whole and total is None:
        return term
    if total is None:
        total = term.new_zeros(blocks, *term.shape[1:])
    elif total.shape[0] < blocks and not whole:
        total = total.expand(blocks, *total.shape[1:]).clone()
    # Replicas of DataParallel send their sums from other devices.
    total[at].add_(term.to(total.device))
    return total


class Statistics:
    """Sums of the passes since the last step, and the running averages that they feed."""

    def __init__(self, *, papers: bool, loss_reduction: str, factor_dtype: torch.dtype | None):
        self.papers = papers
        self.loss_reduction = loss_reduction
        self.factor_dtype = factor_dtype
        self.loss_terms: str | float = "examples"
        self.loss_scale: Callable[[], Tensor | float] | None = None
        self.gathered: dict[Layer, Gathered] = {}

    # ---- within a step ----

    def add(self, layer: Layer, run: Run, covers: tuple[bool, bool], moments: Moments) -> None:
        gathered = self.gathered.get(layer)
        if gathered is None or gathered.covers != covers:
            gathered = self.gathered[layer] = Gathered(covers, layer.blocks)
        if moments.rows == 0:
            return  # an empty batch says nothing
        if self.loss_scale is not None:
            scale = self.loss_scale()
            if isinstance(scale, Tensor):
                scale = scale.to(moments.g.device)
            moments.g.div_(scale).div_(scale)
        count: float = moments.rows
        if self.papers:
            # Each pass is a covariance of rows over the positions; passes are then averaged.
            share = moments.rows * (moments.positions**2 if layer.divided_by_positions else 1)
            moments.a.div_(share)
            moments.g.div_(share)
            count = 1.0
        gathered.add(moments, count)
        gathered.runs.add(run)

    def drop(self, layer: Layer) -> None:
        self.gathered.pop(layer, None)

    def clear(self) -> None:
        self.gathered.clear()

    def pending_bytes(self) -> int:
        return sum(gathered.bytes() for gathered in self.gathered.values())

    def terms(self) -> float:
        """K: how many terms the loss of this step averages, for all layers alike."""
        if self.loss_reduction == "sum":
            return 1.0
        if not isinstance(self.loss_terms, str):
            return self.loss_terms
        runs: set[Run] = set().union(*(gathered.runs for gathered in self.gathered.values()))
        return float(sum(getattr(run, self.loss_terms) for run in runs))

    # ---- at a step ----

    def allocate(self, stack: Stack) -> None:
        average = stack.new("average", stack.shape, self.factor_dtype or stack.key.dtype)
        weight = stack.new("weight", (stack.count,), stack.key.dtype)
        stack.new("rejected", (stack.count,), torch.int32)
        if self.papers:
            # No bias correction there: averages start at the identity, at full weight.
            weight.fill_(1.0)
            (average if stack.key.diagonal else average.diagonal(dim1=-2, dim2=-1)).fill_(1.0)

    def update(self, layout: Layout, decay_of: Callable[[Layer], float]) -> list[Layer]:
        """Take the gathered sums into the running averages; the layers that had any."""
        fed = [layer for layer, gathered in self.gathered.items() if gathered.a is not None]
        if fed:
            terms = self.terms()
            with full_precision():
                for stack in layout.stacks:
                    factors = [f for f in stack.factors if f.layer in self.gathered]
                    factors = [f for f in factors if self.gathered[f.layer].a is not None]
                    if factors:
                        self._update_stack(stack, factors, decay_of, terms)
        self.clear()
        return fed

    def _update_stack(
        self,
        stack: Stack,
        factors: list[Factor],
        decay_of: Callable[[Layer], float],
        terms: float,
    ) -> None:
        sums, scales, decays, present = [], [], [], []
        for factor in factors:
            gathered, blocks = self.gathered[factor.layer], factor.layer.blocks
            total = gathered.a if factor.side == "a" else gathered.g
            assert total is not None
            sums.append(total.expand(blocks, *total.shape[1:]))
            by_count = self.papers or factor.side == "a"
            count = gathered.count
            scales.append(1 / count.clamp(min=1) if by_count else torch.full_like(count, terms))
            decays.append(torch.full_like(count, decay_of(factor.layer)))
            present.append((count > 0).to(count.dtype))
        new = torch.cat(sums) if len(sums) > 1 else sums[0].contiguous()
        device, dtype = stack.key.device, stack.key.dtype
        numbers = torch.stack([torch.cat(column) for column in (scales, decays, present)])
        scale, decay, given = numbers.to(device, dtype, non_blocking=True)
        matrix = (slice(None), *(None,) * (new.dim() - 1))
        new.mul_(scale[matrix])
        # A sum that is not finite must not stay in an average for ever: the slot keeps its value.
        trace = (new if stack.key.diagonal else new.diagonal(dim1=-2, dim2=-1)).sum(-1)
        finite = trace.isfinite()
        new.masked_fill_(~finite[matrix], 0)
        slots = slots_of(factors, stack)
        average, weight, rejected = (stack.tensors[k] for k in ("average", "weight", "rejected"))
        old = weight[slots]
        # The first value is taken as it is, also by a decay of 1, which then keeps it.
        first = (old == 0) & (decay == 1)
        grown = torch.where(first, 1, decay * old + (1 - decay))
        step = torch.where(first, 1, (1 - decay) / grown)
        taken = finite & (given > 0)
        grown, step = torch.where(taken, grown, old), torch.where(taken, step, 0)[matrix]
        if isinstance(slots, slice) and average.dtype == dtype:
            average[slots].lerp_(new, step)
        else:
            average[slots] = average[slots].to(dtype).lerp(new, step).to(average.dtype)
        weight[slots] = grown
        rejected[slots] += (~finite).int()
