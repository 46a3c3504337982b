"""``plan``: every strategy's memory, traffic and time for a model, before any rank is started."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from torch import nn

from ..core.options import PER_GROUP, Options
from ..errors import invalid
from ..optim import arguments
from ..optim.family import KFACAdam
from ..optim.mixin import KFACMixin
from ..optim.survey import Survey
from ..plan import hardware
from ..plan.assignment import make_grid
from ..plan.budget import check_budget, mega, shown
from ..plan.choice import Candidate, Choice, Priced, choose_among
from ..plan.prices import Seconds, milliseconds
from .passes import passes_of
from .texts import aligned

Watch = Callable[[Sequence[Candidate]], Iterator[Candidate]]


def plan(
    model: nn.Module,
    world_size: int,
    memory_budget: int | float | str | None = None,
    *,
    optimizer: type[KFACMixin] = KFACAdam,
    batch: Any = None,
    device: str = "h100",
    watch: Watch = iter,
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
    budget = check_budget("memory_budget", 1.0 if memory_budget is None else memory_budget)
    if memory_budget is None or isinstance(budget, float):
        budget = int(profile.memory * (1.0 if memory_budget is None else budget or 1.0))
    settled, survey = _survey(model, optimizer, options)
    case = survey.case(profile.device)
    if batch is not None:
        layers, fraction = survey.registry.layers.values(), settled.statistics_fraction
        fraction = fraction(0) if callable(fraction) else fraction
        case = replace(case, passes=passes_of(survey.model, batch, layers, fraction))
    among = _asked(settled, world_size)
    found = choose_among(case, world_size, profile, budget, among, watch)
    return Plan(found, optimizer.__name__)


def _survey(
    model: nn.Module, optimizer: type[KFACMixin], given: dict[str, Any]
) -> tuple[Options, Survey]:
    """Return the options, and the facts of an optimizer that is not built."""
    title, base = optimizer.__name__, optimizer._base
    known = inspect.signature(base.__init__).parameters
    theirs, ours = arguments.separate(title, base, known, given)
    model, params = arguments.find_model(title, model, None)
    group = ours.pop("process_group", None)
    if ours.get("assignment") is None and ours.get("grad_worker_fraction") is None:
        ours["grad_worker_fraction"] = "auto"  # the default is a strategy like the others
    settled = Options(**ours)
    plain: Any = base
    instance = plain(params, **theirs)
    for own in instance.param_groups:
        for name in PER_GROUP:
            own.setdefault(name, getattr(settled, name))
    return settled, Survey(model, base, instance.defaults, instance.param_groups, settled, group)


def _asked(options: Options, world: int) -> list[Candidate] | None:
    """Return the strategy that the options name, if they name one."""
    if options.is_automatic:
        return None
    make_grid(options.strategy, world, options.grad_worker_fraction)
    names = "assignment", "grad_worker_fraction"
    asked = {n: v for n in names if (v := getattr(options, n)) is not None}
    title = ", ".join(f"{value}" for value in asked.values())
    return [Candidate(title, options.strategy, asked)]


@dataclass(frozen=True)
class Plan:
    """Strategies side by side; its ``repr`` is a table."""

    choice: Choice
    optimizer: str

    @property
    def best(self) -> Priced | None:
        """The fastest strategy that fits; its ``options`` go into the constructor."""
        return self.choice.best

    @property
    def nearest(self) -> Priced:
        """The strategy that needs least memory."""
        return self.choice.nearest

    @property
    def reason(self) -> str:
        """One sentence: why the best is the best, or how many bytes are missing."""
        return self.choice.reason

    @property
    def basis(self) -> str:
        """The kind of the times: estimates, and the share by which they may err."""
        return f"estimated within {100 * self.choice.hardware.margin:.0f} %"

    @property
    def breakdown(self) -> dict[str, dict[str, float]]:
        """Bytes on the fullest rank, bytes that arrive in a step, and seconds, of the best."""
        one, case = self.best or self.nearest, self.choice.case
        account = case.account(one.candidate.strategy, self.choice.world)
        totals = list(map(sum, zip(one.kfac, one.momenta, strict=True)))
        fullest = totals.index(max(totals))
        kinds = {f"K-FAC: {k}": size for k, size in account.memory()[fullest].items() if size}
        kinds.pop("K-FAC: total", None)
        memory: dict[str, float] = {"weights": case.weights, "gradients": case.gradients}
        memory |= {"base": case.base}
        memory |= {"momenta": one.momenta[fullest], **kinds, "K-FAC: waiting sums": one.sums}
        received = {"mean rank": fmean(one.received), "busiest rank": max(one.received)}
        return {"memory": memory, "received": received, "seconds": dict(one.times.mean)}

    @property
    def assumptions(self) -> list[str]:
        """The facts that the numbers leave out or take for granted."""
        case, profile = self.choice.case, self.choice.hardware
        found = [
            "memory and traffic follow from shapes and are exact; activations, workspaces and the "
            "allocator's rounding are not in them",
            f"times are {self.basis} by the profile {profile.name!r}: {profile.title}",
            f"statistics every {case.intervals[0]}, refreshes every {case.intervals[1]} steps; "
            "early refreshes, in the first 50 steps, are not in the means",
            "ranks hold copies of the model and average gradients, while the backward pass runs",
        ]
        if not case.passes.operations:
            found.append("no batch was given: passes and statistics take no time here")
        return found

    def cells(self) -> list[list[str]]:
        """Return the table's head and rows."""
        head = ["strategy", "K-FAC", "mean", "momenta", "in all", "MB/step", "quiet ms"]
        rows = [[*head, "gather", "refresh", "mean ms", "fits"]]
        best = self.best
        for one in self.choice.priced:
            fits = "best" if one is best else "yes" if one in self.choice.fitting else "no"
            sizes = max(one.kfac), one.mean_kfac, max(one.momenta), one.needs
            times = [milliseconds(sum(x.values())) for x in one.times]
            received = mega(fmean(one.received))
            rows.append([one.candidate.title, *map(shown, sizes), received, *times, fits])
        return rows

    @property
    def head(self) -> str:
        """The title of the table: what is planned, and how exact the numbers are."""
        case, found = self.choice.case, self.choice
        limit = "" if found.budget is None else f", {shown(found.budget)} each"
        return (
            f"{self.optimizer} on {found.world} ranks of {found.hardware.name}{limit}; weights "
            f"{shown(case.weights)}, gradients {shown(case.gradients)}, the base's state "
            f"{shown(case.base)}; bytes are exact, times {self.basis}"
        )

    def __repr__(self) -> str:
        return "\n".join([self.head, *aligned(self.cells()), self.reason])

    def to_json(self) -> str:
        """Return all numbers as JSON: bytes, seconds, and what each is."""
        found, best = self.choice, self.best
        return json.dumps(
            {
                "optimizer": self.optimizer,
                "ranks": found.world,
                "device": found.hardware.name,
                "budget": found.budget,
                "basis": {"bytes": "exact", "seconds": self.basis},
                "weights": found.case.weights,
                "gradients": found.case.gradients,
                "base": found.case.base,
                "strategies": list(map(_plain, found.priced)),
                "best": None if best is None else best.candidate.title,
                "options": None if best is None else dict(best.options),
                "reason": self.reason,
                "breakdown": self.breakdown,
                "assumptions": self.assumptions,
            },
            indent=1,
        )


def _plain(one: Priced) -> dict[str, Any]:
    seconds: dict[str, Seconds] = one.times._asdict()
    return {
        "strategy": one.candidate.title,
        "workers": one.grid.workers,
        "kfac": {"fullest": max(one.kfac), "mean": one.mean_kfac},
        "momenta": {"fullest": max(one.momenta), "mean": fmean(one.momenta)},
        "sums": one.sums,
        "needs": one.needs,
        "received": {"mean": fmean(one.received), "busiest": max(one.received)},
        "seconds": {name: sum(stages.values()) for name, stages in seconds.items()},
    }
