"""The contestants: base optimizers, K-FAC over each of them, and peers, in turns."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.muon import Muon, hidden_and_rest, muons_groups
from kaisa_optim import KFACLAMB, KFACSGD, LAMB, KFACAdam
from kaisa_optim.linalg.products import multiplies_in_half

from .tasks import OFTEN, Task

TURN = 10  # steps of one contestant before the next one's
BATCHES = 10  # that a contestant goes through: factors must move, or refreshes would be too easy
NEVER = 10**9  # steps
LONG_AGO = 978  # the number of the second step: early refreshes are over, 1000 is near
PAPERS = "kfac-pytorch"
BRAIN = ", bfloat16"  # of those that precondition in it

Seconds = tuple[float, float]  # of a step: forward and backward, and the optimizer's part
# What steps a network, one after the other; of ours there is one, with its preconditioner.
Maker = Callable[[nn.Module, Task, int, int], Sequence[Any]]


class Trainer:
    """One contestant: a network and what steps it."""

    def __init__(self, task: Task, device: str, make: Maker, intervals: tuple[int, int]) -> None:
        torch.manual_seed(0)
        self.device = device
        self.scaler = torch.amp.GradScaler(device, enabled=task.half is torch.float16)
        if self.scaler.is_enabled():
            task = replace(task, options={**task.options, "grad_scaler": self.scaler})
        self.task = task
        self.model = task.network().to(device)
        batches = [task.batch() for _ in range(BATCHES)]
        if task.half and batches[0][0].dim() == 4:  # as tensor cores want their convolutions
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in batches]
        self.batches = itertools.cycle([(x.to(device), y.to(device)) for x, y in batches])
        self.optimizers = make(self.model, task, *intervals)
        # The tables are of times; what K-FAC leaves to the base is no news here.
        warnings.filterwarnings("ignore", "the base optimizer updates these")

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


def in_turns(trainers: Mapping[str, Runs], steps: int) -> dict[str, list[Seconds]]:
    """Return the seconds of so many steps of each, in turns."""
    found: dict[str, list[Seconds]] = {name: [] for name in trainers}
    for start in range(0, steps, TURN):
        for name, trainer in trainers.items():
            found[name] += trainer.run(min(TURN, steps - start))
    return found


def race(
    trainers: Mapping[str, Runs], interval: int, rounds: int
) -> list[dict[str, list[Seconds]]]:
    """Return the steps of each in each round, one interval long, but for the first two steps."""
    for trainer in trainers.values():
        trainer.run(2)  # the first steps gather and refresh everything
    return [in_turns(trainers, interval) for _ in range(rounds)]


# ---- makers ----


class Pair(NamedTuple):
    """A base optimizer, the class that has K-FAC inside of it, and the settings of both."""

    base: Callable[..., Any]
    ours: Callable[..., Any]
    settings: dict[str, Any]


PAIRS = {
    "SGD": Pair(torch.optim.SGD, KFACSGD, {"lr": 0.01, "momentum": 0.9}),
    "AdamW": Pair(torch.optim.AdamW, KFACAdam, {"lr": 1e-3}),
    "LAMB": Pair(LAMB, KFACLAMB, {"lr": 1e-3}),
}
CLASSES = {pair.ours.__name__: base for base, pair in PAIRS.items()}  # ours, by name: the base


def base_of(name: str) -> str:
    """Return the base optimizer beside which a contestant is timed."""
    return CLASSES.get(name.split(",")[0], name if name in BASES else "SGD")


def base(name: str) -> Maker:
    kind, _, settings = PAIRS[name]

    def make(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
        return [kind(model.parameters(), **settings)]

    return make


def ours(of: str = "SGD", **options: Any) -> Maker:
    """K-FAC over a base. Only the papers' methods have to know what the loss averages."""
    _, kind, settings = PAIRS[of]

    def make(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
        told = task.options if "compute_method" in options else {}
        intervals = {"factor_update_steps": every, "inv_update_steps": refreshed}
        given = {**settings, **intervals, **told, **options}
        optimizer = kind(model, **given)

        def age(*_: Any) -> None:
            """Time further steps as if training had begun long ago, without early refreshes.

            A new number alone would leave the next slot in the past: no step would gather again.
            """
            handle.remove()
            optimizer.preconditioner.resume(LONG_AGO)

        handle = optimizer.register_step_post_hook(age)
        return [optimizer]

    return make


def muon(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
    """Take the matrices and kernels inside of the network; AdamW takes the rest."""
    return [Muon(muons_groups(model, 1e-3), lr=0.02)]


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


def torch_muon(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
    """torch's, for matrices inside of the network; AdamW for the rest."""
    hidden, rest = hidden_and_rest(model)
    return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]


BASES = {**{name: base(name) for name in PAIRS}, "Muon": muon}
OURS = {name: ours(of) for name, of in CLASSES.items()}
HALVES = {"KFACSGD" + BRAIN: ours(inv_dtype=torch.bfloat16)}
OF_PAPERS = {
    "KFACSGD, eigen": ours(compute_method="eigen"),
    "KFACSGD, inverse": ours(compute_method="inverse"),
}
TORCH_MUON = "torch's Muon"
PEERS = {
    PAPERS: kfac_pytorch(),
    PAPERS + BRAIN: kfac_pytorch(torch.bfloat16),
    "SOAP": soap,
    TORCH_MUON: torch_muon,
}
EVERYONE = {**OURS, **HALVES, **OF_PAPERS, **PEERS}
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
    """Those that can run on this machine, bases first, and who is absent, with the reason."""
    found: dict[str, Maker] = {**BASES, **OURS, **HALVES, **OF_PAPERS}
    absent = []
    in_half = multiplies_in_half(torch.float32, torch.device(device))
    if not in_half:
        # Ours would only store it, and the papers' be multiplied bit by bit.
        for without in HALVES:
            del found[without]
            absent.append(without + WITHOUT)
    for peer, make in PEERS.items() if task.peers else ():
        if not is_installed(peer):
            absent.append(f"{peer} (not installed)")
            continue
        if peer.endswith(BRAIN) and not in_half:
            absent.append(peer + WITHOUT)
            continue
        # Torch's Muon takes no convolutions, and its products in bfloat16 are a GPU's.
        if peer != TORCH_MUON or (task.batch()[0].dim() == 2 and device == "cuda"):
            found[peer] = make
    return found, absent


def takes_part(name: str, intervals: tuple[int, int]) -> bool:
    """Return whether a contestant is timed at these intervals.

    All are timed at the defaults; at the papers' other intervals KFACSGD, their methods and peers.
    """
    return base_of(name) == "SGD" or intervals != OFTEN
