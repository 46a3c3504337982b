"""Bases under directions: their momenta, rates, decay and checkpoints stay their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD, LAMB, KFACAdam, with_kfac
from tests.optim.bases import by_name, give, gradients
from tests.optim.test_conformance import CASES
from tests.support.training import (
    ANEW,
    assert_near,
    assert_same,
    backward,
    descend,
    difference,
    network,
    train,
    values,
)
from tests.support.watch import Body, seeded, stepped_blocks

optim = torch.optim
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
SMALL = 1e-4  # a rate at which no limit of a step's length is met
# Bases of each kind, and how they are built.
BASES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": SMALL}),
    "SGD with momentum": (optim.SGD, {"lr": SMALL, "momentum": 0.9}),
    "Adam": (optim.Adam, {"lr": SMALL}),
    "AdamW": (optim.AdamW, {"lr": SMALL, "weight_decay": 0.0}),
    "LAMB": (LAMB, {"lr": SMALL, "weight_decay": 0.0}),
    "RAdam": (optim.RAdam, {"lr": SMALL}),
    "RMSprop": (optim.RMSprop, {"lr": SMALL / 10}),
}
# Bases whose own step is taken back.
OTHERS = ["RAdam", "NAdam", "Adamax", "Adagrad", "RMSprop", "RMSprop with momentum", "Adadelta"]
OTHERS += ["amsgrad"]


def built(base: str, model: nn.Module, **changed: Any) -> Any:
    cls, settings = BASES[base]
    return with_kfac(cls)(model, **{**settings, **ANEW, **changed})


def matrix(parts: dict[str, Tensor], layer: str) -> Tensor:
    """A layer's weight with its bias as the last column."""
    return torch.cat([parts[f"{layer}.weight"], parts[f"{layer}.bias"][:, None]], 1)


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
@pytest.mark.parametrize(("cls", "settings"), MOMENTA, ids=str)
def test_moments_and_counts_are_the_bases(cls, settings, loaded):
    """Also of a plain checkpoint after so many steps. Weight decay is no part of them."""
    model, params = network(), [nn.Parameter(p.detach().clone()) for p in network().parameters()]
    opt = with_kfac(cls)(model, lr=0.01, weight_decay=0.1, **settings, **ANEW)
    plain = cls(params, lr=0.01, weight_decay=0.0, **settings)
    named, key = dict(zip(NAMES, params, strict=True)), "momentum_buffer"
    for i in range(loaded + 5):
        if i == loaded > 0:
            opt.load_state_dict(copy.deepcopy(plain.state_dict()))
        made = gradients(i) if i < loaded else give(model, opt, i)
        for p, g in zip(params, made.values(), strict=True):
            p.grad = g
        plain.step()
        if i < loaded:
            continue
        entries = by_name(opt, model)
        if cls is not optim.SGD:
            key, squares = "exp_avg", {n: plain.state[p]["exp_avg_sq"] for n, p in named.items()}
            for layer in ("0", "2"):
                found = entries[f"{layer}.weight"]["kfac_square_sum"]
                assert_near(found, matrix(squares, layer).sum().view(1), 1e-12, 1e-14)
        for n, p in named.items():
            assert_near(entries[n][key], plain.state[p][key], 1e-12, 1e-14)
            assert entries[n].get("step") == plain.state[p].get("step")
            assert "exp_avg_sq" not in entries[n]
        assert opt.param_groups[0].get("step") == plain.param_groups[0].get("step")


# ---- rates ----


def split(model: nn.Module, first: list[str], rate: float, other: float) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if n in first], "lr": rate},
        {"params": [p for n, p in named.items() if n not in first], "lr": other},
    ]


def at_rates(base: str, first: list[str], share: float) -> dict[str, Tensor]:
    """The first step with other parameters at a multiple of the rate of the ``first``."""
    cls, settings = BASES[base]
    settings = dict(settings)
    rate, model = settings.pop("lr"), network()
    groups = split(model, first, rate, share * rate)
    opt = with_kfac(cls)(groups, lr=1.0, model=model, **settings, **ANEW)
    before = values(model)
    give(model, opt, 0)
    return difference(before, model)


@pytest.mark.parametrize("base", BASES)
def test_a_bias_steps_at_its_own_rate(base):
    """It goes ten times as far along the layer's direction, whose length counts that in."""
    one, ten = (at_rates(base, ["0.weight", "2.weight"], share) for share in (1.0, 10.0))
    for layer in ("0", "2"):
        plain, other = matrix(one, layer), matrix(ten, layer)
        other[:, -1] /= 10
        shorter = other.norm() / plain.norm()
        assert_near(other, shorter * plain, 1e-9, 1e-14)
        assert 0.1 < shorter < 10


# ---- any other base ----


@pytest.mark.parametrize("case", OTHERS)
def test_another_bases_state_is_that_of_its_raw_steps(case):
    """It steps without decay; the step is taken back, and weights go along directions."""
    cls, settings = CASES[case]
    model, params = network(), [nn.Parameter(p.detach().clone()) for p in network().parameters()]
    opt = with_kfac(cls)(model, weight_decay=0.1, **settings, **ANEW)
    plain = cls(params, weight_decay=0.0, **settings)
    for i in range(5):
        before = values(model)
        with stepped_blocks(with_lengths=True) as seen:
            made = give(model, opt, i)
        for p, g in zip(params, made.values(), strict=True):
            p.grad = g
        plain.step()
        for p, entry in zip(params, by_name(opt, model).values(), strict=True):
            own = {key: value for key, value in entry.items() if not key.startswith("kfac")}
            assert_near(own, plain.state[p], 1e-9, 1e-12)
        assert opt.param_groups[0]["weight_decay"] == 0.1
        moved = difference(before, model)
        for layer, (_, (direction,)) in seen.items():
            decay = settings["lr"] * 0.1 * matrix(before, layer)
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


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_base_is_called_once_a_step(decay, tensor):
    """Its count in the group, its state and the parameters that it steps are as without K-FAC."""

    def normed() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
        return model.double()

    model, params = normed(), [nn.Parameter(p.detach().clone()) for p in normed().parameters()]
    opt = with_kfac(GroupCounts)(model, weight_decay=decay, tensor=tensor, **ANEW)
    plain = GroupCounts(params, weight_decay=0.0, tensor=tensor)
    norm = [p for name, p in zip(model.state_dict(), params, strict=True) if name.startswith("1.")]
    plain.param_groups[0]["params"] = [p for p in params if all(p is not x for x in norm)]
    plain.add_param_group({"params": norm, "weight_decay": decay})
    hooks = []
    opt.register_step_post_hook(lambda *_: hooks.append(1))
    for i in range(4):
        torch.manual_seed(i)
        opt.zero_grad()
        model(torch.randn(5, 4).double()).square().mean().backward()
        for p, own in zip(params, model.parameters(), strict=True):
            p.grad = own.grad.clone()
        opt.step()
        plain.step()
        (group,) = opt.param_groups
        assert opt.calls == group["step"] == plain.param_groups[0]["step"] == len(hooks) == i + 1
        assert group["weight_decay"] == decay and len(group["params"]) == len(params)
        for p, own in zip(params, model.parameters(), strict=True):
            entry = {k: v for k, v in opt.state[own].items() if not k.startswith("kfac")}
            assert_near(entry, plain.state[p], 1e-12, 1e-14)
        assert_near(list(model[1].parameters()), norm, 1e-12, 1e-14)
    assert opt.norms == pytest.approx(plain.norms)


def test_hooks_fire_as_often_as_without_kfac():
    """A base that calls its parent's step has the hooks of that step, too."""

    class Child(optim.RAdam):
        def step(self, closure=None):
            return super().step(closure)

    optim.RAdam(network().parameters())  # which wraps its step for hooks
    fired = []
    for cls in (Child, with_kfac(Child)):
        model, hooks = network(), []
        opt = cls(model.parameters() if cls is Child else model, lr=SMALL)
        opt.register_step_post_hook(lambda *_, hooks=hooks: hooks.append(1))
        train(model, opt, range(3))
        fired.append(len(hooks))
    assert fired[0] == fired[1]


class FindsItsRate(optim.Optimizer):
    """A rate of its own in each step, as transformers' Adafactor has at its defaults."""

    def __init__(self, params, lr=None, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    size = p.square().mean().sqrt().clamp(min=1e-3)
                    p.sub_(p.grad / p.grad.square().mean().sqrt() * size * 0.01)


def adafactor() -> type[optim.Optimizer]:
    transformers: Any = pytest.importorskip("transformers")
    return transformers.Adafactor


@pytest.mark.parametrize("make", [lambda: FindsItsRate, adafactor], ids=["a user's", "Adafactor"])
@pytest.mark.parametrize("method", ["polar", "eigen"])
def test_a_base_without_a_rate_trains(make, method):
    """By the fall of the step that is taken back."""
    model = network()
    opt = with_kfac(make())(model, compute_method=method)
    before = backward(model, 0)
    train(model, opt, [0] * 50)
    assert backward(model, 0) < 0.8 * before
    assert opt.param_groups[0]["lr"] is None


def test_the_decay_of_a_base_without_a_rate_is_refused():
    with pytest.raises(ValueError, match=r"Invalid lr: None with weight_decay=0.1; .*give lr"):
        with_kfac(FindsItsRate)(network(), weight_decay=0.1)
    model = network()
    opt = with_kfac(FindsItsRate)([model[0].weight], model=model)
    with pytest.raises(ValueError, match="Invalid lr: None with weight_decay"):
        opt.add_param_group({"params": [model[2].weight], "weight_decay": 0.1})
    assert len(opt.param_groups) == 1


# ---- parameters that come and go ----


@pytest.mark.parametrize("case", ["SGD with momentum", "Adam", "AdamW", "LAMB"])
def test_a_parameter_that_goes_back_to_the_base_begins_anew(case):
    """A layer that was frozen in part has no state before its next statistics."""
    model = network()
    opt = built(case, model)
    train(model, opt, range(2))
    key = "momentum_buffer" if "SGD" in case else "exp_avg"
    assert key in opt.state[model[0].bias] and "exp_avg_sq" not in opt.state[model[0].bias]
    model[0].weight.requires_grad_(False)
    alone = nn.Parameter(model[0].bias.detach().clone())
    cls, settings = BASES[case]
    plain = cls([alone], **{**settings, **({"max_grad_norm": None} if cls is LAMB else {})})
    if cls is LAMB:
        opt.param_groups[0]["max_grad_norm"] = None
        plain.param_groups[0]["step"] = 2  # which a group has in common
    frozen, kept = model[0].weight.detach().clone(), copy.deepcopy(opt.state[model[0].weight])
    for i in range(2, 4):
        with opt.preconditioner.paused():
            train(model, opt, [i])
        alone.grad = model[0].bias.grad.clone()
        plain.step()
        assert_near(model[0].bias.detach(), alone.detach(), 1e-12, 1e-14)
    entry = {k: v for k, v in opt.state[model[0].bias].items() if not k.startswith("kfac")}
    assert_near(entry, plain.state[alone], 1e-12, 1e-14)
    assert_same(model[0].weight.detach(), frozen)
    assert_same(opt.state[model[0].weight][key], kept[key])
    train(model, opt, range(4, 7))  # refreshed, K-FAC steps it again
    assert "exp_avg_sq" not in opt.state[model[0].bias]
    model[0].weight.requires_grad_(True)
    train(model, opt, range(7, 12))
    assert not torch.equal(model[0].weight, frozen)
    assert all(p.isfinite().all() for p in model.parameters())


def test_an_unfrozen_weight_begins_its_momentum():
    model = network()
    model[0].weight.requires_grad_(False)
    opt = built("Adam", model)
    train(model, opt, range(3))
    assert "exp_avg" not in opt.state[model[0].weight]
    model[0].weight.requires_grad_(True)
    opt.zero_grad()
    made = give(model, opt, 3)
    entry = opt.state[model[0].weight]
    assert entry["step"] == 1 and opt.state[model[0].bias]["step"] == 4
    assert_near(entry["exp_avg"], 0.1 * made["0.weight"])


@pytest.mark.parametrize("base", ["Adam", "AdamW"])
def test_a_layer_that_was_frozen_in_part_steps_no_further(base):
    """Its sum of squares begins anew, and counts for as many steps as the base has counted."""
    model = network()
    opt = built(base, model)
    train(model, opt, [0] * 200)
    before = values(model)
    train(model, opt, [0])
    usual = difference(before, model)["0.bias"].norm()
    model[0].weight.requires_grad_(False)
    before = values(model)
    train(model, opt, [0])
    assert 0 < difference(before, model)["0.bias"].norm() < 3 * usual
    model[0].weight.requires_grad_(True)
    before = values(model)
    train(model, opt, [0])
    assert 0 < difference(before, model)["0.bias"].norm() < 3 * usual


def of_two_heads() -> nn.Module:
    """Return two heads, of which a pass uses those that are named."""

    def use(m: nn.Module, x: Tensor, names: str) -> Tensor:
        return torch.stack([m.heads[name](x).square().mean() for name in names]).sum()

    return Body(use, heads=nn.ModuleDict({name: nn.Linear(4, 3) for name in "ab"}))


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
def test_a_head_counts_its_own_steps_alone(cls):
    """Where it rests while the other head steps, it goes on as if there was no other."""
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9)}
    model, alone = seeded(of_two_heads), seeded(of_two_heads)
    opt, other = (with_kfac(cls)(x, **settings, **ANEW) for x in (model, alone))
    plain = cls([nn.Parameter(p.detach().clone()) for p in model.parameters()], **settings)
    for i, names in enumerate(["ab", "ab", "a", "a", "a", "a", "b", "a", "b", "ab", "b", "b"]):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).double()
        for net, its, used in ((model, opt, names), (alone, other, names.replace("a", ""))):
            if used:
                its.zero_grad()
                net(x, used).backward()
                its.step()
        for p, q in zip(model.parameters(), plain.param_groups[0]["params"], strict=True):
            q.grad = p.grad
        plain.step()
        for p, q in zip(model.parameters(), plain.param_groups[0]["params"], strict=True):
            assert opt.state[p].get("step") == plain.state[q].get("step")
        assert_near(model.heads["b"], alone.heads["b"], 1e-12, 1e-14)


@pytest.mark.parametrize("base", ["RAdam", "RMSprop"])
@pytest.mark.parametrize("still", ["weight", "bias"])
def test_a_parameter_at_rate_zero_rests(base, still):
    """To first order the loss falls as by the base's own step of the other parameters."""
    cls, settings = BASES[base]
    model, names = network(), [n for n in NAMES if n.endswith(still)]
    groups = split(model, names, 0.0, settings["lr"])
    opt = with_kfac(cls)(groups, model=model, **{**settings, **ANEW})
    params = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    plain, before = cls(params.values(), **settings), values(model)
    made = give(model, opt, 0)
    for n, p in params.items():
        p.grad = made[n]
    plain.step()
    moved = difference(before, model)
    for n in NAMES:
        if n in names:
            assert torch.equal(moved[n], torch.zeros_like(moved[n]))
        else:
            fall = ((before[n] - params[n].detach()) * made[n]).sum()
            assert fall > 0
            assert_near((moved[n] * made[n]).sum(), fall, 1e-9, 1e-14)


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


def test_groups_without_covered_parameters_and_steps_without_gradients():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    norms = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": [model[0].weight, model[2].weight]}, {"params": norms}]
    opt = KFACAdam(groups, lr=0.01, model=model)
    model(torch.randn(5, 3)).square().mean().backward()
    opt.step()
    counts = {name: int(opt.state[p]["step"]) for name, p in model.named_parameters()}
    opt.zero_grad()
    opt.step()
    assert set(counts.values()) == {1}
    assert {name: int(opt.state[p]["step"]) for name, p in model.named_parameters()} == counts
