"""Memory goes when its use ends: nothing waits for the search for circles of references.

That search comes late where a step makes few objects of Python's, however large their tensors are.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from tests.support import groups
from tests.support.ranks import run
from tests.support.training import warnings_as

OFTEN = {"factor_update_steps": 1, "inv_update_steps": 2}
EIGEN = {"compute_method": "eigen"}
CASES = {
    "SGD": (KFACSGD, {}),
    "SGD, all at once": (KFACSGD, {"staggered": False}),
    "eigen": (KFACSGD, {**EIGEN, "kl_clip": None}),
    "inverse": (KFACSGD, {"compute_method": "inverse"}),
    "scheduled": (KFACSGD, {**EIGEN, "damping": lambda step: 0.1, "kl_clip": lambda step: 0.1}),
    "the papers'": (KFACSGD, {**EIGEN, "normalization": "kaisa"}),
    "RAdam": (with_kfac(torch.optim.RAdam), {}),
    "Adam": (KFACAdam, {}),
    "LAMB": (KFACLAMB, {}),
}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU())
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.twice = nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner(x).transpose(1, 2)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.twice(self.twice(x).tanh())


@pytest.fixture(autouse=True, scope="module")
def thaw():
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_others(thaw):
    """Freeze what is there before the test: to search it would take most of the time."""
    gc.collect()
    gc.freeze()


def build(cls, options, wrap=lambda model: model):
    model = wrap(Mixed())
    with warnings_as("ignore"):
        return model, cls(model, lr=0.01, **{**OFTEN, **options})


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(8, 4, 6)).square().mean().backward()
    optimizer.step()


def in_circles(model, optimizer, between=lambda: None):
    """Tensors that only the search for circles finds, of some steps once all is there."""
    for _ in range(4):
        step(model, optimizer)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            between()
            for _ in range(2):  # of which one refreshes
                step(model, optimizer)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [tuple(x.shape) for x in gc.garbage if isinstance(x, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def numbers():
    """How many there are in all tensors that Python knows."""
    gc.collect()  # what others have left
    return sum(x.numel() for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter))


@pytest.mark.parametrize("case", CASES)
def test_steps_loads_and_layers_that_are_frozen_leave_nothing_behind(case):
    model, optimizer = build(*CASES[case])

    def between():
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for requires_grad in (False, True):
            model.twice.requires_grad_(requires_grad)
            step(model, optimizer)

    found = []
    with warnings_as("ignore"):
        for _ in range(3):
            assert in_circles(model, optimizer, between) == []
            found.append(numbers())
    assert found[0] == found[1] == found[2]


def test_a_circle_shows():
    model, optimizer = build(*CASES["SGD"])

    def between():
        circle = [torch.zeros(3)]
        circle.append(circle)

    assert in_circles(model, optimizer, between) == [(3,)] * 3


@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_ends_with_its_last_name(case):
    model, optimizer = build(*CASES[case])
    for _ in range(4):
        step(model, optimizer)
    gc.collect()
    gc.disable()
    try:
        modules = list(model.modules())
        step(model, optimizer)
        ours = weakref.ref(optimizer.preconditioner)
        tensors = [weakref.ref(x) for _, x in groups.tensors(optimizer)]
        del optimizer
        assert ours() is None and tensors and not any(x() is not None for x in tensors)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
        whole = weakref.ref(model)
        del model, modules
        assert whole() is None
    finally:
        gc.enable()


def in_circles_on_a_rank(case, fraction):
    torch.manual_seed(0)
    cls, options = CASES[case]
    options = {**options, "grad_worker_fraction": fraction}
    return in_circles(*build(cls, options, DistributedDataParallel))


@pytest.mark.parametrize(("case", "fraction"), [("SGD", 0.5), ("inverse", 1), ("Adam", 0.5)])
def test_steps_of_two_ranks_leave_no_circles_behind(case, fraction):
    assert run(2, in_circles_on_a_rank, case, fraction) == [[], []]
