"""What a real torch.optim optimizer owes: its signature, its base's arithmetic, hooks, copies."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import pydoc
import re
import subprocess
import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from kaisa_optim import KFACLAMB, KFACSGD, LAMB, KFACAdam, KFACMuon, Muon, with_kfac
from kaisa_optim.optim.mixin import KFACMixin
from tests.support.training import (
    EVERY_STEP,
    WITHOUT_PACKAGE,
    Probe,
    assert_near,
    assert_same,
    backward,
    batch,
    classes_in,
    difference,
    factors,
    network,
    python,
    train,
    values,
)

ROOT = Path(__file__).parents[2]
REFUSED = {"LBFGS", "SparseAdam"}
TORCH_BASES = [c for c in classes_in(torch.optim, Optimizer) if c.__name__ not in REFUSED]
FAMILY = [
    (KFACSGD, torch.optim.SGD),
    (KFACAdam, torch.optim.Adam),
    (KFACLAMB, LAMB),
    (KFACMuon, Muon),
]


class LARS(Optimizer):
    """Layer-wise adaptive rates (You et al., 2017), as a user would write them."""

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=1e-4, trust=0.02):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["buffer"] = torch.zeros_like(p)
                decayed = p.grad + group["weight_decay"] * p
                rate = group["trust"] * p.norm() / (decayed.norm() + 1e-12)
                state["buffer"].mul_(group["momentum"]).add_(decayed * rate)
                p.sub_(group["lr"] * state["buffer"])
        return loss


BASES = [*TORCH_BASES, LAMB, LARS]


def trained_by(base: type) -> list[str]:
    """Muon takes matrices only."""
    names = [name for name, _ in network().named_parameters()]
    return [n for n in names if n.endswith("weight")] if base.__name__ == "Muon" else names


def pick(model: nn.Module, names: list[str]) -> list[nn.Parameter]:
    own = dict(model.named_parameters())
    return [own[name] for name in names]


class ByHand:
    """The base optimizer on its own copy, fed with preconditioned gradients from a probe."""

    def __init__(self, base: type, model: nn.Module, *args: Any, **kwargs: Any):
        self.model = copy.deepcopy(model)
        self.names = trained_by(base)
        self.opt = base(pick(self.model, self.names), *args, **kwargs)
        self.probe = Probe(model, self.names)

    def step(self, i: int, sign: float = 1.0) -> None:
        scale = (lambda loss: -loss) if sign < 0 else None
        v = self.probe.step(self.model, i, scale)
        for name, p in self.model.named_parameters():
            p.grad = v[name].clone() if name in self.names else None
        self.opt.step()


def both(base: type, *args: Any, **kwargs: Any) -> tuple[nn.Module, Any, ByHand]:
    """A K-FAC optimizer on a model, and its base by hand on an equal one."""
    model = network()
    hand = ByHand(base, model, *args, **kwargs)
    params = pick(model, trained_by(base))
    return model, with_kfac(base)(params, *args, model=model, **EVERY_STEP, **kwargs), hand


# ---- signatures and construction ----


@pytest.mark.parametrize("base", BASES, ids=lambda c: c.__name__)
def test_signature_is_the_bases_then_kfacs_by_keyword(base):
    theirs = list(inspect.signature(base).parameters.values())
    ours = list(inspect.signature(with_kfac(base)).parameters.values())
    first = [p for p in theirs if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert [(p.name, p.kind, p.default) for p in ours[: len(first)]] == [
        (p.name, p.kind, p.default) for p in first
    ]
    added = {p.name: p for p in ours[len(first) :]}
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in added.values())
    assert {"model", "damping", "factor_decay", "kl_clip", "kl_clip_lr"} <= added.keys()
    assert {"factor_update_steps", "inv_update_steps", "compute_method"} <= added.keys()
    assert "nn.Module" in ours[0].annotation


def test_the_docstring_says_what_every_option_means():
    text = inspect.getdoc(KFACSGD.__init__)
    lines = re.findall(r"^    ((?:\w+, )*\w+): \S", text, flags=re.M)
    said = [name for names in lines for name in names.split(", ")]
    options = inspect.signature(KFACMixin.__init__).parameters.values()
    own = {p.name for p in options if p.kind is p.KEYWORD_ONLY} - {"model"}
    assert set(said) == own and len(said) == len(own)
    shown = pydoc.plain(pydoc.render_doc(KFACSGD))
    assert all(line.strip() in shown for line in text.splitlines())


@pytest.mark.parametrize(("cls", "base"), FAMILY, ids=lambda c: c.__name__)
def test_family_members_are_their_base_with_its_defaults(cls, base):
    opt = cls(network())
    plain = base(network().parameters())
    assert isinstance(opt, base) and isinstance(opt, Optimizer)
    assert with_kfac(base) is cls
    assert opt.defaults == plain.defaults
    added = {"damping", "factor_decay", "kl_clip_lr"}
    assert opt.param_groups[0].keys() - plain.param_groups[0].keys() == added
    for key in plain.param_groups[0].keys() - {"params"}:
        assert opt.param_groups[0][key] == plain.param_groups[0][key]


def test_lambs_signature_is_apexs():
    parameters = inspect.signature(LAMB).parameters
    expected = {
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "grad_averaging": True,
        "max_grad_norm": 1.0,
        "use_nvlamb": False,
    }
    assert {name: parameters[name].default for name in expected} == expected


def test_base_arguments_by_position():
    opt = KFACSGD(network(), 0.5, 0.9, 0.1, 1e-4)
    group = opt.param_groups[0]
    assert (group["lr"], group["momentum"], group["dampening"]) == (0.5, 0.9, 0.1)
    assert group["weight_decay"] == 1e-4
    with pytest.raises(TypeError):
        KFACSGD(network(), 0.5, 0.9, 0.1, 1e-4, True, network())


def forms():
    def two_groups(model):
        return [
            {"params": list(model[2].parameters()), "lr": 0.05, "momentum": 0.5},
            {"params": model[0].parameters()},
        ]

    return {
        "model": lambda m: ((m,), {}),
        "parameters": lambda m: ((m.parameters(),), {"model": m}),
        "list": lambda m: ((list(m.parameters()),), {"model": m}),
        "groups": lambda m: ((two_groups(m),), {"model": m}),
        "named": lambda m: ((m.named_parameters(),), {"model": m}),
        "named groups": lambda m: (([{"params": list(m.named_parameters())}],), {"model": m}),
        "model twice": lambda m: ((m,), {"model": m}),
    }


@pytest.mark.parametrize("form", forms())
def test_every_form_of_params_trains_alike(form):
    model, expected = network(), network()
    args, kwargs = forms()[form](model)
    opt = KFACSGD(*args, lr=0.1, momentum=0.9, **kwargs)
    reference = KFACSGD(expected, lr=0.1, momentum=0.9)
    if form == "groups":  # the same two, the second added to the first
        params = expected[2].parameters()
        reference = KFACSGD(params, lr=0.05, momentum=0.5, model=expected, kl_clip=None)
        reference.add_param_group({"params": expected[0].parameters(), "lr": 0.1, "momentum": 0.9})
        opt.preconditioner.kl_clip = None
    train(model, opt, range(3))
    train(expected, reference, range(3))
    assert_same(model, expected)
    if form.startswith("named"):
        assert opt.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]


def test_groups_have_their_own_damping_and_decay():
    model = network()
    opt = KFACSGD(
        [
            {"params": model[0].parameters(), "damping": 0.5, "factor_decay": 0.5},
            {"params": model[2].parameters()},
        ],
        lr=1.0,
        model=model,
        damping=0.01,
        **EVERY_STEP,
    )
    assert [g["damping"] for g in opt.param_groups] == [0.5, 0.01]
    assert [g["factor_decay"] for g in opt.param_groups] == [0.5, 0.95]
    strong, weak = Probe(model, damping=0.5, factor_decay=0.5), Probe(model, damping=0.01)
    for i in range(3):
        of_strong, of_weak = strong.step(model, i), weak.step(model, i)
        before = values(model)
        train(model, opt, [i])
        moved = difference(before, model)
        for name, change in moved.items():
            expected = (of_strong if name.startswith("0") else of_weak)[name]
            assert_near(change, expected)


@pytest.mark.parametrize(
    ("cls", "own"),
    [(KFACSGD, {}), (KFACAdam, {}), (KFACLAMB, {}), (KFACLAMB, {"moments": "parameters"})],
)
def test_a_first_group_may_be_empty(cls, own):
    """As torch's own optimizers have it."""
    options = {"lr": 0.01, "factor_update_steps": 1, "inv_update_steps": 2, **own}
    plain, model = network(), network()
    train(plain, cls(plain, **options), range(4))
    opt = cls([{"params": []}, {"params": model.parameters()}], model=model, **options)
    train(model, opt, range(4))
    assert_same(model, plain)
    assert opt.join_device == torch.device("cpu")


@pytest.mark.parametrize("damping", [(0.1, 0.2), (0.2, 0.1)])
def test_weight_and_bias_with_different_damping_are_refused(damping):
    model = network()
    groups = [
        {"params": [model[0].weight, *model[2].parameters()], "damping": damping[0]},
        {"params": [model[0].bias], "damping": damping[1]},
    ]
    with pytest.raises(ValueError, match=r"Invalid damping: layer '0'.*0\.1.*0\.2"):
        KFACSGD(groups, lr=0.1, model=model)


def test_weight_and_bias_may_differ_in_lr_and_weight_decay():
    model = network()
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}]
    opt = KFACSGD(groups, lr=1.0, model=model, **EVERY_STEP)
    before, v = values(model), Probe(model).step(model, 0)
    train(model, opt, [0])
    for name, change in difference(before, model).items():
        expected = 0.5 * v[name] if name.endswith("bias") else v[name] + 0.1 * before[name]
        assert_near(change, expected)


@pytest.fixture
def process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_wrapped_model_first(process_group):
    model, expected = network(), network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    opt = KFACSGD(wrapped, lr=0.1)
    assert list(opt.preconditioner.layers) == ["0", "2"]
    train(wrapped, opt, range(3))
    train(expected, KFACSGD(expected, lr=0.1), range(3))
    assert_same(model, expected)


@pytest.mark.parametrize("first", ["wrapped", "inner"])
def test_compiled_model_first(first):
    model, expected = network(), network()
    compiled = torch.compile(model, backend="eager")
    opt = KFACSGD(compiled if first == "wrapped" else model, lr=0.1)
    assert list(opt.preconditioner.layers) == ["0", "2"]
    train(compiled, opt, range(3))
    train(expected, KFACSGD(expected, lr=0.1), range(3))
    assert_same(model, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            lambda m: ((m.parameters(),), {}),
            "Invalid model: no model was given, but parameters;.*pass the nn.Module",
        ),
        (lambda m: ((m,), {"model": network()}), "Invalid model: the first argument is a module"),
        (lambda m: ((m.parameters(),), {"model": [1]}), r"Invalid model: \[1\]"),
        (lambda m: ((network().parameters(),), {"model": m}), "Invalid params: .*does not belong"),
        (lambda m: (([],), {"model": m}), "empty parameter list"),
        (lambda m: ((m,), {"lr": -1.0}), "Invalid learning rate: -1.0"),
        (lambda m: ((m,), {"momentum": -1.0}), "Invalid momentum value: -1.0"),
        (lambda m: ((m,), {"differentiable": True}), "Invalid differentiable: True"),
        (lambda m: ((m,), {"damping": 0}), "Invalid damping: 0"),
        (lambda m: ((m,), {"damping": float("inf")}), "Invalid damping: inf"),
        (lambda m: ((m,), {"damping": True}), "Invalid damping: True"),
        (lambda m: ((m,), {"factor_decay": 0.0}), "Invalid factor_decay: 0.0"),
        (lambda m: ((m,), {"factor_decay": 1.5}), "Invalid factor_decay: 1.5"),
        (lambda m: ((m,), {"kl_clip": 0}), "Invalid kl_clip: 0"),
        (lambda m: ((m,), {"kl_clip_lr": "newest"}), "Invalid kl_clip_lr: 'newest'"),
        (lambda m: ((m,), {"factor_update_steps": 0}), "Invalid factor_update_steps: 0"),
        (lambda m: ((m,), {"inv_update_steps": 2.5}), "Invalid inv_update_steps: 2.5"),
        (lambda m: ((m,), {"inv_update_steps": float("inf")}), "Invalid inv_update_steps: inf"),
        (lambda m: ((m,), {"inv_update_steps": float("nan")}), "Invalid inv_update_steps: nan"),
        (lambda m: ((m,), {"compute_method": "lu"}), "Invalid compute_method: 'lu'"),
        (lambda m: ((m,), {"damping_split": "pi"}), "Invalid damping_split: 'pi' belongs"),
        (
            lambda m: ((m,), {"damping_split": "half", "compute_method": "inverse"}),
            "Invalid damping_split: 'half'",
        ),
        (
            lambda m: (
                (m,),
                {"compute_eigenvalue_outer_product": True, "compute_method": "inverse"},
            ),
            "Invalid compute_eigenvalue_outer_product",
        ),
        (lambda m: ((m,), {"factor_dtype": torch.int32}), "Invalid factor_dtype: torch.int32"),
        (lambda m: ((m,), {"inv_dtype": "float32"}), "Invalid inv_dtype: 'float32'"),
        (lambda m: ((m,), {"max_factor_size": 0}), "Invalid max_factor_size: 0"),
        (lambda m: ((m,), {"weight_sharing": "sum"}), "Invalid weight_sharing: 'sum'"),
        (lambda m: ((m,), {"loss_terms": "tokens"}), "Invalid loss_terms: 'tokens'"),
        (lambda m: ((m,), {"loss_terms": -2}), "Invalid loss_terms: -2"),
        (lambda m: ((m,), {"loss_reduction": "none"}), "Invalid loss_reduction: 'none'"),
        (lambda m: ((m,), {"normalization": "papers"}), "Invalid normalization: 'papers'"),
        (
            lambda m: ((m,), {"normalization": "kaisa", "loss_reduction": "sum"}),
            'Invalid normalization: "kaisa"',
        ),
        (lambda m: ((m,), {"grad_scaler": "dynamic"}), "Invalid grad_scaler: 'dynamic'"),
        (lambda m: ((m,), {"max_failures": -1}), "Invalid max_failures: -1"),
        (lambda m: ((m,), {"max_failures": float("inf")}), "Invalid max_failures: inf"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    args, kwargs = arguments(network())
    with pytest.raises(ValueError, match=message):
        KFACSGD(*args, **kwargs)


def test_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="dampening_factor"):
        KFACSGD(network(), dampening_factor=0.1)


def test_a_model_without_a_covered_layer_is_refused():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with pytest.raises(ValueError, match=r"Invalid model: it has no layer.*scale"):
        KFACSGD(Scale())


def test_a_skip_pattern_that_matches_nothing_warns():
    with pytest.warns(UserWarning, match="skip_layers: 'haed' matches no module"):
        KFACSGD(network(), skip_layers="haed")


def test_cuda_graph_capture_is_refused(monkeypatch):
    model = network()
    opt = KFACSGD(model)
    backward(model, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph"):
        opt.step()


# ---- with_kfac over every base ----


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_bases_that_cannot_take_kfac_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"Invalid base: {name} can't take K-FAC"):
        with_kfac(getattr(torch.optim, name))


@pytest.mark.parametrize("base", [KFACSGD, "SGD", nn.Linear, 3])
def test_what_is_no_plain_optimizer_class_is_refused(base):
    with pytest.raises(ValueError, match="Invalid base"):
        with_kfac(base)


@pytest.mark.parametrize("base", BASES, ids=lambda c: c.__name__)
def test_equal_calls_give_the_same_class(base):
    cls = with_kfac(base)
    assert with_kfac(base) is cls
    assert cls.__name__ == f"KFAC{base.__name__}"
    assert issubclass(cls, base)


@pytest.mark.parametrize("base", BASES, ids=lambda c: c.__name__)
def test_steps_are_the_bases_own_on_preconditioned_gradients(base):
    """Three steps, so that the base's state takes part; it stays in the base's own format."""
    model, opt, hand = both(base)
    start = values(model)
    for i in range(3):
        train(model, opt, [i])
        hand.step(i)
        assert_near(model, hand.model, rtol=1e-6)
    assert any(change.abs().max() > 0 for change in difference(start, model).values())
    of_hand = hand.opt.state_dict()["state"]
    of_ours = {
        index: {key: value for key, value in entry.items() if not key.startswith("kfac")}
        for index, entry in opt.state_dict()["state"].items()
    }
    of_ours = {index: entry for index, entry in of_ours.items() if entry}
    assert of_ours.keys() == of_hand.keys()
    for index, entry in of_hand.items():
        assert_near(of_ours[index], entry, rtol=1e-5)


def test_raw_gradients_would_not_pass_for_preconditioned_ones():
    model, plain = network(), network()
    train(model, KFACSGD(model, lr=0.1, **EVERY_STEP), [0])
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), [0])
    with pytest.raises(AssertionError):
        assert_near(model, plain, rtol=1e-2)


SETTINGS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (torch.optim.SGD, {"lr": torch.tensor(0.1)}),
    (torch.optim.Adam, {"lr": 0.1, "foreach": True, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.1, "foreach": False}),
    (torch.optim.Adam, {"lr": 0.1, "fused": True}),
    (torch.optim.Adam, {"lr": torch.tensor(0.1), "foreach": False}),
    (torch.optim.AdamW, {"lr": 0.1, "fused": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
]


def title(setting: Any) -> str:
    if isinstance(setting, dict):
        return " ".join(f"{key}={value}" for key, value in setting.items())
    return setting.__name__


@pytest.mark.parametrize(("base", "settings"), SETTINGS, ids=title)
def test_the_bases_switches_are_passed_through(base, settings):
    model, opt, hand = both(base, **settings)
    for i in range(3):
        train(model, opt, [i])
        hand.step(i)
    assert_near(model, hand.model, rtol=1e-6)


@pytest.mark.parametrize(
    ("base", "extra"),
    [(torch.optim.SGD, {}), (torch.optim.SGD, {"foreach": True}), (torch.optim.Adam, {})],
)
def test_maximize(base, extra):
    """Maximizing −L goes where minimizing L goes."""
    model, minimized = network(), network()
    opt = with_kfac(base)(model, lr=0.1, maximize=True, **EVERY_STEP, **extra)
    for i in range(3):
        opt.zero_grad()
        backward(model, i, lambda loss: -loss)
        opt.step()
    train(minimized, with_kfac(base)(minimized, lr=0.1, **EVERY_STEP), range(3))
    assert_near(model, minimized)


def test_capturable_is_left_to_the_base():
    """On the CPU the base refuses it, in its own words."""
    model = network()
    opt = KFACAdam(model, capturable=True, moments="parameters")
    backward(model, 0)
    with pytest.raises(AssertionError, match="If capturable=True"):
        opt.step()


def test_a_group_that_is_differentiable_is_refused():
    model = network()
    with pytest.raises(ValueError, match="Invalid differentiable"):
        KFACSGD([{"params": model.parameters(), "differentiable": True}], model=model)


def test_tensor_lr_that_changes_takes_effect():
    model, lr = network(), torch.tensor(0.1, dtype=torch.float64)
    opt = KFACSGD(model, lr=lr, **EVERY_STEP)
    assert opt.param_groups[0]["kl_clip_lr"] == pytest.approx(0.1)
    probe = Probe(model)
    for i, rate in enumerate([0.1, 0.025]):
        lr.fill_(rate)
        before, v = values(model), probe.step(model, i)
        train(model, opt, [i])
        assert_near(difference(before, model), {n: rate * x for n, x in v.items()})


def test_tensor_lr_in_the_clip():
    """With the current lr as α an active clip cancels it, as a number or as a tensor."""
    ends = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.3).double()):
        model = network()
        opt = KFACSGD(model, lr=lr, kl_clip=1e-4, kl_clip_lr="current")
        train(model, opt, [0])
        ends.append(values(model))
    assert_near(ends[1], ends[0])
    assert_near(ends[2], ends[0])


# ---- gradients, zero_grad, closures ----


@pytest.mark.parametrize("base", BASES, ids=lambda c: c.__name__)
def test_grad_is_left_as_backward_made_it(base):
    model = network()
    params = pick(model, trained_by(base))
    opt = with_kfac(base)(params, model=model)
    for i in range(2):
        opt.zero_grad()
        backward(model, i)
        gradients = [p.grad for p in params]
        copies = [g.clone() for g in gradients]
        opt.step()
        assert all(p.grad is g for p, g in zip(params, gradients, strict=True))
        assert_same([p.grad for p in params], copies)


def test_grad_is_left_as_it_was_when_the_base_raises():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ZeroDivisionError

    model = network()
    opt = with_kfac(Failing)(model)
    backward(model, 0)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    copies = copy.deepcopy(gradients)
    with pytest.raises(ZeroDivisionError):
        opt.step()
    assert all(p.grad is gradients[n] for n, p in model.named_parameters())
    assert_same(gradients, copies)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_gradients_and_statistics(set_to_none):
    model, expected = network(), network()
    opt = KFACSGD(model, lr=0.1, **EVERY_STEP)
    backward(model, 7)  # aborted: a leftover
    assert opt.preconditioner.memory_usage()["pending"] > 0
    opt.zero_grad(set_to_none)
    assert opt.preconditioner.memory_usage()["pending"] == 0
    if set_to_none:
        assert all(p.grad is None for p in model.parameters())
    else:
        assert all(not p.grad.any() for p in model.parameters())
    backward(model, 0)
    opt.step()
    fresh = KFACSGD(expected, lr=0.1, **EVERY_STEP)
    train(expected, fresh, [0])
    assert_same(model, expected)
    assert_same(factors(opt), factors(fresh))


def test_closure_runs_once_with_gradients_before_its_factors_are_used():
    model, expected = network(), network()
    opt = KFACSGD(model, lr=0.1, **EVERY_STEP)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        opt.zero_grad()
        calls.append(opt.preconditioner.steps)
        return backward(model, len(calls) - 1)

    with torch.no_grad():
        losses = [opt.step(closure) for _ in range(3)]
    assert calls == [0, 1, 2]
    by_hand = KFACSGD(expected, lr=0.1, **EVERY_STEP)
    expected_losses = []
    for i in range(3):
        by_hand.zero_grad()
        expected_losses.append(backward(expected, i))
        assert by_hand.step() is None
    assert_same(losses, expected_losses)
    assert_same(model, expected)
    assert_same(factors(opt), factors(by_hand))


def test_step_does_not_track_gradients():
    model = network()
    opt = KFACSGD(model, lr=0.1)
    train(model, opt, [0])
    state = [t for entry in opt.state.values() for t in entry.values()]
    assert not any(t.requires_grad for t in state)
    assert torch.is_grad_enabled()


# ---- hooks ----


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any) -> None:
        self.calls += 1


def fresh_base() -> type[Optimizer]:
    """A class of its own, whose step no other test has had wrapped."""

    class Plain(Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for p in (p for group in self.param_groups for p in group["params"]):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=self.param_groups[0]["lr"])

    return Plain


def check_hooks(opt: Any, model: nn.Module) -> None:
    counters = {name: Counter() for name in ("pre", "post", "global pre", "global post")}
    handles = [
        opt.register_step_pre_hook(counters["pre"]),
        opt.register_step_post_hook(counters["post"]),
        register_optimizer_step_pre_hook(counters["global pre"]),
        register_optimizer_step_post_hook(counters["global post"]),
    ]
    try:
        for i in range(1, 3):
            train(model, opt, [i])
            assert {name: c.calls for name, c in counters.items()} == dict.fromkeys(counters, i)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    "make", [fresh_base, lambda: torch.optim.SGD, lambda: torch.optim.Adam, lambda: LAMB]
)
@pytest.mark.parametrize("plain", ["never", "before", "after"])
def test_step_hooks_fire_exactly_once(make, plain):
    base, model = make(), network()
    if plain == "before":
        base(network().parameters())
    opt = with_kfac(base)(model)
    if plain == "after":
        base(network().parameters())
    check_hooks(opt, model)


def test_hooks_of_the_base_fire_once_too():
    base = fresh_base()
    model, other = network(), network()
    with_kfac(base)(network())
    opt = base(model.parameters())
    with_kfac(base)(other)
    check_hooks(opt, model)


def test_a_step_pre_hook_may_change_the_gradients():
    """It runs before K-FAC sees them: a hook that zeroes them makes a step of nothing."""
    model = network()
    opt = KFACSGD(model, lr=0.1)
    opt.register_step_pre_hook(
        lambda o, a, k: [p.grad.zero_() for p in model.parameters()] and None
    )
    before = values(model)
    train(model, opt, [0])
    assert_same(values(model), before)


def test_state_dict_and_load_hooks_fire_exactly_once():
    model = network()
    opt = KFACSGD(model, lr=0.1, momentum=0.9)
    train(model, opt, [0])
    names = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    counters = {name: Counter() for name in names}
    for name, counter in counters.items():
        getattr(opt, f"register_{name}_hook")(counter)
    for i in range(1, 3):
        opt.load_state_dict(opt.state_dict())
        assert {name: c.calls for name, c in counters.items()} == dict.fromkeys(names, i)


def test_a_load_hook_may_replace_the_state():
    """K-FAC takes its share from what the user's hooks leave."""
    model, other = network(), network()
    opt, later = KFACSGD(model, lr=0.1, momentum=0.9), KFACSGD(other, lr=0.1, momentum=0.9)
    train(model, opt, range(3))
    saved = opt.state_dict()
    later.register_load_state_dict_pre_hook(lambda o, s: saved)
    later.load_state_dict(KFACSGD(network()).state_dict())
    assert_same(factors(later), factors(opt))


# ---- groups and parameters that change ----


def test_group_added_after_training_began():
    model = network()
    opt = KFACSGD(model[0].parameters(), lr=1.0, model=model, **EVERY_STEP)
    probe = Probe(model, ["0.weight", "0.bias"])
    for i in range(3):
        probe.step(model, i)
        train(model, opt, [i])
    kept = factors(opt)
    opt.add_param_group({"params": model[2].parameters(), "lr": 0.5, "damping": 0.3})
    assert_same(factors_of(opt, "0"), kept["0"])
    of_body, of_head = probe.step(model, 3), Probe(model, damping=0.3).step(model, 3)
    before = values(model)
    train(model, opt, [3])
    for name, change in difference(before, model).items():
        expected = of_body[name] if name.startswith("0") else 0.5 * of_head[name]
        assert_near(change, expected)


def factors_of(opt: Any, name: str) -> tuple[torch.Tensor, ...]:
    return opt.preconditioner.factors(name)


@pytest.mark.parametrize(
    ("group", "error"),
    [
        ([1], TypeError),
        ({"params": nn.Linear(2, 2).parameters()}, ValueError),
        ({"params": [], "damping": -1}, ValueError),
    ],
)
def test_a_refused_group_leaves_no_trace(group, error):
    model, expected = network(), network()
    opt = KFACSGD(model, lr=0.1)
    with pytest.raises(error):
        opt.add_param_group(group)
    assert len(opt.param_groups) == 1
    train(model, opt, range(2))
    train(expected, KFACSGD(expected, lr=0.1), range(2))
    assert_same(model, expected)
    copy.deepcopy(opt)


def test_an_added_bias_has_the_scheduled_values_of_its_step():
    model = network()
    opt = KFACSGD(
        [model[0].weight, *model[2].parameters()],
        lr=0.1,
        model=model,
        damping=lambda step: 0.1 * 0.9**step,
        factor_decay=lambda step: 0.9 + 0.01 * step,
    )
    train(model, opt, range(3))
    opt.add_param_group({"params": [model[0].bias]})
    for now in range(2, 5):
        for group in copy.deepcopy(opt).param_groups + opt.param_groups:
            assert group["damping"] == pytest.approx(0.1 * 0.9**now)
            assert group["factor_decay"] == pytest.approx(0.9 + 0.01 * now)
        train(model, opt, [now + 1])


def test_a_schedule_that_ends_leaves_a_late_group_out():
    model = network()
    opt = KFACSGD(model[0].parameters(), lr=0.1, model=model)
    train(model, opt, range(3))
    with pytest.raises(IndexError):
        opt.add_param_group({"params": model[2].parameters(), "damping": lambda step: [0.1][step]})
    assert len(opt.param_groups) == 1
    train(model, opt, [3])


def test_an_added_bias_with_another_damping_is_refused():
    model = network()
    opt = KFACSGD([model[0].weight, *model[2].parameters()], lr=0.1, model=model)
    train(model, opt, [0])
    with pytest.raises(ValueError, match="Invalid damping"):
        opt.add_param_group({"params": [model[0].bias], "damping": 0.5})
    opt.add_param_group({"params": [model[0].bias]})
    train(model, opt, [1])
    assert opt.preconditioner.factors("0")[0].shape == (1, 5, 5)


def test_unfreezing_after_training_began():
    model = network()
    model[0].requires_grad_(False)
    opt = KFACSGD(model, lr=1.0, **EVERY_STEP)
    frozen = values(model[0])
    train(model, opt, range(2))
    assert_same(values(model[0]), frozen)
    model[0].requires_grad_(True)
    v, before = Probe(model).step(model, 2), values(model)
    train(model, opt, [2])
    moved = difference(before, model)
    for name in ("0.weight", "0.bias"):
        assert_near(moved[name], v[name])


def test_a_weight_frozen_after_training_began():
    model, expected = network(), network()
    opt = KFACSGD(model, lr=0.1, **EVERY_STEP)
    train(model, opt, range(2))
    model[0].weight.requires_grad_(False)
    expected.load_state_dict(model.state_dict())
    expected[0].weight.requires_grad_(False)
    v, before = Probe(expected).step(expected, 2), values(model)
    train(model, opt, [2])
    moved = difference(before, model)
    assert not moved["0.weight"].any()
    assert_near(moved["0.bias"], 0.1 * v["0.bias"])
    copied = copy.deepcopy(opt)  # the state of the frozen weight has a new home
    assert_same(factors(copied), factors(opt))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_model_moved_to_another_dtype_after_steps(momentum):
    model = network(dtype=torch.float32)
    opt = KFACSGD(model, lr=0.1, momentum=momentum, factor_update_steps=2, staggered=False)
    train(model, opt, range(3))
    kept = {name: [f.double() for f in fs] for name, fs in factors(opt).items()}
    model.to(torch.float64)
    before = values(model)
    train(model, opt, [3])  # not due for factors
    assert all(f.dtype == torch.float64 for fs in factors(opt).values() for f in fs)
    assert_same({name: list(fs) for name, fs in factors(opt).items()}, kept)
    assert all(change.abs().max() > 0 for change in difference(before, model).values())
    train(model, opt, range(4, 6))
    assert all(p.isfinite().all() for p in model.parameters())


def test_model_moved_to_bfloat16_keeps_float32_factors():
    model = network(dtype=torch.float32)
    opt = KFACSGD(model, lr=0.1, factor_update_steps=2, staggered=False)
    train(model, opt, range(3))
    kept = factors(opt)
    model.to(torch.bfloat16)
    train(model, opt, [3])
    assert all(f.dtype == torch.float32 for fs in factors(opt).values() for f in fs)
    assert_same(factors(opt), kept)


def test_gradients_of_two_dtypes_are_not_copied_in_one_call():
    """CUDA's call took them all for the first one's, before torch 2.11."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].bfloat16()
    x = torch.randn(8, 4)
    opt = KFACSGD(model, lr=0.1)
    model[2](model[1](model[0](x)).bfloat16()).float().square().mean().backward()
    copy_, calls = torch._foreach_copy_, []

    def spied(targets, sources, **more):
        calls.append({t.dtype for t in targets})
        copy_(targets, sources, **more)

    with mock.patch.object(torch, "_foreach_copy_", spied):
        opt.step()
    assert max(map(len, calls)) == 1
    assert set.union(*calls) >= {torch.float32, torch.bfloat16}


def test_a_replaced_head():
    model = network()
    opt = KFACSGD(model, lr=1.0, momentum=0.0, **EVERY_STEP)
    probe = Probe(model)
    for i in range(2):
        probe.step(model, i)
        train(model, opt, [i])
    old = model[2]
    model[2] = nn.Linear(6, 3, dtype=torch.float64)
    opt.add_param_group({"params": model[2].parameters()})
    assert list(opt.preconditioner.layers) == ["0", "2"]
    old_values = values(old)
    expected, before = Probe(model).step(model, 2), values(model)
    train(model, opt, [2])
    moved = difference(before, model)
    for name in ("2.weight", "2.bias"):  # the body goes on with its running averages
        assert_near(moved[name], expected[name])
    assert not torch.allclose(moved["0.weight"], expected["0.weight"])
    assert_same(values(old), old_values)
    twin_model, twin = copy.deepcopy((model, opt))
    train(model, opt, [3])
    train(twin_model, twin, [3])
    assert_same(twin_model, model)
    assert not any(str(k).startswith("kfac") for k in opt.state.get(old.weight, {}))


def test_a_head_replaced_without_a_word_is_not_trained():
    """As with any torch optimizer; the body trains on."""
    model = network()
    opt = KFACSGD(model, lr=0.1, **EVERY_STEP)
    train(model, opt, [0])
    model[2] = nn.Linear(6, 3, dtype=torch.float64)
    before = values(model)
    train(model, opt, range(1, 3))
    moved = difference(before, model)
    assert moved["0.weight"].abs().max() > 0
    assert not moved["2.weight"].any()


# ---- copies ----


def dynamic(*args: Any, **kwargs: Any) -> Any:
    return with_kfac(torch.optim.RAdam)(*args, **kwargs)


def over_lars(*args: Any, **kwargs: Any) -> Any:
    return with_kfac(LARS)(*args, **kwargs)


CLASSES = [KFACSGD, KFACAdam, KFACLAMB, KFACMuon, dynamic, over_lars]
STAGGERED = {"factor_update_steps": 2, "inv_update_steps": 3}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_deepcopy_trains_its_own_copy_on_the_same_path(cls, taken):
    model = network()
    opt = cls(model, lr=0.01, **STAGGERED)
    train(model, opt, range(taken))
    twin_model, twin = copy.deepcopy((model, opt))
    assert type(twin) is type(opt)
    assert_same(twin.state_dict(), opt.state_dict())
    at_copy = values(model)
    train(twin_model, twin, range(taken, taken + 4))
    assert_same(values(model), at_copy)
    train(model, opt, range(taken, taken + 4))
    assert_same(twin_model, model)
    assert_same(factors(twin), factors(opt))


def test_deepcopied_optimizer_alone_brings_its_model():
    model = network()
    opt = KFACSGD(model, lr=0.1, **STAGGERED)
    train(model, opt, range(2))
    twin = copy.deepcopy(opt)
    twin_model = twin.preconditioner.model
    assert twin_model is not model
    train(twin_model, twin, range(2, 5))
    train(model, opt, range(2, 5))
    assert_same(twin_model, model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_keeps_what_was_set_since(duplicate):
    model = network()
    opt = KFACSGD(model, lr=0.1, damping=0.1, factor_decay=0.5)
    kfac = opt.preconditioner
    kfac.kl_clip, kfac.factor_update_steps, kfac.inv_update_steps = 1e-5, 2, 3
    kfac.loss_terms, kfac.grad_scaler, kfac.statistics_fraction = 4, 2.0, 0.5
    opt.param_groups[0]["damping"] = 0.2
    twin = duplicate(opt)
    names = ("kl_clip", "factor_update_steps", "inv_update_steps", "loss_terms")
    for name in (*names, "statistics_fraction"):
        assert getattr(twin.preconditioner, name) == getattr(kfac, name)
    train(model, opt, range(4))
    train(twin.preconditioner.model, twin, range(4))
    assert_same(twin.preconditioner.model, model)


@pytest.mark.parametrize("cls", CLASSES)
def test_pickle_round_trip(cls):
    model = network()
    opt = cls(model, lr=0.01, **STAGGERED)
    train(model, opt, range(3))
    twin_model, twin = pickle.loads(pickle.dumps((model, opt)))
    assert type(twin) is type(opt)
    train(model, opt, range(3, 7))
    train(twin_model, twin, range(3, 7))
    assert_same(twin_model, model)


@pytest.mark.parametrize("cls", [KFACSGD, dynamic])
def test_unpickled_in_a_new_process(cls, tmp_path):
    model = network()
    opt = cls(model, lr=0.01, **STAGGERED)
    train(model, opt, range(3))
    (tmp_path / "pair").write_bytes(pickle.dumps((model, opt)))
    script = f"""
import pickle, sys, torch
sys.path[:0] = [{str(ROOT)!r}]
from tests.support.training import train
with open({str(tmp_path / "pair")!r}, "rb") as file:
    model, opt = pickle.load(file)
train(model, opt, range(3, 6))
torch.save(model.state_dict(), {str(tmp_path / "end")!r})
"""
    subprocess.run(python("-c", script), check=True)
    train(model, opt, range(3, 6))
    assert_same(torch.load(tmp_path / "end"), dict(model.state_dict()))


def test_a_users_subclass_of_the_family_copies_too():
    class Own(with_kfac(torch.optim.RAdam)):
        """A subclass that is found by its own name."""

    model = network()
    opt = Own(model, lr=0.01)
    train(model, opt, range(2))
    twin_model, twin = copy.deepcopy((model, opt))
    assert type(twin) is Own
    train(model, opt, range(2, 4))
    train(twin_model, twin, range(2, 4))
    assert_same(twin_model, model)


def test_copied_models_have_no_live_hooks():
    model, alone = network(), network()
    opt = KFACSGD(model, lr=0.1, **EVERY_STEP)
    train(model, opt, [0])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        backward(twin, 5)
        assert "Tap" not in type(twin(batch(5)[0]).grad_fn).__name__
        assert opt.preconditioner.memory_usage()["pending"] == 0
        alone.load_state_dict(twin.state_dict())
        alone.zero_grad()
        backward(alone, 5)
        assert_same([p.grad for p in twin.parameters()], [p.grad for p in alone.parameters()])
    # A step for which only the copies saw a backward pass is still one without statistics.
    opt.zero_grad()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="no covered layer saw a backward pass"):
        opt.step()


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_saved_model_loads_without_the_package(how, tmp_path):
    model = network()
    opt = KFACSGD(model, lr=0.1)
    train(model, opt, range(2))
    x = batch(0)[0]
    if how == "pickle":
        (tmp_path / "model").write_bytes(pickle.dumps(model))
        load = f"__import__('pickle').load(open({str(tmp_path / 'model')!r}, 'rb'))"
    else:
        torch.save(model, tmp_path / "model")
        load = f"torch.load({str(tmp_path / 'model')!r}, weights_only=False)"
    torch.save(x, tmp_path / "x")
    script = f"""{WITHOUT_PACKAGE}
import torch
model = {load}
x = torch.load({str(tmp_path / "x")!r})
y = model(x)
y.sum().backward()
torch.save([y.detach(), model[0].weight.grad], {str(tmp_path / "y")!r})
"""
    subprocess.run(python("-I", "-c", script), check=True, cwd=tmp_path)
    y = model(x)
    weight_gradient = torch.autograd.grad(y.sum(), model[0].weight)[0]
    assert_same(torch.load(tmp_path / "y"), [y.detach(), weight_gradient])


@pytest.mark.parametrize("ema", [False, True])
def test_averaged_models_are_not_dragged_along(ema):
    model, alone = network(), network()
    opt, other = KFACSGD(model, lr=0.1, **EVERY_STEP), KFACSGD(alone, lr=0.1, **EVERY_STEP)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if ema else None)
    seen = []

    def after(i):
        average.update_parameters(model)
        seen.append(values(model))
        backward(average, i)  # somebody looks at its gradients

    train(model, opt, range(3), after)
    train(alone, other, range(3))
    assert_same(model, alone)
    assert_same(factors(opt), factors(other))
    mean = {n: torch.stack([s[n] for s in seen]).mean(0) for n in seen[0]}
    if not ema:
        assert_near(values(average.module), mean)


def test_two_optimizers_on_parts_of_one_model():
    model, expected = network(), network()
    one = KFACSGD(model[0].parameters(), lr=0.1, model=model, **EVERY_STEP)
    two = KFACAdam(model[2].parameters(), lr=0.1, model=model, **EVERY_STEP)
    of_one, of_two = Probe(model, ["0.weight", "0.bias"]), Probe(model, ["2.weight", "2.bias"])
    sgd = torch.optim.SGD(expected[0].parameters(), lr=0.1)
    adam = torch.optim.Adam(expected[2].parameters(), lr=0.1)
    for i in range(3):
        one.zero_grad()
        two.zero_grad()
        backward(model, i)
        one.step()
        two.step()
        v = of_one.step(expected, i)
        w = of_two.step(expected, i)
        for name, p in expected.named_parameters():
            p.grad = (v if name.startswith("0") else w)[name].clone()
        sgd.step()
        adam.step()
        assert_near(model, expected, rtol=1e-6)
    # One's zero_grad leaves the other's statistics alone.
    backward(model, 9)
    one.zero_grad()
    assert one.preconditioner.memory_usage()["pending"] == 0
    assert two.preconditioner.memory_usage()["pending"] > 0


def test_a_collected_optimizer_leaves_inert_hooks():
    model, alone = network(), network()
    opt = KFACSGD(model, lr=0.1, factor_update_steps=1)
    train(model, opt, [0])
    torch.optim.lr_scheduler.StepLR(opt, 1)  # it refers to the optimizer and back
    gone = weakref.ref(opt), weakref.ref(opt.preconditioner)
    del opt
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    alone.load_state_dict(model.state_dict())
    model.zero_grad()
    y = model(batch(1)[0])
    assert type(y.grad_fn).__name__ == type(alone(batch(1)[0]).grad_fn).__name__
    backward(model, 1)
    backward(alone, 1)
    assert_same([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])
    again = KFACSGD(model, lr=0.1)
    train(model, again, [1])
    train(alone, KFACSGD(alone, lr=0.1), [1])
    assert_same(model, alone)


# ---- learning-rate schedulers ----


def schedulers() -> dict[str, Any]:
    s = torch.optim.lr_scheduler
    return {
        "LambdaLR": lambda o: s.LambdaLR(o, lambda e: 1 / (1 + e)),
        "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda e: 0.7),
        "StepLR": lambda o: s.StepLR(o, 2, 0.5),
        "MultiStepLR": lambda o: s.MultiStepLR(o, [1, 3], 0.5),
        "ConstantLR": lambda o: s.ConstantLR(o, 0.5, 2),
        "LinearLR": lambda o: s.LinearLR(o, 0.1, total_iters=4),
        "ExponentialLR": lambda o: s.ExponentialLR(o, 0.8),
        "PolynomialLR": lambda o: s.PolynomialLR(o, 5),
        "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 5),
        "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 2),
        "SequentialLR": lambda o: s.SequentialLR(
            o, [s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.5)], [2]
        ),
        "ChainedScheduler": lambda o: s.ChainedScheduler(
            [s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.5)], optimizer=o
        ),
        "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, factor=0.5, patience=0),
        "CyclicLR": lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=True),
        "OneCycleLR": lambda o: s.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=True),
    }


def scheduler_classes() -> list[str]:
    module = torch.optim.lr_scheduler
    return [c.__name__ for c in classes_in(module, module.LRScheduler)]


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam], ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", scheduler_classes())
def test_learning_rate_schedulers(name, base):
    """The rates (and cycled momenta) are those of a plain optimizer, and show in the steps."""
    settings = {"lr": 0.1, "momentum": 0.9} if base is torch.optim.SGD else {"lr": 0.1}
    model, opt, hand = both(base, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        pair = [schedulers()[name](o) for o in (opt, hand.opt)]
        rates = []
        for i in range(6):
            train(model, opt, [i])
            hand.step(i)
            for scheduler in pair:
                # A loss that never improves.
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            for key in {"lr", "momentum", "betas"} & opt.param_groups[0].keys():
                assert opt.param_groups[0][key] == hand.opt.param_groups[0][key]
            rates.append(opt.param_groups[0]["lr"])
            assert_near(model, hand.model, rtol=1e-6)
    assert len(set(rates)) > 1
    assert opt.param_groups[0]["kl_clip_lr"] == 0.1


def clip_of(v: dict[str, Any], gradients: dict[str, Any], alpha: float, kappa: float) -> float:
    inner = sum((v[n] * gradients[n]).sum() for n in v)
    return min(1.0, float((kappa / (alpha**2 * inner)) ** 0.5))


def gradients_at(model: nn.Module, i: int) -> dict[str, Any]:
    twin = copy.deepcopy(model)
    twin.zero_grad()
    backward(twin, i)
    return {n: p.grad for n, p in twin.named_parameters()}


@pytest.mark.parametrize(("choice", "kappa"), [(None, 1e-4), ("initial", 1e-4), ("current", 1e-4)])
def test_kl_clip_alpha(choice, kappa):
    """By default the lr of construction, whatever the schedule; else the current one."""
    model = network()
    opt = KFACSGD(model, lr=0.5, kl_clip_lr=choice, **{**EVERY_STEP, "kl_clip": kappa})
    assert opt.param_groups[0]["kl_clip_lr"] == ("current" if choice == "current" else 0.5)
    probe = Probe(model)
    for i, lr in enumerate([0.5, 0.05, 0.01]):
        opt.param_groups[0]["lr"] = lr
        v, before = probe.step(model, i), values(model)
        nu = clip_of(v, gradients_at(model, i), lr if choice == "current" else 0.5, kappa)
        assert nu < 1
        train(model, opt, [i])
        assert_near(difference(before, model), {n: lr * nu * x for n, x in v.items()}, rtol=1e-6)


def test_kl_clip_lets_small_steps_pass():
    model = network()
    opt = KFACSGD(model, lr=1e-4, **{**EVERY_STEP, "kl_clip": 1e-3})
    v, before = Probe(model).step(model, 0), values(model)
    train(model, opt, [0])
    assert_near(difference(before, model), {n: 1e-4 * x for n, x in v.items()}, rtol=1e-6)


@pytest.mark.parametrize("choice", ["initial", "current"])
def test_kl_clip_weighs_each_parameter_with_its_groups_lr(choice):
    model = network()
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    groups = [{"params": weights}, {"params": biases, "lr": 0.1}]
    opt = KFACSGD(groups, lr=1.0, model=model, kl_clip_lr=choice, **{**EVERY_STEP, "kl_clip": 1e-3})
    v, gradients, before = Probe(model).step(model, 0), gradients_at(model, 0), values(model)
    rates = {n: 0.1 if n.endswith("bias") else 1.0 for n in v}
    total = sum(rates[n] ** 2 * (v[n] * gradients[n]).sum() for n in v)
    nu = (1e-3 / total) ** 0.5
    assert nu < 1
    train(model, opt, [0])
    assert_near(difference(before, model), {n: rates[n] * nu * x for n, x in v.items()}, rtol=1e-6)


def test_kl_clip_of_zero_gradients():
    model = network()
    opt = KFACSGD(model, lr=0.1)
    before = values(model)
    x, _ = batch(0)
    (0 * model(x).sum()).backward()
    opt.step()
    assert_same(values(model), before)


def test_first_step_is_exactly_the_damped_newton_step():
    """Defaults, the clip aside: (F + γI)⁻¹∇ with F = A ⊗ G of this one batch, by hand."""
    model = network()
    x, y = batch(0)
    hidden = model[:2](x)
    out = model[2](hidden)
    ones = torch.ones(len(x), 1, dtype=x.dtype)
    opt = KFACSGD(model, lr=1.0, kl_clip=None)
    before = values(model)
    train(model, opt, [0])
    rows = torch.cat([hidden, ones], 1).detach()
    back = (2 * (out - y) / out.numel()).detach()
    a = rows.T @ rows / len(rows)
    g = len(rows) * back.T @ back
    gradient = back.T @ rows
    damping = opt.param_groups[0]["damping"]
    fisher = torch.kron(g, a) + damping * torch.eye(21, dtype=a.dtype)
    v = torch.linalg.solve(fisher, gradient.flatten()).view_as(gradient)
    moved = difference(before, model)
    assert_near(moved["2.weight"], v[:, :-1], rtol=1e-6)
    assert_near(moved["2.bias"], v[:, -1], rtol=1e-6)


# ---- hyperparameters as callables ----


def test_numbers_or_callables_of_the_step():
    seen: dict[str, list[int]] = {}

    def schedule(name: str, *sequence: Any):
        def of(step: int):
            seen.setdefault(name, []).append(step)
            return sequence[min(step, len(sequence) - 1)]

        return of

    model, expected = network(), network()
    opt = KFACSGD(
        model,
        lr=0.1,
        damping=schedule("damping", 0.1, 0.2, 0.4),
        factor_decay=schedule("factor_decay", 0.9, 0.5, 0.7),
        kl_clip=schedule("kl_clip", 1e-3, None, 1e-4),
        factor_update_steps=schedule("factor_update_steps", 1, 1, 2),
        inv_update_steps=schedule("inv_update_steps", 1, 2),
        loss_terms=schedule("loss_terms", 8, 4, 2),
    )
    by_hand = KFACSGD(expected, lr=0.1)
    for i in range(6):
        at = min(i, 2)
        group, kfac = by_hand.param_groups[0], by_hand.preconditioner
        group["damping"] = (0.1, 0.2, 0.4)[at]
        group["factor_decay"] = (0.9, 0.5, 0.7)[at]
        kfac.kl_clip = (1e-3, None, 1e-4)[at]
        kfac.factor_update_steps = (1, 1, 2)[at]
        kfac.inv_update_steps = (1, 2, 2)[at]
        kfac.loss_terms = (8, 4, 2)[at]
        train(model, opt, [i])
        train(expected, by_hand, [i])
        assert opt.param_groups[0]["damping"] == group["damping"]
        assert opt.preconditioner.kl_clip == kfac.kl_clip
        assert opt.preconditioner.inv_update_steps == kfac.inv_update_steps
        assert_same(model, expected)
    assert all(set(steps) >= set(range(6)) for steps in seen.values())


def test_a_callable_in_a_group():
    model = network()
    opt = KFACSGD(
        [
            {"params": model[0].parameters(), "damping": lambda step: 0.1 * (step + 1)},
            {"params": model[2].parameters()},
        ],
        lr=0.1,
        model=model,
        damping=0.7,
    )
    for i in range(3):
        train(model, opt, [i])
        assert [g["damping"] for g in opt.param_groups] == [pytest.approx(0.1 * (i + 1)), 0.7]


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("damping", 0.0),
        ("factor_decay", 2.0),
        ("kl_clip", -1.0),
        ("factor_update_steps", 0),
        ("inv_update_steps", 1.5),
        ("loss_terms", 0),
    ],
)
def test_a_callables_bad_value_is_named_at_its_step(option, bad):
    good = {"damping": 0.1, "factor_decay": 0.9, "kl_clip": 1e-3}.get(option, 1)
    model = network()
    opt = KFACSGD(model, lr=0.1, **{option: lambda step: good if step < 2 else bad})
    train(model, opt, [0])
    with pytest.raises(ValueError, match=f"Invalid {option}: {bad}"):
        train(model, opt, [1, 2])


# ---- GradScaler ----


def scaled_training(model, opt, scaler, steps, broken=(), zero_grad=None):
    """Training under a GradScaler; the batches in ``broken`` overflow."""
    zero_grad = zero_grad or (lambda: opt.zero_grad())
    for i in steps:
        zero_grad()
        factor = float("inf") if i in broken else 1.0
        backward(model, i, lambda loss, factor=factor: scaler.scale(loss * factor))
        scaler.step(opt)
        scaler.update()
    opt.zero_grad()


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (KFACSGD, {"momentum": 0.9}),
        (KFACSGD, {"momentum": 0.9, "fused": True}),
        (KFACAdam, {}),
        (KFACAdam, {"fused": True}),
        (KFACLAMB, {}),
    ],
)
@pytest.mark.parametrize("zeroing", ["optimizer", "optimizer, to zero", "model"])
def test_a_skipped_step_leaves_no_trace(cls, settings, zeroing):
    model, expected = network(dtype=torch.float32), network(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    opt = cls(model, lr=0.05, grad_scaler=scaler, **EVERY_STEP, **settings)
    other = cls(expected, lr=0.05, **EVERY_STEP, **settings)
    assert opt._step_supports_amp_scaling is False
    zero_grad = {
        "optimizer": opt.zero_grad,
        "optimizer, to zero": lambda: opt.zero_grad(set_to_none=False),
        "model": model.zero_grad,
    }[zeroing]
    scaled_training(model, opt, scaler, [0, 10, 1, 2, 11, 12, 3], (10, 11, 12), zero_grad)
    assert scaler.get_scale() == 2.0**7
    assert opt.preconditioner.steps == 4
    train(expected, other, range(4))
    assert_near(factors(opt), factors(other), rtol=1e-4, atol=1e-6)
    assert_near(model, expected, rtol=1e-4, atol=1e-6)


def test_a_broken_first_step_is_skipped_too():
    model, expected = network(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    opt = KFACSGD(model, lr=0.05, grad_scaler=scaler)
    scaled_training(model, opt, scaler, [10, 0, 1], (10,))
    train(expected, KFACSGD(expected, lr=0.05), range(2))
    assert_same(model, expected)  # powers of two scale exactly


@pytest.mark.parametrize("form", ["scaler", "number", "tensor", "callable"])
def test_factors_do_not_depend_on_the_loss_scale(form):
    results = []
    for scale in (1.0, 2.0**4, 2.0**12):
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        given = {
            "scaler": scaler,
            "number": scale,
            "tensor": torch.tensor(scale),
            "callable": lambda scaler=scaler: scaler.get_scale(),
        }[form]
        opt = KFACSGD(model, lr=0.05, grad_scaler=given, **EVERY_STEP)
        steps = range(1) if form in ("number", "tensor") else range(5)  # the scale grows
        scaled_training(model, opt, scaler, steps)
        results.append((factors(opt), values(model)))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("cls", "told", "enabled", "says"),
    [
        (KFACSGD, False, True, True),
        (KFACSGD, True, True, False),
        (KFACSGD, False, False, False),
        (KFACAdam, False, True, False),  # its directions do not depend on the scale of G
    ],
)
def test_a_scaler_that_was_not_given_is_named(cls, told, enabled, says):
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
    opt = cls(model, lr=0.1, **({"grad_scaler": scaler} if told else {}))
    if says:
        with pytest.warns(UserWarning, match=r"called by a GradScaler .* pass grad_scaler=scaler"):
            scaled_training(model, opt, scaler, [0])
    scaled_training(model, opt, scaler, [1, 2])  # once


@pytest.mark.filterwarnings("error")
def test_an_option_that_nobody_reads_in_a_group_is_named_once():
    model = network()
    opt = KFACSGD(model, lr=0.1)
    train(model, opt, [0])
    opt.param_groups[0]["inv_update_steps"] = 1
    with pytest.warns(UserWarning, match=r"'inv_update_steps', which nobody reads .*preconditi"):
        train(model, opt, [1])
    train(model, opt, [2])


@pytest.mark.filterwarnings("ignore:step.. was called by a GradScaler")
def test_without_the_option_the_scale_is_in_the_factors():
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    opt = KFACSGD(model, lr=0.05, **EVERY_STEP)
    scaled_training(model, opt, scaler, [0])
    other = network()
    plain = KFACSGD(other, lr=0.05, **EVERY_STEP)
    train(other, plain, [0])
    for name in ("0", "2"):
        assert_near(factors_of(opt, name)[0], factors_of(plain, name)[0])
        assert_near(factors_of(opt, name)[1], 16 * factors_of(plain, name)[1])


def test_unscaled_and_clipped_gradients():
    """unscale_ and clip_grad_norm_ between backward and step, as torch's examples do."""
    model, expected = network(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    opt = KFACSGD(model, lr=0.05, grad_scaler=scaler)
    other = KFACSGD(expected, lr=0.05)
    for i in range(3):
        opt.zero_grad()
        backward(model, i, scaler.scale)
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        other.zero_grad()
        backward(expected, i)
        nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        other.step()
    assert_same(model, expected)


# ---- steps without statistics ----


def test_a_due_step_without_a_backward_raises():
    model = network()
    opt = KFACSGD(model, lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="step 0 is due for statistics"):
        opt.step()


def test_a_step_with_no_gradient_at_all_is_a_step_of_nothing():
    model = network()
    opt = KFACSGD(model, lr=0.1)
    before = values(model)
    opt.step()
    assert_same(values(model), before)


def test_paused_capture_steps_with_what_is_known():
    model = network()
    opt = KFACSGD(model, lr=1.0, **EVERY_STEP)
    train(model, opt, [0])
    kept = factors(opt)
    opt.zero_grad()
    with opt.preconditioner.paused():
        backward(model, 1)
    before = values(model)
    opt.step()
    assert_same(factors(opt), kept)
    assert all(change.abs().max() > 0 for change in difference(before, model).values())


def test_accumulation_equals_one_batch():
    model, expected = network(), network()
    opt, other = KFACSGD(model, lr=0.1, **EVERY_STEP), KFACSGD(expected, lr=0.1, **EVERY_STEP)
    for i in range(3):
        x, y = batch(i)
        opt.zero_grad()
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (F.mse_loss(model(part), target) / 4).backward()
        opt.step()
        train(expected, other, [i])
        assert_near(factors(opt), factors(other))
        assert_near(model, expected)


def test_covered_and_uncovered_parameters_are_told():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            return self.body(x) * self.scale

    model = Scaled()
    with pytest.warns(UserWarning, match="raw gradients:\n  scale: ") as record:
        opt = KFACSGD(model, lr=1.0, skip_layers="body.0", **EVERY_STEP)
    assert len(record) == 1
    assert list(opt.preconditioner.layers) == ["body.2"]
    text = repr(opt.preconditioner)
    assert "body.2: A 7, G 3" in text and "scale: " in text and "matches 'body.0'" in text
    before = values(model)
    train(model, opt, [0])
    gradients = {n: p.grad for n, p in model.named_parameters()}
    moved = difference(before, model)
    for name in ("scale", "body.0.weight", "body.0.bias"):
        assert_near(moved[name], gradients[name])
    assert not torch.allclose(moved["body.2.weight"], gradients["body.2.weight"])
