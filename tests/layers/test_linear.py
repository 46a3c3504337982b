"""Linear layers against the dense reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kaisa_optim import KFACSGD
from tests.layers.cases import Case, build, check, each, freeze, loss_of, normal
from tests.support import reference as ref
from tests.support.watch import PAPERS, assert_close, exact, seeded, taken

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")


LINEAR = {
    "2d": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 4)),
    "3d": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 2, 4)),
    "4d": Case(lambda: nn.Linear(4, 3), lambda: normal(3, 2, 3, 4)),
    "1d": Case(lambda: nn.Linear(4, 3), lambda: normal(4), terms=1.0),
    "one example": Case(lambda: nn.Linear(4, 3), lambda: normal(1, 4)),
    "no bias": Case(lambda: nn.Linear(4, 3, bias=False), lambda: normal(5, 4)),
    "no bias 3d": Case(lambda: nn.Linear(4, 3, bias=False), lambda: normal(5, 2, 4)),
    "one output": Case(lambda: nn.Linear(4, 1), lambda: normal(5, 4)),
    "frozen weight": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 4), prepare=freeze("weight")),
    "frozen bias": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 4), prepare=freeze("bias")),
    "non-contiguous": Case(lambda: nn.Linear(4, 3), lambda: normal(4, 10).T[::2]),
    "transposed 3d": Case(lambda: nn.Linear(4, 3), lambda: normal(2, 5, 4).transpose(0, 1)),
    "expanded": Case(lambda: nn.Linear(4, 3), lambda: normal(1, 2, 4).expand(5, 2, 4)),
    "input with gradient": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 4).requires_grad_()),
}


@each(LINEAR)
def test_linear(case):
    check(case)


def test_a_number_of_terms_is_that_of_the_whole_step():
    """Not of each micro-batch: a user who masks counts what all of them average."""
    net, x = build(LINEAR["3d"])
    g = ref.gradient_rows(net.layer, loss_of, x)
    opt = KFACSGD(net, lr=1.0, **PAPERS, loss_terms=4.0)
    out = net(x)
    opt.zero_grad()
    for rows in range(len(x)):
        (gradient,) = torch.autograd.grad(loss_of(leaf := out.detach().requires_grad_()), leaf)
        net(x[rows : rows + 1]).backward(gradient[rows : rows + 1])
    opt.step()
    ref.assert_close(opt.preconditioner.factors("layer")[1], ref.factors(g, g, 4.0)[1])


def test_a_sum_has_one_term():
    net, x = build(LINEAR["3d"])
    g = ref.gradient_rows(net.layer, loss_of, x)
    opt = KFACSGD(net, lr=1.0, **PAPERS, loss_reduction="sum")
    loss_of(net(x)).backward()
    opt.step()
    ref.assert_close(opt.preconditioner.factors("layer")[1], ref.factors(g, g, 1.0)[1])


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_linear_layer_of_gpt2_is_a_linear_layer(width, reentrant):
    """Its weight is stored the other way round."""
    library = pytest.importorskip("transformers.pytorch_utils")

    def run(body: nn.Module) -> dict[str, Tensor]:
        net = nn.Sequential(body, nn.Tanh(), seeded(lambda: nn.Linear(width, 2)))
        opt = exact(net)
        assert list(opt.preconditioner.layers) == ["0", "2"]
        x = normal(6, 4).requires_grad_()
        hidden = net[0](x) if reentrant is None else checkpoint(net[0], x, use_reentrant=reentrant)
        loss_of(net[1:](hidden)).backward()
        return taken(opt, net)

    linear = seeded(lambda: nn.Linear(4, width))
    other = seeded(lambda: library.Conv1D(width, 4))
    other.weight.data, other.bias.data = linear.weight.data.T.clone(), linear.bias.data.clone()
    expected, found = run(linear), run(other)
    assert_close(found["0.weight"].T, expected["0.weight"], 1e-9)
    assert_close(found["0.bias"], expected["0.bias"], 1e-9)
