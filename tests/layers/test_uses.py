"""Parameters that no kind claims are covered by their use, as the layers that they stand for."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from types import FrameType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.layers import watch
from kaisa_optim.layers.watch import Place, place_of
from tests.support.training import descend
from tests.support.watch import Body, assert_close, exact, normal, seeded, taken

Forward = Callable[[nn.Module, Tensor], Tensor]


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

# A forward, its parameters, and how they lie in those of nn.Linear(4, 3, bias=False).
PRODUCTS: dict[str, tuple[Forward, Tensor, bool]] = {
    "linear": (lambda m, x: F.linear(x, m.w), W, False),
    "matmul": (lambda m, x: x @ m.w, W.T, True),
    "a transposed view": (lambda m, x: x @ m.w.T, W, False),
    "linear of a transposed view": (lambda m, x: F.linear(x, m.w.t()), W.T, True),
    "addmm": (lambda m, x: torch.addmm(x.new_zeros(3), x, m.w), W.T, True),
    "einsum": (lambda m, x: torch.einsum("bi,oi->bo", x, m.w), W, False),
    "einsum of a list": (lambda m, x: torch.einsum("bi,oi->bo", [x, m.w]), W, False),
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


@pytest.mark.parametrize("name", ["linear", "matmul", "einsum of inputs first"])
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
            descend(opt, loss_of(one(normal(6, 4, seed=i))))
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
    assert_close(g[0], apart)


def test_building_an_optimizer_runs_no_forward():
    """A forward may draw random numbers, and keep tensors for later passes."""
    runs: list[int] = []

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        runs.append(1)
        return x @ m.w

    net = headed(Body(forward, w=normal(4, 3)))
    state = torch.get_rng_state()
    exact(net)
    assert not runs and torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- tables


def test_a_subclass_of_a_table_is_a_table():
    class Scaled(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 3.0

    x = torch.tensor([[1, 2], [2, 6], [0, 1]])
    plain = seeded(lambda: Body(lambda m, x: m.table(x) * 3.0, table=nn.Embedding(7, 3)))
    expected = stepped(headed(plain), x)
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


@pytest.mark.filterwarnings("ignore:the base optimizer updates these")
@pytest.mark.parametrize(
    ("shape", "add"),
    [
        ((2, 3), lambda m, x: x + m.w),
        ((4, 3), lambda m, x: m.w[:2] + x),
        ((1, 4, 3), lambda m, x: x.clone().add_(m.w[:, 2:])),
    ],
    ids=["whole", "first rows", "rows of a stack of one"],
)
def test_a_table_that_is_added_takes_the_bases_step(shape, add):
    net = headed(Body(add, w=normal(*shape, seed=4)))
    table, twin = net[0].w, nn.Parameter(net[0].w.detach().clone())
    opt, base = KFACAdam(net, lr=0.01), torch.optim.Adam([twin], lr=0.01)
    for i in range(3):
        opt.zero_grad()
        loss_of(net(normal(5, 2, 3, seed=i))).backward()
        twin.grad = table.grad.clone()
        opt.step()
        base.step()
        assert torch.equal(table, twin)
    assert opt.preconditioner.coverage().left.keys() == {"0.w"}


@pytest.mark.parametrize("batch", [1, 5])
def test_a_stack_of_one_multiplies_as_its_matrix(batch):
    x, weight = normal(batch, 2, 3), normal(3, 3, seed=4)
    multiply = {(3, 3): lambda m, x: x @ m.w, (1, 3, 3): lambda m, x: x @ m.w}
    multiply[2, 3, 3] = lambda m, x: x @ m.w[1:]
    steps = []
    for shape, forward in multiply.items():
        net = headed(Body(forward, w=weight.expand(shape).clone()))
        steps.append(stepped(net, x)["0.w"].view(-1, 3, 3)[-1])
    for step in steps[1:]:
        assert_close(step, steps[0], 1e-12)


def test_a_stack_of_one_that_scales_entries_takes_the_bases_step():
    net = headed(Body(lambda m, x: x * m.w, w=normal(1, 2, 3, seed=4)))
    opt = exact(net, lr=0.01)
    with pytest.warns(UserWarning, match="0.w: 6, Body uses it in a way"):
        for _ in range(11):  # four of them gather
            opt.zero_grad()
            loss_of(net(normal(5, 2, 3))).backward()
            assert_close(taken(opt, net)["0.w"], 0.01 * net[0].w.grad, 1e-9)


# ---------------------------------------------------------------- tied weights


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


# ---------------------------------------------------------------- scales and shifts


class Scaled(nn.Module):
    """Norms of torch, by hand and without a weight; a scale, a shift, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4))
        self.sides, self.root = nn.LayerNorm((4, 2)), nn.RMSNorm((4, 2))
        self.rectify, self.plain = nn.PReLU(), nn.LayerNorm(8, elementwise_affine=False)
        self.by_hand, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(1, 1, 8))
        self.number = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rectify(self.root(self.sides(self.first(x).flatten(2)[:, :, :2])))
        x = self.plain(x.flatten(1)) * self.by_hand * self.number
        return self.head(x[:, None] + self.shift).mean(1)


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
    net = headed(seeded(lambda: Body(lambda m, x: use(m.inner, x), inner=nn.Linear(4, 3))))
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
            descend(opt, loss_of(net(normal(6, 3))))
            assert len(caught) == (step >= 8)
    assert "0.w: 9, Body uses it in a way" in str(caught[0].message)


def test_passes_that_do_not_gather_run_without_a_mode():
    net = headed(Body(lambda m, x: x @ m.w, w=normal(3, 3)))
    seen = []
    net[0].use = lambda m, x: seen.append(torch._C._len_torch_function_stack()) or x @ m.w
    opt = exact(net, factor_update_steps=3)
    for _ in range(4):
        descend(opt, loss_of(net(normal(6, 3))))
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


ALL = slice(None)
MATRIX = {
    "itself": (lambda w: w, Place(ALL, False, None)),
    "transposed": (lambda w: w.mT, Place(ALL, True, None)),
    "rows": (lambda w: w[2:5], Place(ALL, False, 2)),
    "rows, transposed": (lambda w: w[2:5].mT, Place(ALL, True, 2)),
    "first columns": (lambda w: w[:, :2], None),
    "other columns": (lambda w: w[:, 1:3], None),
    "every second row": (lambda w: w[::2], None),
    "a row alone": (lambda w: w[1], None),
}
STACK = {
    "itself": (lambda w: w, Place(ALL, False, None)),
    "transposed": (lambda w: w.mT, Place(ALL, True, None)),
    "blocks": (lambda w: w[1:3], Place(slice(1, 3), False, None)),
    "one block": (lambda w: w[2].mT, Place(slice(2, 3), True, None)),
    "rows of a block": (lambda w: w[2, 1:4], Place(slice(2, 3), False, 1)),
    "rows of all": (lambda w: w[:, 1:4], None),
    "every second block": (lambda w: w[::2], None),
}


@pytest.mark.parametrize(("view", "place"), MATRIX.values(), ids=MATRIX)
def test_views_of_a_matrix(view, place):
    """Also of a matrix that is itself a part of some storage."""
    for whole in (torch.zeros(6, 4), torch.zeros(9, 4)[3:]):
        assert place_of(view(whole), whole) == place


@pytest.mark.parametrize(("view", "place"), STACK.values(), ids=STACK)
def test_views_of_a_stack(view, place):
    whole = torch.zeros(4, 6, 5)
    assert place_of(view(whole), whole) == place
