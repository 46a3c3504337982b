"""Distributed K-FAC over two hosts that are network namespaces of this machine; needs root, Linux.

    python -m benchmarks.two_hosts [--grad-worker-fraction F] [--steps N]

Two namespaces, joined by a virtual cable, have one torchrun agent and two ranks each. They train
scikit-learn's digits under DistributedDataParallel, three times: undisturbed, with one rank killed
in the middle, and with the cable down in the middle. Reported are whether the ranks' weights are
alike and those of a single process, what the cable carried beside what was expected, and how soon
the ranks end when something fails.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import hosts
from benchmarks.hosts import CABLE, PORT, address, arrived, check, ip, joined, notes_of
from benchmarks.ranks import Place
from kaisa_optim import KFACSGD

HOSTS = 2
BATCH = 64  # examples of all ranks
RANKS = 2  # of each host
EVERY, REFRESHED = 2, 4
COMPARED = 2 * REFRESHED  # steps after which weights are compared with one process's
WARM_UP = 13 * REFRESHED  # steps before the cable's bytes count; early ones refresh everything
HEADERS = 66  # bytes that Ethernet, IP and TCP add to a packet
TIMEOUT = 20  # seconds that a collective may take
PATIENCE = 180  # seconds for a trial


# ---- a rank ----


@dataclass(frozen=True)
class Split:
    images: Tensor  # [n, 1, 8, 8]
    labels: Tensor  # [n]


@dataclass(frozen=True)
class Digits:
    """1,200 of scikit-learn's digits."""

    train: Split

    @classmethod
    def load(cls, device: torch.device) -> Digits:
        pixels, digits = load_digits(return_X_y=True)
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))[:1200]
        images = (torch.tensor(pixels, dtype=torch.float32) / 16).view(-1, 1, 8, 8)[order]
        return cls(Split(images.to(device), torch.tensor(digits)[order].to(device)))

    def batches(self, seed: int, epoch: int, place: Place) -> Iterator[Split]:
        """Yield this rank's shares of the epoch's full batches."""
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(len(self.train.labels), generator=generator)
        for indices in order.to(self.train.labels.device).split(BATCH):
            if len(indices) == BATCH:
                mine = place.share(indices)
                yield Split(self.train.images[mine], self.train.labels[mine])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Exchanges:
    """Bytes that come to this rank by exchanges, which K-FAC's are; and from the other host."""

    def __init__(self, rank: int) -> None:
        self.all = self.across = 0
        here = range(rank // RANKS * RANKS, (rank // RANKS + 1) * RANKS)
        exchange = dist.all_to_all_single

        def counted(
            received: Tensor, sent: Tensor, sizes_in: list[int], sizes_out: list[int], **kwargs: Any
        ) -> Any:
            for source, size in enumerate(sizes_in):
                self.all += size * received.element_size() * (source != rank)
                self.across += size * received.element_size() * (source not in here)
            return exchange(received, sent, sizes_in, sizes_out, **kwargs)

        dist.all_to_all_single = counted  # type: ignore[assignment]


def batches(data: Digits, place: Place, steps: int) -> Iterator[Split]:
    endless = (batch for epoch in itertools.count() for batch in data.batches(0, epoch, place))
    return itertools.islice(endless, steps)


def build(place: Place, options: argparse.Namespace) -> tuple[nn.Module, KFACSGD]:
    torch.manual_seed(0)
    model = network().double() if options.double else network()
    wrapped = DistributedDataParallel(model) if place.world > 1 else model
    optimizer = KFACSGD(
        wrapped,
        lr=0.03,
        momentum=0.9,
        factor_update_steps=EVERY,
        inv_update_steps=REFRESHED,
        staggered=2 * RANKS,  # for the single process, too
        grad_worker_fraction=options.grad_worker_fraction if place.world > 1 else None,
    )
    return wrapped, optimizer


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def learn(model: nn.Module, optimizer: KFACSGD, batch: Split) -> float:
    optimizer.zero_grad()
    images = batch.images.to(next(model.parameters()).dtype)
    loss = F.cross_entropy(model(images), batch.labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def counts(exchanges: Exchanges) -> Tensor:
    dist.barrier()
    now = torch.tensor([exchanges.all, exchanges.across, *arrived()])
    dist.barrier()
    return now


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    place = Place.find(on_cpu=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    notes: Path = options.notes
    try:
        train(options, place, notes)
    except Exception as error:
        what = {"time": time.time(), "error": f"{type(error).__name__}: {error}"}
        (notes / f"error{place.rank}").write_text(json.dumps(what))
        raise
    dist.destroy_process_group()


def train(options: argparse.Namespace, place: Place, notes: Path) -> None:
    exchanges = Exchanges(place.rank)
    model, optimizer = build(place, options)
    before, start, losses = counts(exchanges), 0.0, []
    data = Digits.load(place.device)
    for step, batch in enumerate(batches(data, place, options.steps)):
        if step == COMPARED and place.rank == 0:
            torch.save(weights_of(model), notes / "early")
        if step == WARM_UP:
            before, start = counts(exchanges), time.perf_counter()
        if step == options.disturbed_at:
            disturb(options.disturbance, place, notes)
        losses.append(learn(model, optimizer, batch))
    seconds = time.perf_counter() - start
    a_step = (counts(exchanges) - before) / (step + 1 - WARM_UP)
    weights = weights_of(model)
    mine = {
        "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        **dict(zip(("all", "across", "arrived", "packets"), a_step.tolist(), strict=True)),
        "volume": optimizer.preconditioner.communication_volume(),
        "memory": optimizer.preconditioner.memory_usage()["total"],
        "milliseconds": 1e3 * seconds / (step + 1 - WARM_UP),
    }
    everyone = place.gather(mine)
    if place.rank == 0:
        (notes / "ranks").write_text(json.dumps(everyone))
        torch.save(weights, notes / "weights")
        print(f"  loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {options.steps} steps")
        print(f"  {optimizer.preconditioner.assignment!r}".replace("\n", "\n    "), flush=True)


def disturb(kind: str, place: Place, notes: Path) -> None:
    last = place.rank == place.world - 1
    if last:
        (notes / "disturbed").write_text(json.dumps(time.time()))
    if kind == "kill" and last:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "unplug":
        time.sleep(1)  # for the cable to be pulled


# ---- the two hosts ----


def agent(host: int, name: str, notes: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """What one would type on each host; the namespace apart."""
    command = ["torch.distributed.run", "--nnodes", str(HOSTS), "--nproc-per-node", str(RANKS)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:{PORT}"]
    command += ["--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", address(host)]
    command += ["-m", "benchmarks.two_hosts", "--notes", str(notes), *arguments]
    with open(notes / f"log{host}", "wb") as log:
        return hosts.start(name, command, None if host == 0 else log, log)


def trial(
    names: Sequence[str], notes: Path, arguments: Sequence[str], unplug: bool = False
) -> dict[int, tuple[int, float]]:
    """Exit status and time of end of both agents.

    Without the cable an agent may wait long after its ranks have ended; it is not waited for then.
    """
    agents = [agent(host, name, notes, arguments) for host, name in enumerate(names)]
    ends: dict[int, tuple[int, float]] = {}
    errors = [notes / f"error{rank}" for rank in range(len(names) * RANKS)]
    pulled = False
    limit = time.monotonic() + PATIENCE
    try:
        while len(ends) < len(agents) and time.monotonic() < limit:
            time.sleep(0.05)
            if unplug and not pulled and (notes / "disturbed").exists():
                ip("-n", names[1], "link", "set", CABLE, "down")
                pulled = True
            if pulled and all(note.exists() for note in errors):
                limit = min(limit, time.monotonic() + 5)
            for host, process in enumerate(agents):
                status = process.poll()
                if status is not None and host not in ends:
                    ends[host] = status, time.time()
    finally:
        hosts.end(agents)
    if len(ends) < len(agents) and not pulled:
        raise SystemExit(f"two_hosts: no end in {PATIENCE} s; logs are in {notes}")
    return ends


def undisturbed(names: Sequence[str], notes: Path, options: argparse.Namespace) -> None:
    if any(status for status, _ in trial(names, notes, passed_on(options)).values()):
        raise SystemExit("two_hosts: a rank failed\n" + (notes / "log0").read_text()[-3000:])
    ranks = json.loads((notes / "ranks").read_text())
    alike = len({rank["digest"] for rank in ranks}) == 1
    milliseconds, early, late = compared(notes, options)
    print(
        f"  weights of the {len(ranks)} ranks: {'bit-equal' if alike else 'DIFFERENT'}; relative "
        f"difference to one process {early:.1e} after {COMPARED} steps,\n  {late:.1e} at the end; "
        f"{ranks[0]['milliseconds']:.1f} ms a step, {milliseconds:.1f} on one process"
    )
    traffic(ranks, options)
    if not alike or early > (1e-10 if options.double else 1e-3):
        raise SystemExit("two_hosts: the ranks have not trained what one process trains")


def compared(notes: Path, options: argparse.Namespace) -> tuple[float, float, float]:
    """Milliseconds a step of one process on the joined batches, and how far off its weights are."""
    torch.set_num_threads(1)
    place = Place(0, 1, torch.device("cpu"))
    model, optimizer = build(place, options)
    data = Digits.load(place.device)
    early = 0.0

    def distance(name: str) -> float:
        weights = weights_of(model)
        return float((torch.load(notes / name) - weights).norm() / weights.norm())

    start = time.perf_counter()
    for step, batch in enumerate(batches(data, place, options.steps)):
        if step == COMPARED:
            early = distance("early")
        learn(model, optimizer, batch)
    milliseconds = 1e3 * (time.perf_counter() - start) / options.steps
    return milliseconds, early, distance("weights")


def traffic(ranks: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Bytes a step: the account's beside those of the exchanges, and the cable's."""
    world = len(ranks)
    print("  bytes a step to each rank by communication_volume(), and by the calls of K-FAC:")
    for rank, own in enumerate(ranks):
        volume, status = own["volume"]["total"], own["volume"]["status"]
        print(
            f"    rank {rank}: {volume:10,.1f}  {own['all'] + status:10,.1f}, "
            f"{own['across']:9,.1f} of it from the other host; {own['memory']:,} bytes kept"
        )
    model = network().double() if options.double else network()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    # In a ring every rank sends this to the next, and one rank of each host has the next elsewhere.
    ring = 2 * size * (world - 1) / world + ranks[0]["volume"]["status"]
    print("  bytes a step through the cable, expected from these and the all-reduces, and counted:")
    for host in range(HOSTS):
        of_host = ranks[host * RANKS : (host + 1) * RANKS]
        expected, first = sum(rank["across"] for rank in of_host) + ring, of_host[0]
        bare = first["arrived"] - HEADERS * first["packets"]
        print(
            f"    into host {host}: {expected:10,.1f}  {first['arrived']:10,.1f}, "
            f"{first['arrived'] / expected - 1:+.1%}; {bare / expected - 1:+.1%} without the "
            f"headers of {first['packets']:.0f} packets"
        )


def passed_on(options: argparse.Namespace) -> list[str]:
    given = ["--steps", str(options.steps), "--grad-worker-fraction"]
    given.append(str(options.grad_worker_fraction))
    return [*given, "--double"] if options.double else given


def disturbed(kind: str, names: Sequence[str], notes: Path, options: argparse.Namespace) -> None:
    arguments = ["--disturbed-at", str(options.steps // 2), "--disturbance", kind]
    arguments = [*passed_on(options), *arguments]
    ends = trial(names, notes, arguments, unplug=kind == "unplug")
    since = json.loads((notes / "disturbed").read_text())
    for rank in range(len(names) * RANKS):
        note = notes / f"error{rank}"
        if note.exists():
            said = json.loads(note.read_text())
            what = said["error"].removesuffix(".").split(". ")[0]
            print(f"  rank {rank} after {said['time'] - since:.1f} s: {what}")
        elif kind == "unplug":
            raise SystemExit(f"two_hosts: rank {rank} has not noticed; logs are in {notes}")
        else:
            print(f"  rank {rank}: ended by a signal")
    for host in range(len(names)):
        status, at = ends.get(host, (0, 0.0))
        end = f"exit status {status} after {at - since:.1f} s" if host in ends else "still waits"
        print(f"  torchrun on host {host}: {end}", flush=True)
    if not all(status for status, _ in ends.values()):
        raise SystemExit("two_hosts: an agent ended as if nothing had failed")


def host_main(options: argparse.Namespace) -> None:
    check("two_hosts")
    for title, double, kind in (
        ("training in float32", False, ""),
        ("training in float64", True, ""),
        ("one rank is killed in the middle", False, "kill"),
        ("the cable is pulled in the middle", False, "unplug"),
    ):
        print(f"\n{title}, on two hosts with {RANKS} ranks each", flush=True)
        options.double = double
        with notes_of("two-hosts") as notes, joined() as names:
            if kind:
                disturbed(kind, names, notes, options)
            else:
                undisturbed(names, notes, options)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_hosts",
        description="Distributed K-FAC over two network namespaces of this machine; needs root.",
    )
    parser.add_argument("--steps", type=int, default=WARM_UP + 20 * REFRESHED, help="of training")
    parser.add_argument("--grad-worker-fraction", type=float, default=0.5, help="K-FAC's")
    # What the ranks are told:
    parser.add_argument("--double", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--disturbed-at", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--disturbance", default="", help=argparse.SUPPRESS)
    hosts.main(parser, arguments, host_main, rank_main)


if __name__ == "__main__":
    main()
