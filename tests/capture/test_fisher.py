"""G from drawn labels: its mean against torch's own Hessians, each draw against training that feeds
its gradient, and training that is left as it was."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kaisa_optim import KFACSGD
from kaisa_optim.capture import fisher
from kaisa_optim.layers.kinds import LinearLayer
from tests.capture.test_capture import under
from tests.curvature.test_exactness import seeded
from tests.support import reference as ref
from tests.support.cluster import batch, kept, network
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import assert_same, descend
from tests.support.watch import PAPERS, Body

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")

EVERY_STEP: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 1}

LOSSES: dict[str, Callable[..., Tensor]] = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss}
COPIES = 8_000  # of a batch, each with a draw of its own


def optimizer(model: nn.Module, **options: Any) -> Any:
    return KFACSGD(model, **{"lr": 0.1, **PAPERS, **options})


def built(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    return model, optimizer(model, **options)


def target(kind: str, outputs: Tensor) -> Tensor:
    """Labels that fit; curvature does not depend on them."""
    if kind == "cross_entropy":
        return outputs.detach().argmax(1)
    return (outputs.detach() > 0).to(outputs.dtype)


def after(model: nn.Module, kind: str, x: Tensor, dim: int | None = None, **options: Any) -> Any:
    """An optimizer after one step with drawn gradients, which left the weights as they were."""
    opt = optimizer(model, lr=0.0, **options)
    outputs = model(x)
    opt.preconditioner.sample_fisher(outputs, kind, dim=dim)
    descend(opt, outputs.square().mean())
    return opt


def drawn(opt: Any, outputs: Tensor, kind: str = "mse") -> Tensor:
    """The one gradient that a call draws."""
    seen = []
    handle = outputs.register_hook(seen.append)
    opt.preconditioner.sample_fisher(outputs, kind)
    handle.remove()
    (gradient,) = seen
    return gradient


def assert_mean(factor: Tensor, expected: Tensor, draws: int) -> None:
    # One draw's entries deviate by no more than about their largest mean; five deviations.
    ref.assert_close(factor, expected, rtol=5 * 1.5 / math.sqrt(draws))


def hessian(loss: Callable[[Tensor], Tensor], outputs: Tensor) -> Tensor:
    """Of a loss by its outputs, ``[numbers, numbers]``, by differentiating twice."""
    flat = torch.autograd.functional.hessian(
        lambda f: loss(f.view(outputs.shape)), outputs.detach().flatten()
    )
    assert isinstance(flat, Tensor)
    return flat


def own_blocks(matrix: Tensor, outputs: Tensor, dim: int) -> Tensor:
    """Σ over examples and positions of the block of each, ``[width, width]``."""
    order = torch.arange(outputs.numel()).view(outputs.shape).movedim(dim, -1)
    return sum(matrix[rows][:, rows] for rows in order.flatten(0, -2))


# ---------------------------------------------------------------- scale: the loss's own Hessian


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("positions", [1, 4])
@pytest.mark.parametrize("terms", ["examples", "positions", "number"])
def test_the_scale_is_that_of_torchs_loss(kind, reduction, positions, terms):
    """Whatever K counts, since the draws know over how many losses torch takes the mean."""
    model = seeded(nn.Sequential(nn.Conv1d(2, 3, 1)), 1)
    x = torch.randn(5, 2, positions, dtype=torch.float64)
    number = 5.0 * positions * COPIES
    options = {"loss_reduction": reduction, "loss_terms": number if terms == "number" else terms}
    opt = after(model, kind, x.repeat(COPIES, 1, 1), dim=1, **options)
    outputs = model(x).detach()
    y = target(kind, outputs)
    matrix = hessian(lambda f: LOSSES[kind](f, y, reduction=reduction), outputs)
    a, g = opt.preconditioner.factors("0")
    copies = COPIES if reduction == "sum" else 1
    assert_mean(g[0], copies * own_blocks(matrix, outputs, 1), 5 * COPIES)
    ones = torch.ones(5, 1, positions, dtype=torch.float64)
    rows = torch.cat([x, ones], 1).movedim(1, -1).flatten(0, 1)
    ref.assert_close(a[0], rows.mT @ rows / len(rows), what="A")


@pytest.mark.parametrize("layout", ["classes second", "classes last", "flat", "masked"])
@pytest.mark.parametrize("terms", ["examples", "positions", "number"])
def test_classes_may_lie_in_any_dimension_and_padding_is_left_out(layout, terms):
    lengths = torch.tensor([4, 1, 3] if layout == "masked" else [4, 4, 4])
    valid = torch.arange(4) < lengths[:, None]
    model = seeded(nn.Sequential(nn.Linear(2, 3)), 2)
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    outputs = model(x).detach()
    y = outputs.argmax(-1).where(valid, -100)
    whole = hessian(lambda f: F.cross_entropy(f.movedim(-1, 1), y), outputs)
    number = float(valid.sum()) * COPIES
    opt = optimizer(model, loss_terms=number if terms == "number" else terms)
    many = model(x.repeat(COPIES, 1, 1))
    logits, dim = {
        "classes second": (many.movedim(-1, 1), None),
        "classes last": (many, -1),
        "flat": (many.flatten(0, 1), None),
        "masked": (many[valid.repeat(COPIES, 1)], None),
    }[layout]
    opt.preconditioner.sample_fisher(logits, "cross_entropy", dim=dim)
    descend(opt, many.square().mean())
    g = opt.preconditioner.factors("0")[1][0]
    assert_mean(g, own_blocks(whole, outputs, -1), 8 * COPIES)


def test_outputs_of_one_dimension_are_one_number_an_example():
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    x = torch.randn(6, 3, dtype=torch.float64)
    opt = after(seeded(model, 4), "mse", x.repeat(COPIES, 1))
    assert_mean(opt.preconditioner.factors("0")[1][0, 0, 0], torch.tensor(2.0), 6 * COPIES)


@pytest.mark.parametrize("name", ["images", "tokens"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_layers_of_all_kinds_equal_a_loss_with_the_drawn_gradient(name, sharing):
    x, _ = batch(name, 0, 5)
    model, other = network(name), network(name)
    opt, fed = (optimizer(net, weight_sharing=sharing) for net in (model, other))
    outputs = model(x)
    gradient = drawn(opt, outputs, "cross_entropy")
    outputs.square().mean().backward()
    opt.step()
    descend(fed, (other(x) * gradient).sum() / 5)
    expected = kept(fed)
    for (layer, side), factor in kept(opt).items():
        ref.assert_close(factor, expected[layer, side], what=f"{layer}: {side}")


# ---------------------------------------------------------------- draws


def test_draws_follow_from_step_and_call_and_from_nothing_else():
    x = torch.randn(8, 2, dtype=torch.float64)
    start = seeded(nn.Sequential(nn.Linear(2, 3)), 7)

    def draws() -> list[Tensor]:
        model, opt = built(copy.deepcopy(start), **EVERY_STEP)
        found = []
        for _ in range(2):
            for _ in range(2):
                outputs = model(x)
                found.append(drawn(opt, outputs))
                outputs.square().mean().backward()
            opt.step()
        return found

    state = torch.get_rng_state()
    first = draws()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert_same(draws(), first)
    for one, other in itertools.combinations(first, 2):
        assert (one != other).all()


def test_a_checkpoint_goes_on_with_the_same_draws():
    def go(model: nn.Module, opt: Any, steps: range) -> None:
        for i in steps:
            x, y = batch("chain", i, 6)
            opt.zero_grad()
            outputs = model(x)
            opt.preconditioner.sample_fisher(outputs, "cross_entropy")
            F.cross_entropy(outputs, y).backward()
            opt.step()

    model, opt = built(network("chain"), **EVERY_STEP)
    go(model, opt, range(2))
    other = copy.deepcopy(model)
    resumed = optimizer(other, **EVERY_STEP)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    go(model, opt, range(2, 4))
    go(other, resumed, range(2, 4))
    assert_same(other, model)


# ---------------------------------------------------------------- training stays what it was


def gradients(model: nn.Module, sampled: bool, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    opt = optimizer(model, **options)
    for i in range(2):
        x, y = batch("tokens", i, 4)
        outputs = model(x)
        if sampled:
            opt.preconditioner.sample_fisher(outputs, "cross_entropy")
        F.cross_entropy(outputs, y).backward()
    return opt, ref.gradients_of(model)


def test_gradients_and_input_factors_are_untouched():
    """Bit for bit; and the rows of A are counted once, however often they were passed."""
    (opt, with_draws), (plain, without) = (gradients(network("tokens"), x) for x in (True, False))
    assert_same(with_draws, without)
    opt.step()
    plain.step()
    expected = kept(plain)
    for (layer, side), factor in kept(opt).items():
        if side == "a":
            assert torch.equal(factor, expected[layer, side]), layer
    changed = kept(opt)["head", "g"]
    assert (changed - expected["head", "g"]).norm() > 0.1 * changed.norm()


def test_only_steps_that_gather_have_another_pass():
    """In others nothing is drawn, either; no step waits for a frozen layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model[3].requires_grad_(False)
    opt = optimizer(model, factor_update_steps=3, staggered=False)
    passes: list[int] = []
    draws: list[int] = []
    for i in range(5):
        hidden = model[:2](torch.randn(4, 2, dtype=torch.float64))
        hidden.register_hook(lambda _, i=i: passes.append(i))
        outputs = model[2:](hidden)
        handle = outputs.register_hook(lambda _, i=i: draws.append(i))
        opt.preconditioner.sample_fisher(outputs, "mse")
        handle.remove()
        outputs.square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert passes == [0, 0, 1, 2, 3, 3, 4] and draws == [0, 3]


def test_inputs_are_worked_on_once(monkeypatch):
    """And only those of layers whose turn it is."""
    made = []
    real = LinearLayer.input_moment

    def counted(layer: LinearLayer, *args: Any, **kwargs: Any) -> Tensor:
        made.append(layer.name)
        return real(layer, *args, **kwargs)

    monkeypatch.setattr(LinearLayer, "input_moment", counted)
    model = seeded(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), 13)
    opt = optimizer(model, factor_update_steps=3)
    for _ in range(4):
        opt.zero_grad()
        outputs = model(torch.randn(4, 3, dtype=torch.float64))
        opt.preconditioner.sample_fisher(outputs, "mse")
        outputs.square().mean().backward()
        opt.step()
    assert sorted(made[:3]) == sorted(made[3:]) == ["0", "1", "2"]


def test_a_loss_scale_is_not_in_the_draws():
    def factors(scale: float) -> dict[Any, Tensor]:
        model, opt = built(network("chain"), grad_scaler=scale)
        x, y = batch("chain", 0, 4)
        outputs = model(x)
        opt.preconditioner.sample_fisher(outputs, "cross_entropy")
        descend(opt, F.cross_entropy(outputs, y) * scale)
        return kept(opt)

    assert_same(factors(1024.0), factors(1.0))


def test_draws_live_and_die_with_their_gradients():
    """zero_grad before the training pass keeps them, after it drops them."""
    model, opt = built(seeded(nn.Sequential(nn.Linear(2, 3)), 8), **EVERY_STEP)
    thrown = torch.randn(4, 2, dtype=torch.float64)
    x = torch.randn(4, 2, dtype=torch.float64)
    for rows in (thrown, x):
        outputs = model(rows)
        gradient = drawn(opt, outputs)
        opt.zero_grad()
        outputs.square().mean().backward()
    opt.step()
    # A mean over 4 × 3 squared errors.
    ref.assert_close(opt.preconditioner.factors("0")[1][0], gradient.mT @ gradient / 12)


def test_draws_of_a_step_that_was_skipped_leave_no_trace():
    """As by GradScaler: the next pass may be one without draws, or has the same ones."""
    model = seeded(nn.Sequential(nn.Linear(2, 3)), 8)
    x = torch.randn(4, 2, dtype=torch.float64)

    def factors_of(skipped: bool, draws: bool) -> Any:
        copied = copy.deepcopy(model)
        opt = optimizer(copied, **EVERY_STEP)
        for draw, steps in [(True, False)] * skipped + [(draws, True)]:
            opt.zero_grad()
            outputs = copied(x)
            if draw:
                opt.preconditioner.sample_fisher(outputs, "mse")
            outputs.square().mean().backward()
            if steps:
                opt.step()
        return opt.preconditioner.factors("0")

    assert_same(factors_of(True, False), factors_of(False, False))
    assert_same(factors_of(True, True), factors_of(False, True))


def test_calls_for_two_heads_of_one_pass_add_up():
    body, heads = nn.Linear(2, 3), nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 4)])
    model = seeded(nn.ModuleDict({"body": body, "heads": heads}), 9)
    x = torch.randn(1, 2, dtype=torch.float64)

    opt = optimizer(model, skip_layers="heads")
    hidden = model["body"](x)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    outputs = [head(hidden) for head in model["heads"]]
    for head, output in zip(model["heads"], outputs, strict=True):
        row = drawn(opt, output) @ head.weight.detach()
        expected += row.mT @ row / output.numel()
    descend(opt, sum(output.sum() for output in outputs))
    ref.assert_close(opt.preconditioner.factors("body")[1][0], expected)


def test_one_loss_of_several_forward_passes():
    net = seeded(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)), 10)
    rows = torch.randn(5, 2, dtype=torch.float64)
    expected = kept(after(net, "cross_entropy", rows))
    opt = optimizer(net)
    outputs = torch.cat([net(rows[:2]), net(rows[2:])])
    opt.preconditioner.sample_fisher(outputs, "cross_entropy")
    descend(opt, outputs.square().mean())
    for key, factor in kept(opt).items():
        ref.assert_close(factor, expected[key], what=str(key))


def test_a_second_training_pass_through_the_graph_adds_nothing():
    model = seeded(nn.Sequential(nn.Linear(2, 3)), 10)
    x = torch.eye(2, dtype=torch.float64)
    expected = after(model, "mse", x)
    opt = optimizer(model)
    outputs = model(x)
    opt.preconditioner.sample_fisher(outputs, "mse")
    outputs.sum().backward(retain_graph=True)
    descend(opt, outputs.square().sum())
    assert_same(kept(opt), kept(expected))


def checkpointed(reentrant: bool | None, whole: bool) -> nn.Module:
    def use(m: nn.Module, x: Tensor) -> Tensor:
        def all_of_it(x: Tensor) -> Tensor:
            return m.head(m.inner(x).tanh())

        if whole:
            return under(reentrant, all_of_it, x)
        return m.head(under(reentrant, m.inner, x).tanh())

    return Body(use, inner=nn.Linear(2, 3), head=nn.Linear(3, 3))


@pytest.mark.parametrize("whole", [True, False])
def test_activation_checkpointing(whole):
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    plain, rerun, reentrant = (seeded(checkpointed(way, whole), 11) for way in (None, False, True))
    assert_same(kept(after(rerun, "mse", x)), kept(after(plain, "mse", x)))
    with pytest.raises(RuntimeError, match="use_reentrant"):
        after(reentrant, "mse", x)


# ---------------------------------------------------------------- what is refused


def test_passes_without_draws_among_others_are_named():
    model = seeded(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)), 12)
    opt = optimizer(model, **EVERY_STEP)
    x = torch.randn(4, 2, dtype=torch.float64)
    outputs = model(x)
    opt.preconditioner.sample_fisher(outputs, "mse")
    outputs.sum().backward()
    model[0](x).sum().backward()
    with pytest.raises(RuntimeError, match=r"rank 0: 1 calls, not for 0\)"):
        opt.step()
    opt.zero_grad()
    model(x).sum().backward()  # the next step may do without
    opt.step()


GRAPHLESS = (torch.ones(4, 3), torch.tensor(1.0), [1.0], torch.ones(4, 3, dtype=torch.int))
# Arguments of the call, options of the optimizer, and the error.
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "kind": ((None, "bce"), {}, "Invalid kind: 'bce'; it must be .*cross_entropy"),
    "dim": ((None, "mse", 2), {}, "Invalid dim: 2 for outputs of shape"),
    "the batch": ((None, "cross_entropy", 0), {}, "Invalid dim: 0"),
    "the papers' scale": ((None, "mse"), {"normalization": "kaisa"}, "Invalid normalization"),
    **{str(x)[:9] + str(i): ((x, "mse"), {}, "Invalid outputs") for i, x in enumerate(GRAPHLESS)},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what):
    (outputs, kind, *dim), options, text = REFUSED[what]
    model = nn.Linear(2, 3)
    opt = KFACSGD(model, lr=0.1, compute_method="eigen", **options)
    outputs = model(torch.randn(4, 2)) if outputs is None else outputs
    with pytest.raises(ValueError, match=text):
        opt.preconditioner.sample_fisher(outputs, kind, dim=dim[0] if dim else None)


def test_a_draw_after_the_backward_pass_is_refused_in_our_words():
    model, opt = built(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)))
    outputs = model(torch.randn(4, 2))
    outputs.square().sum().backward()
    with pytest.raises(RuntimeError, match=r"sample_fisher came after .*backward.*; call it befo"):
        opt.preconditioner.sample_fisher(outputs, "mse")


def test_terms_that_change_their_meaning_after_a_draw_are_refused():
    model, opt = built(nn.Linear(2, 3))
    opt.preconditioner.sample_fisher(model(torch.randn(4, 2)), "mse")
    with pytest.raises(ValueError, match=r"Invalid loss_terms: 4\.0 after sample_fisher"):
        opt.preconditioner.loss_terms = 4.0
    opt.step()
    opt.preconditioner.loss_terms = 4.0
    opt.preconditioner.sample_fisher(model(torch.randn(4, 2)), "mse")
    opt.preconditioner.loss_terms = 5.0


# ---------------------------------------------------------------- ranks

SIZES = ((3, 2), (4, 1))  # of each rank's micro-batches
NETWORK = {"DDP": "tokens", "unused": "tokens", "fully_shard": "chain"}


def gathered(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def on_a_rank(how: str) -> dict[str, Any]:
    """One step with draws; what is drawn in the next; a third one, on rank 0 alone."""
    rank = dist.get_rank()
    model = network(NETWORK[how])
    wrapped: Any = model
    if how == "fully_shard":
        for part in (model.first, model.head, model):
            fully_shard(part)
    else:
        wrapped = DistributedDataParallel(model, find_unused_parameters=how == "unused")
    spread = {} if how == "fully_shard" else {"grad_worker_fraction": 0.5}
    opt = optimizer(wrapped, **EVERY_STEP, **spread)
    x, y = batch(NETWORK[how], 0, 10)
    starts, draws = [0, *itertools.accumulate(n for sizes in SIZES for n in sizes)], []
    for i in (2 * rank, 2 * rank + 1):
        part = slice(starts[i], starts[i + 1])
        outputs = wrapped(x[part])
        draws.append(drawn(opt, outputs, "cross_entropy"))
        # A mean over two ranks; the loss is one over ten examples.
        (F.cross_entropy(outputs, y[part], reduction="sum") / 5).backward()
    gradients = {name: gathered(p.grad) for name, p in model.named_parameters()}
    opt.step()
    parameters = {name: gathered(p) for name, p in model.named_parameters()}
    found = {"factors": kept(opt), "gradients": gradients, "parameters": parameters}
    found["draws"] = torch.cat(draws)
    opt.zero_grad()
    outputs = wrapped(x)
    found["draw"] = drawn(opt, outputs)
    F.cross_entropy(outputs, y).backward()
    opt.step()
    if how == "DDP":
        outputs = wrapped(x)
        if rank == 0:
            opt.preconditioner.sample_fisher(outputs, "mse")
        F.cross_entropy(outputs, y).backward()
        with pytest.raises(RuntimeError) as problem:
            opt.step()
        found["error"] = str(problem.value)
    return found


@pytest.mark.parametrize("how", ["DDP", "unused", "fully_shard"])
def test_two_ranks_equal_one_process(how):
    """Each with ragged micro-batches."""
    if how == "fully_shard" and not CAN_SHARD:
        pytest.skip("fully_shard on CPUs needs torch 2.7")
    model, opt = built(network(NETWORK[how]), **EVERY_STEP)
    x, y = batch(NETWORK[how], 0, 10)
    ranks = run(2, on_a_rank, how)
    draws = torch.cat([rank["draws"] for rank in ranks])
    outputs = model(x)
    with mock.patch.object(fisher, "drawn", lambda *_: draws):
        opt.preconditioner.sample_fisher(outputs, "cross_entropy")
    F.cross_entropy(outputs, y).backward()
    gradients = ref.gradients_of(model)
    opt.step()
    together = ranks[0]["factors"] | ranks[1]["factors"]
    expected = kept(opt)
    assert together.keys() == expected.keys()
    for key, factor in expected.items():
        ref.assert_close(together[key], factor, what=str(key))
    for name, p in model.named_parameters():
        for rank in ranks:
            ref.assert_close(rank["gradients"][name], gradients[name], what=name)
            ref.assert_close(rank["parameters"][name], p.detach(), what=name)
    assert (ranks[0]["draw"] != ranks[1]["draw"]).all()
    if how == "DDP":
        assert "(rank 0: 1 calls)" in ranks[0]["error"]
        assert "(rank 1: 0 calls, not for" in ranks[1]["error"]
