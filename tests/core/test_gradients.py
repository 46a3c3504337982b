"""Gradients in any layout, missing or too large: what goes into their stacks comes back whole."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from tests.support.training import descend
from tests.support.watch import (
    Watch,
    assert_close,
    exact,
    factors_of,
    matrix_of,
    normal,
    rows_of,
    seeded,
    solved,
    taken,
)


class Kinds(nn.Module):
    """Two layers of each kind whose parameters have several dimensions."""

    def __init__(self) -> None:
        super().__init__()
        pairs = {
            "conv": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2),
            "back": lambda: nn.ConvTranspose2d(4, 4, 3, padding=1),
            "linear": lambda: nn.Linear(12, 12),
            "words": lambda: nn.Embedding(5, 12),
            "attend": lambda: nn.MultiheadAttention(12, 2, batch_first=True),
        }
        for name, make in pairs.items():
            setattr(self, name, nn.ModuleList([make(), make()]))

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        for layer in (*self.conv, *self.back):
            images = layer(images).tanh()
        rows = self.words[0](tokens) + self.words[1](tokens) + images.flatten(2)
        for layer in self.linear:
            rows = layer(rows).tanh()
        for layer in self.attend:
            rows = rows + layer(rows, rows, rows)[0]
        return rows.square().sum((1, 2)).mean()


@pytest.mark.parametrize("how", [{}, {"compute_method": "eigen", "kl_clip": 1e-3}])
def test_gradients_laid_out_in_any_way(how):
    """Of two layers of a shape, one's as its parameter, the other's with its dimensions reversed;
    in the second step without a layer, in the third with all of them again."""
    plain = seeded(Kinds)
    turned = copy.deepcopy(plain)
    opts = [KFACSGD(net, lr=0.01, inv_update_steps=1, **how) for net in (plain, turned)]
    images, tokens = normal(3, 4, 3, 4), torch.arange(12).remainder(5).view(3, 4)
    start = copy.deepcopy(list(plain.parameters()))
    for step in range(3):
        for net, opt in zip((plain, turned), opts, strict=True):
            opt.zero_grad()
            net(images, tokens).backward()
            if step == 1:
                for p in net.linear[0].parameters():
                    p.grad = None
            for name, p in net.named_parameters():
                if net is turned and ".0." in name and p.grad is not None:
                    back = list(reversed(range(p.dim())))
                    p.grad = p.grad.permute(back).contiguous().permute(back)
            opt.step()
        for (name, one), other in zip(plain.named_parameters(), turned.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=name)
    assert not any(map(torch.equal, start, plain.parameters()))


@pytest.mark.parametrize("how", [{}, {"compute_method": "eigen", "kl_clip": 1e-3}])
def test_parameters_laid_out_in_any_way(how):
    """Channels last, and norms of different sizes: gradients and weights keep their layout."""

    def make() -> nn.Module:
        convs = [nn.Conv2d(4, 4, 3, padding=1, bias=i == 2) for i in range(3)]
        wide = nn.Conv2d(4, 6, 1, bias=False)
        norms = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(6)
        return nn.Sequential(convs[0], norms[0], convs[1], norms[1], convs[2], wide, norms[2])

    plain = seeded(make)
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    before = {name: (p.detach().clone(), p.stride()) for name, p in last.named_parameters()}
    for net in (plain, last):
        opt = KFACSGD(net, lr=0.1, momentum=0.9, **how)
        for _ in range(2):
            descend(opt, net(normal(3, 4, 5, 5)).square().sum((1, 2, 3)).mean())
    assert not last[0].weight.is_contiguous()
    for name, p in last.named_parameters():
        assert not torch.equal(p, before[name][0]) and p.stride() == before[name][1]
        assert opt.state[p]["momentum_buffer"].stride() == p.stride()
        torch.testing.assert_close(
            p, plain.get_parameter(name), rtol=1e-9, atol=1e-12, msg=name, check_stride=False
        )


def test_gradient_that_is_none():
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    twin = copy.deepcopy(net)
    watch = Watch(twin, "0")
    x = normal(6, 4)
    twin(x).square().sum(1).mean().backward()
    opt = exact(net)
    net(x).square().sum(1).mean().backward()
    net[0].weight.grad = None
    net[2].weight.grad = net[2].bias.grad = None
    steps = taken(opt, net)
    assert net[0].weight.grad is None and net[2].weight.grad is None
    for name in ("0.weight", "2.weight", "2.bias"):
        assert torch.count_nonzero(steps[name]) == 0, name
    factors = factors_of(*rows_of(twin[0], watch.trained("0")), 6.0)
    gradient = matrix_of(twin[0], torch.zeros_like(twin[0].weight), twin[0].bias.grad)
    assert_close(steps["0.bias"], solved(*factors, gradient)[0, :, -1], 1e-8)


@pytest.mark.parametrize(
    ("optimizer", "method", "spike"),
    [
        *itertools.product([KFACSGD, KFACAdam], ["eigen"], [1e20, 1e28]),
        *itertools.product([KFACSGD, KFACAdam], ["polar"], [1e20, 1e28]),
    ],
)
def test_a_spike_of_the_loss_leaves_weights_finite(optimizer, method, spike):
    """The clip's sum overflowed at once, and Adam's second moment where its basis turned later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
    opt = optimizer(model, lr=0.01, compute_method=method)
    for i in range(12):
        x = torch.randn(8, 20)
        x[:, :5] = 0
        descend(opt, model(x).square().mean() * (spike if i == 3 else 1))
    assert all(p.abs().max() < 2 for p in model.parameters())
