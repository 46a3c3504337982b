"""Decompositions of stacked factors, with a flag where a solver fails."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import torch
from torch import Tensor

LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
Results = tuple[Tensor, ...]
Solve = Callable[[Tensor, Tensor | None, bool], Results]  # of factors, damping, and diagonal

_OF_CUSOLVER = re.compile(
    r"cusolver error: CUSOLVER_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)(?!.*cusolverDnCreate)", re.S
)


def attempt(
    factors: Tensor, damping: Tensor | None, solve: Solve, *, diagonal: bool
) -> tuple[Results, Tensor]:
    """Decompose a batch; return the results and a flag of success for each, on the device.

    If a solver raises, the factors are decomposed one by one: it stops at one factor for all.
    """
    try:
        results = solve(factors, damping, diagonal)
    except RuntimeError as error:
        raise_unless_a_solvers(error)
        if len(factors) > 1:
            shifts = itertools.repeat(None) if damping is None else damping.split(1)
            pairs = zip(factors.split(1), shifts, strict=False)
            parts = [attempt(*pair, solve, diagonal=diagonal) for pair in pairs]
            each, good = zip(*parts, strict=True)
            return tuple(map(torch.cat, zip(*each, strict=True))), torch.cat(good)
        results = (torch.full_like(factors, torch.nan),)
        if damping is None:
            results = torch.full_like(factors[..., 0], torch.nan), *results
    if diagonal:
        return results, (factors.isfinite() & results[0].isfinite()).all(1)
    return results, torch.stack([r.isfinite().flatten(1).all(1) for r in results]).all(0)


def raise_unless_a_solvers(error: RuntimeError) -> None:
    """Raise the error, unless a solver failed.

    Failures of cuSOLVER's algorithms come as plain errors, too; a lack of memory does not count.
    """
    if not isinstance(error, LinAlgError) and not _OF_CUSOLVER.match(str(error)):
        raise error
