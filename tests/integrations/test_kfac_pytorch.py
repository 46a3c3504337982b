"""With ``normalization="kaisa"`` training goes as with kfac-pytorch, where that is installed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kaisa_optim import KFACSGD

preconditioners = pytest.importorskip("kfac.preconditioner")

SHARED = {"factor_update_steps": 1, "inv_update_steps": 3}
SHARED |= {"damping": 0.003, "factor_decay": 0.95, "kl_clip": 0.001}


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12 * 16, 20),
        nn.ReLU(),
        nn.Linear(20, 5),
    )


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("outer", [True, False])
def test_twenty_steps_agree(outer):
    theirs, ours, first = network(), network(), network()
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    shared = {**SHARED, "compute_eigenvalue_outer_product": outer}
    preconditioner = preconditioners.KFACPreconditioner(theirs, lr=0.1, **shared)
    how = {"momentum": 0.9, "compute_method": "eigen", "normalization": "kaisa"}
    optimizer = KFACSGD(ours, lr=0.1, **how, **shared)
    for _ in range(20):
        x, y = torch.randn(16, 3, 8, 8), torch.randint(5, (16,))
        for model, steps in ((theirs, (preconditioner, sgd)), (ours, (optimizer,))):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for each in steps:
                each.step()
    for p, q, start in zip(theirs.parameters(), ours.parameters(), first.parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-5 * (p - start).abs().max()
