"""Refreshes: owners decompose the running averages.

If a decomposition fails, the older state stays, and the layer's next refresh uses float64, and more
damping where the rule damps factors. On a GPU, no host waits for damped inverses and roots, where
there is an older state: all ranks learn of a failure in the next step's exchange.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..layers import Layer
from ..linalg.precision import full_precision
from ..linalg.roots import WITHOUT_DOUBLES
from ..plan.routes import chunks, grouped
from ..plan.step_plan import FAILED, REJECTED, RefreshReport, StepPlan
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
    device_of,
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
    """Carries out the refreshes of a plan on the factors that this rank owns."""

    def __init__(self, rule: Rule, *, keep_errors: bool) -> None:
        self._rule = rule
        self._keep_errors = keep_errors  # all ranks raise them together in the next exchange
        self._notes = Notes()

    def defers(self, layer: Layer) -> bool:
        """Return whether a layer's refresh is checked later; on CPUs, a check costs nothing."""
        return self.defers_on(device_of(layer))

    def defers_on(self, device: torch.device) -> bool:
        return self._rule.checks_later and device.type in WITH_STREAMS

    # ---- on owners ----

    def decompose(
        self,
        owned: Factors,
        applied: AppliedFactors,
        plan: StepPlan,
        shifts: dict[Key, Tensor],
    ) -> RefreshReport:
        """Renew the factors that this rank owns; all ranks call it alike.

        ``shifts`` is the damping of each factor's diagonal, if the rule damps factors.
        """
        report = RefreshReport()
        if not plan.refresh:
            return report
        with full_precision(), stage("decompose"):
            try:
                self._decompose(owned, applied, plan, shifts, report)
            except Exception as error:
                if not self._keep_errors:
                    raise
                report.error = error
        for stack in owned.stacks.values() if plan.attempt else ():
            self._notes.send(stack, stack.tensors["stale"])
        return report

    def _decompose(
        self,
        owned: Factors,
        applied: AppliedFactors,
        plan: StepPlan,
        shifts: dict[Key, Tensor],
        report: RefreshReport,
    ) -> None:
        for layer, nothing in _rejections(owned, {name for name, _ in plan.decompose}).items():
            report.rejected.add(layer)
            if nothing:
                report.empty.add(layer)
        mine = [f for f in owned.by_key.values() if f.layer.name not in report.empty]
        for names, attempts in ((plan.decompose, False), (plan.attempt, True)):
            due = grouped(
                [f for f in mine if f.name in names], lambda f: (f.key, f.layer.name in plan.again)
            )
            for (key, again), factors in due.items():
                at_once = _AT_ONCE_ON_CPUS if key.device.type == "cpu" else _AT_ONCE
                one = key.size if key.diagonal else key.size**2
                for some in chunks(factors, operator.attrgetter("layer.blocks"), at_once / one):
                    stack = owned.stacks[key]
                    how = {"attempts": attempts, "again": again}
                    report.failed |= self._renew(stack, some, applied, shifts, **how)

    def _renew(
        self,
        stack: FactorStack,
        factors: list[Factor],
        applied: AppliedFactors,
        shifts: dict[Key, Tensor],
        *,
        attempts: bool,
        again: bool,
    ) -> set[str]:
        """Decompose these factors; return the layers of factors that failed.

        With ``attempts``, the host learns of failures in the next step. ``again`` says that the
        last refresh failed.
        """
        own, slots = stack.tensors, slots_of(factors)
        average = own["average"][slots].to(stack.key.dtype)
        shift = torch.cat([shifts[f.layer, f.side] for f in factors]) if shifts else None
        if again:
            if stack.key.device.type not in WITHOUT_DOUBLES:
                average = average.double()
            shift = None if shift is None else _MORE_DAMPING * shift.to(average.dtype)
        solve, diagonal = self._rule.solve, stack.key.diagonal
        results, good = attempt(average, shift, solve, diagonal=diagonal)
        all_good = not attempts and bool(good.all())
        fine = None if all_good else good
        # An owner is a gradient worker, too. Diagonal factors have the first result alone.
        there = slots_of([applied.by_key[f.layer, f.side] for f in factors])
        state = applied.stacks[stack.key].tensors
        for spec, result in zip(self._rule.sizes.of_factor, results, strict=False):
            kept = state[spec.name]
            new = stored(result, kept.dtype)
            if fine is not None:
                new = torch.where(fine.view(-1, *[1] * (new.dim() - 1)), new, kept[there])
            kept[there] = new
        if attempts:  # flag factors with a rejected sum, too: the next decomposition names them
            flags = torch.where(own["rejected"][slots] > 0, REJECTED, 0)
            own["stale"][slots] = torch.where(good, flags, FAILED).int()
        elif self._rule.checks_later:
            own["stale"][slots] = 0
        if attempts or all_good:
            return set()
        parts = (~good).split([f.layer.blocks for f in factors])
        return {f.layer.name for f, part in zip(factors, parts, strict=True) if part.any()}

    # ---- answers in the next exchange ----

    def answers(self, owned: Factors, layers: Iterable[Layer]) -> list[float]:
        """Return this rank's flags of the factors of deferred layers, A and G of each.

        A flag of 1 says that sums of the factor were rejected: the next decomposition names them. A
        flag of 2 says that the decomposition failed. Factors of other owners have 0.
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
            answers.append(float(max(flags[stack][factor.slots])))
        return answers

    def forget_answers(self) -> None:
        self._notes.clear()


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


def _rejections(owned: Factors, names: set[str]) -> dict[str, bool]:
    """Return layers with sums that were not finite since their last refresh.

    ``True`` says that none of a factor's sums was finite. The host waits once if all were finite.
    """
    stacks = [
        stack
        for stack in owned.stacks.values()
        if not names.isdisjoint([factor.name[0] for factor in stack.factors])
    ]
    counts = [stack.tensors["rejected"] for stack in stacks]
    if not counts or not torch.stack([c.any().to(counts[0].device) for c in counts]).any():
        return {}
    found: dict[str, bool] = {}
    for stack in stacks:
        rejected = stack.tensors["rejected"].cpu() > 0
        nothing = rejected & (stack.tensors["weight"].cpu() == 0)
        for factor in stack.factors:
            name = factor.layer.name
            if name in names and rejected[factor.slots].any():
                found[name] = found.get(name, False) or bool(nothing[factor.slots].any())
                factor["rejected"].zero_()
    return found
