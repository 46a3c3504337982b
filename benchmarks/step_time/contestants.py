"""Who trains: the base optimizer, K-FAC and its peers, in turns."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kaisa_optim import KFACSGD
from kaisa_optim.linalg.products import multiplies_in_half

from .tasks import Task

TURN = 10  # steps of one contestant before the next one's
BATCHES = 10  # that a contestant goes through: factors must move, or refreshes would be too easy
NEVER = 10**9  # steps
PAPERS = "kfac-pytorch"
BRAIN = ", bfloat16"  # of those that precondition in it
MEDIUM = ", medium statistics"  # of those whose float32 rows are multiplied in less
# What the papers' code leaves out.
BEYOND_PAPERS = "Embedding|Norm"

Name = TypeVar("Name", bound=Hashable)
Seconds = tuple[float, float]  # of a step: forward and backward, and the optimizer's part
# What steps a network, one after the other; of ours there is one, with its preconditioner.
Maker = Callable[[nn.Module, Task, int, int], Sequence[Any]]


class Trainer:
    """One contestant: a network and what steps it."""

    def __init__(
        self,
        task: Task,
        device: str,
        make: Maker,
        intervals: tuple[int, int],
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.scaler = torch.amp.GradScaler(device, enabled=task.half is torch.float16)
        if self.scaler.is_enabled():
            task = replace(task, options={**task.options, "grad_scaler": self.scaler})
        self.task = task
        model = task.network().to(device)
        batches = [task.batch() for _ in range(BATCHES)]
        if task.half and batches[0][0].dim() == 4:  # as tensor cores want their convolutions
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in batches]
        self.batches = itertools.cycle([(x.to(device), y.to(device)) for x, y in batches])
        self.model = wrap(model)
        self.optimizers = make(self.model, task, *intervals)

    def run(self, steps: int) -> list[Seconds]:
        """Seconds of each step, on the device."""
        marks = []
        for _ in range(steps):
            start = self._mark()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for _ in range(self.task.passes):
                self.forward_and_backward()
            middle = self._mark()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
            marks.append((start, middle, self._mark()))
        if self.device == "cuda":
            torch.cuda.synchronize()
        return [(_between(a, b), _between(b, c)) for a, b, c in marks]

    def forward_and_backward(self) -> None:
        inputs, labels = next(self.batches)
        with torch.autocast(self.device, self.task.half, enabled=self.task.half is not None):
            out = self.model(inputs)
            loss = F.cross_entropy(out.flatten(0, -2), labels.flatten())
        self.scaler.scale(loss / self.task.passes).backward()

    def quiet(self, steps: int) -> list[Seconds]:
        """Steps of K-FAC that only precondition, with the decompositions as they are."""
        kfac = self.optimizers[0].preconditioner
        kfac.factor_update_steps = kfac.inv_update_steps = NEVER
        return self.run(steps)

    def operations(self) -> int:
        """Floating-point operations of a step's forward and backward passes."""
        with FlopCounterMode(display=False) as counter:
            self.forward_and_backward()
        return int(counter.get_total_flops()) * self.task.passes

    def _mark(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


class Runs(Protocol):
    """Whoever trains: a :class:`Trainer`, here or elsewhere."""

    def run(self, steps: int) -> list[Seconds]: ...


def race(
    trainers: Mapping[Name, Runs],
    interval: int,
    rounds: int,
    before_turn: Callable[[], None] = lambda: None,
) -> list[dict[Name, list[Seconds]]]:
    """The steps of each in each round, one interval long, after a first one that does not count.

    ``before_turn`` is called before each turn.
    """
    for trainer in trainers.values():
        trainer.run(2)  # the first steps gather and refresh everything
    found: list[dict[Name, list[Seconds]]] = []
    for _ in range(rounds):
        found.append({name: [] for name in trainers})
        for start in range(0, interval, TURN):
            for name, trainer in trainers.items():
                before_turn()
                found[-1][name] += trainer.run(min(TURN, interval - start))
    return found


# ---- makers ----


def sgd(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
    return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]


def ours(**options: Any) -> Maker:
    def make(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the base optimizer updates these")
            optimizer = KFACSGD(
                model,
                lr=0.01,
                momentum=0.9,
                factor_update_steps=every,
                inv_update_steps=1,
                **task.options,
                **options,
            )
        # No early refreshes: a step is timed as if training had begun long ago.
        optimizer.preconditioner.inv_update_steps = refreshed
        return [optimizer]

    return make


class Preconditioner:
    """The papers' preconditioner, as one of the optimizers."""

    def __init__(self, preconditioner: Any) -> None:
        self.step = preconditioner.step

    def zero_grad(self) -> None:
        pass


def kfac_pytorch(dtype: torch.dtype = torch.float32, **options: Any) -> Maker:
    """The papers' code, with its defaults for what is not told; it covers Linear and Conv2d."""

    def make(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
        from kfac.preconditioner import KFACPreconditioner

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        preconditioner = KFACPreconditioner(
            model,
            factor_update_steps=every,
            inv_update_steps=refreshed,
            lr=0.01,
            inv_dtype=dtype,
            **options,
        )
        return [Preconditioner(preconditioner), optimizer]

    return make


def soap(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
    """Its factors are updated in every step, its bases in every tenth, as its authors do."""
    from pytorch_optimizer import SOAP

    return [SOAP(model.parameters(), lr=1e-3, precondition_frequency=10)]


def muon(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
    """torch's, for matrices inside of the network; AdamW for the rest."""
    hidden = {
        p
        for name, p in model.named_parameters()
        if p.dim() == 2 and not name.startswith(("head", "words", "places"))
    }
    return [
        torch.optim.Muon(list(hidden), lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if p not in hidden], lr=1e-3),
    ]


OURS = {
    "KFACSGD": ours(),
    "KFACSGD, papers' layers": ours(skip_layers=BEYOND_PAPERS),
    "KFACSGD, inverse": ours(compute_method="inverse"),
    "KFACSGD" + BRAIN: ours(inv_dtype=torch.bfloat16),
    "KFACSGD, inverse" + BRAIN: ours(compute_method="inverse", inv_dtype=torch.bfloat16),
    "KFACSGD" + MEDIUM: ours(statistics_precision="medium"),
    "KFACSGD, papers' layers" + MEDIUM: ours(
        skip_layers=BEYOND_PAPERS, statistics_precision="medium"
    ),
}
# Statistics from some of the rows.
HALF = {"KFACSGD, half": ours(statistics_fraction=0.5)}
QUARTER = {"KFACSGD, a quarter": ours(statistics_fraction=0.25)}
PEERS = {
    PAPERS: kfac_pytorch(),
    PAPERS + BRAIN: kfac_pytorch(torch.bfloat16),
    "SOAP": soap,
    "Muon": muon,
}
EVERYONE = {**OURS, **HALF, **QUARTER, **PEERS}
NEEDS = {PAPERS: "kfac", PAPERS + BRAIN: "kfac", "SOAP": "pytorch_optimizer"}
WITHOUT = " (this device has no instructions for bfloat16)"


def is_installed(peer: str) -> bool:
    if peer not in NEEDS:
        return hasattr(torch.optim, "Muon")
    try:
        with warnings.catch_warnings():  # that apex is missing, for one
            warnings.simplefilter("ignore")
            __import__(NEEDS[peer])
    except ImportError:
        return False
    return True


def contestants(task: Task, device: str) -> tuple[dict[str, Maker], list[str]]:
    """Those that can run on this machine, the base first, and who is absent, with the reason."""
    found: dict[str, Maker] = {"SGD": sgd, **OURS, **(QUARTER if task.half else HALF)}
    absent = []
    if not multiplies_in_half(torch.bfloat16, torch.empty(0, device=device)):
        # Ours would only store it, or round for nothing, and the papers' be multiplied bit by bit.
        for without in [name for name in found if name.endswith((BRAIN, MEDIUM))]:
            del found[without]
            absent.append(without + WITHOUT)
    for peer, make in PEERS.items() if task.peers else ():
        if not is_installed(peer):
            absent.append(f"{peer} (not installed)")
            continue
        if peer.endswith(BRAIN) and "KFACSGD" + BRAIN not in found:
            absent.append(peer + WITHOUT)
            continue
        # Muon takes no convolutions, and its products in bfloat16 are a GPU's.
        if peer != "Muon" or (task.batch()[0].dim() == 2 and device == "cuda"):
            found[peer] = make
    return found, absent
