"""The LSTM that is unrolled by hand: it is nn.LSTM, and K-FAC covers it."""

import torch

from benchmarks.recurrent import LENGTH, TOKENS, Network, train
from tests.support.close import assert_close


def test_unrolled_is_fused():
    found = []
    for unrolled in (False, True):
        torch.manual_seed(0)
        network = Network(unrolled).double()
        tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % TOKENS
        found.append(network(tokens))
    assert_close(*found, 1e-12)


def test_only_the_unrolled_one_is_covered():
    # All but biases, which shift entries.
    assert train(unrolled=True, kfac=True, lr=0.01, seed=0, steps=21)["covered"] > 0.98
    assert train(unrolled=False, kfac=True, lr=0.01, seed=0, steps=21)["covered"] < 0.1
