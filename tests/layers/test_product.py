"""Modules whose source states one product: its matrix and its bias are one layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kaisa_optim.layers import SCALES
from tests.layers.test_uses import Conv1D, headed, loss_of
from tests.support.watch import assert_close, exact, normal, seeded, taken


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_product_and_its_bias_are_one_layer(width, reentrant):
    def run(body: nn.Module) -> dict[str, Tensor]:
        net = headed(body, width)
        opt = exact(net)
        assert list(opt.preconditioner.layers) == ["0", "2"]
        x = normal(6, 4).requires_grad_()
        hidden = net[0](x) if reentrant is None else checkpoint(net[0], x, use_reentrant=reentrant)
        loss_of(net[1:](hidden)).backward()
        return taken(opt, net)

    linear, other = seeded(lambda: nn.Linear(4, width)), seeded(lambda: Conv1D(4, width))
    other.weight.data, other.bias.data = (
        linear.weight.data.T.contiguous().clone(),
        linear.bias.data.clone(),
    )
    expected, found = run(linear), run(other)
    assert_close(found["0.weight"].T, expected["0.weight"], 1e-9)
    assert_close(found["0.bias"], expected["0.bias"], 1e-9)


class Stated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(normal(3, 4)), nn.Parameter(normal(3))


class Keywords(Stated):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else x
        return F.linear(x, weight=self.weight, bias=self.bias) if bias is not None else x


class Without(Stated):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight) * self.bias


class BiasTwice(Stated):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.bias


class Twice(Stated):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight).repeat(1, 2)[:, :4], self.weight, self.bias)


class Penalized(Stated):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.weight.square().sum()


@pytest.mark.parametrize(
    ("cls", "layers"),
    [
        (Keywords, ["0", "2"]),
        (Without, ["0", "2"]),
        (BiasTwice, ["0", "2"]),
        (Twice, ["0.weight", "2"]),
        (Penalized, ["0.weight", "2"]),
    ],
)
def test_the_source_tells_which_bias_a_product_adds(cls, layers):
    net = headed(cls())
    opt = exact(net)
    assert list(opt.preconditioner.layers) == layers
    apart = {} if cls is Keywords else {"0.bias": (net[0].bias.numel(), SCALES)}
    assert opt.preconditioner.coverage().left == apart
    loss_of(net(normal(6, 4))).backward()
    opt.step()


def test_a_forward_without_a_source_is_covered_by_shapes():
    space = {"F": F}
    exec("def forward(self, x): return F.linear(x, self.weight, self.bias)", space)
    net = headed(type("Sourceless", (Stated,), {"forward": space["forward"]})())
    opt = exact(net)
    assert list(opt.preconditioner.layers) == ["0.weight", "2"]
    loss_of(net(normal(6, 4))).backward()
    opt.step()
    assert set(opt.preconditioner.coverage().left) == {"0.bias"}
