"""Tables against the dense reference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD
from tests.layers.cases import Case, Net, check, each, loss_of, tokens
from tests.support import reference as ref
from tests.support.watch import PAPERS

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")


EMBEDDING = {
    "indices": Case(lambda: nn.Embedding(6, 3), lambda: tokens(5, high=6)),
    "sequences": Case(lambda: nn.Embedding(6, 3), lambda: tokens(3, 4, high=6)),
    "4d": Case(lambda: nn.Embedding(4, 2), lambda: tokens(2, 3, 2, high=4)),
    "repeated": Case(lambda: nn.Embedding(6, 3), lambda: torch.tensor([[1, 1, 4], [1, 4, 4]])),
    "padding_idx": Case(
        lambda: nn.Embedding(6, 3, padding_idx=2), lambda: torch.tensor([[1, 2, 4], [2, 2, 0]])
    ),
    "last padding_idx": Case(
        lambda: nn.Embedding(6, 3, padding_idx=-1), lambda: torch.tensor([[5, 2, 4], [2, 5, 0]])
    ),
}


@each(EMBEDDING)
def test_embedding(case):
    check(case, diagonal=(True, False))


@pytest.mark.parametrize(("terms", "count"), [("examples", 3.0), ("positions", 12.0), (7.5, 7.5)])
def test_loss_terms(terms, count):
    layer = nn.Embedding(6, 3).double()
    net = Net(layer)
    x = tokens(3, 4, high=6)
    a = ref.input_rows(layer, x)
    g = ref.gradient_rows(layer, loss_of, x)
    opt = KFACSGD(net, lr=1.0, **PAPERS, loss_terms=terms)
    loss_of(net(x)).backward()
    opt.step()
    for actual, wanted in zip(
        opt.preconditioner.factors("layer"), ref.factors(a, g, count, diagonal_a=True), strict=True
    ):
        ref.assert_close(actual, wanted)
