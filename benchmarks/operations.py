"""What the host does in a step: torch operations, and Python functions, calls and files.

    python -m benchmarks.operations [--out FILE]

The first step, quiet steps and gathering steps are counted apart, and so are passes and ``step()``.
A quiet step neither gathers nor refreshes. Counts hold on every machine, clocks do not.
Operations are those below autograd; views, allocations and steps of Adam's counters on the CPU are
left out, and a foreach call counts as one. The networks are small, and have the layers of large
ones.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import kaisa_optim
from benchmarks.machine import keep
from benchmarks.networks import ResNet, Transformer
from benchmarks.recipes import command_line
from kaisa_optim import KFACSGD, KFACAdam

HOUSE = str(Path(kaisa_optim.__file__).parent)
FIRST, STEPS = 190, 20  # after the early refreshes; all layers gather twice, and refresh once
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

    def numbers(self) -> dict[str, int]:
        return {"operations": self.found.total()}


def _counts_a_step(name: str, args: Any) -> bool:
    """Return whether this moves or reads a counter, as Adam keeps on the CPU for each parameter."""
    if name not in ("add_", "_foreach_add_", "_local_scalar_dense") or not args:
        return False
    first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
    counter = isinstance(first, Tensor) and first.dim() == 0 and first.dtype == torch.float32
    return counter and first.device.type == "cpu"


class Visited:
    """Counts Python calls, all of them and those of the package's functions."""

    def __init__(self) -> None:
        self.functions: Counter[Any] = Counter()
        self.calls = -1  # leaving is a call, too

    def __enter__(self) -> Visited:
        sys.setprofile(self.note)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def note(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            self.calls += 1
            code = frame.f_code
            # Comprehensions are lines of their function; Python 3.12 does not even call them.
            if code.co_filename.startswith(HOUSE) and not code.co_name.startswith("<"):
                self.functions[code.co_filename, code.co_qualname] += 1

    def numbers(self) -> dict[str, int]:
        files = {file for file, _ in self.functions}
        calls = {"calls": self.functions.total(), "all calls": self.calls}
        return {"functions": len(self.functions), "files": len(files), **calls}


class Trainer:
    def __init__(self, network: str, optimizer: str, **options: Any) -> None:
        torch.manual_seed(0)
        make, self.loss = NETWORKS[network]
        self.model = make()
        self.optimizer = MAKERS[optimizer](self.model, **options)

    def passes(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model).backward()

    def step(self) -> None:
        self.passes()
        self.optimizer.step()

    def begin(self) -> None:
        """Go on with step FIRST, as if those before had been taken."""
        kfac: Any = getattr(self.optimizer, "preconditioner", None)
        if kfac is not None:
            kfac.resume(FIRST - 10)
        for _ in range(10):
            self.step()

    def counted(self, counter: type[Operations | Visited]) -> dict[str, int]:
        """Train for a step; return what counters tell of the passes and of ``step()``."""
        with counter() as passes:
            self.passes()
        with counter() as step:
            self.optimizer.step()
        parts = (("passes", passes), ("step", step))
        return {f"{part} {x}": n for part, seen in parts for x, n in seen.numbers().items()}

    def kind(self, number: int) -> str:
        """Return whether a step after the early ones is quiet."""
        kfac: Any = getattr(self.optimizer, "preconditioner", None)
        if kfac is None:
            return "quiet"
        intervals = kfac.factor_update_steps, kfac.inv_update_steps
        due, refreshed, _ = kfac.schedule.at(number, *intervals)
        return "quiet" if due is None and not refreshed else "gathering"


def _images(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4))


def _text(model: nn.Module) -> Tensor:
    tokens = torch.randint(64, (4, 16))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "ResNet-50": (lambda: ResNet(width=8, classes=10), _images),  # an eighth of its width
    "GPT": (
        lambda: Transformer(vocabulary=64, length=16, width=48, layers=12, heads=4, wide=192),
        _text,
    ),
}
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True),
    "KFACSGD": lambda model, **more: KFACSGD(model, lr=0.01, momentum=0.9, foreach=True, **more),
    "Adam": lambda model: Adam(model.parameters(), lr=1e-3, foreach=True),
    "KFACAdam": lambda model, **more: KFACAdam(model, lr=1e-3, foreach=True, **more),
}
ROWS = tuple(itertools.product(NETWORKS, ("KFACSGD", "KFACAdam")))


def counted(network: str, optimizer: str, **options: Any) -> dict[str, dict[str, float]]:
    """Return mean counts by kind of step, and of all steps of an interval.

    Counting operations makes Python calls, so that each counter has steps of its own.
    """
    rows: dict[str, list[dict[str, int]]] = {"quiet": [], "gathering": []}
    with torch.backends.mkldnn.flags(enabled=False):  # alike on all CPUs
        Trainer(network, optimizer, **options).step()  # fills caches of the process
        first = Trainer(network, optimizer, **options).counted(Operations)
        trainer = Trainer(network, optimizer, **options)
        first |= trainer.counted(Visited)
        for _ in range(40):
            trainer.step()
        found = []
        for counter in (Operations, Visited):
            trainer.begin()
            found.append([trainer.counted(counter) for _ in range(STEPS)])
    for number in range(STEPS):
        rows[trainer.kind(FIRST + number)].append(found[0][number] | found[1][number])
    rows = {"first": [first], **rows, "mean": rows["quiet"] + rows["gathering"]}
    return {kind: _mean(steps) for kind, steps in rows.items() if steps}


def _mean(rows: list[dict[str, int]]) -> dict[str, float]:
    means = {name: round(sum(row[name] for row in rows) / len(rows), 2) for name in rows[0]}
    return {"steps": len(rows), **means}


def main() -> None:
    parser = command_line("operations", __doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for network, ours in ROWS:
        for optimizer in (ours.removeprefix("KFAC"), ours):
            results[f"{network}, {optimizer}"] = counted(network, optimizer)
    for title, kinds in results.items():
        for kind in ("first", "quiet", "gathering", "mean"):
            row = kinds.get(kind, {"steps": 0})
            print(f"{title}, {kind}:", *(f"{key} {value:.0f}" for key, value in row.items()))
    if options.out is not None:
        keep(options.out, results=results)


if __name__ == "__main__":
    main()
