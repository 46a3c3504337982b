"""Schedules of K-FAC's hyperparameters, in the manner of torch.optim.lr_scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import check_callable, invalid, invalid_because, is_real, unexpected
from .optimizer import KFACMixin
from .options import OPTIONS, PER_GROUP

Factor = Callable[[int], float] | Mapping[int, float]

_INTERVALS = ("factor_update_steps", "inv_update_steps")


def decay_at(milestones: Iterable[int], factor: float) -> dict[int, float]:
    """Return a schedule with one factor at each milestone: ``damping=decay_at([40, 80], 0.5)``."""
    if not isinstance(milestones, Iterable) or isinstance(milestones, str):
        must = "they must be numbers of epochs, such as [40, 80]"
        raise invalid("milestones", milestones, must)
    if not is_real(factor) or not 0 < factor < math.inf:
        raise invalid("factor", factor, "it must be a number above 0, such as 0.5")
    return dict.fromkeys(milestones, factor)


class KFACParamScheduler:
    """Multiplies K-FAC hyperparameters by a factor of the epoch.

    Each schedule is a callable ``epoch -> factor`` or a mapping ``{milestone: factor}``. The factor
    of a milestone counts from its epoch on. Factors multiply the initial value. Intervals are
    rounded and never below 1. Call :meth:`step` once an epoch, after the optimizer's steps.

    The papers halve the damping and stretch the refresh interval at milestones::

        KFACParamScheduler(
            optimizer,
            damping=decay_at([40, 80], 0.5),
            inv_update_steps=decay_at([40, 80], 10),
        )
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
            raise TypeError(
                f"Invalid optimizer: {type(optimizer).__name__} has no K-FAC inside; pass a "
                "KFACSGD, KFACAdam, KFACLAMB or with_kfac(...) optimizer"
            )
        given = {
            "damping": damping,
            "factor_decay": factor_decay,
            "kl_clip": kl_clip,
            "factor_update_steps": factor_update_steps,
            "inv_update_steps": inv_update_steps,
        }
        for name in unknown:
            raise unexpected(type(self).__name__, name, given)
        self.optimizer = optimizer
        self.schedules = {name: x for name, x in given.items() if x is not None}
        for name, schedule in self.schedules.items():
            _check_schedule(optimizer, name, schedule)
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
        if set(state_dict["initial"]) != set(self.schedules):
            why = (
                f"it schedules {sorted(state_dict['initial'])}, this scheduler "
                f"{sorted(self.schedules)}; build it with the same hyperparameters"
            )
            raise invalid_because("state_dict", why)
        self.last_epoch = state_dict["last_epoch"]
        self.initial = {name: list(values) for name, values in state_dict["initial"].items()}
        self._write()

    def _write(self) -> None:
        """Set the values of this epoch."""
        groups, kfac = self.optimizer.param_groups, self.optimizer.preconditioner
        for name, schedule in self.schedules.items():
            initial = self.initial.setdefault(name, [])
            epoch = self.last_epoch
            if callable(schedule):
                factors = [schedule(epoch)]
            else:
                factors = [factor for milestone, factor in schedule.items() if milestone <= epoch]
            for factor in factors:
                if not is_real(factor):
                    why = f"its schedule gives {factor!r} for epoch {epoch}"
                    raise invalid_because(name, f"{why}; a factor must be a number")
            factor = math.prod(factors)
            if name in PER_GROUP:
                # A group that was added later starts from the value that it came with.
                initial += [group[name] for group in groups[len(initial) :]]
                for group, value in zip(groups, initial, strict=False):
                    group[name] = PER_GROUP[name](value * factor)
                continue
            if not initial:
                initial.append(getattr(kfac, name))
            value = initial[0] * factor
            setattr(kfac, name, max(1, round(value)) if name in _INTERVALS else value)


def _check_schedule(optimizer: KFACMixin, name: str, schedule: Any) -> None:
    """Refuse a schedule of another form, or of a hyperparameter without effect."""
    if callable(schedule):
        check_callable(name, schedule, "epoch")
    elif not isinstance(schedule, Mapping):
        must = "it must be a callable epoch -> factor or a mapping {milestone: factor}"
        raise invalid(name, schedule, must)
    if optimizer.has_schedule(name):
        why = (
            "the optimizer was given a callable for it already; give it a number, or leave it "
            "out here"
        )
        raise invalid_because(name, why)
    options = optimizer.preconditioner.options
    if options.compute_method == "polar" and OPTIONS[name].of_papers:
        raise invalid_because(name, 'compute_method="polar" has no use for it; leave it out here')
    if name == "kl_clip" and optimizer.preconditioner.kl_clip is None:
        raise invalid_because("kl_clip", "the optimizer's clip is off; leave it out here")
