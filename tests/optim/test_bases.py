"""What K-FAC over any base owes its users: each class × the contract of torch.optim."""

from __future__ import annotations

import copy
import pickle
import subprocess
from collections.abc import Iterable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from kaisa_optim import KFACLAMB, KFACSGD, LAMB, KFACAdam, with_kfac
from tests.optim.bases import (
    ABSTRACT,
    BASES,
    CASES,
    LARS,
    FindsItsRate,
    assert_equal_runs,
    built,
    entries,
    give,
    matrix,
    name_of,
    pair,
    pickled,
    plain,
)
from tests.support.training import (
    ANEW,
    EVERY_STEP,
    METHODS,
    WITHOUT_PACKAGE,
    Probe,
    assert_near,
    assert_same,
    backward,
    batch,
    descend,
    difference,
    factors,
    network,
    python,
    train,
    values,
)
from tests.support.watch import Body, normal, seeded, stepped_blocks

ROOT = Path(__file__).parents[2]
SINGLE = torch.float32  # a load casts some counts of NAdam and ASGD to the parameters' dtype
SMALL = 1e-4  # a rate at which no limit of a step's length is met
every_base = pytest.mark.parametrize("base", CASES)


def having(name: str, *but: str) -> list[str]:
    """Return the bases that have an argument of this name."""
    return [x for x in CASES if name in signature(CASES[x][0]).parameters and x not in but]


def each(*with_eigen: str, of: Iterable[str] = CASES) -> Any:
    """Parametrize over bases under directions, and over some under the papers' gradients."""
    pairs = [(base, "polar") for base in of] + [(base, "eigen") for base in with_eigen]
    return pytest.mark.parametrize(("base", "method"), pairs)


def test_every_base_is_here():
    assert {cls for cls, _ in CASES.values()} == set(BASES)


# ---- signatures, and what groups show ----


@pytest.mark.parametrize("base", [*BASES, *ABSTRACT], ids=name_of)
def test_signature_is_the_bases_then_kfacs_by_keyword(base):
    cls = with_kfac(base)
    assert with_kfac(base) is cls and issubclass(cls, base)
    assert cls.__name__ == f"KFAC{base.__name__}"
    ours, theirs = (list(signature(x).parameters.values()) for x in (cls, base))
    first = [(p.name, p.kind, p.default) for p in theirs if p.kind is not Parameter.VAR_KEYWORD]
    assert [(p.name, p.kind, p.default) for p in ours[: len(first)]] == first
    added = {p.name: p.kind for p in ours[len(first) :]}
    assert set(added.values()) == {Parameter.KEYWORD_ONLY}
    assert {"model", "damping", "factor_decay", "inv_update_steps", "assignment"} <= added.keys()
    assert "nn.Module" in ours[0].annotation


@pytest.mark.parametrize(
    ("cls", "base"), [(KFACSGD, optim.SGD), (KFACAdam, optim.Adam), (KFACLAMB, LAMB)]
)
def test_family_members_are_their_base_with_its_defaults(cls, base):
    opt, own = cls(network()), base(network().parameters())
    assert isinstance(opt, base) and with_kfac(base) is cls
    assert opt.defaults == own.defaults
    (group,), (of_base,) = opt.param_groups, own.param_groups
    assert group.keys() - of_base.keys() == {"damping", "factor_decay"}
    assert {key: group[key] for key in of_base if key != "params"}.items() <= of_base.items()


def test_base_arguments_by_position():
    (group,) = KFACSGD(network(), 0.5, 0.9, 0.1, 1e-4).param_groups
    expected = {"lr": 0.5, "momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-4}
    assert expected.items() <= group.items()


def test_groups_show_no_setting_that_the_method_does_not_use():
    """Neither do they after another method's checkpoint was loaded."""
    polar, eigen = (KFACSGD(network(), lr=0.1, compute_method=m) for m in ("polar", "eigen"))
    states = polar.state_dict(), eigen.state_dict()
    for _ in range(2):
        assert "kl_clip_lr: 0.1" in repr(eigen) and "kl_clip" not in repr(polar)
        eigen.load_state_dict(states[0])
        polar.load_state_dict(states[1])


SETTINGS: list[tuple[Any, dict[str, Any]]] = [
    *((base, {}) for base in BASES),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (optim.SGD, {"lr": torch.tensor(0.1)}),
    (optim.Adam, {"lr": 0.1, "foreach": True, "amsgrad": True}),
    (optim.Adam, {"lr": torch.tensor(0.1), "foreach": False}),
    (optim.AdamW, {"lr": 0.1, "fused": True, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("base", "settings"), SETTINGS, ids=name_of)
def test_steps_are_the_bases_own_on_preconditioned_gradients(base, settings):
    """Three steps, so that the base's state takes part; it stays in the base's own format."""
    model, twin = network(), network()
    opt, own = with_kfac(base)(model, **EVERY_STEP, **settings), base(twin.parameters(), **settings)
    probe, start = Probe(twin), values(model)
    for i in range(3):
        train(model, opt, [i])
        v = probe.step(twin, i)
        for name, p in twin.named_parameters():
            p.grad = v[name]
        own.step()
        assert_near(model, twin, rtol=1e-6)
    assert any(change.abs().max() > 0 for change in difference(start, model).values())
    assert_near(entries(opt, model), entries(own, twin), rtol=1e-5)


# ---- momenta are the base's own ----


BETAS: dict[str, Any] = {"betas": (0.8, 0.99)}
MOMENTA: list[tuple[type[Any], dict[str, Any]]] = [
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"momentum": 0.8, "dampening": 0.3}),
    (optim.SGD, {"momentum": 0.8, "dampening": 1.0, "maximize": True}),
    *(
        (cls, {**BETAS, "maximize": up})
        for cls in (optim.Adam, optim.AdamW)
        for up in (False, True)
    ),
    *((LAMB, {**BETAS, "max_grad_norm": None, "maximize": up}) for up in (False, True)),
    (LAMB, {**BETAS, "max_grad_norm": 0.5}),  # gradients are limited first
]


@pytest.mark.filterwarnings("ignore:the checkpoint has no K-FAC factors")
@pytest.mark.parametrize("loaded", [0, 3])
@pytest.mark.parametrize(("cls", "settings"), MOMENTA, ids=name_of)
def test_moments_and_counts_are_the_bases(cls, settings, loaded):
    """Also of a plain checkpoint after so many steps. Weight decay is no part of them."""
    model, twin = network(), network()
    opt = with_kfac(cls)(model, lr=0.01, weight_decay=0.1, **settings, **ANEW)
    own = cls(twin.parameters(), lr=0.01, weight_decay=0.0, **settings)
    for i in range(loaded):
        give(twin, own, i)
    if loaded:
        opt.load_state_dict(copy.deepcopy(own.state_dict()))
    for i in range(loaded, loaded + 5):
        give(model, opt, i)
        give(twin, own, i)
        ours, theirs = entries(opt, model), entries(own, twin)
        if cls is not optim.SGD:
            squares = {name: entry.pop("exp_avg_sq") for name, entry in theirs.items()}
            for layer in ("0", "2"):
                found = opt.state[model.get_parameter(f"{layer}.weight")]["kfac_square_sum"]
                assert_near(found, matrix(squares, layer).sum().view(1), 1e-12, 1e-14)
        assert_near(ours, theirs, 1e-12, 1e-14)
        assert opt.param_groups[0].get("step") == own.param_groups[0].get("step")


# Bases whose own step is taken back.
OTHERS = ["RAdam", "NAdam", "Adamax", "Adagrad", "RMSprop", "RMSprop with momentum", "Adadelta"]
OTHERS += ["amsgrad"]


@pytest.mark.parametrize("case", OTHERS)
def test_another_bases_state_is_that_of_its_raw_steps(case):
    """It steps without decay; the step is taken back, and weights go along directions."""
    model, twin = network(), network()
    opt, own = built(case, model, weight_decay=0.1), plain(case, twin, weight_decay=0.0)
    for i in range(5):
        before = values(model)
        with stepped_blocks(with_lengths=True) as seen:
            give(model, opt, i)
        give(twin, own, i)
        assert_near(entries(opt, model), entries(own, twin), 1e-9, 1e-12)
        assert opt.param_groups[0]["weight_decay"] == 0.1
        moved = difference(before, model)
        for layer, (_, (direction,)) in seen.items():
            decay = CASES[case][1]["lr"] * 0.1 * matrix(before, layer)
            assert direction.abs().max() > 0 or case == "RAdam"
            assert_near(matrix(moved, layer), direction + decay, 1e-9, 1e-12)


class GroupCounts(optim.Optimizer):
    """Adam as timm and pytorch_optimizer write it: the group counts, and one norm clips all."""

    def __init__(self, params, lr=0.01, weight_decay=0.1, tensor=False):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "tensor": tensor})
        self.calls, self.norms = 0, []

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.norms.append(torch.stack([g.norm() for g in gradients]).norm().item())
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = torch.tensor(0.0) if group["tensor"] else 0
            group["step"] += 1  # in place, if it is a tensor
            rest1, rest2 = (1 - beta ** int(group["step"]) for beta in (0.9, 0.999))
            for p in group["params"]:
                if p.grad is None:
                    continue
                entry = self.state[p]
                if not entry:
                    entry["exp_avg"], entry["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                entry["exp_avg"].lerp_(p.grad, 0.1)
                entry["exp_avg_sq"].lerp_(p.grad.square(), 0.001)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                deviation = (entry["exp_avg_sq"] / rest2).sqrt_().add_(1e-8)
                p.addcdiv_(entry["exp_avg"], deviation, value=-group["lr"] / rest1)


def normed() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    return model.double()


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_base_is_called_once_a_step(decay, tensor):
    """Its count in the group, its state and the parameters that it steps are as without K-FAC."""
    model, twin = normed(), normed()
    opt = with_kfac(GroupCounts)(model, weight_decay=decay, tensor=tensor, **ANEW)
    groups = [{"params": [*twin[0].parameters(), *twin[3].parameters()], "weight_decay": 0.0}]
    groups.append({"params": twin[1].parameters(), "weight_decay": decay})
    own = GroupCounts(groups, tensor=tensor)
    hooks = []
    opt.register_step_post_hook(lambda *_: hooks.append(1))
    for i in range(4):
        opt.zero_grad()
        model(normal(5, 4, seed=i)).square().mean().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        opt.step()
        own.step()
        (group,) = opt.param_groups
        assert opt.calls == group["step"] == own.param_groups[0]["step"] == len(hooks) == i + 1
        assert group["weight_decay"] == decay and len(group["params"]) == 6
        assert_near(entries(opt, model), entries(own, twin), 1e-12, 1e-14)
        assert_near(model[1], twin[1], 1e-12, 1e-14)
    assert opt.norms == pytest.approx(own.norms)


# Bases that find a rate of their own.
RATELESS: dict[str, Any] = {
    "a user's": lambda: FindsItsRate,
    "Adafactor of transformers": lambda: pytest.importorskip("transformers").Adafactor,
}


@each(*RATELESS, of=[*CASES, *RATELESS])
def test_steps_lower_the_loss(base, method):
    """Those of bases without a rate by the fall of the step that is taken back."""
    model, rateless = network(), base in RATELESS
    if rateless:
        opt = with_kfac(RATELESS[base]())(model, compute_method=method)
    else:
        opt = built(base, model)
    first = backward(model, 0)
    train(model, opt, [0] * 50)
    assert backward(model, 0) < (0.8 if rateless else 0.6) * first
    assert (opt.param_groups[0]["lr"] is None) == rateless


# ---- states ----


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


# ---- copies ----


class Mine(with_kfac(optim.RAdam)):
    """A user's subclass of the family."""


CLASSES = [KFACSGD, KFACAdam, KFACLAMB, Mine]
CLASSES += [with_kfac(base) for base in (optim.RAdam, LARS, *ABSTRACT)]
STAGGERED = {"factor_update_steps": 2, "inv_update_steps": 3}


@pytest.mark.parametrize(
    ("cls", "method", "taken"),
    [
        *((KFACSGD, "polar", taken) for taken in (0, 1)),
        *((cls, method, 4) for cls in CLASSES for method in ("polar", "eigen")),
    ],
)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_trains_on_the_same_path(duplicate, cls, method, taken):
    """Also over a base that derives from ABC."""
    model, opt = pair(cls, lr=0.01, compute_method=method, **STAGGERED)
    train(model, opt, range(taken))
    twin_model, twin = duplicate((model, opt))
    assert type(twin) is cls
    assert_same(twin.state_dict(), opt.state_dict())
    at_copy = values(model)
    train(twin_model, twin, range(taken, taken + 4))
    assert_same(values(model), at_copy)
    assert all(moved.any() for moved in difference(at_copy, twin_model).values())
    train(model, opt, range(taken, taken + 4))
    assert_same(twin_model, model)
    assert_same(factors(twin), factors(opt))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_alone_brings_its_model_and_what_was_set_since(duplicate, method):
    model, opt = pair(KFACSGD, lr=0.1, damping=0.1, factor_decay=0.5, compute_method=method)
    settings: dict[str, Any] = {**STAGGERED, "statistics_fraction": 0.5}
    if method == "eigen":
        settings |= {"kl_clip": 1e-5, "loss_terms": 4, "grad_scaler": 2.0}
    for name, value in settings.items():
        setattr(opt.preconditioner, name, value)
    opt.param_groups[0]["damping"] = 0.2
    twin = duplicate(opt)
    for name, value in settings.items():
        assert getattr(twin.preconditioner, name) == value
    assert twin.preconditioner.model is not model
    assert_equal_runs(range(4), (model, opt), (twin.preconditioner.model, twin))


def test_a_dynamic_class_is_unpickled_in_a_new_process(tmp_path):
    model, opt = pair(with_kfac(optim.RAdam), lr=0.01, **STAGGERED)
    train(model, opt, range(3))
    (tmp_path / "pair").write_bytes(pickle.dumps((model, opt)))
    script = f"""
import pickle, sys, torch
sys.path[:0] = [{str(ROOT)!r}]
from tests.support.training import train
with open({str(tmp_path / "pair")!r}, "rb") as file:
    model, opt = pickle.load(file)
train(model, opt, range(3, 6))
assert not {{"apex", "amp_C"}} & sys.modules.keys()
torch.save(model.state_dict(), {str(tmp_path / "end")!r})
"""
    done = subprocess.run(python("-c", script), check=True, capture_output=True)
    assert done.stdout == b""  # the import prints nothing
    train(model, opt, range(3, 6))
    assert_same(torch.load(tmp_path / "end"), dict(model.state_dict()))


def test_a_saved_model_loads_without_the_package(tmp_path):
    model, opt = pair(KFACSGD, lr=0.1)
    train(model, opt, range(2))
    x = batch(0)[0]
    torch.save(model, tmp_path / "model")
    torch.save(x, tmp_path / "x")
    script = f"""{WITHOUT_PACKAGE}
import torch
model = torch.load("model", weights_only=False)
y = model(torch.load("x"))
y.sum().backward()
torch.save([y.detach(), model[0].weight.grad], "y")
"""
    subprocess.run(python("-I", "-c", script), check=True, cwd=tmp_path)
    y = model(x)
    weight_gradient = torch.autograd.grad(y.sum(), model[0].weight)[0]
    assert_same(torch.load(tmp_path / "y"), [y.detach(), weight_gradient])


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
    model, other = network(), network()
    try:
        plain(base, model, lr=rate)
    except ValueError as refused:
        with pytest.raises(ValueError) as found:
            built(base, other, lr=rate)
        assert str(found.value) == str(refused)
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


# ---- decay and rates ----


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
    assert_near(decayed, {n: after[n] - rate * decay * p for n, p in before.items()}, 1e-13, 1e-15)
    assert_same(other.state_dict()["state"], opt.state_dict()["state"])


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


def at_rates(base: str, first: list[str], share: float) -> dict[str, Tensor]:
    """The first step with other parameters at a multiple of the rate of the ``first``.

    No limit of a step's length is met at this rate; ASGD's own rate falls with lr.
    """
    cls, settings = CASES[base]
    rate, model = 1e-3 * settings["lr"], network()
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in first], "lr": rate},
        {"params": [p for name, p in named.items() if name not in first], "lr": share * rate},
    ]
    opt = with_kfac(cls)(groups, model=model, **settings, **ANEW)
    before = values(model)
    give(model, opt, 0)
    return difference(before, model)


@pytest.mark.parametrize("base", having("lr", "SGD", "SGD with momentum", "ASGD"))
def test_each_layer_steps_at_its_groups_rate(base):
    one, ten = (at_rates(base, ["0.weight", "0.bias"], share) for share in (1, 10))
    for name, by in one.items():
        assert by.any()
        assert_near(ten[name], by * (1 if name.startswith("0") else 10), 1e-9, 1e-14)


@pytest.mark.parametrize(
    "base", ["SGD", "SGD with momentum", "Adam", "AdamW", "LAMB", "RAdam", "RMSprop"]
)
def test_a_bias_steps_at_its_own_rate(base):
    """It goes ten times as far along the layer's direction, whose length counts that in."""
    one, ten = (at_rates(base, ["0.weight", "2.weight"], share) for share in (1, 10))
    for layer in ("0", "2"):
        as_one, other = matrix(one, layer), matrix(ten, layer)
        other[:, -1] /= 10
        shorter = other.norm() / as_one.norm()
        assert_near(other, shorter * as_one, 1e-9, 1e-14)
        assert 0.1 < shorter < 10


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dampening": 0.5},  # which acts only beside a momentum
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
    ],
    ids=str,
)
def test_weights_decay_as_under_sgd(settings):
    """SGD's decay goes through its momentum. Norms are stepped by the base."""
    ends = []
    for cls in (optim.SGD, KFACSGD):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()
        first = model if cls is KFACSGD else model.parameters()
        opt = cls(first, lr=0.1, weight_decay=5e-4, **settings)
        before = values(model)
        for _ in range(200):
            descend(opt, (model(torch.ones(2, 4).double()) * 0).sum())
        ends.append([p.norm() / before[n].norm() for n, p in model.named_parameters() if p.any()])
    assert_near(*map(torch.stack, ends), 1e-2, 0)
    assert len(ends[0]) == 3 and max(ends[0]) < 0.995


def test_decay_without_a_limit_is_refused():
    model = network()
    opt = KFACSGD(model, lr=0.1, momentum=1.0, weight_decay=0.1)
    before = values(model)
    backward(model, 0)
    with pytest.raises(ValueError, match=r"Invalid momentum: 1\.0; .* below 1"):
        opt.step()
    assert_same(values(model), before)
    opt.param_groups[0]["weight_decay"] = 0.0
    opt.step()


# ---- parameters that come and go ----


@pytest.mark.parametrize("case", ["SGD with momentum", "Adam", "AdamW", "LAMB"])
def test_a_parameter_that_goes_back_to_the_base_begins_anew(case):
    """A layer that was frozen in part has no state before its next statistics."""
    model = network()
    changed = {"lr": SMALL, **({"max_grad_norm": None} if case == "LAMB" else {})}
    opt = built(case, model, **changed)
    weight, bias = model[0].parameters()
    train(model, opt, range(2))
    key = "momentum_buffer" if "SGD" in case else "exp_avg"
    assert key in opt.state[bias] and "exp_avg_sq" not in opt.state[bias]
    weight.requires_grad_(False)
    twin = network()
    twin.load_state_dict(model.state_dict())
    own = plain(case, twin, **changed)
    if case == "LAMB":
        own.param_groups[0]["step"] = 2  # which a group has in common
    frozen, momentum = weight.detach().clone(), opt.state[weight][key].clone()
    for i in range(2, 4):
        with opt.preconditioner.paused():
            train(model, opt, [i])
        twin[0].bias.grad = bias.grad.clone()
        own.step()
        assert_near(bias, twin[0].bias, 1e-12, 1e-14)
    assert_near(entries(opt, model)["0.bias"], own.state[twin[0].bias], 1e-12, 1e-14)
    assert_same((weight.detach(), opt.state[weight][key]), (frozen, momentum))
    train(model, opt, range(4, 7))  # refreshed, K-FAC steps it again
    assert "exp_avg_sq" not in opt.state[bias]
    weight.requires_grad_(True)
    train(model, opt, range(7, 12))
    assert not torch.equal(weight, frozen)
    assert all(p.isfinite().all() for p in model.parameters())


def test_an_unfrozen_weight_begins_its_momentum():
    model = network()
    weight, bias = model[0].parameters()
    weight.requires_grad_(False)
    opt = built("Adam", model)
    train(model, opt, range(3))
    assert "exp_avg" not in opt.state[weight]
    weight.requires_grad_(True)
    made = give(model, opt, 3)
    assert opt.state[weight]["step"] == 1 and opt.state[bias]["step"] == 4
    assert_near(opt.state[weight]["exp_avg"], 0.1 * made["0.weight"])


@pytest.mark.parametrize("base", ["Adam", "AdamW"])
def test_a_layer_that_was_frozen_in_part_steps_no_further(base):
    """Its sum of squares begins anew, and counts for as many steps as the base has counted."""
    model = network()
    opt = built(base, model, lr=SMALL)
    train(model, opt, [0] * 200)
    steps = []
    for trained in (True, False, True):
        model[0].weight.requires_grad_(trained)
        before = values(model)
        train(model, opt, [0])
        steps.append(difference(before, model)["0.bias"].norm())
    assert 0 < steps[1] < 3 * steps[0] and 0 < steps[2] < 3 * steps[0]


def of_two_heads() -> nn.Module:
    """Return two heads, of which a pass uses those that are named."""

    def use(m: nn.Module, x: Tensor, names: str) -> Tensor:
        return torch.stack([m.heads[name](x).square().mean() for name in names]).sum()

    return Body(use, heads=nn.ModuleDict({name: nn.Linear(4, 3) for name in "ab"}))


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
def test_a_head_counts_its_own_steps_alone(cls):
    """Where it rests while the other head steps, it goes on as if there was no other."""
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9)}
    model, alone, twin = (seeded(of_two_heads) for _ in range(3))
    opt, other = (with_kfac(cls)(x, **settings, **ANEW) for x in (model, alone))
    own = cls(twin.parameters(), **settings)
    for i, names in enumerate(["ab", "ab", "a", "a", "a", "a", "b", "a", "b", "ab", "b", "b"]):
        x = normal(8, 4, seed=i)
        for net, its, used in ((model, opt, names), (alone, other, names.replace("a", ""))):
            if used:
                its.zero_grad()
                net(x, used).backward()
                its.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad
        own.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert opt.state[p].get("step") == own.state[q].get("step")
        assert_near(model.heads["b"], alone.heads["b"], 1e-12, 1e-14)


@pytest.mark.parametrize("base", ["RAdam", "RMSprop"])
@pytest.mark.parametrize("still", ["weight", "bias"])
def test_a_parameter_at_rate_zero_rests(base, still):
    """To first order the loss falls as by the base's own step of the other parameters."""
    cls, settings = CASES[base]
    settings = {**settings, "lr": SMALL / 10}
    model, twin = network(), network()
    resting = {name: p for name, p in model.named_parameters() if name.endswith(still)}
    moving = [p for name, p in model.named_parameters() if name not in resting]
    groups = [{"params": resting.values(), "lr": 0.0}, {"params": moving}]
    opt = with_kfac(cls)(groups, model=model, **settings, **ANEW)
    own = cls(twin.parameters(), **settings)
    before = values(model)
    made = give(model, opt, 0)
    give(twin, own, 0)
    moved, plainly = difference(before, model), difference(before, twin)
    for name, by in moved.items():
        if name in resting:
            assert not by.any()
        else:
            fall = (plainly[name] * made[name]).sum()
            assert fall > 0
            assert_near((by * made[name]).sum(), fall, 1e-9, 1e-14)


def test_groups_without_covered_parameters_and_steps_without_gradients():
    model = normed()
    weights = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    opt = KFACAdam([{"params": weights}, {"params": norms}], lr=0.01, model=model)
    model(normal(5, 4)).square().mean().backward()
    for _ in range(2):
        opt.step()
        assert [int(opt.state[p]["step"]) for p in model.parameters()] == [1] * 6
        opt.zero_grad()
