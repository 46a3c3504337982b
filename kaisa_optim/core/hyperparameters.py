"""The hyperparameters of a whole optimizer, which users and schedules may set at any time."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..capture.hooks import Capture
from ..checks import check_callable, is_real
from ..curvature.sums import FactorSums
from ..errors import invalid, invalid_because
from .options import FIXED, OPTIONS, PER_GROUP, SCHEDULED, SETTABLE, Group, Options, check

Schedule = Callable[[int], Any]

_INTERVALS = "factor_update_steps", "inv_update_steps"
_AIMING = *_INTERVALS, "statistics_fraction"  # they change what the next passes gather


class Hyperparameters:
    """Values that are checked when they are set; each setting that may change is a property."""

    kl_clip: float | None
    factor_update_steps: int
    inv_update_steps: int
    statistics_fraction: float
    loss_terms: str | float
    grad_scaler: Any
    _is_built = False

    def __init__(
        self,
        options: Options,
        sums: FactorSums,
        group_schedules: list[dict[str, Schedule]],
        *,
        several: bool,
        aim: Callable[[], Callable[[], None] | None],
    ) -> None:
        """Take the options' values; ``aim`` is a weak reference to a function without arguments.

        The function is called when a new value changes which layers gather, or which rows. A strong
        reference would keep a model's tensors until Python looks for circles.
        """
        self.options = options
        self.sums = sums
        self.capture: Capture | None = None  # knows whether labels were drawn for this step
        self._several = several  # ranks compare both intervals before these come into force
        self._aim = aim
        self._values: dict[str, Any] = {}
        self._schedules: dict[str, Schedule] = {}
        self._group_schedules = group_schedules  # one dict a group, for damping and factor_decay
        for name in SETTABLE:
            value = getattr(options, name)
            if name in SCHEDULED and callable(value):
                check_callable(name, value, "step")
                self._schedules[name] = value
                value = value(0)
            self._set(name, value)
        self._in_force: dict[str, int] = {}
        # The groups' values in the last step, which need no check; None: some follow a schedule.
        self.known: list[Any] | None = None
        self.take_intervals(0)
        self._is_built = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_built:
            refuse_name(self, name, value)
        super().__setattr__(name, value)

    def read(self, groups: list[Group], step: int) -> None:
        """Read the step's values from schedules and from the groups, and check them."""
        if len(groups) != len(self._group_schedules):
            raise RuntimeError(
                f"Invalid param_groups: {len(groups)} groups, {len(self._group_schedules)} were "
                "added; use add_param_group, or build a new optimizer"
            )
        for group, schedules in zip(groups, self._group_schedules, strict=True):
            for name, settled in PER_GROUP.items():
                schedule = schedules.get(name)
                # Users and schedulers write into groups, too.
                group[name] = settled(group[name] if schedule is None else schedule(step))
            refuse_lost_damping(group)
        for name, schedule in self._schedules.items():
            self._set(name, schedule(step))
        scheduled = self._schedules or any(self._group_schedules)
        values = [group[name] for group in groups for name in PER_GROUP]
        self.known = None if scheduled else values

    def upcoming(self, name: str, step: int) -> Any:
        """Return a value for the backward passes of a step, before the step reads its values."""
        schedule = self._schedules.get(name)
        return self._values[name] if schedule is None else check(name, schedule(step))

    def take_intervals(self, step: int) -> None:
        """Put both intervals into force; several ranks have compared them before."""
        if self._several:
            self._in_force.update({name: self.upcoming(name, step) for name in _INTERVALS})

    def in_force(self, name: str, step: int) -> int:
        """Return the interval that decides when ranks exchange anything."""
        return self._in_force[name] if self._several else self.upcoming(name, step)

    def scheduled_intervals(self, step: int) -> dict[str, int]:
        """Return the values of scheduled intervals in the next step, for ranks to compare."""
        # One rank needs no values of a step that may never come.
        names = [name for name in _INTERVALS if self._several and name in self._schedules]
        return {f"{name} of the next step": self.upcoming(name, step) for name in names}

    def current_options(self) -> Options:
        """Return the options with all values that have been set since construction."""
        return self.options.having(
            {n: v for n, v in self._values.items() if n not in self._schedules}
        )

    def _set(self, name: str, value: Any) -> None:
        value = self.options.checked(name, value)
        if name == "loss_terms":
            former = self._values.get("loss_terms", value)
            numbers = not isinstance(value, str) and not isinstance(former, str)
            drawn = self.capture is not None and self.capture.draws > 0
            if drawn and value != former and not numbers:
                why = (
                    f"{value!r} after sample_fisher, which drew for {former!r}; set it before, or "
                    "give the optimizer a number as its argument"
                )
                raise invalid_because("loss_terms", why)
            self.sums.loss_terms = value
        elif name == "grad_scaler":
            self.sums.loss_scale = _scale_reader(value)
        self._values[name] = value
        aim = self._aim() if self._is_built and name in _AIMING else None
        if aim is not None:
            aim()


def _setting(name: str) -> property:
    """Return the property of one option that may change."""

    def read(self: Hyperparameters) -> Any:
        return self._values[name]

    def write(self: Hyperparameters, value: Any) -> None:
        self._set(name, value)

    return property(read, write, doc=OPTIONS[name].help)


for _name in SETTABLE:
    setattr(Hyperparameters, _name, _setting(_name))


def refuse_name(owner: object, name: str, value: Any) -> None:
    """Refuse to set an option of groups, an option that is fixed, or a misspelled name."""
    if name in PER_GROUP:
        raise AttributeError(
            f"{name} = {value!r}: it belongs to the parameter groups; set "
            f'optimizer.param_groups[i]["{name}"]'
        )
    if name in FIXED:
        raise AttributeError(
            f"{name} = {value!r}: it can only be given at construction; build the optimizer "
            f"with {name}={value!r}"
        )
    if not (name.startswith("_") or hasattr(owner, name)):
        near = difflib.get_close_matches(name, SETTABLE, 1)
        raise AttributeError(
            f"{name} = {value!r}: the preconditioner has no {name}"
            + (f"; did you mean {near[0]}?" if near else f"; {', '.join(SETTABLE)} can be set")
        )


def refuse_lost_damping(group: dict[str, Any]) -> None:
    """Refuse a damping that the arithmetic of the group's parameters can't carry.

    Where there is no curvature, the rounding of a gradient is divided by the damping: at a
    ten-thousandth of the relative rounding error, the result is 10,000 gradients long.
    """
    if group["damping"] >= torch.finfo(torch.float32).eps / 10_000:
        return  # each step asks, and parameters may be many
    for dtype in {torch.promote_types(p.dtype, torch.float32) for p in group["params"]}:
        least = torch.finfo(dtype).eps / 10_000
        if group["damping"] < least:
            raise invalid(
                "damping",
                group["damping"],
                f"with {dtype} arithmetic it must be at least {least:.2g}, or rounding "
                "errors dominate the steps; use a larger one, such as 1e-3",
            )


def rate_of(group: Group) -> Any:
    """Return a group's learning rate; 1 if its optimizer has none, or finds it in each step."""
    rate = group.get("lr")
    return 1.0 if rate is None else rate


def _scale_reader(scaler: Any) -> Callable[[], Tensor | float] | None:
    """Return a function that reads a loss scale without waiting for the device."""
    if scaler is None:
        return None
    if isinstance(scaler, int | float | Tensor):
        return lambda: scaler

    def read() -> Tensor | float:
        if not callable(scaler):
            scale: Any = getattr(scaler, "_scale", None)
            return scale if isinstance(scale, Tensor) else scaler.get_scale()
        scale = scaler()
        if not is_real(scale) and not isinstance(scale, Tensor):
            why = f"{scale!r} from its callable; a scale must be a number or a tensor"
            raise invalid_because("grad_scaler", why)
        return scale

    return read
