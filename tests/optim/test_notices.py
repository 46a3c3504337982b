"""Warnings about settings without the effect that one would expect; steps that are refused."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD, KFACAdam
from tests.support.training import backward, network, train


def stepped(opt: Any, model: nn.Module) -> list[str]:
    """Return the warnings of two steps."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            opt.zero_grad()
            model(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
            opt.step()
    assert {w.filename for w in found} <= {__file__}
    return [str(w.message) for w in found]


# ---- the KL clip ----


@pytest.mark.parametrize(
    ("options", "lr", "said"),
    [
        ({}, 0.3, True),
        ({}, 0.1, False),
        ({}, 0.05, False),
        ({"kl_clip_lr": "current"}, 0.3, False),
        ({"kl_clip": None}, 0.3, False),
        ({"compute_method": "polar"}, 0.3, False),  # has no clip
    ],
)
def test_an_lr_beyond_what_the_clip_goes_by_is_noticed_once(options, lr, said):
    """As OneCycleLR raises it, whatever the constructor was given."""
    model = network()
    first, last = model[0].parameters(), model[2].parameters()
    options = {"compute_method": "eigen", **options}
    opt = KFACSGD([{"params": first}, {"params": last}], lr=0.1, model=model, **options)
    assert not stepped(opt, model)
    opt.param_groups[1]["lr"] = lr
    text = (
        "lr 0.3 is above kl_clip_lr 0.1 in parameter group 1: the KL clip counts with "
        "kl_clip_lr, the lr at construction, so clipped steps are 3 times as long as kl_clip "
        'allows; build the optimizer with the peak lr, set param_groups[i]["kl_clip_lr"], or use '
        'kl_clip_lr="current"'
    )
    assert stepped(opt, model) == [text] * said


def test_a_schedule_that_goes_beyond_it_is_noticed_at_the_users_line():
    model = network()
    opt = KFACSGD(model, lr=0.01, momentum=0.9, compute_method="eigen")
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.5, total_steps=20)
    with pytest.warns(UserWarning, match="in parameter group 0: .* peak lr") as found:
        for _ in range(10):
            opt.zero_grad()
            model(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
            opt.step()
            schedule.step()
    assert [w.filename for w in found] == [__file__]


def test_groups_without_covered_layers_have_no_clip_to_go_beyond():
    model = network()
    groups = [{"params": list(part.parameters())} for part in (model[0], model[2])]
    opt = KFACSGD(groups, lr=0.1, model=model, skip_layers=["^2$"], compute_method="eigen")
    opt.param_groups[1]["lr"] = 0.5
    assert not stepped(opt, model)


def test_lr_0_at_construction_leaves_the_clip_off():
    with pytest.warns(UserWarning, match="lr 0 at construction turns the KL clip off; build") as w:
        KFACSGD(network(), lr=0.0, compute_method="eigen")
    assert [x.filename for x in w] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFACSGD(network(), lr=0.0)  # has no clip


# ---- options without use ----


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_clip_that_is_set_is_refused(cls):
    opt = cls(network(), lr=0.1)
    with pytest.raises(ValueError, match=r"Invalid kl_clip: 0\.5 with compute_method='polar', whi"):
        opt.preconditioner.kl_clip = 0.5
    assert opt.preconditioner.kl_clip != 0.5


def test_a_notice_comes_also_in_code_without_a_name():
    """As some embedded interpreters run it."""
    code = """
import torch
from kaisa_optim import KFACAdam
model = torch.nn.Linear(4, 3)
opt = KFACAdam(model, lr=0.1)
model(torch.ones(2, 4)).square().sum().backward()
opt.param_groups[0]["staggered"] = True
opt.step()
"""
    with pytest.warns(UserWarning, match="'staggered', .* no effect in a group"):
        exec(code, {})


def test_an_option_that_nobody_reads_in_a_group_is_named_once():
    model = network()
    opt = KFACSGD(model, lr=0.1)
    train(model, opt, [0])
    opt.param_groups[0]["inv_update_steps"] = 1
    with pytest.warns(
        UserWarning, match=r"'inv_update_steps', .* no effect .*preconditioner\.inv_update_steps"
    ):
        train(model, opt, [1])
    train(model, opt, [2])


@pytest.mark.parametrize(
    ("key", "meant"),
    [("dampning", "damping"), ("weight_dacay", "weight_decay")],
)
def test_a_misspelt_key_of_a_group_is_noticed_once(key, meant):
    model = network()
    said = f"'{key}' (did you mean '{meant}'?)"
    text = f"a parameter group has an unknown key, which has no effect: {said}"
    groups = [{"params": [p], key: 0.1} for p in model[0].parameters()]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "the base optimizer updates these")
        opt = KFACSGD(groups, lr=0.1, model=model)
    assert [(str(w.message), w.filename) for w in found] == [(text, __file__)]
    with pytest.warns(UserWarning, match=re.escape(text)) as found:
        opt.add_param_group({"params": model[2].parameters(), key: 0.1})
    assert [w.filename for w in found] == [__file__]


def test_keys_of_others_in_a_group_are_nobodys_business():
    model = network()
    opt = KFACSGD(model, lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=9)  # max_momentum and others
    group = {**opt.param_groups[0], "name": "all", "lr_scale": 0.5, "param_names": [], 3: 4}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        sgd = KFACSGD([group], lr=0.1, model=model)
        adam = KFACAdam(
            [{"params": model.parameters(), "initial_lr": 0.1, "swa_lr": 1}], model=model
        )
    assert not found
    assert sgd.param_groups[0].items() >= {"lr_scale": 0.5, "name": "all", 3: 4}.items()
    assert adam.param_groups[0]["swa_lr"] == 1


# ---- what calls step() ----


def scaled_training(model: nn.Module, opt: Any, scaler: Any, steps: Any) -> None:
    for i in steps:
        opt.zero_grad()
        backward(model, i, scaler.scale)
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize(
    ("cls", "method", "told", "enabled", "says"),
    [
        (KFACSGD, "eigen", False, True, True),
        (KFACSGD, "eigen", True, True, False),
        (KFACSGD, "eigen", False, False, False),
        (KFACSGD, "polar", False, True, False),  # directions do not depend on the scale of G
    ],
)
def test_a_scaler_that_was_not_given_is_named(cls, method, told, enabled, says):
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
    options = {"compute_method": method, **({"grad_scaler": scaler} if told else {})}
    opt = cls(model, lr=0.1, **options)
    if says:
        with pytest.warns(UserWarning, match=r"called by a GradScaler .* pass grad_scaler=scaler"):
            scaled_training(model, opt, scaler, [0])
    scaled_training(model, opt, scaler, [1, 2])  # once


def test_a_launcher_without_a_process_group_is_noticed(monkeypatch):
    model = nn.Linear(3, 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="WORLD_SIZE is 4") as found:
        KFACSGD(model, lr=0.1)
    assert [w.filename for w in found] == [__file__]
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFACSGD(model, lr=0.1)


def test_cuda_graph_capture_is_refused(monkeypatch):
    model = network()
    opt = KFACSGD(model)
    backward(model, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph"):
        opt.step()


# ---- the order of a sequence's dimensions ----


class Attending(nn.Module):
    """A model that takes sequences first, unless it turns them itself."""

    def __init__(self, turned=False, **options):
        super().__init__()
        self.turned = turned
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, **options)

    def forward(self, x):
        return self.encoder(x.transpose(0, 1) if self.turned else x)


def said_of(model, shape, cls=KFACSGD, **options):
    opt = cls(model, lr=0.1, factor_update_steps=1, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            opt.zero_grad()
            model(torch.randn(*shape)).square().mean().backward()
            opt.step()
    assert {w.filename for w in found} <= {__file__}
    return [str(w.message) for w in found]


def test_a_sequence_that_comes_first_is_noticed_once():
    assert said_of(Attending(), (5, 3, 4), compute_method="eigen", kl_clip_lr="current") == [
        "layer 'encoder.self_attn.in_proj' has batch_first=False and sees 3 examples of 5 "
        "positions, but K counts 5 examples, the first dimension of the model's input; build the "
        "layer with batch_first=True and give the model examples first, or set loss_terms to the "
        "number of terms that the loss averages"
    ]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Attending(batch_first=True), {}),
        (Attending(turned=True), {}),  # K is right
        (Attending(), {"loss_terms": "positions"}),  # the same in either order
        (Attending(), {"loss_terms": 3.0}),
        (Attending(), {"loss_reduction": "sum"}),
        (Attending(), {"normalization": "kaisa"}),
        (Attending(), {"compute_method": "polar"}),  # G's scale has no part in it
    ],
)
@pytest.mark.filterwarnings("ignore:the base optimizer updates these")
def test_where_k_is_right_or_has_no_part_nothing_is_said(model, options):
    method = options.get("compute_method", "eigen")
    options = {**({"kl_clip_lr": "current"} if method == "eigen" else {}), **options}
    assert said_of(model, (5, 3, 4), **{"compute_method": method, **options}) == []
