"""What the applications share: ranks, precision, accumulation, checkpoints, curves and the loop."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from benchmarks.convergence.search import WARMUP, now, share_of_rate
from benchmarks.machine import keep
from kaisa_optim.optimizer import KFACMixin

from .arguments import Defaults, build, by_papers, has_kfac, parse

# Arguments that a continued run may change.
_FREE = ("out", "stop", "quiet", "command", "device", "data", "save_every")
_KEPT = ("step", "seconds", "points", "total", "count")


@dataclass(frozen=True)
class Ranks:
    """This process among the processes that torchrun started."""

    rank: int
    world: int
    device: str
    joined: bool = False  # the process group was made here, and ends with the run

    @classmethod
    def join(cls, device: str) -> Ranks:
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        joins = world > 1 and not dist.is_initialized()
        if joins:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        return cls(rank, world, device, joins)

    def sum(self, *numbers: float) -> list[float]:
        """Return the sums over all ranks, by one all-reduce."""
        total = torch.tensor(numbers, dtype=torch.float64)
        if self.world > 1:
            dist.all_reduce(total)
        return total.tolist()

    def means(self, sums: Sequence[float], count: float) -> list[float]:
        """Return the ranks' sums, each divided by their examples, by one all-reduce."""
        *found, number = self.sum(*sums, count)
        return [one / number for one in found]

    def share(self, count: int) -> range:
        """Return the places of this rank's part of ``count`` examples."""
        return range(self.rank, count, self.world)


def seeded(*numbers: int) -> torch.Generator:
    """Return a generator that depends on these numbers alone: a seed, a step, a rank."""
    return torch.Generator().manual_seed(_mixed(*numbers))


def _mixed(*numbers: int) -> int:
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 1) % 2**63
    return mixed


@dataclass
class Order:
    """Batches of places in a data set, equal after a restart: the seed and the epoch decide."""

    count: int
    ranks: Ranks
    options: argparse.Namespace

    def __post_init__(self) -> None:
        self.batch = self.options.batch * self.ranks.world  # of all ranks in one backward pass
        if self.batch > self.count:
            raise SystemExit(f"--batch: {self.batch} on all ranks, of {self.count} examples")

    @property
    def per_epoch(self) -> int:
        """Whole steps of an epoch, at least one."""
        return max(1, self.count // self.batch // self.options.accumulate)

    @property
    def steps(self) -> int:
        """The steps of the run: --steps, or those of --epochs."""
        per_epoch = self.count // self.batch / self.options.accumulate
        return self.options.steps or max(1, round(self.options.epochs * per_epoch))

    def __call__(self, step: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each backward pass and the places of this rank, from a step on."""
        whole = self.count // self.batch
        first = step * self.options.accumulate
        for epoch in itertools.count(first // whole):
            order = torch.randperm(self.count, generator=seeded(self.options.seed, epoch))
            parts = order[: whole * self.batch].split(self.batch)
            for number in range(max(first, epoch * whole), (epoch + 1) * whole):
                yield number, parts[number - epoch * whole][self.ranks.rank :: self.ranks.world]


def draws(options: argparse.Namespace, ranks: Ranks, step: int) -> Iterator[torch.Generator]:
    """Yield the generator of each of this rank's backward passes, from a step on."""
    for number in itertools.count(step * options.accumulate):
        yield seeded(options.seed, number, ranks.rank)


def warm_cosine(steps: int, warm: float = WARMUP) -> Callable[[int], float]:
    return lambda step: share_of_rate(step, steps, warm)


def papers_rate(world: int, steps: int, decays: Sequence[int]) -> Callable[[int], float]:
    """Return the share of lr × ranks: from one rank's rate up in 5 epochs, then down in tenths.

    ``steps`` are those of an epoch; ``decays`` are epochs.
    """

    def rate(step: int) -> float:
        epoch = step / steps
        up = (1 + (world - 1) * min(1.0, epoch / 5)) / world
        return up * 0.1 ** sum(epoch >= decay for decay in decays)

    return rate


def by_preset(
    options: argparse.Namespace,
    ranks: Ranks,
    order: Order,
    decays: Mapping[bool, Sequence[int]],
    steps: int | None = None,
) -> Callable[[int], float]:
    """Return a cosine; under a preset the papers' schedule, of the rate times the ranks.

    ``decays`` are epochs, under True those with K-FAC; ``steps`` are those of an epoch.
    """
    if options.preset is None:
        return warm_cosine(order.steps)
    options.settings["lr"] *= ranks.world
    chosen = decays[has_kfac(options.optimizer)]
    return papers_rate(ranks.world, steps or order.per_epoch, chosen)


def accuracy(net: nn.Module, batches: Iterable[Sequence[Tensor]], ranks: Ranks) -> dict[str, float]:
    """Return loss and accuracy over all ranks' batches of images and labels."""
    sums = [0.0, 0.0, 0]
    for images, labels in batches:
        out, labels = net(images.to(ranks.device)), labels.to(ranks.device)
        sums[0] += F.cross_entropy(out, labels, reduction="sum").item()
        sums[1] += (out.argmax(1) == labels).sum().item()
        sums[2] += len(labels)
    return dict(zip(("loss", "accuracy"), ranks.means(sums[:2], sums[2]), strict=True))


@dataclass
class Job:
    """All that the loop needs of an application."""

    model: nn.Module
    steps: int
    rate: Callable[[int], float]  # share of the peak learning rate, by step
    batches: Callable[[int], Iterator[Any]]  # this rank's micro-batches, from a step on
    loss: Callable[[nn.Module, Any], Tensor]  # mean over a micro-batch's terms
    evaluate: Callable[[nn.Module], dict[str, float]]  # equal on all ranks
    terms: Callable[[Any], int] | None = None  # of a micro-batch, where their number varies
    groups: Any = None  # of parameters; None: all in one


class Run:
    """One training run, which goes on from the checkpoint in its folder."""

    def __init__(self, job: Job, options: argparse.Namespace, ranks: Ranks) -> None:
        self.job, self.options, self.ranks = job, options, ranks
        self.scaler = torch.amp.GradScaler(ranks.device, enabled=options.amp == "fp16")
        scaler = self.scaler if self.scaler.is_enabled() else None
        job.model.to(ranks.device)
        self.optimizer: Optimizer = build(options, job.model, job.groups, scaler)
        # The papers' own scaling leaves out how many terms a loss averages.
        kaisa = options.settings.get("normalization") == "kaisa"
        self.tells_terms = job.terms is not None and by_papers(options) and not kaisa
        self.schedule = LambdaLR(self.optimizer, job.rate)
        self.net = job.model
        if ranks.world > 1:
            self.net = DistributedDataParallel(job.model, find_unused_parameters=False)
        self.step, self.seconds = 0, 0.0
        self.total, self.count = 0.0, 0  # the losses since the last evaluation
        self.points: list[dict[str, float]] = []
        self.path: Path = options.out / "last.pt"
        if self.path.exists():
            self._load()

    # ---- checkpoints ----

    @property
    def _settings(self) -> dict[str, str]:
        return {n: str(v) for n, v in vars(self.options).items() if n not in _FREE}

    def save(self) -> None:
        """Write the checkpoint aside, then rename it: a killed run leaves the former one whole."""
        if isinstance(self.optimizer, KFACMixin):
            self.optimizer.consolidate_state_dict(to=0)
        if self.ranks.rank == 0:
            state = {
                "model": self.job.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "scaler": self.scaler.state_dict(),
                "settings": self._settings,
                **{name: getattr(self, name) for name in _KEPT},
            }
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path.with_suffix(".part"), "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            self.path.with_suffix(".part").replace(self.path)
        if self.ranks.world > 1:
            dist.barrier()  # no rank may look for a file that is still being written

    def _load(self) -> None:
        state = torch.load(self.path, weights_only=True, map_location="cpu")
        known, asked = state["settings"], self._settings
        other = [n for n in asked if known.get(n) != asked[n]]
        if other:
            told = ", ".join(f"{n}: {known.get(n)} there, {asked[n]} here" for n in other)
            raise SystemExit(f"{self.path} is of another run ({told}); take another --out")
        self.job.model.load_state_dict(state["model"])
        for name in ("optimizer", "schedule", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        for name in _KEPT:
            setattr(self, name, state[name])

    # ---- the loop ----

    def backward(self, batches: list[Any]) -> Tensor:
        """Accumulate the gradients of the mean over all terms; return that mean."""
        job, total = self.job, torch.zeros((), device=self.ranks.device)
        counts = [1 if job.terms is None else job.terms(batch) for batch in batches]
        if self.tells_terms:
            self.optimizer.preconditioner.loss_terms = float(sum(counts))  # type: ignore[attr-defined]
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.options.amp)
        for i, (batch, count) in enumerate(zip(batches, counts, strict=True), 1):
            later = self.ranks.world > 1 and i < len(batches)
            with self.net.no_sync() if later else contextlib.nullcontext():  # type: ignore[operator]
                with torch.autocast(self.ranks.device, dtype, enabled=dtype is not None):
                    loss = job.loss(self.net, batch) * (count / sum(counts))
                self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def update(self, batches: list[Any]) -> Tensor:
        """Take one step; return its loss."""
        # Dropout's numbers depend on the step and the rank alone: a restart draws them again.
        torch.manual_seed(_mixed(self.options.seed, self.step, self.ranks.rank))
        self.optimizer.zero_grad()
        loss = self.backward(batches)
        if self.options.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.job.model.parameters(), self.options.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.step += 1
        return loss

    def fit(self) -> list[dict[str, float]]:
        """Train to the last step, or to --stop; return the curve."""
        job, options, first = self.job, self.options, self.ranks.rank == 0
        last = min(job.steps, options.stop or job.steps)
        batches = job.batches(self.step)
        writer = _writer(options.out, self.step) if first else None
        bar = tqdm(
            total=job.steps, initial=self.step, disable=options.quiet or not first, file=sys.stderr
        )
        total = torch.tensor(self.total, device=self.ranks.device)
        while self.step < last:
            taken = list(itertools.islice(batches, options.accumulate))
            start = now(self.ranks.device)
            total += self.update(taken)
            self.seconds += now(self.ranks.device) - start
            self.count += 1
            bar.update()
            if self.step % options.every == 0 or self.step == job.steps:
                (mean,) = self.ranks.sum(total.item() / self.count / self.ranks.world)
                total, self.count = torch.zeros_like(total), 0
                self._evaluate(mean, writer, bar)
            if self.step % options.save_every == 0 or self.step == last:
                (self.total,) = self.ranks.sum(total.item() / self.ranks.world)
                self.save()
        bar.close()
        if writer is not None:
            writer.close()
        return self.points

    def _evaluate(self, mean: float, writer: Any, bar: Any) -> None:
        if self.ranks.world > 1:
            for buffer in self.job.model.buffers():
                dist.broadcast(buffer, 0)  # batch norms' averages are the first rank's
        self.job.model.eval()
        with torch.no_grad():
            found = self.job.evaluate(self.job.model)
        self.job.model.train()
        self.points.append(
            {"step": self.step, "seconds": round(self.seconds, 2), "train": mean, **found}
        )
        if self.ranks.rank == 0:
            bar.set_postfix({name: f"{number:.4g}" for name, number in found.items()})
            if self.options.quiet:
                print(json.dumps(self.points[-1]), flush=True)
            for name, number in self.points[-1].items():
                if writer is not None:
                    writer.add_scalar(name, number, self.step)
            keep(
                self.options.out / "curve.json",
                device=self.ranks.device,
                ranks=self.ranks.world,
                command=f"{Path(sys.argv[0]).stem} {self.options.command}",
                optimizer=self.options.optimizer,
                settings={n: str(v) for n, v in self.options.settings.items()},
                curve=self.points,
            )


def _writer(folder: Path, step: int) -> Any:
    """Return TensorBoard's writer, or None where the package is absent."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step)


def run(job: Job, options: argparse.Namespace, ranks: Ranks) -> list[dict[str, float]]:
    """Train, tell the last evaluation, and leave the process group."""
    trained = Run(job, options, ranks)
    if ranks.rank == 0 and trained.step == 0 and isinstance(trained.optimizer, KFACMixin):
        print(trained.optimizer.preconditioner, file=sys.stderr)
    points = trained.fit()
    if ranks.rank == 0 and points and not options.quiet:
        print(json.dumps(points[-1]), flush=True)
    if ranks.joined:
        # DistributedDataParallel must end before its process group does.
        del trained
        gc.collect()
        dist.destroy_process_group()
    return points


def entry(
    about: str | None,
    job: Callable[[argparse.Namespace, Ranks], Job],
    defaults: Defaults,
    presets: Mapping[str, Defaults],
    smoke: Defaults,
    arguments: Callable[[argparse.ArgumentParser], None],
) -> Callable[..., list[dict[str, float]]]:
    """Return an application's main function: parse, join the ranks, train."""

    def main(given: Sequence[str] | None = None) -> list[dict[str, float]]:
        options = parse(about, given, defaults, presets, smoke, arguments)
        ranks = Ranks.join(options.device)
        return run(job(options, ranks), options, ranks)

    return main
