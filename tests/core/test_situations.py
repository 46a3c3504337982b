"""Situations that crash, hang or silently corrupt other K-FAC code; each must just work."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from kaisa_optim import KFACSGD, KFACAdam, KFACParamScheduler, decay_at
from tests.support.watch import (
    Watch,
    assert_close,
    assert_factors,
    check_step,
    exact,
    factors_of,
    matrix_of,
    normal,
    rows_of,
    seeded,
    solved,
    taken,
)


class Net(nn.Module):
    """``forward`` is given by the test; it gets the modules as attributes."""

    def __init__(self, forward, **modules: nn.Module) -> None:
        super().__init__()
        self.call = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def mlp() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def loss_of(out: Tensor) -> Tensor:
    """Neither linear nor symmetric in its entries; averages the examples."""
    scale = torch.linspace(0.5, 2.0, out[0].numel(), dtype=out.dtype).view_as(out[0])
    return (scale * (out - 0.3).square()).sum() / len(out)


def fit(x: Tensor):
    return lambda model: loss_of(model(x)).backward()


# ---------------------------------------------------------------- how a layer is called


def test_layer_called_by_keyword():
    net = seeded(
        lambda: Net(
            lambda self, x: self.last(input=torch.tanh(self.first(input=x))),
            first=nn.Linear(4, 5),
            last=nn.Linear(5, 3),
        )
    )
    check_step(net, fit(normal(6, 4)), ["first", "last"], 6.0)


def test_model_called_by_keyword():
    net = mlp()
    x = normal(6, 4)
    check_step(net, lambda model: loss_of(model(input=x)).backward(), ["0", "2"], 6.0)


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
            opt.zero_grad()
            net(normal(3, 4, 5, 5)).square().sum((1, 2, 3)).mean().backward()
            opt.step()
    assert not last[0].weight.is_contiguous()
    for name, p in last.named_parameters():
        assert not torch.equal(p, before[name][0]) and p.stride() == before[name][1]
        assert opt.state[p]["momentum_buffer"].stride() == p.stride()
        torch.testing.assert_close(
            p, plain.get_parameter(name), rtol=1e-9, atol=1e-12, msg=name, check_stride=False
        )


# ---------------------------------------------------------------- what follows a layer


# ---------------------------------------------------------------- which layers train


def test_training_with_the_whole_model_in_eval():
    net = mlp().eval()
    check_step(net, fit(normal(6, 4)), ["0", "2"], 6.0)


def test_training_with_one_module_in_eval():
    net = seeded(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    )
    with torch.no_grad():
        net[1].running_mean.copy_(normal(5, seed=3))
        net[1].running_var.copy_(normal(5, seed=4).square() + 0.5)
    net.train()
    net[1].eval()
    net[2].eval()
    check_step(net, fit(normal(6, 4)), ["0", "3"], 6.0)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)

    def forward(self, x: Tensor, side: str) -> Tensor:
        return getattr(self, side)(torch.tanh(self.body(x)))


def snapshot(opt, name: str) -> tuple[Tensor, Tensor]:
    a, g = opt.preconditioner.factors(name)
    return a.clone(), g.clone()


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_layer_unused_in_this_batch(method):
    net = seeded(Branches)
    opt = exact(net, factor_update_steps=1, inv_update_steps=1, compute_method=method)
    x = normal(6, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The right branch appears in the second step for the first time, unused in the first.
        for side in ("left", "right"):
            opt.zero_grad()
            loss_of(net(x, side)).backward()
            opt.step()
        left = snapshot(opt, "left")
        right_before = net.right.weight.detach().clone()
        left_before = net.left.weight.detach().clone()
        opt.zero_grad()
        loss_of(net(x, "right")).backward()
        opt.step()
    assert torch.equal(net.left.weight, left_before)
    assert not torch.equal(net.right.weight, right_before)
    for kept, now in zip(left, opt.preconditioner.factors("left"), strict=True):
        assert torch.equal(kept, now)
    # Back in use, its average weighs its own two batches only.
    twin = copy.deepcopy(net)
    watch = Watch(twin, "left")
    loss_of(twin(2 * x, "left")).backward()
    opt.zero_grad()
    loss_of(net(2 * x, "left")).backward()
    opt.step()
    new = factors_of(*rows_of(twin.left, watch.trained("left")), 6.0)
    share = 0.05 / (1 - 0.95**2)
    expected = tuple(old + share * (n - old) for old, n in zip(left, new, strict=True))
    assert_factors(opt, "left", expected)


def test_layer_first_used_when_no_statistics_are_due():
    # It takes statistics at its first pass, not at the next turn of all layers.
    net = seeded(Branches)
    opt = exact(net, factor_update_steps=10, inv_update_steps=10)
    x = normal(6, 4)
    loss_of(net(x, "left")).backward()
    opt.step()
    for _ in range(2):
        twin = copy.deepcopy(net)
        watch = Watch(twin, "right")
        loss_of(twin(x, "right")).backward()
        opt.zero_grad()
        loss_of(net(x, "right")).backward()
        steps = taken(opt, net)
        if opt.preconditioner.steps == 2:
            expected = factors_of(*rows_of(twin.right, watch.trained("right")), 6.0)
        assert_factors(opt, "right", expected)
        gradient = matrix_of(twin.right, twin.right.weight.grad, twin.right.bias.grad)
        step = matrix_of(twin.right, steps["right.weight"], steps["right.bias"])
        assert_close(step, solved(*expected, gradient), 1e-8)


def test_layer_unused_from_now_on():
    net = seeded(Branches)
    opt = exact(net, lr=0.05, factor_update_steps=1, inv_update_steps=2)
    x = normal(6, 4)
    for _ in range(2):
        opt.zero_grad()
        (loss_of(net(x, "left")) + loss_of(net(x, "right"))).backward()
        opt.step()
    before = net.right.weight.detach().clone()
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            opt.zero_grad()
            loss = loss_of(net(x, "left"))
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(net.right.weight, before)


def test_layer_unused_in_this_batch_with_a_zero_gradient():
    net = seeded(Branches)
    opt = exact(net, factor_update_steps=1, inv_update_steps=1)
    x = normal(6, 4)
    (loss_of(net(x, "left")) + loss_of(net(x, "right"))).backward()
    opt.step()
    before, factors = net.right.weight.detach().clone(), snapshot(opt, "right")
    opt.zero_grad(set_to_none=False)
    loss_of(net(x, "left")).backward()
    opt.step()
    assert torch.equal(net.right.weight, before)
    for kept, now in zip(factors, opt.preconditioner.factors("right"), strict=True):
        assert torch.equal(kept, now)


def test_gradient_that_is_none():
    net = mlp()
    twin = copy.deepcopy(net)
    watch = Watch(twin, "0")
    x = normal(6, 4)
    fit(x)(twin)
    opt = exact(net)
    fit(x)(net)
    net[0].weight.grad = None
    net[2].weight.grad = net[2].bias.grad = None
    steps = taken(opt, net)
    assert net[0].weight.grad is None and net[2].weight.grad is None
    for name in ("0.weight", "2.weight", "2.bias"):
        assert torch.count_nonzero(steps[name]) == 0, name
    factors = factors_of(*rows_of(twin[0], watch.trained("0")), 6.0)
    gradient = matrix_of(twin[0], torch.zeros_like(twin[0].weight), twin[0].bias.grad)
    assert_close(steps["0.bias"], solved(*factors, gradient)[0, :, -1], 1e-8)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "wrap",
    [nn.utils.weight_norm, parametrizations.weight_norm, parametrizations.orthogonal],
    ids=["weight_norm by hook", "weight_norm", "orthogonal"],
)
def test_weight_norm_and_parametrized_modules(wrap):
    net = mlp()
    wrap(net[0])
    x = normal(6, 4)
    with pytest.warns(UserWarning, match="raw gradients"):
        opt = exact(net)
    assert list(opt.preconditioner.layers) == ["2"]
    fit(x)(net)
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    steps = taken(opt, net)
    for name, gradient in gradients.items():
        if name.startswith("0."):
            assert_close(steps[name], gradient, 1e-12, name)
            assert name in opt.preconditioner.uncovered
        else:
            assert (steps[name] - gradient).abs().max() > 1e-3


def test_module_parametrized_after_construction():
    # The product of A and G no longer describes its gradient: it must not be used.
    net = mlp()
    opt = exact(net, factor_update_steps=1, inv_update_steps=1)
    parametrizations.orthogonal(net[0])
    with pytest.warns(UserWarning) as caught:
        for _ in range(4):  # until calls around the module have been searched
            opt.zero_grad()
            fit(normal(6, 4))(net)
            gradient = net.get_parameter("0.parametrizations.weight.original").grad.clone()
            steps = taken(opt, net)
    texts = [str(one.message) for one in caught]
    assert len(texts) == 2 and "no statistics" in texts[0] and "original: 20" in texts[1]
    assert_close(steps["0.parametrizations.weight.original"], gradient, 1e-12)


# ---------------------------------------------------------------- scaled, broken and skipped steps


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("method", ["polar", "eigen"])
def test_nan_batch_whose_step_the_scaler_skips(method, fused):
    def make():
        net = mlp().float()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        opt = KFACAdam(
            net,
            lr=0.01,
            fused=fused,
            compute_method=method,
            **({"grad_scaler": scaler} if method == "eigen" else {}),
            factor_update_steps=1,
            inv_update_steps=1,
        )
        return net, scaler, opt

    def train(net, scaler, opt, x):
        opt.zero_grad()
        scaler.scale(loss_of(net(x))).backward()
        scaler.step(opt)
        scaler.update()

    bad = normal(6, 4).float()
    bad[2, 1] = torch.nan
    net, scaler, opt = make()
    for x in (normal(6, 4).float(), bad, normal(6, 4, seed=2).float()):
        train(net, scaler, opt, x)
    assert scaler.get_scale() == 2.0**7
    twin, scaler, other = make()
    train(twin, scaler, other, normal(6, 4).float())
    scaler.update(2.0**7)
    train(twin, scaler, other, normal(6, 4, seed=2).float())
    assert opt.preconditioner.steps == other.preconditioner.steps == 2
    for name in ("0", "2"):
        for mine, theirs in zip(
            opt.preconditioner.factors(name), other.preconditioner.factors(name), strict=True
        ):
            assert torch.equal(mine, theirs)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def train_steps(batches: list[Tensor | None], *, drop=None) -> tuple[nn.Module, KFACSGD]:
    """``None`` after a batch means that its step is skipped."""
    net = mlp()
    opt = KFACSGD(net, lr=0.1, momentum=0.9, factor_update_steps=1, inv_update_steps=1)
    for x, then in zip(batches, [*batches[1:], 0], strict=True):
        if x is None:
            continue
        fit(x)(net)
        if then is not None:
            opt.step()
        opt.zero_grad() if drop is None else drop(net, opt)
    return net, opt


def same(one: tuple[nn.Module, KFACSGD], other: tuple[nn.Module, KFACSGD]) -> bool:
    parameters = zip(one[0].parameters(), other[0].parameters(), strict=True)
    factors = [
        zip(one[1].preconditioner.factors(n), other[1].preconditioner.factors(n), strict=True)
        for n in ("0", "2")
    ]
    return all(torch.equal(a, b) for pairs in (parameters, *factors) for a, b in pairs)


def test_nan_batch_whose_step_the_user_skips():
    bad = normal(6, 4)
    bad[0, 0] = torch.nan
    with_it = train_steps([normal(6, 4), bad, None, normal(6, 4, seed=2)])
    without = train_steps([normal(6, 4), normal(6, 4, seed=2)])
    assert same(with_it, without)


def test_nan_batch_whose_step_is_taken_does_not_poison_the_averages():
    net = mlp()
    opt = exact(net, factor_update_steps=1, inv_update_steps=1)
    fit(normal(6, 4))(net)
    opt.step()
    saved = copy.deepcopy(net.state_dict())
    before = {name: snapshot(opt, name) for name in ("0", "2")}
    bad = normal(6, 4)
    bad[0, 0] = torch.nan
    opt.zero_grad()
    fit(bad)(net)
    with pytest.warns(UserWarning, match="not finite have been left out for '0', '2'"):
        opt.step()
    net.load_state_dict(saved)  # the user goes back to the last good weights
    for name, factors in before.items():
        assert_factors(opt, name, factors, 1e-15)
    opt.zero_grad()
    fit(normal(6, 4))(net)
    steps = taken(opt, net)
    assert all(step.isfinite().all() for step in steps.values())


@pytest.mark.parametrize(
    "drop",
    [
        lambda net, opt: opt.zero_grad(),
        lambda net, opt: opt.zero_grad(set_to_none=False),
        lambda net, opt: net.zero_grad(),
    ],
    ids=["optimizer", "optimizer to zero", "model"],
)
def test_step_that_the_user_skips(drop):
    with_it = train_steps(
        [normal(6, 4), normal(3, 4, seed=1), None, normal(6, 4, seed=2)], drop=drop
    )
    without = train_steps([normal(6, 4), normal(6, 4, seed=2)], drop=drop)
    assert same(with_it, without)


def test_leftover_micro_batch_from_an_aborted_accumulation():
    x = normal(7, 4)

    def aborted(clear) -> tuple[nn.Module, KFACSGD]:
        net = mlp()
        opt = KFACSGD(net, lr=0.1)
        try:
            fit(normal(5, 4, seed=8))(net)
            raise InterruptedError
        except InterruptedError:
            clear(net, opt)
        fit(x[:3])(net)
        fit(x[3:])(net)
        opt.step()
        return net, opt

    def by_hand(net: nn.Module, opt: KFACSGD) -> None:
        for p in net.parameters():
            p.grad = None

    net = mlp()
    clean = net, KFACSGD(net, lr=0.1)
    fit(x[:3])(net)
    fit(x[3:])(net)
    clean[1].step()
    for clear in (lambda net, opt: opt.zero_grad(), lambda net, opt: net.zero_grad(), by_hand):
        assert same(aborted(clear), clean)
    # Control: left in place, it is part of the next step.
    assert not same(aborted(lambda net, opt: None), clean)


# ---------------------------------------------------------------- other work beside training


def test_forwards_under_no_grad_in_training_mode():
    x = normal(6, 4)

    def train(model: nn.Module) -> None:
        with torch.no_grad():
            model(normal(9, 4, seed=1))
        out = model(x)
        with torch.inference_mode():
            model(normal(11, 4, seed=2))
        loss_of(out).backward()
        with torch.no_grad():
            model(normal(9, 4, seed=3))

    check_step(mlp(), train, ["0", "2"], 6.0)


def test_autograd_grad_with_create_graph_beside_training():
    x = normal(6, 4)
    net = mlp()
    opt, clean = exact(net), exact(other := mlp())
    fit(x)(other)
    clean.step()
    probe = normal(3, 4, seed=5).requires_grad_()
    out = net(probe)
    (slope,) = torch.autograd.grad(out.square().sum(), probe, create_graph=True)
    torch.autograd.grad(slope.square().sum(), list(net.parameters()), retain_graph=True)
    torch.autograd.grad(out.sum(), [net[0].weight], create_graph=True)
    fit(x)(net)
    out = net(probe)
    (slope,) = torch.autograd.grad(out.square().sum(), probe, create_graph=True)
    torch.autograd.grad(slope.square().sum(), list(net.parameters()), allow_unused=True)
    opt.step()
    assert same((net, opt), (other, clean))


def test_gradient_penalty_in_the_loss():
    x = normal(6, 4).requires_grad_()

    def train(model: nn.Module) -> None:
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (loss_of(out) + slope.square().sum() / len(x)).backward(inputs=list(model.parameters()))

    net = mlp()
    twin = copy.deepcopy(net)
    watch = Watch(twin, "0", "2")
    out = twin(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (loss_of(out) + slope.square().sum() / len(x)).backward()
    x.grad = None
    opt = exact(net)
    train(net)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert_close(p.grad, q.grad)
    opt.step()
    for name in ("0", "2"):
        rows = rows_of(twin.get_submodule(name), watch.trained(name))
        assert_factors(opt, name, factors_of(*rows, 6.0))


def test_per_example_gradients_by_torch_func_beside_training():
    x = normal(6, 4)
    net, other = mlp(), mlp()
    opt, clean = exact(net), exact(other)
    fit(x)(other)
    clean.step()
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def one(parameters, example):
        return loss_of(torch.func.functional_call(net, parameters, (example[None],)))

    def each():
        return torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(parameters, x)

    before = each()
    fit(x)(net)
    each()
    # Without a transform too: the weights that receive the gradient are not the model's.
    moved = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    loss_of(torch.func.functional_call(net, moved, (x,))).backward()
    # And with the model's own weights.
    assert_close(torch.func.vmap(net)(x), net(x))
    slopes = torch.func.vmap(torch.func.jacrev(net))(x)
    wanted = torch.autograd.functional.jacobian(net, x).diagonal(dim1=0, dim2=2)
    assert_close(slopes, wanted.movedim(-1, 0))
    for name, p in net.named_parameters():
        assert_close(before[name].mean(0), p.grad, what=name)
        assert_close(moved[name].grad, p.grad, what=name)
    opt.step()
    assert same((net, opt), (other, clean))


# ---------------------------------------------------------------- sharing


def test_shared_module_is_counted_once():
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.again(torch.tanh(self.first(x)))))

    layer = nn.Linear(4, 4)
    net = seeded(lambda: Net(forward, first=layer, again=layer, out=nn.Linear(4, 3)))
    opt = check_step(net, fit(normal(6, 4)), ["first", "out"], 6.0)
    assert list(opt.preconditioner.layers) == ["first", "out"]
    assert not opt.preconditioner.uncovered


def test_tied_weights_are_counted_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(self.embed(x))))

    net = seeded(Tied)
    x = torch.tensor([[0, 3, 3], [6, 1, 0]])
    opt = exact(net)
    assert list(opt.preconditioner.layers) == ["embed", "body"]
    assert not opt.preconditioner.uncovered
    twin = copy.deepcopy(net)
    watch = Watch(twin, "body")
    loss_of(twin(x)).backward()
    loss_of(net(x)).backward()
    steps = taken(opt, net)
    assert not torch.allclose(steps["embed.weight"], twin.embed.weight.grad)
    factors = factors_of(*rows_of(twin.body, watch.trained("body")), 2.0)
    gradient = matrix_of(twin.body, twin.body.weight.grad, twin.body.bias.grad)
    step = matrix_of(twin.body, steps["body.weight"], steps["body.bias"])
    assert_close(step, solved(*factors, gradient), 1e-8)


# ---------------------------------------------------------------- precision


def state_dtypes(opt) -> set[torch.dtype]:
    kfac = opt.preconditioner
    tensors = [t for shelf in (kfac.owned, kfac.applied) for _, t in shelf.tensors()]
    return {t.dtype for t in tensors if t.is_floating_point()}


def test_factors_are_float32_under_bf16_autocast():
    # Products of 3000 rows that bf16 sums could not add up: 8 bits are lost after 256 of them.
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 4, bias=False))
    x = 1 + 0.1 * torch.randn(3000, 3)
    opt = KFACSGD(net, lr=0.0, compute_method="eigen", kl_clip=None)
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x)
        assert out.dtype == torch.bfloat16
        out.register_hook(lambda g: seen.append(g))
        loss = (out.float() * torch.linspace(0.5, 1.5, 4)).square().mean(0).sum()
    loss.backward()
    opt.step()
    assert state_dtypes(opt) == {torch.float32}
    g = seen[0].double()
    expected = factors_of(x.double()[None], g[None], 3000.0)
    assert_factors(opt, "0", expected, 1e-4)
    # Control: a product in bf16 would be told apart.
    rough = (x.bfloat16().T @ x.bfloat16()).double() / 3000
    assert (rough - expected[0][0]).abs().max() > 1e-4


def test_float64_model_is_really_float64():
    net = seeded(lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))
    x = 1 + 1e-9 * normal(6, 2)  # float32 would see six equal rows, and A of rank one
    opt = check_step(net, fit(x), ["0", "2"], 6.0)
    assert state_dtypes(opt) == {torch.float64}
    a, _ = opt.preconditioner.factors("0")
    centred = x - x.mean(0)
    spread = a[0, :2, :2] - a[0, :2, 2:] @ a[0, 2:, :2]
    assert spread.abs().max() < 1e-15 and centred.abs().max() > 1e-10


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
    (out.float() / 100).square().mean().backward()
    opt.step()
    a, g = opt.preconditioner.factors("0")
    assert a.dtype == g.dtype == torch.float32
    # What the layer sees: autocast rounds its input, too.
    rows = torch.cat([x.half().double(), torch.ones(8, 1, dtype=torch.float64)], 1)
    assert_close(a, (rows.T @ rows / 8)[None], 1e-6)
    assert g.isfinite().all() and g.abs().max() > 0
    assert all(p.isfinite().all() for p in net.parameters())


# ---------------------------------------------------------------- saving and copying


def quiet(seconds: list[Tensor], net: nn.Module, opt) -> None:
    for x in seconds:
        opt.zero_grad()
        fit(x)(net)
        opt.step()


@pytest.mark.parametrize("into", ["a new optimizer", "the same optimizer"])
def test_loading_a_state_dict_taken_before_the_first_step(into):
    net = mlp()
    opt = KFACSGD(net, lr=0.1, momentum=0.9)
    early = copy.deepcopy(opt.state_dict())
    batches = [normal(6, 4, seed=i) for i in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if into == "the same optimizer":
            weights = copy.deepcopy(net.state_dict())
            quiet(batches[:2], net, opt)
            net.load_state_dict(weights)
        else:
            net = mlp()
            opt = KFACSGD(net, lr=0.1, momentum=0.9)
        opt.load_state_dict(early)
        quiet(batches, net, opt)
    assert opt.preconditioner.steps == 3
    twin = mlp()
    clean = KFACSGD(twin, lr=0.1, momentum=0.9)
    quiet(batches, twin, clean)
    assert same((net, opt), (twin, clean))


@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("staggered", [False, True])
def test_resuming_in_the_middle_of_an_interval(method, staggered):
    def make():
        net = mlp()
        opt = KFACAdam(
            net,
            lr=0.01,
            factor_update_steps=2,
            inv_update_steps=3,
            compute_method=method,
            staggered=staggered,
        )
        return net, opt

    batches = [normal(6, 4, seed=i) for i in range(9)]
    net, opt = make()
    quiet(batches, net, opt)
    half, first = make()
    quiet(batches[:4], half, first)
    file = io.BytesIO()
    torch.save({"net": half.state_dict(), "opt": first.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again, second = make()
    again.load_state_dict(loaded["net"])
    second.load_state_dict(loaded["opt"])
    quiet(batches[4:], again, second)
    assert same((net, opt), (again, second))


# ---------------------------------------------------------------- torch.compile


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["model.compile()", "wrapper", "wrapper given"])
def test_torch_compile_before_construction(fresh_dynamo, how):
    x = normal(6, 4)
    net, other = mlp(), mlp()
    if how == "model.compile()":
        net.compile(backend="aot_eager")
        run, opt = net, exact(net)
    else:
        run = torch.compile(net, backend="aot_eager")
        opt = exact(run if how == "wrapper given" else net)
    clean = exact(other)
    for _ in range(2):
        opt.zero_grad()
        clean.zero_grad()
        fit(x)(run)
        fit(x)(other)
        opt.step()
        clean.step()
        for name in ("0", "2"):
            assert_factors(opt, name, clean.preconditioner.factors(name))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert_close(p, q)


def test_torch_compile_after_construction(fresh_dynamo):
    x = normal(6, 4)
    net, other = mlp(), mlp()
    opt, clean = exact(net, factor_update_steps=2), exact(other, factor_update_steps=2)
    fit(x)(net)
    fit(x)(other)
    opt.step()
    clean.step()
    compiled = torch.compile(net, backend="aot_eager")
    for _ in range(4):  # due for statistics and not, in turn
        opt.zero_grad()
        clean.zero_grad()
        fit(x)(compiled)
        fit(x)(other)
        opt.step()
        clean.step()
    for name in ("0", "2"):
        assert_factors(opt, name, clean.preconditioner.factors(name))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert_close(p, q)


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("what", ["training", "step", "both"])
def test_torch_compile_of_the_backward_pass_and_of_the_step(fresh_dynamo, what, cls):
    if what == "step" and torch.__version__ < (2, 7):
        pytest.skip("torch 2.6 calls such a method without its object")
    x = normal(6, 4)
    runs = []
    for compiled in (True, False):
        net = mlp()
        opt = cls(net, lr=0.05, factor_update_steps=2, inv_update_steps=2)

        def train(net: nn.Module = net, opt: Any = opt) -> None:
            opt.zero_grad()
            fit(x)(net)

        step = opt.step

        def both(train: Any = train, step: Any = step) -> None:
            train()
            step()

        if compiled and what == "step":
            step = torch.compile(step, backend="aot_eager")
        if compiled and what == "training":
            train = torch.compile(train, backend="aot_eager")
        if what == "both":
            train, step = torch.compile(both, backend="aot_eager") if compiled else both, int
        for _ in range(12):  # more than Dynamo compiles one function anew
            train()
            step()
        runs.append(net)
    for p, q in zip(*(net.parameters() for net in runs), strict=True):
        assert_close(p, q)


@pytest.mark.parametrize("when", ["before", "after"])
def test_torch_compile_over_attention(fresh_dynamo, when):
    x = normal(3, 5, 4)
    runs = []
    for compiled in (False, True):
        net = seeded(lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True))
        run = net
        if compiled and when == "before":
            run = torch.compile(net, backend="eager")
        opt = exact(net)
        if compiled and when == "after":
            run = torch.compile(net, backend="eager")
        for _ in range(2):
            opt.zero_grad()
            fit(x)(run)
            opt.step()
        runs.append((net, opt))
    (net, opt), (other, clean) = runs
    for name in clean.preconditioner.layers:
        assert_factors(opt, name, clean.preconditioner.factors(name))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert_close(p, q)


def test_torch_compile_called_before_construction(fresh_dynamo):
    # Compiled code does not look for hooks that come later: an error says what to do.
    x = normal(6, 4)
    net = mlp()
    compiled = torch.compile(net, backend="aot_eager")
    fit(x)(compiled)
    net.zero_grad()
    opt = exact(compiled)
    fit(x)(compiled)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(
        RuntimeError, match=r"of the same class, was compiled and called.*_dynamo\."
    ):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    torch._dynamo.reset()
    opt.zero_grad()
    fit(x)(compiled)
    opt.step()
    clean = exact(other := mlp())
    fit(x)(other)
    clean.step()
    for name in ("0", "2"):
        assert_factors(opt, name, clean.preconditioner.factors(name))


# ---------------------------------------------------------------- schedules


def test_scheduler_whose_factor_shrinks_an_interval():
    net = mlp()
    opt = exact(net, factor_update_steps=4, inv_update_steps=10, damping=0.8)
    scheduler = KFACParamScheduler(
        opt,
        factor_update_steps=lambda epoch: 0.5**epoch,
        inv_update_steps=decay_at([1, 2, 3], 0.3),
        damping=lambda epoch: 0.5**epoch,
    )
    seen = []
    for _ in range(5):
        kfac = opt.preconditioner
        seen.append(
            (kfac.factor_update_steps, kfac.inv_update_steps, opt.param_groups[0]["damping"])
        )
        opt.zero_grad()
        fit(normal(6, 4))(net)
        opt.step()
        scheduler.step()
    # Factors apply to the initial value: 10, 3, 0.9, 0.27, and never below 1.
    assert seen == [(4, 10, 0.8), (2, 3, 0.4), (1, 1, 0.2), (1, 1, 0.1), (1, 1, 0.05)]


def test_scheduler_that_compounds_only_when_asked():
    def values(**options) -> list[float]:
        opt = exact(mlp(), damping=1.0)
        scheduler = KFACParamScheduler(opt, damping=lambda epoch: 0.5 if epoch else 1.0, **options)
        out = []
        for _ in range(3):
            scheduler.step()
            out.append(opt.param_groups[0]["damping"])
        return out

    assert values() == [0.5, 0.5, 0.5]
    assert values(compound=True) == [0.5, 0.25, 0.125]


def test_functional_relu_in_place():
    # The in-place function, not the module, and on a view of the output.
    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = self.first(x)
        F.relu_(hidden)
        return self.last(hidden.view(-1, 2, 2).flatten(1))

    net = seeded(lambda: Net(forward, first=nn.Linear(4, 4), last=nn.Linear(4, 3)))
    check_step(net, fit(normal(6, 4)), ["first", "last"], 6.0)
