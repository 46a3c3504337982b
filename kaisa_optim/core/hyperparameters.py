"""The hyperparameters of a whole optimizer, which users and schedules may set at any time."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..checks import check_callable, is_real
from ..comm.ranks import Ranks
from ..curvature.sums import FactorSums
from ..errors import invalid, invalid_because
from .options import FIXED, PER_GROUP, SCHEDULED, SETTABLE, Group, Options, check

Schedule = Callable[[int], Any]

_INTERVALS = "factor_update_steps", "inv_update_steps"


class Hyperparameters:
    """Values that are checked when they are set; misspelled names are refused."""

    _is_built = False
    steps: int  # taken so far
    ranks: Ranks

    def __init__(
        self, options: Options, sums: FactorSums, group_schedules: list[dict[str, Schedule]]
    ) -> None:
        self.options = options
        self.sums = sums
        self._schedules: dict[str, Schedule] = {}
        self._group_schedules = group_schedules  # one dict a group, for damping and factor_decay
        for name in SCHEDULED:
            value = getattr(options, name)
            if callable(value):
                check_callable(name, value, "step")
                self._schedules[name] = value
                value = value(0)
            setattr(self, name, value)
        self.grad_scaler = options.grad_scaler
        self.take_intervals()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in PER_GROUP:
            raise AttributeError(
                f"{name} = {value!r}: it belongs to the parameter groups; set "
                f'optimizer.param_groups[i]["{name}"]'
            )
        if self._is_built and name in FIXED:
            raise AttributeError(
                f"{name} = {value!r}: it can only be given at construction; build the optimizer "
                f"with {name}={value!r}"
            )
        # A misspelled name would have no effect. Own attributes appear during construction.
        if self._is_built and not (name.startswith("_") or hasattr(self, name)):
            near = difflib.get_close_matches(name, SETTABLE, 1)
            raise AttributeError(
                f"{name} = {value!r}: the preconditioner has no {name}"
                + (f"; did you mean {near[0]}?" if near else f"; {', '.join(SETTABLE)} can be set")
            )
        super().__setattr__(name, value)

    def read(self, groups: list[Group]) -> None:
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
                group[name] = settled(group[name] if schedule is None else schedule(self.steps))
            refuse_lost_damping(group)
        for name, schedule in self._schedules.items():
            setattr(self, name, schedule(self.steps))

    def upcoming(self, name: str, ahead: int = 0) -> Any:
        """Return a hyperparameter's value for the next backward passes, before a step reads it.

        With ``ahead``, the value is for the passes of that many steps later.
        """
        schedule = self._schedules.get(name)
        if schedule is None:
            return getattr(self, name)
        return check(name, schedule(self.steps + ahead))

    def take_intervals(self, ahead: int = 0) -> None:
        """Put both intervals into force; several ranks have compared them before."""
        if self.ranks.world > 1:
            self._in_force = {name: self.upcoming(name, ahead) for name in _INTERVALS}

    def in_force(self, name: str) -> int:
        """Return the interval that decides when ranks exchange anything."""
        return self.upcoming(name) if self.ranks.world == 1 else self._in_force[name]

    def next_intervals(self) -> dict[str, int]:
        """Return the next step's values of scheduled intervals, for ranks to compare."""
        several = self.ranks.world > 1  # one rank needs no values of a step that may never come
        names = [name for name in _INTERVALS if several and name in self._schedules]
        return {f"{name} of the next step": self.upcoming(name, 1) for name in names}

    def current_options(self) -> Options:
        """Return the options with all values that have been set since construction."""
        plain = [name for name in SCHEDULED if name not in self._schedules]
        return self.options.having({name: getattr(self, name) for name in (*plain, "grad_scaler")})

    def _changed(self) -> None:
        """Follow an interval or a fraction that has been set."""

    @property
    def kl_clip(self) -> float | None:
        return self._kl_clip

    @kl_clip.setter
    def kl_clip(self, value: float | None) -> None:
        self._kl_clip = self.options.checked("kl_clip", value)

    @property
    def factor_update_steps(self) -> int:
        """The interval at which layers gather.

        On several ranks, a new interval acts from the next step that updates factors or
        decompositions.
        """
        return self._factor_update_steps

    @factor_update_steps.setter
    def factor_update_steps(self, value: int) -> None:
        self._factor_update_steps = check("factor_update_steps", value)
        self._changed()

    @property
    def inv_update_steps(self) -> int:
        """The interval of refreshes; a new interval acts as told for ``factor_update_steps``."""
        return self._inv_update_steps

    @inv_update_steps.setter
    def inv_update_steps(self, value: int) -> None:
        self._inv_update_steps = check("inv_update_steps", value)

    @property
    def statistics_fraction(self) -> float:
        """The share of the examples that enters the factors; of positions, if examples are few."""
        return self._statistics_fraction

    @statistics_fraction.setter
    def statistics_fraction(self, value: float) -> None:
        self._statistics_fraction = check("statistics_fraction", value)
        self._changed()

    @property
    def loss_terms(self) -> str | float:
        """ "examples", "positions", or how many terms the losses of this step average."""
        return self.sums.loss_terms

    @loss_terms.setter
    def loss_terms(self, value: str | float) -> None:
        value = self.options.checked("loss_terms", value)
        former = self.sums.loss_terms
        numbers = not isinstance(value, str) and not isinstance(former, str)
        if value != former and not numbers and self._has_drawn():
            why = (
                f"{value!r} after sample_fisher, which drew for {former!r}; set it before, or "
                "give the optimizer a number as its argument"
            )
            raise invalid_because("loss_terms", why)
        self.sums.loss_terms = value

    def _has_drawn(self) -> bool:
        """Return whether labels were drawn for the step that runs."""
        return False

    @property
    def grad_scaler(self) -> Any:
        """The GradScaler, number or callable whose scale the captured output gradients carry."""
        return self._grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, value: Any) -> None:
        value = self.options.checked("grad_scaler", value)
        self.sums.loss_scale = _scale_reader(value)
        self._grad_scaler = value


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
                f"with {dtype} arithmetic it must be at least {least:.2g}, or the rounding of "
                "gradients makes the steps; use a larger one, such as 1e-3",
            )


def clip_lr(group: Group) -> Any:
    """Return the α of a group's parameters in the KL clip."""
    alpha = group["kl_clip_lr"]
    return group.get("lr", 1.0) if alpha == "current" else alpha


def _scale_reader(scaler: Any) -> Callable[[], Tensor | float] | None:
    """Return a function that reads a loss scale without waiting for the device."""
    if scaler is None:
        return None
    if callable(scaler):
        return lambda: _scale(scaler())
    if isinstance(scaler, int | float | Tensor):
        return lambda: scaler

    def read() -> Tensor | float:
        scale = getattr(scaler, "_scale", None)
        return scale if isinstance(scale, Tensor) else scaler.get_scale()

    return read


def _scale(value: Any) -> Tensor | float:
    if not is_real(value) and not isinstance(value, Tensor):
        raise invalid_because(
            "grad_scaler", f"{value!r} from its callable; a scale must be a number or a tensor"
        )
    scale: Tensor | float = value
    return scale
