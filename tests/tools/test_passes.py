"""Operations and rows of a batch, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD
from kaisa_optim.tools.passes import passes_of
from tests.support.cluster import network
from tests.support.watch import Body


def test_rows_and_operations_of_convolutions_and_linear_layers():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 5))
    layers = KFACSGD(net, lr=0.1).preconditioner.layers.values()
    batch = torch.zeros(8, 2, 5, 5)
    found = passes_of(net, batch, layers, 1.0)
    assert found.rows == {"0": 8 * 9, "2": 8}
    forward = 2 * 8 * 9 * 4 * 18 + 2 * 8 * 36 * 5
    assert found.operations == 3 * forward
    # Inputs, weights, biases and outputs; flattening is a view.
    numbers = [8 * 50 + 72 + 4 + 8 * 36, 8 * 36 + 180 + 5 + 40]
    assert found.touched == 3 * 4 * sum(numbers)
    assert passes_of(net, (batch,), layers, 0.25).rows == {"0": 18, "2": 2}
    assert passes_of(net, {"input": batch}, layers, 1.0) == found


def test_attention_sees_a_row_for_each_token():
    net = network("tokens")
    layers = KFACSGD(net, lr=0.1).preconditioner.layers.values()
    rows = passes_of(net, torch.zeros(6, 3, dtype=torch.long), layers, 1.0).rows
    assert rows.pop("head") == 6
    assert set(rows.values()) == {18}


@pytest.mark.parametrize("whole", [False, True])
def test_scores_of_attention_are_not_written(whole):
    inner = nn.MultiheadAttention(8, 2, batch_first=True)
    net = Body(lambda m, x: nn.functional.scaled_dot_product_attention(x, x, value=x))
    if whole:
        net = Body(lambda m, x: m.inner(x, x, x, need_weights=False)[0], inner=inner)
    few, many = (passes_of(net, torch.zeros(2, 3 * n, 8), [], 1.0).touched for n in (100, 1000))
    assert many < 10.1 * few  # scores would take a hundred times the bytes
    if not whole:
        assert few == 3 * 4 * 4 * 2 * 300 * 8
    plain = nn.functional.scaled_dot_product_attention
    assert plain.__name__ == "scaled_dot_product_attention"


def test_operations_that_move_little_count_little():
    one = passes_of(nn.Linear(8, 8, bias=False), torch.zeros(2, 5, 8), [], 1.0).touched
    assert one == 3 * 4 * (2 * 80 + 64)
    words = torch.zeros(2, 5, dtype=torch.long)
    found = passes_of(nn.Embedding(1000, 8), words, [], 1.0).touched
    assert found == 3 * (8 * 10 + 2 * 4 * 80)


class Table:
    values = None


class Rotated(nn.Module):
    """A module that makes tables in its first pass, of a module, in a dict and in an object."""

    def __init__(self):
        super().__init__()
        self.inner, self.dict, self.table = nn.Linear(4, 4), {}, Table()
        self.scale, self.cos = nn.Parameter(torch.ones(4)), None

    def forward(self, x):
        if self.cos is None:
            self.cos = self.scale.cos()  # a part of the graph, in a real pass
            self.register_buffer("sin", torch.arange(4.0).sin(), persistent=False)
            self.dict[len(x)] = self.table.values = torch.arange(4.0)
        return self.inner(x) * self.cos + self.sin + self.dict[len(x)] * self.table.values


@pytest.mark.parametrize("first", [False, True])
def test_caches_of_the_model_stay_real(first):
    net, x = Rotated(), torch.ones(3, 4)
    if first:
        net(x)
    before = set(vars(net)), set(net.state_dict()), set(net._buffers)
    layers = KFACSGD(net, lr=0.1).preconditioner.layers.values()
    assert passes_of(net, x, layers, 1.0).rows["inner"] == 3
    assert before == (set(vars(net)), set(net.state_dict()), set(net._buffers))
    assert not net(x).is_meta and not net.cos.is_meta and len(net.inner._forward_hooks) <= 1


def test_a_batch_that_does_not_fit_is_refused():
    net = nn.Sequential(nn.Linear(4, 3))
    layers = KFACSGD(net, lr=0.1).preconditioner.layers.values()
    with pytest.raises(ValueError, match="Invalid batch: the model can't be run with it"):
        passes_of(net, torch.zeros(2, 5), layers, 1.0)
    with pytest.raises(ValueError, match=r"Invalid batch: 32; it must be a model's input"):
        passes_of(net, 32, layers, 1.0)
