"""Refreshes: owners decompose the running averages; for roots and inverses no host waits.

If a decomposition fails, the older state stays, and the layer's next refresh uses float64, and more
damping where the rule damps factors. All ranks learn of a failure in the next exchange.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layers import Layer
from ..linalg.products import WITHOUT_DOUBLES, full_precision, split_damping
from .group import WITH_STREAMS, Group, Key, Side, StackKey, per_block
from .rules import DampingOf, GroupOf, Rule, stored

# Flags of refreshed factors: sums were left out; the decomposition failed; no sum was finite.
REJECTED, FAILED, EMPTY = 1, 2, 4
# Elements of the factors in one batch. On CPUs, larger batches only take memory. On other devices,
# they take fewer calls, and the host waits once for each batch that is decomposed.
_AT_ONCE_ON_CPUS = 1 << 20
_AT_ONCE = 1 << 24
_MORE_DAMPING = 3  # a multiple, after a failure
# Failures of cuSOLVER's algorithms come as plain errors, too; a lack of memory does not count.
_OF_CUSOLVER = re.compile(
    r"cusolver error: CUSOLVER_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)(?!.*cusolverDnCreate)", re.S
)
Layers = Collection[Layer]
Reduce = Callable[[Tensor], Tensor] | None
Note = tuple[Tensor, Any]  # numbers, and the event of their arrival on the host, if there is one
_Factor = tuple[Group, Side, Layer]
_Results = tuple[Tensor, ...]


class Refresher:
    """Decomposes the factors that this rank owns; a failure is told in the next exchange."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.notes: dict[Side, Note] = {}  # flags on their way to the host

    def shifts(
        self, group_of: GroupOf, layers: Sequence[Layer], damping_of: DampingOf, reduce: Reduce
    ) -> dict[Key, Tensor]:
        """Return factors' dampings, ``[blocks]``; ``reduce`` adds up means that owners lack."""
        shifts: dict[Key, Tensor] = {}
        places: dict[Any, list[Layer]] = {}
        for layer in layers if self._rule.damps else ():
            places.setdefault(group_of[layer].g.key[2:], []).append(layer)
        for same in places.values():
            dampings = per_block(same, [damping_of[x] for x in same], group_of[same[0]].g.key)
            of_a = of_g = dampings
            counts = [layer.blocks for layer in same]
            if self._rule.sizes.tells_means:
                means = dampings.new_zeros(2, len(dampings))  # others add those that they own
                for layer, pair in zip(same, means.split(counts, 1), strict=True):
                    for mean, side in zip(pair, group_of[layer].sides, strict=True):
                        if layer in side.owned:
                            average = side.averages["average"][side.owned[layer]].to(mean.dtype)
                            values = average if side.key.diagonal else average.diagonal(0, 1, 2)
                            mean.copy_(values.mean(-1))
                means = means if reduce is None else reduce(means)
                of_a, of_g = split_damping(dampings, means[0], means[1])
            for layer, a, g in zip(same, of_a.split(counts), of_g.split(counts), strict=True):
                shifts[layer, "a"], shifts[layer, "g"] = a, g
        return shifts

    def decompose(
        self, groups: Iterable[Group], layers: Layers, again: Layers, shifts: dict[Key, Tensor]
    ) -> None:
        """Renew this rank's factors of these layers, ``again`` if their last refresh failed."""
        due: dict[tuple[StackKey, bool], list[_Factor]] = {}
        sides: dict[Side, None] = {}
        for group in groups:
            for side in group.sides:
                for layer in side.owned:
                    if layer in layers:
                        due.setdefault((side.key, layer in again), []).append((group, side, layer))
                        sides[side] = None
        with full_precision():
            for (key, is_again), same in due.items():
                at_once = _AT_ONCE_ON_CPUS if key.device.type == "cpu" else _AT_ONCE
                single = key.size if key.diagonal else key.size**2
                count = max(1, at_once // (single * max([x.blocks for *_, x in same])))
                for start in range(0, len(same), count):
                    self._renew(same[start : start + count], shifts, again=is_again)
        for side in sides:
            flags = side.averages["stale"]
            self.notes[side] = (flags, None) if flags.is_cpu else noted(flags)

    def _renew(self, batch: list[_Factor], shifts: dict[Key, Tensor], *, again: bool) -> None:
        key, blocks = batch[0][1].key, [layer.blocks for *_, layer in batch]
        views: dict[str, list[Tensor]] = {}
        for name in ("average", "weight", "rejected", "stale"):
            views[name] = [side.averages[name][side.owned[layer]] for _, side, layer in batch]
        # A single factor may be too large for a copy: no solver may write into its argument.
        average = views["average"][0] if len(batch) == 1 else torch.cat(views["average"])
        average, shift = average.to(key.dtype), None
        if shifts:
            shift = torch.cat([shifts[layer, side.name] for _, side, layer in batch])
        if again:
            if key.device.type not in WITHOUT_DOUBLES:
                average = average.double()
            shift = None if shift is None else _MORE_DAMPING * shift.to(average.dtype)
        results, good = attempt(average, shift, self._rule.solve, diagonal=key.diagonal)
        rejected = torch.cat(views["rejected"])
        # Only where the host need not wait for a device is it asked whether anything failed. Else
        # the results are mixed with the older state, block by block, whatever the flags say.
        on_host = good.device.type not in WITH_STREAMS
        fine = on_host and bool(good.all()) and not rejected.any()
        if not fine:
            empty = (torch.cat(views["weight"]) == 0) & (rejected > 0)
            good &= ~empty
            flags = rejected.clamp(max=REJECTED) + FAILED * (~good).int() + EMPTY * empty.int()
            flags |= torch.cat(views["stale"])  # until they are told
            torch._foreach_copy_(views["stale"], list(flags.split(blocks)))
            rejected = torch.where(empty, rejected, 0)
            torch._foreach_copy_(views["rejected"], list(rejected.split(blocks)))
        # An owner is a gradient worker, too. Diagonal factors have the first result alone.
        for spec, result in zip(self._rule.sizes.of_factor, results, strict=False):
            states = [side.state[spec.name][group.slots[layer]] for group, side, layer in batch]
            dtype = states[0].dtype
            new = result if result.dtype == dtype else stored(result, dtype)
            if not fine:
                is_good = good.view(-1, *[1] * (new.dim() - 1))
                new = torch.where(is_good, new, torch.cat(states))
            torch._foreach_copy_(states, list(new.split(blocks)))

    def answers(self, group_of: GroupOf, layers: Iterable[Layer]) -> list[float]:
        """Return this rank's flags of A and of G of these layers; 0 of other owners' factors."""
        flags: dict[Side, list[int]] = {}
        answers: list[float] = []
        for layer in layers:
            told = [0, 0]
            sides = group_of[layer].sides if layer in group_of else ()  # a frozen layer has none
            for i, side in enumerate(sides):
                if layer in side.owned:
                    if side not in flags:
                        flags[side] = read(self.notes.pop(side, (side.averages["stale"], None)))
                    for flag in flags[side][side.owned[layer]]:
                        told[i] |= flag
            answers += told
        return answers

    def drop_flags(self, group_of: GroupOf, layers: Iterable[Layer]) -> None:
        """Drop the flags of these layers, once they were told."""
        for layer in [x for x in layers if x in group_of]:
            for side in [x for x in group_of[layer].sides if layer in x.owned]:
                side.averages["stale"][side.owned[layer]] = 0
                side.averages["rejected"][side.owned[layer]] = 0


def noted(numbers: Tensor) -> Note:
    """Send a few numbers to the host, while the next work goes on, from devices that can."""
    if numbers.device.type not in WITH_STREAMS:
        return numbers, None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    return host, torch.cuda.current_stream(numbers.device).record_event()


def read(note: Note) -> list[Any]:
    """Return noted numbers; wait for numbers that were not sent."""
    numbers, arrival = note
    if arrival is not None:
        arrival.synchronize()
    return numbers.cpu().tolist()


def attempt(
    factors: Tensor, damping: Tensor | None, solve: Callable[..., _Results], *, diagonal: bool
) -> tuple[_Results, Tensor]:
    """Decompose a batch; return the results and a flag of success for each, on the device."""
    try:
        results = solve(factors, damping, diagonal)
    except RuntimeError as error:
        of_solver = isinstance(error, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
        if not of_solver and not _OF_CUSOLVER.match(str(error)):
            raise
        nan = torch.full_like(factors, torch.nan)
        # A solver stops at one factor for all: decompose them one by one. Rules without damping
        # have eigenvalues before the eigenvectors.
        results = (nan,) if damping is not None else (nan[..., 0].clone(), nan)
        for i in range(len(factors)) if len(factors) > 1 else ():
            shift = None if damping is None else damping[i : i + 1]
            single, _ = attempt(factors[i : i + 1], shift, solve, diagonal=diagonal)
            for result, part in zip(results, single, strict=True):
                result[i] = part[0]
    if diagonal:
        return results, (factors.isfinite() & results[0].isfinite()).all(1)
    return results, torch.stack([r.isfinite().flatten(1).all(1) for r in results]).all(0)
