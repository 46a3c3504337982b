"""Layers that are given one input make its moment once, and nothing else changes by that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kaisa_optim import KFACSGD
from kaisa_optim.layers.kinds import LinearLayer


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
    for name, taken in (("query", rows[::2]), ("key", rows)):
        a = opt.preconditioner.factors(name)[0][0]
        torch.testing.assert_close(a, taken.mT @ taken / len(taken))


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
