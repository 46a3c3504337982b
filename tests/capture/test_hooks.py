"""Each backward pass that trains a layer counts, whichever way it takes; what its tap leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from kaisa_optim import KFACSGD, KFACAdam, Layer, register_layer
from tests.capture.test_capture import (
    X,
    assert_same,
    clean_run,
    convnet,
    expected,
    fit,
    heads,
    loss_of,
    mlp,
    pair,
)
from tests.support.branches import Branches, backward, gathering, output_factor
from tests.support.ranks import fresh
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
OLD_TORCH = torch.__version__ < (2, 7)


def micro_batches(model: nn.Module, i: int, ways: str) -> None:
    for j, way in enumerate(ways):
        backward(model, 10 * i + j, way, len(ways))


def gradients_of(module: nn.Module) -> list[Tensor]:
    """Of its output, one for each backward pass to come."""
    found: list[Tensor] = []
    module.register_full_backward_hook(lambda module, inputs, outputs: found.append(outputs[0]))
    return found


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


def alone(change: str, model: nn.Module, i: int) -> None:
    """Run two passes; the second meets one layer, which has its turn in another step."""
    backward(model, i, "b", 2)
    x = normal(4, 2, 6, seed=30 + i) if change == "view in place" else normal(4, 6, seed=i)
    h = model.a(x)
    (h if change == "nothing" else h.tanh_()).square().mean().backward()


def ways(*steps: str) -> Callable[[nn.Module, int], None]:
    return lambda model, i: micro_batches(model, i, steps[i])


EVERY, EVERY_2, EVERY_3 = ({"factor_update_steps": n} for n in (1, 2, 3))
FROZEN = partial(Tokens, True)
# What is built, how it trains in step i, the layer, K (in each step), the number of steps, options.
COUNTED: dict[str, tuple[Callable[[], nn.Module], Any, str, Any, int, dict[str, Any]]] = {
    "a branch that comes late": (Branches, ways("aa", "ab"), "b", 16, 2, {}),
    "a branch that comes late, at once": (Branches, ways("aa", "ab"), "b", 16, 2, AT_ONCE),
    "branches are no steps left out": (Branches, ways("ab"), "a", 16, 1, EVERY),
    "an exit that no gathering pass took": (two_ends, exits, "head", (8, 16, 16), 3, EVERY_2),
    "a pass without rows for the first layer": (two_ends, selects, "aux", 16, 3, EVERY_2),
    "a part, by its first layer": (Tokens, part, "token", 8, 6, EVERY_3),
    "a part, its head": (Tokens, part, "head", 8, 6, EVERY_3),
    "a part, the first layer frozen": (FROZEN, part, "token", 40, 6, EVERY_3),
    "a part, the first layer frozen, its head": (FROZEN, part, "head", 40, 6, EVERY_3),
    **{
        f"a layer alone, {change}": (Branches, partial(alone, change), "head", 12, 4, EVERY_3)
        for change in ("nothing", "view in place", "in place")
    },
}


@pytest.mark.parametrize("scenario", COUNTED)
def test_each_pass_that_trains_counts(scenario):
    """G is K Σ g gᵀ, of the layer's last pass in its turn."""
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


@pytest.mark.parametrize("through", ["model", "optimizer"])
@pytest.mark.parametrize("every", [EVERY, EVERY_2])
def test_a_step_left_out_leaves_nothing_on_a_branch_that_the_next_does_not_take(through, every):
    factors = []
    for left_out in ([], [(77, "a")]):
        model = Branches()
        opt = KFACSGD(model, lr=0.1, **every, **NEWEST)
        for i, way in ((0, "a"), (1, "b"), *left_out, (2, "b")):
            (model if through == "model" else opt).zero_grad()
            backward(model, i, way)
            if (i, way) not in left_out:
                opt.step()
        names = ("a", "b", "head")
        factors.append([factor for name in names for factor in opt.preconditioner.factors(name)])
    assert all(map(torch.equal, *factors))


@pytest.mark.parametrize("rule", [{}, EIGEN], ids=["polar", "eigen"])
@pytest.mark.parametrize("alone", [True, False])
def test_an_unfrozen_layer_gathers_in_the_next_step_that_does(alone, rule):
    """Also if its module is called without the model; while it is frozen, no step waits for it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[1].requires_grad_(False)
    opt = KFACSGD(model, lr=0.1, factor_update_steps=10, staggered=False, **rule)
    for i in range(21):
        opt.zero_grad()
        if i == 11:
            model[1].requires_grad_(True)
        out = model[1](normal(5, 4, seed=i)) if alone and i == 20 else model(normal(5, 4, seed=i))
        out.square().mean().backward()
        sums = opt.preconditioner.sums.of_layer
        seen = {layer.name for layer, x in sums.items() if x.a is not None}
        assert i != 20 or seen == ({"1"} if alone else {"0", "1"})
        assert i > 10 or bool(sums) == (i in (0, 5, 10))
        opt.step()
        assert ("1" in opt.preconditioner.work.average) == (i == 20)
    assert opt.preconditioner.factors("1")[0].abs().sum() > 0


def nodes_of(out: Tensor) -> Counter[str]:
    """Return how many nodes of each kind an output's graph has."""
    nodes, queue = set(), [out.grad_fn]
    while queue:
        node = queue.pop()
        nodes.add(node)
        queue += [x for x, _ in node.next_functions if x is not None and x not in nodes]
    return Counter(type(node).__name__ for node in nodes)


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 leaves idle taps in place")
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


def test_a_pass_on_the_meta_device_gathers_nothing():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        opt = KFACSGD(model, lr=0.1)
        model(torch.empty(5, 3)).sum().backward()
    assert not opt.preconditioner.sums.of_layer


def test_a_group_added_between_backward_and_step_drops_nothing():
    net = seeded(heads)
    opt = exact([*net.trunk.parameters(), *net.left.parameters()], model=net)
    wanted = {name: expected(net, fit(X), name, 6.0) for name in ("trunk", "left")}
    fit(X)(net)
    opt.add_param_group({"params": net.right.parameters()})
    opt.step()
    for name, factors in wanted.items():
        assert_factors(opt, name, factors)


def late_group(file: str) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    net, opt = built(mlp())
    before = net[0].weight.detach().clone()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    fit(X)(net)
    with pytest.raises(RuntimeError, match="2 ranks joined after the optimizer was built"):
        opt.step()
    assert torch.equal(net[0].weight, before)
    dist.barrier()  # a rank that ends takes the connection down while the other still connects


def test_a_process_group_that_comes_after_the_optimizer_is_refused(tmp_path):
    fresh(2, late_group, str(tmp_path / "store"))


ADDED = r"Invalid param_groups: %d groups, 2 were added;"
# What is done to an optimizer's two groups, and the error of the next step.
BY_HAND: dict[str, tuple[Callable[[list[Any]], Any], type[Exception], str]] = {
    **{
        f"damping {x}": (
            lambda groups, x=x: groups[0].update(damping=x),
            ValueError,
            f"Invalid damping: {x}; it must be",
        )
        for x in (0.0, -1.0, float("nan"))
    },
    "added": (lambda groups: groups.append({"params": [], "lr": 0.5}), RuntimeError, ADDED % 3),
    "taken away": (list.pop, RuntimeError, ADDED % 1),
}


@pytest.mark.parametrize(("alter", "error", "text"), BY_HAND.values(), ids=list(BY_HAND))
def test_a_group_changed_by_hand_is_named(alter, error, text):
    net = mlp()
    opt = KFACSGD([{"params": net[i].parameters()} for i in (0, 2)], lr=0.1, model=net)
    fit(X)(net)
    alter(opt.param_groups)
    with pytest.raises(error, match=text):
        opt.step()


@pytest.mark.parametrize(
    "changed", [{"normalization": "kaisa"}, {"weight_sharing": "reduce"}, {"loss_reduction": "sum"}]
)
def test_factors_of_another_convention_are_not_taken_over(changed):
    _, opt = clean_run(X)
    other = exact(mlp(), **changed)
    with pytest.warns(UserWarning, match="no K-FAC factors of this kind for '0', '2'"):
        other.load_state_dict(opt.state_dict())
    with pytest.raises(KeyError, match="no statistics yet"):
        other.preconditioner.factors("0")


class Standardized(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return super()._conv_forward(x, weight / weight.norm(), bias)


def test_a_module_that_runs_otherwise_than_its_class_is_not_covered():
    changed = nn.Linear(2, 2)
    changed.forward = lambda x: x @ changed.weight
    net = nn.Sequential(Standardized(1, 2, 3), nn.Flatten(), changed, nn.Linear(2, 2))
    opt = KFACSGD(net, lr=0.1)
    for _ in range(2):
        net(torch.randn(3, 1, 3, 3)).square().sum().backward()
        opt.step()
    uses = "uses it in a way that no kind of layer knows"
    wanted = {f"0.{name}": f"Standardized {uses}" for name in ("weight", "bias")}
    wanted |= {f"2.{name}": f"Linear {uses}" for name in ("weight", "bias")}
    assert opt.preconditioner.uncovered == wanted


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
    x = X if make is mlp else normal(3, 5, 4)
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
    assert_same((net, opt), (other, clean), 1e-10)


@pytest.mark.parametrize(
    ("what", "cls"),
    [("training", KFACSGD), ("step", KFACSGD), ("step", KFACAdam), ("both", KFACAdam)],
)
def test_torch_compile_of_the_backward_pass_and_of_the_step(fresh_dynamo, what, cls):
    if what == "step" and OLD_TORCH:
        pytest.skip("torch 2.6 calls such a method without its object")

    def trained(turn: Callable[[Any], Any]) -> nn.Module:
        net = mlp()
        opt = cls(net, lr=0.05, factor_update_steps=2, inv_update_steps=2)

        def train() -> None:
            opt.zero_grad()
            fit(X)(net)

        def both() -> None:
            train()
            opt.step()

        calls = [turn(both)] if what == "both" else [train, opt.step]
        if what != "both":
            calls = [turn(call) if call.__name__.startswith(what[:4]) else call for call in calls]
        for _ in range(12):  # more than Dynamo compiles one function anew
            for call in calls:
                call()
        return net

    found, plain = trained(partial(torch.compile, backend="aot_eager")), trained(lambda call: call)
    for p, q in zip(found.parameters(), plain.parameters(), strict=True):
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
    with pytest.raises(RuntimeError, match=r"of this class was compiled and called.*_dynamo\."):
        opt.step()
    assert all(map(torch.equal, net.parameters(), before))
    torch._dynamo.reset()
    opt.zero_grad()
    fit(X)(compiled)
    opt.step()
    assert_same((net, opt), clean_run(X), 1e-10)


def test_a_group_added_after_a_compiled_model_was_called_is_captured(fresh_dynamo):
    net = seeded(pair)
    compiled = torch.compile(net, backend="eager")
    opt = exact(net.first.parameters(), model=compiled, factor_update_steps=1)
    descend(opt, loss_of(compiled(X)))
    opt.add_param_group({"params": net.last.parameters()})
    wanted = expected(net, fit(X), "last", 6.0)
    fit(X)(compiled)
    opt.step()
    assert_factors(opt, "last", wanted)


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
    assert_same(*runs)


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 can't walk past such functions")
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
    net, twin = mlp(), mlp()
    watch = Watch(twin, "0")
    twin[0].register_forward_hook(lambda *call: 3 * call[-1])
    fit(X)(twin)
    if first:
        net[0].register_forward_hook(lambda *call: 3 * call[-1])
    opt = exact(net)
    if not first:
        net[0].register_forward_hook(lambda *call: 3 * call[-1])
    fit(X)(net)
    assert_close(net[0].weight.grad, twin[0].weight.grad)
    opt.step()
    assert_factors(opt, "0", factors_of(*rows_of(twin[0], watch.trained("0")), 6.0))


def saved_bytes(net: nn.Module, x: Tensor) -> int:
    """Return the bytes of the distinct storages that a forward pass keeps for the backward."""
    storages: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        net(x)
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


class OwnKind(Layer):
    """A linear layer as users write it, which reads sparse inputs too."""

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        return x.to_dense()[None, :, None]

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        return grad[None, :, None]


def test_a_kind_of_ones_own_may_read_sparse_inputs():
    class Sparse(nn.Linear):
        pass

    register_layer(Sparse)(OwnKind)
    make = partial(seeded, partial(Sparse, 4, 3))
    net, opt = built(make())
    descend(opt, loss_of(net(X.to_sparse())))
    assert_same((net, opt), clean_run(X, make))
