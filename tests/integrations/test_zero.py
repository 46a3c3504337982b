"""ZeRO, which spreads a base optimizer's state over ranks: refused, with the alternative."""

from __future__ import annotations

import pytest
import torch

from kaisa_optim import KFACSGD, KFACAdam, with_kfac
from tests.support.ranks import run
from tests.support.training import backward, network

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


# ---- DeepSpeed's ----


def test_copies_of_the_weights_in_the_groups_are_refused():
    """As DeepSpeed puts them there, whether it is installed or not."""
    model = network()
    opt = KFACSGD(model, lr=0.1)
    opt.param_groups[0]["params"] = [p.detach().clone() for p in model.parameters()]
    backward(model, 0)
    with pytest.raises(RuntimeError, match=f"Invalid param_groups: .* under ZeRO .*{INSTEAD}"):
        opt.step()
