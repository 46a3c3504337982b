"""K where passes take different ways through a model, whosever turn it is to gather statistics."""

import copy
import gc
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from kaisa_optim import KFACSGD
from kaisa_optim.capture.hooks import Capture
from kaisa_optim.core.options import EARLY
from tests.support.ranks import run
from tests.support.watch import assert_close, normal

# Torch says so of inputs that need no gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

EIGEN = {"compute_method": "eigen"}
NEWEST = {**EIGEN, "factor_decay": 1e-12}  # an average is the last value


class Branches(nn.Module):
    """One of two layers, then a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor, way: str) -> Tensor:
        return self.head(torch.tanh((self.a if way == "a" else self.b)(x)))


def backward(model: nn.Module, i: int, way: str, parts: int = 1) -> None:
    out = model(normal(8, 6, seed=i), way)
    ((out - normal(8, 3, seed=100 + i)).square().mean() / parts).backward()


def micro_batches(model: nn.Module, i: int, ways: str) -> None:
    for j, way in enumerate(ways):
        backward(model, 10 * i + j, way, len(ways))


def gradients_of(module: nn.Module) -> list[Tensor]:
    """Of its output, one for each backward pass to come."""
    found: list[Tensor] = []
    module.register_full_backward_hook(lambda module, inputs, outputs: found.append(outputs[0]))
    return found


def gathering(opt: Any) -> set[str]:
    return {layer.name for layer in opt.preconditioner._capture.wanted}


def output_factor(opt: Any, name: str) -> Tensor:
    return opt.preconditioner.factors(name)[1].squeeze(0)


@pytest.mark.parametrize("options", [{}, {"staggered": False}], ids=["staggered", "at once"])
def test_micro_batches_of_other_branches_count_for_a_layer_that_comes_late(options):
    model = Branches()
    opt = KFACSGD(model, lr=0.1, **options, **EIGEN)
    for i, ways in enumerate(("aa", "ab")):
        opt.zero_grad()
        found = gradients_of(model.b)
        micro_batches(model, i, ways)
        opt.step()
    assert_close(output_factor(opt, "b"), 16 * found[0].T @ found[0])


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
        kept = opt.preconditioner.owned.by_key[layer, "g"]["average"]
        assert_close(kept.squeeze(0), expected[0])


@pytest.mark.parametrize("options", [{}, {"staggered": False}], ids=["staggered", "at once"])
def test_ranks_on_other_branches_count_for_a_layer_that_comes_late(options):
    run(2, late_on_the_last_rank, options)


class Exits(nn.Module):
    """A body, and a head that not every pass comes to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.head(h) if whole else h


def test_an_exit_that_no_gathering_pass_has_taken_counts():
    model = Exits()
    opt = KFACSGD(model, lr=0.1, factor_update_steps=2, **NEWEST)
    found = gradients_of(model.head)
    for i in range(2):
        opt.zero_grad()
        for whole in (True, False)[: 1 + i]:
            (model(normal(8, 6, seed=i + 10 * whole), whole).square().mean() / 2).backward()
        turn = gathering(opt)
        opt.step()
    assert turn == {"head"}
    assert_close(output_factor(opt, "head"), 16 * found[-1].T @ found[-1])


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


def test_micro_batches_on_different_branches_are_no_steps_left_out():
    model = Branches()
    opt = KFACSGD(model, lr=0.1, factor_update_steps=1, **EIGEN)
    found = gradients_of(model.a)
    micro_batches(model, 0, "ab")
    opt.step()
    assert_close(output_factor(opt, "a"), 16 * found[0].T @ found[0])


class Tokens(nn.Module):
    """Of which a trainer calls ``net`` alone; ``token`` sees examples and positions as rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.token, self.head = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)
        self.double()

    def training_step(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        t = torch.tanh(self.token(h.flatten(0, 1))).unflatten(0, x.shape[:2])
        return self.head(t.mean(1)).square().mean()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_part_that_is_called_without_its_model_has_the_k_of_its_first_layer_that_trains(frozen):
    terms = 40 if frozen else 8
    model = Tokens()
    model.first.requires_grad_(not frozen)
    opt = KFACSGD(model, lr=0.1, factor_update_steps=3, **NEWEST)
    found = {name: gradients_of(getattr(model, name)) for name in ("token", "head")}
    for i in range(6):
        opt.zero_grad()
        turn = gathering(opt)
        model.training_step(normal(8, 5, 6, seed=i)).backward()
        opt.step()
        for name in turn & set(found):
            g = found[name][-1]
            assert_close(output_factor(opt, name), terms * g.T @ g, what=f"{name}, step {i}")


@pytest.mark.parametrize("change", ["nothing", "view in place", "in place"])
def test_passes_through_layers_whose_turn_it_is_not_are_seen(change):
    """The second pass meets one layer alone, which has its turn in another step."""
    model = Branches()
    opt = KFACSGD(model, lr=0.1, factor_update_steps=3, **NEWEST)
    found = gradients_of(model.head)
    for i in range(4):
        opt.zero_grad()
        turn = gathering(opt)
        backward(model, i, "b", 2)
        x = normal(4, 2, 6, seed=30 + i) if change == "view in place" else normal(4, 6, seed=i)
        h = model.a(x)
        (h if change == "nothing" else h.tanh_()).square().mean().backward()
        opt.step()
        if i and turn == {"head"}:
            break
    assert_close(output_factor(opt, "head"), 12 * found[-1].T @ found[-1])


class Selects(nn.Module):
    """An auxiliary loss of some rows, which may be none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.aux = nn.Linear(6, 5), nn.Linear(5, 2)
        self.double()

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        h = torch.tanh(self.body(x))
        return h.square().mean() + self.aux(h[:chosen]).square().sum() / 8


def test_a_pass_counts_that_brings_the_first_layer_no_rows():
    model = Selects()
    opt = KFACSGD(model, lr=0.1, factor_update_steps=2, **NEWEST)
    found = gradients_of(model.aux)
    for i in range(3):
        opt.zero_grad()
        for j, chosen in enumerate((0, 3)):
            (model(normal(8, 6, seed=2 * i + j), chosen) / 2).backward()
        turn = gathering(opt)
        opt.step()
        if turn == {"aux"}:
            g = found[-1]
    assert_close(output_factor(opt, "aux"), 16 * g.T @ g)


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
    options = {"factor_update_steps": 3, "staggered": False, "inv_update_steps": 10}
    opt = KFACSGD(model, lr=0.1, **options, **EIGEN)
    seen = []
    for i in range(7):
        opt.zero_grad()
        backward(model, i, "a")
        seen.append(bool(opt.preconditioner.sums.of_layer))
        opt.step()
    assert seen == [i % 3 == 0 for i in range(7)]


def test_only_a_layer_that_begins_a_pass_is_watched(monkeypatch):
    """A backward pass that trains a later layer comes to one of these, too, and K counts it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    opt = KFACSGD(model, lr=0.1, factor_update_steps=4)
    watched = []
    real = Capture._watch

    def watch(capture: Capture, passage: Any, output: Tensor) -> None:
        watched.append(passage.layer.name)
        real(capture, passage, output)

    monkeypatch.setattr(Capture, "_watch", watch)
    for step in range(9):
        watched.clear()
        opt.zero_grad()
        model(normal(5, 4, seed=step)).square().mean().backward()
        gathers = sorted(x.name for x in opt.preconditioner.capture.wanted)
        if step > 4:
            # The first layer begins the pass; one that gathers has a tap.
            assert gathers and watched == ([] if "0" in gathers else ["0"])
            assert opt.preconditioner.sums.terms() == 5
        opt.step()


class Towers(nn.Module):
    """Two branches of one input; ``mine`` stands behind a layer that K-FAC leaves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.raw, self.mine = nn.Linear(6, 3), nn.Linear(6, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.mine(torch.tanh(self.raw(x)))


@pytest.mark.parametrize("inputs", [False, True])
def test_a_branch_behind_other_gradients_than_the_layers_counts(inputs):
    """Its input needs a gradient, but a backward pass comes to no layer before it."""
    model = Towers()
    skipped = {} if inputs else {"skip_layers": ["raw"]}
    model.raw.requires_grad_(not inputs)
    opt = KFACSGD(model, lr=0.1, factor_update_steps=2, inv_update_steps=10, **skipped)
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


# ---- layers that are in use in some steps alone ----


def train(model: Branches, opt: Any, steps: range, period: int) -> list[set[str]]:
    """By one way, and in every ``period``-th step by the other; of which layers G has changed."""
    found = []
    for i in steps:
        opt.zero_grad()
        before = {
            x.name: output_factor(opt, x.name).clone()
            for x in opt.preconditioner.registry.with_average
        }
        backward(model, i, "b" if i % period == period - 1 else "a")
        opt.step()
        after = {
            x.name: output_factor(opt, x.name) for x in opt.preconditioner.registry.with_average
        }
        found.append({n for n in after if n not in before or not torch.equal(before[n], after[n])})
    return found


@pytest.mark.parametrize("options", [{}, {"staggered": False}], ids=["staggered", "at once"])
@pytest.mark.parametrize("period", [2, 5])
def test_a_turn_that_met_no_pass_is_made_up_for(period, options):
    """Else a layer whose use shares a period with the turns would gather once, or never again."""
    model = Branches()
    opt = KFACSGD(model, lr=0.1, factor_update_steps=10, inv_update_steps=10, **options, **EIGEN)
    found = train(model, opt, range(100), period)
    for name in ("a", "b", "head"):
        assert 10 <= sum(name in new for new in found) <= 12, name


def missed(opt: Any) -> dict[str, int]:
    """Return for how many steps layers have missed their slot."""
    return {n: state.missed for n, state in opt.preconditioner.states.items() if state.missed}


def now_and_then_on_one_rank(fraction: float) -> list[list[dict[str, int]]]:
    """By way of b in every fifth step of the last rank; what is overdue on each after each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Branches()
    wrapped = DDP(model, find_unused_parameters=True)
    opt = KFACSGD(wrapped, lr=0.1, factor_update_steps=10, grad_worker_fraction=fraction)
    found = []
    for i in range(40):
        opt.zero_grad()
        way = "b" if i % 5 == 4 and rank == world - 1 else "a"
        backward(wrapped, 10 * i + rank, way)
        opt.step()
        everywhere: list[Any] = [None] * world
        mine = missed(opt)
        dist.all_gather_object(everywhere, mine)
        found.append(everywhere)
    return found


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_ranks_wait_alike_for_what_is_overdue(fraction):
    found = run(2, now_and_then_on_one_rank, fraction)[0]
    assert all(one == other for one, other in found)
    late = ["b" in one for one, _ in found]
    assert any(late) and not all(late[5:])  # and no longer once it has been seen


def test_an_overdue_turn_is_saved():
    model, other = Branches(), Branches()
    options = {"factor_update_steps": 4, "staggered": False, "inv_update_steps": 10}
    opt = KFACSGD(model, lr=0.1, **options, **EIGEN)
    train(model, opt, range(4), 2)
    train(model, opt, range(4, 5), 2)  # it was the turn of b, too
    other.load_state_dict(model.state_dict())
    resumed = KFACSGD(other, lr=0.1, **options, **EIGEN)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert gathering(resumed) == gathering(opt) == {"b"}
    assert train(model, opt, range(5, 12), 2) == train(other, resumed, range(5, 12), 2)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_is_not_seen_for_long_is_waited_for_in_its_own_turns_alone():
    model = Branches()
    opt = KFACSGD(model, lr=0.01, factor_update_steps=2, staggered=False)
    train(model, opt, range(2), 2)
    asked = []
    for i in range(2, 50):
        asked.append("b" in gathering(opt))
        train(model, opt, range(i, i + 1), 1000)
    assert all(asked[:20])
    assert asked[30:] == [True, False] * 9
    resumed = KFACSGD(model, lr=0.01, factor_update_steps=2, staggered=False)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert gathering(resumed) == gathering(opt)
    train(model, opt, range(1), 1)  # by way of b, in its turn
    assert "b" not in missed(opt)


class Beside(nn.Module):
    """Three layers, or a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.own = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, covered: bool) -> Tensor:
        return sum(layer(x) for layer in self.layers) if covered else self.own * x[:, :3]


@pytest.mark.parametrize("length", [3, 5, 7])
def test_steps_beside_the_covered_layers_count_in_turns_alone(length):
    """A layer that is overdue is asked in each step: those without a pass are no fault."""
    model = Beside()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = KFACSGD(model, lr=0.01, factor_update_steps=10)
    for i in range(60):
        opt.zero_grad(set_to_none=False)
        out = model(normal(8, 6, seed=i).float(), i // length % 2 == 0)
        out.square().mean().backward()
        opt.step()


def test_a_layer_that_is_no_longer_seen_is_named():
    model = Branches()
    opt = KFACSGD(model, lr=0.01, factor_update_steps=1)
    train(model, opt, range(3), 1000)
    plain = model.a.weight, model.a.bias
    del model._modules["a"]
    object.__setattr__(model, "a", lambda x: nn.functional.linear(x, *plain))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, opt, range(3, 22), 1000)
    with pytest.warns(UserWarning, match="layer 'a' has had a gradient in 20 steps .* older facto"):
        train(model, opt, range(22, 24), 1000)


class Timed(nn.Module):
    """Told a number before the batch, as models of flows are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.layer(x) * t


@pytest.mark.parametrize("by_name", [False, True])
def test_a_number_before_the_batch_is_no_batch(by_name):
    torch.manual_seed(0)
    model = Timed()
    opt = KFACSGD(model, lr=0.1, **EIGEN)
    gradients = gradients_of(model.layer)
    t, x = torch.tensor(0.5), normal(8, 6)
    (model(t=t, x=x) if by_name else model(t, x)).square().sum(1).mean().backward()
    opt.step()
    assert_close(output_factor(opt, "layer"), 8 * gradients[0].mT @ gradients[0])


# ---- hooks ----


def test_the_hooks_of_an_optimizer_that_is_gone_are_gone():
    model = Branches()

    def count() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    opt = KFACSGD(model, lr=0.1)
    backward(model, 0, "a")
    opt.step()
    assert count() > 0
    del opt
    gc.collect()
    assert count() == 0


@pytest.mark.parametrize("called", ["model", "layers"])
def test_only_the_first_layer_is_watched_although_norms_train(called):
    """Where no layer gathers but one, the others follow the first in the graph."""
    layers = [part for _ in range(6) for part in (nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU())]
    model = nn.Sequential(*layers).double()
    opt = KFACSGD(model, lr=0.01, factor_update_steps=6, inv_update_steps=100)
    watched: list[str] = []
    own = Capture._watch

    def noted(capture: Capture, passage: Any, output: Tensor) -> None:
        watched.append(passage.layer.name)
        own(capture, passage, output)

    for i in range(8):
        watched.clear()
        opt.zero_grad()
        with mock.patch.object(Capture, "_watch", noted):
            x = normal(4, 6, seed=i)
            if called == "model":
                x = model(x)
            for part in layers if called == "layers" else ():
                x = part(x)
        x.square().mean().backward()
        opt.step()
        assert not any(one.nodes for one in opt.preconditioner.capture._passes._recent)
        if i and i not in EARLY:
            assert watched == ([] if i % 6 == 0 else ["0"])
