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
    """Return whether this is a step of a counter, as Adam keeps on the CPU for each parameter."""
    if name not in ("add_", "_foreach_add_") or not args:
        return False
    first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
    return isinstance(first, Tensor) and first.dim() == 0 and not isinstance(args[1], Tensor)


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


def counted(network: str, optimizer: str, steps: int) -> dict[str, float]:
    """Return means over steps: operations of the passes and of ``step()``, Python of both."""
    trainer = Trainer(NETWORKS[network], MAKERS[optimizer])
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
    results = {}
    for network, ours in ROWS:
        for name in (BASES[ours], ours):
            found = results[f"{network}, {name}"] = counted(network, name, options.steps)
            print(network, name, *(f"{key} {value:.0f}" for key, value in found.items()))
    if options.out is not None:
        keep(options.out, results=results)


if __name__ == "__main__":
    main()
