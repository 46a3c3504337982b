"""Decompositions in batches: what is flagged, and what is raised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kaisa_optim.linalg import decompose


def batch() -> Tensor:
    return torch.eye(3).mul(torch.arange(1.0, 5.0)[:, None, None]).contiguous()


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("damping", [None, torch.ones(4)], ids=["bare", "damped"])
def test_a_factor_that_fails_is_flagged_beside_the_others(damping, raises):
    seen = []

    def solve(factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        seen.append(len(factors))
        failed = (factors.diagonal(0, 1, 2)[:, 0] - 3).abs() < 1e-3
        if raises and failed.any():
            raise torch.linalg.LinAlgError("planted")
        found = (2 * factors).masked_fill(failed[:, None, None], torch.nan)
        return (found,) if damping is not None else (found[..., 0], found)

    results, good = decompose.attempt(batch(), damping, solve, diagonal=False)
    assert seen == ([4, 1, 1, 1, 1] if raises else [4])
    assert good.tolist() == [True, True, False, True] and len(results) == 1 + (damping is None)
    assert torch.equal(results[-1][good], 2 * batch()[good]) and results[-1][2].isnan().any()


def of_cusolver(status: str, call: str) -> RuntimeError:
    return RuntimeError(f"cusolver error: CUSOLVER_STATUS_{status}, when calling `{call}( ... )`")


SYEVD, CREATE = "cusolverDnSsyevd", "cusolverDnCreate"
FAILURES = [torch.linalg.LinAlgError("planted"), of_cusolver("EXECUTION_FAILED", SYEVD)]
OTHERS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    of_cusolver("ALLOC_FAILED", SYEVD),
    of_cusolver("INTERNAL_ERROR", CREATE),
]


@pytest.mark.parametrize("failure", FAILURES, ids=str)
@pytest.mark.parametrize("error", [None, *OTHERS], ids=str)
@pytest.mark.parametrize("before", [0, 1])
def test_errors_of_solvers_are_failures_and_others_are_raised(failure, error, before):
    """At once, or in an attempt after one."""
    calls = []

    def solve(*_):
        calls.append(1)
        raise failure if error is None or len(calls) <= before else error

    if error is None:
        _, good = decompose.attempt(batch(), None, solve, diagonal=False)
        assert not good.any() and len(calls) == 1 + len(good)
        return
    with pytest.raises(RuntimeError) as found:
        decompose.attempt(batch(), None, solve, diagonal=False)
    assert found.value is error and len(calls) == before + 1
