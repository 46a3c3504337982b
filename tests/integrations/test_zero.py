"""ZeRO, which spreads a base optimizer's state over ranks: refused, with the alternative."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kaisa_optim import KFACSGD, KFACAdam, with_kfac
from tests.support.ranks import fresh, run
from tests.support.training import backward, network, train

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

INSTEAD = 'assignment="layer-wise"'


# ---- torch's ----


def inside(model_given: bool) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    more = {"model": model} if model_given else {}
    try:
        ZeroRedundancyOptimizer(model.parameters(), KFACAdam, lr=0.1, **more)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", [1, 2])
def test_zero_redundancy_around_k_fac_is_refused(world):
    """Two ranks had different layers, and one rank got no word."""
    for given in (True, False):
        for text in run(world, inside, given):
            assert "ZeroRedundancyOptimizer gives each rank a part" in text and INSTEAD in text


def test_zero_redundancy_is_no_base():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class OfMyOwn(ZeroRedundancyOptimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, torch.optim.SGD, lr=lr)

    for base in (ZeroRedundancyOptimizer, OfMyOwn):
        with pytest.raises(ValueError, match=f"Invalid base: {base.__name__} .*layer-wise"):
            with_kfac(base)


def moments_here(assignment: str) -> int:
    model = network()
    opt = KFACAdam(model, lr=0.1, assignment=assignment)
    train(model, opt, [0])
    entries = [entry for state in opt.state.values() for entry in state.items()]
    return sum(tensor.numel() for name, tensor in entries if name == "exp_avg")


def test_layer_wise_spreads_moments_as_zero_does():
    whole = run(2, moments_here, "opt")
    parts = run(2, moments_here, "layer-wise")
    assert whole[0] == whole[1] == sum(parts) and max(parts) < whole[0]


# ---- DeepSpeed's ----


def test_copies_of_the_weights_in_the_groups_are_refused():
    """As DeepSpeed puts them there, whether it is installed or not."""
    model = network()
    opt = KFACSGD(model, lr=0.1)
    opt.param_groups[0]["params"] = [p.detach().clone() for p in model.parameters()]
    backward(model, 0)
    with pytest.raises(RuntimeError, match=f"Invalid param_groups: .* under ZeRO .*{INSTEAD}"):
        opt.step()


def deep(stage: int, rounded: bool = False) -> list[float]:
    """Return the losses of three steps under DeepSpeed, on one rank."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    import deepspeed

    # Shared memory for ranks on CPUs is compiled at the start, which takes minutes.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    settings = {
        "train_micro_batch_size_per_gpu": 64,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": rounded},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=KFACSGD(model, lr=0.1), config=settings
    )
    x = torch.randn(64, 8, dtype=torch.bfloat16 if rounded else torch.float32)
    losses = []
    for _ in range(3):
        loss = F.mse_loss(engine(x), x.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)


@needs_deepspeed
def test_deepspeed_at_stage_0_trains():
    (losses,) = fresh(1, deep, 0)
    assert losses[2] < losses[1] < losses[0]


@needs_deepspeed
@pytest.mark.parametrize(
    ("stage", "rounded"), [(1, False), (2, False), (3, False), (0, True), (1, True)]
)
def test_deepspeed_with_copies_of_the_weights_is_refused(stage, rounded):
    (found,) = fresh(1, deep, stage, rounded, expect_errors=True)
    assert found.error is not None and "Invalid param_groups" in found.error
    assert INSTEAD in found.error
