"""Each backward pass that trains a layer counts, whichever way it takes; what its tap leaves."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from kaisa_optim import KFACSGD, KFACAdam, Layer, register_layer
from kaisa_optim.capture.passes import top_hooks
from tests.capture.test_capture import X, assert_same, clean_run, convnet, fit, loss_of, mlp
from tests.support import groups
from tests.support.branches import Branches, backward, gathering, output_factor
from tests.support.ranks import run
from tests.support.training import descend
from tests.support.watch import (
    Body,
    Watch,
    assert_close,
    assert_factors,
    built,
    exact,
    factors_of,
    normal,
    rows_of,
    seeded,
)

# Torch says so of inputs that need no gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

EIGEN = {"compute_method": "eigen"}
NEWEST = {**EIGEN, "factor_decay": 1e-12}  # an average is the last value
AT_ONCE = {"staggered": False}


def micro_batches(model: nn.Module, i: int, ways: str) -> None:
    for j, way in enumerate(ways):
        backward(model, 10 * i + j, way, len(ways))


def gradients_of(module: nn.Module) -> list[Tensor]:
    """Of its output, one for each backward pass to come."""
    found: list[Tensor] = []
    module.register_full_backward_hook(lambda module, inputs, outputs: found.append(outputs[0]))
    return found


# ---- which passes count: G is K Σ g gᵀ, of the layer's last pass in its turn ----


class Tokens(nn.Module):
    """Of which a trainer calls ``net`` alone; ``token`` sees examples and positions as rows."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.token, self.head = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)
        self.double().first.requires_grad_(not frozen)

    def training_step(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        t = torch.tanh(self.token(h.flatten(0, 1))).unflatten(0, x.shape[:2])
        return self.head(t.mean(1)).square().mean()


def part(model: nn.Module, i: int) -> None:
    model.training_step(normal(8, 5, 6, seed=i)).backward()


def two_ends() -> nn.Module:
    """Return a model with a head that not all passes take, and a loss of some rows, or of none."""

    def use(m: nn.Module, x: Tensor, whole: bool, chosen: int) -> Tensor:
        h = torch.tanh(m.body(x))
        out = m.head(h).square().mean() if whole else h.square().mean()
        return (out + m.aux(h[:chosen]).square().sum() / 8) / 2

    parts = {"head": nn.Linear(5, 3), "aux": nn.Linear(5, 2)}
    return seeded(lambda: Body(use, body=nn.Linear(6, 5), **parts))


def exits(model: nn.Module, i: int) -> None:
    for whole in (True, False)[: 1 + i]:
        model(normal(8, 6, seed=i + 10 * whole), whole, 2).backward()


def selects(model: nn.Module, i: int) -> None:
    for j, chosen in enumerate((0, 3)):
        model(normal(8, 6, seed=2 * i + j), False, chosen).backward()


def alone(change: str) -> Callable[[nn.Module, int], None]:
    """Return passes of which the second meets one layer, which has its turn in another step."""

    def train(model: nn.Module, i: int) -> None:
        backward(model, i, "b", 2)
        x = normal(4, 2, 6, seed=30 + i) if change == "view in place" else normal(4, 6, seed=i)
        h = model.a(x)
        (h if change == "nothing" else h.tanh_()).square().mean().backward()

    return train


def ways(*steps: str) -> Callable[[nn.Module, int], None]:
    return lambda model, i: micro_batches(model, i, steps[i])


# What is built, how it trains in step i, the layer, K (in each step), the number of steps, options.
EVERY, EVERY_2, EVERY_3 = ({"factor_update_steps": n} for n in (1, 2, 3))
COUNTED: dict[str, tuple[Callable[[], nn.Module], Any, str, Any, int, dict[str, Any]]] = {
    "a branch that comes late": (Branches, ways("aa", "ab"), "b", 16, 2, {}),
    "a branch that comes late, at once": (Branches, ways("aa", "ab"), "b", 16, 2, AT_ONCE),
    "branches are no steps left out": (
        Branches,
        ways("ab"),
        "a",
        16,
        1,
        {"factor_update_steps": 1},
    ),
    "an exit that no gathering pass took": (two_ends, exits, "head", (8, 16, 16), 3, EVERY_2),
    "a pass without rows for the first layer": (two_ends, selects, "aux", 16, 3, EVERY_2),
    "a part, by its first layer": (Tokens, part, "token", 8, 6, EVERY_3),
    "a part, its head": (Tokens, part, "head", 8, 6, EVERY_3),
    "a part, the first layer frozen": (lambda: Tokens(True), part, "token", 40, 6, EVERY_3),
    "a part whose first layer is frozen, its head": (
        lambda: Tokens(True),
        part,
        "head",
        40,
        6,
        EVERY_3,
    ),
    "a layer alone": (Branches, alone("nothing"), "head", 12, 4, EVERY_3),
    "a layer alone, a view in place": (Branches, alone("view in place"), "head", 12, 4, EVERY_3),
    "a layer alone, in place": (Branches, alone("in place"), "head", 12, 4, EVERY_3),
}


@pytest.mark.parametrize("scenario", COUNTED)
def test_each_pass_that_trains_counts(scenario):
    make, train, layer, terms, steps, options = COUNTED[scenario]
    model = make()
    opt = KFACSGD(model, lr=0.1, **NEWEST, **options)
    found, checked = gradients_of(model.get_submodule(layer)), []
    for i in range(steps):
        opt.zero_grad()
        train(model, i)
        opt.step()
        if layer in opt.preconditioner.work.average:
            g, k = found[-1], terms[i] if isinstance(terms, tuple) else terms
            assert_close(output_factor(opt, layer), k * g.T @ g, what=f"step {i}")
            checked.append(i)
    assert checked[-1] > 0 or steps == 1


def late_on_the_last_rank(options: dict[str, Any]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Branches()
    wrapped = DDP(model, find_unused_parameters=True)
    opt = KFACSGD(wrapped, lr=0.1, **options, **EIGEN)
    found = gradients_of(model.b)
    for i, last in enumerate("ab"):
        opt.zero_grad()
        backward(wrapped, 10 * i + rank, last if rank == world - 1 else "a")
        opt.step()
    expected = [8 * found[0].T @ found[0] / world if found else None]
    dist.broadcast_object_list(expected, src=world - 1)
    layer = opt.preconditioner.layers["b"]
    if opt.preconditioner.registry.owner(layer, "g") == rank:
        kept = groups.averages(opt)["b", "g"]
        assert_close(kept.squeeze(0), expected[0])


@pytest.mark.parametrize("options", [{}, AT_ONCE], ids=["staggered", "at once"])
def test_ranks_on_other_branches_count_for_a_layer_that_comes_late(options):
    run(2, late_on_the_last_rank, options)


def steps(model: nn.Module, opt: Any, numbers: range) -> list[Tensor]:
    for i in numbers:
        opt.zero_grad()
        micro_batches(model, i, "ab")
        opt.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_resumed_run_counts_the_branches_that_it_has_not_seen_yet(done):
    options = {"lr": 0.1, "factor_update_steps": 3, "inv_update_steps": 3}
    model = Branches()
    opt = KFACSGD(model, **options)
    steps(model, opt, range(done))
    resumed = copy.deepcopy(model)
    anew = KFACSGD(resumed, **options)
    anew.load_state_dict(opt.state_dict())
    expected = steps(model, opt, range(done, 7))
    for p, q in zip(steps(resumed, anew, range(done, 7)), expected, strict=True):
        assert torch.equal(p, q)


def after(model: nn.Module, opt: Any, skipped: bool, clear: Any) -> list[Tensor]:
    for i, way in enumerate("ab"):
        clear.zero_grad()
        backward(model, i, way)
        opt.step()
    if skipped:
        clear.zero_grad()
        backward(model, 77, "a")
    clear.zero_grad()
    backward(model, 2, "b")
    opt.step()
    return [f for name in ("a", "b", "head") for f in opt.preconditioner.factors(name)]


@pytest.mark.parametrize("through", ["model", "optimizer"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_step_left_out_leaves_nothing_on_a_branch_that_the_next_does_not_take(through, every):
    factors = []
    for skipped in (False, True):
        model = Branches()
        opt = KFACSGD(model, lr=0.1, factor_update_steps=every, **NEWEST)
        factors.append(after(model, opt, skipped, model if through == "model" else opt))
    for kept, expected in zip(*factors, strict=True):
        assert torch.equal(kept, expected)


def test_a_bias_frozen_between_micro_batches_takes_no_pass_away():
    model = Branches()
    opt = KFACSGD(model, lr=0.1, factor_update_steps=1, staggered=False)
    backward(model, 0, "a", 2)
    model.head.bias.requires_grad_(False)
    backward(model, 1, "b", 2)
    assert opt.preconditioner.sums.terms() == 16


def test_what_is_called_while_paused_belongs_to_no_pass():
    model = Tokens()
    opt = KFACSGD(model, lr=0.1, factor_update_steps=1)
    with opt.preconditioner.paused():
        model.head(normal(100, 4))
    model.training_step(normal(8, 5, 6)).backward()
    assert opt.preconditioner.sums.terms() == 8


def test_frozen_layers_have_nothing_watched_between_the_steps_that_gather():
    model = Branches()
    model.b.requires_grad_(False)
    options = {"factor_update_steps": 3, "staggered": False, "inv_update_steps": 5}
    opt = KFACSGD(model, lr=0.1, **options, **EIGEN)
    seen = []
    for i in range(7):
        opt.zero_grad()
        backward(model, i, "a")
        seen.append(bool(opt.preconditioner.sums.of_layer))
        opt.step()
    assert seen == [i % 3 == 0 for i in range(7)]


@pytest.mark.parametrize("rule", [{}, EIGEN], ids=["polar", "eigen"])
@pytest.mark.parametrize("alone", [True, False])
def test_an_unfrozen_layer_gathers_in_the_next_step_that_does(alone, rule):
    """Also if its module is called without the model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[1].requires_grad_(False)
    options = {"factor_update_steps": 10, "staggered": False, **rule}
    opt = KFACSGD(model, lr=0.1, **options)
    for i in range(21):
        opt.zero_grad()
        if i == 11:
            model[1].requires_grad_(True)
        out = model[1](normal(5, 4, seed=i)) if alone and i == 20 else model(normal(5, 4, seed=i))
        out.square().mean().backward()
        seen = {
            layer.name for layer, x in opt.preconditioner.sums.of_layer.items() if x.a is not None
        }
        assert i != 20 or seen == ({"1"} if alone else {"0", "1"})
        opt.step()
        assert ("1" in opt.preconditioner.work.average) == (i == 20)
    assert opt.preconditioner.factors("1")[0].abs().sum() > 0


@pytest.mark.skipif(top_hooks is None, reason="torch 2.6 leaves idle taps in place")
@pytest.mark.parametrize("counts", [True, False])
def test_layers_that_do_not_gather_are_tapped_where_k_counts_their_passes(counts):
    """Directions need no K: their layers are left alone, and all are where nothing gathers."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    options = {**(EIGEN if counts else {}), "factor_update_steps": 6, "staggered": True}
    opt = KFACSGD(model, lr=0.1, **options)
    for step in range(14):
        opt.zero_grad()
        out = model(normal(5, 4, seed=step))
        taps = nodes_of(out)["TapBackward"]
        out.square().mean().backward()
        gathers = gathering(opt)
        if step > 6:
            assert taps == (4 if gathers and counts else len(gathers))
            assert opt.preconditioner.sums.terms() == (5 if gathers else 0)
        opt.step()


AFTER = {"construction": "01", "a step": "", "a load": "", "an interval": "01", "a group": "1"}


@pytest.mark.parametrize("after", AFTER)
def test_the_next_pass_gathers_what_is_due(after):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    first = model[0].parameters() if after == "a group" else model
    options = {"lr": 0.1, "factor_update_steps": 6, "staggered": False, "model": model}
    opt = KFACSGD(first, **options)
    if after != "construction":
        fit(normal(5, 4))(model)
        opt.step()
    if after == "a load":
        state, opt = opt.state_dict(), KFACSGD(model, **options)
        opt.load_state_dict(state)
    opt.preconditioner.factor_update_steps = 1 if after == "an interval" else 6
    if after == "a group":
        opt.add_param_group({"params": model[1].parameters()})
    fit(normal(5, 4))(model)
    assert "".join(x.name for x in opt.preconditioner.sums.of_layer) == AFTER[after][::-1]


def towers() -> nn.Module:
    """Return two branches of one input; ``mine`` stands behind a layer that K-FAC leaves."""
    parts = {"first": nn.Linear(6, 3), "raw": nn.Linear(6, 5), "mine": nn.Linear(5, 3)}
    return Body(lambda m, x: (m.first(x), m.mine(torch.tanh(m.raw(x)))), **parts)


@pytest.mark.parametrize("inputs", [False, True])
def test_a_branch_behind_other_gradients_than_the_layers_counts(inputs):
    """Its input needs a gradient, but a backward pass comes to no layer before it."""
    model = seeded(towers)
    skipped = {} if inputs else {"skip_layers": ["raw"]}
    model.raw.requires_grad_(not inputs)
    how = {**EIGEN, "factor_update_steps": 2, "inv_update_steps": 10, "staggered": True}
    opt = KFACSGD(model, lr=0.1, **how, **skipped)
    gathered = set()
    for i in range(8):
        opt.zero_grad()
        for branch in (1, 0):
            x = normal(4, 6, seed=2 * i + branch).requires_grad_(inputs)
            (model(x)[branch].square().mean() / 2).backward()
        gathered |= gathering(opt) if i > 1 else set()
        assert opt.preconditioner.sums.terms() in (0, 8), i
        opt.step()
    assert gathered == {"first", "mine"}


# ---- work beside training ----


def test_a_pass_on_the_meta_device_gathers_nothing():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        opt = KFACSGD(model, lr=0.1)
        model(torch.empty(5, 3)).sum().backward()
    assert not opt.preconditioner.sums.of_layer


def test_gradient_penalty_in_the_loss():
    x = normal(6, 4).requires_grad_()

    def loss(model: nn.Module) -> Tensor:
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return loss_of(out) + slope.square().sum() / len(x)

    net = mlp()
    twin = copy.deepcopy(net)
    watch = Watch(twin, "0", "2")
    loss(twin).backward()
    opt = exact(net)
    loss(net).backward(inputs=list(net.parameters()))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert_close(p.grad, q.grad)
    opt.step()
    for name in ("0", "2"):
        rows = rows_of(twin.get_submodule(name), watch.trained(name))
        assert_factors(opt, name, factors_of(*rows, 6.0))


def test_per_example_gradients_by_torch_func_beside_training():
    net, opt = built(mlp())
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def one(parameters, example):
        return loss_of(torch.func.functional_call(net, parameters, (example[None],)))

    def each():
        return torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(parameters, X)

    before = each()
    fit(X)(net)
    each()
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
    opt.step()
    assert_same((net, opt), clean_run(X))


# ---- torch.compile ----


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def encoder() -> nn.Module:
    return seeded(lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True))


COMPILED = {
    "model.compile()": (mlp, "before", "aot_eager"),
    "wrapper": (mlp, "before", "aot_eager"),
    "wrapper given": (mlp, "before", "aot_eager"),
    "after a step": (mlp, "after", "aot_eager"),
    "attention": (encoder, "before", "eager"),
    "attention after a step": (encoder, "after", "eager"),
}


@pytest.mark.parametrize("how", COMPILED)
def test_torch_compile(fresh_dynamo, how):
    make, when, backend = COMPILED[how]
    x = normal(6, 4) if make is mlp else normal(3, 5, 4)
    net, other = make(), make()
    run: Any = net
    if how == "model.compile()":
        net.compile(backend=backend)
    elif when == "before":
        run = torch.compile(net, backend=backend)
    opt = exact(run if how == "wrapper given" else net, factor_update_steps=2)
    clean = exact(other, factor_update_steps=2)
    for step in range(5):  # due for statistics and not, in turn
        for optimizer, model in ((opt, run), (clean, other)):
            descend(optimizer, loss_of(model(x)))
        if step == 0 and when == "after":
            run = torch.compile(net, backend=backend)
    assert_same((net, opt), (other, clean), list(clean.preconditioner.layers), 1e-10)


@pytest.mark.parametrize(
    ("what", "cls"),
    [("training", KFACSGD), ("step", KFACSGD), ("step", KFACAdam), ("both", KFACAdam)],
)
def test_torch_compile_of_the_backward_pass_and_of_the_step(fresh_dynamo, what, cls):
    if what == "step" and torch.__version__ < (2, 7):
        pytest.skip("torch 2.6 calls such a method without its object")
    runs = []
    for compiled in (True, False):
        net = mlp()
        opt = cls(net, lr=0.05, factor_update_steps=2, inv_update_steps=2)

        def train(net: nn.Module = net, opt: Any = opt) -> None:
            opt.zero_grad()
            fit(X)(net)

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


def test_torch_compile_called_before_construction(fresh_dynamo):
    # Compiled code does not look for hooks that come later: an error says what to do.
    net = mlp()
    compiled = torch.compile(net, backend="aot_eager")
    fit(X)(compiled)
    net.zero_grad()
    opt = exact(compiled)
    fit(X)(compiled)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(
        RuntimeError, match=r"model of this class was compiled and called.*_dynamo\."
    ):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    torch._dynamo.reset()
    opt.zero_grad()
    fit(X)(compiled)
    opt.step()
    assert_same((net, opt), clean_run(X), rtol=1e-10)


def attends(**options: bool) -> nn.Module:
    attention = nn.MultiheadAttention(4, 2, **options)
    return Body(lambda m, x: m.attention(x, x, x)[0], attention=attention)


KINDS = {
    "linear": (lambda: nn.Linear(4, 4), normal(3, 4)),
    "linear, sequences": (lambda: nn.Linear(4, 4), normal(3, 2, 4)),
    "linear, sequences, no bias": (lambda: nn.Linear(4, 4, bias=False), normal(3, 2, 4)),
    "linear, unbatched": (lambda: nn.Linear(4, 4), normal(4)),
    "convolution": (lambda: nn.Conv2d(2, 2, 2), normal(3, 2, 3, 3)),
    "convolution, unbatched": (lambda: nn.Conv2d(2, 2, 2), normal(2, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 2, 2), normal(3, 2, 3)),
    "transposed, unbatched": (lambda: nn.ConvTranspose1d(2, 2, 2), normal(2, 3)),
    "embedding": (lambda: nn.Embedding(5, 4), torch.tensor([[1, 2], [0, 4]])),
    "attention": (attends, normal(3, 5, 4)),
    "attention, batch first": (lambda: attends(batch_first=True), normal(3, 5, 4)),
    "attention, unbatched": (attends, normal(5, 4)),
}


@pytest.mark.parametrize(("make", "x"), KINDS.values(), ids=list(KINDS))
def test_in_place_activations_after_every_kind(make, x):
    def in_place(out: Tensor) -> Tensor:
        out += 0.5
        return out.relu_()

    runs = []
    for follow in (in_place, lambda out: torch.relu(out + 0.5)):
        net, opt = built(seeded(make))
        descend(opt, loss_of(follow(net(x))))
        runs.append((net, opt))
    assert_same(*runs, list(runs[0][1].preconditioner.layers))


def nodes_of(out: Tensor) -> Counter[str]:
    """Return how many nodes of each kind an output's graph has."""
    nodes, queue = set(), [out.grad_fn]
    while queue:
        node = queue.pop()
        nodes.add(node)
        queue += [x for x, _ in node.next_functions if x is not None and x not in nodes]
    return Counter(type(node).__name__ for node in nodes)


@pytest.mark.skipif(top_hooks is None, reason="torch 2.6 can't walk past such functions")
@pytest.mark.parametrize("kind", ["linear, sequences", "attention", "attention, unbatched"])
def test_no_copies_of_gradients_where_the_output_is_a_view(kind):
    # Of a view that is changed in place autograd copies the gradient, whole and in part.
    make, x = KINDS[kind]
    net, opt = built(seeded(make))
    seen = nodes_of(net(x))
    assert "TapBackward" in seen and "CopySlices" not in seen
    assert opt.preconditioner.layers


@pytest.mark.parametrize("first", [True, False])
def test_users_forward_hook_that_changes_the_output(first):
    # Its output is not the layer's s, whichever was registered first.
    net = mlp()

    def tripled(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return 3 * output

    twin = copy.deepcopy(net)
    watch = Watch(twin, "0")
    twin[0].register_forward_hook(tripled)
    fit(X)(twin)
    if first:
        net[0].register_forward_hook(tripled)
    opt = exact(net)
    if not first:
        net[0].register_forward_hook(tripled)
    fit(X)(net)
    assert_close(net[0].weight.grad, twin[0].weight.grad)
    opt.step()
    assert_factors(opt, "0", factors_of(*rows_of(twin[0], watch.trained("0")), 6.0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_and_exporting_a_model_in_training():
    net, opt = built(mlp())
    traced = torch.jit.trace(net, (X,))
    assert_close(traced(2 * X), net(2 * X))
    if torch.__version__ >= (2, 7):  # 2.6 stops at any hook that its tracer does not know
        exported = torch.export.export(net, (X,)).module()
        assert_close(exported(X), net(X))
    descend(opt, loss_of(net(X)))
    assert_same((net, opt), clean_run(X))


def test_saved_tensors_kept_elsewhere():
    net, opt = built(mlp())
    with torch.autograd.graph.save_on_cpu():
        out = net(X)
    with torch.autograd.set_detect_anomaly(True):
        loss_of(out).backward()
    opt.step()
    assert_same((net, opt), clean_run(X))


def saved_bytes(net: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages that a forward pass keeps for the backward."""
    storages: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = net(x)
    del out
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    return sum(t.untyped_storage().nbytes() for at, t in storages.items() if at not in own)


@pytest.mark.parametrize("kind", ["linear", "convolution", "attention"])
def test_capture_keeps_no_extra_memory(kind):
    net, x = {
        "linear": (mlp(), X),
        "convolution": (convnet(), normal(6, 2, 3, 3)),
        # With batch_first torch copies the input once more on its way into the attention.
        "attention": (nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0).double(), normal(3, 5, 4)),
    }[kind]
    plain = saved_bytes(net, x)
    opt = exact(net)
    assert saved_bytes(net, x) == plain > 0
    descend(opt, loss_of(net(x)))
    assert saved_bytes(net, x) == plain  # nor when statistics are not due


def test_forward_mode_differentiation_leaves_its_passes_out():
    net, opt = built(mlp())
    direction = normal(6, 4, seed=1)
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(net(forward_ad.make_dual(X, direction))).tangent
        fit(X)(net)  # which has no tangents
    assert_close(slope, torch.func.jvp(mlp(), (X,), (direction,))[1])
    opt.step()
    assert_same((net, opt), clean_run(X))


@pytest.mark.parametrize("kind", ["a nested tensor", "of layout torch.sparse_coo"])
def test_inputs_whose_rows_are_not_read_are_refused_by_name(kind):
    net, opt = built(mlp())
    nested = torch.nested.nested_tensor([X[:2], X[2:]], layout=torch.jagged)
    x = nested if "nested" in kind else X.to_sparse()
    text = rf"Invalid input of layer '0': it is {kind}, .*skip_layers=\['0'"
    with pytest.raises(TypeError, match=text):
        net(x)
    if "nested" in kind:
        return
    # Where nothing is to be read of them, they pass.
    with opt.preconditioner.paused():
        net(x)
    net[0].weight.requires_grad_(False)
    descend(opt, loss_of(net(x)))


def test_a_kind_of_ones_own_may_read_sparse_inputs():
    class Sparse(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    @register_layer(Sparse)
    class SparseLayer(Layer):
        def __init__(self, name: str, module: nn.Module) -> None:
            super().__init__(name, module)
            self.in_shape, self.outputs = (4,), 3

        def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
            return x.to_dense()[None, :, None]

        def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
            return grad[None, :, None]

    clean = clean_run(X, lambda: seeded(lambda: Sparse(4, 3)))
    net, opt = built(seeded(lambda: Sparse(4, 3)))
    descend(opt, loss_of(net(X.to_sparse())))
    assert_same((net, opt), clean, [""])
