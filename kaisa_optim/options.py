"""The K-FAC options, declared once for signatures, checks and documents, and their values."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import check_callable, invalid, invalid_because, is_real
from .plan.assignment import WorkAssignment, check_fraction, choose
from .plan.facts import WIDEST

if TYPE_CHECKING:
    from .capture.hooks import Capture
    from .curvature.averages import FactorSums

Check = Callable[[str, Any], Any]  # from name and value to the settled value
Schedules = dict[str, Callable[[int], Any]]  # by the names of options
Group = dict[str, Any]  # one of the optimizer's param_groups
AUTO = "auto"  # the fraction is chosen by a plan

# The factors of the first batches fit badly, and change less the longer they are averaged. With
# these refreshes, an interval of 100 ends as one of 20 did: digits at 0.114 and 0.116, a GPT on
# characters after 150 steps at 2.051 and 2.052. Without them it ends at 0.120 and 2.083.
EARLY = (5, 10, 20, 30, 40, 60, 80, 130, 160)


def _is_among(value: Any, choices: tuple[Any, ...]) -> bool:
    # 1 and 0 equal True and False, but are no choices; an array would be compared by entries.
    return any(value is x or (isinstance(value, str) and value == x) for x in choices)


def _number(fits: Callable[[float], bool], must: str, *besides: Any, whole: bool = False) -> Check:
    def check(name: str, value: Any) -> Any:
        if _is_among(value, besides):
            return value
        # NaN fails every comparison: each ``fits`` must be one, and no negation of one.
        if not is_real(value) or not fits(value) or (whole and not float(value).is_integer()):
            raise invalid(name, value, f"it must be {must}")
        return int(value) if whole else float(value)

    return check


def _one_of(*choices: Any, must: str = "") -> Check:
    def check(name: str, value: Any) -> Any:
        if not _is_among(value, choices):
            raise invalid(name, value, must or f"choose from {', '.join(map(repr, choices))}")
        return value

    return check


def _above_zero(value: float) -> bool:
    return 0 < value < math.inf


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _budget(name: str, value: Any) -> int | float | None:
    if value is None:
        return None
    size = value
    if isinstance(value, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]i?)?b?\s*", value, flags=re.I)
        size = float(parts[1]) * _UNITS[(parts[2] or "").lower()] if parts else 0.0
        size = size if size >= 1 else 0.0  # "0.5" might be meant as a share
    # Callers tell a share from bytes by the type, so that whole bytes must never stay a float.
    if not is_real(size) or not _above_zero(size):
        must = 'it must be a number of bytes, a text such as "80GB" or "4GiB", or a share in (0, 1)'
        raise invalid(name, value, must + " of what the device has free")
    return float(size) if size < 1 else int(size)


def _grad_scaler(name: str, value: Any) -> Any:
    is_known = value is None or isinstance(value, Tensor) or hasattr(value, "get_scale")
    if callable(value):
        check_callable(name, value)
    # A scale of 0 or NaN would make G infinite: NaN fails every comparison.
    elif not is_known and not (is_real(value) and value > 0):
        must = "it must be a torch.amp.GradScaler, a number above 0 or a callable"
        raise invalid(name, value, must)
    return value


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, Iterable) or not all(isinstance(p, str) for p in patterns):
        must = "it must be a pattern or a list of patterns, each searched in module and class names"
        raise invalid(name, value, must)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            why = f"{pattern!r} is no regular expression: {error}; re.escape takes a name literally"
            raise invalid_because(name, why) from None
    return tuple(patterns)


@dataclass(frozen=True)
class Option:
    """One K-FAC option: everything that code and documentation know of it."""

    name: str
    default: Any
    annotation: str
    check: Check
    help: str
    scope: str = "construction"  # "group" of parameters, "optimizer" (may be set) or "construction"
    schedulable: bool = False  # takes a callable of the step
    follows: Callable[[Options], Any] | None = None  # the value that None stands for
    conflict: tuple[str, Any, str] | None = None  # with a value of another option, and the cause
    of_papers: bool = False  # it belongs to the papers' preconditioned gradients
    own_of_rank: bool = False  # ranks may set different values
    guide: str = ""  # page and anchor in docs/guides

    def settled(self, value: Any, options: Options) -> Any:
        """Return the checked value, or the value that None stands for beside other options."""
        if value is None and self.follows is not None:
            return self.follows(options)
        return self.check(self.name, value)


_FLOAT, _STEPS = "float | Callable[[int], float]", "int | Callable[[int], int]"
_WITHOUT_K = "normalization", "kaisa", "the papers' normalization has no K"
_FLAG_OR_NONE = _one_of(True, False, None, must="it must be True or False, or None")
_INTERVAL = _number(lambda x: x >= 1, "a whole number of steps, at least 1", whole=True)


# Defaults of the papers' methods: with a damping of 1e-2, a clip of 1e-4 and refreshes every 100
# steps, KFACSGD took 1.67 times the steps of its tuned self on Fashion-MNIST. With 5e-3, 1.5e-4 and
# 50 steps it ended lower on all five tasks tried.
# fmt: off
_CURVATURE = (
    Option("damping", None, f"{_FLOAT} | None",
           _number(_above_zero, "a number above 0, such as 1e-2"),
           'Added to the curvature; a parameter group may have its own. Of "polar" it is a share '
           "of each factor's mean eigenvalue. None: 0.01, or 0.005 for the other methods.",
           "group", schedulable=True, follows=lambda x: 0.01 if x.is_polar else 5e-3),
    Option("factor_decay", 0.95, _FLOAT, _number(lambda x: 0 <= x <= 1, "in [0, 1], such as 0.95"),
           "β of the factors' running average; a parameter group may have its own. 0: the newest "
           "statistics replace the average.", "group", schedulable=True),
    Option("loss_terms", "examples", f"str | {_FLOAT}",
           _number(_above_zero, '"examples", "positions" or the number of terms, above 0, that '
                   "the losses of one step average on this rank", "examples", "positions"),
           'What the loss averages: "examples" (the first dimension of the model\'s input), '
           '"positions", or their number.',
           "optimizer", schedulable=True, own_of_rank=True, conflict=_WITHOUT_K,
           of_papers=True, guide="losses.md#what-k-is"),
    Option("loss_reduction", "mean", "str", _one_of("mean", "sum"),
           '"sum" for a loss that does not average. W ranks, which average gradients, then equal '
           "one process on the joined sum at W times their damping.",
           conflict=_WITHOUT_K, of_papers=True, guide="losses.md#what-k-is"),
    Option("weight_sharing", "expand", "str", _one_of("expand", "reduce"),
           '"expand": one row for each position; "reduce": one row for each example.',
           conflict=_WITHOUT_K),
    Option("statistics_fraction", None, f"{_FLOAT} | None",
           _number(lambda x: 0 < x <= 1, "in (0, 1], such as 0.25, or 1 for all examples"),
           "The part of the examples from which statistics are taken; 1: all. None: so many that "
           "at least 8,192 rows of a layer are read, and four for each column of its wider side, "
           'of 32 examples or more; all with "eigen", "inverse" and weight_sharing="reduce".',
           "optimizer", schedulable=True, guide="tuning.md#statistics-of-a-part-of-the-batch",
           follows=lambda x: None if x.is_polar and x.weight_sharing == "expand" else 1.0),
    Option("statistics_precision", "highest", "str", _one_of("highest", "high", "medium"),
           "The precision of the statistics' float32 products, as in "
           'torch.set_float32_matmul_precision: "high" is TF32, "medium" bfloat16 on CPUs.',
           guide="precision.md"),
    Option("normalization", "fisher", "str", _one_of("fisher", "kaisa"),
           '"kaisa" scales statistics as the papers\' own code does, for published settings.',
           of_papers=True),
    Option("grad_scaler", None, "Any", _grad_scaler,
           "The GradScaler, number or callable that gives the scale of the losses.",
           "optimizer", own_of_rank=True, of_papers=True, guide="precision.md"),
    Option("skip_layers", (), "str | Sequence[str]", _patterns,
           "Patterns of layers to leave alone, searched in qualified names and class names."),
    Option("max_factor_size", None, "float | None", _number(lambda x: x >= 1, "1 or more"),
           "A side wider than this gets a diagonal factor. Decompositions take time as the cube "
           "of the side: minutes at 9,000 on one core of a CPU. None: 16,384, and 513 for a side "
           'at least 64 times as wide as the other, such as an adapter\'s, with "polar".',
           follows=lambda x: None if x.is_polar and not x.kaisa_scaling else WIDEST),
)
_REFRESHES = (
    Option("factor_update_steps", 10, _STEPS, _INTERVAL,
           "The interval, in steps, at which a layer's statistics are gathered.",
           "optimizer", schedulable=True),
    Option("inv_update_steps", None, f"{_STEPS} | None", _INTERVAL,
           'The interval, in steps, at which a layer is refreshed. None: 100 for "polar", else 50. '
           "Steps 5, 10, 20, 30, 40, 60, 80, 130 and 160 refresh everything, too, where the "
           'interval is longer than the gap before them, unless normalization is "kaisa".',
           "optimizer", schedulable=True, guide="tuning.md#where-to-start",
           follows=lambda x: 100 if x.is_polar else 50),
    Option("staggered", None, "bool | None", _FLAG_OR_NONE,
           "True: each layer gathers in one of two steps of its interval, of more where sums "
           "are large, whole shapes divided by their cost; refreshes follow in the same steps. "
           'False: all layers in one step. None: True, unless normalization is "kaisa".',
           follows=lambda x: not x.kaisa_scaling),
    Option("compute_method", "polar", "str", _one_of("polar", "eigen", "inverse"),
           '"polar": K-FAC\'s direction, as long as the base\'s own step lowers the loss; "eigen" '
           'and "inverse": the papers\' preconditioned gradients, by eigendecompositions or by '
           "inverses."),
    Option("damping_split", None, "str | None", _one_of("pi", "full"),
           'The damping of inverses: "pi", divided between A and G, or "full", on both. '
           'None: "pi", or "full" if normalization is "kaisa".',
           follows=lambda x: None if x.compute_method != "inverse"
           else "full" if x.kaisa_scaling else "pi", of_papers=True,
           conflict=("compute_method", "eigen", "the eigenbasis applies the exact damping")),
    Option("compute_eigenvalue_outer_product", False, "bool",
           _one_of(True, False, must="it must be True or False"),
           "Store 1 / (v_G v_Aᵀ + γ) at each refresh, with the damping of that step.",
           conflict=("compute_method", "inverse", "inverses have no eigenvalues"), of_papers=True),
    Option("factor_dtype", None, "torch.dtype | None",
           _one_of(None, torch.float32, torch.float64, must="it must be torch.float32 or "
                   "torch.float64: averages in fewer digits are indefinite; inv_dtype takes "
                   "torch.bfloat16"),
           "The dtype in which factors are stored, torch.float32 or torch.float64. None: float32, "
           "or float64 for float64 parameters."),
    Option("inv_dtype", None, "torch.dtype | None",
           _one_of(None, torch.bfloat16, torch.float16, torch.float32, torch.float64,
                   must="it must be a floating torch.dtype, or None: as for factors"),
           "The dtype in which roots, eigenvectors or inverses are stored. None: as for factors. "
           "With torch.bfloat16, gradients are multiplied in it where the device is fast at that.",
           guide="precision.md"),
    Option("max_failures", None, "int | None",
           _number(lambda x: x >= 0, "a count, 0 or more, or None", None, whole=True),
           "Refreshes of one layer that may fail in a row. None: any number.",
           guide="troubleshooting.md#nan-or-a-jump"),
)
_STEP = (
    Option("kl_clip", 1.5e-4, f"{_FLOAT} | None",
           _number(_above_zero, "a number above 0, or None for no clip", None),
           "κ of the KL clip, which limits the length of a step. None: no limit.",
           "optimizer", schedulable=True, of_papers=True),
    Option("kl_clip_lr", None, "str | None", _one_of("initial", "current"),
           'The learning rate in the clip: "initial", a group\'s lr at construction, or "current". '
           'None: "initial", or "current" if normalization is "kaisa".',
           follows=lambda x: "current" if x.kaisa_scaling else "initial", of_papers=True),
)
_RANKS = (
    Option("grad_worker_fraction", None, "float | str | None",
           lambda _, value: value if value is None or (isinstance(value, str) and value == AUTO)
           else check_fraction(value),
           "The share of the ranks that work for a layer: the smaller, the less memory, and the "
           "more communication. With 1/R on several hosts of R ranks, directions stay on their "
           'host, which may be faster. "auto": the fastest that memory_budget allows. None: as '
           "assignment says.", guide="ranks.md#which-to-take"),
    Option("memory_budget", None, "int | float | str | None", _budget,
           "The memory of a rank for weights, gradients, the base's state and K-FAC's, without "
           'activations: bytes, a text such as "4GiB", or, on CUDA, a share of what the device '
           'has free, beside the weights. None: 0.5 with "auto" on CUDA.'),
    Option("assignment", None, "WorkAssignment | str | None", lambda _, value: value,
           'The ranks that work for a layer: one ("layer-wise"), a share ("hybrid"), all ("opt"), '
           'or as a WorkAssignment says. None: "layer-wise", or "hybrid" with '
           "grad_worker_fraction.",
           conflict=("grad_worker_fraction", AUTO, "a plan chooses the strategy")),
    Option("colocate_factors", None, "bool | None", _FLAG_OR_NONE,
           "Keep both factors of a layer on one rank. None: as the assignment says."),
    Option("bucket_cap_mb", 25.0, "float", _number(_above_zero, "a number of MiB above 0"),
           "MiB that travel in one call; for each rank, of sharded gradients and of sums on the "
           "way to their owners."),
    Option("comm_dtype", None, "torch.dtype | None",
           _one_of(None, torch.bfloat16,
                   must="it must be torch.bfloat16, or None for the data's own dtype"),
           "The dtype in which statistics and directions (or gradients) travel. torch.bfloat16 "
           'rounds the directions of all ranks, but not with "opt", where none travel. None: as '
           "they are."),
    Option("process_group", None, "Any", lambda _, value: value,
           "The ranks that train this model. None: the default group."),
    Option("verify_every", None, "int | None",
           _number(lambda x: x >= 1, "a whole number of steps, or None", None, whole=True),
           "The interval, in steps, after which ranks compare the weights of covered layers in the "
           "next exchange that they hold anyway; 100 costs next to nothing. None: only in the "
           "first step."),
)
# fmt: on
SECTIONS = {"Curvature": _CURVATURE, "Refreshes": _REFRESHES, "Steps": _STEP, "Ranks": _RANKS}
OPTIONS = {option.name: option for section in SECTIONS.values() for option in section}
PER_GROUP = tuple(name for name, option in OPTIONS.items() if option.scope == "group")
SETTABLE = tuple(name for name, option in OPTIONS.items() if option.scope == "optimizer")
FIXED = tuple(name for name, option in OPTIONS.items() if option.scope == "construction")
# Settings that ranks must have alike in every step: each exchange compares them. Without that, a
# rank with another interval would gather in other steps, and wait for the others without end.
SHARED = tuple(name for name in SETTABLE if not OPTIONS[name].own_of_rank)
# Keys of a parameter group, beside the base's own. A load leaves them as they are where the saved
# groups, of a plain optimizer, lack them.
GROUP_KEYS = (*PER_GROUP, "kl_clip_lr")
_INTERVALS = "factor_update_steps", "inv_update_steps"


def check(name: str, value: Any) -> Any:
    """Return the settled value of one option, or refuse it; a callable is no value."""
    return OPTIONS[name].check(name, value)


_FIELDS: Any = [(name, Any, option.default) for name, option in OPTIONS.items()]
_Record: Any = make_dataclass("_Record", _FIELDS, frozen=True, kw_only=True)


@dataclass(frozen=True, init=False)
class Options(_Record):
    """The settled options of one optimizer, an attribute each; None is what follows from others."""

    early: tuple[int, ...] = ()  # steps that gather and refresh everything
    chosen: str = ""  # the reason for a fraction that a plan has chosen

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        settled = self.__dict__  # past the frozen record's __setattr__
        asked = dict(settled)  # ``settled`` changes below; conflicts are of what was asked for
        for name, value in asked.items():
            if OPTIONS[name].schedulable and callable(value):
                check_callable(name, value, "step")
            else:
                settled[name] = OPTIONS[name].settled(value, self)
        # The first batches' state would else stay in use for long. A later interval must not
        # change these steps: ranks that set it in different steps would meet in different ones.
        every = self.inv_update_steps
        most = check("inv_update_steps", every(0)) if callable(every) else every
        pairs = () if self.kaisa_scaling else itertools.pairwise((0, *EARLY))
        settled["early"] = tuple(step for former, step in pairs if step - former < most)
        # The papers' options first, since conflicts name them as remedies.
        for name in sorted(asked, key=lambda name: not OPTIONS[name].of_papers):
            self.refuse(name, asked[name])
        if self.grad_worker_fraction == AUTO:
            return
        if self.memory_budget is not None:
            why = f"{self.memory_budget!r} with grad_worker_fraction={self.grad_worker_fraction!r}"
            why += ', which has no use for it; give grad_worker_fraction="auto", or leave it out'
            raise invalid_because("memory_budget", why)
        choose(self.assignment, self.grad_worker_fraction)  # refuses an unknown assignment

    def refuse(self, name: str, value: Any) -> None:
        """Refuse a value that was asked for, but has no use or no meaning with the others."""
        option = OPTIONS[name]
        # An unchecked tensor is not compared by ``==``: the result would be a tensor.
        plain = isinstance(value, int | float | str)
        if value is option.default or (plain and value == option.default):
            return
        if option.of_papers and self.is_polar:
            why = f"{value!r} with compute_method='polar', which has no use for it; leave it out, "
            why += 'or name compute_method="eigen" or "inverse" for the papers\' gradients'
            raise invalid_because(name, why)
        if option.conflict is not None and value is not None:
            other, refused, reason = option.conflict
            if getattr(self, other) == refused:
                why = f"{value!r} with {other}={refused!r}: {reason}"
                remedy = f"leave {name} out, or give {other} another value"
                raise invalid_because(name, f"{why}; {remedy}")

    def having(self, values: Mapping[str, Any]) -> Options:
        """Return a copy with values that were checked where they were set."""
        # dataclasses.replace would settle the copy anew, and with another interval its early steps.
        other = copy.copy(self)
        other.__dict__.update(values)
        return other

    def described(self) -> dict[str, Any]:
        """Return the values that ranks compare; options of groups are compared with the groups."""
        # Ranks compare texts. The text of a process group, a scaler or a function has an address,
        # which differs from rank to rank, so that none of these may be among the values.
        compared = [n for n in (*SETTABLE, *FIXED) if n != "process_group"]
        values = {name: getattr(self, name) for name in compared}
        values["grad_scaler"] = None if self.grad_scaler is None else "given"
        return {name: "a callable" if callable(v) else v for name, v in values.items()}

    @property
    def is_polar(self) -> bool:
        """True for K-FAC's directions, in place of the papers' preconditioned gradients."""
        return bool(self.compute_method == "polar")

    @property
    def strategy(self) -> WorkAssignment:
        return choose(self.assignment, self.grad_worker_fraction)

    @property
    def kaisa_scaling(self) -> bool:
        """True if the papers' own scaling is asked for."""
        return bool(self.normalization == "kaisa")


class Hyperparameters:
    """The values of options that may change, checked where they are set, and intervals in force."""

    capture: Capture | None = None  # knows whether labels were drawn for this step

    def __init__(
        self, options: Options, sums: FactorSums, group_schedules: list[Schedules], alone: bool
    ) -> None:
        self.options, self.sums, self._alone = options, sums, alone
        # The optimizer's own list, for damping and factor_decay: a copy would miss later groups.
        self._group_schedules = group_schedules
        settings = {name: getattr(options, name) for name in SETTABLE}
        of_steps = {n: x for n, x in settings.items() if OPTIONS[n].schedulable and callable(x)}
        self.schedules: Schedules = of_steps
        self.values: dict[str, Any] = {}
        for name, value in settings.items():
            self._settle(name, value(0) if name in self.schedules else value)
        # The groups' values in the last step, which need no check; None: they do.
        self.known: list[Any] | None = None
        self.take_intervals(0)

    def set(self, name: str, value: Any) -> bool:
        """Check and take a user's value; return True if other layers or rows are to gather."""
        self._settle(name, value)
        # Several ranks must not take an interval at once: they compare both in an exchange, and
        # would else hold exchanges in other steps.
        self.pending |= name in _INTERVALS
        return name == "statistics_fraction" or (self._alone and name in _INTERVALS)

    def _settle(self, name: str, value: Any) -> None:
        value = OPTIONS[name].settled(value, self.options)
        self.options.refuse(name, value)
        if name == "loss_terms":
            # K of labels that were drawn for this step has the former meaning. A sum of drawn
            # gradients, once divided by another K, would scale G without a trace.
            former = self.values.get("loss_terms", value)
            is_other = value != former and (isinstance(value, str) or isinstance(former, str))
            if is_other and self.capture is not None and self.capture.draws > 0:
                why = f"{value!r} after sample_fisher, which drew for {former!r}; set it before"
                raise invalid_because("loss_terms", why)
            self.sums.loss_terms = value
        elif name == "grad_scaler":
            self.sums.loss_scale = None if value is None else functools.partial(_scale_of, value)
        self.values[name] = value

    def read(self, groups: list[Group], step: int) -> None:
        """Read the step's values from schedules and from the groups, and check them."""
        if len(groups) != len(self._group_schedules):
            why = f"{len(groups)} groups, {len(self._group_schedules)} were added; use "
            why += "add_param_group, or build a new optimizer"
            raise RuntimeError(f"Invalid param_groups: {why}")
        for group, schedules in zip(groups, self._group_schedules, strict=True):
            for name in PER_GROUP:
                schedule = schedules.get(name)
                # Users and schedulers write into groups, too.
                group[name] = check(name, group[name] if schedule is None else schedule(step))
            refuse_lost_damping(group)
        for name, schedule in self.schedules.items():
            self._settle(name, schedule(step))
        self.note(groups)

    def note(self, groups: list[Group]) -> None:
        # A step reads anew unless the groups hold the very same objects: with schedules, none may
        # be noted, or a schedule would stop at its first value.
        is_fixed = not (self.schedules or any(self._group_schedules))
        self.known = [x[name] for x in groups for name in PER_GROUP] if is_fixed else None

    def upcoming(self, name: str, step: int) -> Any:
        """Return a value for the backward passes of a step, before the step reads its values."""
        schedule = self.schedules.get(name)
        return self.values[name] if schedule is None else check(name, schedule(step))

    def take_intervals(self, step: int) -> None:
        self.in_force = {name: self.upcoming(name, step) for name in _INTERVALS}
        # Other intervals may come: on several ranks with the next exchange, else in any step.
        self.pending = not self.schedules.keys().isdisjoint(_INTERVALS)


def refuse_name(owner: object, name: str, value: Any) -> None:
    """Refuse to set an option of groups, an option that is fixed, or a misspelled name."""
    if name in PER_GROUP:
        why = f'it belongs to the parameter groups; set optimizer.param_groups[i]["{name}"]'
    elif name not in FIXED and (name.startswith("_") or hasattr(owner, name)):
        return
    else:
        why = f"{', '.join(SETTABLE)} can be set; all other options are given at construction"
    raise AttributeError(f"{name} = {value!r}: {why}")


def refuse_lost_damping(group: Group) -> None:
    """Refuse a damping that the arithmetic of the group's parameters can't carry."""
    # Where there is no curvature, the rounding of a gradient is divided by the damping: at a
    # ten-thousandth of the relative rounding error, the result is 10,000 gradients long.
    # Each step after a change asks, and parameters may be many: most steps must not walk them.
    if group["damping"] >= torch.finfo(torch.float32).eps / 10_000:
        return
    for dtype in {torch.promote_types(p.dtype, torch.float32) for p in group["params"]}:
        least = torch.finfo(dtype).eps / 10_000
        if group["damping"] < least:
            must = f"with {dtype} arithmetic it must be at least {least:.2g}, or rounding errors "
            must += "dominate the steps; use a larger one, such as 1e-3"
            raise invalid("damping", group["damping"], must)


def rate_of(group: Group) -> Any:
    """Return a group's learning rate; 1 if its optimizer has none, or finds it in each step."""
    rate = group.get("lr")
    return 1.0 if rate is None else rate


def _scale_of(scaler: Any) -> Any:
    scale = scaler() if callable(scaler) else scaler
    if hasattr(scaler, "get_scale"):
        # get_scale() reads the tensor's value: each backward pass would wait for the device.
        scale = getattr(scaler, "_scale", None)
        scale = scale if isinstance(scale, Tensor) else scaler.get_scale()
    return scale
