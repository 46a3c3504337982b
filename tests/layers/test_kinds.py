"""Linear layers and tables against the dense reference, and layers with one input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kaisa_optim import KFACSGD
from kaisa_optim.layers.kinds import LinearLayer
from tests.layers.cases import Case, build, check, each, freeze, loss_of, normal, tokens
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


class Projections(nn.Module):
    """Query, key and value of one input; then of another one, and of one that is overwritten."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.body = nn.Linear(5, 6)
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
        self.value = nn.Linear(6, 4, bias=False)

    def project(self, x: Tensor) -> Tensor:
        return self.query(x) * self.key(x) + self.value(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).tanh()
        if self.way == "checkpointed":
            return checkpoint(self.project, x, use_reentrant=False)
        if self.way == "twice":
            return self.project(x) + self.project(2 * x)
        return self.project(x)


def factors(way: str, passes: int = 1, **options) -> tuple[dict[str, Tensor], int]:
    """Factors A after a step, and how many moments of inputs were made."""
    torch.manual_seed(0)
    model = Projections(way).double()
    calls = []
    real = LinearLayer.input_moment

    def counted(layer, *args, **kwargs):
        calls.append(layer.name)
        return real(layer, *args, **kwargs)

    opt = KFACSGD(model, lr=0.1, compute_method="eigen", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearLayer, "input_moment", counted)
        for i in range(passes):
            x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
            (model(x).square().sum() / 7 / passes).backward()
    opt.step()
    kfac = opt.preconditioner
    return {name: kfac.factors(name)[0].clone() for name in kfac.layers}, len(calls)


@pytest.mark.parametrize("way", ["once", "twice", "checkpointed"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("normalization", ["fisher", "kaisa"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_shared_moment_is_each_layers_own(way, passes, normalization, fraction, monkeypatch):
    options = {"normalization": normalization, "statistics_fraction": fraction}
    shared, made = factors(way, passes, **options)
    monkeypatch.setattr(LinearLayer, "input_rows_key", lambda layer: None)
    apart, made_apart = factors(way, passes, **options)
    assert shared.keys() == apart.keys()
    for name, factor in apart.items():
        torch.testing.assert_close(shared[name], factor, rtol=1e-12, atol=1e-14)
    if way == "once" and normalization == "fisher":
        # The body's, one of two layers with a bias, and that of the one without.
        assert (made, made_apart) == (3 * passes, 4 * passes)


def test_another_part_of_an_input_is_another_moment():
    model = Projections("once").double()
    opt = KFACSGD(model, lr=0.1, skip_layers="body|value", statistics_fraction=0.5)
    x = torch.randn(4, 6, dtype=torch.float64)
    rows = torch.cat([x, torch.ones(4, 1, dtype=torch.float64)], 1)
    for layer, fraction in ((model.query, 0.5), (model.key, 1.0)):
        opt.preconditioner.statistics_fraction = fraction
        layer(x).sum().backward()
    opt.step()
    for name, part in (("query", rows[::2]), ("key", rows)):
        a = opt.preconditioner.factors(name)[0][0]
        torch.testing.assert_close(a, part.mT @ part / len(part))


def test_an_input_that_is_written_into_is_another_one():
    torch.manual_seed(0)
    model = Projections("once").double()
    opt = KFACSGD(model, lr=0.1, skip_layers="body|value")
    x = torch.randn(3, 6, dtype=torch.float64)
    before = x.clone()
    model.query(x).sum().backward()
    with torch.no_grad():
        x.mul_(3)
    model.key(x).sum().backward()
    opt.step()
    a_query, a_key = (opt.preconditioner.factors(name)[0][0] for name in ("query", "key"))
    rows = torch.cat([before, torch.ones(3, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(a_query, rows.mT @ rows / 3)
    rows[:, :-1] *= 3
    torch.testing.assert_close(a_key, rows.mT @ rows / 3)
