"""What the host does in a step: torch operations, and Python functions, calls and files.

    python -m benchmarks.operations [--out FILE]

The first step, quiet steps and gathering steps are counted apart, and so are passes and ``step()``.
A quiet step neither gathers nor refreshes. Counts hold on every machine, clocks do not.
Operations are those below autograd; views, allocations and steps of Adam's counters on the CPU are
left out, and a foreach call counts as one. The networks are small, and have the layers of large
ones. "bare" is a loop of the same mathematics over the same shapes: the floor.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
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


class Bare:
    """The same mathematics over the same shapes, and nothing else: layers of one shape together.

    Factors stay as they begin, since no passes are read; averages and roots are made anew as
    often.
    """

    def __init__(self, trainer: Trainer) -> None:
        kfac: Any = trainer.optimizer
        self.adam = isinstance(kfac, KFACAdam)
        preconditioner = kfac.preconditioner
        self.groups = preconditioner.groups.all
        self.schedule = preconditioner.schedule
        covered = {p for group in self.groups for layer in group.layers for p in layer.parameters}
        self.parameters = list(covered)
        rest = [p for p in trainer.model.parameters() if p not in covered]
        base = Adam if self.adam else SGD
        self.base = base(rest, lr=1e-3, foreach=True)
        self.momenta = {p: torch.zeros_like(p) for p in covered}
        self.squares = torch.zeros(sum(group.count for group in self.groups))

    @torch.no_grad()
    def step(self, number: int) -> None:
        self.base.step()
        due, refreshed, _ = self.schedule.at(number, 10, 100)
        for group in self.groups:
            names = {layer.name for layer in group.layers}
            sizes = group.g.key.size, group.a.key.size
            for side, n in zip((group.g, group.a), sizes, strict=True):
                root = side.state["root"]
                if root.dim() == 2:
                    continue
                if not names.isdisjoint(due or ()):
                    self._average(torch.eye(n).expand(group.count, n, n).clone())
                if not names.isdisjoint(refreshed):
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
        counts = [len(stack) for stack in stacks]
        torch._foreach_div_(stacks, list(peaks[:, None, None].split(counts)))
        directions = [_direction(x, m) for x, m in zip(self.groups, stacks, strict=True)]
        pairs = zip(directions, stacks, strict=True)
        dots = torch.cat([(d * m).sum((1, 2)) for d, m in pairs])
        scales = self._lengths(stacks, directions, dots, peaks)
        torch._foreach_mul_(directions, list(scales[:, None, None].split(counts)))
        moved: list[Tensor] = []
        steps: list[Tensor] = []
        for group, direction in zip(self.groups, directions, strict=True):
            # Weights of a group, and its biases.
            for kind in zip(*[x.parameters for x in group.layers], strict=True):
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


def _stacked(layers: list[Any], along: dict[Any, Tensor]) -> Tensor:
    """Momenta of layers of one shape as one stack, a bias as the last column."""
    weights, *biases = zip(*[[along[p] for p in x.parameters] for x in layers], strict=True)
    flat = [m.flatten(1) if m.dim() != 2 or layers[0].weight.dim() != 2 else m for m in weights]
    if layers[0].input_dim == 0:  # a table
        flat = [m.mT for m in flat]
    stack = torch.stack(flat)
    return torch.cat([stack, torch.stack(biases[0])[:, :, None]], 2) if biases else stack


def _direction(group: Any, momentum: Tensor) -> Tensor:
    g, a = group.g.state["root"], group.a.state["root"]
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


def _part(direction: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The directions of weights, or of biases, shaped as these are."""
    if parameters[0].dim() == 1:
        return list(direction[:, :, -1].contiguous().unbind())
    n = parameters[0][0].numel()
    if direction.shape[1] != len(parameters[0]):
        return list(direction.mT.contiguous().unbind())
    return [x.view_as(p) for x, p in zip(direction[:, :, :n].contiguous(), parameters, strict=True)]


def bare(network: str, optimizer: str) -> float:
    """Return the mean operations of a step of the bare loop."""
    trainer = Trainer(network, optimizer)
    trainer.step()
    loop, seen = Bare(trainer), Operations()
    loop.step(FIRST)  # the base makes its state
    for number in range(FIRST, FIRST + STEPS):
        with seen:
            loop.step(number)
    return seen.found.total() / STEPS


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
        results[f"{network}, {ours}"]["mean"]["bare step"] = bare(network, ours)
    for title, kinds in results.items():
        for kind in ("first", "quiet", "gathering", "mean"):
            row = kinds.get(kind, {"steps": 0})
            print(f"{title}, {kind}:", *(f"{key} {value:.0f}" for key, value in row.items()))
    if options.out is not None:
        keep(options.out, results=results)


if __name__ == "__main__":
    main()
