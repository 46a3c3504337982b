"""What second-order state and statistics must keep at their edges: storage, failures, parts."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.layers import conv

POLAR = {"factor_update_steps": 1, "inv_update_steps": 1}


def step(net, x, **options):
    opt = KFACSGD(net, lr=1.0, **{"compute_method": "eigen", "kl_clip": None, **options})
    net(x).square().sum(1).mean().backward()
    opt.step()
    return opt


@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: nn.Conv2d(4, 3, 2), (7, 4, 3, 3)),
        (lambda: nn.ConvTranspose1d(4, 3, 2), (7, 4, 5)),
    ],
)
@pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
def test_a_batch_taken_in_parts_is_the_same_batch(monkeypatch, make, shape, weight_sharing):
    torch.manual_seed(0)
    net = nn.Sequential(make().double(), nn.Flatten())
    x = torch.randn(shape).double()
    whole = step(copy.deepcopy(net), x, weight_sharing=weight_sharing)
    monkeypatch.setattr(conv, "_PATCH_ELEMENTS", 60)
    parts = step(net, x, weight_sharing=weight_sharing)
    for one, other in zip(*(o.preconditioner.factors("0") for o in (whole, parts)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def trained_on_losses_times(scales):
    """Train with a micro-batch for each of the scales in a step; return weights and factors."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Linear(4, 2))
    opt = KFACAdam(net, lr=0.01, eps=0.0, **POLAR)
    for x in torch.randn(6, len(scales), 8, 1, 5):
        opt.zero_grad()
        for part, scale in zip(x, scales, strict=True):
            (net(part).square().mean() * scale).backward()
        opt.step()
    factors = [opt.preconditioner.factors(name) for name in ("0", "2", "4")]
    return [*net.parameters(), *itertools.chain(*factors)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("power", [-75, -90, 50])
@pytest.mark.parametrize("apart", [0, 10, -20])
def test_gradients_of_any_size_give_the_same_factors(power, apart):
    """Squares of 1e-22 are zero in float32, and squares of 1e20 are infinite."""
    plain = trained_on_losses_times([1.0, 2.0**apart])
    scaled = trained_on_losses_times([2.0**power, 2.0 ** (power + apart)])
    for one, other in zip(plain, scaled, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)


class EitherWay(nn.Module):
    """A matrix that is stored inputs × outputs, and one that is used both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(5, 6))
        self.tied = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return nn.functional.linear((x @ self.turned).tanh() @ self.tied, self.tied)


@pytest.mark.parametrize("power", [-75, -90, 50])
@pytest.mark.parametrize("apart", [0, 10, -20])
def test_gradients_of_any_size_also_of_weights_that_are_stored_either_way(power, apart):
    trained = []
    for first in (0, power):
        torch.manual_seed(0)
        net = EitherWay()
        opt = KFACAdam(net, lr=0.0, **POLAR)
        for x in torch.randn(6, 2, 8, 5):
            opt.zero_grad()
            for part, scale in zip(x, (first, first + apart), strict=True):
                (net(part).square().mean() * 2.0**scale).backward()
            opt.step()
        names = ("turned", "tied")
        trained.append([*itertools.chain(*map(opt.preconditioner.factors, names))])
    for one, other in zip(*trained, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)


def test_inputs_whose_squares_are_zero_leave_the_identity():
    torch.manual_seed(0)
    net = nn.Linear(5, 3, bias=False)
    opt = KFACAdam(net, lr=0.01, **POLAR)
    before = net.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in torch.randn(3, 8, 5):
            opt.zero_grad()
            net(1e-22 * x).mul(1e22).square().mean().backward()
            opt.step()
    root = opt.preconditioner.store.applied.by_key[opt.preconditioner.layers[""], "a"]["root"]
    assert torch.equal(root, torch.eye(5)[None]) and not torch.equal(net.weight, before)
