"""Parameters that no kind claims are covered by their use, as the layers that they stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kaisa_optim.layers import SCALES
from tests.support.watch import assert_close, exact, normal, seeded, solved, taken

Forward = Callable[[nn.Module, Tensor], Tensor]


class Body(nn.Module):
    """Parameters, and a forward that uses them; then a head."""

    def __init__(self, forward: Forward, **parameters: Tensor) -> None:
        super().__init__()
        self.use = forward
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def headed(body: nn.Module, width: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(body, nn.Tanh(), nn.Linear(width, 2)).double()


def loss_of(out: Tensor) -> Tensor:
    return (out - 0.3).square().sum() / len(out)


def stepped(net: nn.Module, x: Tensor, **options) -> dict[str, Tensor]:
    opt = exact(net, **options)
    loss_of(net(x)).backward()
    steps = taken(opt, net)
    assert opt.preconditioner.coverage().share == 1, opt.preconditioner.uncovered
    return steps


# ---------------------------------------------------------------- products

W = normal(3, 4, seed=1)  # as nn.Linear stores it
B = normal(3, seed=2)

# A forward, its parameters, and how they lie in those of nn.Linear(4, 3, bias=False).
PRODUCTS: dict[str, tuple[Forward, Tensor, bool]] = {
    "linear": (lambda m, x: F.linear(x, m.w), W, False),
    "matmul": (lambda m, x: x @ m.w, W.T, True),
    "a transposed view": (lambda m, x: x @ m.w.T, W, False),
    "linear of a transposed view": (lambda m, x: F.linear(x, m.w.t()), W.T, True),
    "the weight first": (lambda m, x: (m.w @ x.T).T, W, False),
    "the weight first, batched": (lambda m, x: (m.w @ x[:, None].mT).mT[:, 0], W, False),
    "addmm": (lambda m, x: torch.addmm(x.new_zeros(3), x, m.w), W.T, True),
    "einsum": (lambda m, x: torch.einsum("bi,oi->bo", x, m.w), W, False),
    "einsum of inputs first": (lambda m, x: torch.einsum("bi,io->bo", x, m.w), W.T, True),
    "a cast": (lambda m, x: F.linear(x, m.w.to(torch.float32).double()), W.float().double(), False),
    "chunks": (lambda m, x: torch.cat([x @ part.T for part in m.w.split([1, 2])], 1), W, False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_parameter_is_a_linear_layer(name):
    forward, weight, transposed = PRODUCTS[name]
    x = normal(6, 4)
    twin = headed(nn.Linear(4, 3, bias=False))
    twin[0].weight.data = (weight.T if transposed else weight).clone()
    expected = stepped(twin, x)
    found = stepped(headed(Body(forward, w=weight.clone().contiguous())), x)
    step = found["0.w"].T if transposed else found["0.w"]
    rtol = 1e-6 if name == "a cast" else 1e-9
    if name != "chunks":  # outputs that do not meet in G
        assert_close(step, expected["0.weight"], rtol)
    assert_close(found["2.weight"], expected["2.weight"], rtol)
    assert step.norm() > 0 and not torch.equal(step, twin[0].weight.grad)


@pytest.mark.parametrize("name", ["linear", "matmul", "the weight first", "einsum of inputs first"])
@pytest.mark.parametrize(
    "options",
    [
        {"compute_method": "inverse"},
        {"max_factor_size": 3},
        {"statistics_fraction": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_product_takes_a_linear_layers_steps_under_options(name, options):
    forward, weight, transposed = PRODUCTS[name]
    twin = headed(nn.Linear(4, 3, bias=False))
    twin[0].weight.data = (weight.T if transposed else weight).clone()
    net = headed(Body(forward, w=weight.clone().contiguous()))
    opts = [
        exact(one, lr=0.1, factor_update_steps=1, inv_update_steps=2, **options)
        for one in (net, twin)
    ]
    for i in range(4):
        for one, opt in zip((net, twin), opts, strict=True):
            opt.zero_grad()
            loss_of(one(normal(6, 4, seed=i))).backward()
            opt.step()
    assert_close(net[0].w.T if transposed else net[0].w, twin[0].weight, 1e-8)


def test_chunks_of_a_weight_are_the_blocks_of_its_g():
    x = normal(6, 4)
    net = headed(Body(PRODUCTS["chunks"][0], w=W.clone()))
    opt = exact(net)
    out = net[0](x)
    out.retain_grad()
    loss_of(net[1:](out)).backward()
    opt.step()
    a, g = opt.preconditioner.factors("0.w")
    whole = 6 * out.grad.T @ out.grad
    apart = torch.block_diag(whole[:1, :1], whole[1:, 1:])
    assert_close(a[0], x.T @ x / 6)
    assert_close(2 * g[0] / 2, apart)


class Conv1D(nn.Module):
    """A linear layer whose weight is stored the other way round, as GPT-2 has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_product_and_its_bias_are_one_layer(width, reentrant):
    def run(body: nn.Module) -> dict[str, Tensor]:
        net = headed(body, width)
        opt = exact(net)
        assert list(opt.preconditioner.layers) == ["0", "2"]
        x = normal(6, 4).requires_grad_()
        hidden = net[0](x) if reentrant is None else checkpoint(net[0], x, use_reentrant=reentrant)
        loss_of(net[1:](hidden)).backward()
        return taken(opt, net)

    linear, other = seeded(lambda: nn.Linear(4, width)), seeded(lambda: Conv1D(4, width))
    other.weight.data, other.bias.data = (
        linear.weight.data.T.contiguous().clone(),
        linear.bias.data.clone(),
    )
    expected, found = run(linear), run(other)
    assert_close(found["0.weight"].T, expected["0.weight"], 1e-9)
    assert_close(found["0.bias"], expected["0.bias"], 1e-9)


def test_building_an_optimizer_runs_no_forward():
    """A forward may draw random numbers, and keep tensors for later passes."""
    kept: dict[int, Tensor] = {}

    class Keeps(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] not in kept:
                kept[x.shape[-1]] = torch.rand(x.shape[-1], device=x.device).to(x)
            return torch.addmm(self.bias, x * kept[x.shape[-1]], self.weight)

    net = headed(seeded(lambda: Keeps(4, 3)))
    state = torch.get_rng_state()
    opt = exact(net)
    assert not kept and torch.equal(torch.get_rng_state(), state)
    assert list(opt.preconditioner.layers) == ["0", "2"]
    loss_of(net(normal(6, 4))).backward()
    opt.step()
    assert opt.preconditioner.coverage().share == 1


class Stated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(normal(3, 4)), nn.Parameter(normal(3))


class Keywords(Stated):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else x
        return F.linear(x, weight=self.weight, bias=self.bias) if bias is not None else x


class Without(Stated):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight) * self.bias


class BiasTwice(Stated):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.bias


class Twice(Stated):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight).repeat(1, 2)[:, :4], self.weight, self.bias)


class Penalized(Stated):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.weight.square().sum()


@pytest.mark.parametrize(
    ("cls", "layers"),
    [
        (Keywords, ["0", "2"]),
        (Without, ["0", "2"]),
        (BiasTwice, ["0", "2"]),
        (Twice, ["0.weight", "2"]),
        (Penalized, ["0.weight", "2"]),
    ],
)
def test_the_source_tells_which_bias_a_product_adds(cls, layers):
    net = headed(cls())
    opt = exact(net)
    assert list(opt.preconditioner.layers) == layers
    apart = {} if cls is Keywords else {"0.bias": (net[0].bias.numel(), SCALES)}
    assert opt.preconditioner.coverage().left == apart
    loss_of(net(normal(6, 4))).backward()
    opt.step()


def test_a_forward_without_a_source_is_covered_by_shapes():
    space = {"F": F}
    exec("def forward(self, x): return F.linear(x, self.weight, self.bias)", space)
    net = headed(type("Sourceless", (Stated,), {"forward": space["forward"]})())
    opt = exact(net)
    assert list(opt.preconditioner.layers) == ["0.weight", "2"]
    loss_of(net(normal(6, 4))).backward()
    opt.step()
    assert set(opt.preconditioner.coverage().left) == {"0.bias"}


# ---------------------------------------------------------------- experts


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


# ---------------------------------------------------------------- tables


def test_a_subclass_of_a_table_is_a_table():
    class Scaled(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 3.0

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x) * 3.0

    x = torch.tensor([[1, 2], [2, 6], [0, 1]])
    expected = stepped(headed(seeded(Plain)), x)
    assert_close(
        stepped(headed(seeded(lambda: Scaled(7, 3))), x)["0.weight"], expected["0.table.weight"]
    )


@pytest.mark.parametrize(
    "pick", [lambda w, x: w[x], lambda w, x: F.embedding(x, w), lambda w, x: w.index_select(0, x)]
)
def test_rows_of_a_matrix_are_those_of_a_table(pick):
    x, weight = torch.tensor([1, 2, 2, 6]), normal(7, 3)
    twin = headed(nn.Embedding(7, 3))
    twin[0].weight.data = weight.clone()
    expected = stepped(twin, x)
    found = stepped(headed(Body(lambda m, x: pick(m.w, x), w=weight.clone())), x)
    assert_close(found["0.w"], expected["0.weight"], 1e-9)


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_sharing": "reduce"}],
    ids=lambda options: next(iter(options.values()), "plain"),
)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_negative_indices_count_from_the_end_of_a_table(options, kind):
    x, weight = torch.tensor([[1, -1], [-7, 2], [6, -1], [-5, 0]], dtype=kind), normal(7, 3)
    expected, found = (
        stepped(headed(Body(lambda m, x: m.w[x], w=weight.clone())), given, **options)
        for given in (x % 7, x)
    )
    assert found.keys() == expected.keys()
    for name, step in expected.items():
        assert_close(found[name], step, 1e-12)


def test_negative_indices_pick_rows_of_a_matrix_that_multiplies_too():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.w[m.picked] + (x @ m.w.T)[:, :3]

    picked = torch.tensor([-1, 0, -7, 3, -2, 6])
    steps = []
    for indices in (picked % 7, picked):
        net = headed(Body(forward, w=normal(7, 3)))
        net[0].picked = indices
        steps.append(stepped(net, normal(6, 3, seed=1))["0.w"])
    assert_close(*steps, 1e-12)


def test_positions_that_are_added_are_rows_of_a_table():
    x, weight = normal(5, 2, 3), normal(2, 3, seed=4)
    expected = stepped(
        headed(Body(lambda m, x: x + m.w[torch.arange(2).expand(5, 2)], w=weight.clone())), x
    )
    assert_close(
        stepped(headed(Body(lambda m, x: x + m.w, w=weight.clone())), x)["0.w"], expected["0.w"]
    )


def test_a_convolution_with_another_padding_than_its_modules():
    class Padded(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(F.pad(x, (1, 0, 1, 0)), self.weight, self.bias, self.stride, 0)

    x = normal(5, 2, 4, 4)
    net, twin = seeded(lambda: Padded(2, 3, 2, padding=1)), seeded(lambda: nn.Conv2d(2, 3, 2))
    twin.load_state_dict(net.state_dict())
    head = nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(48, 2)).double()
    found = stepped(nn.Sequential(net, copy.deepcopy(head)), x)
    expected = stepped(nn.Sequential(twin, head), F.pad(x, (1, 0, 1, 0)))
    for name in ("0.weight", "0.bias"):
        assert_close(found[name], expected[name], 1e-9)


# ---------------------------------------------------------------- what stays raw


def test_an_unknown_use_is_told_after_the_first_step():
    net = nn.Sequential(headed(Body(lambda m, x: x @ m.w.exp(), w=normal(3, 3))), nn.Linear(2, 30))
    net = nn.Sequential(*net[0], net[1].double())
    opt = exact(net, lr=0.01)
    x = normal(6, 3)
    for _ in range(5):
        opt.zero_grad()
        loss_of(net(x)).backward()
        gradient = net[0].w.grad.clone()
        step = taken(opt, net)["0.w"]
        assert_close(step, 0.01 * gradient, 1e-12)
    report = opt.preconditioner.coverage()
    assert report.left["0.w"].reason == "Body uses it in a way that no kind of layer knows"
    assert report.covered == report.total - 9
    assert not opt.preconditioner.capture.missing  # nobody waits for it


@pytest.mark.parametrize(
    "use",
    [
        lambda inner, x: F.linear(x, inner.weight, inner.bias),
        lambda inner, x: (inner.weight @ x.T + inner.bias[:, None]).T,
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


def test_poor_coverage_is_warned_of_once_calls_have_been_searched():
    net = headed(Body(lambda m, x: x @ m.w.exp(), w=normal(3, 3)))
    opt = exact(net)
    with pytest.warns(UserWarning, match="0.w: 9, Body uses it in a way") as caught:
        for _ in range(8):
            opt.zero_grad()
            loss_of(net(normal(6, 3))).backward()
            opt.step()
    assert len(caught) == 1


def test_passes_that_do_not_gather_run_without_a_mode():
    net = headed(Body(lambda m, x: x @ m.w, w=normal(3, 3)))
    seen = []
    net[0].use = lambda m, x: seen.append(torch._C._len_torch_function_stack()) or x @ m.w
    opt = exact(net, factor_update_steps=3)
    for _ in range(4):
        opt.zero_grad()
        loss_of(net(normal(6, 3))).backward()
        opt.step()
    # All uses are looked for in the first pass. The head gathers in the second step.
    assert seen == [2, 1, 0, 1]


# ---------------------------------------------------------------- tied weights


class Tied(nn.Module):
    """A table that is the head's weight, too."""

    def __init__(self, words: int = 7, width: int = 3, *, bias: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=bias)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x)).tanh())


def tied_rows(net: nn.Module, x: Tensor) -> list[Tensor]:
    """One-hot rows and ∂L/∂s of the table, then inputs and ∂L/∂s of the head."""
    words = net.words(x).detach().requires_grad_()
    hidden = net.body(words).tanh()
    logits = net.head(hidden)
    logits.retain_grad()
    F.cross_entropy(logits.flatten(0, -2), x.roll(1, -1).flatten()).backward()
    one_hot = F.one_hot(x.flatten(), len(net.words.weight)).double()
    pairs = one_hot, words.grad.flatten(0, -2), hidden.detach().flatten(0, -2)
    return [*pairs, logits.grad.flatten(0, -2)]


def tied_step(net: nn.Module, x: Tensor, **options):
    opt = exact(net, loss_terms="positions", **options)
    F.cross_entropy(net(x).flatten(0, -2), x.roll(1, -1).flatten()).backward()
    gradient = net.words.weight.grad.clone()
    return opt, gradient, taken(opt, net)["words.weight"]


def test_a_tied_weight_adds_two_products_up_as_one():
    net = seeded(Tied)
    x = torch.tensor([[0, 3, 3, 1], [6, 1, 0, 2]])
    one_hot, words, hidden, logits = tied_rows(copy.deepcopy(net), x)
    n = x.numel()
    first = one_hot.T @ one_hot / n, n * words.T @ words
    second = (n * logits.T @ logits).diagonal().diag(), hidden.T @ hidden / n
    dense = sum(torch.kron(v, d) for v, d in (first, second))
    opt, gradient, step = tied_step(net, x)
    a, g = opt.preconditioner.factors("words")
    product = torch.kron(a[0].diag(), g[0])
    assert_close(product.trace(), dense.trace())
    # Nearer than either product alone, with its trace made whole.
    best = torch.linalg.norm(product - dense)
    for v, d in (first, second):
        alone = torch.kron(v, d)
        scaled = alone * dense.trace() / alone.trace()
        assert best < torch.linalg.norm(scaled - dense)
    assert best < 0.5 * torch.linalg.norm(dense)
    assert_close(step, solved(g, a[0].diag()[None], gradient[None])[0], 1e-8)


def test_one_use_alone_of_a_tied_weight_is_exact():
    """Frozen inputs: the table's own rows have no gradient, and the head is a linear layer."""
    net, plain = seeded(Tied), seeded(Tied)
    plain.head.weight = nn.Parameter(plain.words.weight.detach().clone())
    x = normal(6, 3)
    steps = []
    for one in (net, plain):
        opt = exact(one, max_factor_size=6)
        with torch.no_grad():
            hidden = one.words(torch.arange(6))
        loss_of(one.head(hidden + x)).backward()
        steps.append(taken(opt, one))
    assert_close(steps[0]["words.weight"], steps[1]["head.weight"], 1e-9)


def test_several_linear_layers_of_one_weight_are_one_with_all_their_rows():
    class Twice(nn.Module):
        def __init__(self, layers: list[nn.Linear]) -> None:
            super().__init__()
            self.first, self.second = layers
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    x, weight, steps = normal(6, 3), normal(3, 3, seed=2), []
    one = nn.Linear(3, 3, bias=False)
    for layers in ([one, nn.Linear(3, 3, bias=False)], [one, one]):
        one.weight = nn.Parameter(weight.clone())
        steps.append(stepped(headed(Twice(layers)), x)["0.first.weight"])
    assert_close(*steps, 1e-9)


def test_blocks_used_in_both_directions_are_as_single_matrices():
    """The last block is multiplied in one direction alone."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        if model.w.dim() == 3:
            y = torch.bmm(x, model.w).tanh()
            return torch.cat([torch.bmm(y[:2], model.w[:2].mT), y[2:]])
        y = (x @ model.w).tanh()
        return y @ model.w.mT if model.both else y

    x, w = normal(3, 5, 4), normal(3, 4, 4, seed=1)
    net = Body(forward, w=w.clone())
    opt = exact(net, loss_terms=5.0)
    net(x).square().sum().backward()
    steps = taken(opt, net)["w"]
    for i in range(3):
        one = Body(forward, w=w[i].clone())
        one.both = i < 2
        alone = exact(one, loss_terms=5.0)
        one(x[i]).square().sum().backward()
        step = taken(alone, one)["w"]
        assert_close(steps[i], step, 1e-9)


def test_the_base_steps_the_bias_beside_a_tied_weight():
    net = seeded(lambda: Tied(bias=True))
    opt, _, _ = tied_step(net, torch.tensor([[0, 3, 3, 1]]))
    assert list(opt.preconditioner.layers) == ["words", "body"]
    assert opt.preconditioner.coverage().left == {"head.bias": (7, SCALES)}


# ---------------------------------------------------------------- scales and shifts


class Scaled(nn.Module):
    """Norms of torch, by hand and without a weight; a scale, a shift, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4))
        self.sides, self.root = nn.LayerNorm((4, 2)), nn.RMSNorm((4, 2))
        self.rectify, self.plain = nn.PReLU(), nn.LayerNorm(8, elementwise_affine=False)
        self.by_hand, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(1, 3, 8))
        self.number = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rectify(self.root(self.sides(self.first(x).flatten(2)[:, :, :2])))
        x = self.plain(x.flatten(1)) * self.by_hand * self.number
        return self.head(x[:, None] + self.shift).mean(1)


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
