"""``plan``: every strategy's memory, traffic and time for a model, before any rank is started."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from torch import nn

from ..errors import invalid
from ..model import unwrapped
from ..optimizer import KFACAdam, KFACMixin
from ..options import AUTO, check
from ..plan.assignment import make_grid
from . import hardware
from .choice import Candidate, Choice, Priced, candidates, price
from .passes import passes_of
from .survey import survey
from .texts import aligned, digits, milliseconds, shown


def plan(
    model: nn.Module,
    world_size: int,
    memory_budget: int | float | str | None = None,
    *,
    optimizer: type[KFACMixin] = KFACAdam,
    batch: Any = None,
    device: str = "h100",
    **options: Any,
) -> Plan:
    """Return a plan of all strategies for a model on so many ranks; no process group is needed.

    The model may be on the meta device, and is not changed. ``memory_budget`` is what one rank may
    use, as the optimizer's option of that name, or a share of the device's memory; None: all of
    it. ``batch`` is one rank's input, on any device; without it, passes and statistics are not
    priced. ``device`` is the name of a hardware profile, or a TOML file. ``options`` are the
    optimizer's own; an assignment among them is the only one that is priced.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, KFACMixin)):
        must = "it must be a K-FAC class, such as KFACAdam or with_kfac(torch.optim.RAdam)"
        raise invalid("optimizer", optimizer, must)
    profile = hardware.load(device)
    budget = check("memory_budget", memory_budget) or 1.0
    budget = int(profile.memory * budget) if isinstance(budget, float) else budget
    names = "assignment", "grad_worker_fraction"
    asked = {name: options[name] for name in names if options.get(name) is not None}
    if not asked:
        options["grad_worker_fraction"] = AUTO  # the default is a strategy like the others
    title = optimizer.__name__
    without = type(title, (optimizer,), {"_start": lambda self: None})  # the preconditioner
    instance: Any = without(model, **options)
    settled = instance._kfac_options
    case, registry = survey(instance)
    if batch is not None:
        fraction = settled.statistics_fraction
        fraction = fraction(0) if callable(fraction) else fraction
        net, layers = unwrapped(instance._kfac_model), registry.layers.values()
        case = replace(case, passes=passes_of(net, batch, layers, fraction))
    among = candidates(world_size, case.colocate)
    if settled.grad_worker_fraction != AUTO:
        make_grid(settled.strategy, world_size, settled.grad_worker_fraction)
        among = [Candidate(", ".join(map(str, asked.values())), settled.strategy, asked)]
    priced = [price(case, x, world_size, profile) for x in among]
    return Plan(case, profile, world_size, budget, priced, title)


@dataclass(frozen=True)
class Plan(Choice):
    """Strategies side by side; its ``repr`` is a table."""

    optimizer: str

    @property
    def basis(self) -> str:
        """The kind of the times: estimates, and the share by which they may err."""
        return f"estimated within {100 * self.hardware.margin:.0f} %"

    @property
    def breakdown(self) -> dict[str, dict[str, float]]:
        """Bytes on the fullest rank, bytes that arrive in a step, and seconds, of the best."""
        chosen, case = self.best or self.nearest, self.case
        account = case.account(chosen.candidate.strategy, self.world)
        totals = list(map(sum, zip(chosen.kfac, chosen.momenta, strict=True)))
        fullest = totals.index(max(totals))
        kinds = {f"K-FAC: {k}": size for k, size in account.memory()[fullest].items() if size}
        kinds.pop("K-FAC: total", None)
        memory: dict[str, float] = {"weights": case.weights, "gradients": case.gradients}
        memory |= {"base": case.base}
        memory |= {"momenta": chosen.momenta[fullest], **kinds, "K-FAC: waiting sums": chosen.sums}
        received = {"mean rank": fmean(chosen.received), "busiest rank": max(chosen.received)}
        return {"memory": memory, "received": received, "seconds": dict(chosen.times.mean)}

    @property
    def assumptions(self) -> list[str]:
        """The facts that the numbers leave out or take for granted."""
        case, profile = self.case, self.hardware
        texts = [
            "memory and traffic follow from shapes and are exact; activations, workspaces and the "
            "allocator's rounding are not in them",
            f"times are {self.basis} by the profile {profile.name!r}: {profile.title}",
            f"statistics every {case.intervals[0]}, refreshes every {case.intervals[1]} steps; "
            "early refreshes, in the first 160 steps, are not in the means",
            "ranks hold copies of the model and average gradients, while the backward pass runs; "
            "small networks' passes take longer, since the host's calls are not in them",
        ]
        if not case.passes.operations:
            texts.append("no batch was given: passes and statistics take no time here")
        return texts

    def cells(self) -> list[list[str]]:
        """Return the table's head and rows."""
        head = ["strategy", "K-FAC", "momenta", "in all", "MB/step", "quiet ms", "gather"]
        rows = [[*head, "refresh", "mean ms", "x base", "fits"]]
        best, base, timed = self.best, self.priced[0].base, self.case.passes.operations > 0
        for entry in self.priced:
            fits = "best" if entry is best else "yes" if entry in self.fitting else "no"
            sizes = max(entry.kfac), max(entry.momenta), entry.needs
            times = [milliseconds(sum(x.values())) for x in entry.times]
            times.append(f"{entry.step / base:.2f}" if timed else "")
            received = digits(fmean(entry.received) / 1e6)
            rows.append([entry.candidate.title, *map(shown, sizes), received, *times, fits])
        step = milliseconds(base) if timed else ""
        alone = shown(self.case.weights + self.case.gradients + self.case.whole)
        return [*rows, ["the base alone", "", "", alone, "", step, "", "", step, "", ""]]

    @property
    def head(self) -> str:
        """The title of the table: what is planned, and how exact the numbers are."""
        case = self.case
        return (
            f"{self.optimizer} on {self.world} ranks of {self.hardware.name}, "
            f"{shown(self.budget)} each; weights {shown(case.weights)}, gradients "
            f"{shown(case.gradients)}, the base's state {shown(case.base)}; bytes are exact, times "
            f"{self.basis}"
        )

    def __repr__(self) -> str:
        return "\n".join([self.head, *aligned(self.cells()), self.reason])

    def to_json(self) -> str:
        """Return all numbers as JSON: bytes, seconds, and what each is."""
        best, case = self.best, self.case
        return json.dumps(
            {
                "optimizer": self.optimizer,
                "ranks": self.world,
                "device": self.hardware.name,
                "budget": self.budget,
                "basis": {"bytes": "exact", "seconds": self.basis},
                "weights": case.weights,
                "gradients": case.gradients,
                "base": case.base,
                "base alone": {"bytes": case.whole, "seconds": self.priced[0].base},
                "strategies": list(map(_plain, self.priced)),
                "best": None if best is None else best.candidate.title,
                "options": None if best is None else dict(best.options),
                "reason": self.reason,
                "breakdown": self.breakdown,
                "assumptions": self.assumptions,
            },
            indent=1,
        )


def _plain(entry: Priced) -> dict[str, Any]:
    seconds: dict[str, dict[str, float]] = entry.times._asdict()
    return {
        "strategy": entry.candidate.title,
        "workers": entry.grid.workers,
        "kfac": {"fullest": max(entry.kfac), "mean": fmean(entry.kfac)},
        "momenta": {"fullest": max(entry.momenta), "mean": fmean(entry.momenta)},
        "sums": entry.sums,
        "needs": entry.needs,
        "received": {"mean": fmean(entry.received), "busiest": max(entry.received)},
        "seconds": {name: sum(stages.values()) for name, stages in seconds.items()},
    }
