"""What the host does in a step: torch operations, and Python functions, calls and files.

    python -m benchmarks.operations [--steps N] [--out FILE]

Counts hold on every machine, clocks do not. Operations are those below autograd; views,
allocations and steps of Adam's counters on the CPU are left out, and a foreach call counts as one.
The networks are small, and have the layers of large ones. "bare" is a loop of the same mathematics
over the same shapes: the floor.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import kaisa_optim
from benchmarks.machine import keep
from benchmarks.networks import ResNet, Transformer
from kaisa_optim import KFACSGD, KFACAdam

HOUSE = str(Path(kaisa_optim.__file__).parent)
FIRST = 60  # steps before those that count: by then the early refreshes are over
_FREE = ("empty", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view", "promote_types")


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        free = func.is_view or name.startswith(_FREE)
        if not (free or _counts_a_step(name, args)):
            self.found[name] += 1
        return func(*args, **kwargs or {})


def _counts_a_step(name: str, args: Any) -> bool:
    """Return whether this moves or reads a counter, as Adam keeps on the CPU for each parameter."""
    if name not in ("add_", "_foreach_add_", "_local_scalar_dense") or not args:
        return False
    first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
    counter = isinstance(first, Tensor) and first.dim() == 0 and first.dtype == torch.float32
    return counter and first.device.type == "cpu"


@dataclass
class Visited:
    """The functions of the package that ran, how often, and their files."""

    functions: Counter[Any] = field(default_factory=Counter)

    @contextmanager
    def watched(self) -> Iterator[None]:
        def note(frame: Any, event: str, _: Any) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(HOUSE):
                self.functions[code.co_filename, code.co_qualname] += 1

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def numbers(self) -> tuple[int, int, int]:
        files = {file for file, _ in self.functions}
        return len(self.functions), sum(self.functions.values()), len(files)


class Trainer:
    def __init__(self, network: Network, make: Callable[[nn.Module], Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = network.make()
        self.network = network
        self.optimizer = make(self.model)

    def passes(self) -> None:
        self.optimizer.zero_grad()
        self.network.loss(self.model).backward()

    def step(self) -> None:
        self.passes()
        self.optimizer.step()


@dataclass(frozen=True)
class Network:
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]


def _narrow_resnet() -> nn.Module:
    """ResNet-50 of an eighth of its width."""
    return ResNet(width=8, classes=10)


def _images(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4))


def _narrow_gpt() -> nn.Module:
    return Transformer(vocabulary=64, length=16, width=48, layers=12, heads=4, wide=192)


def _text(model: nn.Module) -> Tensor:
    tokens = torch.randint(64, (4, 16))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


NETWORKS = {"ResNet-50": Network(_narrow_resnet, _images), "GPT": Network(_narrow_gpt, _text)}
ROWS = (("ResNet-50", "KFACSGD"), ("ResNet-50", "KFACAdam"), ("GPT", "KFACAdam"))
MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True),
    "KFACSGD": lambda model: KFACSGD(model, lr=0.01, momentum=0.9, foreach=True),
    "Adam": lambda model: Adam(model.parameters(), lr=1e-3, foreach=True),
    "KFACAdam": lambda model: KFACAdam(model, lr=1e-3, foreach=True),
}
BASES = {"KFACSGD": "SGD", "KFACAdam": "Adam"}


class Bare:
    """The same mathematics over the same shapes, and nothing else: layers of one shape together.

    Factors stay as they begin, since no passes are read; averages and roots are made anew as
    often.
    """

    def __init__(self, trainer: Trainer) -> None:
        kfac: Any = trainer.optimizer
        self.adam = isinstance(kfac, KFACAdam)
        preconditioner = kfac.preconditioner
        self.groups = preconditioner.store.applied.groups
        self.schedule = preconditioner.schedule
        self.layers = [layer for group in self.groups for layer in group.layers]
        covered = {p for layer in self.layers for p in layer.parameters}
        self.parameters = list(covered)
        rest = [p for p in trainer.model.parameters() if p not in covered]
        base = Adam if self.adam else SGD
        self.base = base(rest, lr=1e-3, foreach=True)
        self.momenta = {p: torch.zeros_like(p) for p in covered}
        self.squares = torch.zeros(sum(group.count for group in self.groups))

    @torch.no_grad()
    def step(self, number: int) -> None:
        self.base.step()
        for group in self.groups:
            names = {layer.name for layer in group.layers}
            for root, n in zip(
                group.states("root", group.layers),
                (group.g.key.size, group.a.key.size),
                strict=True,
            ):
                if root.dim() == 2:
                    continue
                if not names.isdisjoint(self.schedule.gathers(number, 10)):
                    self._average(torch.eye(n).expand(group.count, n, n).clone())
                if not names.isdisjoint(self.schedule.refreshes(number, 20)):
                    self._root(torch.eye(n, dtype=torch.float64).expand(group.count, n, n))
        gradients, momenta = [p.grad for p in self.parameters], list(self.momenta.values())
        if self.adam:
            torch._foreach_lerp_(momenta, gradients, 0.1)
            ahead = list(torch._foreach_lerp(gradients, momenta, 0.9))
        else:
            torch._foreach_mul_(momenta, 0.9)
            torch._foreach_add_(momenta, gradients)
            ahead = momenta
        along = dict(zip(self.parameters, ahead, strict=True))
        stacks = [_stacked(group.layers, along) for group in self.groups]
        peaks = _norms(stacks, float("inf")).clamp_(min=1e-30)
        sizes = [len(stack) for stack in stacks]
        torch._foreach_div_(stacks, list(peaks[:, None, None].split(sizes)))
        directions = [_direction(x, m) for x, m in zip(self.groups, stacks, strict=True)]
        pairs = zip(directions, stacks, strict=True)
        dots = torch.cat([(d * m).sum((1, 2)) for d, m in pairs])
        scales = self._lengths(stacks, directions, dots, peaks)
        torch._foreach_mul_(directions, list(scales[:, None, None].split(sizes)))
        moved, steps = [], []
        for group, direction in zip(self.groups, directions, strict=True):
            for kind in _kinds(group):
                moved += kind
                steps += _part(direction, kind)
        torch._foreach_add_(moved, steps, alpha=-1e-9)

    def _lengths(
        self, stacks: list[Tensor], directions: list[Tensor], dots: Tensor, peaks: Tensor
    ) -> Tensor:
        sizes = _norms(stacks, 2).mul_(peaks)
        own = _norms(directions, 2).clamp_(min=1e-30)
        weights = torch.stack(torch._foreach_norm(self.parameters, 2)).square_()
        limit = (weights[: len(own)] * 0.05).clamp_(max=0.1).clamp_(min=0.003)
        if not self.adam:
            limit = torch.minimum(limit, sizes.square() / dots)
            share = (sizes * 0.1).sum() / (dots * 0.1).sum()
            return torch.minimum(share.expand(len(own)), limit) / own
        graded = [p.grad for p in self.parameters]
        measured = torch.stack(torch._foreach_norm(graded, 2)).square_()[: len(own)]
        self.squares.lerp_(measured, 0.001)
        fall = _norms(stacks, 1).mul_(sizes) / (self.squares / 0.9).sqrt_().add_(1e-8)
        least = (sizes * 0.01).div_(own)
        return torch.minimum(fall / torch.maximum(dots / own, least), limit) / own

    def _average(self, values: Tensor) -> None:
        values.div_(values.diagonal(dim1=1, dim2=2).mean(1)[:, None, None])
        fine = values.diagonal(dim1=1, dim2=2).sum(1).isfinite()
        values.lerp_(values.clone(), torch.where(fine, 0.05, 0.0)[:, None, None])

    def _root(self, factors: Tensor) -> None:
        damped = factors / factors.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        damped.diagonal(dim1=1, dim2=2).add_(0.01)
        values, vectors = torch.linalg.eigh(damped)
        scaled = vectors * values.clamp_(min=1e-9).pow_(-0.25)[:, None, :]
        root = torch.bmm(scaled, scaled.mT).float()
        torch.where(root.isfinite().all(), root, root)


def _norms(stacks: list[Tensor], order: float) -> Tensor:
    return torch.stack(torch._foreach_norm([x for stack in stacks for x in stack.unbind()], order))


def _kinds(group: Any) -> list[list[Tensor]]:
    """The weights of a group, and its biases."""
    return [list(kind) for kind in zip(*[x.parameters for x in group.layers], strict=True)]


def _stacked(layers: list[Any], along: dict[Any, Tensor]) -> Tensor:
    """Momenta of layers of one shape as one stack, a bias as the last column."""
    weights, *biases = zip(*[[along[p] for p in x.parameters] for x in layers], strict=True)
    flat = [m.flatten(1) if m.dim() != 2 or layers[0].weight.dim() != 2 else m for m in weights]
    if layers[0].input_dim == 0:  # a table
        flat = [m.mT for m in flat]
    stack = torch.stack(flat)
    return torch.cat([stack, torch.stack(biases[0])[:, :, None]], 2) if biases else stack


def _direction(group: Any, momentum: Tensor) -> Tensor:
    g, a = group.states("root", group.layers)
    white = torch.bmm(g, momentum)
    white = torch.bmm(white, a) if a.dim() == 3 else white * a[:, None, :]
    white = white / torch.linalg.vector_norm(white, dim=(1, 2), keepdim=True).clamp_(min=1e-30)
    tall = white.shape[1] > white.shape[2]
    x = white.mT if tall else white
    gram = torch.bmm(x, x.mT)
    q: Any = None
    for b, c in ((-20.8, 14.7), (-2.4, 0.5)):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(3.0)
        if q is None:
            q, gram = factor, torch.bmm(factor, torch.bmm(gram, factor))
        else:
            q = torch.bmm(q, factor)
    x = torch.bmm(q, x)
    found = x.mT if tall else x
    found = torch.baddbmm(found, g, found, beta=0.8, alpha=0.2)
    if a.dim() == 2:
        return found * a.mul(0.2).add_(0.8)[:, None, :]
    return torch.baddbmm(found, found, a, beta=0.8, alpha=0.2)


def _part(direction: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """The directions of weights, or of biases, shaped as these are."""
    if parameters[0].dim() == 1:
        return list(direction[:, :, -1].contiguous().unbind())
    n = parameters[0][0].numel()
    if direction.shape[1] != len(parameters[0]):
        return list(direction.mT.contiguous().unbind())
    return [x.view_as(p) for x, p in zip(direction[:, :, :n].contiguous(), parameters, strict=True)]


def bare(network: str, optimizer: str, steps: int) -> float:
    """Return the mean operations of a step of the bare loop."""
    trainer = Trainer(NETWORKS[network], MAKERS[optimizer])
    trainer.step()
    loop, found = Bare(trainer), Operations()
    loop.step(FIRST)  # the base makes its state
    for number in range(FIRST, FIRST + steps):
        with found:
            loop.step(number)
    return found.found.total() / steps


def counted(network: str, optimizer: str, steps: int) -> dict[str, float]:
    """Return means over steps: operations of the passes and of ``step()``, Python of both."""
    with torch.backends.mkldnn.flags(enabled=False):  # alike on all CPUs
        return _counted(Trainer(NETWORKS[network], MAKERS[optimizer]), steps)


def _counted(trainer: Trainer, steps: int) -> dict[str, float]:
    for _ in range(FIRST):
        trainer.step()
    found = dict.fromkeys(("passes", "step", "functions", "calls", "files"), 0.0)
    for _ in range(steps):
        inside, outside, visited = Operations(), Operations(), Visited()
        with visited.watched():
            with outside:
                trainer.passes()
            with inside:
                trainer.optimizer.step()
        numbers = outside.found.total(), inside.found.total(), *visited.numbers()
        for key, number in zip(found, numbers, strict=True):
            found[key] += number / steps
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operations", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="over which counts are averaged")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for network, ours in ROWS:
        for name in (BASES[ours], ours):
            found = results[f"{network}, {name}"] = counted(network, name, options.steps)
            if name == ours:
                found["bare step"] = bare(network, name, options.steps)
            print(f"{network}, {name}:", *(f"{key} {value:.0f}" for key, value in found.items()))
    if options.out is not None:
        keep(options.out, results=results)


if __name__ == "__main__":
    main()
