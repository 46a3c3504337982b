"""Kronecker algebra against dense matrices."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from kaisa_optim.linalg import products
from tests.support.training import assert_near

sizes = st.integers(1, 9)


@given(sizes, sizes, st.integers(0, 99), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_softened_directions(g, a, seed, kept):
    """T_G D T_A with T = αI + (1 - α) R, roots as matrices or as diagonals."""
    generator = torch.Generator().manual_seed(seed)
    root_g, root_a = (
        torch.randn(2, n, n, generator=generator, dtype=torch.float64) for n in (g, a)
    )
    root_g, root_a = root_g + root_g.mT, root_a + root_a.mT
    direction = torch.randn(2, g, a, generator=generator, dtype=torch.float64)
    for of_g, of_a in itertools.product((root_g, root_g.diagonal(0, 1, 2)), (root_a, root_a[:, 0])):
        found = products.softened(direction.clone(), of_g, of_a, kept)
        for one, d, r, s in zip(found, direction, of_g, of_a, strict=True):
            r, s = (x.diag() if x.dim() == 1 else x for x in (r, s))
            eye_g, eye_a = (torch.eye(len(x), dtype=torch.float64) for x in (r, s))
            outer = kept * eye_g + (1 - kept) * r, kept * eye_a + (1 - kept) * s
            assert_near(one, outer[0] @ d @ outer[1], 1e-10, 1e-10)
