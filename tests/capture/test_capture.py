"""What is captured, when it counts, and what it costs."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from kaisa_optim import KFACSGD
from tests.support.training import descend
from tests.support.watch import (
    Body,
    Watch,
    assert_close,
    assert_factors,
    built,
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


X = normal(6, 4)


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


def assert_step(opt: Any, net: nn.Module, factors: tuple[Tensor, Tensor]) -> None:
    """Take a step, which is the gradient of layer 0 preconditioned with these factors."""
    gradient = matrix_of(net[0], net[0].weight.grad, net[0].bias.grad)
    steps = taken(opt, net)
    step = matrix_of(net[0], steps["0.weight"], steps["0.bias"])
    assert_close(step, solved(*factors, gradient), 1e-8)


def clean_run(x: Tensor, make: Callable[[], nn.Module] = mlp, **options):
    """One step on one batch with nothing beside it."""
    net, opt = built(make(), **options)
    descend(opt, loss_of(net(x)))
    return net, opt


def convnet() -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    )


# ---------------------------------------------------------------- a plain twin as the oracle


def looped() -> nn.Module:
    def use(m: nn.Module, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = torch.tanh(m.layer(x))
        return x

    return seeded(lambda: Body(use, layer=nn.Linear(4, 4)))


def loops(*times: int) -> Callable[[nn.Module], None]:
    def train(model: nn.Module) -> None:
        for i, count in enumerate(times):
            (loss_of(model(normal(2 + i, 4, seed=i), count)) / len(times)).backward()

    return train


def by_halves(*parts: Tensor) -> Callable[[nn.Module], None]:
    def train(model: nn.Module) -> None:
        for x in parts:
            (loss_of(model(x)) / 2).backward()

    return train


def together(model: nn.Module) -> None:
    first, second = model(X[:2]), model(X[2:])
    (loss_of(second) / 2 + loss_of(first) / 2).backward()


def beside_no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        model(normal(9, 4, seed=1))
    out = model(X)
    with torch.inference_mode():
        model(normal(11, 4, seed=2))
    loss_of(out).backward()
    with torch.no_grad():
        model(normal(9, 4, seed=3))


def shared() -> nn.Module:
    def use(m: nn.Module, x: Tensor) -> Tensor:
        return m.out(input=torch.tanh(m.again(torch.tanh(m.first(input=x)))))

    first = nn.Linear(4, 4)
    return seeded(lambda: Body(use, first=first, out=nn.Linear(4, 3), again=first))


def by_functional_call(model: nn.Module) -> None:
    loss_of(torch.func.functional_call(model, dict(model.named_parameters()), (X,))).backward()


IMAGES = normal(3, 2, 3, 3), normal(4, 2, 3, 3, seed=1)
EMPTY = normal(0, 2, 3, 3)
# What is built, how it trains, and K.
TWINS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None], float]] = {
    "used twice": (looped, loops(2), 2.0),
    "used twice in two passes": (looped, loops(2, 2), 5.0),
    "used unequally often": (looped, loops(3, 1), 5.0),
    "micro-batches": (mlp, by_halves(X[:2], X[2:]), 6.0),
    "forwards before one backward": (mlp, together, 6.0),
    "an empty micro-batch, first": (convnet, by_halves(EMPTY, *IMAGES), 7.0),
    "an empty micro-batch, between": (convnet, by_halves(IMAGES[0], EMPTY, IMAGES[1]), 7.0),
    "an empty micro-batch, last": (convnet, by_halves(*IMAGES, EMPTY), 7.0),
    "forwards without gradients": (mlp, beside_no_grad, 6.0),
    "the model in eval": (lambda: mlp().eval(), fit(X), 6.0),
    "a module of two names": (shared, fit(X), 6.0),
    "functional_call with its own parameters": (mlp, by_functional_call, 6.0),
}


@pytest.mark.parametrize("scenario", TWINS)
def test_factors_and_steps_are_those_of_a_plain_twin(scenario):
    make, train, terms = TWINS[scenario]
    net = make()
    names = [name for name, module in net.named_modules() if hasattr(module, "weight")]
    opt = check_step(net, train, names, terms)
    assert list(opt.preconditioner.layers) == names and not opt.preconditioner.uncovered


# ---------------------------------------------------------------- freezing


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
def test_frozen_from_the_start_and_later_unfrozen(frozen):
    net = mlp()
    for name in frozen:
        net[0].get_parameter(name).requires_grad_(False)
    kept = {name: net[0].get_parameter(name).detach().clone() for name in frozen}
    names = ["2"] if len(frozen) == 2 else ["0", "2"]
    opt = check_step(net, fit(X), names, 6.0, factor_update_steps=3, inv_update_steps=10)
    for name, value in kept.items():
        assert torch.equal(net[0].get_parameter(name), value)
    net[0].requires_grad_(True)
    # Not the layer's slot, but its statistics are of another size now: it starts anew.
    first = expected(net, fit(X), "0", 6.0)
    for _ in range(2):
        opt.zero_grad()
        fit(X)(net)
        assert_step(opt, net, first)
        assert_factors(opt, "0", first)


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
def test_frozen_in_the_middle_of_training(frozen):
    net = mlp()
    opt = check_step(net, fit(X), ["0", "2"], 6.0, factor_update_steps=3)
    for _ in range(2):
        descend(opt, loss_of(net(X)))
    other = tuple(t.clone() for t in opt.preconditioner.factors("2"))
    for name in frozen:
        net[0].get_parameter(name).requires_grad_(False)
    kept = {name: net[0].get_parameter(name).detach().clone() for name in frozen}
    opt.zero_grad()
    both = len(frozen) == 2
    wanted = None if both else expected(net, fit(X), "0", 6.0)
    fit(X)(net)
    if wanted is None:
        opt.step()
    else:
        assert_step(opt, net, wanted)
        assert_factors(opt, "0", wanted)
    for name, value in kept.items():
        assert torch.equal(net[0].get_parameter(name), value)
    for before, now in zip(other, opt.preconditioner.factors("2"), strict=True):
        assert torch.equal(before, now)  # the other layer kept its average


def test_parameters_outside_of_the_groups_are_left_alone():
    net = mlp()
    opt = exact([net[0].weight, *net[2].parameters()], model=net)
    assert opt.preconditioner.layers["0"].size_of("a") == (4, False)
    a = X.T @ X / 6
    fit(X)(net)
    before = net[0].bias.detach().clone()
    opt.step()
    assert_close(opt.preconditioner.factors("0")[0], a[None])
    assert torch.equal(net[0].bias, before)


def test_layer_frozen_between_forward_and_backward():
    net, opt = built(mlp())
    wanted = expected(net, fit(X), "2", 6.0)
    out = net(X)
    net[0].requires_grad_(False)
    loss_of(out).backward()
    before = net[0].weight.detach().clone()
    opt.step()
    assert_factors(opt, "2", wanted)
    assert torch.equal(net[0].weight, before)


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

    train(twin := copy.deepcopy(net), watch=True)
    twin.double()
    opt = KFACSGD(net, lr=0.1, compute_method="eigen")
    train(net, watch=False)
    opt.step()
    assert {name for name, _, _ in seen} == {"0", "3"}
    for name, seen_x, seen_g in seen:
        assert seen_g.dtype == dtype
        rows = rows_of(twin.get_submodule(name), [(seen_x.to(dtype).double(), seen_g.double())])
        for actual, wanted in zip(
            opt.preconditioner.factors(name), factors_of(*rows, float(len(x))), strict=True
        ):
            assert actual.dtype == torch.float32
            assert_close(actual, wanted, 2e-6, name)


# ---------------------------------------------------------------- empty batches


@pytest.mark.parametrize(("make", "shape"), [(mlp, (4,)), (convnet, (2, 3, 3))])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_an_empty_first_batch(make, shape, method):
    names = [name for name, m in make().named_modules() if hasattr(m, "weight")]
    x, net = normal(6, *shape), make()
    opt = exact(net, compute_method=method, factor_update_steps=1, inv_update_steps=1)
    weights = [p.detach().clone() for p in net.parameters()]
    fit(normal(0, *shape))(net)
    opt.step()
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), weights, strict=True))
    # The next batch counts as the first.
    opt.zero_grad()
    wanted = {name: expected(net, fit(x), name, 6.0) for name in names}
    fit(x)(net)
    opt.step()
    for name in names:
        assert_factors(opt, name, wanted[name])


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


def selective(policy: Any) -> dict[str, Any]:
    """Return the options of a checkpoint that keeps outputs by a policy."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: policy)

    return {"use_reentrant": False, "context_fn": contexts}


POLICIES = {"kept": CheckpointPolicy.MUST_SAVE, "remade": CheckpointPolicy.PREFER_RECOMPUTE}
# Ways to run a part, as ``under`` takes them.
CHECKPOINTS = {"plain": None, "reentrant": True, "not reentrant": False}


def under(kind: Any, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a part under a checkpoint, reentrant or not, or by a policy; None: without one."""
    if kind is None:
        return part(x)
    how = {"use_reentrant": kind} if isinstance(kind, bool) else selective(kind)
    return checkpoint(part, x, **how)


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
            x = x + under(self.reentrant, block, x)
        return self.head(x)

    def hidden_alive(self) -> int:
        return sum(not ref.expired() for block in self.blocks for ref in block.hidden)


DEEP = ["stem", "blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second", "head"]

both_checkpoints = pytest.mark.parametrize("reentrant", [False, True])


class Again(nn.Module):
    """The last use comes first in the backward pass, before any gradient has arrived."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.part(under(self.reentrant, self.part, self.part(x)))


def encoder(reentrant: bool | None) -> nn.Module:
    block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    return Body(
        lambda m, x: under(reentrant, m.block, m.stem(x)), stem=nn.Linear(4, 4), block=block
    )


# What is built, the shape of an example, and how many layers there are. Those of the first three
# begin checkpoints themselves.
CHECKPOINTED: dict[str, tuple[Callable[[bool | None], nn.Module], tuple[int, ...], int]] = {
    "blocks": (Deep, (4,), 6),
    "one of several uses": (Again, (4,), 1),
    "attention": (encoder, (5, 4), 5),
    "the model": (lambda reentrant: Deep(None), (4,), 6),
    "linear": (lambda kind: nn.Sequential(nn.Linear(4, 5), nn.Tanh()), (4,), 1),
    "no bias": (lambda kind: nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh()), (4,), 1),
    "convolution": (lambda kind: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh()), (2, 3, 3), 1),
    "sequences": (lambda kind: nn.Sequential(nn.Linear(4, 5), nn.Tanh()), (2, 4), 1),
}


@pytest.mark.parametrize("kind", [True, False, *POLICIES.values()], ids=str)
@pytest.mark.parametrize("what", CHECKPOINTED)
def test_checkpointing_gives_the_same_factors(kind, what):
    """A policy keeps some outputs, and refuses those that were changed in place since."""
    make, shape, count = CHECKPOINTED[what]

    def run(kind: bool | None):
        net, opt = built(seeded(lambda: make(kind)), factor_update_steps=2, inv_update_steps=2)
        for i in range(4):  # steps that are due for statistics and steps that are not
            opt.zero_grad()
            for size in (3, 2):
                x = normal(size, *shape, seed=i).requires_grad_()
                out = under(None if what in [*CHECKPOINTED][:3] else kind, net, x)
                (loss_of(out) / 2).backward()
            opt.step()
        return net, opt

    plain = run(None)
    names = list(plain[1].preconditioner.layers)
    assert len(names) == count
    assert_same(run(kind), plain, names)


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
        net, opt = built(seeded(lambda kind=kind: Deep(kind)))
        if when == "not due":
            descend(opt, loss_of(net(x)))
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
@pytest.mark.parametrize("paused", ["forward", "backward"])
def test_a_forward_decides_what_its_checkpoints_gather(reentrant, paused):
    nets = [seeded(lambda kind=kind: Deep(kind)) for kind in (None, reentrant)]
    plain, opt = (exact(net) for net in nets)
    x = normal(5, 4)
    with opt.preconditioner.paused() if paused == "forward" else contextlib.nullcontext():
        out = nets[1](x)
    with opt.preconditioner.paused() if paused == "backward" else contextlib.nullcontext():
        loss_of(out).backward()  # computes the blocks again
    if paused == "backward":
        fit(x)(nets[0])
        plain.step()
        opt.step()
        assert_same((nets[1], opt), (nets[0], plain), DEEP)
        return
    assert opt.preconditioner.memory_usage()["pending"] == 0
    gradients = {name: p.grad.clone() for name, p in nets[1].named_parameters()}
    steps = taken(opt, nets[1])
    for name, gradient in gradients.items():
        assert_close(steps[name], gradient, 1e-12, name)


@pytest.mark.parametrize("due", [True, False])
def test_checkpointing_where_what_is_due_changes_before_the_backward(due):
    # The recomputation must save as many tensors as the forward did, and the forward decides.
    x = normal(5, 4)
    net = seeded(lambda: Deep(False))
    interval = 1 if due else 2
    opt = exact(net, lr=0.0, factor_update_steps=interval, factor_decay=1e-12, staggered=False)
    descend(opt, loss_of(net(normal(3, 4, seed=1))))
    before = tuple(t.clone() for t in opt.preconditioner.factors("blocks.0.first"))
    out = net(x)
    opt.preconditioner.factor_update_steps = 2 if due else 1
    loss_of(out).backward()
    if due:
        opt.preconditioner.factor_update_steps = 1
        opt.step()
        plain = seeded(lambda: Deep(None))
        before = expected(plain, fit(x), "blocks.0.first", 5.0)
    else:
        assert opt.preconditioner.memory_usage()["pending"] == 0
    assert_factors(opt, "blocks.0.first", before)


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


@pytest.mark.parametrize("policy", [None, *POLICIES.values()])
def test_checkpoints_of_own_parameters_keep_the_gradients(policy):
    """A tap's tensors and operations must not be among those that checkpoints count."""

    def run(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if part.__name__ == "inner":
            return part(x) if policy else checkpoint(part, x, use_reentrant=False)
        return checkpoint(part, x, **(selective(policy) if policy else {"use_reentrant": False}))

    gradients = []
    for one in (run, None):
        net, opt = built(seeded(lambda one=one: OwnUses(*filter(None, [one]))))
        loss_of(net(normal(3, 3, 4))).backward()
        assert not opt.preconditioner.steps
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    for name, gradient in gradients[1].items():
        assert_close(gradients[0][name], gradient, 1e-12, name)


def test_uses_that_a_reentrant_checkpoint_hides_keep_raw_gradients():
    def use(m: nn.Module, x: Tensor) -> Tensor:
        return x + checkpoint(lambda x: m.block(x) @ m.product, x, use_reentrant=True)

    def make() -> nn.Module:
        hidden = Body(use, block=Block(), product=0.5 * torch.eye(4))
        return nn.Sequential(nn.Linear(4, 4), hidden, nn.Linear(4, 40))

    net, opt = built(seeded(make), factor_update_steps=1, lr=0.01)
    for i in range(6):
        opt.zero_grad()
        loss_of(net(normal(6, 4, seed=i))).backward()
        gradient = net[1].product.grad.clone()
        assert_close(taken(opt, net)["1.product"], 0.01 * gradient, 1e-12)
    assert opt.preconditioner.coverage().left.keys() == {"1.product"}


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


def test_backward_to_some_inputs_counts_for_those_layers_only():
    net = mlp()
    wanted = expected(net, fit(X), "2", 6.0)
    opt = exact(net)
    loss_of(net(X)).backward(inputs=list(net[2].parameters()))
    opt.step()
    assert_factors(opt, "2", wanted)
    with pytest.raises(KeyError, match="no statistics yet"):
        opt.preconditioner.factors("0")


# ---------------------------------------------------------------- steps without statistics


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


def test_paused_for_a_whole_step_keeps_the_averages():
    net, opt = built(mlp(), factor_update_steps=1, inv_update_steps=1)
    fit(X)(net)
    opt.step()
    before = {name: tuple(t.clone() for t in opt.preconditioner.factors(name)) for name in "02"}
    opt.zero_grad()
    with opt.preconditioner.paused():
        fit(3 * X)(net)
    assert_step(opt, net, before["0"])  # still preconditioned
    for name, factors in before.items():
        assert_factors(opt, name, factors, 1e-15)
    assert opt.preconditioner.steps == 2


# ---------------------------------------------------------------- K


def terms_of(opt, name: str, unit: tuple[Tensor, Tensor]) -> float:
    """K, read off G: its trace over that of Σ g gᵀ."""
    g = opt.preconditioner.factors(name)[1]
    return (g.diagonal(dim1=1, dim2=2).sum() / unit[1].diagonal(dim1=1, dim2=2).sum()).item()


def wide() -> nn.Module:
    """Return a layer behind any input: its own rows say nothing about the model's batch."""
    return Body(lambda m, *_, **__: m.layer(normal(11, 3)), layer=nn.Linear(3, 2))


@dataclass
class Batch:
    values: Tensor


# Arguments of the model, their examples and their positions.
INPUTS: dict[str, tuple[tuple[Any, ...], int, int]] = {
    "rows": ((normal(5, 4),), 5, 5),
    "sequences": ((normal(5, 7, 4),), 5, 35),
    "images": ((normal(5, 2, 6, 3),), 5, 90),
    "volumes": ((normal(5, 2, 6, 3, 4),), 5, 360),
    "tokens": ((torch.zeros(5, 7, dtype=torch.long),), 5, 35),
    "indices": ((torch.zeros(5, dtype=torch.long),), 5, 5),
    "a time first": ((torch.tensor(0.5), normal(5, 4)), 5, 5),  # as models of flows are told
    "list": (([normal(3, 4, 5), normal(3, 2, 6)],), 2, 32),
    "mapping": ((UserDict(ids=torch.zeros(5, 7, dtype=torch.long), mask=normal(9)),), 5, 35),
    "tuple": (((normal(5, 4), 3),), 5, 5),
    "dataclass": ((Batch(normal(5, 4)),), 5, 5),
    "nested": (([{"a": None, "b": (normal(5, 4),)}],), 5, 5),
    "packed": ((pack_sequence([normal(5, 3), normal(2, 3)]),), 2, 7),
    "later": ((None, "text", normal(5, 7, 4)), 5, 35),
    "an object": ((object(),), 11, 11),  # the first layer's own rows
}


@pytest.mark.parametrize(("args", "examples", "positions"), INPUTS.values(), ids=list(INPUTS))
@pytest.mark.parametrize("by_keyword", [False, True])
def test_terms_by_default_and_by_positions(args, examples, positions, by_keyword):
    for terms, count in (("examples", examples), ("positions", positions)):
        net, opt = built(seeded(wide), loss_terms=terms)

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


# ---------------------------------------------------------------- counts


def test_factor_update_steps_says_which_steps_gather():
    net, opt = built(mlp(), lr=0.0, factor_update_steps=3, inv_update_steps=3, staggered=False)
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


def test_layers_gather_in_two_steps_of_an_interval():
    net = seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2)))
    opt = exact(net, lr=0.0, factor_update_steps=3, inv_update_steps=3)
    changed = []
    before: dict[str, Tensor] = {}
    for i in range(7):
        descend(opt, loss_of(net(normal(6, 4, seed=i))))
        now = {name: opt.preconditioner.factors(name)[1].clone() for name in "0123"}
        changed.append([name for name in now if i == 0 or not torch.equal(now[name], before[name])])
        before = now
    one, other = ["0", "1", "2"], ["3"]
    assert changed == [[*one, *other], other, [], one, other, [], one]


def heads() -> nn.Module:
    """Return a trunk whose passes end in one head or the other."""
    parts = {"trunk": nn.Linear(4, 4), "left": nn.Linear(4, 3), "right": nn.Linear(4, 3)}
    return Body(lambda m, x, head="left": m.get_submodule(head)(m.trunk(x)), **parts)


def test_terms_are_those_of_all_passes_whosever_slot_it_is():
    net, opt = built(seeded(heads), lr=0.0, factor_update_steps=3, factor_decay=1e-12)

    def train(model: nn.Module) -> None:
        for head, size in (("left", 5), ("right", 2)):
            (loss_of(model(normal(size, 4, seed=size), head)) / 2).backward()

    for names in (("trunk", "left", "right"), ("trunk",), (), ("left", "right")):
        wanted = {name: expected(net, train, name, 7.0) for name in names}
        opt.zero_grad()
        train(net)
        opt.step()
        assert set(opt.preconditioner.work.average) == set(names)
        for name in names:
            assert_factors(opt, name, wanted[name])


def test_hooks_that_are_lost_later_are_noticed_after_four_steps_that_gather():
    net, opt = built(seeded(heads), lr=0.1, factor_update_steps=3)
    descend(opt, loss_of(net(normal(5, 4))))
    for module in net.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    with pytest.raises(RuntimeError, match=r"step 5 is due .* no covered layer saw a backward"):
        for _ in range(5):  # all but step 2 gather
            descend(opt, loss_of(net(normal(5, 4))))


@pytest.mark.parametrize(
    "kind", ["number", "large", "tensor", "callable", "scaler", "disabled scaler"]
)
def test_grad_scaler_option(kind):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=kind != "disabled scaler")
    scale = {"disabled scaler": 1.0, "large": 2.0**50}.get(kind, 64.0)
    given = {"number": 64.0, "tensor": torch.tensor(64.0), "callable": lambda: 64.0, "large": scale}
    dtype = torch.float32 if kind == "large" else torch.float64  # its square must not overflow
    net, x = mlp().to(dtype), normal(6, 4).to(dtype)
    opt = exact(net, grad_scaler=given.get(kind, scaler))
    (loss_of(net(x)) * scale).backward()
    for p in net.parameters():
        p.grad.div_(scale)
    opt.step()
    clean = clean_run(x, lambda: mlp().to(dtype))
    assert_same((net, opt), clean, rtol=1e-6 if kind == "large" else 1e-12)


# ---------------------------------------------------------------- statistics and their gradients


def test_backward_that_starts_without_a_gradient_drops_what_has_gathered():
    net, opt = built(mlp())
    for _ in range(2):
        fit(normal(9, 4, seed=1))(net)
    net.zero_grad(set_to_none=True)
    fit(X[:4])(net)
    fit(X[4:])(net)
    opt.step()
    other = mlp()
    clean = exact(other)
    fit(X[:4])(other)
    fit(X[4:])(other)
    clean.step()
    assert_same((net, opt), (other, clean))


def test_backward_without_a_gradient_drops_for_its_own_layers_only():
    net, opt = built(mlp())
    x, y = normal(6, 4), normal(5, 4, seed=1)
    wanted = expected(net, lambda m: (fit(x)(m), fit(y)(m)), "2", 11.0)
    fit(x)(net)
    net[0].zero_grad()
    fit(y)(net)
    opt.step()
    assert_factors(opt, "2", wanted)
    assert_close(opt.preconditioner.factors("0")[0][:, :4, :4], (y.T @ y / 5)[None])


def test_autograd_grad_beside_training_leaves_no_trace():
    net, opt = built(mlp())
    torch.autograd.grad(loss_of(net(3 * X)), list(net.parameters()))
    assert opt.preconditioner.memory_usage()["pending"] == 0
    probe = X.clone().requires_grad_()
    torch.autograd.grad(loss_of(net(probe)), probe)
    torch.autograd.grad(loss_of(net(probe)), [probe, net[0].bias])
    fit(X)(net)
    torch.autograd.grad(loss_of(net(2 * X)), [net[2].weight], create_graph=True)
    (slope,) = torch.autograd.grad(net(probe).square().sum(), probe, create_graph=True)
    torch.autograd.grad(slope.square().sum(), list(net.parameters()), allow_unused=True)
    opt.step()
    assert_same((net, opt), clean_run(X))


@pytest.mark.parametrize("what", ["eval pass", "training pass", "detached output"])
def test_forward_without_a_backward_keeps_nothing(what):
    net, opt = built(mlp())
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
    net.train()
    fit(X)(net)
    net(normal(4, 4, seed=2))
    opt.step()
    assert all(ref() is None for ref in kept[1:])
    clean = clean_run(X)
    for p, q in zip(net.parameters(), clean[0].parameters(), strict=True):
        assert_close(p, q)


@pytest.mark.parametrize("freeze", [False, True])
def test_the_other_half_of_a_gan(freeze):
    # The generator's pass reaches the discriminator's weights too; those gradients are dropped.
    gen = mlp()
    dis = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
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
    net, opt = built(seeded(lambda: Within(depth, guess)), factor_update_steps=1)
    for rows in (8, 5):
        fit(normal(rows, 3))(net)
        assert opt.preconditioner.sums.terms() == rows
        opt.step()
        opt.zero_grad()


class Stopped(nn.Module):
    """Raises an error once, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return x


@pytest.mark.parametrize("error", [ConnectionError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["model", "attention"])
@pytest.mark.parametrize("within", [False, True], ids=["", "under another mode"])
def test_a_forward_pass_that_was_stopped_leaves_nothing(where, within, error, monkeypatch):
    """After Ctrl-C torch runs no hook: then the next zero_grad clears what is left."""

    def stop(*_: Any, **__: Any) -> Tensor:
        raise error

    net, other = (seeded(Stopped) for _ in range(2))
    opt, clean = exact(net), exact(other)
    modes = torch._C._len_torch_function_stack()
    with monkeypatch.context() as patch, pytest.raises(error):
        if where == "model":
            net.error = error
        else:
            patch.setattr(nn.functional, "scaled_dot_product_attention", stop)
        net(normal(9, 5, 4))
    for run, optimizer in ((net, opt), (other, clean)):
        if error is KeyboardInterrupt:
            with torch.device("cpu") if within else contextlib.nullcontext():
                optimizer.zero_grad()
        else:  # called alone, its rows must not count as those of the pass that broke
            loss_of(run.layer(normal(2, 5, 4))).backward()
        for _ in range(2):
            fit(normal(3, 5, 4))(run)
        if error is KeyboardInterrupt:
            assert optimizer.preconditioner.sums.terms() == 6
        optimizer.step()
    assert torch._C._len_torch_function_stack() == modes
    names = list(opt.preconditioner.layers)
    assert_same((net, opt), (other, clean), names)


def test_gradients_that_the_model_clears_in_its_own_forward():
    def clears(m: nn.Module, x: Tensor) -> Tensor:
        opt.zero_grad()
        return m.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    net, opt = built(seeded(lambda: Body(clears, layer=nn.Linear(4, 3))))
    fit(normal(6, 3, 4))(net)
    assert opt.preconditioner.sums.terms() == 6
