"""Eigenvalues and eigenvectors of factors."""

from __future__ import annotations

import torch
from torch import Tensor


def eigendecompose(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues ``[k, n]``, none below zero, and eigenvectors ``[k, n, n]`` of factors.

    The largest eigenvalues come first.
    """
    if factors.shape[-1] == 1:  # a solver would be called for each depthwise channel
        return factors[..., 0].clamp(min=0), torch.ones_like(factors)
    values, vectors = torch.linalg.eigh(factors)
    return values.clamp_(min=0).flip(-1), vectors.flip(-1)
