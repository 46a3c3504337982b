"""Calls with parameters that are watched: how a use is found, and what is told of others."""

from __future__ import annotations

import copy
import sys
import warnings
from types import FrameType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from kaisa_optim.layers import watch
from tests.layers.test_uses import Body, headed, loss_of, stepped
from tests.support.watch import assert_close, exact, normal, seeded, taken


def test_a_convolution_that_pads_its_input_itself():
    class Padded(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(F.pad(x, (1, 0, 1, 0)), self.weight, self.bias, self.stride, 0)

    x = normal(5, 2, 4, 4)
    net, twin = seeded(lambda: Padded(2, 3, 2)), seeded(lambda: nn.Conv2d(2, 3, 2))
    twin.load_state_dict(net.state_dict())
    head = nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(48, 2)).double()
    found = stepped(nn.Sequential(net, copy.deepcopy(head)), x)
    expected = stepped(nn.Sequential(twin, head), F.pad(x, (1, 0, 1, 0)))
    for name in ("0.weight", "0.bias"):
        assert_close(found[name], expected[name], 1e-9)


def test_an_unknown_use_is_told_after_the_first_step():
    net = nn.Sequential(headed(Body(lambda m, x: x @ m.w.exp(), w=normal(3, 3))), nn.Linear(2, 30))
    net = nn.Sequential(*net[0], net[1].double())
    opt = exact(net, lr=0.01)
    x = normal(6, 3)
    for _ in range(11):  # four of them gather
        opt.zero_grad()
        loss_of(net(x)).backward()
        gradient = net[0].w.grad.clone()
        step = taken(opt, net)["0.w"]
        assert_close(step, 0.01 * gradient, 1e-12)
    report = opt.preconditioner.coverage()
    assert report.left["0.w"].reason == "Body uses it in a way that no kind of layer knows"
    assert report.covered == report.total - 9
    assert not opt.preconditioner.registry.missing


@pytest.mark.parametrize(
    "use",
    [
        lambda inner, x: F.linear(x, inner.weight, inner.bias),
        lambda inner, x: x @ inner.weight.T + inner.bias,
    ],
)
def test_a_weight_used_outside_of_its_module_is_found_around_it(use):
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return use(self.inner, x)

    net = headed(seeded(Around))
    plain = headed(seeded(lambda: nn.Sequential(nn.Linear(4, 3))))
    opts = [exact(one, factor_update_steps=1, inv_update_steps=1) for one in (net, plain)]
    for one, opt in zip((net, plain), opts, strict=True):
        for _ in range(2):
            opt.zero_grad()
            loss_of(one(normal(6, 4))).backward()
            if opt.preconditioner.steps == 0:  # the first step searches alone
                before = [p.detach().clone() for p in one.parameters()]
            opt.step()
            if opt.preconditioner.steps == 1:
                for p, value in zip(one.parameters(), before, strict=True):
                    p.data.copy_(value)
    names = ("0.inner", "0.0")
    for side in range(2):
        found, wanted = (
            opt.preconditioner.factors(name)[side] for opt, name in zip(opts, names, strict=True)
        )
        assert_close(found, wanted, 1e-9)
    assert opts[0].preconditioner.coverage().share == 1


def test_a_model_without_any_known_use_trains_with_raw_gradients():
    """As adapters do that compute all of their weights."""
    net = Body(lambda m, x: x @ m.w.exp(), w=normal(3, 3))
    opt = exact(net, lr=0.01, factor_update_steps=2)
    with pytest.warns(UserWarning, match="w: 9, Body uses it in a way") as caught:
        for _ in range(12):
            opt.zero_grad()
            loss_of(net(normal(6, 3))).backward()
            assert_close(taken(opt, net)["w"], 0.01 * net.w.grad, 1e-12)
    assert len(caught) == 1 and opt.preconditioner.coverage().covered == 0


def test_freezing_a_covered_layer_lets_coverage_be_looked_at_anew():
    body = Body(lambda m, x: x @ m.w.exp(), w=normal(3, 3))
    net = seeded(lambda: nn.Sequential(body, nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1)))
    opt = exact(net, factor_update_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(16):
            net[1].requires_grad_(step < 8)
            opt.zero_grad()
            loss_of(net(normal(6, 3))).backward()
            opt.step()
            assert len(caught) == (step >= 8)
    assert "0.w: 9, Body uses it in a way" in str(caught[0].message)


def test_passes_that_do_not_gather_run_without_a_mode():
    net = headed(Body(lambda m, x: x @ m.w, w=normal(3, 3)))
    seen = []
    net[0].use = lambda m, x: seen.append(torch._C._len_torch_function_stack()) or x @ m.w
    opt = exact(net, factor_update_steps=3)
    for _ in range(4):
        opt.zero_grad()
        loss_of(net(normal(6, 3))).backward()
        opt.step()
    # All uses are looked for in the first pass. The head gathers in the third pass.
    assert seen == [1, 1, 0, 1]


@pytest.mark.parametrize("depth", [0, 6])
def test_many_parameters_of_unknown_use_cost_calls_in_proportion(depth):
    """In a pass of the search, two modules more take as many calls more, whatever their number."""

    def cost(count: int) -> tuple[int, int]:
        modes, calls = [], 0

        def use(m: nn.Module, x: Tensor) -> Tensor:
            modes.append(torch._C._len_torch_function_stack())
            return x @ m.w.exp()

        def profile(frame: FrameType, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call" and frame.f_globals.get("__name__") == watch.__name__

        net = headed(nn.Sequential(*[Body(use, w=normal(3, 3) / 9) for _ in range(count)]))
        for _ in range(depth):
            net = nn.Sequential(net)
        opt = KFACSGD(net, lr=0.01, factor_update_steps=1)
        for step in range(3):
            opt.zero_grad()
            sys.setprofile(profile if step == 2 else None)
            loss = loss_of(net(normal(6, 3)))
            sys.setprofile(None)
            loss.backward()
            opt.step()
        assert len(opt.preconditioner.registry.missing) == count
        return calls, max(modes)

    (two, _), (four, _), (six, modes) = map(cost, (2, 4, 6))
    assert 0 < six - four <= four - two and modes == 1
