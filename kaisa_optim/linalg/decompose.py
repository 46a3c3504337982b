"""Decompositions of stacked factors, with retries where a solver fails."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from . import eigen, kronecker, roots

LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
Results = tuple[Tensor, ...]

_OF_CUSOLVER = re.compile(
    r"cusolver error: CUSOLVER_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)(?!.*cusolverDnCreate)", re.S
)


def attempt(
    factors: Tensor, damping: Tensor | None, method: str, *, diagonal: bool
) -> tuple[Results, Tensor]:
    """Decompose a batch once; return the results and a flag of success for each, on the device.

    ``method`` is "eigen" (values and vectors; values alone if diagonal), or with ``damping``
    "inverse" or "root".
    """
    if diagonal:
        return _attempt_diagonal(factors, damping, method)
    try:
        results = _decompose(factors, damping, method)
    except RuntimeError as error:
        raise_unless_a_solvers(error)
        results = (torch.zeros_like(factors),)
        if damping is None:
            results = torch.zeros_like(factors[..., 0]), *results
        return results, factors.new_zeros(len(factors), dtype=torch.bool)
    return results, torch.stack([r.isfinite().flatten(1).all(1) for r in results]).all(0)


def decompose(
    factors: Tensor, damping: Tensor | None, method: str, *, diagonal: bool
) -> tuple[Results, Tensor]:
    """Decompose a batch and retry failed factors one by one; the flags are on the host."""
    results, good = attempt(factors, damping, method, diagonal=diagonal)
    good = good.cpu()
    if diagonal or good.all():
        return results, good  # diagonals fail by numbers that are not finite: no retry would help
    for i in good.logical_not().nonzero().flatten().tolist():
        shift = None if damping is None else damping[i : i + 1]
        for again in _attempts(factors[i : i + 1], shift, method):
            if all(part.isfinite().all() for part in again):
                for result, part in zip(results, again, strict=True):
                    result[i] = part[0]
                good[i] = True
                break
    return results, good


def _decompose(factors: Tensor, damping: Tensor | None, method: str) -> Results:
    if damping is None:
        return eigen.eigendecompose(factors)
    if method == "root":
        (root,), good = roots.inverse_roots(factors, damping, 1, diagonal=False)
        return (root.masked_fill_(~good[:, None, None], torch.nan),)
    return (kronecker.damped_inverse(factors, damping),)


def _attempt_diagonal(
    factors: Tensor, damping: Tensor | None, method: str
) -> tuple[Results, Tensor]:
    if damping is None:
        new = factors.clamp(min=0)
    elif method == "root":
        ((new,), _) = roots.inverse_roots(factors, damping, 1, diagonal=True)
    else:
        new = 1 / (factors + damping[:, None])
    return (new,), (factors.isfinite() & new.isfinite()).all(1)


def raise_unless_a_solvers(error: RuntimeError) -> None:
    """Raise the error, unless a solver failed.

    Failures of cuSOLVER's algorithms come as plain errors, too; a lack of memory does not count.
    """
    if not isinstance(error, LinAlgError) and not _OF_CUSOLVER.match(str(error)):
        raise error


def _attempts(factor: Tensor, damping: Tensor | None, method: str) -> Iterator[Results]:
    """Yield one factor's results: as it is, in float64, with jitter on the diagonal, on the CPU."""
    double = factor.double()
    scale = double.diagonal(dim1=-2, dim2=-1).mean()
    jittered = double + 1e-8 * scale * torch.eye(factor.shape[-1], device=factor.device).double()
    candidates = [(factor, 1), (double, 1), (jittered, 1), (jittered.cpu(), 1)]
    if method == "root":  # averages in half precision may be indefinite by more than the damping
        candidates += [(double, 3), (double, 10)]
    for candidate, times in candidates:
        shift = None if damping is None else damping.to(candidate) * times
        try:
            yield _decompose(candidate, shift, method)
        except RuntimeError as error:
            raise_unless_a_solvers(error)
