"""The K-FAC options: one checked record of what the user asked for."""

from __future__ import annotations

import copy
import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..plan.assignment import WorkAssignment, check_everywhere, check_flag, choose, is_real

Number = float | Callable[[int], float]
Interval = int | Callable[[int], int]

_HALVES = (torch.bfloat16, torch.float16)

# What kfac-pytorch has and this has not, or under another name.
_FORMER = {
    "allreduce_bucket_cap_mb": "it is called bucket_cap_mb here",
    "accumulation_steps": "leave it out: any number of backward passes is counted",
    "symmetry_aware": "leave it out: factors always travel as triangles",
    "assignment_strategy": "leave it out: the cost() of a WorkAssignment says what is balanced",
    "update_factors_in_hook": "leave it out: sums are taken in the backward pass, averages in "
    "step()",
    "refresh_lag": "leave it out: decompositions are in use at once",
    "loglevel": 'leave it out: set that of logging.getLogger("kaisa_optim")',
}


def meant(name: str, ours: Iterable[str], theirs: Iterable[str], alike: float = 0.6) -> str | None:
    """The name, of ours or the base's, that a misspelt one is near to."""
    ours = list(ours)
    # SGD's dampening is as near to some spellings as damping is.
    near = difflib.get_close_matches(name, ours, 1, 0.9)
    near = near or difflib.get_close_matches(name, [*ours, *theirs], 1, alike)
    return near[0] if near else None


def unexpected(owner: str, name: str, ours: Iterable[str], theirs: Iterable[str] = ()) -> TypeError:
    """The error for an argument that ``owner`` has not, be it among K-FAC's or the base's."""
    near = meant(name, ours, theirs)
    remedy = f"did you mean {near}?" if near else f"help({owner}) lists what there is"
    remedy = _FORMER.get(name, remedy)
    if name == "momentum" and "betas" in theirs:
        remedy = "here it is the first of betas"
    return TypeError(f"{owner}() got an unexpected keyword argument {name!r}; {remedy}")


def check_callable(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Refuse one that can't be called with ``arguments``, before that is tried in a step."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some builtins have none
    try:
        signature.bind(*arguments)
    except TypeError:
        what = " and ".join(arguments) if arguments else "nothing"
        like = f"lambda {', '.join(arguments)}: ..." if arguments else "lambda: ..."
        raise ValueError(
            f"Invalid {name}: {function!r}; it must be a callable of {what}, such as {like}"
        ) from None


def check_damping(value: Any) -> float:
    if not is_real(value) or not 0 < value < math.inf:
        raise ValueError(f"Invalid damping: {value!r}; it must be a number above 0, such as 1e-3")
    return float(value)


def check_factor_decay(value: Any) -> float:
    if not is_real(value) or not 0 < value <= 1:
        raise ValueError(f"Invalid factor_decay: {value!r}; it must be in (0, 1], such as 0.95")
    return float(value)


def check_kl_clip(value: Any) -> float | None:
    if value is None:
        return None
    if not is_real(value) or not 0 < value < math.inf:
        raise ValueError(
            f"Invalid kl_clip: {value!r}; it must be a number above 0, or None for no clip"
        )
    return float(value)


def refuse_clip_of_grafted(kl_clip: Any) -> None:
    if kl_clip is not None:
        raise ValueError(
            f"Invalid kl_clip: {kl_clip!r} with grafting=True, which gives gradients a length that "
            "the clip would change; pass kl_clip=None, or leave out grafting"
        )


_TERMS = "examples", "positions"


def check_loss_terms(value: Any) -> str | float:
    if isinstance(value, str) and value not in _TERMS:
        raise ValueError(
            f"Invalid loss_terms: {value!r}; choose from {', '.join(map(repr, _TERMS))}, or give "
            "the number of terms that the losses of one step average on this rank"
        )
    if isinstance(value, str):
        return value
    if not is_real(value) or not 0 < value < math.inf:
        raise ValueError(
            f'Invalid loss_terms: {value!r}; it must be "examples", "positions" or the number of '
            "terms, above 0, that the losses of one step average on this rank"
        )
    return float(value)


def check_statistics_fraction(value: Any) -> float:
    if not is_real(value) or not 0 < value <= 1:
        raise ValueError(
            f"Invalid statistics_fraction: {value!r}; it must be in (0, 1], such as 0.25, or 1 for "
            "statistics of all examples"
        )
    return float(value)


def check_interval(name: str, value: Any) -> int:
    if not _is_whole(value) or value < 1:
        raise ValueError(
            f"Invalid {name}: {value!r}; it must be a whole number of steps, at least 1"
        )
    return int(value)


def _is_whole(value: Any) -> bool:
    return is_real(value) and float(value).is_integer()


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"Invalid {name}: {value!r}; choose from {', '.join(map(repr, choices))}")
    return str(value)


def _step_numbers(name: str, value: Any) -> tuple[int, ...]:
    steps = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [0]
    if not all(_is_whole(n) and n >= 1 for n in steps):
        raise ValueError(
            f"Invalid {name}: {value!r}; it must be numbers of steps, such as (5, 10), each at "
            "least 1: the first step, number 0, refreshes everything anyway"
        )
    return tuple(sorted({int(n) for n in steps}))


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, Iterable) or not all(isinstance(p, str) for p in patterns):
        raise ValueError(
            f"Invalid skip_layers: {value!r}; it must be a pattern or a list of patterns, each "
            "searched in module and class names"
        )
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"Invalid skip_layers: {pattern!r} is no regular expression: {error}; re.escape "
                "takes a name literally"
            ) from None
    return tuple(patterns)


def _dtype(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ValueError(
            f"Invalid {name}: {value!r}; it must be a floating torch.dtype, or None for float32 "
            "(float64 for float64 parameters)"
        )


PER_GROUP: dict[str, Callable[[Any], float]] = {
    "damping": check_damping,
    "factor_decay": check_factor_decay,
}


# Adam in the eigenbasis takes a basis at its word, and those of the first batches fit badly: on a
# character GPT these few refreshes took the loss after 150 steps from 2.27 to 2.15.
_EARLY = (5, 10, 25, 50)

# It also gains by every refresh, and following a basis costs little. After half of a horizon, with
# eigh every 100 steps and in this way: character GPT 2.135 and 2.100, digits autoencoder 0.214 and
# 0.187, the latter with refreshes every 20 steps 2.114 and 0.193.
_FOLLOWED = 0.1
_OFTEN, _SELDOM = 10, 50

# Unless told otherwise. With 1e-2, 1e-4 and refreshes every 100 steps KFACSGD took 1.67 times the
# steps of its tuned self on Fashion-MNIST; with these it ended lower on all five tasks tried.
DAMPING, KL_CLIP = 5e-3, 1.5e-4

# What moments in the eigenbasis have no use for.
_OF_PARAMETERS = (
    "damping",
    "kl_clip",
    "kl_clip_lr",
    "compute_method",
    "compute_eigenvalue_outer_product",
    "truncation",
    "eigenvalue_correction",
    "grafting",
    "warmup_steps",
    "normalization",
)


# Options without a use in KFACMuon. Under weight_sharing="reduce" the G of an attention's keys is
# made of rounding alone, and KFACMuon takes a factor's own scale for its unit.
WITHOUT_IN_METRIC = (
    "weight_sharing",
    "kl_clip",
    "kl_clip_lr",
    "compute_method",
    "damping_split",
    "compute_eigenvalue_outer_product",
    "normalization",
    "orthogonal",
    "basis_tolerance",
    "truncation",
    "eigenvalue_correction",
    "grafting",
    "warmup_steps",
)


def differs(value: Any, default: Any) -> bool:
    """Whether an option was asked for. It has not been checked yet: a tensor's == would be one."""
    plain = isinstance(value, int | float | str)
    return value is not default and not (plain and value == default)


def option_against_eigenbasis(
    asked: dict[str, Any], defaults: dict[str, Any], groups: Iterable[dict[str, Any]]
) -> str:
    """What was asked for, of all or of some parameters, that can't be had there, if anything."""
    given = [(name, asked[name], "") for name in _OF_PARAMETERS]
    given += [("damping", g["damping"], " in a parameter group") for g in groups if "damping" in g]
    for name, value, where in given:
        if differs(value, defaults[name]):
            return f"{name}={value!r}{where}"
    # A number may be what another optimizer left in a group that is used again.
    current = any(group.get("kl_clip_lr") == "current" for group in groups)
    return 'kl_clip_lr="current" in a parameter group' if current else ""


@dataclass(frozen=True)
class Options:
    """What holds for a whole optimizer, checked; ``damping`` and ``factor_decay`` are per group.

    ``None`` for an option that follows from others is settled here.
    """

    kl_clip: float | Callable[[int], float | None] | None
    kl_clip_lr: str | None
    factor_update_steps: Interval
    inv_update_steps: Interval | None
    compute_method: str
    damping_split: str | None  # stays None where it has no meaning
    compute_eigenvalue_outer_product: bool
    factor_dtype: torch.dtype | None
    inv_dtype: torch.dtype | None
    skip_layers: str | Sequence[str]
    max_factor_size: float
    weight_sharing: str
    loss_terms: str | Number
    loss_reduction: str
    normalization: str
    grad_scaler: Any
    staggered: bool | int | None
    max_failures: int
    grad_worker_fraction: float | None = None
    assignment: WorkAssignment | str | None = None
    colocate_factors: bool | None = None  # as the assignment says
    bucket_cap_mb: float = 25.0
    comm_dtype: torch.dtype | None = None
    moments: str = "parameters"
    nesterov: bool = False
    orthogonal: bool = False
    basis_tolerance: float | None = None
    truncation: float = 0.0
    statistics_fraction: Number = 1.0
    statistics_precision: str = "highest"
    eigenvalue_correction: bool | str = False
    grafting: bool = False
    warmup_steps: int = 0
    early_refreshes: Iterable[int] | None = None

    def __post_init__(self) -> None:
        _one_of("normalization", self.normalization, ("fisher", "kaisa"))
        _one_of("compute_method", self.compute_method, ("eigen", "inverse"))
        _one_of("weight_sharing", self.weight_sharing, ("expand", "reduce"))
        _one_of("loss_reduction", self.loss_reduction, ("mean", "sum"))
        _one_of("statistics_precision", self.statistics_precision, ("highest", "high", "medium"))
        plain = (self.weight_sharing, self.loss_terms, self.loss_reduction)
        if self.kaisa_scaling and plain != ("expand", "examples", "mean"):
            raise ValueError(
                'Invalid normalization: "kaisa" leaves out weight_sharing, loss_terms and '
                'loss_reduction; remove them, or use normalization="fisher"'
            )
        if self.moments != "metric":  # which is no choice of the user's
            _one_of("moments", self.moments, ("parameters", "eigenbasis"))
        if self.moments == "eigenbasis" and (
            self.compute_method != "eigen"
            or self.compute_eigenvalue_outer_product
            or self.truncation
        ):
            raise ValueError(
                'Invalid moments: "eigenbasis" takes Adam\'s second moment in place of the '
                "eigenvalues; leave out compute_method, compute_eigenvalue_outer_product and "
                'truncation, or use moments="parameters"'
            )
        for name in ("compute_eigenvalue_outer_product", "nesterov", "orthogonal", "grafting"):
            check_flag(name, getattr(self, name))
        check_flag("colocate_factors", self.colocate_factors, none=True)
        self._settle_refreshes()
        if not is_real(self.basis_tolerance) or not 0 <= self.tolerance < 1:
            raise ValueError(
                f"Invalid basis_tolerance: {self.basis_tolerance!r}; it must be a share in [0, 1), "
                "such as 0.1, or 0 for a new decomposition at every refresh"
            )
        if self.basis_tolerance and (self.compute_method != "eigen" or self.kaisa_scaling):
            raise ValueError(
                f"Invalid basis_tolerance: {self.basis_tolerance!r} belongs to "
                'compute_method="eigen" and normalization="fisher"; leave it out'
            )
        if self.basis_tolerance and self.inv_dtype in _HALVES:
            raise ValueError(
                f"Invalid inv_dtype: {self.inv_dtype} with basis_tolerance="
                f"{self.basis_tolerance!r}; eigenvectors that are found from older ones, so "
                "rounded, would not stay orthonormal: leave out one of the two"
            )
        self._check_correction()
        self._check_truncation()
        if self.damping_split is not None and self.compute_method != "inverse":
            raise ValueError(
                f"Invalid damping_split: {self.damping_split!r} belongs to "
                'compute_method="inverse"; the eigenbasis applies the exact damping'
            )
        if self.compute_eigenvalue_outer_product and self.compute_method != "eigen":
            raise ValueError(
                'Invalid compute_eigenvalue_outer_product: True belongs to compute_method="eigen"'
            )
        if not is_real(self.max_factor_size) or not self.max_factor_size >= 1:
            raise ValueError(
                f"Invalid max_factor_size: {self.max_factor_size!r}; it must be 1 or more"
            )
        if not _is_whole(self.max_failures) or self.max_failures < 0:
            raise ValueError(
                f"Invalid max_failures: {self.max_failures!r}; it must be a count, 0 or more"
            )
        if not callable(self.kl_clip):
            check_kl_clip(self.kl_clip)
        if not callable(self.loss_terms):
            check_loss_terms(self.loss_terms)
        if not callable(self.statistics_fraction):
            check_statistics_fraction(self.statistics_fraction)
        for name in ("factor_update_steps", "inv_update_steps"):
            if not callable(getattr(self, name)):
                check_interval(name, getattr(self, name))
        for name in ("factor_dtype", "inv_dtype"):
            _dtype(name, getattr(self, name))
        if self.comm_dtype not in (None, *_HALVES):
            raise ValueError(
                f"Invalid comm_dtype: {self.comm_dtype!r}; it must be torch.bfloat16, "
                "torch.float16, or None for the data's own dtype"
            )
        if not is_real(self.bucket_cap_mb) or not 0 < self.bucket_cap_mb < math.inf:
            raise ValueError(
                f"Invalid bucket_cap_mb: {self.bucket_cap_mb!r}; it must be a number of MiB above 0"
            )
        self._check_helpers()
        needs_all = 'eigenvalue_correction: "examples"' if self.correction == "examples" else ""
        check_everywhere(self.strategy, self.grad_worker_fraction, self.colocate_factors, needs_all)
        if self.early_refreshes is None:
            self._settle("early_refreshes", _EARLY if self.moments == "eigenbasis" else ())
        self._settle("early_refreshes", _step_numbers("early_refreshes", self.early_refreshes))
        self._settle("skip_layers", _patterns(self.skip_layers))
        if self.kl_clip_lr is None:
            self._settle("kl_clip_lr", "current" if self.kaisa_scaling else "initial")
        _one_of("kl_clip_lr", self.kl_clip_lr, ("initial", "current"))
        if self.compute_method == "inverse":
            if self.damping_split is None:
                self._settle("damping_split", "full" if self.kaisa_scaling else "pi")
            _one_of("damping_split", self.damping_split, ("pi", "full"))
        self._check_staggered()

    def _check_staggered(self) -> None:
        value = self.staggered
        if value is None:
            self._settle("staggered", not self.kaisa_scaling)
        elif not isinstance(value, bool):
            if not _is_whole(value) or value < 1:
                raise ValueError(
                    f"Invalid staggered: {value!r}; it must be how many layers are refreshed at "
                    "once, 1 or more, True for as many as there are ranks, False for all, or None "
                    "for the default"
                )
            self._settle("staggered", int(value))

    def _settle_refreshes(self) -> None:
        """Bases of Adam's moments are followed, and often, where they can be."""
        rounded = self.inv_dtype in _HALVES
        if self.basis_tolerance is None:
            follows = self.moments == "eigenbasis" and not (rounded or self.kaisa_scaling)
            self._settle("basis_tolerance", _FOLLOWED if follows else 0.0)
        if self.inv_update_steps is None:
            follows = self.moments == "eigenbasis" and bool(self.basis_tolerance)
            often = follows or self.moments == "metric"
            self._settle("inv_update_steps", _OFTEN if often else _SELDOM)

    def _check_correction(self) -> None:
        choices = (False, True, "examples", "gradients")
        value = self.eigenvalue_correction
        if not any(value is x for x in choices[:2]) and value not in choices[2:]:
            raise ValueError(
                f"Invalid eigenvalue_correction: {value!r}; choose from "
                f"{', '.join(map(repr, choices))}"
            )
        if value is False:
            return
        if value is True:
            self._settle("eigenvalue_correction", "examples")
        for name, wrong, why in (
            ("compute_method", "inverse", "inverses have no eigenvalues"),
            ("compute_eigenvalue_outer_product", True, "the corrected ones are no product"),
            ("moments", "eigenbasis", "Adam's second moment is in their place"),
            ("normalization", "kaisa", "it leaves K out, which their scale needs"),
        ):
            if getattr(self, name) == wrong:
                raise ValueError(
                    f"Invalid eigenvalue_correction: {value!r} with {name}={wrong!r}: {why}; leave "
                    "one of the two out"
                )

    def _check_truncation(self) -> None:
        value = self.truncation
        if not is_real(value) or not 0 <= value < 1:
            raise ValueError(
                f"Invalid truncation: {value!r}; it must be a share of the damping in [0, 1), such "
                "as 0.1, or 0 to multiply by all eigenvectors"
            )
        self._settle("truncation", float(value))
        refused = [
            ("compute_method", "inverse", "inverses have no eigenvectors"),
            ("compute_eigenvalue_outer_product", True, "it is of all eigenvectors"),
            ("eigenvalue_correction", self.correction, "corrected ones do not tell which lead"),
            ("normalization", "kaisa", "it is the papers' own, of all eigenvectors"),
            *(
                ("inv_dtype", half, "what was rounded leaks past the leading ones")
                for half in _HALVES
            ),
        ]
        for name, wrong, why in refused if value else ():
            if wrong is not None and getattr(self, name) == wrong:
                raise ValueError(
                    f"Invalid truncation: {value!r} with {name}={wrong!r}: {why}; leave one of the "
                    "two out"
                )

    def _check_helpers(self) -> None:
        """What makes the first steps gentler, or all of them as long as the base's own."""
        if not _is_whole(self.warmup_steps) or self.warmup_steps < 0:
            raise ValueError(
                f"Invalid warmup_steps: {self.warmup_steps!r}; it must be a whole number of steps, "
                "0 for none"
            )
        if self.grafting and self.moments == "eigenbasis":
            raise ValueError(
                'Invalid grafting: True; the directions of moments="eigenbasis" have Adam\'s '
                'length already: leave it out, or use moments="parameters"'
            )
        if self.warmup_steps and self.moments == "eigenbasis":
            raise ValueError(
                f"Invalid warmup_steps: {self.warmup_steps!r}; the directions of "
                'moments="eigenbasis" do not mix with gradients: leave it out and let lr start '
                'low, or use moments="parameters"'
            )
        if self.grafting:
            refuse_clip_of_grafted(self.kl_clip)

    def having(self, values: dict[str, Any]) -> Options:
        """A copy with values that were checked where they were set.

        Together they may be what can't be asked for at first, as an interval below the lag is.
        """
        other = copy.copy(self)
        for name, value in values.items():
            other._settle(name, value)
        return other

    def _settle(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen for everyone else

    @property
    def strategy(self) -> WorkAssignment:
        return choose(self.assignment, self.grad_worker_fraction)

    def described(self) -> dict[str, Any]:
        """What all ranks must have alike; a callable is no more than that here."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "grad_scaler"}
        return {name: "a callable" if callable(v) else v for name, v in values.items()}

    @property
    def turns(self) -> bool | int:
        """How many layers are refreshed at once; True: as many as there are ranks, False: all."""
        return self.staggered or False

    @property
    def early(self) -> tuple[int, ...]:
        """Numbers of steps that gather and refresh everything."""
        return tuple(self.early_refreshes or ())

    @property
    def tolerance(self) -> float:
        """Up to which share outside of the diagonal eigenvectors are followed; 0: never."""
        return float(self.basis_tolerance or 0)

    @property
    def kaisa_scaling(self) -> bool:
        """Whether the papers' own scaling is asked for."""
        return self.normalization == "kaisa"

    @property
    def correction(self) -> str | None:
        """What eigenvalues are corrected by: "examples", "gradients", or nothing."""
        return str(self.eigenvalue_correction) if self.eigenvalue_correction else None
