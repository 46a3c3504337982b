"""Parameters that no kind claims are covered by their use, as the layers that they stand for."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.layers.watch import Place, place_of
from tests.support.training import descend
from tests.support.watch import Body, assert_close, exact, normal, seeded, solved, taken

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


W = normal(3, 4, seed=1)  # as nn.Linear stores it
TABLE = normal(7, 3)

# A forward, its parameter, and whether that lies the other way round than in a layer of torch.
USES: dict[str, tuple[Forward, Tensor, bool]] = {
    "linear": (lambda m, x: F.linear(x, m.w), W, False),
    "matmul": (lambda m, x: x @ m.w, W.T, True),
    "a transposed view": (lambda m, x: x @ m.w.T, W, False),
    "linear of a transposed view": (lambda m, x: F.linear(x, m.w.t()), W.T, True),
    "addmm": (lambda m, x: torch.addmm(x.new_zeros(3), x, m.w), W.T, True),
    "einsum": (lambda m, x: torch.einsum("bi,oi->bo", x, m.w), W, False),
    "einsum of a list": (lambda m, x: torch.einsum("bi,oi->bo", [x, m.w]), W, False),
    "einsum of inputs first": (lambda m, x: torch.einsum("bi,io->bo", x, m.w), W.T, True),
    "a cast": (lambda m, x: F.linear(x, m.w.to(torch.float32).double()), W.float().double(), False),
    "rows": (lambda m, x: m.w[x], TABLE, False),
    "embedding": (lambda m, x: F.embedding(x, m.w), TABLE, False),
    "index_select": (lambda m, x: m.w.index_select(0, x), TABLE, False),
}
OPTIONS = {}, {"compute_method": "inverse"}, {"max_factor_size": 3}, {"statistics_fraction": 0.5}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", USES)
def test_a_product_with_a_parameter_is_a_linear_layer(name, options):
    """And rows of it are those of a table."""
    forward, weight, turned = USES[name]
    layer = nn.Embedding(7, 3) if weight is TABLE else nn.Linear(4, 3, bias=False)
    layer.weight.data = (weight.T if turned else weight).clone()
    net, twin = headed(Body(forward, w=weight.clone().contiguous())), headed(layer)
    for one in (net, twin):
        opt = exact(one, lr=0.1, factor_update_steps=1, inv_update_steps=2, **options)
        for i in range(4):
            rows = torch.tensor([1, 2, 2, 6]).roll(i)
            descend(opt, loss_of(one(rows if weight is TABLE else normal(6, 4, seed=i))))
        assert opt.preconditioner.coverage().share == 1
    rtol = 1e-6 if name == "a cast" else 1e-8
    assert_close(net[0].w.T if turned else net[0].w, layer.weight, rtol)
    assert_close(net[2].weight, twin[2].weight, rtol)


def test_chunks_of_a_weight_are_the_blocks_of_its_g():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([x @ part.T for part in m.w.split([1, 2])], 1)

    x, net = normal(6, 4), headed(Body(forward, w=W.clone()))
    opt = exact(net)
    out = net[0](x)
    out.retain_grad()
    loss_of(net[1:](out)).backward()
    opt.step()
    a, g = opt.preconditioner.factors("0.w")
    whole = 6 * out.grad.T @ out.grad
    assert_close(a[0], x.T @ x / 6)
    assert_close(g[0], torch.block_diag(whole[:1, :1], whole[1:, 1:]))


ALL = slice(None)
VIEWS: list[tuple[tuple[int, ...], Callable[[Tensor], Tensor], Place | None]] = [
    ((6, 4), lambda w: w, Place(ALL, False, None)),
    ((6, 4), lambda w: w.mT, Place(ALL, True, None)),
    ((6, 4), lambda w: w[2:5], Place(ALL, False, 2)),
    ((6, 4), lambda w: w[2:5].mT, Place(ALL, True, 2)),
    ((6, 4), lambda w: w[:, :2], None),
    ((6, 4), lambda w: w[:, 1:3], None),
    ((6, 4), lambda w: w[::2], None),
    ((6, 4), lambda w: w[1], None),
    ((4, 6, 5), lambda w: w, Place(ALL, False, None)),
    ((4, 6, 5), lambda w: w.mT, Place(ALL, True, None)),
    ((4, 6, 5), lambda w: w[1:3], Place(slice(1, 3), False, None)),
    ((4, 6, 5), lambda w: w[2].mT, Place(slice(2, 3), True, None)),
    ((4, 6, 5), lambda w: w[2, 1:4], Place(slice(2, 3), False, 1)),
    ((4, 6, 5), lambda w: w[:, 1:4], None),
    ((4, 6, 5), lambda w: w[::2], None),
]


@pytest.mark.parametrize("first", [0, 3])  # of a weight that is itself a part of some storage
@pytest.mark.parametrize(("shape", "view", "place"), VIEWS)
def test_a_view_has_its_place(shape, view, place, first):
    whole = torch.zeros(first + shape[0], *shape[1:])[first:]
    assert place_of(view(whole), whole) == place


def test_building_an_optimizer_runs_no_forward():
    """A forward may draw random numbers, and keep tensors for later passes."""
    runs: list[int] = []
    net = headed(Body(lambda m, x: runs.append(1) or x @ m.w, w=normal(4, 3)))
    state = torch.get_rng_state()
    exact(net)
    assert not runs and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_linear_layer_of_gpt2_is_a_linear_layer(width, reentrant):
    """Its weight is stored the other way round."""
    library, steps = pytest.importorskip("transformers.pytorch_utils"), []
    linear, other = seeded(lambda: nn.Linear(4, width)), library.Conv1D(width, 4)
    other.weight.data, other.bias.data = linear.weight.data.T.clone(), linear.bias.data.clone()
    for body in (linear, other):
        net, x = headed(body, width), normal(6, 4).requires_grad_()
        opt = exact(net)
        assert list(opt.preconditioner.layers) == ["0", "2"]
        hidden = net[0](x) if reentrant is None else checkpoint(net[0], x, use_reentrant=reentrant)
        loss_of(net[1:](hidden)).backward()
        steps.append(taken(opt, net))
    assert_close(steps[1]["0.weight"].T, steps[0]["0.weight"], 1e-9)
    assert_close(steps[1]["0.bias"], steps[0]["0.bias"], 1e-9)


class ScaledTable(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3.0


class Padded(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 0, 1, 0)), self.weight, self.bias, self.stride, 0)


SUBCLASSES: dict[str, Any] = {
    "a table": (
        lambda: ScaledTable(7, 3),
        lambda: Body(lambda m, x: m.table(x) * 3.0, table=nn.Embedding(7, 3)),
        torch.tensor([[1, 2], [2, 6], [0, 1]]),
    ),
    "a convolution that pads its input itself": (
        lambda: nn.Sequential(Padded(2, 3, 2), nn.Flatten()),
        lambda: nn.Sequential(nn.ZeroPad2d((1, 0, 1, 0)), nn.Conv2d(2, 3, 2), nn.Flatten()),
        normal(5, 2, 4, 4),
    ),
}


@pytest.mark.parametrize(("make", "make_twin", "x"), SUBCLASSES.values(), ids=list(SUBCLASSES))
def test_a_subclass_is_what_it_computes(make, make_twin, x):
    width = 48 if x.is_floating_point() else 3
    steps = [stepped(headed(seeded(one), width), x) for one in (make, make_twin)]
    for step, wanted in zip(*(one.values() for one in steps), strict=True):
        assert_close(step, wanted, 1e-9)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("multiplies", [False, True])
def test_negative_indices_count_from_the_end_of_a_table(sharing, kind, multiplies):
    """Also of a matrix that multiplies, too."""

    def use(m: nn.Module, x: Tensor) -> Tensor:
        rows = m.w[m.picked]
        return rows + (x @ m.w.T)[..., :3] if multiplies else rows

    picked, steps = torch.tensor([[1, -1], [-7, 2], [6, -1], [-5, 0]], dtype=kind), []
    for indices in (picked % 7, picked):
        net = Body(use, w=TABLE.clone())
        net.picked = indices
        steps.append(stepped(headed(net), normal(4, 2, 3, seed=1), weight_sharing=sharing))
    for step, wanted in zip(*(one.values() for one in steps), strict=True):
        assert_close(step, wanted, 1e-12)


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
    steps = []
    for shape, use in (
        ((3, 3), lambda m, x: x @ m.w),
        ((1, 3, 3), lambda m, x: x @ m.w),
        ((2, 3, 3), lambda m, x: x @ m.w[1:]),
    ):
        net = headed(Body(use, w=normal(3, 3, seed=4).expand(shape).clone()))
        steps.append(stepped(net, normal(batch, 2, 3))["0.w"].view(-1, 3, 3)[-1])
    assert_close(steps[1], steps[0], 1e-12)
    assert_close(steps[2], steps[0], 1e-12)


def in_turn(m: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([x[:2] @ m.w[0], x[2:] @ m.w[1]])


ROUTED = torch.tensor([[0, 2, 5], [1, 3, 4]])  # the rows of each of two experts


def one_by_one(m: nn.Module, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), m.w.shape[1])
    for expert, at in enumerate(ROUTED):
        out = out.index_add(0, at, F.linear(x[at], m.w[expert]))
    return out


def all_at_once(m: nn.Module, x: Tensor) -> Tensor:
    out = torch.bmm(x[ROUTED], m.w.mT).flatten(0, 1)
    return torch.empty_like(out).index_copy(0, ROUTED.flatten(), out)


# A forward, the weight, an input, and each block's rows of inputs and outputs.
STORED = {
    "a matrix": (lambda m, x: x @ m.w, (4, 3), (6, 4), [slice(None)]),
    "experts": (in_turn, (2, 4, 3), (6, 4), [slice(2), slice(2, None)]),
    "experts one by one": (one_by_one, (2, 3, 4), (6, 4), ROUTED),
    "experts all at once": (all_at_once, (2, 3, 4), (6, 4), ROUTED),
    "places": (lambda m, x: x + m.w[PLACES], (4, 3), (6, 4, 3), [slice(None)]),
}
PLACES = torch.arange(4).expand(6, 4)


@pytest.mark.parametrize("name", STORED)
def test_a_is_of_inputs_and_g_of_output_gradients_however_the_weight_is_stored(name):
    forward, shape, of_input, blocks = STORED[name]
    net, x = headed(Body(forward, w=normal(*shape, seed=5))), normal(*of_input)
    opt, outputs = exact(net), []
    net[0].register_forward_hook(lambda module, args, out: outputs.append(out))
    prediction = net(x)
    outputs[0].retain_grad()
    loss_of(prediction).backward()
    gradients, inputs = outputs[0].grad.flatten(0, -2), x
    if name == "places":
        inputs = torch.eye(4, dtype=x.dtype)[PLACES].flatten(0, 1)
    of_weight = net[0].w.grad.view(-1, *shape[-2:]).clone()
    step = taken(opt, net)["0.w"].view_as(of_weight)
    if shape[-1] == 3:  # the inputs' side is the first
        of_weight, step = of_weight.mT, step.mT
    for block, at in enumerate(blocks):
        a = inputs[at].T @ inputs[at] / len(inputs[at])
        g = 6 * gradients[at].T @ gradients[at]
        for factor, wanted in zip(opt.preconditioner.factors("0.w"), (a, g), strict=True):
            assert_close(factor[block], wanted)
        expected = solved(a[None], g[None], of_weight[block][None])[0]
        assert_close(step[block], expected, 1e-8)


def test_an_expert_without_rows_keeps_its_averages_and_begins_with_those_of_the_others():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([x[:2] @ m.w[used[0]].T, x[2:] @ m.w[used[1]].T])

    net = headed(Body(forward, w=normal(3, 3, 4, seed=5)))
    opt = exact(net, factor_update_steps=1, factor_decay=0.5)
    factors = []
    for used in ((0, 1), (0, 2), (1, 2)):
        descend(opt, loss_of(net(normal(6, 4, seed=used[1]))))
        factors.append([side.clone() for side in opt.preconditioner.factors("0.w")])
    for first, second, third in zip(*factors, strict=True):
        assert_close(first[2], first[:2].mean(0))
        assert_close(second[1], first[1])
        assert_close(third[0], second[0])
        for before, after, expert in ((first, second, 2), (second, third, 1)):
            assert not torch.allclose(before[expert], after[expert])


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
        opt = KFACSGD(net, lr=0.0, factor_update_steps=1, inv_update_steps=1, factor_decay=0.5)
        for i, x in enumerate(inputs):
            descend(opt, base**i * loss_of(net(x)))
        averages.append(opt.preconditioner.factors("0.w" if name in STORED else "0"))
    for average, wanted in zip(*averages, strict=True):
        assert_close(average, wanted, 1e-9)


def test_groups_of_rows_are_those_of_the_experts():
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch multiplies no groups")
    x, weight, factors = normal(8, 4).float(), normal(3, 4, 4, seed=5).float(), []
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    for forward in (
        lambda m, x: torch._grouped_mm(x, m.w.mT, offs=ends),
        lambda m, x: torch.cat([x[:3] @ m.w[0].T, x[3:] @ m.w[2].T]),
    ):
        net = headed(Body(forward, w=weight.clone()), 4).float()
        opt = exact(net)
        descend(opt, loss_of(net(x)))
        factors.append(opt.preconditioner.factors("0.w"))
    for found, wanted in zip(*factors, strict=True):
        assert_close(found, wanted, 1e-4)


def test_blocks_used_in_both_directions_are_as_single_matrices():
    """The last block is multiplied in one direction alone."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        if model.w.dim() == 3:
            y = torch.bmm(x, model.w).tanh()
            return torch.cat([torch.bmm(y[:2], model.w[:2].mT), y[2:]])
        y = (x @ model.w).tanh()
        return y @ model.w.mT if model.both else y

    def step(w: Tensor, x: Tensor, both: bool = True) -> Tensor:
        net = Body(forward, w=w.clone())
        net.both = both
        opt = exact(net, loss_terms=5.0)
        net(x).square().sum().backward()
        return taken(opt, net)["w"]

    x, w = normal(3, 5, 4), normal(3, 4, 4, seed=1)
    steps = step(w, x)
    for i in range(3):
        assert_close(steps[i], step(w[i], x[i], both=i < 2), 1e-9)


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


@pytest.mark.parametrize("normalization", ["fisher", "kaisa"])
def test_the_base_steps_what_scales_or_shifts_entries(normalization):
    """Under a rate of 1, with the loss's raw gradient, and without a warning."""
    net = seeded(Scaled)
    opt = exact(net, normalization=normalization)
    assert list(opt.preconditioner.layers) == ["first.0", "head"]
    loss_of(net(normal(5, 2, 4, 3))).backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    steps = taken(opt, net)
    report = opt.preconditioner.coverage()
    names = {name for name in steps if not name.startswith(("first.0", "head"))}
    reasons = {name: one.reason for name, one in report.left.items()}
    text = "only scales or shifts: the base optimizer steps it"
    assert reasons == dict.fromkeys(names, text)
    for name in names:
        assert_close(steps[name], gradients[name])


def assert_raw(net: nn.Module, opt: KFACSGD, name: str, x: Tensor) -> None:
    """Eleven steps, four of which gather, are the gradients times the rate of 0.01."""
    for _ in range(11):
        opt.zero_grad()
        loss_of(net(x)).backward()
        gradient = net.get_parameter(name).grad.clone()
        assert_close(taken(opt, net)[name], 0.01 * gradient, 1e-12)


def test_an_unknown_use_is_told_after_the_first_step():
    body = headed(Body(lambda m, x: x @ m.w.exp(), w=normal(3, 3)))
    net = nn.Sequential(*body, nn.Linear(2, 30).double())
    opt = exact(net, lr=0.01)
    assert_raw(net, opt, "0.w", normal(6, 3))
    report = opt.preconditioner.coverage()
    assert report.left["0.w"].reason == "Body uses it in a way that no kind of layer knows"
    assert report.covered == report.total - 9
    assert not opt.preconditioner.registry.missing


def test_a_stack_of_one_that_scales_entries_takes_the_bases_step():
    net = headed(Body(lambda m, x: x * m.w, w=normal(1, 2, 3, seed=4)))
    with pytest.warns(UserWarning, match="0.w: 6, Body uses it in a way"):
        assert_raw(net, exact(net, lr=0.01), "0.w", normal(5, 2, 3))


def test_a_model_without_any_known_use_trains_with_raw_gradients():
    """As adapters do that compute all of their weights."""
    net = Body(lambda m, x: x @ m.w.exp(), w=normal(3, 3))
    opt = exact(net, lr=0.01, factor_update_steps=2)
    with pytest.warns(UserWarning, match="w: 9, Body uses it in a way") as caught:
        assert_raw(net, opt, "w", normal(6, 3))
    assert len(caught) == 1 and opt.preconditioner.coverage().covered == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda inner, x: F.linear(x, inner.weight, inner.bias),
        lambda inner, x: x @ inner.weight.T + inner.bias,
    ],
)
def test_a_weight_used_outside_of_its_module_is_found_around_it(use):
    net = headed(seeded(lambda: Body(lambda m, x: use(m.inner, x), inner=nn.Linear(4, 3))))
    plain, factors = headed(seeded(lambda: nn.Sequential(nn.Linear(4, 3)))), []
    for name, one in (("0.inner", net), ("0.0", plain)):
        opt = exact(one, lr=0.0, factor_update_steps=1, inv_update_steps=1)
        for _ in range(2):  # the first step searches alone
            descend(opt, loss_of(one(normal(6, 4))))
        factors.append(opt.preconditioner.factors(name))
        assert opt.preconditioner.coverage().share == 1
    for factor, wanted in zip(*factors, strict=True):
        assert_close(factor, wanted, 1e-9)


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
            calls += event == "call" and frame.f_globals["__name__"].startswith("kaisa_optim")

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
