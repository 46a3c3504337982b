"""Schedules of K-FAC's hyperparameters, in the manner of torch.optim.lr_scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import check_callable, invalid, invalid_because, unexpected
from .optimizer import KFACMixin
from .options import PER_GROUP, check

Factor = Callable[[int], float] | Mapping[int, float]


def decay_at(milestones: Iterable[int], factor: float) -> dict[int, float]:
    """Return a schedule with one factor at each milestone: ``damping=decay_at([40, 80], 0.5)``."""
    return dict.fromkeys(milestones, factor)


class KFACParamScheduler:
    """Multiplies K-FAC hyperparameters by a factor of the epoch.

    Each schedule is a callable ``epoch -> factor`` or a mapping ``{milestone: factor}``. The factor
    of a milestone counts from its epoch on. Factors multiply the initial value. Intervals are
    rounded and never below 1. Call :meth:`step` once an epoch, after the optimizer's steps.
    """

    def __init__(
        self,
        optimizer: KFACMixin,
        *,
        damping: Factor | None = None,
        factor_decay: Factor | None = None,
        kl_clip: Factor | None = None,
        factor_update_steps: Factor | None = None,
        inv_update_steps: Factor | None = None,
        **unknown: Any,
    ) -> None:
        if not isinstance(optimizer, KFACMixin):
            why = f"{type(optimizer).__name__} has no K-FAC inside; pass a KFACSGD, KFACAdam, "
            raise TypeError(f"Invalid optimizer: {why}KFACLAMB or with_kfac(...) optimizer")
        known = {"damping": damping, "factor_decay": factor_decay, "kl_clip": kl_clip}
        known |= {"factor_update_steps": factor_update_steps, "inv_update_steps": inv_update_steps}
        for name in unknown:
            raise unexpected(type(self).__name__, name, known)
        self.optimizer = optimizer
        self.schedules = {name: x for name, x in known.items() if x is not None}
        kfac = optimizer.preconditioner
        scheduled = {*kfac.hyperparameters.schedules}.union(*optimizer._group_schedules)
        for name, schedule in self.schedules.items():
            if callable(schedule):
                check_callable(name, schedule, "epoch")
            elif not isinstance(schedule, Mapping):
                must = "it must be a callable epoch -> factor or a mapping {milestone: factor}"
                raise invalid(name, schedule, must)
            # The optimizer's own schedule would write over this one's values in each step.
            if name in scheduled:
                why = "the optimizer was given a callable for it already; give it a number, or "
                raise invalid_because(name, why + "leave it out here")
            if name == "kl_clip" and (kfac.options.is_polar or kfac.kl_clip is None):
                raise invalid_because("kl_clip", "the optimizer's clip is off; leave it out here")
        self.last_epoch = 0
        self.initial: dict[str, list[float]] = {}
        self._write()

    def step(self) -> None:
        """Go to the next epoch."""
        self.last_epoch += 1
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and initial values; schedules are not saved, as in torch's LambdaLR."""
        initial = {name: list(values) for name, values in self.initial.items()}
        return {"last_epoch": self.last_epoch, "initial": initial}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved epoch; the optimizer takes that epoch's values."""
        if state_dict["initial"].keys() != self.schedules.keys():
            why = f"it schedules {sorted(state_dict['initial'])}, this scheduler "
            why += f"{sorted(self.schedules)}; build it with the same hyperparameters"
            raise invalid_because("state_dict", why)
        self.last_epoch = state_dict["last_epoch"]
        self.initial = {name: list(values) for name, values in state_dict["initial"].items()}
        self._write()

    def _write(self) -> None:
        groups, kfac = self.optimizer.param_groups, self.optimizer.preconditioner
        epoch = self.last_epoch
        for name, schedule in self.schedules.items():
            if callable(schedule):
                factors = [schedule(epoch)]
            else:
                factors = [factor for milestone, factor in schedule.items() if milestone <= epoch]
            # Factors multiply the first values: an interval that was rounded to 1 would else stay.
            factor, initial = math.prod(factors), self.initial.setdefault(name, [])
            if name in PER_GROUP:
                # A group that was added later starts from the value that it came with.
                initial += [group[name] for group in groups[len(initial) :]]
                for group, value in zip(groups, initial, strict=False):
                    group[name] = check(name, value * factor)
            else:
                initial += [] if initial else [getattr(kfac, name)]
                value, is_interval = initial[0] * factor, isinstance(initial[0], int)
                setattr(kfac, name, max(1, round(value)) if is_interval else value)
