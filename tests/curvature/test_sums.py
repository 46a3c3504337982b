"""Sums and state at the edges of their dtypes, and batches in parts."""

import copy
import itertools

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.layers import conv
from kaisa_optim.linalg import products
from tests.support import groups
from tests.support.close import assert_close
from tests.support.training import ANEW, descend, warnings_as
from tests.support.watch import Body


def step(net, x, **options):
    opt = KFACSGD(net, lr=1.0, **{"compute_method": "eigen", "kl_clip": None, **options})
    descend(opt, net(x).square().sum(1).mean())
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


def either_way() -> nn.Module:
    """Return a matrix that is stored inputs × outputs, and one that is used both ways."""
    parts = {"turned": torch.randn(5, 6), "tied": torch.randn(6, 6)}
    return Body(lambda m, x: nn.functional.linear((x @ m.turned).tanh() @ m.tied, m.tied), **parts)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("make", "lr"), [(layers, 0.01), (either_way, 0.0)])
@pytest.mark.parametrize("power", [-75, -90, 50])
@pytest.mark.parametrize("apart", [0, 10, -20])
def test_gradients_of_any_size_give_the_same_factors(power, apart, make, lr):
    """And weights. Squares of 1e-22 are zero in float32, and squares of 1e20 are infinite."""
    trained = []
    for first in (0, power):
        torch.manual_seed(0)
        net = make()
        opt = KFACAdam(net, lr=lr, eps=0.0, **ANEW)
        for x in torch.randn(6, 2, 8, 1, 5):
            opt.zero_grad()
            for part, scale in zip(x, (first, first + apart), strict=True):
                (net(part).square().mean() * 2.0**scale).backward()
            opt.step()
        factors = map(opt.preconditioner.factors, opt.preconditioner.layers)
        trained.append([*net.parameters(), *itertools.chain(*factors)])
    for one, other in zip(*trained, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)


def test_inputs_whose_squares_are_zero_leave_the_identity():
    torch.manual_seed(0)
    net = nn.Linear(5, 3, bias=False)
    opt = KFACAdam(net, lr=0.01, **ANEW)
    before = net.weight.detach().clone()
    with warnings_as("error"):
        for x in torch.randn(3, 8, 5):
            descend(opt, net(1e-22 * x).mul(1e22).square().mean())
    root = groups.state(opt, "", "a")["root"]
    assert torch.equal(root, torch.eye(5)[None]) and not torch.equal(net.weight, before)


@pytest.mark.parametrize("how", ["half model", "autocast"])
def test_activations_around_300_in_fp16(how):
    # 300² is beyond fp16's 65504.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4))
    x = 300 + torch.randn(8, 3)
    if how == "half model":
        net, x = net.half(), x.half()
    opt = KFACSGD(net, lr=0.1, damping=0.01)
    with torch.autocast("cpu", dtype=torch.float16, enabled=how == "autocast"):
        out = net(x)
    descend(opt, (out.float() / 100).square().mean())
    a, g = opt.preconditioner.factors("0")
    assert a.dtype == g.dtype == torch.float32
    # What the layer sees: autocast rounds its input, too.
    rows = torch.cat([x.half().double(), torch.ones(8, 1, dtype=torch.float64)], 1)
    assert_close(a, (rows.T @ rows / 8)[None], 1e-6)
    assert g.isfinite().all() and g.abs().max() > 0
    assert all(p.isfinite().all() for p in net.parameters())


HALF = {
    "stored product": {"compute_eigenvalue_outer_product": True, "damping": 1e-6},
    "full": {"compute_method": "inverse", "damping_split": "full", "damping": 1e-6},
    "pi": {"compute_method": "inverse", "damping": 1e-9},
}


@pytest.mark.parametrize("name", HALF)
def test_half_precision_storage_never_overflows(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    opt = step(net, torch.randn(3, 6), inv_dtype=torch.float16, **HALF[name])
    assert all(p.isfinite().all() for p in net.parameters())
    stored = [t for n, t in groups.tensors(opt) if n in ("scale", "inverse")]
    # The test is about values beyond what the dtype holds: some must have come to its limit.
    assert any((t.abs() == torch.finfo(torch.float16).max).any() for t in stored)


def test_a_factor_that_is_not_finite_does_not_take_the_damping_of_the_other():
    mean_a, mean_g = torch.tensor([torch.inf, 0.0, 4.0]), torch.tensor([1.0, 1.0, 1.0])
    of_a, of_g = products.split_damping(torch.full((3,), 0.01), mean_a, mean_g)
    torch.testing.assert_close(of_a, torch.tensor([0.1, 0.1, 0.2]))
    torch.testing.assert_close(of_g, torch.tensor([0.1, 0.1, 0.05]))
