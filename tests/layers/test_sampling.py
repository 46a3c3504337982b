"""Statistics of a part of each pass: the rows that are taken, and what their sums stand for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD, Layer, register_layer
from kaisa_optim.capture.passes import top_hooks
from kaisa_optim.layers import LinearLayer
from kaisa_optim.layers.attention import ProjectionLayer
from kaisa_optim.layers.base import GATHER, WHOLE, Part, take_sizes
from tests.capture.test_capture import CHECKPOINTS, under
from tests.layers.cases import loss_of, normal, tokens
from tests.support import reference as ref
from tests.support.cluster import (
    Plan,
    assert_alike,
    batch,
    error,
    network,
    train,
    train_alone,
    values,
)
from tests.support.ranks import RankError, run
from tests.support.training import descend
from tests.support.training import factors as factors_of
from tests.support.watch import PAPERS, Body

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")

Factors = dict[str, tuple[Tensor, Tensor]]

# Statistics of the last step alone, at weights that stay: factors show which rows were taken.
BARE: dict[str, Any] = {
    "lr": 0.0,
    **PAPERS,
    "factor_decay": 1e-30,
    "factor_update_steps": 1,
    "inv_update_steps": 5,  # and none early
}


def each_step(net: nn.Module, x: Tensor, steps: int, **options: Any) -> list[Factors]:
    """The factors of every step."""
    opt = KFACSGD(net, **{**BARE, **options})
    found = []
    for _ in range(steps):
        descend(opt, loss_of(net(x)))
        found.append(factors_of(opt))
    return found


def assert_factors(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other, side in zip(actual, expected, "AG", strict=True):
        ref.assert_close(one, other, what=side)


# ---- which rows ----

TAKEN = [
    # examples, fraction, turn: what is taken
    (8, 0.25, 0, [0, 4]),
    (8, 0.25, 1, [1, 5]),
    (8, 0.25, 7, [3, 7]),
    (7, 0.25, 3, [3]),
    (3, 0.25, 1, [1]),  # never none
    (2, 0.25, 5, [1]),
    (3, 0.25, 3, [0]),  # three examples take turns by threes
    (3, 1e-300, 4, [1]),
    (6, 1 / 3, 2, [2, 5]),
    (6, 0.3, 2, [2, 5]),  # the nearest n-th
    (4, 0.4, 1, [1, 3]),
    (4, 0.9, 1, [1, 3]),  # less than all is a half at most
]


@pytest.mark.parametrize(("examples", "fraction", "turn", "taken"), TAKEN)
def test_which_examples_are_taken(examples, fraction, turn, taken):
    numbers = torch.arange(examples)[:, None].expand(2, examples, 3)
    layer = ProjectionLayer.layers_of("", nn.MultiheadAttention(3, 1))[0]
    part = layer.part(numbers, numbers, (fraction, turn))
    assert part.of(numbers).unique().tolist() == taken
    assert (part.whole, part.taken) == (examples, len(taken))


def test_all_are_taken_where_nothing_can_be_left_out():
    layer = LinearLayer("", nn.Linear(3, 3))
    assert layer.part(torch.zeros(9, 3), torch.zeros(9, 3), (1.0, 3)) is WHOLE
    for rows in (torch.zeros(1, 3), torch.zeros(0, 3)):
        assert layer.part(rows, rows, (0.25, 3)) is WHOLE


@pytest.mark.parametrize(
    ("examples", "positions", "wide", "stride"),
    [
        (100, 81, 3, None),  # too few rows for two parts
        (100, 400, 3, 3),  # a third still has 32 examples
        (100, 200, 3, 2),  # of rows, 2.4 times as many as wanted
        (63, 4000, 3, None),
        (20_000, 1, 3, 2),
        (20_000, 1, 2600, None),  # four rows for each column
    ],
)
def test_enough_rows_are_read_where_no_fraction_is_given(examples, positions, wide, stride):
    layer = LinearLayer("", nn.Linear(wide, 64, bias=False, device="meta"))
    take_sizes(layer)
    layer.covers = True, False
    x, out = (torch.empty(examples, positions, n, device="meta") for n in (wide, 64))
    part = layer.part(x, out, (None, 7))
    assert part == (WHOLE if stride is None else Part(0, 7 % stride, stride, examples, part.taken))
    assert stride is None or part.taken == len(range(7 % stride, examples, stride))


# ---- every layer kind against the dense reference ----


def prepared(layer: nn.Module, frozen: str = "") -> nn.Module:
    torch.manual_seed(2)
    layer = layer.double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p))
    if frozen:
        getattr(layer, frozen).requires_grad_(False)
    return layer


KINDS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: prepared(nn.Linear(4, 3)), normal(6, 4)),
    "linear sequences": (lambda: prepared(nn.Linear(4, 3)), normal(6, 2, 4)),
    "linear few sequences": (lambda: prepared(nn.Linear(4, 3)), normal(2, 6, 4)),
    "linear one sequence of lines": (lambda: prepared(nn.Linear(4, 3)), normal(1, 6, 2, 4)),
    "linear frozen weight": (lambda: prepared(nn.Linear(4, 3), "weight"), normal(6, 4)),
    "linear frozen bias": (lambda: prepared(nn.Linear(4, 3), "bias"), normal(6, 4)),
    "convolution, correlated": (
        lambda: prepared(nn.Conv2d(1, 2, 3, padding=1)),
        normal(6, 1, 5, 4),
    ),
    "convolution, unfolded": (lambda: prepared(nn.Conv2d(2, 2, 2, stride=2)), normal(6, 2, 4, 5)),
    "convolution of few images": (lambda: prepared(nn.Conv1d(2, 3, 2)), normal(2, 2, 6)),
    "convolution of one image": (lambda: prepared(nn.Conv1d(2, 3, 2)), normal(2, 6)),
    "grouped convolution": (lambda: prepared(nn.Conv1d(4, 6, 2, groups=2)), normal(6, 4, 4)),
    "transposed convolution": (
        lambda: prepared(nn.ConvTranspose1d(2, 3, 3, stride=2)),
        normal(6, 2, 3),
    ),
    "embedding": (lambda: prepared(nn.Embedding(5, 3)), tokens(6, high=5)),
    "embedding, padded": (
        lambda: prepared(nn.Embedding(5, 3, padding_idx=2)),
        tokens(6, 3, high=5),
    ),
    "embedding of few sequences": (lambda: prepared(nn.Embedding(5, 3)), tokens(2, 6, high=5)),
}

# In the turns of six and of two, a quarter of them.
OF_SIX = [[0, 4], [1, 5], [2], [3]]
OF_TWO = [[0], [1], [0], [1]]


def chosen(rows: Tensor) -> list[tuple[Tensor, float]]:
    """Of ``[blocks, examples, positions, width]``: each turn's, and what its sum is short of."""
    if rows.shape[1] == 6:
        return [(rows[:, taken], 6 / len(taken)) for taken in OF_SIX]
    if rows.shape[1] == 2:
        return [(rows[:, taken], 2.0) for taken in OF_TWO]
    return [(rows, 1.0)] * 4


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", KINDS)
def test_factors_are_those_of_the_examples_that_are_taken(kind, sharing):
    make, x = KINDS[kind]
    layer = make()
    net = nn.Sequential(layer)
    unbatched = kind.endswith("one image")
    every_a = chosen(ref.input_rows(layer, x))
    every_g = chosen(ref.gradient_rows(layer, loss_of, x))
    terms = 1 if unbatched else len(x)
    diagonal = isinstance(layer, nn.Embedding)
    options = {"weight_sharing": sharing, "loss_terms": float(terms)}
    found = each_step(net, x, 4, statistics_fraction=0.25, **options)
    for step, (a, _), (g, short) in zip(found, every_a, every_g, strict=True):
        expected = ref.factors(a, g, short * terms, sharing, diagonal_a=diagonal)
        assert_factors(step["0"], expected)


def test_moments_count_the_whole_pass():
    net = nn.Sequential(nn.Linear(4, 3)).double()
    opt = KFACSGD(net, lr=0.1, statistics_fraction=0.25)
    net(normal(6, 2, 4)).sum().backward()
    (sums,) = opt.preconditioner.sums.of_layer.values()
    assert sums.count == [12]


def test_wide_sides():
    layer, x = prepared(nn.Linear(4, 3)), normal(6, 4)
    a, g = ref.input_rows(layer, x), ref.gradient_rows(layer, loss_of, x)
    net = nn.Sequential(layer)
    found = each_step(net, x, 2, statistics_fraction=0.25, max_factor_size=2)[1]["0"]
    assert_factors(found, ref.factors(a[:, [1, 5]], g[:, [1, 5]], 6 * 3, "expand", True, True))


class Attend(nn.Module):
    def __init__(self, batch_first: bool, memory: Tensor | None) -> None:
        super().__init__()
        self.attention = prepared(nn.MultiheadAttention(4, 2, batch_first=batch_first))
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        key = x if self.memory is None else self.memory
        first = self.attention.batch_first
        x, key = _laid(first, x, key)
        return _laid(first, self.attention(x, key, key, need_weights=False)[0])[0]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("examples", "cross"), [(6, False), (6, True), (2, False)])
def test_attention(examples, cross, batch_first, sharing):
    x = normal(examples, 6, 4)
    memory = normal(examples, 3, 4, seed=1) if cross else None
    net = Attend(batch_first, memory)
    key = memory if cross else x
    out, _, taps = ref.attention_by_hand(net.attention, *_laid(batch_first, x, key, key))
    rows = ref.tap_rows(taps, loss_of(*_laid(batch_first, out)))
    options = {"weight_sharing": sharing, "loss_terms": float(examples)}
    found = each_step(net, x, 4, statistics_fraction=0.25, **options)
    for label, (a, g) in rows.items():
        every = zip(chosen(a), chosen(g), strict=True)
        for step, ((one_a, _), (one_g, short)) in zip(found, every, strict=True):
            expected = ref.factors(one_a, one_g, short * examples, sharing)
            if label == "out":
                assert_factors(step["attention.out_proj"], expected)
            else:
                i = "qkv".index(label)
                both = step["attention.in_proj"]
                assert_factors(tuple(f[i : i + 1] for f in both), expected)


def _laid(batch_first: bool, *tensors: Tensor) -> list[Tensor]:
    return [t if batch_first else t.transpose(0, 1) for t in tensors]


@pytest.mark.parametrize("kind", ["linear", "convolution, unfolded"])
def test_the_papers_normalization_is_the_covariance_of_the_rows_that_are_taken(kind):
    make, x = KINDS[kind]
    layer = make()
    a, g = ref.input_rows(layer, x), ref.gradient_rows(layer, loss_of, x)
    positions = a.shape[2]
    options = {"normalization": "kaisa", "statistics_fraction": 0.25}
    found = each_step(nn.Sequential(layer), x, 4, **options)
    for step, taken in zip(found, OF_SIX, strict=True):
        rows = len(taken) * positions
        expected = ref.factors(a[:, taken] / positions, g[:, taken] / positions, 1 / rows)
        assert_factors(step["0"], expected)


# ---- a cycle of turns is the whole ----


@pytest.mark.parametrize("name", ["images", "tokens", "transposed"])
def test_the_turns_of_a_cycle_average_to_the_whole(name):
    if name == "transposed":
        layers = nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 2, 2, 2), nn.Flatten(), nn.Linear(128, 3)
        net, x = prepared(nn.Sequential(*layers)), normal(8, 2, 6, 6)
    else:
        net, (x, _) = network(name), batch(name, 0, 8)
    (whole,) = each_step(copy.deepcopy(net), x, 1)
    turns = each_step(net, x, 8, statistics_fraction=0.25)
    for name, factors in whole.items():
        for side, factor in enumerate(factors):
            cycle = torch.stack([turn[name][side] for turn in turns[:4]])
            ref.assert_close(cycle.mean(0), factor, rtol=1e-12, what=name)
            again = torch.stack([turn[name][side] for turn in turns[4:]])
            ref.assert_close(again, cycle, rtol=1e-12, what=name)


def test_a_layer_takes_other_rows_each_time_it_is_its_turn():
    """Were it the step that counts, an even interval would show it the even rows for ever."""
    layer, x = prepared(nn.Linear(4, 3)), normal(6, 4)
    a = ref.input_rows(layer, x)
    options = {"statistics_fraction": 0.5, "factor_update_steps": 2, "staggered": False}
    found = each_step(nn.Sequential(layer), x, 6, **options)
    for step, factors in enumerate(found):
        taken = slice(step // 2 % 2, None, 2)  # what it took in its last turn stays
        ref.assert_close(factors["0"][0], ref.factors(a[:, taken], a, 1.0)[0])


def test_the_fraction_follows_its_schedule():
    layer, x = prepared(nn.Linear(4, 3)), normal(6, 4)
    a, g = ref.input_rows(layer, x), ref.gradient_rows(layer, loss_of, x)
    net = nn.Sequential(layer)
    schedule = {0: 1.0, 1: 0.25, 2: 0.5, 3: 1.0}
    found = each_step(net, x, 4, statistics_fraction=lambda step: schedule.get(step, 1.0))
    rows = [range(6), [1, 5], [0, 2, 4], range(6)]
    for step, taken in zip(found, map(list, rows), strict=True):
        expected = ref.factors(a[:, taken], g[:, taken], 6 * 6 / len(taken))
        assert_factors(step["0"], expected)
    (plain,) = each_step(net, x, 1)
    assert all(map(torch.equal, found[0]["0"], plain["0"]))  # 1 is not 0.9999


def test_the_fraction_may_be_set_between_steps():
    layer, x = prepared(nn.Linear(4, 3)), normal(6, 4)
    a = ref.input_rows(layer, x)
    opt = KFACSGD(net := nn.Sequential(layer), **BARE)
    opt.preconditioner.statistics_fraction = 0.25
    for twin in (opt, copy.deepcopy(opt)):  # which has it from the first, not from construction
        model = net if twin is opt else twin.preconditioner.model
        descend(twin, loss_of(model(x)))
        ref.assert_close(factors_of(twin)["0"][0], ref.factors(a[:, [0, 4]], a, 1.0)[0])


# ---- sums over passes and ranks ----


@pytest.mark.parametrize("sizes", [(8, 4), (6, 5)], ids=["equal shares", "ragged"])
def test_micro_batches_weigh_by_all_their_rows(sizes):
    layer, x = prepared(nn.Linear(4, 3)), normal(sum(sizes), 4)
    parts = x.split(sizes)
    net = nn.Sequential(layer)
    opt = KFACSGD(net, **BARE, statistics_fraction=0.25)
    expected_a, expected_g = torch.zeros(1, 5, 5).double(), torch.zeros(1, 3, 3).double()
    for part in parts:
        loss_of(net(part)).backward()
        a, g = ref.input_rows(layer, part), ref.gradient_rows(layer, loss_of, part)
        short = len(part) / len(range(0, len(part), 4))
        a, g = ref.factors(a[:, ::4], g[:, ::4], sum(sizes) * short)
        expected_a += a * len(part) / sum(sizes)
        expected_g += g
    opt.step()
    assert_factors(factors_of(opt)["0"], (expected_a, expected_g))


@pytest.mark.parametrize("name", ["images", "tokens"])
def test_ranks_take_the_rows_that_one_process_would(name):
    """A rank's first example is a multiple of four in the joined batch."""
    intervals = {"factor_update_steps": 1, "inv_update_steps": 2}
    plan = Plan(
        ((8,), (4, 4)),
        network=name,
        options={"statistics_fraction": 0.25, "damping": 0.1, **PAPERS, **intervals},
        steps=3,
    )
    ranks = run(2, train, plan)
    assert_alike([rank.parameters for rank in ranks])
    alone = train_alone(plan)
    assert error(ranks[0].parameters, alone.parameters) < 1e-9
    whole = Plan(plan.sizes, name, options={**plan.options, "statistics_fraction": 1.0}, steps=3)
    assert error(train_alone(whole).parameters, alone.parameters) > 1e-6


def _set_on_one_rank() -> None:
    model = network("chain")
    opt = KFACSGD(model, lr=0.1, factor_update_steps=1)
    if torch.distributed.get_rank() == 1:
        opt.preconditioner.statistics_fraction = 0.5
    descend(opt, model(normal(4, 7)).square().mean())


def test_ranks_with_different_fractions_are_named():
    with pytest.raises(RankError, match="statistics_fraction"):
        run(2, _set_on_one_rank)


# ---- state ----


def test_a_loaded_run_takes_the_rows_that_it_would_have_taken():
    def build() -> tuple[nn.Module, Any]:
        model = network("chain")
        return model, KFACSGD(
            model, lr=0.05, momentum=0.9, factor_update_steps=2, statistics_fraction=0.25
        )

    def steps(model: nn.Module, opt: Any, numbers: range) -> None:
        for i in numbers:
            descend(opt, loss_of(model(normal(8, 7, seed=i))))

    model, opt = build()
    steps(model, opt, range(5))
    loaded_model, loaded = build()
    loaded_model.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    pickled_model, pickled = pickle.loads(pickle.dumps((model, opt)))
    twins = [(model, opt), (loaded_model, loaded), (pickled_model, pickled)]
    for twin in twins:
        steps(*twin, range(5, 9))
    assert_alike([values(one) for one, _ in twins])


# ---- what is held ----


def checkpointed(layer: nn.Module, way: str) -> nn.Module:
    return Body(lambda m, x: under(CHECKPOINTS[way], m.layer, x), layer=layer)


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_under_autocast_only_the_part_is_copied(way):
    layer = prepared(nn.Linear(4, 3)).float()
    net = checkpointed(layer, way)
    opt = KFACSGD(net, **BARE, statistics_fraction=0.25)
    for layer in opt.preconditioner.layers.values():
        layer.task = GATHER  # a comparison takes the whole input
    x = normal(8, 4).float().requires_grad_()
    held: list[tuple[Any, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tuple(tensor.shape))
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        out = net(x)
    descend(opt, (out.float() * normal(8, 3).float()).sum())
    rows = x.detach()[[0, 4]].bfloat16().double()
    a = torch.cat([rows, torch.ones(2, 1).double()], 1)
    g = (normal(8, 3)[[0, 4]].float()).bfloat16().double()
    found = factors_of(opt)["layer"]
    torch.testing.assert_close(found[0][0].double(), a.mT @ a / 2)
    torch.testing.assert_close(found[1][0].double(), 8 * 4 * g.mT @ g)
    if way == "plain" and top_hooks is not None:  # else it might be a checkpoint
        assert (2, 4) in held


@pytest.mark.parametrize("way", ["plain", "not reentrant"])
def test_a_forward_settles_what_is_taken_of_it(way):
    """A checkpoint must save the same tensors again, though the fraction is another one by then."""
    x = normal(8, 4).float()
    found = []
    for then in (0.25, 0.5):
        net = checkpointed(prepared(nn.Linear(4, 3)).float(), way)
        opt = KFACSGD(net, **BARE, statistics_fraction=0.25)
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).float().square().mean()
        opt.preconditioner.statistics_fraction = then
        descend(opt, loss)
        found.append(factors_of(opt)["layer"])
    assert all(map(torch.equal, *found))


def test_a_kind_whose_input_has_other_dimensions_says_so():
    class Flipped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mT)

    class FlippedLayer(Layer):
        def __init__(self, name: str, module: nn.Module) -> None:
            super().__init__(name, module)
            self.outputs, self.in_shape = module.out_features, (module.in_features,)

        def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
            return x.mT[None, :, None]

        def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
            return grad[None, :, None]

    register_layer(Flipped)(FlippedLayer)
    net = nn.Sequential(Flipped(4, 3)).double()
    opt = KFACSGD(net, lr=0.1, statistics_fraction=0.5)
    with pytest.raises(ValueError, match=r"Invalid example_dim: 0; layer '0' .*or None"):
        net(normal(4, 6))
    opt.preconditioner.statistics_fraction = 1
    assert net(normal(4, 6)).shape == (6, 3)
