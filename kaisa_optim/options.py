"""The K-FAC options: one checked record of what the user asked for."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Number = float | Callable[[int], float]
Interval = int | Callable[[int], int]


def check_damping(value: Any) -> float:
    if not _is_real(value) or not 0 < value < math.inf:
        raise ValueError(f"Invalid damping: {value!r}; it must be a number above 0, such as 1e-3")
    return float(value)


def check_factor_decay(value: Any) -> float:
    if not _is_real(value) or not 0 < value <= 1:
        raise ValueError(f"Invalid factor_decay: {value!r}; it must be in (0, 1], such as 0.95")
    return float(value)


def check_kl_clip(value: Any) -> float | None:
    if value is None:
        return None
    if not _is_real(value) or not 0 < value < math.inf:
        raise ValueError(
            f"Invalid kl_clip: {value!r}; it must be a number above 0, or None for no clip"
        )
    return float(value)


def check_loss_terms(value: Any) -> str | float:
    if isinstance(value, str):
        return _one_of("loss_terms", value, ("examples", "positions"))
    if not _is_real(value) or not 0 < value < math.inf:
        raise ValueError(
            f'Invalid loss_terms: {value!r}; it must be "examples", "positions" or the number of '
            "terms, above 0, that the losses of one step average on this rank"
        )
    return float(value)


def check_interval(name: str, value: Any) -> int:
    if not _is_whole(value) or value < 1:
        raise ValueError(
            f"Invalid {name}: {value!r}; it must be a whole number of steps, at least 1"
        )
    return int(value)


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return _is_real(value) and float(value).is_integer()


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"Invalid {name}: {value!r}; choose from {', '.join(map(repr, choices))}")
    return str(value)


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


def _dtype(name: str, value: Any) -> torch.dtype | None:
    if value is None or (isinstance(value, torch.dtype) and value.is_floating_point):
        return value
    raise ValueError(
        f"Invalid {name}: {value!r}; it must be a floating torch.dtype, or None for float32 "
        "(float64 for float64 parameters)"
    )


PER_GROUP: dict[str, Callable[[Any], float]] = {
    "damping": check_damping,
    "factor_decay": check_factor_decay,
}


@dataclass(frozen=True)
class Options:
    """What holds for a whole optimizer, checked; ``damping`` and ``factor_decay`` are per group."""

    kl_clip: float | Callable[[int], float | None] | None
    kl_clip_lr: str
    factor_update_steps: Interval
    inv_update_steps: Interval
    compute_method: str
    damping_split: str
    compute_eigenvalue_outer_product: bool
    factor_dtype: torch.dtype | None
    inv_dtype: torch.dtype | None
    skip_layers: tuple[str, ...]
    max_factor_size: int
    weight_sharing: str
    loss_terms: str | Number
    loss_reduction: str
    normalization: str
    grad_scaler: Any
    staggered: bool
    max_failures: int

    @property
    def papers(self) -> bool:
        return self.normalization == "kaisa"


def make_options(
    *,
    kl_clip: Any,
    kl_clip_lr: str | None,
    factor_update_steps: Any,
    inv_update_steps: Any,
    compute_method: str,
    damping_split: str | None,
    compute_eigenvalue_outer_product: bool,
    factor_dtype: Any,
    inv_dtype: Any,
    skip_layers: str | Sequence[str],
    max_factor_size: Any,
    weight_sharing: str,
    loss_terms: Any,
    loss_reduction: str,
    normalization: str,
    grad_scaler: Any,
    staggered: bool | None,
    max_failures: Any,
) -> Options:
    """Check every option and settle the defaults that follow from others."""
    papers = _one_of("normalization", normalization, ("fisher", "kaisa")) == "kaisa"
    _one_of("compute_method", compute_method, ("eigen", "inverse"))
    _one_of("weight_sharing", weight_sharing, ("expand", "reduce"))
    _one_of("loss_reduction", loss_reduction, ("mean", "sum"))
    if papers and (weight_sharing, loss_terms, loss_reduction) != ("expand", "examples", "mean"):
        raise ValueError(
            'Invalid normalization: "kaisa" leaves out weight_sharing, loss_terms and '
            'loss_reduction; remove them, or use normalization="fisher"'
        )
    if damping_split is not None and compute_method != "inverse":
        raise ValueError(
            f'Invalid damping_split: {damping_split!r} belongs to compute_method="inverse"; the '
            "eigenbasis applies the exact damping"
        )
    if compute_eigenvalue_outer_product and compute_method != "eigen":
        raise ValueError(
            'Invalid compute_eigenvalue_outer_product: True belongs to compute_method="eigen"'
        )
    if not _is_real(max_factor_size) or not max_factor_size >= 1:
        raise ValueError(f"Invalid max_factor_size: {max_factor_size!r}; it must be 1 or more")
    if not _is_whole(max_failures) or max_failures < 0:
        raise ValueError(f"Invalid max_failures: {max_failures!r}; it must be a count, 0 or more")
    if not callable(kl_clip):
        check_kl_clip(kl_clip)
    if not callable(loss_terms):
        check_loss_terms(loss_terms)
    for name, value in (
        ("factor_update_steps", factor_update_steps),
        ("inv_update_steps", inv_update_steps),
    ):
        if not callable(value):
            check_interval(name, value)
    return Options(
        kl_clip=kl_clip,
        kl_clip_lr=_one_of(
            "kl_clip_lr", kl_clip_lr or ("current" if papers else "initial"), ("initial", "current")
        ),
        factor_update_steps=factor_update_steps,
        inv_update_steps=inv_update_steps,
        compute_method=compute_method,
        damping_split=_one_of(
            "damping_split", damping_split or ("full" if papers else "pi"), ("pi", "full")
        ),
        compute_eigenvalue_outer_product=bool(compute_eigenvalue_outer_product),
        factor_dtype=_dtype("factor_dtype", factor_dtype),
        inv_dtype=_dtype("inv_dtype", inv_dtype),
        skip_layers=_patterns(skip_layers),
        max_factor_size=int(max_factor_size) if max_factor_size < math.inf else 2**62,
        weight_sharing=weight_sharing,
        loss_terms=loss_terms,
        loss_reduction=loss_reduction,
        normalization=normalization,
        grad_scaler=grad_scaler,
        staggered=not papers if staggered is None else bool(staggered),
        max_failures=int(max_failures),
    )
