"""The gradient tells whether all of a weight's uses were seen, and read as what they are."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from kaisa_optim import KFACAdam
from kaisa_optim.capture.hooks import Capture
from kaisa_optim.layers import Layer, watch
from kaisa_optim.layers.kinds import LinearLayer
from kaisa_optim.layers.watch import WatchMode
from tests.layers.test_uses import loss_of
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import descend, recorded_warnings
from tests.support.watch import Body, normal, seeded


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
    net: nn.Module, x: Tensor, loss: Callable[[nn.Module, Tensor], Tensor], steps: int = 3
) -> tuple[dict[str, float], list[str]]:
    """Return the report's shares after some steps, and the warnings."""
    opt = KFACAdam(net, lr=1e-9, factor_update_steps=1)
    with recorded_warnings("comes from no call") as texts:
        for _ in range(steps):
            descend(opt, loss(net, x))
    return opt.preconditioner.coverage().elsewhere, texts


def plain(net: nn.Module, x: Tensor) -> Tensor:
    return loss_of(net(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_rows_of_all_kinds_make_their_gradients(dtype):
    net = seeded(Net).to(dtype)
    assert elsewhere(net, TOKENS, plain) == ({}, [])


@pytest.mark.parametrize("reentrant", [False, True])
def test_rows_under_a_checkpoint_make_the_gradient(reentrant):
    net = seeded(Head)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        hidden = checkpoint(net.first, x, use_reentrant=reentrant).tanh()
        return loss_of(net.head(checkpoint(net.first, hidden, use_reentrant=reentrant)))

    # A reentrant checkpoint's calls are gradients of their own, and are known one by one.
    assert elsewhere(net, normal(6, 4), loss, steps=6) == ({}, [])


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


def second_of_two(net: nn.Module, x: Tensor) -> Tensor:
    loss_of(net(x)).backward()
    return loss_of(net(x)) + 0.5 * net.first.weight.square().sum()


# Losses with other sources of a gradient than the model's calls, and the steps that tell them.
SOURCES: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], int]] = {
    "a penalty of the second micro-batch": (second_of_two, 2),
    "a use outside of the model": (
        lambda net, x: loss_of(net(x)) + F.linear(x, net.first.weight).square().sum(),
        3,
    ),
    "a bias": (lambda net, x: loss_of(net(x)) + net.first.bias.sum(), 3),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_gradient_with_other_sources_is_told(source):
    shares, texts = elsewhere(seeded(Head), normal(6, 4), *SOURCES[source])
    assert shares.keys() == {"first"} and shares["first"] > 0.1 and len(texts) == 1


@pytest.mark.parametrize("beside", ["a call before", "a penalty", "a call within"])
def test_what_a_reentrant_checkpoint_hides_is_told(beside):
    """Its backward pass is one of its own, within that of the other uses."""

    class Hides(Head):
        def forward(self, x: Tensor) -> Tensor:
            if beside == "a penalty":  # the layer's only call is recomputed
                return self.head(checkpoint(self.first, x, use_reentrant=True).tanh())
            if beside == "a call within":
                return self.head(self.first(checkpoint(self.use, x, use_reentrant=True)))
            return self.head(checkpoint(self.use, self.first(x).tanh(), use_reentrant=True))

        def use(self, x: Tensor) -> Tensor:
            out = F.linear(x, self.first.weight.exp())
            return out + self.first(x) if beside == "a call within" else out

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return loss_of(net(x)) + net.first.weight.square().sum() * (beside == "a penalty")

    shares, texts = elsewhere(seeded(Hides), normal(6, 4).requires_grad_(), loss)
    assert shares.keys() == {"first"} and len(texts) == 1


def test_a_pass_without_a_backward_tells_nothing_in_the_next_step():
    net = seeded(Head)
    opt = KFACAdam(net, lr=1e-9, factor_update_steps=3, staggered=False)
    for _ in range(5):
        descend(opt, loss_of(net(normal(6, 4))))
        loss_of(net(normal(6, 4)))  # an evaluation that forgot no_grad
    assert opt.preconditioner.coverage().elsewhere == {}


def steps_with_comparisons(twice_from: int) -> list[int]:
    """Return the steps after which a layer waits for a comparison."""
    net, found = seeded(Head), []
    opt = KFACAdam(net, lr=1e-3, factor_update_steps=1)
    for step in range(20):
        net.twice = step >= twice_from
        descend(opt, loss_of(net(normal(6, 4))))
        if opt.preconditioner.capture.witness.due:
            found.append(step)
    assert opt.preconditioner.coverage().elsewhere == {}
    return found


def test_calls_that_come_later_are_compared_anew_and_all_calls_ever_more_rarely():
    rarely = steps_with_comparisons(twice_from=99)
    assert rarely == [1, 3, 7, 15]  # after the second, fourth, ... pass that gathers
    assert steps_with_comparisons(twice_from=10) == sorted([*rarely, 10])


@pytest.mark.filterwarnings("ignore:statistics that were not", "ignore:the refresh of layer")
def test_a_gradient_that_is_not_finite_is_compared_later():
    net = seeded(Head)
    opt, x = KFACAdam(net, lr=1e-9, factor_update_steps=1), normal(6, 4)
    with pytest.warns(UserWarning, match="comes from no call"):
        for step in range(8):
            opt.zero_grad()
            loss = loss_of(net(x)) * (torch.inf if step == 0 else 1)
            (loss + net.first.weight.square().sum()).backward()
            if step == 0:
                for p in net.parameters():
                    p.grad.zero_()
            opt.step()
    assert opt.preconditioner.coverage().elsewhere.keys() == {"first"}


def test_hooks_end_with_the_optimizer():
    net = seeded(Head)
    opt = KFACAdam(net, lr=1e-3)
    net(normal(6, 4))  # no backward pass
    assert net.first.weight._backward_hooks
    del opt
    gc.collect()
    assert not net.first.weight._backward_hooks


def _twice(capture: Capture, layer: Layer, output: Tensor, *call) -> Tensor:
    return TAP(capture, layer, TAP(capture, layer, output, *call), *call)


def _flipped(layer: LinearLayer, x: Tensor, grad: Tensor) -> Tensor:
    return ROWS(layer, x, grad).flip(3)


def _without_padding(mode: WatchMode, found: Any, out: Tensor, indices: Tensor, *_: Any) -> Tensor:
    return PICKED(mode, found, out, indices)


class Again(Head):
    """A head that is used a second time, by code alone."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.head.weight.T)


def _padded(m: nn.Module, x: Tensor) -> Tensor:
    return F.embedding((x.abs() * 2).long().clamp(max=3), m.w, padding_idx=0)


def _by_counts(m: nn.Module, x: Tensor) -> Tensor:
    # No keyword: only a planted fault reads it.
    return F.embedding(x.argmax(1), m.w, None, None, 2.0, True)


def _by_use(forward: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(Body(forward, w=normal(4, 4)), nn.Linear(4, 2))


TAP, ROWS, PICKED = Capture._tap, LinearLayer.input_rows, WatchMode.rows
FAULTS: dict[str, tuple[Callable[[], nn.Module], Any, str, Any]] = {
    "a call counts twice": (Again, Capture, "_tap", _twice),
    "rows are read wrongly": (Again, LinearLayer, "input_rows", _flipped),
    "a second use is not seen": (Again, Capture, "takes", lambda *_: False),
    "a padding has rows": (_by_use(_padded), WatchMode, "rows", _without_padding),
    "rows are divided by counts": (
        _by_use(_by_counts),
        watch,
        "WATCHED",
        watch.WATCHED | {F.embedding: lambda mode, out, x, w, **_: mode.rows(mode.find(w), out, x)},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault):
    make, *plant = FAULTS[fault]
    x = normal(6, 4)
    assert elsewhere(seeded(make), x, plain) == ({}, [])
    with mock.patch.object(*plant):
        shares, texts = elsewhere(seeded(make), x, plain)
    assert shares and max(shares.values()) > 0.1 and len(texts) == 1


def in_shards(fault: str | None) -> tuple[dict[str, float], list[str]]:
    make, *plant = FAULTS[fault or "a call counts twice"]
    model = seeded(make)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    x = normal(6, 4).chunk(2)[dist.get_rank()]
    with mock.patch.object(*plant) if fault else contextlib.nullcontext():
        return elsewhere(model, x, plain)


@pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")
@pytest.mark.parametrize("fault", [None, "a call counts twice", "rows are read wrongly"])
def test_planted_faults_are_caught_in_shards(fault):
    """All ranks report the same shares, and one warns."""
    (shares, texts), other = run(2, in_shards, fault)
    assert other == (shares, [])
    assert len(texts) == bool(fault) == (max(shares.values(), default=0) > 0.1)
