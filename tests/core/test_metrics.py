"""How training goes, in plain numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD, KFACAdam
from tests.support.ranks import run
from tests.support.training import network, train


def trained(steps: int, cls: type = KFACAdam, **options: Any):
    model = network()
    opt = cls(model, lr=1e-3, **options)
    train(model, opt, range(steps))
    return opt.preconditioner


def test_counts_follow_the_steps():
    found = trained(0).metrics(wait=True)
    assert (found["refreshes"], found["layers_without_statistics"]) == (0, 2)
    assert not any(name.startswith(("age", "residual")) for name in found)
    options = {"factor_update_steps": 1, "inv_update_steps": 6, "staggered": False}
    kfac = trained(1, **options)
    layers = len(kfac.layers)
    assert kfac.metrics() == {
        "steps": 1,
        "layers_without_statistics": 0,
        "refreshes": layers,
        "failures": 0,
        "rejected": 0,
        "bytes": kfac.memory_usage()["total"],
        "age_mean": 0.0,
        "age_max": 0,
    }
    for steps, refreshes, age in ((6, 2, 0), (8, 3, 1)):  # steps 0, 5 and 6 refresh
        found = trained(steps, **options).metrics()
        assert (found["refreshes"], found["age_max"]) == (refreshes * layers, age)


def test_no_tensor_is_read_unless_it_is_asked_for(monkeypatch):
    kfac = trained(1)

    def read(*_):
        raise AssertionError("the host waits")

    monkeypatch.setattr(torch.Tensor, "item", read)
    monkeypatch.setattr(torch.Tensor, "tolist", read)
    kfac.metrics()
    with pytest.raises(AssertionError, match="the host waits"):
        kfac.metrics(wait=True)


@pytest.mark.parametrize("widest", [16384, 2])
def test_roots_fit_the_averages_that_they_were_made_of(widest):
    options = {"factor_update_steps": 1, "max_factor_size": widest}
    found = trained(1, **options).metrics(wait=True)
    assert 0 <= found["residual_mean"] <= found["residual_max"] < 1e-5
    # Step 1 gathers, and does not refresh.
    assert trained(2, **options, factor_decay=0.0).metrics(wait=True)["residual_max"] > 1e-2


@pytest.mark.parametrize("method", ["polar", "eigen"])
def test_a_loaded_state_has_its_measures_before_a_step(method):
    options = {"lr": 1e-3, "compute_method": method}
    model, other = network(), network()
    opt, fresh = KFACAdam(model, **options), KFACAdam(other, **options)
    train(model, opt, [0])
    fresh.load_state_dict(opt.state_dict())
    (name,) = {"residual_max", "condition_max"} & opt.preconditioner.metrics(wait=True).keys()
    found, wanted = (x.preconditioner.metrics(wait=True)[name] for x in (fresh, opt))
    assert found == pytest.approx(wanted)


def test_conditions_are_of_factors_with_the_damping():
    kfac = trained(1, KFACSGD, compute_method="eigen", damping=0.5)
    expected = []
    for name in kfac.layers:
        for factor in kfac.factors(name):
            values = torch.linalg.eigvalsh(factor.double()).clamp(min=0) + 0.5
            expected += (values.amax(1) / values.amin(1)).tolist()
    found = kfac.metrics(wait=True)
    assert found["condition_max"] == pytest.approx(max(expected), rel=1e-4)
    assert found["condition_mean"] == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    assert 0 < found["clip"] <= 1
    assert trained(1, KFACSGD, compute_method="eigen", kl_clip=1e9).metrics(wait=True)["clip"] == 1
    off = trained(1, KFACSGD, compute_method="eigen", kl_clip=None)
    assert "clip" not in off.metrics(wait=True)


@pytest.mark.filterwarnings("ignore:statistics that were not finite")
def test_rejected_statistics_are_counted():
    model = nn.Linear(3, 2)
    opt = KFACAdam(model, lr=1e-3, factor_update_steps=1, inv_update_steps=1)
    for scale in (1.0, torch.inf, 1.0):
        opt.zero_grad()
        (model(torch.ones(4, 3)).square().mean() * scale).backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        opt.step()
    assert opt.preconditioner.metrics()["rejected"] == 1


# ---- ranks ----


def of_rank() -> dict[str, float]:
    return trained(1, assignment="layer-wise").metrics(wait=True)


def test_each_rank_tells_its_own_share_without_a_collective():
    one, other = run(2, of_rank)
    assert one["refreshes"] == other["refreshes"] == 2
    assert one["residual_max"] != other["residual_max"]
