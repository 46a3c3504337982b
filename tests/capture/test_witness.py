"""The gradient tells whether all of a weight's uses were seen, and read as what they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kaisa_optim import KFACAdam
from kaisa_optim.capture.hooks import Capture
from kaisa_optim.capture.uses import Uses
from kaisa_optim.layers import Layer
from kaisa_optim.layers.linear import LinearLayer
from tests.layers.test_uses import Body, loss_of
from tests.support.watch import normal, seeded


class Net(nn.Module):
    """Layers of all kinds, which are used as their modules say."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.conv = nn.Conv1d(4, 6, 3, padding=1, groups=2)
        self.deep = nn.Conv2d(6, 2, (3, 1), stride=(2, 1), padding_mode="circular", padding=(1, 0))
        self.by_use = Body(lambda m, x: x @ m.w, w=normal(2, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = x + self.attention(x, x, x)[0]
        x = self.conv(x.mT).tanh()
        x = self.deep(x[..., None]).mean((2, 3))
        return self.head(self.by_use(x).tanh())


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.head(self.first(x).tanh() if self.twice else x)


TOKENS = torch.tensor([[0, 3, 3, 1, 5], [6, 1, 0, 2, 2]])


def elsewhere(
    net: nn.Module, x: Tensor, loss: Callable[[nn.Module, Tensor], Tensor], steps: int = 1
) -> tuple[dict[str, float], list[str]]:
    """Return the report's shares after some steps, and the warnings."""
    opt = KFACAdam(net, lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            opt.zero_grad()
            loss(net, x).backward()
            opt.step()
    assert not opt.preconditioner.capture.witness.due  # all were compared
    texts = [str(w.message) for w in caught if "comes from no call" in str(w.message)]
    return opt.preconditioner.coverage().elsewhere, texts


def plain(net: nn.Module, x: Tensor) -> Tensor:
    return loss_of(net(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_rows_of_all_kinds_make_their_gradients(dtype):
    net = seeded(Net).to(dtype)
    assert elsewhere(net, TOKENS, plain, steps=3) == ({}, [])


@pytest.mark.parametrize("reentrant", [False, True])
def test_rows_under_a_checkpoint_make_the_gradient(reentrant):
    net = seeded(Head)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        hidden = checkpoint(net.first, x, use_reentrant=reentrant).tanh()
        return loss_of(net.head(checkpoint(net.first, hidden, use_reentrant=reentrant)))

    # A reentrant checkpoint's calls are gradients of their own, and are known one by one.
    assert elsewhere(net, normal(6, 4), loss, steps=12 if reentrant else 1) == ({}, [])


def test_autocast_rounds_no_layer_into_the_report():
    net = seeded(Head).float()

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(net(x)).float()

    assert elsewhere(net, normal(64, 4).float(), loss) == ({}, [])


def test_a_penalty_is_told_with_its_share_and_the_layer_stays_covered():
    net = seeded(Head)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return loss_of(net(x)) + 0.5 * net.first.weight.square().sum()

    x = normal(6, 4)
    plain(net, x).backward()
    of_rows, decay = net.first.weight.grad.clone(), net.first.weight.detach().clone()
    net.zero_grad()
    shares, texts = elsewhere(net, x, loss)
    whole = of_rows + decay
    expected = float(decay.norm() / max(whole.norm(), of_rows.norm()))
    assert shares == {"first": pytest.approx(expected, rel=1e-6)}
    assert len(texts) == 1 and "first" in texts[0]


def test_a_use_outside_of_the_models_forward_is_told():
    net = seeded(Head)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return loss_of(net(x)) + F.linear(x, net.first.weight).square().sum()

    shares, texts = elsewhere(net, normal(6, 4), loss, steps=3)
    assert shares.keys() == {"first"} and shares["first"] > 0.1 and len(texts) == 1


def test_calls_that_come_later_are_compared_anew():
    net = seeded(Head)
    opt, due = KFACAdam(net, lr=1e-3), []
    for step in range(60):
        net.twice = step >= 20
        opt.zero_grad()
        loss_of(net(normal(6, 4))).backward()
        opt.step()
        due.append(bool(opt.preconditioner.capture.witness.due))
    assert not any(due[:20]) and any(due[20:]) and not due[-1]
    assert opt.preconditioner.coverage().elsewhere == {}


def _twice(capture: Capture, layer: Layer, output: Tensor, *call) -> Tensor:
    return TAP(capture, layer, TAP(capture, layer, output, *call), *call)


def _flipped(layer: LinearLayer, x: Tensor, grad: Tensor) -> Tensor:
    return ROWS(layer, x, grad).flip(3)


TAP, ROWS = Capture._tap, LinearLayer.input_rows
FAULTS = {
    "a call counts twice": (Capture, "_tap", _twice),
    "rows are read wrongly": (LinearLayer, "input_rows", _flipped),
    "a second use is not seen": (Uses, "takes", lambda *_: False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault):
    class Again(Head):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(super().forward(x), self.head.weight.T)

    net, x = seeded(Again), normal(6, 4)
    assert elsewhere(net, x, plain) == ({}, [])
    with mock.patch.object(*FAULTS[fault]):
        shares, texts = elsewhere(seeded(Again), x, plain)
    assert shares and max(shares.values()) > 0.1 and len(texts) == 1
