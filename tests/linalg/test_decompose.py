"""Decompositions in batches: what is tried again, and what is flagged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kaisa_optim.linalg import decompose


def batch() -> Tensor:
    return torch.eye(3).mul(torch.arange(1.0, 5.0)[:, None, None]).contiguous()


class Solver:
    """Doubles factors; of a factor that is 3 on its diagonal, some attempts are NaN."""

    def __init__(self, failures: float) -> None:
        self.failures = failures
        self.seen: list[tuple[int, torch.dtype, float]] = []

    def __call__(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor]:
        assert damping is not None
        self.seen.append((len(factors), factors.dtype, float(damping[-1])))
        found = 2 * factors
        if len(self.seen) <= self.failures:
            found[(factors.diagonal(0, 1, 2)[:, 0] - 3).abs() < 1e-3] = torch.nan
        return (found,)


@pytest.mark.parametrize("failures", [0, 1, 2, 5, 6])
def test_a_failed_factor_is_tried_alone_in_more_precision_and_with_more_damping(failures):
    solver = Solver(failures)
    (found,), good = decompose.decompose(
        batch(), torch.full((4,), 0.5), solver, (3, 10), diagonal=False
    )
    single, double = torch.float32, torch.float64
    attempts = [(4, single, 0.5), (1, single, 0.5), *[(1, double, 0.5)] * 3]
    attempts += [(1, double, 1.5), (1, double, 5.0)]
    assert solver.seen == attempts[: failures + 1]
    assert good.all()
    torch.testing.assert_close(found, 2 * batch(), rtol=1e-6, atol=1e-6)


def test_a_factor_that_always_fails_is_flagged_beside_the_others():
    (found,), good = decompose.decompose(batch(), torch.ones(4), Solver(99), (3,), diagonal=False)
    assert good.tolist() == [True, True, False, True]
    assert torch.equal(found[good], 2 * batch()[good]) and found[2].isnan().any()


def test_one_attempt_asks_no_second_time():
    solver = Solver(99)
    _, good = decompose.attempt(batch(), torch.ones(4), solver, diagonal=False)
    assert len(solver.seen) == 1 and good.tolist() == [True, True, False, True]


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
        _, good = decompose.decompose(batch(), None, solve, diagonal=False)
        assert not good.any() and len(calls) == 1 + 4 * len(good)
        return
    with pytest.raises(RuntimeError) as found:
        decompose.decompose(batch(), None, solve, diagonal=False)
    assert found.value is error and len(calls) == before + 1
