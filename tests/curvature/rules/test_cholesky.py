"""Damped inverses of factors that are not finite or not positive."""

from __future__ import annotations

import pytest
import torch

from kaisa_optim import KFACSGD
from kaisa_optim.linalg import kronecker
from tests.curvature.test_refresh import ALWAYS, state_of
from tests.support.training import assert_same, network, train


def test_an_inverse_of_an_indefinite_average_is_told():
    """Cholesky's own verdict, with nothing planted: half-precision storage can break a factor."""
    model = network()
    opt = KFACSGD(model, lr=0.1, damping=1e-4, **ALWAYS["inverse"])
    train(model, opt, [0])
    kept = [t.clone() for t in state_of(opt, "0")]
    a = opt.preconditioner.store.owned.by_key[opt.preconditioner.layers["0"], "a"]
    a["average"].sub_(10 * torch.eye(5).double())
    with pytest.warns(UserWarning, match="layer '0' failed, 1 in a row; its older state"):
        train(model, opt, [1])
    assert_same(state_of(opt, "0")[:1], kept[:1])


def test_a_factor_that_is_not_finite_does_not_take_the_damping_of_the_other():
    mean_a, mean_g = torch.tensor([torch.inf, 0.0, 4.0]), torch.tensor([1.0, 1.0, 1.0])
    of_a, of_g = kronecker.split_damping(torch.full((3,), 0.01), mean_a, mean_g)
    torch.testing.assert_close(of_a, torch.tensor([0.1, 0.1, 0.2]))
    torch.testing.assert_close(of_g, torch.tensor([0.1, 0.1, 0.05]))
