"""A small regression task, and what the tests of training share."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate, chain, pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, options
from kaisa_optim.curvature import refresh
from kaisa_optim.curvature.lengths import AdamLength, FallLength, SGDLength


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The CPU's notes go to the host beside the work, too; it could not be seen to wait."""
    event = SimpleNamespace(synchronize=lambda: None)
    with (
        mock.patch.object(refresh, "WITH_STREAMS", {"cpu"}),
        mock.patch.object(refresh, "noted", lambda numbers: (numbers.clone(), event)),
    ):
        yield


@contextmanager
def warnings_as(action: Any) -> Iterator[None]:
    """Let warnings be errors, or ignore them, or show them by the default of Python."""
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        yield


@contextmanager
def recorded_warnings(about: str = "") -> Iterator[list[str]]:
    """Collect the texts of all warnings that have ``about`` in them, for the time after."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        yield texts
    texts += [str(x.message) for x in record if about in str(x.message)]


def early(*steps: int) -> Any:
    """Let optimizers that are built under it refresh everything in these steps, too."""
    return mock.patch.object(options, "EARLY", steps)


@contextmanager
def stepped_blocks(with_lengths: bool = False) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Note each layer's momentum and direction, ``[blocks, g, a]``."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def noting(give: Any) -> Any:
        def noted(length: Any, share: Any, momenta: Any, peaks: Any, base: Any) -> Tensor:
            whole = [peak * m for peak, m in zip(peaks, chain(*momenta), strict=True)]
            moved = [d.clone() for d in chain(*share.directions)]
            terms: Tensor = give(length, share, momenta, peaks, base)
            if with_lengths:
                moved = [d.clone() for d in chain(*share.directions)]
            places = pairwise(accumulate(share.counts, initial=0))
            for layer, (start, end) in zip(share.layers, places, strict=True):
                found[layer.name] = torch.stack(whole[start:end]), torch.stack(moved[start:end])
            return terms

        return noted

    with ExitStack() as stack:
        for cls in (AdamLength, FallLength, SGDLength):
            stack.enter_context(mock.patch.object(cls, "give", noting(cls.give)))
        yield found


# Statistics and second-order state anew in every step.
ANEW: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 1}
# And the papers' preconditioned gradients, which no clip scales.
EVERY_STEP: dict[str, Any] = {"compute_method": "eigen", "kl_clip": None, **ANEW}
# Both kinds of steps, for tests of what holds with either.
METHODS: dict[str, dict[str, Any]] = {"polar": ANEW, "eigen": EVERY_STEP}


def network(seed: int = 0, dtype: torch.dtype = torch.float64, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, bias), nn.Tanh(), nn.Linear(6, 3, bias)).to(dtype)


def batch(i: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The batch of step ``i``, of one size and the same in every run."""
    generator = torch.Generator().manual_seed(1000 + i)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randn(8, 3, generator=generator, dtype=torch.float64).to(dtype)


def backward(model: nn.Module, i: int, scale: Any = None) -> Tensor:
    """The backward pass of batch ``i``; ``scale`` is a function on the loss."""
    dtype = next(model.parameters()).dtype
    x, y = batch(i, dtype)
    loss = F.mse_loss(model(x), y)
    (loss if scale is None else scale(loss)).backward()
    return loss.detach()


def descend(opt: Any, loss: Tensor) -> None:
    """Take the step of a loss, and leave no gradients to the next."""
    loss.backward()
    opt.step()
    opt.zero_grad()


def train(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    steps: Iterable[int],
    after: Callable[[int], object] = lambda i: None,
) -> None:
    for i in steps:
        opt.zero_grad()
        backward(model, i)
        opt.step()
        after(i)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def difference(before: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def assert_same(actual: Any, expected: Any) -> None:
    """Bit for bit, through modules, mappings and lists."""
    if isinstance(actual, nn.Module):
        actual, expected = dict(actual.named_parameters()), dict(expected.named_parameters())
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key, value in actual.items():
            assert_same(value, expected[key])
    elif isinstance(actual, list | tuple):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_same(a, b)
    elif isinstance(actual, Tensor):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


def assert_near(actual: Any, expected: Any, rtol: float = 1e-8, atol: float = 1e-10) -> None:
    actual, expected = (values(x) if isinstance(x, nn.Module) else x for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def factors(opt: Any) -> dict[str, tuple[Tensor, Tensor]]:
    kfac = opt.preconditioner
    return {name: tuple(f.clone() for f in kfac.factors(name)) for name in kfac.layers}


class Probe:
    """The preconditioned gradients that an equal K-FAC optimizer has, step by step.

    It follows the parameters of another model, takes KFACSGD steps with lr 1 on a copy, and reads
    the preconditioned gradients as differences.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] | None = None, **options: Any):
        self.model = copy.deepcopy(model)
        own = dict(self.model.named_parameters())
        params = [own[name] for name in (own if names is None else names)]
        self.opt = KFACSGD(params, lr=1.0, model=self.model, **{**EVERY_STEP, **options})

    def step(self, model: nn.Module, i: int, scale: Any = None) -> dict[str, Tensor]:
        """What K-FAC makes of batch ``i`` at the parameters of ``model``."""
        with torch.no_grad():
            for own, p in zip(self.model.parameters(), model.parameters(), strict=True):
                own.copy_(p)
        before = values(self.model)
        self.opt.zero_grad()
        backward(self.model, i, scale)
        self.opt.step()
        return difference(before, self.model)


def classes_in(module: Any, base: type) -> list[type]:
    """The public subclasses of ``base`` that a module offers."""
    found = [c for name, c in vars(module).items() if not name.startswith("_")]
    return [c for c in found if inspect.isclass(c) and issubclass(c, base) and c is not base]


# A process without this package: importing it there fails, whether it is installed or not.
WITHOUT_PACKAGE = 'import sys; sys.modules["kaisa_optim"] = None\n'


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
