"""Refreshes: owners decompose the running averages; for roots and inverses no host waits.

If a decomposition fails, the older state stays, at first the identity, and the layer's next refresh
uses float64, and more damping where the rule damps factors. All ranks learn of a failure in the
next exchange.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..layers import Layer
from ..linalg.precision import full_precision
from ..linalg.roots import WITHOUT_DOUBLES
from ..plan.routes import chunks, grouped
from ..plan.step_plan import EMPTY, FAILED, REJECTED, StepPlan
from ..stages import stage
from .notes import Notes
from .rules.base import Rule, stored
from .stacks import (
    WITH_STREAMS,
    AppliedFactors,
    Factor,
    Factors,
    FactorStack,
    Key,
    slots_of,
)

# Elements of the factors in one batch. On CPUs, larger batches only take memory. On other devices,
# they take fewer calls, and the host waits once for each batch that is decomposed.
_AT_ONCE_ON_CPUS = 1 << 20
_AT_ONCE = 1 << 24
_MORE_DAMPING = 3  # a multiple, after a failure
# Failures of cuSOLVER's algorithms come as plain errors, too; a lack of memory does not count.
_OF_CUSOLVER = re.compile(
    r"cusolver error: CUSOLVER_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)(?!.*cusolverDnCreate)", re.S
)
_Results = tuple[Tensor, ...]
_Solve = Callable[[Tensor, Tensor | None, bool], _Results]  # of factors, damping, and diagonal


class Refresher:
    """Decomposes the factors that this rank owns; a failure is told in the next exchange."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._notes = Notes()

    def decompose(
        self,
        owned: Factors,
        applied: AppliedFactors,
        plan: StepPlan,
        shifts: dict[Key, Tensor],
    ) -> None:
        """Renew the factors of the plan that this rank owns.

        ``shifts`` is the damping of each factor's diagonal, if the rule damps factors.
        """
        names = set(plan.refresh)
        due = grouped(
            [f for f in owned.by_key.values() if f.layer.name in names],
            lambda f: (f.key, f.layer.name in plan.again),
        )
        with full_precision(), stage("decompose"):
            for (key, again), factors in due.items():
                at_once = _AT_ONCE_ON_CPUS if key.device.type == "cpu" else _AT_ONCE
                one = key.size if key.diagonal else key.size**2
                for some in chunks(factors, operator.attrgetter("layer.blocks"), at_once / one):
                    self._renew(owned.stacks[key], some, applied, shifts, again=again)
        for stack in {owned.stacks[key]: None for key, _ in due}:
            self._notes.send(stack, stack.tensors["stale"])

    def _renew(
        self,
        stack: FactorStack,
        factors: list[Factor],
        applied: AppliedFactors,
        shifts: dict[Key, Tensor],
        *,
        again: bool,
    ) -> None:
        """Decompose these factors; where that fails, their older state stays.

        ``again`` says that the last refresh failed.
        """
        own, slots = stack.tensors, slots_of(factors)
        average = own["average"][slots].to(stack.key.dtype)
        shift = torch.cat([shifts[f.layer, f.side] for f in factors]) if shifts else None
        if again:
            if stack.key.device.type not in WITHOUT_DOUBLES:
                average = average.double()
            shift = None if shift is None else _MORE_DAMPING * shift.to(average.dtype)
        results, good = attempt(average, shift, self._rule.solve, diagonal=stack.key.diagonal)
        weight, rejected = own["weight"][slots], own["rejected"][slots]
        on_host = good.device.type not in WITH_STREAMS  # the host would wait for a device
        fine = on_host and bool(good.all()) and not rejected.any()
        if not fine:
            empty = (weight == 0) & (rejected > 0)
            good &= ~empty
            flags = rejected.clamp(max=REJECTED) + FAILED * (~good).int() + EMPTY * empty.int()
            own["stale"][slots] = own["stale"][slots] | flags  # until they are told
            own["rejected"][slots] = torch.where(empty, rejected, 0)
        # An owner is a gradient worker, too. Diagonal factors have the first result alone.
        there = slots_of([applied.by_key[f.layer, f.side] for f in factors])
        state = applied.stacks[stack.key].tensors
        for spec, result in zip(self._rule.sizes.of_factor, results, strict=False):
            kept = state[spec.name]
            new = stored(result, kept.dtype)
            if not fine:
                new = torch.where(good.view(-1, *[1] * (new.dim() - 1)), new, kept[there])
            kept[there] = new

    # ---- answers in the next exchange ----

    def answers(self, owned: Factors, layers: Iterable[Layer]) -> list[float]:
        """Return this rank's flags of the factors of these layers, A and G of each.

        They add up: :data:`REJECTED`, :data:`FAILED` and :data:`EMPTY`. Factors of other owners
        have 0.
        """
        flags: dict[FactorStack, list[int]] = {}
        answers = []
        for key in [(layer, side) for layer in layers for side in "ag"]:
            factor = owned.by_key.get(key)
            if factor is None:
                answers.append(0.0)
                continue
            stack = owned.stacks[factor.key]
            if stack not in flags:
                flags[stack] = self._notes.read(stack, stack.tensors["stale"])
            answers.append(float(functools.reduce(operator.or_, flags[stack][factor.slots])))
        return answers

    def forget_answers(self, owned: Factors, layers: Iterable[Layer] = ()) -> None:
        """Forget what was told of these layers, and what is on its way."""
        self._notes.clear()
        for key in [(layer, side) for layer in layers for side in "ag"]:
            if key in owned.by_key:
                owned.by_key[key]["stale"].zero_()
                owned.by_key[key]["rejected"].zero_()


def attempt(
    factors: Tensor, damping: Tensor | None, solve: _Solve, *, diagonal: bool
) -> tuple[_Results, Tensor]:
    """Decompose a batch; return the results and a flag of success for each, on the device.

    If a solver raises, the factors are decomposed one by one: it stops at one factor for all.
    """
    try:
        results = solve(factors, damping, diagonal)
    except RuntimeError as error:
        of_solver = isinstance(error, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
        if not of_solver and not _OF_CUSOLVER.match(str(error)):
            raise
        results = (torch.full_like(factors, torch.nan),)
        if damping is None:
            results = torch.full_like(factors[..., 0], torch.nan), *results
        for i in range(len(factors)) if len(factors) > 1 else ():
            shift = None if damping is None else damping[i : i + 1]
            single, _ = attempt(factors[i : i + 1], shift, solve, diagonal=diagonal)
            for result, part in zip(results, single, strict=True):
                result[i] = part[0]
    if diagonal:
        return results, (factors.isfinite() & results[0].isfinite()).all(1)
    return results, torch.stack([r.isfinite().flatten(1).all(1) for r in results]).all(0)
