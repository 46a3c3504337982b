"""Running averages of scale-free factors: a step's G enters divided by its mean eigenvalue."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from tests.support.training import ANEW, assert_same, backward, descend, factors, network, train
from tests.support.watch import Body, Watch, assert_close, factors_of, normal, rows_of, seeded

NAMES = ["0", "2"]
SHARES = torch.tensor([1.0, 1, 1, 1e-3, 1e-3, 1e-3], dtype=torch.float64)[:, None]
property_test = settings(max_examples=15)
exponents = st.lists(st.integers(-8, 8), min_size=2, max_size=4)


@property_test
@given(exponents=exponents, decay=st.sampled_from([0.3, 0.95]), widest=st.sampled_from([3, 100]))
def test_each_g_enters_divided_by_its_mean_eigenvalue(exponents, decay, widest):
    """Block by block; A enters as it is. Both as means that the decay weighs.

    The second block of the convolution has far smaller gradients.
    """
    conv = seeded(lambda: nn.Conv1d(4, 6, 2, groups=2))
    model = Body(lambda m, x: m.conv(x) * SHARES, conv=conv)
    opt = KFACAdam(model, lr=0.0, factor_decay=decay, max_factor_size=widest, **ANEW)
    weight, means = 0.0, [torch.zeros(()), torch.zeros(())]
    for step, exponent in enumerate(exponents):
        twin = nn.Sequential(nn.Conv1d(4, 6, 2, groups=2).double())
        twin[0].load_state_dict(model.conv.state_dict())
        watch = Watch(twin, "0")
        x = normal(5, 4, 6, seed=step)
        (10.0**exponent * (twin(x) * SHARES).square().sum() / 5).backward()
        descend(opt, 10.0**exponent * model(x).square().sum() / 5)
        a, g = factors_of(*rows_of(twin[0], watch.trained("0")), 5)
        values = torch.linalg.eigvalsh(g).mean(1) if widest > 3 else g.diagonal(0, 1, 2).mean(1)
        weight = decay * weight + 1 - decay
        for i, new in enumerate((a, g / values[:, None, None])):
            means[i] = means[i] + (1 - decay) / weight * (new - means[i])
    for found, wanted in zip(opt.preconditioner.factors("conv"), means, strict=True):
        wanted = wanted.diagonal(0, 1, 2) if found.dim() == 2 else wanted
        assert_close(found, wanted, 1e-9)


def test_under_the_papers_methods_g_keeps_its_scale():
    opts = [KFACSGD(network(), lr=0.1, compute_method=how) for how in ("eigen", "polar")]
    for opt in opts:
        backward(opt.preconditioner.model, 0)
        opt.step()
    of_papers, free = (opt.preconditioner.factors("0")[1] for opt in opts)
    mean = of_papers[0].trace() / 6
    assert not 0.5 < mean < 2
    assert_close(free, of_papers / mean)


def test_a_g_of_zero_enters_as_zero():
    model = network()
    opt = KFACSGD(model, lr=0.1, factor_decay=0.5, **ANEW)
    train(model, opt, [0])
    first = factors(opt)["2"][1]
    opt.zero_grad()
    backward(model, 1, scale=lambda loss: loss * 0)
    opt.step()
    assert_close(factors(opt)["2"][1], first * (1 - 0.5 / 0.75))


@pytest.mark.parametrize("number", [math.inf, math.nan])
@pytest.mark.parametrize("widest", [2, 100])
def test_sums_that_are_not_finite_stay_out_and_are_named(number, widest):
    """Whatever they are divided by; the other layer's G counts."""
    model = network()
    opt = KFACSGD(model, lr=0.0, max_factor_size=widest, **ANEW)
    train(model, opt, range(2))
    before = factors(opt)
    opt.zero_grad()

    def broken(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * number)

    handle = model[0].register_forward_hook(broken)
    backward(model, 2)
    handle.remove()
    for p in model.parameters():
        p.grad = torch.nan_to_num(p.grad, 0.0, 0.0, 0.0)
    opt.step()
    now = factors(opt)
    assert_same(now["0"][1], before["0"][1])
    assert not torch.equal(now["2"][1], before["2"][1])
    assert all(f.isfinite().all() for pair in now.values() for f in pair)
    with pytest.warns(UserWarning, match="not finite have been left out for '0'$"):
        train(model, opt, [3])


def test_a_mean_that_overflows_divides_nothing():
    """Divided by infinity, finite sums would be zeros, and zeros would be taken."""
    model = network(dtype=torch.float32)
    opt = KFACSGD(model, lr=0.1, **ANEW)
    train(model, opt, range(2))
    before = factors(opt)
    opt.zero_grad()
    backward(model, 2)
    for sums in opt.preconditioner.sums.of_layer.values():
        sums.g.diagonal(0, 1, 2).fill_(3e37)
        whole = 8 * sums.g  # of K examples
        assert whole.isfinite().all() and whole[0].trace().isinf()
    opt.step()
    for name in NAMES:
        assert_same(factors(opt)[name][1], before[name][1])
    with pytest.warns(UserWarning, match="not finite have been left out for '0', '2'"):
        train(model, opt, [3])


def test_no_averaging_takes_the_newest_statistics():
    model = nn.Sequential(nn.Linear(3, 2))
    opt = KFACSGD(
        model, lr=0.0, factor_decay=0, factor_update_steps=1, compute_method="eigen", kl_clip=None
    )
    for x in torch.randn(3, 8, 3):
        descend(opt, model(x).square().sum())
    rows = torch.cat([x, torch.ones(8, 1)], 1)
    torch.testing.assert_close(opt.preconditioner.factors("0")[0][0], rows.T @ rows / 8)
