"""Refreshes: owners decompose the running averages; for roots and inverses no host waits.

If a decomposition fails, the older state stays, at first the identity, and the layer's next refresh
uses float64, and more damping where the rule damps factors. All ranks learn of a failure in the
next exchange.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..layers import Layer
from ..linalg.products import full_precision
from ..linalg.roots import WITHOUT_DOUBLES
from ..plan.routes import chunks, grouped
from ..plan.step_plan import EMPTY, FAILED, REJECTED
from ..stages import stage
from .group import WITH_STREAMS, Group, Key, Side, joined
from .notes import Notes
from .rules import Rule, stored

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
        groups: Sequence[Group],
        names: Collection[str],
        again: Collection[str],
        shifts: dict[Key, Tensor],
    ) -> None:
        """Renew the factors of the layers of these names that this rank owns.

        ``again`` are those whose last refresh failed. ``shifts`` is the damping of each factor's
        diagonal, if the rule damps factors.
        """
        factors = [(g, side, x) for g in groups for side in g.sides for x in side.owned]
        due = grouped(
            [x for x in factors if x[2].name in names], lambda x: (x[1].key, x[2].name in again)
        )
        with full_precision(), stage("decompose"):
            for (key, is_again), same in due.items():
                at_once = _AT_ONCE_ON_CPUS if key.device.type == "cpu" else _AT_ONCE
                one = key.size if key.diagonal else key.size**2
                for batch in chunks(same, lambda x: x[2].blocks, at_once / one):
                    parts = grouped(batch, lambda x: x[:2])
                    layers = {side: [x for *_, x in part] for (_, side), part in parts.items()}
                    self._renew([*parts], layers, shifts, again=is_again)
        for side in {side: None for same in due.values() for _, side, _ in same}:
            self._notes.send(side, side.averages["stale"])

    def _renew(
        self,
        parts: list[tuple[Group, Side]],
        layers: dict[Side, list[Layer]],
        shifts: dict[Key, Tensor],
        *,
        again: bool,
    ) -> None:
        """Decompose factors of one size; where that fails, their older state stays."""
        key = parts[0][1].key
        slots = [joined([s.owned[x] for x in layers[s]], key.device) for _, s in parts]
        sides = [side.averages for _, side in parts]

        def batch(name: str) -> Tensor:
            views = [own[name][at] for own, at in zip(sides, slots, strict=True)]
            return torch.cat(views) if len(views) > 1 else views[0]

        average, shift = batch("average").to(key.dtype), None
        if shifts:
            shift = torch.cat([shifts[x, side.name] for _, side in parts for x in layers[side]])
        if again:
            if key.device.type not in WITHOUT_DOUBLES:
                average = average.double()
            shift = None if shift is None else _MORE_DAMPING * shift.to(average.dtype)
        results, good = attempt(average, shift, self._rule.solve, diagonal=key.diagonal)
        weight, rejected = batch("weight"), batch("rejected")
        on_host = good.device.type not in WITH_STREAMS  # the host would wait for a device
        fine = on_host and bool(good.all()) and not rejected.any()
        counts = [sum(x.blocks for x in layers[side]) for _, side in parts]
        if not fine:
            empty = (weight == 0) & (rejected > 0)
            good &= ~empty
            flags = rejected.clamp(max=REJECTED) + FAILED * (~good).int() + EMPTY * empty.int()
            flags |= batch("stale")  # until they are told
            rejected = torch.where(empty, rejected, 0)
            for i, own in enumerate(sides):
                own["stale"][slots[i]] = flags.split(counts)[i]
                own["rejected"][slots[i]] = rejected.split(counts)[i]
        # An owner is a gradient worker, too. Diagonal factors have the first result alone.
        for spec, result in zip(self._rule.sizes.of_factor, results, strict=False):
            values = zip(parts, result.split(counts), good.split(counts), strict=True)
            for (group, side), new, is_good in values:
                state = side.state[spec.name]
                there = joined([group.slots[x] for x in layers[side]], key.device)
                new = stored(new, state.dtype)
                if not fine:
                    shape = -1, *[1] * (new.dim() - 1)
                    new = torch.where(is_good.view(shape), new, state[there])
                state[there] = new

    # ---- answers in the next exchange ----

    def answers(self, group_of: Mapping[Layer, Group], layers: Iterable[Layer]) -> list[float]:
        """Return this rank's flags of the factors of these layers, A and G of each.

        They add up: :data:`REJECTED`, :data:`FAILED` and :data:`EMPTY`. Factors of other owners
        have 0.
        """
        flags: dict[Side, list[int]] = {}
        answers = []
        for layer in layers:
            for side in group_of[layer].sides if layer in group_of else ():
                if layer in side.owned and side not in flags:
                    flags[side] = self._notes.read(side, side.averages["stale"])
                told = flags[side][side.owned[layer]] if layer in side.owned else [0]
                answers.append(float(functools.reduce(operator.or_, told)))
            answers += [] if layer in group_of else [0.0, 0.0]
        return answers

    def forget_answers(self, group_of: Mapping[Layer, Group], layers: Iterable[Layer] = ()) -> None:
        """Forget what was told of these layers, and what is on its way."""
        self._notes.clear()
        for layer in layers:
            for side in group_of[layer].sides if layer in group_of else ():
                if layer in side.owned:
                    side.averages["stale"][side.owned[layer]] = 0
                    side.averages["rejected"][side.owned[layer]] = 0


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
