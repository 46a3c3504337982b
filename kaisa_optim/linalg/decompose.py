"""Decompositions of stacked factors, with retries where a solver fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

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
    """Decompose a batch once; return the results and a flag of success for each, on the device."""
    try:
        results = solve(factors, damping, diagonal)
    except RuntimeError as error:
        raise_unless_a_solvers(error)
        results = (torch.full_like(factors, torch.nan),)
        if damping is None:
            results = torch.full_like(factors[..., 0], torch.nan), *results
    if diagonal:
        return results, (factors.isfinite() & results[0].isfinite()).all(1)
    return results, torch.stack([r.isfinite().flatten(1).all(1) for r in results]).all(0)


def decompose(
    factors: Tensor,
    damping: Tensor | None,
    solve: Solve,
    more: tuple[int, ...] = (),
    *,
    diagonal: bool,
) -> tuple[Results, Tensor]:
    """Decompose a batch and retry failed factors one by one; the flags are on the host.

    The last retries multiply the damping by ``more``.
    """
    results, good = attempt(factors, damping, solve, diagonal=diagonal)
    good = good.cpu()
    if diagonal or good.all():
        return results, good  # diagonals fail by numbers that are not finite: no retry would help
    for i in good.logical_not().nonzero().flatten().tolist():
        shift = None if damping is None else damping[i : i + 1]
        for again in _attempts(factors[i : i + 1], shift, solve, more):
            if all(part.isfinite().all() for part in again):
                for result, part in zip(results, again, strict=True):
                    result[i] = part[0]
                good[i] = True
                break
    return results, good


def raise_unless_a_solvers(error: RuntimeError) -> None:
    """Raise the error, unless a solver failed.

    Failures of cuSOLVER's algorithms come as plain errors, too; a lack of memory does not count.
    """
    if not isinstance(error, LinAlgError) and not _OF_CUSOLVER.match(str(error)):
        raise error


def _attempts(
    factor: Tensor, damping: Tensor | None, solve: Solve, more: tuple[int, ...]
) -> Iterator[Results]:
    """Yield one factor's results: as it is, in float64, with jitter on the diagonal, on the CPU."""
    double = factor.double()
    scale = double.diagonal(dim1=-2, dim2=-1).mean()
    jittered = double + 1e-8 * scale * torch.eye(factor.shape[-1], device=factor.device).double()
    candidates = [(factor, 1), (double, 1), (jittered, 1), (jittered.cpu(), 1)]
    for candidate, times in candidates + [(double, times) for times in more]:
        shift = None if damping is None else damping.to(candidate) * times
        try:
            yield solve(candidate, shift, False)
        except RuntimeError as error:
            raise_unless_a_solvers(error)
