"""What second-order state and statistics must keep at their edges: storage, failures, parts."""

import contextlib
import copy

import pytest
import torch
from kaisa_optim.layers.norm import BatchNormLayer
from torch import nn

from kaisa_optim import KFACSGD
from kaisa_optim.layers import PassSettings, conv, norm
from kaisa_optim.layers.sampling import WHOLE, Sample
from kaisa_optim.layers.saving import UNKNOWN, saving_hooks
from kaisa_optim.linalg import eigen


def step(net, x, **options):
    opt = KFACSGD(net, lr=1.0, **{"compute_method": "eigen", "kl_clip": None, **options})
    net(x).square().sum(1).mean().backward()
    opt.step()
    return opt


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
    stored = [t for n, t in opt.preconditioner.applied.tensors() if n in ("scale", "inverse")]
    # The test is about values beyond what the dtype holds: some must have come to its limit.
    assert any((t.abs() == torch.finfo(torch.float16).max).any() for t in stored)


def test_a_stored_product_follows_the_factor_that_did_not_fail(monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4)).double()
    opt = step(
        net,
        torch.randn(8, 6).double(),
        compute_eigenvalue_outer_product=True,
        factor_update_steps=1,
        inv_update_steps=1,
        damping=0.1,
    )
    whole = eigen.eigendecompose

    def only_g(factors):
        if factors.shape[-1] == 7:
            raise torch.linalg.LinAlgError("planted")
        return whole(factors)

    monkeypatch.setattr(eigen, "eigendecompose", only_g)
    opt.zero_grad()
    net(torch.randn(8, 6).double()).square().sum(1).mean().backward()
    with pytest.warns(UserWarning, match="layer '0' failed, 1 in a row; its older state"):
        opt.step()
    kfac = opt.preconditioner
    a, g = (kfac.applied.by_key[kfac.layers["0"], side] for side in "ag")
    expected = 1 / (g["values"][:, :, None] * a["values"][:, None, :] + 0.1)
    torch.testing.assert_close(kfac.applied.groups[0].tensors["scale"], expected)


def batch_norm_moment(x, grad, part=WHOLE, eps=1e-5):
    layer = BatchNormLayer("", nn.BatchNorm2d(x.shape[1], eps=eps))
    layer.trained = layer.covers = (True, True)
    return layer.moments(x, grad, (True, True), PassSettings(False, x.dtype, part=part)).g


def expected_moment(x, grad, eps=1e-5):
    """In float64, the mean first."""
    x, grad = x.double().transpose(0, 1).flatten(1), grad.double().transpose(0, 1).flatten(1)
    x = x - x.mean(1, keepdim=True)
    rows = torch.stack([x * (x.square().mean(1, keepdim=True) + eps).rsqrt() * grad, grad], 1)
    return rows @ rows.mT


@pytest.mark.parametrize("mean", [0.0, 1e3, 1e5])
@pytest.mark.parametrize("chunk", [40, 1 << 19])
def test_a_batch_far_from_zero(monkeypatch, mean, chunk):
    monkeypatch.setattr(norm, "_chunk", lambda tensor: chunk)
    x, grad = torch.randn(2, 16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    x = x + mean
    found, expected = batch_norm_moment(x, grad), expected_moment(x, grad)
    rounding = torch.finfo(torch.float32).eps * mean  # of the mean, as in the forward itself
    assert (found.double() - expected).norm() < (1e-5 + rounding) * expected.norm()


LAYOUTS = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "expanded": lambda t: t[:1].expand_as(t),
    "transposed": lambda t: t.mT,
}


@pytest.mark.parametrize("of_x", LAYOUTS)
@pytest.mark.parametrize("of_grad", LAYOUTS)
def test_a_batch_however_it_lies_in_memory(of_x, of_grad):
    x, grad = torch.randn(2, 6, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double() + 2
    x, grad = LAYOUTS[of_x](x), LAYOUTS[of_grad](grad)
    expected = expected_moment(x, grad)
    torch.testing.assert_close(batch_norm_moment(x, grad), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("of_x", LAYOUTS)
@pytest.mark.parametrize("covers", [(True, True), (True, False)])
def test_entries_as_gpus_take_them(of_x, covers):
    x, grad = torch.randn(2, 6, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double() + 2
    layer = BatchNormLayer("", nn.BatchNorm2d(3))
    x = LAYOUTS[of_x](x)
    frame = layer._frame(x, None, x.dtype)
    found = layer._entries_of_gpus(x, grad, frame, x.dtype, shifts=covers[1])
    moment = expected_moment(x, grad)
    wanted = [moment[:, 0, 0], moment[:, 1, 0], moment[:, 1, 1]][: len(found)]
    assert len(found) == (3 if covers[1] else 1)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def save_nothing():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: pytest.fail("looked at"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("hooks", [contextlib.nullcontext, save_nothing])
def test_a_batch_is_normalized_as_the_forward_did(dtype, training, hooks):
    """By numbers that the forward kept, if none stands before them and they are not coarse."""
    torch.manual_seed(0)
    net = nn.BatchNorm2d(3).to(dtype).train(training)
    for statistic in (net.running_mean, net.running_var):
        statistic.uniform_(1, 2)
    layer = BatchNormLayer("", net)
    layer.trained = (True, True)
    x, grad = torch.randn(2, 6, 3, 4, 4).to(dtype)
    with hooks():
        mode = layer.mode(net(x))
    kept = hooks is contextlib.nullcontext and dtype == torch.float32 and saving_hooks() != UNKNOWN
    assert (mode is not None) == (kept or not training)
    mean, var = net.running_mean.double(), net.running_var.double()
    net.running_mean.add_(1)
    found = layer.moments(x, grad, (True, True), PassSettings(False, torch.float32, mode=mode)).g
    expected = expected_moment(x, grad)
    if not training:
        x = (x.double() - mean[:, None, None]) * (var + net.eps).rsqrt()[:, None, None]
        rows = torch.stack([x * grad, grad.double()], 2).transpose(0, 1).transpose(1, 2).flatten(2)
        expected = rows @ rows.mT
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_batch_that_is_sorted(monkeypatch):
    """Its first images are no measure of the others."""
    monkeypatch.setattr(norm, "_chunk", lambda tensor: 48)
    x, grad = torch.randn(2, 64, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    x[:1] += 1e3
    grad[:1] = 0
    found, expected = batch_norm_moment(x, grad), expected_moment(x, grad)
    apart = (found.double() - expected).abs() / expected.abs()
    assert apart.diagonal(dim1=1, dim2=2).max() < 2e-4


@pytest.mark.parametrize(
    "value, shape",
    [(3625123.5, (32, 1, 4, 7)), (84536.3, (54, 1, 6, 7)), (7164414.0, (46, 1, 4, 7))],
)
def test_a_channel_that_never_changes(monkeypatch, value, shape):
    """Means of these equal numbers are not quite equal to them."""
    monkeypatch.setattr(norm, "_chunk", lambda tensor: 49)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = batch_norm_moment(torch.full(shape, value), grad, eps=1e-12)
    assert found.isfinite().all() and (found.diagonal(dim1=1, dim2=2) >= 0).all()


def test_a_part_is_normalized_by_all_of_the_batch(monkeypatch):
    x, grad = torch.randn(2, 16, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    x[8:] += 2
    part = Sample(4, 1).part(x.shape, (0,))
    whole = batch_norm_moment(x, grad, part)
    monkeypatch.setattr(norm, "_chunk", lambda tensor: 50)
    torch.testing.assert_close(batch_norm_moment(x, grad, part), whole, rtol=1e-12, atol=1e-12)
    none = torch.zeros_like(grad)
    none[1::4] = grad[1::4]
    torch.testing.assert_close(whole, 4 * expected_moment(x, none), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: nn.LayerNorm(4), (7, 5, 4)),
        (lambda: nn.BatchNorm2d(4), (7, 4, 3, 3)),
        (lambda: nn.BatchNorm2d(4).eval(), (7, 4, 3, 3)),
        (lambda: nn.GroupNorm(2, 4), (7, 4, 5)),
        (lambda: nn.Conv2d(4, 3, 2), (7, 4, 3, 3)),
    ],
)
@pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
def test_a_batch_taken_in_parts_is_the_same_batch(monkeypatch, make, shape, weight_sharing):
    torch.manual_seed(0)
    net = nn.Sequential(make().double(), nn.Flatten())
    x = torch.randn(shape).double()
    whole = step(copy.deepcopy(net), x, weight_sharing=weight_sharing)
    monkeypatch.setattr(norm, "_chunk", lambda tensor: 60)
    monkeypatch.setattr(conv, "_PATCH_ELEMENTS", 60)
    parts = step(net, x, weight_sharing=weight_sharing)
    for one, other in zip(*(o.preconditioner.factors("0") for o in (whole, parts)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
