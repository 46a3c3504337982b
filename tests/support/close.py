"""One comparison of tensors for all tests, with a tolerance for each dtype."""

from __future__ import annotations

import torch
from torch import Tensor

# Of the largest entry.
RTOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def assert_close(
    actual: Tensor,
    expected: Tensor,
    rtol: float | None = None,
    what: str = "",
    floor: float = 1e-4,
) -> None:
    """Fail where a difference is above ``rtol`` of the largest expected entry; NaN fails.

    A step is a difference of parameters of size 1: below ``floor`` its rounding is all there is.
    """
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    if expected.numel() == 0:
        return
    rtol = RTOL[expected.dtype] if rtol is None else rtol
    difference = (actual.double() - expected.double()).abs().max().item()
    limit = rtol * max(expected.abs().max().item(), floor)
    assert difference <= limit, f"{what}: off by {difference:.3e}, allowed {limit:.3e}"
