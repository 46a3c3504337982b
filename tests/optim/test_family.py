"""The classes over torch's bases: signatures, the base's own steps, arguments, copies."""

from __future__ import annotations

import abc
import copy
import inspect
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from tests.optim.bases import BASES, FAMILY, REFUSED, Descent, both, dynamic, over_lars
from tests.support.training import (
    METHODS,
    WITHOUT_PACKAGE,
    assert_near,
    assert_same,
    backward,
    batch,
    difference,
    factors,
    network,
    python,
    train,
    values,
)

ROOT = Path(__file__).parents[2]


# ---- signatures ----


@pytest.mark.parametrize("base", BASES, ids=lambda c: c.__name__)
def test_signature_is_the_bases_then_kfacs_by_keyword(base):
    cls = with_kfac(base)
    assert with_kfac(base) is cls and issubclass(cls, base)
    assert cls.__name__ == f"KFAC{base.__name__}"
    theirs = list(inspect.signature(base).parameters.values())
    ours = list(inspect.signature(cls).parameters.values())
    first = [p for p in theirs if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert [(p.name, p.kind, p.default) for p in ours[: len(first)]] == [
        (p.name, p.kind, p.default) for p in first
    ]
    added = {p.name: p for p in ours[len(first) :]}
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in added.values())
    assert {"model", "damping", "factor_decay", "inv_update_steps", "assignment"} <= added.keys()
    assert "nn.Module" in ours[0].annotation


@pytest.mark.parametrize(("cls", "base"), FAMILY, ids=lambda c: c.__name__)
def test_family_members_are_their_base_with_its_defaults(cls, base):
    opt = cls(network())
    plain = base(network().parameters())
    assert isinstance(opt, base) and isinstance(opt, Optimizer)
    assert with_kfac(base) is cls
    assert opt.defaults == plain.defaults
    added = opt.param_groups[0].keys() - plain.param_groups[0].keys()
    assert added == {"damping", "factor_decay"}
    for key in plain.param_groups[0].keys() - {"params"}:
        assert opt.param_groups[0][key] == plain.param_groups[0][key]


def test_groups_show_no_setting_that_the_method_does_not_use():
    """Neither do they after another method's checkpoint was loaded."""
    polar, eigen = (KFACSGD(network(), lr=0.1, compute_method=m) for m in ("polar", "eigen"))
    assert "kl_clip_lr: 0.1" in repr(eigen) and "kl_clip" not in repr(polar)
    states = polar.state_dict(), eigen.state_dict()
    eigen.load_state_dict(states[0])
    polar.load_state_dict(states[1])
    assert "kl_clip_lr: 0.1" in repr(eigen) and "kl_clip" not in repr(polar)


def test_base_arguments_by_position():
    opt = KFACSGD(network(), 0.5, 0.9, 0.1, 1e-4)
    group = opt.param_groups[0]
    assert (group["lr"], group["momentum"], group["dampening"]) == (0.5, 0.9, 0.1)
    assert group["weight_decay"] == 1e-4
    with pytest.raises(TypeError):
        KFACSGD(network(), 0.5, 0.9, 0.1, 1e-4, True, network())


class AbstractFirst(abc.ABC, Descent):
    """A base as those of pytorch_optimizer."""


class AbstractLast(torch.optim.SGD, abc.ABC):
    """A subclass of torch's SGD."""


@pytest.mark.parametrize("base", [AbstractFirst, AbstractLast])
def test_a_base_may_derive_from_abc(base):
    model = network()
    opt = with_kfac(base)(model, lr=0.05)
    before = values(model)
    train(model, opt, range(3))
    assert isinstance(opt, base)
    assert all(moved.abs().max() > 0 for moved in difference(before, model).values())
    for duplicate in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        other, copied = duplicate((model, opt))
        train(other, copied, [3])
        again, original = copy.deepcopy((model, opt))
        train(again, original, [3])
        assert_same(other, again)


def test_classes_that_can_not_take_kfac_are_refused():
    for name in REFUSED.intersection(dir(torch.optim)):
        with pytest.raises(ValueError, match=f"Invalid base: {name} can't take K-FAC: "):
            with_kfac(getattr(torch.optim, name))
    with pytest.raises(ValueError, match="KFACSGD has K-FAC inside already; use it as it is"):
        with_kfac(KFACSGD)
    for value in ("SGD", nn.Linear, 3, torch.optim.SGD(network().parameters())):
        with pytest.raises(ValueError, match=r"(?s)Invalid base: .*subclass of torch.optim.Optimi"):
            with_kfac(value)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_names_of_other_bases_point_to_with_kfac(name):
    with pytest.raises(ImportError, match=rf"use with_kfac\(torch.optim.{name}\)"):
        exec(f"from kaisa_optim import KFAC{name}")


@pytest.mark.parametrize("name", ["KFACMuon", "Muon"])
def test_muon_names_the_class_to_take(name):
    with pytest.raises(ImportError, match=rf"kaisa_optim has no {name}; use KFACAdam"):
        exec(f"from kaisa_optim import {name}")
    groups = [{"params": network().parameters(), "use_muon": False}]
    with pytest.raises(
        ValueError, match=r"Invalid use_muon: False in a parameter group; .*KFACAdam"
    ):
        KFACAdam(groups, model=network())
    if hasattr(torch.optim, "Muon"):
        with pytest.raises(ValueError, match=r"Invalid base: Muon can't .*use KFACAdam"):
            with_kfac(torch.optim.Muon)


# ---- the base's own steps ----


SETTINGS: list[tuple[Any, dict[str, Any]]] = [
    *((base, {}) for base in BASES),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (torch.optim.SGD, {"lr": torch.tensor(0.1)}),
    (torch.optim.Adam, {"lr": 0.1, "foreach": True, "amsgrad": True}),
    (torch.optim.Adam, {"lr": torch.tensor(0.1), "foreach": False}),
    (torch.optim.AdamW, {"lr": 0.1, "fused": True, "weight_decay": 0.1}),
]


def title(setting: Any) -> str:
    if isinstance(setting, dict):
        return " ".join(f"{key}={value}" for key, value in setting.items()) or "defaults"
    return setting.__name__


@pytest.mark.parametrize(("base", "settings"), SETTINGS, ids=title)
def test_steps_are_the_bases_own_on_preconditioned_gradients(base, settings):
    """Three steps, so that the base's state takes part; it stays in the base's own format."""
    model, opt, hand = both(base, **settings)
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


def test_capturable_is_left_to_the_base():
    """On the CPU the base refuses it, in its own words."""
    model = network()
    opt = KFACAdam(model, capturable=True, compute_method="eigen")
    backward(model, 0)
    with pytest.raises(AssertionError, match="If capturable=True"):
        opt.step()


def test_the_bases_own_errors_come_through():
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        KFACSGD(network(), lr=-1)
    with pytest.raises(ValueError, match="Invalid beta parameter"):
        KFACAdam(network(), betas=(1.5, 0.9))


# ---- copies ----


class Mine(with_kfac(torch.optim.RAdam)):
    """A user's subclass of the family."""


CLASSES = [KFACSGD, KFACAdam, KFACLAMB, dynamic, over_lars, Mine]
STAGGERED = {"factor_update_steps": 2, "inv_update_steps": 3}


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize(
    ("cls", "method", "taken"),
    [
        *((KFACSGD, "polar", taken) for taken in (0, 1)),
        *((cls, method, 4) for cls in CLASSES for method in ("polar", "eigen")),
    ],
)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_trains_on_the_same_path(duplicate, cls, method, taken):
    model = network()
    opt = cls(model, lr=0.01, compute_method=method, **STAGGERED)
    train(model, opt, range(taken))
    twin_model, twin = duplicate((model, opt))
    assert type(twin) is type(opt)
    assert_same(twin.state_dict(), opt.state_dict())
    at_copy = values(model)
    train(twin_model, twin, range(taken, taken + 4))
    assert_same(values(model), at_copy)
    train(model, opt, range(taken, taken + 4))
    assert_same(twin_model, model)
    assert_same(factors(twin), factors(opt))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_alone_brings_its_model_and_what_was_set_since(duplicate, method):
    model = network()
    opt = KFACSGD(model, lr=0.1, damping=0.1, factor_decay=0.5, compute_method=method)
    kfac = opt.preconditioner
    kfac.factor_update_steps, kfac.inv_update_steps, kfac.statistics_fraction = 2, 3, 0.5
    if method == "eigen":
        kfac.kl_clip, kfac.loss_terms, kfac.grad_scaler = 1e-5, 4, 2.0
    opt.param_groups[0]["damping"] = 0.2
    twin = duplicate(opt)
    names = ("kl_clip", "factor_update_steps", "inv_update_steps", "loss_terms")
    for name in (*names, "statistics_fraction"):
        assert getattr(twin.preconditioner, name) == getattr(kfac, name)
    train(model, opt, range(4))
    train(twin.preconditioner.model, twin, range(4))
    assert twin.preconditioner.model is not model
    assert_same(twin.preconditioner.model, model)


def test_a_dynamic_class_is_unpickled_in_a_new_process(tmp_path):
    model = network()
    opt = dynamic(model, lr=0.01, **STAGGERED)
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
    model = network()
    opt = KFACSGD(model, lr=0.1)
    train(model, opt, range(2))
    x = batch(0)[0]
    torch.save(model, tmp_path / "model")
    torch.save(x, tmp_path / "x")
    script = f"""{WITHOUT_PACKAGE}
import torch
model = torch.load({str(tmp_path / "model")!r}, weights_only=False)
x = torch.load({str(tmp_path / "x")!r})
y = model(x)
y.sum().backward()
torch.save([y.detach(), model[0].weight.grad], {str(tmp_path / "y")!r})
"""
    subprocess.run(python("-I", "-c", script), check=True, cwd=tmp_path)
    y = model(x)
    weight_gradient = torch.autograd.grad(y.sum(), model[0].weight)[0]
    assert_same(torch.load(tmp_path / "y"), [y.detach(), weight_gradient])
