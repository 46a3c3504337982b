"""G from drawn labels: its mean against torch's own Hessians, each draw against training that feeds
its gradient, and training that is left as it was."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
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
from tests.capture.test_capture import under
from tests.support.cluster import batch, kept, network
from tests.support.ranks import CAN_SHARD, run
from tests.support.reference import gradients_of
from tests.support.training import ANEW, assert_same, descend
from tests.support.watch import Body, assert_close, built, exact, normal, seeded

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")

LOSSES: dict[str, Callable[..., Tensor]] = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss}
COPIES = 8_000  # of a batch, each with a draw of its own
ROWS = normal(4, 2)


def linear() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(2, 3)))


def after(model: nn.Module, kind: str, x: Tensor, dim: int | None = None, **options: Any) -> Any:
    """An optimizer after one step with drawn gradients, which left the weights as they were."""
    opt = exact(model, lr=0.0, **options)
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


def assert_alike(actual: dict[Any, Tensor], expected: dict[Any, Tensor], rtol: float) -> None:
    assert actual.keys() == expected.keys()
    for key, factor in expected.items():
        assert_close(actual[key], factor, rtol, str(key))


def assert_mean(factor: Tensor, expected: Tensor, draws: int) -> None:
    # One draw's entries deviate by no more than about their largest mean; five deviations.
    assert_close(factor, expected, 5 * 1.5 / math.sqrt(draws))


def own_blocks(loss: Callable[[Tensor], Tensor], outputs: Tensor, dim: int) -> Tensor:
    """Σ of the blocks of a loss's Hessian of each example and position, ``[width, width]``."""
    outputs = outputs.detach()
    matrix = torch.autograd.functional.hessian(
        lambda flat: loss(flat.view(outputs.shape)), outputs.flatten()
    )
    order = torch.arange(outputs.numel()).view(outputs.shape).movedim(dim, -1)
    return sum(matrix[rows][:, rows] for rows in order.flatten(0, -2))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("positions", [1, 4])
@pytest.mark.parametrize("terms", ["examples", "positions", "number"])
def test_the_scale_is_that_of_torchs_loss(kind, reduction, positions, terms):
    """Whatever K counts, since the draws know over how many losses torch takes the mean."""
    model = seeded(lambda: nn.Sequential(nn.Conv1d(2, 3, 1)))
    x = normal(5, 2, positions)
    number = 5.0 * positions * COPIES
    options = {"loss_reduction": reduction, "loss_terms": number if terms == "number" else terms}
    opt = after(model, kind, x.repeat(COPIES, 1, 1), dim=1, **options)
    outputs = model(x)
    # Labels that fit; curvature does not depend on them.
    y = outputs.argmax(1) if kind == "cross_entropy" else (outputs > 0).double()
    expected = own_blocks(lambda f: LOSSES[kind](f, y, reduction=reduction), outputs, 1)
    a, g = opt.preconditioner.factors("0")
    assert_mean(g[0], expected * (COPIES if reduction == "sum" else 1), 5 * COPIES)
    rows = torch.cat([x, torch.ones_like(x[:, :1])], 1).movedim(1, -1).flatten(0, 1)
    assert_close(a[0], rows.mT @ rows / len(rows), what="A")


@pytest.mark.parametrize("layout", ["classes second", "classes last", "flat", "masked"])
@pytest.mark.parametrize("terms", ["examples", "positions", "number"])
def test_classes_may_lie_in_any_dimension_and_padding_is_left_out(layout, terms):
    lengths = torch.tensor([4, 1, 3] if layout == "masked" else [4, 4, 4])
    valid = torch.arange(4) < lengths[:, None]
    model, x = linear(), normal(3, 4, 2)
    outputs = model(x)
    y = outputs.argmax(-1).where(valid, -100)
    expected = own_blocks(lambda f: F.cross_entropy(f.movedim(-1, 1), y), outputs, -1)
    opt = exact(model, loss_terms=float(valid.sum()) * COPIES if terms == "number" else terms)
    many = model(x.repeat(COPIES, 1, 1))
    logits, dim = {
        "classes second": (many.movedim(-1, 1), None),
        "classes last": (many, -1),
        "flat": (many.flatten(0, 1), None),
        "masked": (many[valid.repeat(COPIES, 1)], None),
    }[layout]
    opt.preconditioner.sample_fisher(logits, "cross_entropy", dim=dim)
    descend(opt, many.square().mean())
    assert_mean(opt.preconditioner.factors("0")[1][0], expected, 8 * COPIES)


def test_outputs_of_one_dimension_are_one_number_an_example():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)))
    opt = after(model, "mse", normal(6, 3).repeat(COPIES, 1))
    assert_mean(opt.preconditioner.factors("0")[1][0, 0, 0], torch.tensor(2.0), 6 * COPIES)


@pytest.mark.parametrize("name", ["images", "tokens"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_layers_of_all_kinds_equal_a_loss_with_the_drawn_gradient(name, sharing):
    x, _ = batch(name, 0, 5)
    (model, opt), (other, fed) = (built(network(name), weight_sharing=sharing) for _ in range(2))
    outputs = model(x)
    gradient = drawn(opt, outputs, "cross_entropy")
    descend(opt, outputs.square().mean())
    descend(fed, (other(x) * gradient).sum() / 5)
    assert_alike(kept(opt), kept(fed), 1e-10)


def test_draws_follow_from_step_and_call_and_from_nothing_else():
    start = linear()

    def draws() -> list[Tensor]:
        model, opt = built(copy.deepcopy(start), **ANEW)
        found = []
        for call in range(4):
            outputs = model(ROWS)
            found.append(drawn(opt, outputs))
            outputs.square().mean().backward()
            if call % 2:
                opt.step()
        return found

    state = torch.get_rng_state()
    first = draws()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert_same(draws(), first)
    for one, other in itertools.combinations(first, 2):
        assert (one != other).all()


def test_a_checkpoint_goes_on_with_the_same_draws():
    def go(model: nn.Module, opt: Any, steps: range) -> None:
        for i in steps:
            x, y = batch("chain", i, 6)
            outputs = model(x)
            opt.preconditioner.sample_fisher(outputs, "cross_entropy")
            descend(opt, F.cross_entropy(outputs, y))

    model, opt = built(network("chain"), **ANEW)
    go(model, opt, range(2))
    other, resumed = built(copy.deepcopy(model), **ANEW)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    go(model, opt, range(2, 4))
    go(other, resumed, range(2, 4))
    assert_same(other, model)


def test_gradients_and_input_factors_are_untouched():
    """Bit for bit; and the rows of A are counted once, however often they were passed."""
    factors, gradients = [], []
    for sampled in (True, False):
        model, opt = built(network("tokens"))
        for i in range(2):
            x, y = batch("tokens", i, 4)
            outputs = model(x)
            if sampled:
                opt.preconditioner.sample_fisher(outputs, "cross_entropy")
            F.cross_entropy(outputs, y).backward()
        gradients.append(gradients_of(model))
        opt.step()
        factors.append(kept(opt))
    assert_same(*gradients)
    for (layer, side), factor in factors[0].items():
        assert side == "g" or torch.equal(factor, factors[1][layer, side]), layer
    changed, plain = (of_run["head", "g"] for of_run in factors)
    assert (changed - plain).norm() > 0.1 * changed.norm()


def test_only_steps_that_gather_have_another_pass():
    """In others nothing is drawn, either; no step waits for a frozen layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model[3].requires_grad_(False)
    opt = exact(model, factor_update_steps=3, staggered=False)
    passes: list[int] = []
    draws: list[int] = []
    for i in range(5):
        hidden = model[:2](normal(4, 2, seed=i))
        hidden.register_hook(lambda _, i=i: passes.append(i))
        outputs = model[2:](hidden)
        handle = outputs.register_hook(lambda _, i=i: draws.append(i))
        opt.preconditioner.sample_fisher(outputs, "mse")
        handle.remove()
        descend(opt, outputs.square().mean())
    assert passes == [0, 0, 1, 2, 3, 3, 4] and draws == [0, 3]


def test_inputs_are_worked_on_once():
    """And only those of layers whose turn it is."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))))
    opt = exact(model, factor_update_steps=3)
    moments = [mock.Mock(wraps=x.input_moment) for x in opt.preconditioner.layers.values()]
    for layer, moment in zip(opt.preconditioner.layers.values(), moments, strict=True):
        layer.input_moment = moment
    for made in (1, 1, 1, 2):
        outputs = model(normal(4, 3))
        opt.preconditioner.sample_fisher(outputs, "mse")
        descend(opt, outputs.square().mean())
        assert [moment.call_count for moment in moments] == [made] * 3


def two_layers() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)))


def factors_after(train: Any, make: Callable[[], nn.Module] = two_layers, **options: Any) -> Any:
    model, opt = built(make(), **options)
    train(model, opt)
    opt.step()
    return kept(opt)


def whole(model: nn.Module, opt: Any, draws: bool = True, scale: float = 1.0) -> None:
    outputs = model(ROWS.clone().requires_grad_())  # a reentrant checkpoint needs one
    if draws:
        opt.preconditioner.sample_fisher(outputs, "mse")
    (outputs.square().mean() * scale).backward()


def skipped(model: nn.Module, opt: Any, draws: bool) -> None:
    """Leave a step out, as GradScaler does; the next pass has no draws, or the same ones."""
    whole(model, opt)
    opt.zero_grad()
    whole(model, opt, draws)


def by_parts(model: nn.Module, opt: Any) -> None:
    outputs = torch.cat([model(ROWS[:1]), model(ROWS[1:])])
    opt.preconditioner.sample_fisher(outputs, "mse")
    outputs.square().mean().backward()


def twice(model: nn.Module, opt: Any) -> None:
    outputs = model(ROWS)
    opt.preconditioner.sample_fisher(outputs, "mse")
    outputs.sum().backward(retain_graph=True)
    outputs.square().sum().backward()


without = partial(whole, draws=False)
# Passes of a step with an optimizer's options, and other passes that give the same factors.
ALIKE: dict[str, tuple[Any, dict[str, Any], Any, float]] = {
    "a scaled loss": (partial(whole, scale=1024.0), {"grad_scaler": 1024.0}, whole, 0.0),
    "a skipped step": (partial(skipped, draws=True), {}, whole, 0.0),
    "no draws after a skipped step": (partial(skipped, draws=False), {}, without, 0.0),
    "a second training pass": (twice, {}, whole, 0.0),
    "several forward passes": (by_parts, {}, whole, 1e-10),
}


@pytest.mark.parametrize("scenario", ALIKE)
def test_factors_are_those_of_other_passes(scenario):
    train, options, other, rtol = ALIKE[scenario]
    assert_alike(factors_after(train, **options), factors_after(other), rtol)


def checkpointed(reentrant: bool | None, around: bool) -> nn.Module:
    def both(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(m.inner(x).tanh())

    def use(m: nn.Module, x: Tensor) -> Tensor:
        if around:
            return under(reentrant, partial(both, m), x)
        return m.head(under(reentrant, m.inner, x).tanh())

    return seeded(lambda: Body(use, inner=nn.Linear(2, 3), head=nn.Linear(3, 3)))


@pytest.mark.parametrize("around", [True, False])
def test_activation_checkpointing(around):
    plain, rerun, reentrant = (partial(checkpointed, kind, around) for kind in (None, False, True))
    assert_same(factors_after(whole, rerun), factors_after(whole, plain))
    with pytest.raises(RuntimeError, match="use_reentrant"):
        factors_after(whole, reentrant)


def test_draws_live_and_die_with_their_gradients():
    """zero_grad before the training pass keeps them, after it drops them."""
    model, opt = built(linear())
    for rows in (normal(4, 2, seed=1), ROWS):
        outputs = model(rows)
        gradient = drawn(opt, outputs)
        opt.zero_grad()
        outputs.square().mean().backward()
    opt.step()
    # A mean over 4 × 3 squared errors.
    assert_close(opt.preconditioner.factors("0")[1][0], gradient.mT @ gradient / 12)


def test_calls_for_two_heads_of_one_pass_add_up():
    body, heads = nn.Linear(2, 3), nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 4)])
    model = seeded(lambda: nn.ModuleDict({"body": body, "heads": heads}))
    opt = exact(model, skip_layers="heads")
    hidden = model["body"](ROWS[:1])
    expected = torch.zeros(3, 3, dtype=torch.float64)
    outputs = [head(hidden) for head in heads]
    for head, output in zip(heads, outputs, strict=True):
        row = drawn(opt, output) @ head.weight.detach()
        expected += row.mT @ row / output.numel()
    descend(opt, sum(output.sum() for output in outputs))
    assert_close(opt.preconditioner.factors("body")[1][0], expected)


def test_passes_without_draws_among_others_are_named():
    model, opt = built(two_layers(), **ANEW)
    whole(model, opt)
    model[0](ROWS).sum().backward()
    with pytest.raises(RuntimeError, match=r"rank 0: 1 calls, not for 0\)"):
        opt.step()
    opt.zero_grad()
    whole(model, opt, draws=False)  # the next step may do without
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
    model, opt = built(two_layers())
    outputs = model(ROWS)
    outputs.square().sum().backward()
    with pytest.raises(RuntimeError, match=r"sample_fisher came after .*backward.*; call it befo"):
        opt.preconditioner.sample_fisher(outputs, "mse")


def test_terms_that_change_their_meaning_after_a_draw_are_refused():
    model, opt = built(linear())
    opt.preconditioner.sample_fisher(model(ROWS), "mse")
    with pytest.raises(ValueError, match=r"Invalid loss_terms: 4\.0 after sample_fisher"):
        opt.preconditioner.loss_terms = 4.0
    opt.step()
    opt.preconditioner.loss_terms = 4.0
    opt.preconditioner.sample_fisher(model(ROWS), "mse")
    opt.preconditioner.loss_terms = 5.0


PARTS = (slice(0, 3), slice(3, 5)), (slice(5, 9), slice(9, 10))  # each rank's micro-batches
NETWORK = {"DDP": "tokens", "unused": "tokens", "fully_shard": "chain"}


def whole_tensors(named: dict[str, Any]) -> dict[str, Tensor]:
    """Return copies of tensors; those of shards are gathered."""
    plain = {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in named.items()}
    return {name: x.detach().clone() for name, x in plain.items()}


def on_a_rank(how: str) -> dict[str, Any]:
    """One step with draws; what is drawn in the next; a third one, on rank 0 alone."""
    rank = dist.get_rank()
    wrapped: Any = network(NETWORK[how])
    spread = {} if how == "fully_shard" else {"grad_worker_fraction": 0.5}
    model = wrapped
    if how == "fully_shard":
        for part in (model.first, model.head, model):
            fully_shard(part)
    else:
        wrapped = DistributedDataParallel(model, find_unused_parameters=how == "unused")
    opt = exact(wrapped, **ANEW, **spread)
    x, y = batch(NETWORK[how], 0, 10)
    draws = []
    for part in PARTS[rank]:
        outputs = wrapped(x[part])
        draws.append(drawn(opt, outputs, "cross_entropy"))
        # A mean over two ranks; the loss is one over ten examples.
        (F.cross_entropy(outputs, y[part], reduction="sum") / 5).backward()
    found: dict[str, Any] = {"draws": torch.cat(draws)}
    found["gradients"] = whole_tensors({name: p.grad for name, p in model.named_parameters()})
    opt.step()
    found |= {"parameters": whole_tensors(dict(model.named_parameters())), "factors": kept(opt)}
    opt.zero_grad()
    outputs = wrapped(x)
    found["draw"] = drawn(opt, outputs)
    descend(opt, F.cross_entropy(outputs, y))
    if how == "DDP":
        outputs = wrapped(x)
        if rank == 0:
            opt.preconditioner.sample_fisher(outputs, "mse")
        F.cross_entropy(outputs, y).backward()
        with pytest.raises(RuntimeError) as problem:
            opt.step()
        found["error"] = str(problem.value)
    return found


@pytest.mark.parametrize("how", NETWORK)
def test_two_ranks_equal_one_process(how):
    if how == "fully_shard" and not CAN_SHARD:
        pytest.skip("fully_shard on CPUs needs torch 2.7")
    ranks = run(2, on_a_rank, how)
    model, opt = built(network(NETWORK[how]), **ANEW)
    x, y = batch(NETWORK[how], 0, 10)
    # One process trains with a loss of the draws, and steps with the gradients of the labels.
    draws = torch.cat([rank["draws"] for rank in ranks])
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    ((model(x) * draws).sum() / 10).backward()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad.copy_(gradient)
    expected = {"gradients": gradients_of(model)}
    opt.step()
    expected["parameters"] = whole_tensors(dict(model.named_parameters()))
    assert_alike(ranks[0]["factors"] | ranks[1]["factors"], kept(opt), 1e-10)
    for what, tensors in expected.items():
        for rank in ranks:
            assert_alike(rank[what], tensors, 1e-10)
    assert (ranks[0]["draw"] != ranks[1]["draw"]).all()
    if how == "DDP":
        assert "(rank 0: 1 calls)" in ranks[0]["error"]
        assert "(rank 1: 0 calls, not for" in ranks[1]["error"]
