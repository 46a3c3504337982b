"""Warnings about settings without the effect that one would expect; steps that are refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD, KFACAdam
from tests.support.training import backward, network


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
model.scale = torch.nn.Parameter(torch.ones(100))
KFACAdam(model, lr=0.1)
"""
    with pytest.warns(UserWarning, match="the base optimizer updates these"):
        exec(code, {})


# ---- what calls step() ----


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
