"""Statistics of a part of each pass: the rows that are taken, and what their sums stand for."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kaisa_optim import KFACSGD, Layer, register_layer
from tests.layers.test_layers import (
    ATTENTION,
    CASES,
    WIDEST,
    assert_factors,
    attends,
    attention_factors,
    attention_rows,
    build,
    factors_of,
    loss_of,
    rows_of,
    wrapped,
)
from tests.support import reference as ref
from tests.support.cluster import Plan, assert_alike, batch, error, network, train, train_alone
from tests.support.ranks import RankError, run
from tests.support.training import descend, values
from tests.support.training import factors as all_factors
from tests.support.watch import PAPERS, Body, normal

pytestmark = [
    pytest.mark.filterwarnings("ignore:the base optimizer updates these"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
]

# Statistics of the last step alone, at weights that stay: factors show which rows were taken.
BARE: dict[str, Any] = {
    "lr": 0.0,
    **PAPERS,
    "factor_decay": 1e-30,
    "factor_update_steps": 1,
    "inv_update_steps": 5,  # and none early
}


def each_step(net: nn.Module, x: Tensor, steps: int, call: Any = None, **options: Any) -> list[Any]:
    """The factors of every step."""
    opt = KFACSGD(net, **{**BARE, **options})
    factors = []
    for _ in range(steps):
        descend(opt, loss_of(net(x, **(call or {}))))
        factors.append(all_factors(opt))
    return factors


def a_linear_layer(examples: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A model, its input, and the rows of both sides."""
    case = CASES["linear"]._replace(given=normal(examples, 4))
    net = build(case)
    return net, case.x, *rows_of(net, case)


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
    (4, 1.0, 3, [0, 1, 2, 3]),
    (1, 0.25, 3, [0]),
]


@pytest.mark.parametrize(("examples", "fraction", "turn", "taken"), TAKEN)
def test_which_examples_are_taken(examples, fraction, turn, taken):
    net, x, a, g = a_linear_layer(examples)
    factors = each_step(net, x, turn + 1, statistics_fraction=fraction)[turn]["layer"]
    terms = examples * examples / len(taken)
    assert_factors(factors, ref.factors(a[:, taken], g[:, taken], terms))


@pytest.mark.parametrize(
    ("examples", "positions", "wide", "stride"),
    [
        (100, 81, 3, 1),  # too few rows for two parts
        (100, 400, 3, 3),  # a third still has 32 examples
        (100, 200, 3, 2),  # of rows, 2.4 times as many as wanted
        (63, 4000, 3, 1),
        (20_000, 1, 3, 2),
        (20_000, 1, 2600, 1),  # four rows for each column
    ],
)
def test_enough_rows_are_read_where_no_fraction_is_given(examples, positions, wide, stride):
    opt = KFACSGD(nn.Sequential(nn.Linear(wide, 64, bias=False)), lr=0.1)
    x, out = (torch.empty(examples, positions, n, device="meta") for n in (wide, 64))
    part = opt.preconditioner.layers["0"].part(x, out, (None, 7))
    assert part.of(x).shape[0] == len(range(7 % stride, examples, stride))


def quarter(examples: int, turn: int) -> list[int]:
    return [*range(turn % min(4, examples), examples, 4)]


@pytest.mark.parametrize(
    ("sharing", "widest"), [("expand", WIDEST), ("reduce", WIDEST), ("expand", 2)]
)
@pytest.mark.parametrize("name", CASES)
def test_factors_are_those_of_the_examples_that_are_taken(name, sharing, widest):
    case = CASES[name]
    net = build(case)
    a, g = rows_of(net, case)
    options = {"weight_sharing": sharing, "max_factor_size": widest}
    steps = each_step(net, case.x, 4, case.call, statistics_fraction=0.25, **options)
    for turn, factors in enumerate(steps):
        taken = quarter(a.shape[1], turn)
        terms = case.terms * a.shape[1] / len(taken)
        expected = factors_of(net.layer, a[:, taken], g[:, taken], terms, sharing, widest)
        assert_factors(factors["layer"], expected)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, sharing):
    case = ATTENTION[name]
    mha, inputs, call = attends(case)
    rows, examples = attention_rows(mha, inputs, call), 2 if case.batched else 1
    net = wrapped(mha)
    options = {"weight_sharing": sharing, "statistics_fraction": 0.25}
    opt = KFACSGD(net, **BARE, **options, loss_terms=float(examples))
    for turn in range(4):
        descend(opt, loss_of(net(*inputs, **call, need_weights=False)[0]))
        taken = quarter(examples, turn)
        for label, factors in attention_factors(opt).items():
            a, g = (side[:, taken] for side in rows[label])
            assert_factors(factors, ref.factors(a, g, examples * examples / len(taken), sharing))


@pytest.mark.parametrize(("name", "shape"), [("linear", (6, 4)), ("conv2", (6, 2, 4, 5))])
def test_the_papers_normalization_is_the_covariance_of_the_rows_that_are_taken(name, shape):
    case = CASES[name]._replace(given=shape)
    net = build(case)
    a, g = rows_of(net, case)
    positions = a.shape[2]
    options = {"normalization": "kaisa", "statistics_fraction": 0.25}
    for turn, factors in enumerate(each_step(net, case.x, 4, **options)):
        taken = quarter(a.shape[1], turn)
        of_taken = [side[:, taken] / positions for side in (a, g)]
        assert_factors(factors["layer"], ref.factors(*of_taken, 1 / (len(taken) * positions)))


@pytest.mark.parametrize("name", ["images", "tokens"])
def test_the_turns_of_a_cycle_average_to_the_whole(name):
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
    net, x, a, _ = a_linear_layer(6)
    options = {"statistics_fraction": 0.5, "factor_update_steps": 2, "staggered": False}
    for step, factors in enumerate(each_step(net, x, 6, **options)):
        taken = slice(step // 2 % 2, None, 2)  # what it took in its last turn stays
        ref.assert_close(factors["layer"][0], ref.factors(a[:, taken], a, 1.0)[0])


def test_the_fraction_follows_its_schedule():
    net, x, a, g = a_linear_layer(6)
    schedule = {0: 1.0, 1: 0.25, 2: 0.5, 3: 1.0}
    steps = each_step(net, x, 4, statistics_fraction=lambda step: schedule.get(step, 1.0))
    for step, taken in zip(steps, ([*range(6)], [1, 5], [0, 2, 4], [*range(6)]), strict=True):
        expected = ref.factors(a[:, taken], g[:, taken], 6 * 6 / len(taken))
        assert_factors(step["layer"], expected)
    (plain,) = each_step(net, x, 1)
    assert all(map(torch.equal, steps[0]["layer"], plain["layer"]))  # 1 is not 0.9999


def test_the_fraction_may_be_set_between_steps():
    net, x, a, _ = a_linear_layer(6)
    opt = KFACSGD(net, **BARE)
    opt.preconditioner.statistics_fraction = 0.25
    for twin in (opt, copy.deepcopy(opt)):  # which has it from the first, not from construction
        model = net if twin is opt else twin.preconditioner.model
        descend(twin, loss_of(model(x)))
        factor = twin.preconditioner.factors("layer")[0]
        ref.assert_close(factor, ref.factors(a[:, [0, 4]], a, 1.0)[0])


@pytest.mark.parametrize("sizes", [(8, 4), (6, 5)], ids=["equal shares", "ragged"])
def test_micro_batches_weigh_by_all_their_rows(sizes):
    case = CASES["linear"]
    net = build(case)
    opt = KFACSGD(net, **BARE, statistics_fraction=0.25)
    expected_a, expected_g = torch.zeros(1, 5, 5).double(), torch.zeros(1, 3, 3).double()
    for part in normal(sum(sizes), 4).split(sizes):
        loss_of(net(part)).backward()
        short = len(part) / len(range(0, len(part), 4))
        a, g = (rows[:, ::4] for rows in rows_of(net, case._replace(given=part)))
        a, g = ref.factors(a, g, sum(sizes) * short)
        expected_a += a * len(part) / sum(sizes)
        expected_g += g
    opt.step()
    assert_factors(opt.preconditioner.factors("layer"), (expected_a, expected_g))


@pytest.mark.parametrize("name", ["images", "tokens"])
def test_ranks_take_the_rows_that_one_process_would(name):
    """A rank's first example is a multiple of four in the joined batch."""
    intervals = {"factor_update_steps": 1, "inv_update_steps": 2}
    options = {"statistics_fraction": 0.25, "damping": 0.1, **PAPERS, **intervals}
    plan = Plan(((8,), (4, 4)), name, options=options, steps=3)
    ranks = run(2, train, plan)
    assert_alike([rank.parameters for rank in ranks])
    alone = train_alone(plan)
    assert error(ranks[0].parameters, alone.parameters) < 1e-9
    whole = Plan(plan.sizes, name, options={**options, "statistics_fraction": 1.0}, steps=3)
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


def test_a_loaded_run_takes_the_rows_that_it_would_have_taken():
    def made() -> tuple[nn.Module, Any]:
        model, options = network("chain"), {"momentum": 0.9, "factor_update_steps": 2}
        return model, KFACSGD(model, lr=0.05, statistics_fraction=0.25, **options)

    def steps(model: nn.Module, opt: Any, numbers: range) -> None:
        for i in numbers:
            descend(opt, loss_of(model(normal(8, 7, seed=i))))

    model, opt = made()
    steps(model, opt, range(5))
    loaded_model, loaded = made()
    loaded_model.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    pickled_model, pickled = pickle.loads(pickle.dumps((model, opt)))
    twins = [(model, opt), (loaded_model, loaded), (pickled_model, pickled)]
    for twin in twins:
        steps(*twin, range(5, 9))
    assert_alike([values(one) for one, _ in twins])


CHECKPOINTS = {"plain": None, "reentrant": True, "not reentrant": False}


def checkpointed(way: str) -> nn.Module:
    def use(m: nn.Module, x: Tensor) -> Tensor:
        reentrant = CHECKPOINTS[way]
        return m.layer(x) if reentrant is None else checkpoint(m.layer, x, use_reentrant=reentrant)

    torch.manual_seed(2)
    return Body(use, layer=nn.Linear(4, 3))


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_under_autocast_only_the_part_is_copied(way):
    net, x, grad = checkpointed(way), normal(8, 4).float().requires_grad_(), normal(8, 3)
    opt = KFACSGD(net, **BARE, statistics_fraction=0.25)
    held: list[tuple[Any, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tuple(tensor.shape))
        return tensor

    for _ in range(2):  # the first step compares rows, which takes the whole input
        held.clear()
        with (
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            out = net(x)
        descend(opt, (out.float() * grad.float()).sum())
    rows = x.detach()[[1, 5]].bfloat16().double()
    a = torch.cat([rows, torch.ones(2, 1).double()], 1)
    g = grad[[1, 5]].bfloat16().double()
    factors = [side[0].double() for side in opt.preconditioner.factors("layer")]
    torch.testing.assert_close(factors, [a.mT @ a / 2, 8 * 4 * g.mT @ g])
    # Without this function of torch 2.7, any hook might be that of a checkpoint.
    if way == "plain" and hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        assert (2, 4) in held


@pytest.mark.parametrize("way", ["plain", "not reentrant"])
def test_a_forward_settles_what_is_taken_of_it(way):
    """A checkpoint must save the same tensors again, though the fraction is another one by then."""
    factors = []
    for then in (0.25, 0.5):
        net = checkpointed(way)
        opt = KFACSGD(net, **BARE, statistics_fraction=0.25)
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(normal(8, 4).float()).float().square().mean()
        opt.preconditioner.statistics_fraction = then
        descend(opt, loss)
        factors.append(opt.preconditioner.factors("layer"))
    assert all(map(torch.equal, *factors))


def test_a_kind_whose_input_has_other_dimensions_says_so():
    class Flipped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mT)

    @register_layer(Flipped)
    class FlippedLayer(Layer):
        def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
            return x.mT[None, :, None]

        def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
            return grad[None, :, None]

    net = nn.Sequential(Flipped(4, 3)).double()
    opt = KFACSGD(net, lr=0.1, statistics_fraction=0.5)
    with pytest.raises(ValueError, match=r"Invalid example_dim: 0; layer '0' .*or None"):
        net(normal(4, 6))
    opt.preconditioner.statistics_fraction = 1
    assert net(normal(4, 6)).shape == (6, 3)
