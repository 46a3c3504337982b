"""Sums of statistics at the edges of their dtypes, and the running averages that they enter.

A step's G enters divided by its mean eigenvalue, for which the loss has no scale.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.linalg import products
from tests.support import groups
from tests.support.training import (
    ANEW,
    assert_same,
    backward,
    descend,
    early,
    factors,
    network,
    train,
    warnings_as,
)
from tests.support.watch import Body, Watch, assert_close, factors_of, normal, rows_of, seeded

SHARES = torch.tensor([1.0, 1, 1, 1e-3, 1e-3, 1e-3], dtype=torch.float64)[:, None]
property_test = settings(max_examples=15)
scales = st.lists(st.sampled_from([0.0, 1e-8, 1e-3, 1.0, 1e5]), min_size=2, max_size=4)


@property_test
@given(scales=scales, decay=st.sampled_from([0.3, 0.95]), widest=st.sampled_from([3, 100]))
def test_each_g_enters_divided_by_its_mean_eigenvalue(scales, decay, widest):
    """Block by block, and zero as zero; A enters as it is. Both as means that the decay weighs.

    The second block of the convolution has far smaller gradients.
    """
    conv = seeded(lambda: nn.Conv1d(4, 6, 2, groups=2))
    model = Body(lambda m, x: m.conv(x) * SHARES, conv=conv)
    opt = KFACAdam(model, lr=0.0, factor_decay=decay, max_factor_size=widest, **ANEW)
    weight, means = 0.0, [torch.zeros(()), torch.zeros(())]
    for step, scale in enumerate(scales):
        twin = nn.Sequential(nn.Conv1d(4, 6, 2, groups=2).double())
        twin[0].load_state_dict(model.conv.state_dict())
        watch = Watch(twin, "0")
        x = normal(5, 4, 6, seed=step)
        (scale * (twin(x) * SHARES).square().sum() / 5).backward()
        descend(opt, scale * model(x).square().sum() / 5)
        a, g = factors_of(*rows_of(twin[0], watch.trained("0")), 5)
        values = torch.linalg.eigvalsh(g).mean(1) if widest > 3 else g.diagonal(0, 1, 2).mean(1)
        weight = decay * weight + 1 - decay
        for i, new in enumerate((a, g / values[:, None, None] if scale else g)):
            means[i] = means[i] + (1 - decay) / weight * (new - means[i])
    for found, wanted in zip(opt.preconditioner.factors("conv"), means, strict=True):
        wanted = wanted.diagonal(0, 1, 2) if found.dim() == 2 else wanted
        assert_close(found, wanted, 1e-9)


@pytest.mark.parametrize("number", [math.inf, math.nan])
@pytest.mark.parametrize("widest", [2, 100])
def test_sums_that_are_not_finite_stay_out_and_are_named(number, widest):
    """Whatever they are divided by; A, which was finite, counts, and so does the other layer's G.

    They are told once, by the exchange after the next refresh: a step that refreshes nothing does
    not wait for the device.
    """
    how = {"factor_update_steps": 1, "inv_update_steps": 4, "staggered": False}
    model, other = network(), network()
    with early():
        opt, reference = (KFACSGD(x, 0.0, max_factor_size=widest, **how) for x in (model, other))

    def broken(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * number)

    train(model, opt, range(2))
    train(other, reference, range(2))
    before = factors(opt)
    opt.zero_grad()
    reference.zero_grad()
    handle = model[0].register_forward_hook(broken)
    backward(model, 2)
    handle.remove()
    for p in model.parameters():
        p.grad = torch.nan_to_num(p.grad, 0.0, 0.0, 0.0)
    with reference.preconditioner.paused():
        backward(other, 2)
    reference.step()
    with warnings_as("error"):
        opt.step()
        now = factors(opt)
        train(model, opt, range(3, 5))
    train(other, reference, range(3, 5))
    assert_same(now["0"][1], before["0"][1])
    assert not any(map(torch.equal, (now["0"][0], *now["2"]), (before["0"][0], *before["2"])))
    assert all(f.isfinite().all() for pair in now.values() for f in pair)
    # G has gone on as though that batch had not been.
    assert_close(factors(opt)["0"][1], factors(reference)["0"][1], 1e-9)
    with pytest.warns(UserWarning, match="not finite have been left out for '0'$") as record:
        train(model, opt, [5])
    assert len(record) == 1
    with warnings_as("error"):
        train(model, opt, range(6, 9))


def test_a_mean_that_overflows_divides_nothing():
    """Divided by infinity, finite sums would be zeros, and zeros would be taken."""
    model = network(dtype=torch.float32)
    opt = KFACSGD(model, lr=0.1, **ANEW)
    train(model, opt, range(2))
    before = factors(opt)
    opt.zero_grad()
    backward(model, 2)
    for sums in opt.preconditioner.sums.of_layer.values():
        sums.g.diagonal(0, 1, 2).fill_(3e37)
        whole = 8 * sums.g  # of K examples
        assert whole.isfinite().all() and whole[0].trace().isinf()
    opt.step()
    for name, (_, g) in factors(opt).items():
        assert_same(g, before[name][1])
    with pytest.warns(UserWarning, match="not finite have been left out for '0', '2'"):
        train(model, opt, [3])


# ---- sums at the edges of their dtypes ----


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
    how = {"compute_method": "eigen", "kl_clip": None, "inv_dtype": torch.float16, **HALF[name]}
    opt = KFACSGD(net, lr=1.0, **how)
    descend(opt, net(torch.randn(3, 6)).square().sum(1).mean())
    assert all(p.isfinite().all() for p in net.parameters())
    stored = [t for n, t in groups.tensors(opt) if n in ("scale", "inverse")]
    # The test is about values beyond what the dtype holds: some must have come to its limit.
    assert any((t.abs() == torch.finfo(torch.float16).max).any() for t in stored)


def test_a_factor_that_is_not_finite_does_not_take_the_damping_of_the_other():
    mean_a, mean_g = torch.tensor([torch.inf, 0.0, 4.0]), torch.tensor([1.0, 1.0, 1.0])
    of_a, of_g = products.split_damping(torch.full((3,), 0.01), mean_a, mean_g)
    torch.testing.assert_close(of_a, torch.tensor([0.1, 0.1, 0.2]))
    torch.testing.assert_close(of_g, torch.tensor([0.1, 0.1, 0.05]))
