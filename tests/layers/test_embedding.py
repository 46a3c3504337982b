"""Tables against the dense reference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.layers.cases import Case, check, each, tokens

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
