"""All uses of a parameter count, wherever a model's code makes them, and each counts once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, register_layer
from tests.capture.test_capture import under
from tests.capture.test_hooks import OwnKind
from tests.core.test_coverage import Tied
from tests.layers.test_uses import headed, loss_of, stepped
from tests.support.training import descend
from tests.support.watch import Body, assert_close, built, exact, normal, seeded, taken

TOKENS = torch.tensor([[0, 3, 3, 1], [6, 1, 0, 2]])
X, ROWS = normal(6, 4), normal(6, 3)
A, W = normal(2, 3, seed=4), normal(3, 3, seed=1)


def sums_of(opt: Any) -> dict[str, Any]:
    return {layer.name: sums for layer, sums in opt.preconditioner.sums.of_layer.items()}


def steps_of(net: nn.Module, x: Tensor, count: int = 3) -> list[dict[str, Tensor]]:
    """Return the changes of each of some steps, in which layers gather anew."""
    opt, found = exact(net, factor_update_steps=1, inv_update_steps=1), []
    for _ in range(count):
        opt.zero_grad()
        loss_of(net(x)).backward()
        found.append(taken(opt, net))
    return found


def test_a_head_that_only_the_code_ties_takes_a_registered_ties_steps():
    tied, by_code = (seeded(lambda how=how: Tied(registered=how)) for how in (True, False))
    by_code.load_state_dict(tied.state_dict(), strict=False)
    both = steps_of(tied, TOKENS), steps_of(by_code, TOKENS)
    for tied, found in zip(*both, strict=True):
        for name, step in found.items():
            assert_close(step, tied[name], 1e-9, name)


@pytest.mark.parametrize(
    ("make", "call", "shape"),
    [
        (
            lambda: nn.Conv2d(2, 2, 3, padding=1),
            lambda m, x: F.conv2d(x, m.weight, m.bias, padding=1),
            (4, 2, 5, 5),
        ),
        (lambda: nn.Linear(3, 3), lambda m, x: F.linear(x, m.weight, m.bias), (6, 3)),
        (lambda: nn.Linear(3, 3), lambda m, x: m.forward(x), (6, 3)),
    ],
    ids=["convolution", "linear", "forward"],
)
def test_a_call_with_a_layers_parameters_counts_as_the_layers_own(make, call, shape):
    """A layer runs twice: as a module, and by a call with its parameters."""
    x, steps = normal(*shape), []
    for how in (lambda m, x: m(x), call):
        torch.manual_seed(1)
        again = Body(lambda m, x, how=how: how(m.layer, m.layer(x).tanh()), layer=make())
        steps.append(steps_of(again.double(), x))
    for own, found in zip(*steps, strict=True):
        for name, step in found.items():
            assert_close(step, own[name], 1e-9, name)


@pytest.mark.parametrize("bias", [False, True])
def test_a_tied_decoder_adds_its_rows_in_the_other_direction(bias):
    def coded(m: nn.Module, x: Tensor) -> Tensor:
        m.hidden = m.encoder(x).tanh()
        m.out = F.linear(m.hidden, m.encoder.weight.t())
        m.out.retain_grad()
        return m.out

    net, opt = built(seeded(lambda: Body(coded, encoder=nn.Linear(4, 3, bias=bias))))
    loss_of(net(X)).backward()
    sums = sums_of(opt)["encoder"]
    ones = torch.ones(6, int(bias), dtype=X.dtype)
    rows = torch.cat([X, ones], 1)
    outputs = torch.cat([net.out.grad, 0 * ones], 1)  # the decoder adds no bias
    assert_close(sums.a[0], rows.T @ rows)
    assert_close(sums.crossed.a[0], net.hidden.detach().T @ net.hidden.detach())
    assert_close(sums.crossed.g[0], outputs.T @ outputs)
    opt.step()
    assert opt.preconditioner.factors("encoder")[0].shape == (1, 4 + bias, 4 + bias)


@pytest.mark.parametrize("widest", [16384, 4])
@pytest.mark.parametrize("call", ["bare", "added apart", "turned"])
def test_a_call_without_the_bias_leaves_its_place_empty(call, widest):
    def twice(m: nn.Module, x: Tensor) -> Tensor:
        m.hidden = m.layer(x).tanh()
        if call == "turned":
            return F.linear(m.hidden, m.layer.weight.T)
        out = F.linear(m.hidden, m.layer.weight)
        return out if call == "bare" else out + m.layer.bias

    model = seeded(lambda: Body(twice, layer=nn.Linear(4, 4)))
    net, opt = built(model, max_factor_size=widest)
    loss_of(net(X)).backward()
    ones = torch.ones(6, 1, dtype=X.dtype)
    rows = [torch.cat([X, ones], 1)]
    if call != "turned":
        added = ones if call == "added apart" else 0 * ones
        rows.append(torch.cat([net.hidden.detach(), added], 1))
    factor = sum(one.T @ one for one in rows)
    assert_close(sums_of(opt)["layer"].a[0], factor if widest > 4 else factor.diagonal())
    opt.step()
    assert opt.preconditioner.coverage().elsewhere == {}


def test_modules_that_hold_the_same_parameter_count_its_use_once():
    def outer(body: nn.Module) -> nn.Module:
        around = Body(lambda m, x: m.inner(x), inner=body)
        around.w = body.w
        return around

    steps = []
    for wrap in (lambda body: body, outer):
        body = Body(lambda m, x: x @ m.w, w=normal(3, 3, seed=1))
        steps.append(stepped(headed(wrap(body)), ROWS))
    assert_close(steps[1]["0.w"], steps[0]["0.w"], 1e-9)


def coder() -> nn.Module:
    """Return a model that encodes and decodes in calls of its own, by one table."""

    def use(m: nn.Module, x: Tensor, decodes: bool) -> Tensor:
        return F.linear(x, m.words.weight) if decodes else m.body(m.words(x)).tanh()

    return Body(use, words=nn.Embedding(7, 3), body=nn.Linear(3, 3))


@pytest.mark.parametrize("begins", [0, 1])
def test_a_use_that_begins_later_is_found_once_the_gradient_tells(begins):
    """All calls of the first step are searched."""
    net = seeded(coder)
    opt, found = KFACSGD(net, lr=1e-3, factor_update_steps=1, inv_update_steps=10), []
    for step in range(12):
        opt.zero_grad()
        hidden = net(TOKENS, False)
        loss_of(net(hidden, True) if step >= begins else hidden).backward()
        found.append(sums_of(opt)["words"].crossed is not None)
        opt.step()
        assert step or not opt.preconditioner.capture.sought
    assert found[0] == (not begins) and all(found[-3:])
    assert opt.preconditioner.coverage().elsewhere == {}


def test_a_use_in_a_part_of_a_model_that_is_never_called_is_named():
    def block(m: nn.Module, x: Tensor) -> Tensor:
        return F.linear(x, m.inner.weight, m.inner.bias).tanh()

    parts = {"a": Body(block, inner=nn.Linear(4, 4)), "b": nn.Linear(4, 2)}
    net = seeded(lambda: nn.ModuleDict(parts))
    opt = KFACSGD(net, lr=0.01, factor_update_steps=1)
    with pytest.warns(UserWarning, match="(?s)these parameters with their raw.*a.inner.weight"):
        for _ in range(5):
            descend(opt, loss_of(net["b"](net["a"](X))))


def test_a_cast_in_one_module_and_the_product_in_another_are_one_use():
    def outer(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(m.words(x).tanh(), m.words.weight.clone())

    inner = Body(lambda m, h, w: F.linear(h, w))
    net = seeded(lambda: Body(outer, words=nn.Embedding(7, 3), head=inner))
    opt, crossed = KFACSGD(net, lr=0.01, factor_update_steps=1), []
    for _ in range(4):
        opt.zero_grad()
        loss_of(net(TOKENS)).backward()
        (sums,) = sums_of(opt).values()
        crossed.append(sums.crossed is not None and sums.crossed.count == [8])
        opt.step()
    assert all(crossed)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_may_recompute_a_module_whose_uses_were_found_since(reentrant):
    def inner(m: nn.Module, x: Tensor) -> Tensor:
        return m.words(F.linear(x, m.words.weight).tanh())

    def outer(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(under(reentrant, m.inner, x))

    def make() -> nn.Module:
        part = Body(inner, words=nn.Linear(4, 4, bias=False))
        return Body(outer, inner=part, head=nn.Linear(4, 2))

    rows = []
    net, opt = built(seeded(make), factor_update_steps=1)
    for _ in range(3):
        opt.zero_grad()
        loss_of(net(normal(6, 4).requires_grad_())).backward()
        rows.append(sums_of(opt)["inner.words"].count)
        opt.step()
    # The first pass finds the use, and recomputes it as it ran: without a tap.
    assert rows == [[6], [12], [12]]


def checkpointed() -> nn.Module:
    """Return a model that uses a parameter of its own in a checkpoint."""

    def use(m: nn.Module, x: Tensor) -> Tensor:
        return under(False, lambda x: m.last(F.linear(x, m.w).tanh()), m.first(x))

    return Body(use, first=nn.Linear(4, 4), w=torch.eye(4) / 2, last=nn.Linear(4, 2))


def test_a_checkpointed_model_trains_in_another_thread():
    """Autograd numbers the nodes of each thread apart: a new thread's numbers are small."""
    net = checkpointed()
    for _ in range(50):
        net(normal(3, 4).float()).sum().backward()
    opt = KFACSGD(net, lr=0.1, factor_update_steps=1)

    def train() -> None:
        for _ in range(3):
            descend(opt, net(normal(3, 4).float()).square().mean())

    ThreadPoolExecutor(1).submit(train).result()
    assert set(opt.preconditioner.coverage().left) <= {"w"}


def test_a_rebuild_between_a_checkpointed_forward_and_its_backward():
    net = checkpointed()
    given = [p for name, p in net.named_parameters() if name != "last.bias"]
    opt = KFACSGD(given, lr=0.1, model=net)
    for step in range(3):
        loss = net(normal(3, 4).float()).square().mean()
        if step == 1:
            opt.add_param_group({"params": [net.last.bias]})
        descend(opt, loss)
    assert opt.preconditioner.layers["last"].size_of("a") == (5, False)


def test_a_layers_own_module_may_call_another_with_its_weight():
    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.applies = Body(lambda m, *args: F.linear(*args))

        def forward(self, x: Tensor) -> Tensor:
            return self.applies(x, self.weight, self.bias)

    register_layer(Own)(OwnKind)
    net, opt = built(nn.Sequential(Own(), nn.Tanh(), nn.Linear(4, 2)).double())
    loss_of(net(X)).backward()
    assert {sums.count[0] for sums in sums_of(opt).values()} == {6}
    opt.step()


# ---------------------------------------------------------------- what is no use

SCALE = normal(3, 3, seed=5)
NO_DATA = {
    "a product of two": (lambda m, x: x @ (m.w + m.b @ m.a).T, {"a": A, "b": A.T}),
    "a sum with noise": (lambda m, x: x @ (m.w + m.a * SCALE), {"a": W}),
    "its own mean": (lambda m, x: x @ (m.w - m.w.mean(1, keepdim=True)), {}),
    "a number": (lambda m, x: x @ (m.w + torch.tensor(0.0)), {}),
    "an embedding that divides by counts": (
        lambda m, x: (
            F.embedding(torch.tensor([0, 1, 1]), m.w, scale_grad_by_freq=True).sum() + x @ W
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", NO_DATA)
def test_a_parameter_that_meets_no_rows_takes_the_bases_step(name):
    forward, more = NO_DATA[name]
    values = {"w": W.clone(), **{n: v.clone().contiguous() for n, v in more.items()}}
    net = headed(Body(forward, **values))
    opt = KFACSGD(net, lr=0.1)
    with pytest.warns(UserWarning, match="0.w: 9, Body uses it in a way that no kind"):
        for _ in range(11):  # four of them gather
            opt.zero_grad()
            loss_of(net(ROWS)).backward()
            gradients = {n: p.grad.clone() for n, p in net[0].named_parameters()}
            steps = taken(opt, net)
            for own, gradient in gradients.items():
                assert_close(steps[f"0.{own}"], 0.1 * gradient, 1e-9, own)
    assert {f"0.{own}" for own in values} <= opt.preconditioner.uncovered.keys()


def test_a_penalty_beside_a_product_counts_as_no_use():
    steps = []
    for penalty in (0.0, 1e-12):
        net = headed(Body(lambda m, x, c=penalty: x @ m.w + c * (m.w @ m.w.T).sum(), w=W.clone()))
        steps.append(stepped(net, ROWS))
    assert_close(steps[1]["0.w"], steps[0]["0.w"], 1e-6)


@pytest.mark.parametrize("again", [False, True], ids=["itself", "a view of it"])
def test_a_view_that_no_grad_made_is_no_use(again):
    """The view has a gradient, but not the weight's: a copy without one takes the same steps."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            other = m.w[:] if m.views else m.w.clone()
        return x @ m.w + x @ (other.T if again else other)

    steps = []
    for views in (False, True):
        body = Body(forward, w=W.clone())
        body.views = views
        steps.append(stepped(headed(body), ROWS)["0.w"])
    assert_close(*steps, 1e-9)


@pytest.mark.parametrize("padding", [0, -1])
def test_a_parameter_looked_up_with_a_padding_is_a_table_with_it(padding):
    weight = normal(7, 3, seed=1)
    table = nn.Embedding.from_pretrained(weight.clone(), freeze=False, padding_idx=padding)
    by_use = Body(lambda m, x: F.embedding(x, m.w, padding_idx=padding), w=weight.clone())
    expected, found = (stepped(headed(body), TOKENS) for body in (table, by_use))
    assert_close(found["0.w"], expected["0.weight"], 1e-9)


def test_a_compiled_pass_runs_uncompiled_only_where_a_use_at_the_root_gathers():
    calls = [0]

    def backend(graph, _):
        def run(*inputs):
            calls[0] += 1
            return graph(*inputs)

        return run

    torch._dynamo.reset()
    net = headed(Body(lambda m, x: F.linear(x, m.w), w=W.clone()))
    opt = KFACSGD(net, lr=0.01, factor_update_steps=5, inv_update_steps=5)
    compiled, ran, gathered = torch.compile(net, backend=backend), [], []
    for _ in range(25):
        calls[0] = 0
        loss_of(compiled(ROWS)).backward()
        ran.append(calls[0])
        gathered.append(any(name == "0.w" and x.a is not None for name, x in sums_of(opt).items()))
        opt.step()
        opt.zero_grad()
    torch._dynamo.reset()
    most = max(ran)
    assert most > 0 and any(gathered[1:]) and not all(gathered)
    # The first pass looks for all uses; later, only a body whose layer gathers is not compiled.
    for count, gathers in zip(ran[1:], gathered[1:], strict=True):
        assert gathers or count == most
