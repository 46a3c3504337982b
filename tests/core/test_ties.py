"""Weights that several modules share: one layer takes the rows of all uses."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.test_coverage import SCALES, loss_of
from tests.support.watch import Body, assert_close, exact, normal, seeded, solved, taken


class Tied(nn.Module):
    """A table that is the head's weight, too: by registration, or in the forward's code alone."""

    def __init__(self, *, bias: bool = False, registered: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3)
        self.body = nn.Linear(3, 3)
        if registered:
            self.head = nn.Linear(3, 7, bias=bias)
            self.head.weight = self.words.weight
        self.registered = registered

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(self.words(x)).tanh()
        return self.head(hidden) if self.registered else F.linear(hidden, self.words.weight)


def tied_rows(net: nn.Module, x: Tensor) -> list[Tensor]:
    """One-hot rows and ∂L/∂s of the table, then inputs and ∂L/∂s of the head."""
    words = net.words(x).detach().requires_grad_()
    hidden = net.body(words).tanh()
    logits = net.head(hidden)
    logits.retain_grad()
    F.cross_entropy(logits.flatten(0, -2), x.roll(1, -1).flatten()).backward()
    one_hot = F.one_hot(x.flatten(), len(net.words.weight)).double()
    pairs = one_hot, words.grad.flatten(0, -2), hidden.detach().flatten(0, -2)
    return [*pairs, logits.grad.flatten(0, -2)]


def tied_step(net: nn.Module, x: Tensor, **options):
    opt = exact(net, loss_terms="positions", **options)
    F.cross_entropy(net(x).flatten(0, -2), x.roll(1, -1).flatten()).backward()
    gradient = net.words.weight.grad.clone()
    return opt, gradient, taken(opt, net)["words.weight"]


def test_a_tied_weight_adds_two_products_up_as_one():
    net = seeded(Tied)
    x = torch.tensor([[0, 3, 3, 1], [6, 1, 0, 2]])
    one_hot, words, hidden, logits = tied_rows(copy.deepcopy(net), x)
    n = x.numel()
    first = one_hot.T @ one_hot / n, n * words.T @ words
    second = (n * logits.T @ logits).diagonal().diag(), hidden.T @ hidden / n
    dense = sum(torch.kron(v, d) for v, d in (first, second))
    opt, gradient, step = tied_step(net, x)
    a, g = opt.preconditioner.factors("words")
    product = torch.kron(a[0].diag(), g[0])
    assert_close(product.trace(), dense.trace())
    # Nearer than either product alone, with its trace made whole.
    best = torch.linalg.norm(product - dense)
    for v, d in (first, second):
        alone = torch.kron(v, d)
        scaled = alone * dense.trace() / alone.trace()
        assert best < torch.linalg.norm(scaled - dense)
    assert best < 0.5 * torch.linalg.norm(dense)
    assert_close(step, solved(g, a[0].diag()[None], gradient[None])[0], 1e-8)


@pytest.mark.parametrize("trained", [False, True])
def test_one_use_alone_of_a_tied_weight_is_exact(trained):
    """The table's own rows have no gradient, or a zero, and the head is a linear layer."""
    net, plain = seeded(Tied), seeded(Tied)
    plain.head.weight = nn.Parameter(plain.words.weight.detach().clone())
    x = normal(6, 3)
    steps = []
    for one in (net, plain):
        opt = exact(one, max_factor_size=6)
        with torch.set_grad_enabled(trained):
            hidden = one.words(torch.arange(6))
        loss_of(one.head(0 * hidden + x)).backward()
        steps.append(taken(opt, one))
    assert_close(steps[0]["words.weight"], steps[1]["head.weight"], 1e-9)


def test_several_linear_layers_of_one_weight_are_one_with_all_their_rows():
    x, weight, steps = normal(6, 3), normal(3, 3, seed=2), []
    one = nn.Linear(3, 3, bias=False)
    for second in (nn.Linear(3, 3, bias=False), one):
        one.weight = second.weight = nn.Parameter(weight.clone())
        twice = Body(lambda m, x: m.second(m.first(x).tanh()), first=one, second=second)
        opt = exact(twice)
        loss_of(twice(x)).backward()
        steps.append(taken(opt, twice)["first.weight"])
        assert opt.preconditioner.coverage().share == 1
    assert_close(*steps, 1e-9)


def test_the_base_steps_the_bias_beside_a_tied_weight():
    net = seeded(lambda: Tied(bias=True))
    opt, _, _ = tied_step(net, torch.tensor([[0, 3, 3, 1]]))
    assert list(opt.preconditioner.layers) == ["words", "body"]
    assert opt.preconditioner.coverage().left == {"head.bias": (7, SCALES)}
