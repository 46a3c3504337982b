"""What is captured, when it counts, and what it costs."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from kaisa_optim import KFACSGD
from kaisa_optim.capture.hooks import Capture
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


def mlp() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def loss_of(out: Tensor) -> Tensor:
    """Averages the examples; empty batches give zero."""
    scale = torch.linspace(0.5, 2.0, out[:1].numel() or 1, dtype=out.dtype)
    scale = scale.view(out.shape[1:]) if len(out) else scale[0]
    return (scale * (out - 0.3).square()).sum() / max(len(out), 1)


def fit(x: Tensor) -> Callable[[nn.Module], None]:
    return lambda model: loss_of(model(x)).backward()


def expected(
    model: nn.Module, train: Callable[[nn.Module], None], name: str, terms: float
) -> tuple[Tensor, Tensor]:
    """The factors that a plain twin of the model gives."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    watch = Watch(twin, name)
    train(twin)
    return factors_of(*rows_of(twin.get_submodule(name), watch.trained(name)), terms)


def assert_same(one, other, names=("0", "2"), rtol: float = 1e-12) -> None:
    """Models and factors of two (model, optimizer) pairs."""
    for name in names:
        assert_factors(one[1], name, other[1].preconditioner.factors(name), rtol)
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert_close(p, q, rtol)


def clean_run(x: Tensor, make: Callable[[], nn.Module] = mlp, **options):
    """One step on one batch with nothing beside it."""
    net = make()
    opt = exact(net, **options)
    fit(x)(net)
    opt.step()
    return net, opt


# ---------------------------------------------------------------- several uses, freezing


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


def test_module_used_several_times_in_one_forward():
    net = seeded(Twice)
    opt = check_step(net, fit(normal(5, 4)), ["layer", "out"], 5.0)
    # A second pass, with a gradient in place, adds to the first.
    opt.zero_grad()
    opt = exact(net)
    halves = normal(3, 4, seed=1), normal(4, 4, seed=2)

    def train(model: nn.Module) -> None:
        for x in halves:
            (loss_of(model(x)) / 2).backward()

    wanted = expected(net, train, "layer", 7.0)
    train(net)
    opt.step()
    assert_factors(opt, "layer", wanted)


def test_module_used_a_different_number_of_times_in_each_pass():
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, times: int) -> Tensor:
            for _ in range(times):
                x = torch.tanh(self.layer(x))
            return x

    def train(model: nn.Module) -> None:
        for times in (3, 1):
            (loss_of(model(normal(2, 4), times)) / 2).backward()

    net = seeded(Loop)
    watch = Watch(twin := copy.deepcopy(net), "layer")
    train(twin)
    a, _ = rows_of(twin.layer, watch.trained("layer"))
    assert a.shape[1] == 8
    check_step(net, train, ["layer"], 4.0)


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
def test_frozen_from_the_start_and_later_unfrozen(frozen):
    net = mlp()
    for name in frozen:
        net[0].get_parameter(name).requires_grad_(False)
    kept = {name: net[0].get_parameter(name).detach().clone() for name in frozen}
    x = normal(6, 4)
    names = ["2"] if len(frozen) == 2 else ["0", "2"]
    opt = check_step(net, fit(x), names, 6.0, factor_update_steps=10, inv_update_steps=10)
    for name, value in kept.items():
        assert torch.equal(net[0].get_parameter(name), value)
    net[0].requires_grad_(True)
    # Not a turn for statistics, but the layer's are of another size now: it starts anew.
    for _ in range(2):
        opt.zero_grad()
        wanted = expected(net, fit(x), "0", 6.0)
        fit(x)(net)
        gradient = matrix_of(net[0], net[0].weight.grad, net[0].bias.grad)
        steps = taken(opt, net)
        if opt.preconditioner.steps == 2:
            first = wanted
        assert_factors(opt, "0", first)
        step = matrix_of(net[0], steps["0.weight"], steps["0.bias"])
        assert_close(step, solved(*first, gradient), 1e-8)


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
def test_frozen_in_the_middle_of_training(frozen):
    net = mlp()
    x = normal(6, 4)
    opt = check_step(net, fit(x), ["0", "2"], 6.0)
    other = tuple(t.clone() for t in opt.preconditioner.factors("2"))
    for name in frozen:
        net[0].get_parameter(name).requires_grad_(False)
    kept = {name: net[0].get_parameter(name).detach().clone() for name in frozen}
    opt.zero_grad()
    both = len(frozen) == 2
    wanted = None if both else expected(net, fit(x), "0", 6.0)
    fit(x)(net)
    steps = taken(opt, net)
    if wanted is not None:
        assert_factors(opt, "0", wanted)
        gradient = matrix_of(net[0], net[0].weight.grad, net[0].bias.grad)
        step = matrix_of(net[0], steps["0.weight"], steps["0.bias"])
        assert_close(step, solved(*wanted, gradient), 1e-8)
    for name, value in kept.items():
        assert torch.equal(net[0].get_parameter(name), value)
    for before, now in zip(other, opt.preconditioner.factors("2"), strict=True):
        assert torch.equal(before, now)  # the other layer kept its average


def test_parameters_outside_of_the_groups_are_left_alone():
    net = mlp()
    opt = exact([net[0].weight, *net[2].parameters()], model=net)
    assert opt.preconditioner.layers["0"].a_dim == 4
    x = normal(6, 4)
    a = x.T @ x / 6
    fit(x)(net)
    before = net[0].bias.detach().clone()
    opt.step()
    assert_close(opt.preconditioner.factors("0")[0], a[None])
    assert torch.equal(net[0].bias, before)


def test_layer_frozen_between_forward_and_backward():
    net = mlp()
    opt = exact(net)
    x = normal(6, 4)
    wanted = expected(net, fit(x), "2", 6.0)
    out = net(x)
    net[0].requires_grad_(False)
    loss_of(out).backward()
    before = net[0].weight.detach().clone()
    opt.step()
    assert_factors(opt, "2", wanted)
    assert torch.equal(net[0].weight, before)


# ---------------------------------------------------------------- outputs, hooks and transforms


class Attends(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


# ---------------------------------------------------------------- autocast


def test_autocast_takes_features_that_inference_mode_has_made():
    model = seeded(lambda: nn.Linear(4, 3)).float()
    opt = KFACSGD(model, lr=0.1)
    with torch.inference_mode():
        features = normal(6, 4).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(features).square().sum()
    loss.backward()
    opt.step()
    assert opt.preconditioner.registry.states[""].has_average


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("around_backward", [False, True])
def test_autocast_factors_are_float32_and_accurate(dtype, kind, around_backward):
    torch.manual_seed(2)
    body = nn.Linear(6, 5) if kind == "linear" else nn.Conv2d(2, 5, 2)
    net = nn.Sequential(body, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(32, 6) if kind == "linear" else torch.randn(8, 2, 4, 4)
    net(x)
    seen = []

    def train(model: nn.Module, watch: bool) -> None:
        with torch.autocast("cpu", dtype=dtype):
            handles = []
            for name in ("0", "3") if watch else ():

                def see(module, args, output, name=name):
                    output.register_hook(lambda g: seen.append((name, args[0].detach(), g)))

                handles.append(model.get_submodule(name).register_forward_hook(see))
            out = model(x)
            assert out.dtype == dtype
            loss = (out.float() - 1).square().sum(1).mean()
            if around_backward:
                loss.backward()
        if not around_backward:
            loss.backward()
        for handle in handles:
            handle.remove()

    train(copy.deepcopy(net), watch=True)
    opt = KFACSGD(net, lr=0.1, compute_method="eigen")
    train(net, watch=False)
    opt.step()
    assert {name for name, _, _ in seen} == {"0", "3"}
    for name, seen_x, seen_g in seen:
        assert seen_g.dtype == dtype
        module = net.get_submodule(name)
        rows = rows_of(module, [(seen_x.to(dtype).double(), seen_g.double())])
        for actual, wanted in zip(
            opt.preconditioner.factors(name), factors_of(*rows, float(len(x))), strict=True
        ):
            assert actual.dtype == torch.float32
            assert_close(actual, wanted, 2e-6, name)


def test_bf16_parameters_have_float32_factors_and_keep_their_dtype():
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 3)).bfloat16()
    x = torch.randn(16, 4).bfloat16()
    opt = exact(net, momentum=0.9)
    out = net(x)
    out.float().square().sum(1).mean().backward()
    opt.step()
    a, _ = opt.preconditioner.factors("0")
    rows = torch.cat([x.double(), torch.ones(16, 1, dtype=torch.float64)], 1)
    assert a.dtype == torch.float32
    assert_close(a, (rows.T @ rows / 16)[None], 1e-6)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert {p.grad.dtype for p in net.parameters()} == {torch.bfloat16}


def test_users_low_precision_matmul_setting_is_kept():
    saved = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        net = mlp().float()
        opt = exact(net)
        fit(normal(6, 4).float())(net)
        opt.step()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(saved)


# ---------------------------------------------------------------- empty batches


def convnet() -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    )


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("make", "shape"), [(mlp, (4,)), (convnet, (2, 3, 3))])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_empty_batch(make, shape, first, method):
    names = [name for name, m in make().named_modules() if hasattr(m, "weight")]
    x, empty = normal(6, *shape), normal(0, *shape)
    net = make()
    opt = exact(net, compute_method=method, factor_update_steps=1, inv_update_steps=1)
    if not first:
        fit(x)(net)
        opt.step()
        before = [t.clone() for name in names for t in opt.preconditioner.factors(name)]
    weights = [p.detach().clone() for p in net.parameters()]
    opt.zero_grad()
    fit(empty)(net)
    if first:
        with pytest.warns(UserWarning, match="no statistics"):
            opt.step()
    else:
        opt.step()
        after = [t for name in names for t in opt.preconditioner.factors(name)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), weights, strict=True))
    if first:
        # The next batch counts as the first.
        opt.zero_grad()
        wanted = {name: expected(net, fit(x), name, 6.0) for name in names}
        fit(x)(net)
        opt.step()
        for name in names:
            assert_factors(opt, name, wanted[name])


@pytest.mark.parametrize("at", [0, 1, 2])
def test_empty_micro_batch(at):
    parts = [normal(3, 2, 3, 3), normal(4, 2, 3, 3, seed=1)]
    parts.insert(at, normal(0, 2, 3, 3))

    def train(model: nn.Module) -> None:
        for x in parts:
            (loss_of(model(x)) / 2).backward()

    check_step(convnet(), train, ["0", "3"], 7.0)


# ---------------------------------------------------------------- activation checkpointing


class Block(nn.Module):
    """Notes the storage of its hidden activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)
        self.hidden: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        before = self.first(x)
        after = torch.tanh(before)
        self.hidden += [StorageWeakRef(t.untyped_storage()) for t in (before, after)]
        return self.second(after)


class Deep(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)

    def hidden_alive(self) -> int:
        return sum(not ref.expired() for block in self.blocks for ref in block.hidden)


DEEP = ["stem", "blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second", "head"]

both_checkpoints = pytest.mark.parametrize("reentrant", [False, True])


@both_checkpoints
def test_checkpointing_gives_the_same_factors(reentrant):
    def run(kind: bool | None):
        net = seeded(lambda: Deep(kind))
        opt = exact(net, factor_update_steps=2, inv_update_steps=2)
        for i in range(4):  # steps that are due for statistics and steps that are not
            opt.zero_grad()
            for size in (3, 2):
                (loss_of(net(normal(size, 4, seed=i))) / 2).backward()
            opt.step()
        return net, opt

    assert_same(run(reentrant), run(None), DEEP)


def in_another_thread(backward: Callable[[], None]) -> None:
    """As one of autograd's own runs it for a GPU."""
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()


@both_checkpoints
@pytest.mark.parametrize("in_a_thread", [False, True])
@pytest.mark.parametrize("all_of_it", [False, True])
def test_checkpointing_of_layers_that_are_called_without_the_model(
    reentrant, in_a_thread, all_of_it
):
    """Parts of every pass, or all of those after a plain one."""

    def run(kind: bool | None, call: Callable[[Any], None] = lambda backward: backward()):
        net = seeded(lambda: Deep(None if all_of_it else kind))
        opt = exact(net, lr=1e-3, factor_update_steps=1)
        for i, size in enumerate((3, 5, 2)):
            opt.zero_grad()
            x = normal(size, 4, seed=i).requires_grad_()
            if all_of_it and i and kind is not None:
                loss = loss_of(checkpoint(net.forward, x, use_reentrant=kind))
            else:
                loss = loss_of(net.forward(x))
            call(loss.backward)
            opt.step()
        return net, opt

    found = run(reentrant, in_another_thread) if in_a_thread else run(reentrant)
    assert_same(found, run(None), DEEP)


@both_checkpoints
@pytest.mark.parametrize("when", ["due", "not due", "paused"])
def test_checkpointing_still_saves_memory(reentrant, when):
    x = normal(5, 4)
    alive = {}
    for kind in (None, reentrant):
        net = seeded(lambda kind=kind: Deep(kind))
        opt = exact(net)
        if when == "not due":
            fit(x)(net)
            opt.step()
            opt.zero_grad()
        if when == "paused":
            with opt.preconditioner.paused():
                out = net(x)
        else:
            out = net(x)
        alive[kind] = net.hidden_alive()
        loss_of(out).backward()
    assert alive[reentrant] == 0
    assert alive[None] > 0  # the measure sees what is not saved


@both_checkpoints
def test_checkpointing_with_the_forward_paused(reentrant):
    x = normal(5, 4)
    net = seeded(lambda: Deep(reentrant))
    opt = exact(net)
    with opt.preconditioner.paused():
        out = net(x)
    loss_of(out).backward()  # computes the blocks again, not paused by now
    assert opt.preconditioner.memory_usage()["pending"] == 0
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    with pytest.warns(UserWarning, match="no statistics"):
        steps = taken(opt, net)
    for name, gradient in gradients.items():
        assert_close(steps[name], gradient, 1e-12, name)


@both_checkpoints
def test_checkpointing_with_the_backward_paused(reentrant):
    # The forward decides.
    x = normal(5, 4)
    plain = seeded(lambda: Deep(None))
    clean = exact(plain)
    fit(x)(plain)
    clean.step()
    net = seeded(lambda: Deep(reentrant))
    opt = exact(net)
    out = net(x)
    with opt.preconditioner.paused():
        loss_of(out).backward()
    opt.step()
    assert_same((net, opt), (plain, clean), DEEP)


@pytest.mark.parametrize("due", [True, False])
def test_checkpointing_where_what_is_due_changes_before_the_backward(due):
    # The recomputation must save as many tensors as the forward did, and the forward decides.
    x = normal(5, 4)
    net = seeded(lambda: Deep(False))
    interval = 1 if due else 2
    opt = exact(net, lr=0.0, factor_update_steps=interval, factor_decay=1e-12, staggered=False)
    fit(normal(3, 4, seed=1))(net)
    opt.step()
    before = tuple(t.clone() for t in opt.preconditioner.factors("blocks.0.first"))
    opt.zero_grad()
    out = net(x)
    opt.preconditioner.factor_update_steps = 2 if due else 1
    loss_of(out).backward()
    if due:
        opt.step()
        plain = seeded(lambda: Deep(None))
        before = expected(plain, fit(x), "blocks.0.first", 5.0)
    else:
        assert opt.preconditioner.memory_usage()["pending"] == 0
    assert_factors(opt, "blocks.0.first", before)


@both_checkpoints
def test_checkpoint_around_the_whole_model(reentrant):
    def train(model: nn.Module) -> None:
        for size in (5, 2):
            x = normal(size, 4).requires_grad_()
            (loss_of(checkpoint(model, x, use_reentrant=reentrant)) / 2).backward()

    def plainly(model: nn.Module) -> None:
        for size in (5, 2):
            (loss_of(model(normal(size, 4))) / 2).backward()

    net = mlp()
    wanted = {name: expected(net, plainly, name, 7.0) for name in ("0", "2")}
    opt = exact(net)
    train(net)
    opt.step()
    for name, factors in wanted.items():
        assert_factors(opt, name, factors)


@both_checkpoints
def test_checkpointing_a_module_used_several_times(reentrant):
    class Again(nn.Module):
        def __init__(self, kind: bool | None) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.kind = kind

        def part(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x))

        def forward(self, x: Tensor) -> Tensor:
            # The last use comes first in the backward pass, before any gradient has arrived.
            x = self.part(x)
            if self.kind is None:
                return self.part(self.part(x))
            return self.part(checkpoint(self.part, x, use_reentrant=self.kind))

    x = normal(5, 4)
    plain = seeded(lambda: Again(None))
    wanted = expected(plain, fit(x), "layer", 5.0)
    net = seeded(lambda: Again(reentrant))
    opt = exact(net)
    fit(x)(net)
    opt.step()
    assert_factors(opt, "layer", wanted)


@both_checkpoints
def test_checkpointing_attention(reentrant):
    class Attends(nn.Module):
        def __init__(self, kind: bool | None) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
            self.kind = kind

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            if self.kind is None:
                return self.block(x)
            return checkpoint(self.block, x, use_reentrant=self.kind)

    runs = []
    for kind in (None, reentrant):
        net = seeded(lambda kind=kind: Attends(kind))
        opt = exact(net)
        fit(normal(3, 5, 4))(net)
        opt.step()
        runs.append((net, opt))
    names = list(runs[0][1].preconditioner.layers)
    assert "block.self_attn.in_proj" in names and "block.linear1" in names
    assert_same(*runs, names)


class OwnUses(nn.Module):
    """Parameters of its own, which its forward uses within checkpoints that it begins itself."""

    def __init__(self, run: Callable[..., Tensor] = lambda part, x: part(x)) -> None:
        super().__init__()
        self.run = run
        self.block = Block()
        self.places = nn.Parameter(torch.ones(3, 4))
        self.product = nn.Parameter(torch.eye(4))
        self.gamma = nn.Parameter(torch.full((4,), 0.5))

    def inner(self, x: Tensor) -> Tensor:
        return self.gamma * self.block(x + self.places)

    def outer(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.layer_norm(x @ self.product, (4,))
        return x + self.run(self.inner, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * self.run(self.outer, x)


POLICIES = [None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE]


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoints_of_own_parameters_keep_the_gradients(policy):
    """A tap's tensors and operations must not be among those that checkpoints count."""

    def run(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if part.__name__ == "inner":
            return part(x) if policy else checkpoint(part, x, use_reentrant=False)
        how = {"context_fn": contexts} if policy else {}
        return checkpoint(part, x, use_reentrant=False, **how)

    def contexts():
        return create_selective_checkpoint_contexts(lambda *_, **__: policy)

    gradients = []
    for one in (run, None):
        net = seeded(lambda one=one: OwnUses(*filter(None, [one])))
        opt = exact(net)
        loss_of(net(normal(3, 3, 4))).backward()
        assert not opt.preconditioner.steps
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    for name, gradient in gradients[1].items():
        assert_close(gradients[0][name], gradient, 1e-12, name)


def test_uses_that_a_reentrant_checkpoint_hides_keep_raw_gradients():
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.product = Block(), nn.Parameter(0.5 * torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(lambda x: self.block(x) @ self.product, x, use_reentrant=True)

    net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Hidden(), nn.Linear(4, 40)))
    opt = exact(net, factor_update_steps=1, lr=0.01)
    for i in range(6):
        opt.zero_grad()
        loss_of(net(normal(6, 4, seed=i))).backward()
        gradient = net[1].product.grad.clone()
        assert_close(taken(opt, net)["1.product"], 0.01 * gradient, 1e-12)
    assert opt.preconditioner.coverage().left.keys() == {"1.product"}


@pytest.mark.parametrize("kind", ["linear", "no bias", "convolution", "sequences"])
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "made again"])
def test_selective_checkpointing(kind, keeps):
    """Its policy keeps some outputs, and refuses those that were changed in place since."""
    layer, x = {
        "linear": (lambda: nn.Linear(4, 5), normal(6, 4)),
        "no bias": (lambda: nn.Linear(4, 5, bias=False), normal(6, 4)),
        "convolution": (lambda: nn.Conv2d(2, 3, 2), normal(6, 2, 3, 3)),
        "sequences": (lambda: nn.Linear(4, 5), normal(6, 2, 4)),
    }[kind]
    policy = CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(lambda *_, **__: policy)

    runs = []
    for selective in (True, False):
        net = seeded(lambda: nn.Sequential(layer(), nn.Tanh()))
        opt = exact(net)
        for _ in range(2):
            opt.zero_grad()
            options = {"use_reentrant": False, "context_fn": contexts}
            loss_of(checkpoint(net, x, **options) if selective else net(x)).backward()
            opt.step()
        runs.append((net, opt))
    assert_same(*runs, ["0"])


# ---------------------------------------------------------------- memory of the forward pass


# ---------------------------------------------------------------- wrappers


def test_data_parallel_is_refused():
    net = mlp()
    for wrapped in (nn.DataParallel(net), nn.Sequential(nn.DataParallel(net))):
        with pytest.raises(ValueError, match=r"model: nn\.DataParallel .* Distributed"):
            exact(wrapped)
    opt = exact(net)  # a trainer may wrap the model later
    with pytest.raises(ValueError, match=r"model: nn\.DataParallel .* Distributed"):
        net._replicate_for_data_parallel()(normal(6, 4))
    assert not opt.preconditioner.sums.of_layer


@pytest.fixture
def one_process(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("given", ["wrapped", "parameters and wrapped", "inner"])
def test_distributed_data_parallel(one_process, given):
    x = normal(6, 4)
    net = mlp()
    wrapped = nn.parallel.DistributedDataParallel(net)
    if given == "parameters and wrapped":
        opt = exact(wrapped.parameters(), model=wrapped)
    else:
        opt = exact(wrapped if given == "wrapped" else net)
    assert list(opt.preconditioner.layers) == ["0", "2"]
    for _ in range(2):  # the second pass finds the reducer's buckets in place
        opt.zero_grad()
        with wrapped.no_sync():
            (loss_of(wrapped(x[:2])) / 2).backward()
        (loss_of(wrapped(x[2:])) / 2).backward()
        opt.step()
    plain = mlp()
    clean = exact(plain)
    for _ in range(2):
        clean.zero_grad()
        for part in (x[:2], x[2:]):
            (loss_of(plain(part)) / 2).backward()
        clean.step()
    assert_same((net, opt), (plain, clean))


def test_layer_called_without_the_model_around_it():
    net = mlp()
    x = normal(6, 4)

    def train(model: nn.Module) -> None:
        for part in (x[:4], x[4:]):
            (loss_of(model[2](torch.tanh(model[0](part)))) / 2).backward()

    check_step(net, train, ["0", "2"], 6.0)


def test_forward_that_raises_leaves_no_trace():
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.layer = nn.Linear(4, 4)
            self.fail = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(self.attention(x, x, x)[0])
            if self.fail:
                raise ConnectionError
            return x

    def run(fail: bool):
        net = seeded(Fails)
        opt = exact(net)
        if fail:
            net.fail = True
            with pytest.raises(ConnectionError):
                net(normal(7, 3, 4))
            with pytest.raises((AssertionError, RuntimeError)):
                net(normal(7, 3, 5))  # inside the attention
            net.fail = False
        # Called alone, its rows must not count as the broken run's.
        loss_of(net.layer(normal(2, 3, 4))).backward()
        fit(normal(5, 3, 4, seed=1))(net)
        opt.step()
        return net, opt

    assert_same(run(True), run(False), ["attention.in_proj", "attention.out_proj", "layer"])


def test_functional_call_with_the_models_own_parameters_trains_them():
    x = normal(6, 4)

    def train(model: nn.Module) -> None:
        own = dict(model.named_parameters())
        loss_of(torch.func.functional_call(model, own, (x,))).backward()

    check_step(mlp(), train, ["0", "2"], 6.0)


def test_backward_to_some_inputs_counts_for_those_layers_only():
    net = mlp()
    x = normal(6, 4)
    wanted = expected(net, fit(x), "2", 6.0)
    opt = exact(net)
    loss_of(net(x)).backward(inputs=list(net[2].parameters()))
    opt.step()
    assert_factors(opt, "2", wanted)
    with pytest.raises(KeyError, match="no statistics yet"):
        opt.preconditioner.factors("0")


# ---------------------------------------------------------------- steps without statistics


def test_step_that_is_due_and_captured_nothing_raises():
    net = mlp()
    opt = exact(net)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(
        RuntimeError, match=r"step 0 is due .* no covered layer saw a backward pass"
    ):
        opt.step()
    assert opt.preconditioner.steps == 0
    opt.zero_grad()
    before = [p.detach().clone() for p in net.parameters()]
    opt.step()  # nothing to do, as for any optimizer
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_paused_leaves_a_forward_out():
    x, extra = normal(6, 4), normal(5, 4, seed=1)

    def train(model: nn.Module, opt=None) -> None:
        (loss_of(model(x)) / 2).backward()
        if opt is None:
            return
        with opt.preconditioner.paused():
            (loss_of(model(extra)) / 2).backward()

    net = mlp()
    wanted = {name: expected(net, train, name, 6.0) for name in ("0", "2")}
    opt = exact(net)
    train(net, opt)
    opt.step()
    for name, factors in wanted.items():
        assert_factors(opt, name, factors)


def test_first_statistics_come_late_where_the_first_step_was_paused():
    net = mlp()
    opt = exact(net)
    x = normal(6, 4)
    with opt.preconditioner.paused():
        fit(x)(net)
    with pytest.warns(UserWarning, match="no statistics"):
        opt.step()
    opt.zero_grad()
    wanted = expected(net, fit(x), "0", 6.0)
    fit(x)(net)
    gradient = matrix_of(net[0], net[0].weight.grad, net[0].bias.grad)
    steps = taken(opt, net)
    assert_factors(opt, "0", wanted)
    step = matrix_of(net[0], steps["0.weight"], steps["0.bias"])
    assert_close(step, solved(*wanted, gradient), 1e-8)


def test_paused_for_a_whole_step_keeps_the_averages():
    net = mlp()
    opt = exact(net, factor_update_steps=1, inv_update_steps=1)
    x = normal(6, 4)
    fit(x)(net)
    opt.step()
    before = {name: tuple(t.clone() for t in opt.preconditioner.factors(name)) for name in "02"}
    opt.zero_grad()
    with opt.preconditioner.paused():
        fit(3 * x)(net)
    gradient = matrix_of(net[0], net[0].weight.grad, net[0].bias.grad)
    steps = taken(opt, net)
    for name, factors in before.items():
        assert_factors(opt, name, factors, 1e-15)
    step = matrix_of(net[0], steps["0.weight"], steps["0.bias"])
    assert_close(step, solved(*before["0"], gradient), 1e-8)  # still preconditioned
    assert opt.preconditioner.steps == 2


# ---------------------------------------------------------------- K


def terms_of(opt, name: str, unit: tuple[Tensor, Tensor]) -> float:
    """K, read off G: its trace over that of Σ g gᵀ."""
    g = opt.preconditioner.factors(name)[1]
    return (g.diagonal(dim1=1, dim2=2).sum() / unit[1].diagonal(dim1=1, dim2=2).sum()).item()


class Wide(nn.Module):
    """A layer behind any input: its own rows say nothing about the model's batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, *args, **kwargs) -> Tensor:
        return self.layer(normal(11, 3))


@pytest.mark.parametrize(
    ("args", "examples", "positions"),
    [
        ((normal(5, 4),), 5, 5),
        ((normal(5, 7, 4),), 5, 35),
        ((normal(5, 2, 6, 3),), 5, 90),
        ((normal(5, 2, 6, 3, 4),), 5, 360),
        ((torch.zeros(5, 7, dtype=torch.long),), 5, 35),
        ((torch.zeros(5, dtype=torch.long),), 5, 5),
        (([normal(3, 4, 5), normal(3, 2, 6)],), 2, 32),
        (({"ids": torch.zeros(5, 7, dtype=torch.long), "mask": normal(9)},), 5, 35),
        ((None, "text", normal(5, 7, 4)), 5, 35),
    ],
    ids=["rows", "sequences", "images", "volumes", "tokens", "indices", "list", "dict", "later"],
)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_terms_by_default_and_by_positions(args, examples, positions, by_keyword):
    for terms, count in (("examples", examples), ("positions", positions)):
        net = seeded(Wide)
        opt = exact(net, loss_terms=terms)

        def train(model: nn.Module) -> None:
            if by_keyword:
                out = model(**{f"input{i}": arg for i, arg in enumerate(args)})
            else:
                out = model(*args)
            out.square().sum().backward()

        unit = expected(net, train, "layer", 1.0)
        train(net)
        opt.step()
        assert terms_of(opt, "layer", unit) == pytest.approx(count, rel=1e-12)


def test_terms_are_one_number_for_all_layers():
    # The second layer sees 12 rows a batch of 3, the third sees one: the loss averages 3.
    class Reshapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 2)
            self.third = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            flat = self.second(torch.tanh(self.first(x)).flatten(0, 1))
            shift = self.third(flat.mean(0))
            return flat.unflatten(0, x.shape[:2]) + shift

    check_step(seeded(Reshapes), fit(normal(3, 4, 4)), ["first", "second", "third"], 3.0)


def test_terms_as_a_number_set_for_each_step():
    net = mlp()
    opt = exact(net, loss_terms=2.5, factor_update_steps=1, factor_decay=1e-12)
    seen = []
    for i, terms in enumerate((None, 7.0, "positions")):
        opt.zero_grad()
        if terms is not None:
            opt.preconditioner.loss_terms = terms
        x = normal(6, 4, seed=i)
        unit = expected(net, fit(x), "0", 1.0)
        fit(x)(net)
        opt.step()
        seen.append(terms_of(opt, "0", unit))
    assert seen == pytest.approx([2.5, 7.0, 6.0])


def test_terms_as_a_callable_of_the_step():
    net = mlp()
    opt = exact(net, lr=0.0, loss_terms=lambda step: 10.0 * (step + 1), factor_update_steps=1)
    x = normal(6, 4)
    unit = expected(net, fit(x), "0", 1.0)
    seen = []
    for _ in range(3):
        opt.zero_grad()
        fit(x)(net)
        opt.step()
        seen.append(terms_of(opt, "0", unit))
    # Running averages of 10, 20 and 30 at decay 0.95.
    weights = [[1.0], [0.95, 1.0], [0.95**2, 0.95, 1.0]]
    wanted = [sum(w * 10 * (i + 1) for i, w in enumerate(line)) / sum(line) for line in weights]
    assert seen == pytest.approx(wanted)


def test_loss_reduction_sum_has_one_term():
    net = mlp()

    def train(model: nn.Module) -> None:
        for size in (4, 2):
            (loss_of(model(normal(size, 4))) * size).backward()

    check_step(net, train, ["0", "2"], 1.0, loss_reduction="sum")


# ---------------------------------------------------------------- counts


@pytest.mark.parametrize("sizes", [(6,), (2, 3, 1), (1,) * 7])
def test_accumulation_over_any_number_of_backward_passes(sizes):
    total = sum(sizes)

    def train(model: nn.Module) -> None:
        for i, size in enumerate(sizes):
            (loss_of(model(normal(size, 4, seed=i))) * size / total).backward()

    opt = check_step(mlp(), train, ["0", "2"], float(total))
    # And it is the batch that they make up.
    x = torch.cat([normal(size, 4, seed=i) for i, size in enumerate(sizes)])
    whole = clean_run(x)
    for name in ("0", "2"):
        assert_factors(opt, name, whole[1].preconditioner.factors(name))


@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=["rows", "sequences"])
def test_expand_counts_each_position(shape):
    net = mlp()

    def train(model: nn.Module) -> None:
        for size in (3, 2):
            (loss_of(model(normal(size, *shape))) / 2).backward()

    check_step(net, train, ["0", "2"], 5.0, weight_sharing="expand")


def test_reduce_counts_each_example():
    net = mlp()
    parts = normal(3, 2, 4), normal(2, 6, 4, seed=1)

    def train(model: nn.Module) -> None:
        for x in parts:
            (loss_of(model(x)) / 2).backward()

    watch = Watch(twin := copy.deepcopy(net), "0")
    train(twin)
    opt = exact(net, weight_sharing="reduce")
    train(net)
    opt.step()
    a = torch.cat([x.mean(1) for x, _ in watch.trained("0")])
    g = torch.cat([grad.sum(1) for _, grad in watch.trained("0")])
    a = torch.cat([a, torch.ones(5, 1, dtype=a.dtype)], 1)
    assert_factors(opt, "0", factors_of(a[None], g[None], 5.0))


def test_forwards_before_one_backward_are_one_batch():
    x = normal(7, 4)

    def apart(model: nn.Module) -> None:
        (loss_of(model(x[:3])) / 2).backward()
        (loss_of(model(x[3:])) / 2).backward()

    def together(model: nn.Module) -> None:
        first, second = model(x[:3]), model(x[3:])
        (loss_of(second) / 2 + loss_of(first) / 2).backward()

    for train in (apart, together):
        check_step(mlp(), train, ["0", "2"], 7.0)


def test_factor_update_steps_says_which_steps_gather():
    net = mlp()
    opt = exact(net, lr=0.0, factor_update_steps=3, inv_update_steps=3, staggered=False)
    gathered, wanted = [], []
    for i in range(7):
        x = normal(6, 4, seed=i)
        if i % 3 == 0:
            wanted.append(expected(net, fit(x), "0", 6.0))
        opt.zero_grad()
        fit(x)(net)
        gathered.append(opt.preconditioner.memory_usage()["pending"] > 0)
        opt.step()
        assert opt.preconditioner.memory_usage()["pending"] == 0
    assert gathered == [i % 3 == 0 for i in range(7)]
    weights = 0.95**2, 0.95, 1.0
    averages = tuple(
        sum(w * t for w, t in zip(weights, side, strict=True)) / sum(weights)
        for side in zip(*wanted, strict=True)
    )
    assert_factors(opt, "0", averages)


def test_layers_take_turns_to_gather():
    net = seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    opt = exact(net, lr=0.0, factor_update_steps=3, inv_update_steps=3, staggered=True)
    changed = []
    before: dict[str, Tensor] = {}
    for i in range(7):
        opt.zero_grad()
        fit(normal(6, 4, seed=i))(net)
        opt.step()
        now = {name: opt.preconditioner.factors(name)[1].clone() for name in "0123"}
        changed.append([name for name in now if i == 0 or not torch.equal(now[name], before[name])])
        before = now
    assert changed == [list("0123"), ["2"], ["3"], ["0", "1"], ["2"], ["3"], ["0", "1"]]


class Heads(nn.Module):
    """A trunk whose passes end in one head or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, head: str = "left") -> Tensor:
        return self.get_submodule(head)(self.trunk(x))


def test_terms_are_those_of_all_passes_whosever_turn_it_is():
    net = seeded(Heads)
    opt = exact(net, lr=0.0, factor_update_steps=3, staggered=True, factor_decay=1e-12)

    def train(model: nn.Module) -> None:
        for head, size in (("left", 5), ("right", 2)):
            (loss_of(model(normal(size, 4, seed=size), head)) / 2).backward()

    for i in range(3):  # the trunk's turn, the left head's, the right head's
        name = ("trunk", "left", "right")[i]
        wanted = expected(net, train, name, 7.0)
        opt.zero_grad()
        train(net)
        opt.step()
        assert_factors(opt, name, wanted)


def test_a_turn_without_a_pass_through_its_layer_is_no_error():
    net = seeded(Heads)
    opt = exact(net, lr=0.01, factor_update_steps=3, staggered=True)

    def step(head: str) -> None:
        opt.zero_grad(set_to_none=False)
        loss_of(net(normal(5, 4), head)).backward()
        opt.step()

    for head in ("left", "right", "right", "left", "right", "right"):
        step(head)
    assert opt.preconditioner.steps == 6


def test_hooks_that_are_lost_later_are_noticed_within_an_interval():
    net = seeded(Heads)
    opt = exact(net, lr=0.1, factor_update_steps=3, staggered=True)
    fit(normal(5, 4))(net)
    opt.step()
    for module in net.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    with pytest.raises(RuntimeError, match=r"step 3 is due .* no covered layer saw a backward"):
        for _ in range(3):
            opt.zero_grad()
            fit(normal(5, 4))(net)
            opt.step()


@pytest.mark.parametrize("kind", ["number", "tensor", "callable", "scaler", "disabled scaler"])
def test_grad_scaler_option(kind):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=kind != "disabled scaler")
    scale = 1.0 if kind == "disabled scaler" else 64.0
    given = {"number": 64.0, "tensor": torch.tensor(64.0), "callable": lambda: 64.0}
    net = mlp()
    x = normal(6, 4)
    opt = exact(net, grad_scaler=given.get(kind, scaler))
    (loss_of(net(x)) * scale).backward()
    for p in net.parameters():
        p.grad.div_(scale)
    opt.step()
    assert_same((net, opt), clean_run(x))


def test_grad_scaler_of_very_large_scale_does_not_overflow_on_the_way():
    net = mlp().float()
    x = normal(6, 4).float()
    opt = exact(net, grad_scaler=2.0**50)
    (loss_of(net(x)) * 2.0**50).backward()
    for p in net.parameters():
        p.grad.div_(2.0**50)
    opt.step()
    wanted = clean_run(x, lambda: mlp().float())[1].preconditioner.factors("0")
    assert_factors(opt, "0", wanted, 1e-6)


# ---------------------------------------------------------------- statistics and their gradients


def test_backward_that_starts_without_a_gradient_drops_what_has_gathered():
    x = normal(6, 4)
    net = mlp()
    opt = exact(net)
    for _ in range(2):
        fit(normal(9, 4, seed=1))(net)
    net.zero_grad(set_to_none=True)
    fit(x[:4])(net)
    fit(x[4:])(net)
    opt.step()
    other = mlp()
    clean = exact(other)
    fit(x[:4])(other)
    fit(x[4:])(other)
    clean.step()
    assert_same((net, opt), (other, clean))


def test_backward_without_a_gradient_drops_for_its_own_layers_only():
    net = mlp()
    opt = exact(net)
    x, y = normal(6, 4), normal(5, 4, seed=1)
    wanted = expected(net, lambda m: (fit(x)(m), fit(y)(m)), "2", 11.0)
    fit(x)(net)
    net[0].zero_grad()
    fit(y)(net)
    opt.step()
    assert_factors(opt, "2", wanted)
    assert_close(opt.preconditioner.factors("0")[0][:, :4, :4], (y.T @ y / 5)[None])


def test_autograd_grad_beside_training_leaves_no_trace():
    x = normal(6, 4)
    net = mlp()
    opt = exact(net)
    torch.autograd.grad(loss_of(net(3 * x)), list(net.parameters()))
    assert opt.preconditioner.memory_usage()["pending"] == 0
    probe = x.clone().requires_grad_()
    torch.autograd.grad(loss_of(net(probe)), probe)
    torch.autograd.grad(loss_of(net(probe)), [probe, net[0].bias])
    fit(x)(net)
    torch.autograd.grad(loss_of(net(2 * x)), [net[2].weight], create_graph=True)
    opt.step()
    assert_same((net, opt), clean_run(x))


@pytest.mark.parametrize("what", ["eval pass", "training pass", "detached output"])
def test_forward_without_a_backward_keeps_nothing(what):
    net = mlp()
    opt = exact(net)
    kept: list[weakref.ref] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(weakref.ref(x))
            storages.append(StorageWeakRef(x.untyped_storage()))
            return x

    storages: list[StorageWeakRef] = []
    net.insert(2, Spy())
    net.train(what != "eval pass")
    out = net(normal(5, 4, seed=1))
    if what == "detached output":
        out = out.detach()
    else:
        assert out.requires_grad
    del out
    gc.collect()
    assert len(kept) == 1 and kept[0]() is None and storages[0].expired()
    assert opt.preconditioner.memory_usage()["pending"] == 0
    x = normal(6, 4)
    net.train()
    fit(x)(net)
    net(normal(4, 4, seed=2))
    opt.step()
    assert all(ref() is None for ref in kept[1:])
    clean = clean_run(x)
    for p, q in zip(net.parameters(), clean[0].parameters(), strict=True):
        assert_close(p, q)


@pytest.mark.parametrize("freeze", [False, True])
def test_the_other_half_of_a_gan(freeze):
    # The generator's pass reaches the discriminator's weights too; those gradients are dropped.
    def nets() -> tuple[nn.Module, nn.Module]:
        return mlp(), seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))

    gen, dis = nets()
    options = {"factor_update_steps": 1, "factor_decay": 1e-12}  # averages of the last step alone
    opt_g, opt_d = exact(gen, **options), exact(dis, **options)
    for i in range(2):
        z, real = normal(6, 4, seed=i), normal(5, 3, seed=10 + i)

        def for_dis(model: nn.Module, fake: Tensor, real: Tensor = real) -> None:
            (loss_of(model(real)) - loss_of(model(fake))).backward()

        fake = gen(z)  # no backward of this one
        wanted_d = expected(dis, lambda m, fake=fake: for_dis(m, fake.detach()), "0", 11.0)
        opt_d.zero_grad()
        for_dis(dis, fake.detach())
        assert opt_g.preconditioner.memory_usage()["pending"] == 0
        opt_d.step()
        assert_factors(opt_d, "0", wanted_d)

        wanted_g = expected(gen, lambda m, z=z: loss_of(dis(m(z))).backward(), "0", 6.0)
        opt_d.zero_grad()
        opt_g.zero_grad()
        dis.requires_grad_(not freeze)
        loss_of(dis(gen(z))).backward()
        dis.requires_grad_(True)
        opt_g.step()
        assert_factors(opt_g, "0", wanted_g)
        pending = opt_d.preconditioner.memory_usage()["pending"]
        assert (pending == 0) == freeze


def test_two_optimizers_on_parts_of_one_model():
    x = normal(6, 4)
    net = mlp()
    body = exact(net[0].parameters(), model=net, factor_update_steps=1, inv_update_steps=1)
    head = exact(net[2].parameters(), model=net, factor_update_steps=2, inv_update_steps=2)
    assert list(body.preconditioner.layers) == ["0"]
    assert list(head.preconditioner.layers) == ["2"]
    assert not body.preconditioner.uncovered and not head.preconditioner.uncovered
    other = mlp()
    whole = exact(other, factor_update_steps=1, inv_update_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for opts, model in (((body, head), net), ((whole,), other)):
            fit(x)(model)
            for opt in opts:
                opt.step()
    assert_same((net, body), (other, whole), ["0"])
    assert_factors(head, "2", whole.preconditioner.factors("2"))
    # One of them may drop its half; the other's stays.
    fit(x)(net)
    body.zero_grad()
    assert body.preconditioner.memory_usage()["pending"] == 0
    assert head.preconditioner.steps == 1


@pytest.mark.parametrize("kind", ["swa", "ema", "deepcopy"])
def test_averaged_models_are_not_dragged_along(kind):
    x = normal(6, 4)
    net, other = mlp(), mlp()
    opt, clean = exact(net, lr=0.1), exact(other, lr=0.1)
    if kind == "deepcopy":
        averaged = copy.deepcopy(net)
    else:
        average = get_ema_multi_avg_fn(0.9) if kind == "ema" else None
        averaged = AveragedModel(net, multi_avg_fn=average)
    for _ in range(3):
        opt.zero_grad()
        fit(x)(net)
        loss_of(averaged(normal(5, 4, seed=3))).backward()
        opt.step()
        if kind != "deepcopy":
            averaged.update_parameters(net)
        clean.zero_grad()
        fit(x)(other)
        clean.step()
    assert_same((net, opt), (other, clean))
    # Nor do they keep the optimizer alive.
    gone = weakref.ref(opt.preconditioner)
    del opt, net
    gc.collect()
    assert gone() is None
    assert averaged(x).shape == (6, 3)


def test_groups_added_later_are_captured_once():
    net = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = exact(net[0].parameters(), model=net)
        opt.add_param_group({"params": list(net[2].parameters())})
    x = normal(6, 4)
    fit(x)(net)
    opt.step()
    assert_same((net, opt), clean_run(x))


# ---------------------------------------------------------------- a model that calls itself


class Within(nn.Module):
    """Runs itself on the way: with gradients on its own output, or without on its input."""

    def __init__(self, depth: int, guess: bool) -> None:
        super().__init__()
        self.first, self.then = nn.Linear(3, 3), nn.Linear(3, 3)
        self.depth, self.guess = depth, guess

    def forward(self, x: Tensor, depth: int | None = None) -> Tensor:
        depth = self.depth if depth is None else depth
        if self.guess and depth:
            with torch.no_grad():
                x = x + self(x[:2], 0).mean()
            depth = 0
        out = torch.tanh(self(x, depth - 1) if depth else self.first(x))
        return self.then(torch.tanh(self.then(out)))


@pytest.mark.parametrize(("depth", "guess"), [(0, False), (2, False), (1, True)])
def test_calls_of_a_model_within_its_own_are_one_pass(depth, guess):
    net = seeded(lambda: Within(depth, guess))
    opt = exact(net, factor_update_steps=1)
    for rows in (8, 5):
        fit(normal(rows, 3))(net)
        assert opt.preconditioner.sums.terms() == rows
        opt.step()
        opt.zero_grad()


class Interrupted(nn.Module):
    """Ctrl-C comes once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.comes = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.comes:
            self.comes = False
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("where", ["model", "attention"])
@pytest.mark.parametrize("within", [False, True], ids=["", "under another mode"])
def test_a_forward_pass_that_was_interrupted_leaves_nothing(where, within, monkeypatch):
    def interrupt(*_: Any, **__: Any) -> Tensor:
        raise KeyboardInterrupt

    net, other = (seeded(Interrupted) for _ in range(2))
    opt, clean = exact(net), exact(other)
    modes = torch._C._len_torch_function_stack()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if where == "model":
            net.comes = True
        else:
            patch.setattr(nn.functional, "scaled_dot_product_attention", interrupt)
        net(normal(9, 5, 4))
    for run, optimizer in ((net, opt), (other, clean)):
        with torch.device("cpu") if within else contextlib.nullcontext():
            optimizer.zero_grad()
        for _ in range(2):
            fit(normal(3, 5, 4))(run)
        assert optimizer.preconditioner.sums.terms() == 6
        optimizer.step()
    assert torch._C._len_torch_function_stack() == modes
    names = list(opt.preconditioner.layers)
    assert_same((net, opt), (other, clean), names)


def test_gradients_that_the_model_clears_in_its_own_forward():
    class Clears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            opt.zero_grad()
            return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    net = seeded(Clears)
    opt = exact(net)
    fit(normal(6, 3, 4))(net)
    assert opt.preconditioner.sums.terms() == 6


# ---------------------------------------------------------------- what taps do not take part in


def test_a_pass_looks_at_each_gradient_a_few_times(monkeypatch):
    """And not at those of all layers in each layer."""
    looks: list[Tensor] = []
    has_gradient = Capture._has_gradient
    monkeypatch.setattr(
        Capture,
        "_has_gradient",
        lambda self, own, anchor: looks.append(own) or has_gradient(self, own, anchor),
    )
    for count in (5, 50):
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(count)])
        opt = KFACSGD(model, lr=0.1, factor_update_steps=1)
        for _ in range(2):
            opt.zero_grad()
            looks.clear()
            model(torch.randn(4, 2)).sum().backward()
            assert count <= len(looks) <= 2 * count
            opt.step()
