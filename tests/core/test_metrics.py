"""How training goes, in plain numbers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from kaisa_optim.curvature.rules.polar import PolarRule
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import backward, network
from tests.support.watch import matrix_of, normal, taken


def trained(steps: int, cls: type = KFACAdam, **options: Any):
    model = network()
    opt = cls(model, lr=1e-3, **options)
    for i in range(steps):
        opt.zero_grad()
        backward(model, i)
        opt.step()
    return opt.preconditioner


def test_counts_follow_the_steps():
    options = {"factor_update_steps": 1, "inv_update_steps": 3, "staggered": False}
    kfac = trained(1, **options)
    layers = len(kfac.layers)
    assert kfac.metrics() == {
        "steps": 1,
        "covered_share": kfac.coverage().share,
        "layers_without_statistics": 0,
        "refreshes": layers,
        "failures": 0,
        "rejected": 0,
        "elsewhere_max": 0.0,
        "bytes": kfac.memory_usage()["total"],
        "bytes_received": 0.0,
        "age_mean": 0.0,
        "age_max": 0,
    }
    found = trained(6, **options).metrics()  # steps 0, 3 and 5 refresh
    assert (found["refreshes"], found["age_max"]) == (3 * layers, 0)
    found = trained(5, **options).metrics()
    assert (found["refreshes"], found["age_max"]) == (2 * layers, 1)


def test_before_the_first_step_nothing_is_refreshed():
    found = trained(0).metrics(wait=True)
    assert (found["refreshes"], found["layers_without_statistics"]) == (0, 2)
    assert not any(name.startswith(("age", "residual")) for name in found)


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
    assert "clip" not in trained(1, KFACSGD, compute_method="eigen", kl_clip=None).metrics(
        wait=True
    )


@pytest.mark.filterwarnings("ignore:statistics that were not finite")
def test_rejected_statistics_are_counted():
    model = nn.Linear(3, 2)
    opt = KFACAdam(model, lr=1e-3, factor_update_steps=1, inv_update_steps=1)
    for scale in (1.0, torch.inf):
        opt.zero_grad()
        (model(torch.ones(4, 3)).square().mean() * scale).backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        opt.step()
    assert opt.preconditioner.metrics()["rejected"] == 1


# ---- the last step ----

Told = dict[str, tuple[list[float], list[float]]]  # lengths and cosines of a layer's blocks


def shapes(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Layers of one and of two blocks, with and without a bias."""
    torch.manual_seed(0)
    conv = nn.Conv1d(4, 4, 2, groups=2)
    own = [conv, nn.Flatten(), nn.Linear(16, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*own).to(dtype)


def stepped(
    cls: Any, model: nn.Module, steps: int, bias_rate: float = 1.0, **options: Any
) -> tuple[Any, Told]:
    """Return the optimizer, and what the last step's weights, momenta and gradients tell."""
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": biases, "lr": bias_rate * options["lr"]},
    ]
    opt = cls(groups, model=model, weight_decay=0.0, factor_update_steps=1, **options)
    steps_taken: dict[str, Tensor] = {}
    for step in range(steps):
        opt.zero_grad()
        x = normal(6, 4, 5, seed=step).to(model[0].weight.dtype)
        F.mse_loss(model(x), normal(6, 3, seed=99 + step).to(x.dtype)).backward()
        steps_taken = taken(opt, model)
    found: Told = {}
    for name, layer in opt.preconditioner.layers.items():
        module = model.get_submodule(name)
        if any(p not in opt.state or momentum_of(opt, p) is None for p in layer.parameters):
            continue  # another rank steps it
        has_bias = len(layer.parameters) == 2
        momentum = [momentum_of(opt, p) for p in layer.parameters]
        m = matrix_of(module, momentum[0], momentum[1] if has_bias else None)
        d = matrix_of(
            module, steps_taken[f"{name}.weight"], steps_taken[f"{name}.bias"] if has_bias else None
        )
        lengths = d.square().mean((1, 2)).sqrt() / options["lr"]
        cosines = F.cosine_similarity(d.flatten(1), m.flatten(1))
        found[name] = lengths.tolist(), cosines.tolist()
    return opt, found


def momentum_of(opt: Any, p: Tensor) -> Tensor | None:
    """Return the momentum that the base would step along."""
    entry = opt.state[p]
    if isinstance(opt, KFACSGD):
        return entry.get("momentum_buffer")
    buffer = entry.get("exp_avg")
    return None if buffer is None else torch.lerp(p.grad, buffer, 0.9)


def assert_told(found: dict[str, float], layers: Told) -> None:
    both = zip(*layers.values(), strict=True)
    for name, of_layers in zip(("length", "cosine"), both, strict=True):
        values = [x for blocks in of_layers for x in blocks]
        mean = sum(values) / len(values)
        for kind, expected in (("mean", mean), ("min", min(values)), ("max", max(values))):
            told = found[f"{name}_{kind}"]
            assert told == pytest.approx(expected, rel=1e-8), f"{name}_{kind}"


STEPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (KFACAdam, {"lr": 0.01}),
    "adam, a bias with another rate": (KFACAdam, {"lr": 0.01, "bias_rate": 0.3}),
    "sgd": (KFACSGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd, a bias with another rate": (KFACSGD, {"lr": 0.1, "momentum": 0.9, "bias_rate": 0.3}),
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("steps", [1, 4])
def test_lengths_and_cosines_are_those_of_the_step(kind, steps):
    cls, options = STEPS[kind]
    opt, expected = stepped(cls, shapes(), steps, **options)
    assert len(expected) == 3
    assert_told(opt.preconditioner.metrics(wait=True), expected)


def test_any_other_base_tells_the_length_of_the_step_itself():
    opt, told = stepped(with_kfac(torch.optim.NAdam), shapes(), 2, lr=0.01)
    expected = [x * 0.01 for lengths, _ in told.values() for x in lengths]
    found = opt.preconditioner.metrics(wait=True)
    assert found["length_max"] == pytest.approx(max(expected), rel=1e-8)
    assert found["length_min"] == pytest.approx(min(expected), rel=1e-8)


@pytest.mark.parametrize("cls", [KFACAdam, KFACSGD, KFACLAMB])
@pytest.mark.parametrize(("turn", "cosine"), [(torch.neg, -1.0), (torch.clone, 1.0)])
def test_a_cosine_may_be_negative(cls, turn, cosine):
    with mock.patch.object(PolarRule, "apply", lambda rule, group, m, *rest: turn(m)):
        found = trained(2, cls).metrics(wait=True)
    assert found["cosine_min"] == pytest.approx(cosine)
    assert found["cosine_max"] == pytest.approx(cosine)


@pytest.mark.parametrize("cls", [KFACAdam, KFACSGD])
def test_blocks_at_rest_have_neither(cls):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    opt = cls(model, lr=0.1)
    for p in model[1].parameters():
        torch.nn.init.zeros_(p)  # no gradient arrives at the first layer
    F.mse_loss(model(normal(5, 4)), normal(5, 2)).backward()
    opt.step()
    found = opt.preconditioner.metrics(wait=True)
    for name in ("length", "cosine"):
        assert 0 < found[f"{name}_min"] == found[f"{name}_max"] == found[f"{name}_mean"]


def test_only_the_last_step_is_told():
    opt, _ = stepped(KFACAdam, shapes(), 2, lr=0.01)
    model = opt.preconditioner.model
    opt.zero_grad()
    model[2:](normal(6, 16)).square().mean().backward()  # not the convolution
    opt.step()
    assert sum(len(blocks.layers) for blocks, _ in opt.preconditioner.gradients.last.given) == 2


def test_nothing_large_is_kept_of_a_step():
    """Else directions would take memory until the next step."""
    for cls in (KFACAdam,):
        opt, _ = stepped(cls, shapes(), 1, lr=0.01)
        for blocks, given in opt.preconditioner.gradients.last.given:
            kept = list(given)
            tensors = [x for x in kept if isinstance(x, Tensor)]
            assert tensors
            assert all(x.untyped_storage().nbytes() <= 8 * 5 * sum(blocks.counts) for x in tensors)


def test_the_papers_methods_tell_neither():
    found = trained(1, KFACSGD, compute_method="inverse").metrics(wait=True)
    assert not any(name.startswith(("length", "cosine")) for name in found)


def of_blocks(kind: str) -> tuple[Told, dict[str, float]]:
    cls, own = STEPS[kind]
    opt, expected = stepped(cls, shapes(), 3, **own, assignment="layer-wise")
    return expected, opt.preconditioner.metrics(wait=True)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_each_rank_tells_the_layers_that_it_preconditions(kind):
    found = run(2, of_blocks, kind)
    names = [set(expected) for expected, _ in found]
    assert names[0] and names[1] and not names[0] & names[1]
    assert names[0] | names[1] == {"0", "2", "4"}
    for expected, told in found:
        assert_told(told, expected)


def of_shards(kind: str) -> dict[str, float]:
    cls, own = STEPS[kind]
    model = shapes()
    fully_shard(model)
    opt = cls(model, weight_decay=0.0, factor_update_steps=1, **own)
    for step in range(3):
        opt.zero_grad()
        F.mse_loss(model(normal(6, 4, 5, seed=step)), normal(6, 3, seed=99 + step)).backward()
        opt.step()
    return opt.preconditioner.metrics(wait=True)


@pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_owners_tell_the_layers_of_shards(kind):
    """Ranks see the same rows, so that the steps are those of one process."""
    cls, own = STEPS[kind]
    _, expected = stepped(cls, shapes(), 3, **own)
    found = run(2, of_shards, kind)
    for name, column in (("length", 0), ("cosine", 1)):
        values = [x for both in expected.values() for x in both[column]]
        assert max(x[f"{name}_max"] for x in found) == pytest.approx(max(values), rel=1e-6)
        assert min(x[f"{name}_min"] for x in found) == pytest.approx(min(values), rel=1e-6)
    assert found[0] != found[1]


# ---- ranks ----


def of_rank() -> dict[str, float]:
    return trained(1, assignment="layer-wise").metrics(wait=True)


def test_each_rank_tells_its_own_share_without_a_collective():
    one, other = run(2, of_rank)
    assert one["refreshes"] == other["refreshes"] == 2
    assert one["bytes_received"] > 0 and one["residual_max"] != other["residual_max"]
