"""What K-FAC over a base owes its users, whichever base it is."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from kaisa_optim import LAMB, with_kfac
from tests.optim import bases
from tests.optim.bases import LARS, by_name, give
from tests.support.training import (
    ANEW,
    assert_near,
    assert_same,
    backward,
    difference,
    factors,
    network,
    train,
    values,
)

# Each base with a rate at which it learns the task.
CASES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (optim.Adam, {"lr": 0.03}),
    "amsgrad": (optim.Adam, {"lr": 0.03, "amsgrad": True}),
    "AdamW": (optim.AdamW, {"lr": 0.03, "weight_decay": 0.0}),
    "LAMB": (LAMB, {"lr": 0.03, "weight_decay": 0.0}),
    "RAdam": (optim.RAdam, {"lr": 0.03}),
    "NAdam": (optim.NAdam, {"lr": 0.03}),
    "Adamax": (optim.Adamax, {"lr": 0.03}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01}),
    "RMSprop with momentum": (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Adadelta": (optim.Adadelta, {"lr": 3.0}),
    "Adafactor": (optim.Adafactor, {"lr": 0.3, "weight_decay": 0.0}),
    "ASGD": (optim.ASGD, {"lr": 0.1}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
    "LARS": (LARS, {"lr": 0.5, "weight_decay": 0.0}),
}
SINGLE = torch.float32  # a load casts some counts of NAdam and ASGD to the parameters' dtype
every_base = pytest.mark.parametrize("base", CASES)
METHODS: dict[str, dict[str, Any]] = {
    "polar": ANEW,
    "eigen": {"compute_method": "eigen", "damping": 0.1, **ANEW},
}


def built(base: str, model: nn.Module, method: str = "polar", **changed: Any) -> Any:
    cls, settings = CASES[base]
    options = {**settings, **METHODS[method], **changed}
    return with_kfac(cls)(model, **options)


def plain(base: str, model: nn.Module) -> Any:
    cls, settings = CASES[base]
    return cls(model.parameters(), **settings)


def having(name: str, *but: str) -> list[str]:
    """Return the bases that have an argument of this name."""
    return [x for x in CASES if name in signature(CASES[x][0]).parameters and x not in but]


def each(*with_eigen: str, of: Iterable[str] = CASES) -> Any:
    """Parametrize over bases under directions, and over some under the papers' gradients."""
    pairs = [(base, "polar") for base in of] + [(base, "eigen") for base in with_eigen]
    return pytest.mark.parametrize(("base", "method"), pairs)


def test_every_base_is_here():
    assert {cls for cls, _ in CASES.values()} == set(bases.BASES)


@every_base
def test_steps_lower_the_loss(base):
    model = network()
    opt = built(base, model)
    first = float(backward(model, 0))
    train(model, opt, [0] * 40)
    model.zero_grad()
    assert float(backward(model, 0)) < 0.6 * first


# ---- states ----


@every_base
def test_a_run_goes_on_bit_for_bit(base, tmp_path):
    model, other = network(0, SINGLE), network(1, SINGLE)
    opt = built(base, model)
    train(model, opt, range(3))
    torch.save([model.state_dict(), opt.state_dict()], tmp_path / "state")
    of_model, of_optimizer = torch.load(tmp_path / "state")
    other.load_state_dict(of_model)
    again = built(base, other)
    again.load_state_dict(of_optimizer)
    assert_same(again.state_dict(), opt.state_dict())
    for one, its in ((model, opt), (other, again)):
        train(one, its, range(3, 6))
    assert_same(other, model)
    assert_same(again.state_dict(), opt.state_dict())


@pytest.mark.filterwarnings("ignore:.*so its raw gradient is used")
@every_base
@pytest.mark.parametrize("trained", [False, True])
def test_a_plain_checkpoint_goes_on(base, trained):
    """Also in an optimizer with averages of its own, which must be forgotten."""
    model, other = network(0, SINGLE), network(1, SINGLE)
    own = plain(base, model)
    train(model, own, range(3))
    opt = built(base, other)
    if trained:
        train(other, opt, range(5, 8))
    other.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="no K-FAC factors of this kind for '0', '2'") as record:
        opt.load_state_dict(copy.deepcopy(own.state_dict()))
    assert len(record) == 1
    assert_same(opt.state_dict()["state"], own.state_dict()["state"])
    with opt.preconditioner.paused():  # without statistics, the base steps as before
        train(other, opt, range(3, 5))
    train(model, own, range(3, 5))
    assert_near(other, model, 1e-5, 1e-7)
    before = values(other)
    train(other, opt, [5])
    assert all(p.isfinite().all() for p in other.parameters())
    assert difference(before, other)["0.weight"].any()


@each("SGD", "SGD with momentum", "Adam", "LAMB", "LARS")
def test_an_exported_state_goes_on_in_the_plain_base(base, method):
    model = network(0, SINGLE)
    opt = built(base, model, method)
    train(model, opt, range(3))
    state = copy.deepcopy(opt.base_state_dict())
    assert not any(str(key).startswith("kfac") for x in state["state"].values() for key in x)
    own = plain(base, model)
    assert state["param_groups"][0].keys() - {"step"} == own.param_groups[0].keys() - {"step"}
    own.load_state_dict(state)
    for p in model.parameters():
        for key in own.state[p].keys() & opt.state[p].keys():
            assert_same(own.state[p][key], opt.state[p][key])
    before = values(model)
    train(model, own, range(3, 5))
    moved = difference(before, model)
    assert all(by.isfinite().all() and by.any() for by in moved.values())


# ---- arguments of step and settings ----


@each("SGD")
def test_a_closure_runs_once_before_its_factors_are_used(base, method):
    model, expected = network(), network()
    opt, by_hand = built(base, model, method), built(base, expected, method)
    calls: list[int] = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        opt.zero_grad()
        calls.append(opt.preconditioner.steps)
        return backward(model, len(calls) - 1)

    with torch.no_grad():
        losses = [opt.step(closure) for _ in range(3)]
    assert calls == [0, 1, 2]
    for i, loss in enumerate(losses):
        by_hand.zero_grad()
        assert_same(loss, backward(expected, i))
        assert by_hand.step() is None
    assert_same(model, expected)
    assert_same(factors(opt), factors(by_hand))


@every_base
def test_a_tensor_rate_is_as_good_as_a_number_or_the_bases_error(base):
    start = CASES[base][1]["lr"] / 10
    rate = torch.tensor(start, dtype=torch.float64)
    refused = None
    try:
        CASES[base][0](network().parameters(), lr=rate)
    except ValueError as error:
        refused = str(error)
    model, other = network(), network()
    if refused is not None:
        with pytest.raises(ValueError) as found:
            built(base, other, lr=rate)
        assert str(found.value) == refused
        return
    changed = {"weight_decay": 0.1} if base != "Rprop" else {}
    opt = built(base, model, lr=start, **changed)
    with_tensor = built(base, other, lr=rate, **changed)
    for i in range(3):
        give(model, opt, i)
        give(other, with_tensor, i)
        assert_near(other, model, 1e-12, 1e-14)
        opt.param_groups[0]["lr"] = start / (i + 2)
        rate.fill_(start / (i + 2))


def twins(base: str, rate: float, decay: float, **changed: Any) -> Any:
    """Weights in mid-run, and two equal runs after one step more: the second one decays them."""
    model = network()
    opt = built(base, model, lr=rate, **changed)
    for i in range(3):
        give(model, opt, i)
    before = values(model)
    pairs = [(model, opt), copy.deepcopy((model, opt))]
    for (own, its), by in zip(pairs, (0.0, decay), strict=True):
        its.param_groups[0]["weight_decay"] = by
        give(own, its, 3)
    return before, pairs


@pytest.mark.parametrize("base", having("weight_decay", "LAMB"))
def test_weights_decay_apart_from_their_directions(base):
    """Decay of either kind, coupled or not, is lr · decay · p: no part of momenta or lengths.

    Of SGD it is what the momentum makes of it.
    """
    rate, decay = 1e-3, 0.1
    before, ((model, opt), (decayed, other)) = twins(base, rate, decay)
    if CASES[base][0] is optim.SGD:
        decay /= 1 - opt.param_groups[0]["momentum"]
    after = values(model)
    assert all(by.any() for by in difference(before, model).values())
    for name in before:
        p = decayed.get_parameter(name).detach()
        assert_near(p, after[name] - rate * decay * before[name], 1e-13, 1e-15)
    for name, entry in by_name(other, decayed).items():
        assert_same(entry, by_name(opt, model)[name])


@pytest.mark.parametrize("coupled", [False, True])
def test_lamb_decays_before_the_trust_ratio(coupled):
    rate, decay = 1e-3, 0.1
    before, ((model, _), (decayed, _)) = twins("LAMB", rate, decay, adam_w_mode=not coupled)
    for name, p in decayed.named_parameters():
        direction, old = (before[name] - values(model)[name]) / rate, before[name]
        if coupled:
            old = old * (1 - rate * decay)
        else:
            direction = direction + decay * old
        trust = old.norm() / direction.norm()
        assert_near(p.detach(), old - rate * trust * direction, 1e-9, 1e-12)


@pytest.mark.parametrize("base", having("lr", "SGD", "SGD with momentum", "ASGD"))
def test_each_layer_steps_at_its_groups_rate(base):
    """At rates at which no limit of a length is met; ASGD's own rate falls with lr."""
    start = 1e-3 * CASES[base][1]["lr"]

    def moved(other: float) -> dict[str, Tensor]:
        model = network()
        rates = zip((model[0], model[2]), (start, other), strict=True)
        groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in rates]
        cls, settings = CASES[base]
        opt = with_kfac(cls)(groups, model=model, **settings, **ANEW)
        before = values(model)
        give(model, opt, 0)
        return difference(before, model)

    one, ten = moved(start), moved(10 * start)
    for name, by in one.items():
        assert by.any()
        assert_near(ten[name], by * (1 if name.startswith("0") else 10), 1e-9, 1e-14)


@each("SGD", "Adam", "RAdam", of=having("maximize"))
def test_maximizing_is_minimizing_the_negated_loss(base, method):
    model, minimized = network(), network()
    opt, other = built(base, model, method, maximize=True), built(base, minimized, method)
    for i in range(4):
        opt.zero_grad()
        backward(model, i, lambda loss: -loss)
        opt.step()
        train(minimized, other, [i])
    assert_near(model, minimized, 1e-12, 1e-14)
    assert difference(values(network()), model)["0.weight"].abs().max() > 0
