"""Parameters of modules without a kind: which are layers, and of what shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from kaisa_optim.layers import SCALES
from tests.layers.test_uses import Body, Scaled, headed, loss_of
from tests.support.watch import assert_close, exact, normal, seeded, solved, taken


def routed(x: Tensor) -> Tensor:
    return torch.tensor([0, 1, 0, 1, 1, 0])[: len(x)]


def one_by_one(m: nn.Module, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), m.w.shape[1])
    for expert in range(2):
        (at,) = torch.where(routed(x) == expert)
        out = out.index_add(0, at, F.linear(x[at], m.w[expert]))
    return out


def all_at_once(m: nn.Module, x: Tensor) -> Tensor:
    order = routed(x).argsort(stable=True)
    out = torch.bmm(x[order].view(2, 3, 4), m.w.mT)
    return torch.empty_like(out).view(6, 3).index_copy(0, order, out.view(6, 3))


@pytest.mark.parametrize("forward", [one_by_one, all_at_once])
def test_each_expert_is_a_block_with_the_rows_that_it_was_given(forward):
    x, weight = normal(6, 4), normal(2, 3, 4, seed=5)
    net = headed(Body(forward, w=weight))
    opt = exact(net)
    outputs: list[Tensor] = []
    net[0].register_forward_hook(lambda module, args, out: outputs.append(out))
    prediction = net(x)
    outputs[0].retain_grad()
    loss_of(prediction).backward()
    (out,), gradient = outputs, net[0].w.grad.clone()
    step = taken(opt, net)["0.w"]
    for expert in range(2):
        at = routed(x) == expert
        a, g = x[at].T @ x[at] / at.sum(), 6 * out.grad[at].T @ out.grad[at]
        for found, wanted in zip(opt.preconditioner.factors("0.w"), (a, g), strict=True):
            assert_close(found[expert], wanted)
        assert_close(step[expert], solved(a[None], g[None], gradient[expert][None])[0], 1e-8)


def test_an_expert_without_rows_keeps_its_averages_and_begins_with_those_of_the_others():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([x[:2] @ m.w[used[0]].T, x[2:] @ m.w[used[1]].T])

    net = headed(Body(forward, w=normal(3, 3, 4, seed=5)))
    opt = exact(net, factor_update_steps=1, factor_decay=0.5)
    factors = []
    for used in ((0, 1), (0, 2), (1, 2)):
        opt.zero_grad()
        loss_of(net(normal(6, 4, seed=used[1]))).backward()
        opt.step()
        factors.append([side.clone() for side in opt.preconditioner.factors("0.w")])
    for first, second, third in zip(*factors, strict=True):
        assert_close(first[2], first[:2].mean(0))
        assert_close(second[1], first[1])
        assert_close(third[0], second[0])
        for before, after, expert in ((first, second, 2), (second, third, 1)):
            assert not torch.allclose(before[expert], after[expert])


def in_turn(m: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([x[:2] @ m.w[0], x[2:] @ m.w[1]])


# Weights whose stored rows are inputs: a forward, the weight, an input, and its rows by block.
STORED = {
    "a matrix": (lambda m, x: x @ m.w, (4, 3), (6, 4), lambda x: [x]),
    "experts": (in_turn, (2, 4, 3), (6, 4), lambda x: [x[:2], x[2:]]),
    "places": (
        lambda m, x: x + m.w,
        (4, 3),
        (6, 4, 3),
        lambda x: [torch.eye(4, dtype=x.dtype).repeat(6, 1)],
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_a_is_of_inputs_and_g_of_output_gradients_however_the_weight_is_stored(name):
    forward, shape, of_input, rows_of = STORED[name]
    net, x = headed(Body(forward, w=normal(*shape, seed=5))), normal(*of_input)
    opt, outputs = exact(net), []
    net[0].register_forward_hook(lambda module, args, out: outputs.append(out))
    prediction = net(x)
    outputs[0].retain_grad()
    loss_of(prediction).backward()
    opt.step()
    a, g = opt.preconditioner.factors("0.w")
    rows = rows_of(x)
    parts = outputs[0].grad.flatten(0, -2).split([len(x) for x in rows])
    for block, (inputs, gradients) in enumerate(zip(rows, parts, strict=True)):
        assert_close(a[block], inputs.T @ inputs / len(inputs))
        assert_close(g[block], 6 * gradients.T @ gradients)


@pytest.mark.parametrize("name", [*STORED, "a table that is tied"])
def test_a_scale_of_the_loss_that_changes_leaves_the_averages(name):
    averages = []
    for base in (1.0, 10.0):
        if name in STORED:
            forward, shape, of_input, _ = STORED[name]
            net = headed(Body(forward, w=normal(*shape, seed=5)))
            inputs = [normal(*of_input, seed=i) for i in range(3)]
        else:
            net = seeded(lambda: nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Linear(3, 7)))
            net[2].weight = net[0].weight
            inputs = [torch.arange(7).roll(i)[: 4 + i] for i in range(3)]
        opt = KFACSGD(net, lr=1e-3, factor_update_steps=1, inv_update_steps=1, factor_decay=0.5)
        before = [p.detach().clone() for p in net.parameters()]
        for i, x in enumerate(inputs):
            opt.zero_grad()
            (base**i * loss_of(net(x))).backward()
            opt.step()
            for p, value in zip(net.parameters(), before, strict=True):
                p.data.copy_(value)
        averages.append(opt.preconditioner.factors("0.w" if name in STORED else "0"))
    for found, wanted in zip(*averages, strict=True):
        assert_close(found, wanted, 1e-9)


def test_groups_of_rows_are_those_of_the_experts():
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch multiplies no groups")

    def in_groups(m: nn.Module, x: Tensor) -> Tensor:
        ends = torch.tensor([3, 3, 8], dtype=torch.int32)
        return torch._grouped_mm(x, m.w.mT, offs=ends)

    def in_loops(m: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([x[:3] @ m.w[0].T, x[3:] @ m.w[2].T])

    x, weight = normal(8, 4).float(), normal(3, 4, 4, seed=5).float()
    factors = []
    for forward in (in_groups, in_loops):
        net = headed(Body(forward, w=weight.clone()), 4).float()
        opt = exact(net)
        loss_of(net(x)).backward()
        opt.step()
        factors.append(opt.preconditioner.factors("0.w"))
    for found, wanted in zip(*factors, strict=True):
        assert_close(found, wanted, 1e-4)


@pytest.mark.parametrize("kaisa", [False, True])
def test_the_base_steps_what_scales_or_shifts_entries(kaisa):
    """Under a rate of 1, with the loss's raw gradient, and without a warning."""
    net = seeded(Scaled)
    opt = exact(net, **({"normalization": "kaisa"} if kaisa else {}))
    assert list(opt.preconditioner.layers) == ["first.0", "head"]
    loss_of(net(normal(5, 2, 4, 3))).backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    steps = taken(opt, net)
    report = opt.preconditioner.coverage()
    names = {name for name in steps if not name.startswith(("first.0", "head"))}
    assert {name: one.reason for name, one in report.left.items()} == dict.fromkeys(names, SCALES)
    for name in names:
        assert_close(steps[name], gradients[name])
