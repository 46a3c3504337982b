"""What is captured, when it counts, and what it costs."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from kaisa_optim import KFACSGD
from tests.support.training import ANEW, descend, factors
from tests.support.training import assert_same as assert_bits
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

Train = Callable[[nn.Module], None]
X = normal(6, 4)


def mlp() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def convnet() -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    )


def loss_of(out: Tensor) -> Tensor:
    """Averages the examples; empty batches give zero."""
    scale = torch.linspace(0.5, 2.0, out[:1].numel() or 1, dtype=out.dtype)
    scale = scale.view(out.shape[1:]) if len(out) else scale[0]
    return (scale * (out - 0.3).square()).sum() / max(len(out), 1)


def fit(*parts: Tensor) -> Train:
    """Return a backward pass for each part of a batch; losses are divided by their number."""

    def train(model: nn.Module) -> None:
        for x in parts:
            (loss_of(model(x)) / len(parts)).backward()

    return train


def expected(model: nn.Module, train: Train, name: str, terms: float) -> tuple[Tensor, Tensor]:
    """The factors that a plain twin of the model gives."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    watch = Watch(twin, name)
    train(twin)
    return factors_of(*rows_of(twin.get_submodule(name), watch.trained(name)), terms)


def assert_same(one: Any, other: Any, rtol: float = 1e-12) -> None:
    """Models and factors of two (model, optimizer) pairs."""
    for name in other[1].preconditioner.layers:
        assert_factors(one[1], name, other[1].preconditioner.factors(name), rtol)
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert_close(p, q, rtol)


def assert_step(opt: Any, net: nn.Module, of_layer: tuple[Tensor, Tensor]) -> None:
    """Take a step, which is the gradient of layer 0 preconditioned with these factors."""
    gradient = matrix_of(net[0], net[0].weight.grad, net[0].bias.grad)
    steps = taken(opt, net)
    step = matrix_of(net[0], steps["0.weight"], steps["0.bias"])
    assert_close(step, solved(*of_layer, gradient), 1e-8)


def clean_run(x: Tensor, make: Callable[[], nn.Module] = mlp, **options):
    """One step on one batch with nothing beside it."""
    net, opt = built(make(), **options)
    descend(opt, loss_of(net(x)))
    return net, opt


def pending(opt: Any) -> int:
    return opt.preconditioner.memory_usage()["pending"]


# ---------------------------------------------------------------- a plain twin as the oracle


def looped() -> nn.Module:
    def use(m: nn.Module, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = torch.tanh(m.layer(x))
        return x

    return seeded(lambda: Body(use, layer=nn.Linear(4, 4)))


def loops(*times: int) -> Train:
    def train(model: nn.Module) -> None:
        for i, count in enumerate(times):
            (loss_of(model(normal(2 + i, 4, seed=i), count)) / len(times)).backward()

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
TWINS: dict[str, tuple[Callable[[], nn.Module], Train, float]] = {
    "used unequally often": (looped, loops(3, 1), 5.0),
    "micro-batches": (mlp, fit(X[:2], X[2:]), 6.0),
    "forwards before one backward": (mlp, together, 6.0),
    "an empty micro-batch, first": (convnet, fit(EMPTY, *IMAGES), 7.0),
    "an empty micro-batch, between": (convnet, fit(IMAGES[0], EMPTY, IMAGES[1]), 7.0),
    "an empty micro-batch, last": (convnet, fit(*IMAGES, EMPTY), 7.0),
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


def paused_pass(net: nn.Module, opt: Any) -> None:
    (loss_of(net(X)) / 2).backward()
    with opt.preconditioner.paused():
        (loss_of(net(normal(5, 4, seed=1))) / 2).backward()


def freezes_late(net: nn.Module, opt: Any) -> None:
    out = net(X)
    net[0].requires_grad_(False)
    loss_of(out).backward()


def penalized(model: nn.Module) -> Tensor:
    x = X.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return loss_of(out) + slope.square().sum() / len(x)


def penalized_pass(net: nn.Module, opt: Any) -> None:
    twin = copy.deepcopy(net)
    penalized(twin).backward()
    penalized(net).backward(inputs=list(net.parameters()))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert_close(p.grad, q.grad)


def drops_a_layer(net: nn.Module, opt: Any) -> None:
    fit(X)(net)
    net[0].zero_grad()
    fit(X[:5])(net)


# How a model trains; for each layer with statistics, how a twin trains for the same; and K.
PARTS: dict[str, tuple[Callable[[nn.Module, Any], None], dict[str, Train], float]] = {
    "paused": (paused_pass, dict.fromkeys("02", lambda m: (loss_of(m(X)) / 2).backward()), 6.0),
    "to some inputs": (
        lambda net, opt: loss_of(net(X)).backward(inputs=list(net[2].parameters())),
        {"2": fit(X)},
        6.0,
    ),
    "a layer frozen since the forward": (freezes_late, {"2": fit(X)}, 6.0),
    "a penalty": (penalized_pass, dict.fromkeys("02", lambda m: penalized(m).backward()), 6.0),
    "one layer's gradient dropped": (
        drops_a_layer,
        {"0": fit(X[:5]), "2": lambda m: (fit(X)(m), fit(X[:5])(m))},
        11.0,
    ),
}


@pytest.mark.parametrize("scenario", PARTS)
def test_what_counts_are_the_parts_of_passes_that_train(scenario):
    train, plain, terms = PARTS[scenario]
    net, opt = built(mlp())
    wanted = {name: expected(net, twin, name, terms) for name, twin in plain.items()}
    weights = [p.detach().clone() for p in net.parameters()]
    train(net, opt)
    opt.step()
    for name in "02":
        if name in wanted:
            assert_factors(opt, name, wanted[name])
            continue
        with pytest.raises(KeyError, match="no statistics yet"):
            opt.preconditioner.factors(name)
    for p, weight in zip(net.parameters(), weights, strict=True):
        assert torch.equal(p, weight) == (p.grad is None)


def test_paused_for_a_whole_step_keeps_the_averages():
    net, opt = clean_run(X, **ANEW)
    before = factors(opt)
    with opt.preconditioner.paused():
        fit(3 * X)(net)
    assert_step(opt, net, before["0"])  # still preconditioned
    assert_bits(factors(opt), before)
    assert opt.preconditioner.steps == 2


# ---------------------------------------------------------------- work beside training


def derivatives(net: nn.Module, opt: Any) -> None:
    torch.autograd.grad(loss_of(net(3 * X)), list(net.parameters()))
    assert pending(opt) == 0
    probe = X.clone().requires_grad_()
    torch.autograd.grad(loss_of(net(probe)), probe)
    torch.autograd.grad(loss_of(net(probe)), [probe, net[0].bias])
    fit(X)(net)
    torch.autograd.grad(loss_of(net(2 * X)), [net[2].weight], create_graph=True)
    (slope,) = torch.autograd.grad(net(probe).square().sum(), probe, create_graph=True)
    torch.autograd.grad(slope.square().sum(), list(net.parameters()), allow_unused=True)


def transforms(net: nn.Module, opt: Any) -> None:
    """Take per-example gradients by torch.func."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(parameters: dict[str, Tensor], example: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(net, parameters, (example[None],)))

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    before = each(parameters, X)
    fit(X)(net)
    each(parameters, X)
    # Without a transform too: the weights that receive the gradient are not the model's.
    moved = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    loss_of(torch.func.functional_call(net, moved, (X,))).backward()
    # And with the model's own weights.
    assert_close(torch.func.vmap(net)(X), net(X))
    slopes = torch.func.vmap(torch.func.jacrev(net))(X)
    wanted = torch.autograd.functional.jacobian(net, X).diagonal(dim1=0, dim2=2)
    assert_close(slopes, wanted.movedim(-1, 0))
    for name, p in net.named_parameters():
        assert_close(before[name].mean(0), p.grad, what=name)
        assert_close(moved[name].grad, p.grad, what=name)


def tangents(net: nn.Module, opt: Any) -> None:
    """Differentiate in forward mode, and train without tangents beside it."""
    direction = normal(6, 4, seed=1)
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(net(forward_ad.make_dual(X, direction))).tangent
        fit(X)(net)
    assert_close(slope, torch.func.jvp(mlp(), (X,), (direction,))[1])


def traces(net: nn.Module, opt: Any) -> None:
    assert_close(torch.jit.trace(net, (X,))(2 * X), net(2 * X))
    if torch.__version__ >= (2, 7):  # 2.6 stops at any hook that its tracer does not know
        assert_close(torch.export.export(net, (X,)).module()(X), net(X))
    fit(X)(net)


def saves_elsewhere(net: nn.Module, opt: Any) -> None:
    with torch.autograd.graph.save_on_cpu():
        out = net(X)
    with torch.autograd.set_detect_anomaly(True):
        loss_of(out).backward()


def drops_passes(net: nn.Module, opt: Any) -> None:
    fit(*[normal(9, 4, seed=1)] * 2)(net)
    net.zero_grad(set_to_none=True)
    fit(X[:3], X[3:])(net)


BESIDE = (derivatives, transforms, tangents, traces, saves_elsewhere, drops_passes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("work", BESIDE, ids=lambda work: work.__name__)
def test_work_beside_training_leaves_no_trace(work):
    net, opt = built(mlp())
    work(net, opt)
    opt.step()
    assert_same((net, opt), clean_run(X))


def storages_of(*modules: nn.Module) -> list[StorageWeakRef]:
    """Note the storages of the outputs of all calls to come."""
    storages: list[StorageWeakRef] = []
    for module in modules:
        module.register_forward_hook(
            lambda module, args, output: storages.append(StorageWeakRef(output.untyped_storage()))
        )
    return storages


@pytest.mark.parametrize("kind", ["eval pass", "training pass", "detached output"])
def test_forward_without_a_backward_keeps_nothing(kind):
    net, opt = built(mlp())
    hidden = storages_of(net[1])
    net.train(kind != "eval pass")
    out = net(normal(5, 4, seed=1))
    assert out.requires_grad
    if kind == "detached output":
        out = out.detach()
    else:
        del out
    gc.collect()
    assert hidden[0].expired() and pending(opt) == 0
    net.train()
    fit(X)(net)
    net(normal(4, 4, seed=2))
    opt.step()
    assert all(storage.expired() for storage in hidden)
    assert_same((net, opt), clean_run(X))


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
    fit(X)(net)
    if len(frozen) == 2:
        opt.step()
    else:
        wanted = expected(net, fit(X), "0", 6.0)
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
    fit(X)(net)
    before = net[0].bias.detach().clone()
    opt.step()
    assert_close(opt.preconditioner.factors("0")[0], (X.T @ X / 6)[None])
    assert torch.equal(net[0].bias, before)


def test_autocast_takes_features_that_inference_mode_has_made():
    model = seeded(lambda: nn.Linear(4, 3)).float()
    opt = KFACSGD(model, lr=0.1)
    with torch.inference_mode():
        features = X.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(features).square().sum()
    descend(opt, loss)
    assert opt.preconditioner.factors("")[0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("around_backward", [False, True])
def test_autocast_factors_are_float32_and_accurate(dtype, kind, around_backward):
    torch.manual_seed(2)
    body = nn.Linear(6, 5) if kind == "linear" else nn.Conv2d(2, 5, 2)
    net = nn.Sequential(body, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(32, 6) if kind == "linear" else torch.randn(8, 2, 4, 4)
    net(x)
    twin = copy.deepcopy(net)
    watch = Watch(twin, "0", "3")
    opt = KFACSGD(net, lr=0.1, compute_method="eigen")
    for model in (twin, net):
        with torch.autocast("cpu", dtype=dtype):
            loss = (model(x).float() - 1).square().sum(1).mean()
            if around_backward:
                loss.backward()
        if not around_backward:
            loss.backward()
    opt.step()
    twin.double()
    for name in ("0", "3"):
        ((seen, gradient),) = watch.trained(name)
        assert gradient.dtype == dtype
        rows = rows_of(twin.get_submodule(name), [(seen.to(dtype).double(), gradient.double())])
        assert_factors(opt, name, factors_of(*rows, float(len(x))), 2e-6)
        assert {factor.dtype for factor in opt.preconditioner.factors(name)} == {torch.float32}


@pytest.mark.parametrize(("make", "shape"), [(mlp, (4,)), (convnet, (2, 3, 3))])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_an_empty_first_batch(make, shape, method):
    x, net = normal(6, *shape), make()
    opt = exact(net, compute_method=method, **ANEW)
    weights = [p.detach().clone() for p in net.parameters()]
    fit(normal(0, *shape))(net)
    opt.step()
    assert all(map(torch.equal, net.parameters(), weights))
    # The next batch counts as the first.
    opt.zero_grad()
    wanted = {name: expected(net, fit(x), name, 6.0) for name in opt.preconditioner.layers}
    fit(x)(net)
    opt.step()
    for name, factor in wanted.items():
        assert_factors(opt, name, factor)


# ---------------------------------------------------------------- activation checkpointing


POLICIES = {"kept": CheckpointPolicy.MUST_SAVE, "remade": CheckpointPolicy.PREFER_RECOMPUTE}
# Ways to run a part, as ``under`` takes them.
CHECKPOINTS = {"plain": None, "reentrant": True, "not reentrant": False}


def under(kind: Any, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a part under a checkpoint, reentrant or not, or by a policy; None: without one."""
    if kind is None:
        return part(x)
    if isinstance(kind, bool):
        return checkpoint(part, x, use_reentrant=kind)
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: kind)
    return checkpoint(part, x, use_reentrant=False, context_fn=contexts)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def deep(kind: Any) -> nn.Module:
    """Return a model whose blocks run under a checkpoint."""

    def use(m: nn.Module, x: Tensor) -> Tensor:
        x = m.stem(x)
        for part in m.blocks:
            x = x + under(kind, part, x)
        return m.head(x)

    parts = {"blocks": nn.ModuleList([block(), block()]), "head": nn.Linear(4, 3)}
    return Body(use, stem=nn.Linear(4, 4), **parts)


def again(kind: Any) -> nn.Module:
    """The last use comes first in the backward pass, before any gradient has arrived."""

    def use(m: nn.Module, x: Tensor) -> Tensor:
        return m.part(under(kind, m.part, m.part(x)))

    return Body(use, part=nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def encoder(kind: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    return Body(lambda m, x: under(kind, m.layer, m.stem(x)), stem=nn.Linear(4, 4), layer=layer)


def before_tanh(layer: Callable[..., nn.Module], *sizes: int, **how: bool) -> Callable[..., Any]:
    return lambda kind: nn.Sequential(layer(*sizes, **how), nn.Tanh())


both_checkpoints = pytest.mark.parametrize("reentrant", [False, True])
# Models that begin checkpoints themselves.
BEGIN = (deep, again, encoder)
# What is built, the shape of an example, and how many layers there are.
CHECKPOINTED: dict[str, tuple[Callable[[Any], nn.Module], tuple[int, ...], int]] = {
    "blocks": (deep, (4,), 6),
    "one of several uses": (again, (4,), 1),
    "attention": (encoder, (5, 4), 5),
    "the model": (lambda kind: deep(None), (4,), 6),
    "linear": (before_tanh(nn.Linear, 4, 5), (4,), 1),
    "no bias": (before_tanh(nn.Linear, 4, 5, bias=False), (4,), 1),
    "convolution": (before_tanh(nn.Conv2d, 2, 3, 2), (2, 3, 3), 1),
    "sequences": (before_tanh(nn.Linear, 4, 5), (2, 4), 1),
}


@pytest.mark.parametrize("kind", [True, False, *POLICIES.values()], ids=str)
@pytest.mark.parametrize("what", CHECKPOINTED)
def test_checkpointing_gives_the_same_factors(kind, what):
    """A policy keeps some outputs, and refuses those that were changed in place since."""
    make, shape, count = CHECKPOINTED[what]

    def run(kind: Any) -> Any:
        net, opt = built(seeded(lambda: make(kind)), factor_update_steps=2, inv_update_steps=2)
        for i in range(4):  # steps that are due for statistics and steps that are not
            opt.zero_grad()
            for size in (3, 2):
                x = normal(size, *shape, seed=i).requires_grad_()
                out = under(None if make in BEGIN else kind, net, x)
                (loss_of(out) / 2).backward()
            opt.step()
        assert len(opt.preconditioner.layers) == count
        return net, opt

    assert_same(run(kind), run(None))


@both_checkpoints
@pytest.mark.parametrize("in_a_thread", [False, True])
@pytest.mark.parametrize("all_of_it", [False, True])
def test_checkpointing_of_layers_that_are_called_without_the_model(
    reentrant, in_a_thread, all_of_it
):
    """Parts of every pass, or all of those after a plain one."""

    def run(kind: bool | None, in_a_thread: bool = False) -> Any:
        net = seeded(partial(deep, None if all_of_it else kind))
        opt = exact(net, lr=1e-3, factor_update_steps=1)
        for i, size in enumerate((3, 5, 2)):
            opt.zero_grad()
            x = normal(size, 4, seed=i).requires_grad_()
            loss = loss_of(under(kind if all_of_it and i else None, net.forward, x))
            if in_a_thread:  # as one of autograd's own runs it for a GPU
                ThreadPoolExecutor(1).submit(loss.backward).result()
            else:
                loss.backward()
            opt.step()
        return net, opt

    assert_same(run(reentrant, in_a_thread), run(None))


@both_checkpoints
@pytest.mark.parametrize("when", ["due", "not due", "paused"])
def test_checkpointing_still_saves_memory(reentrant, when):
    alive = {}
    for kind in (None, reentrant):
        net, opt = built(seeded(partial(deep, kind)))
        if when == "not due":
            descend(opt, loss_of(net(normal(5, 4))))
        hidden = storages_of(*net.blocks[0][:2], *net.blocks[1][:2])
        with opt.preconditioner.paused() if when == "paused" else contextlib.nullcontext():
            out = net(normal(5, 4))
        alive[kind] = sum(not storage.expired() for storage in hidden)
        loss_of(out).backward()
    assert alive[reentrant] == 0
    assert alive[None] > 0  # the measure sees what is not saved


@pytest.mark.parametrize(
    ("change", "reentrant"),
    [
        *((f"{what} {when}", False) for what in ("paused", "due") for when in ("then", "since")),
        *(("paused then", True), ("paused since", True)),
    ],
)
def test_a_forward_decides_what_its_checkpoints_gather(change, reentrant):
    # The recomputation must save as many tensors as the forward did.
    x, layer, net = normal(5, 4), "blocks.0.0", seeded(partial(deep, reentrant))
    opt = exact(net, lr=0.0, factor_update_steps=1, factor_decay=1e-12, staggered=False)
    descend(opt, loss_of(net(normal(3, 4, seed=1))))
    kfac, unpaused = opt.preconditioner, contextlib.nullcontext()
    kfac.factor_update_steps = 2 if change == "due since" else 1
    with kfac.paused() if change == "paused then" else unpaused:
        out = net(x)
    kfac.factor_update_steps = 2 if change == "due then" else 1
    with kfac.paused() if change == "paused since" else unpaused:
        loss_of(out).backward()  # computes the blocks again
    if change in ("paused then", "due since"):
        assert pending(opt) == 0
        return
    kfac.factor_update_steps = 1
    opt.step()
    assert_factors(opt, layer, expected(seeded(partial(deep, None)), fit(x), layer, 5.0))


def own_uses(outer: Any, inner: Any) -> nn.Module:
    """Return a model that uses parameters of its own within checkpoints that it begins itself."""

    def within(m: nn.Module, x: Tensor) -> Tensor:
        return m.gamma * m.block(x + m.places)

    def around(m: nn.Module, x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.layer_norm(x @ m.product, (4,))
        return x + under(inner, partial(within, m), x)

    def use(m: nn.Module, x: Tensor) -> Tensor:
        return m.gamma * under(outer, partial(around, m), x)

    own = {"places": torch.ones(3, 4), "product": torch.eye(4), "gamma": torch.full((4,), 0.5)}
    return Body(use, block=block(), **own)


@pytest.mark.parametrize("kinds", [(False, False), *((kind, None) for kind in POLICIES.values())])
def test_checkpoints_of_own_parameters_keep_the_gradients(kinds):
    """A tap's tensors and operations must not be among those that checkpoints count."""
    gradients = []
    for outer, inner in (kinds, (None, None)):
        net, opt = built(seeded(partial(own_uses, outer, inner)))
        fit(normal(3, 3, 4))(net)
        assert not opt.preconditioner.steps
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    for name, gradient in gradients[1].items():
        assert_close(gradients[0][name], gradient, 1e-12, name)


def test_uses_that_a_reentrant_checkpoint_hides_keep_raw_gradients():
    def use(m: nn.Module, x: Tensor) -> Tensor:
        return x + checkpoint(lambda x: m.block(x) @ m.product, x, use_reentrant=True)

    def make() -> nn.Module:
        hidden = Body(use, block=block(), product=0.5 * torch.eye(4))
        return nn.Sequential(nn.Linear(4, 4), hidden, nn.Linear(4, 40))

    net, opt = built(seeded(make), factor_update_steps=1, lr=0.01)
    for i in range(6):
        opt.zero_grad()
        fit(normal(6, 4, seed=i))(net)
        assert_close(taken(opt, net)["1.product"], 0.01 * net[1].product.grad, 1e-12)
    assert opt.preconditioner.coverage().left.keys() == {"1.product"}


# ---------------------------------------------------------------- K: which passes count


def pair(kind: Any = None) -> nn.Module:
    """Return two layers, each behind a checkpoint or not."""
    parts = {"first": nn.Linear(4, 4), "last": nn.Linear(4, 2)}
    return Body(lambda m, x: under(kind, m.last, under(kind, m.first, x)), **parts)


def routed(threshold: float) -> nn.Module:
    """Return a model that sends each row to one of two experts; the first may stay idle."""

    def use(m: nn.Module, x: Tensor) -> Tensor:
        goes = x[:, 0] > threshold
        parts = [expert(x[goes == i]) for i, expert in enumerate(m.experts)]
        return m.last(torch.cat(parts).tanh())

    experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
    return Body(use, experts=experts, last=nn.Linear(4, 2))


def batch(n: int) -> Tensor:
    return normal(n, 4, seed=n).requires_grad_()  # a reentrant checkpoint needs one


def a_forward_in_between(net: nn.Module) -> None:
    loss = loss_of(net(batch(8)))
    net(batch(24))  # evaluated, never trained
    loss.backward()


def two_forwards(net: nn.Module) -> None:
    losses = [loss_of(net(batch(n))) for n in (8, 24)]
    (sum(losses) / 2).backward()


def first_of_two(net: nn.Module) -> None:
    losses = [loss_of(net(batch(n))) for n in (8, 24)]
    losses[0].backward()


# Two forwards under a reentrant checkpoint and without the model are one to us: nothing marks where
# one ends. The guide says so. There, of a forward that is trained alone, the other one counts, too.
UNMARKED = [("reentrant", two_forwards), ("reentrant", first_of_two)]


def assert_counts_alike(
    inner: nn.Module, plain: nn.Module, train: Train, names: list[str], within: bool, method: str
) -> None:
    """Train a model, perhaps as a part of another, and a plain one: factors must be the same."""
    whole = nn.ModuleDict({"net": inner}) if within else inner
    opt, clean = (KFACSGD(net, lr=0.1, compute_method=method) for net in (whole, plain))
    for net, optimizer in ((inner, opt), (plain, clean)):
        train(net)
        optimizer.step()
    for name in names:
        wanted = clean.preconditioner.factors(name)
        assert all(side.any() for side in wanted)
        assert_factors(opt, "net." * within + name, wanted, 1e-12)


@pytest.mark.parametrize("method", ["polar", "eigen"])
@pytest.mark.parametrize("within", [False, True], ids=["the model", "a part of it"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("train", [a_forward_in_between, two_forwards, first_of_two])
def test_each_backward_pass_counts_for_its_own_forward(train, kind, within, method):
    """Also under checkpoints, and as trainers do that call a part of the model."""
    if within and (kind, train) in UNMARKED:
        pytest.skip("nothing marks where a forward ends")
    inner, plain = seeded(partial(pair, CHECKPOINTS[kind])), seeded(pair)
    assert_counts_alike(inner, plain, train, ["first", "last"], within, method)


@pytest.mark.parametrize("method", ["polar", "eigen"])
@pytest.mark.parametrize("threshold", [-100.0, 0.0], ids=["idle", "in part"])
def test_k_is_the_inner_models_batch_though_its_first_layer_sees_less(threshold, method):
    inner, plain = (seeded(partial(routed, threshold)) for _ in range(2))
    assert_counts_alike(inner, plain, fit(batch(8)), ["experts.1", "last"], True, method)


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
    named = {f"input{i}": arg for i, arg in enumerate(args)} if by_keyword else {}

    def train(model: nn.Module) -> None:
        model(*() if named else args, **named).square().sum().backward()

    for terms, count in (("examples", examples), ("positions", positions)):
        net, opt = built(seeded(wide), loss_terms=terms)
        wanted = expected(net, train, "layer", count)
        train(net)
        opt.step()
        assert_factors(opt, "layer", wanted)


def within(depth: int, guess: bool) -> nn.Module:
    """Return a model that runs itself: on its own output, or without gradients on its input."""

    def use(m: nn.Module, x: Tensor, depth: int = depth) -> Tensor:
        if guess and depth:
            with torch.no_grad():
                x = x + m(x[:2], 0).mean()
            depth = 0
        out = torch.tanh(m(x, depth - 1) if depth else m.first(x))
        return m.then(torch.tanh(m.then(out)))

    return Body(use, first=nn.Linear(4, 4), then=nn.Linear(4, 4))


def freezes_a_bias(net: nn.Module, opt: Any, x: Tensor) -> None:
    fit(x)(net)
    net.last.bias.requires_grad_(False)
    fit(x)(net)


def calls_while_paused(net: nn.Module, opt: Any, x: Tensor) -> None:
    with opt.preconditioner.paused():
        net.last(normal(100, 4))
    fit(x)(net.forward)


def flattened() -> nn.Module:
    """Return a model whose layer sees examples and positions as rows."""
    layer = nn.Linear(4, 3)
    return Body(lambda m, x: m.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]), layer=layer)


def clears(net: nn.Module, opt: Any, x: Tensor) -> None:
    """Clear gradients within the model's own forward."""
    net.layer.register_forward_pre_hook(lambda *_: opt.zero_grad())
    fit(x[:, None].expand(-1, 3, -1))(net)


def passes(net: nn.Module, opt: Any, x: Tensor) -> None:
    fit(x)(net)


# What is built, how it trains on a batch, and how often K counts each example.
COUNTS: dict[str, tuple[Callable[[], nn.Module], Callable[..., None], int]] = {
    "a model": (partial(within, 0, False), passes, 1),
    "calls within calls": (partial(within, 2, False), passes, 1),
    "a guess within a call": (partial(within, 1, True), passes, 1),
    "a bias frozen between micro-batches": (pair, freezes_a_bias, 2),
    "a layer called while paused": (pair, calls_while_paused, 1),
    "gradients cleared within a call": (flattened, clears, 1),
}


@pytest.mark.parametrize("scenario", COUNTS)
def test_terms_are_the_examples_of_passes_that_train(scenario):
    make, train, often = COUNTS[scenario]
    net, opt = built(seeded(make), factor_update_steps=1)
    for size in (8, 5):
        train(net, opt, normal(size, 4))
        assert opt.preconditioner.sums.terms() == often * size
        opt.step()
        opt.zero_grad()


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
        for name, factor in wanted.items():
            assert_factors(opt, name, factor)


# ---------------------------------------------------------------- scales, wrappers and errors


@pytest.mark.parametrize("kind", ["large", "disabled scaler"])
def test_grad_scaler_option(kind):
    large = kind == "large"
    scale = 2.0**50 if large else 1.0
    given = scale if large else torch.amp.GradScaler("cpu", init_scale=64.0, enabled=False)
    dtype = torch.float32 if large else torch.float64  # the scale's square must not overflow
    net, opt = built(mlp().to(dtype), grad_scaler=given)
    (loss_of(net(X.to(dtype))) * scale).backward()
    for p in net.parameters():
        p.grad.div_(scale)
    opt.step()
    clean = clean_run(X.to(dtype), lambda: mlp().to(dtype))
    assert_same((net, opt), clean, 1e-6 if large else 1e-12)


def test_data_parallel_is_refused():
    net = mlp()
    for wrapped in (nn.DataParallel(net), nn.Sequential(nn.DataParallel(net))):
        with pytest.raises(ValueError, match=r"model: nn\.DataParallel .* Distributed"):
            exact(wrapped)
    opt = exact(net)  # a trainer may wrap the model later
    with pytest.raises(ValueError, match=r"model: nn\.DataParallel .* Distributed"):
        net._replicate_for_data_parallel()(X)
    assert not opt.preconditioner.sums.of_layer


@pytest.mark.parametrize("error", [ConnectionError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["model", "attention"])
@pytest.mark.parametrize("within", [False, True], ids=["", "under another mode"])
def test_a_forward_pass_that_was_stopped_leaves_nothing(where, within, error, monkeypatch):
    """After Ctrl-C torch runs no hook: then the next zero_grad clears what is left."""

    def stop(*_: Any, **__: Any) -> Tensor:
        raise error

    runs = [built(seeded(partial(encoder, None))) for _ in range(2)]
    net = runs[0][0]
    modes = torch._C._len_torch_function_stack()
    with monkeypatch.context() as patch, pytest.raises(error):
        if where == "model":
            patch.setattr(net, "use", lambda m, x: stop(m.layer(x)))
        else:
            patch.setattr(nn.functional, "scaled_dot_product_attention", stop)
        net(normal(9, 5, 4))
    for model, opt in runs:
        if error is KeyboardInterrupt:
            with torch.device("cpu") if within else contextlib.nullcontext():
                opt.zero_grad()
        else:  # called alone, its rows must not count as those of the pass that broke
            loss_of(model.layer(normal(2, 5, 4))).backward()
        for _ in range(2):
            fit(normal(3, 5, 4))(model)
        if error is KeyboardInterrupt:
            assert opt.preconditioner.sums.terms() == 6
        opt.step()
    assert torch._C._len_torch_function_stack() == modes
    assert_same(*runs)
