"""Profiles by measurement: products, roots, eigenvectors, inverses, copies and collectives."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import invalid, invalid_because
from ..linalg import products
from ..optimizer import KFACAdam
from . import hardware
from .hardware import Hardware
from .texts import milliseconds

COMMENT = """\
Written by kaisa calibrate.
times_ms: columns, ms of the first matrix of a batch, ms of each further one"""
Watch = Callable[[Sequence[Any]], Iterator[Any]]
Row = tuple[str, str, str, str, str]

SIDES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (64, 256, 512, 1024, 2048, 4096)}
_BATCH = 4  # matrices of the batch that tells the time of each further one
_ENOUGH = 0.2  # seconds of a measurement, but for a single call that takes longer
_DAMPING = 0.01
_MARGIN = 0.25
_START = 180.0  # seconds in which ranks start and exchange, on a busy machine, too
_SMALL, _LARGE = 4 << 10, 8 << 20  # bytes to each rank, of collectives
_WIDTH, _DEPTH, _ROWS = 512, 4, 256  # of the network whose passes are timed
_SMALL_SIDES, _COPIES = range(4, 12), 4  # of layers, of which the host's work is timed


def seconds(function: Callable[[], Any], device: str) -> float:
    """Return the seconds of a call: the least of many."""
    function()  # the first call allocates and chooses kernels
    least, until = float("inf"), time.perf_counter() + _ENOUGH
    while True:
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        now = time.perf_counter()
        least = min(least, now - start)
        if now > until:
            return least


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def operations(device: str) -> dict[str, Callable[[Tensor], Any]]:
    """Return a function of a stack of positive definite matrices for each operation."""

    def damping(stack: Tensor) -> Tensor:
        return stack.new_full((len(stack),), _DAMPING)

    operations: dict[str, Callable[[Tensor], Any]] = {
        "products": lambda x: torch.bmm(x, x),
        "roots": lambda x: products.inverse_root(x, damping(x), diagonal=False),
        "eigenvectors": products.eigendecompose,
        "inverses": lambda x: products.damped_inverse(x, damping(x)),
    }
    if device == "cuda":
        operations["half_products"] = lambda x: torch.bmm(x.bfloat16(), x.bfloat16())
    return operations


def measure(device: str, ranks: int, watch: Watch = iter) -> dict[str, Any]:
    """Return the values of a profile of this machine."""
    if device not in SIDES or (device == "cuda" and not torch.cuda.is_available()):
        raise invalid("device", device, 'it must be "cpu", or "cuda" where there is one')
    kinds = operations(device)
    times: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    with torch.no_grad():
        for side, kind in watch([*itertools.product(SIDES[device], kinds)]):
            single, many = (_seconds_of(kinds[kind], count, side, device) for count in (1, _BATCH))
            further = max((many - single) / (_BATCH - 1), single / 1e3)
            times[kind].append([side, 1e3 * single, 1e3 * further])
    group, layer = host(device)
    # One device tells nothing of links: take those of the profile that is nearest.
    known = hardware.load(hardware.named_for(device, _title(device)))
    inside, between = _as_written(known.inside), _as_written(known.between)
    told, node = f"links of the profile {known.name!r}", known.ranks_per_node
    if device == "cpu" and ranks > 1:
        inside = between = links(ranks)
        told, node = f"links between {ranks} ranks of this machine", ranks
    return {
        "title": _title(device),
        "device": device,
        "memory_gb": _memory(device) / 1e9,
        "ranks_per_node": node,
        "tflops": passes(device) / 1e12,
        "memory_gb_per_s": bandwidth(device) / 1e9,
        "host_us": 1e6 * group,
        "host_layer_us": 1e6 * layer,
        "margin": _MARGIN,
        "sources": [f"measured by kaisa calibrate, torch {torch.__version__}, {_threads()}", told],
        "links": {"inside": inside, "between": between},
        "times_ms": {kind: _rising(rows) for kind, rows in times.items()},
    }


def _as_written(link: hardware.Link) -> dict[str, float]:
    """Return a link as a profile's file has it."""
    each = {"each_us": 1e6 * link.each} if link.each else {}
    return {"gb_per_s": link.bandwidth / 1e9, "latency_us": 1e6 * link.latency, **each}


def _seconds_of(function: Callable[[Tensor], Any], count: int, side: int, device: str) -> float:
    rows = torch.randn(count, 2 * side, side, device=device)
    stack = rows.mT @ rows / (2 * side)
    return seconds(lambda: function(stack), device)


def _rising(rows: list[list[float]]) -> list[list[float]]:
    """Return rows whose times do not fall as sides grow: a smaller one takes no longer."""
    columns = [[*itertools.accumulate(column, max)] for column in zip(*rows, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _title(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"a CPU, {torch.backends.cpu.get_cpu_capability()}, {_threads()}"


def _threads() -> str:
    return f"{torch.get_num_threads()} threads"


def _memory(device: str) -> int:
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    with open("/proc/meminfo") as lines:
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemTotal")))


def bandwidth(device: str) -> float:
    """Return the bytes a second that a network's operations between its products move."""
    # As large as activations are on CPUs; on GPUs, larger than any cache.
    x = torch.ones(1024, 16, 16, 128 if device == "cuda" else 4, device=device)
    y = x.clone()

    def move() -> None:  # eight times the bytes of a tensor
        x.add_(y)
        torch.linalg.vector_norm(x)
        nn.functional.gelu(x)
        nn.functional.batch_norm(x, None, None, training=True)

    return 8 * x.nbytes / seconds(move, device)


def passes(device: str) -> float:
    """Return the operations a second of a network's passes."""
    layers = [nn.Linear(_WIDTH, _WIDTH, device=device) for _ in range(_DEPTH)]
    net = nn.Sequential(*layers)
    x = torch.randn(_ROWS, _WIDTH, device=device, requires_grad=True)
    taken = seconds(lambda: net(x).sum().backward(), device)
    return 3 * 2 * _DEPTH * _ROWS * _WIDTH**2 / taken


class _Apart(nn.Module):
    """Copies of small layers of several shapes, side by side."""

    def __init__(self, copies: int, device: str) -> None:
        super().__init__()
        sides = [*_SMALL_SIDES] * copies
        self.layers = nn.ModuleList(nn.Linear(n, n, device=device) for n in sides)

    def forward(self, x: Tensor) -> Tensor:
        sums = [layer(x[:, : layer.in_features]).sum() for layer in self.layers]
        return torch.stack(sums).sum()


def host(device: str) -> tuple[float, float]:
    """Return the seconds on the host of a quiet step, by group of layers and by layer."""
    few, many = (_host(copies, device) / len(_SMALL_SIDES) for copies in (1, _COPIES))
    least = few / 1e3  # timings vary, and a profile has no time of zero
    layer = max((many - few) / (_COPIES - 1), least)
    return max(few - layer, least), layer


def _host(copies: int, device: str) -> float:
    """Return the seconds on the host of a quiet step with so many layers of each shape."""
    net = _Apart(copies, device)
    optimizer = KFACAdam(net, factor_update_steps=10**6, inv_update_steps=10**6, staggered=False)
    x = torch.ones(4, max(_SMALL_SIDES), device=device)
    taken: list[float] = []
    with torch.enable_grad():
        for _ in range(80):  # most of them are quiet
            optimizer.zero_grad()
            net(x).backward()
            start = time.perf_counter()
            optimizer.step()
            taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 3]


# ---- collectives ----


def links(ranks: int) -> dict[str, float]:
    """Return bandwidth and latency between ranks of this machine, over gloo."""
    import multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawning = multiprocessing.get_context("spawn")
    receiver, sender = spawning.Pipe()
    started = [
        spawning.Process(target=_exchange, args=(rank, ranks, port, sender), daemon=True)
        for rank in range(ranks)
    ]
    for child in started:
        child.start()
    sender.close()
    try:
        small, large = receiver.recv() if receiver.poll(_START) else (0.0, 0.0)
    except EOFError:
        small = large = 0.0
    finally:
        for child in started:
            child.join(10)
            child.kill()
    if not 0 < small < large:
        why = f"{ranks} ranks did not exchange anything over gloo; try fewer"
        raise invalid_because("ranks", why)
    return {"gb_per_s": _received(ranks) / (large - small) / 1e9, "latency_us": 1e6 * small}


def _received(ranks: int) -> int:
    return (ranks - 1) * (_LARGE - _SMALL)


def _exchange(rank: int, ranks: int, port: int, to: Connection) -> None:
    """Exchange small and large tensors among all ranks; rank 0 tells the seconds of a call."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=limit)
    fastest = []
    for size in (_SMALL, _LARGE):
        x = torch.zeros(ranks * size, dtype=torch.uint8)
        y = torch.empty_like(x)
        best = float("inf")
        for _ in range(12):
            dist.barrier()
            start = time.perf_counter()
            dist.all_to_all_single(y, x)
            best = min(best, time.perf_counter() - start)
        fastest.append(best)
    if rank == 0:
        to.send(tuple(fastest))
    dist.destroy_process_group()


# ---- a profile beside a measurement ----


def compare(known: Hardware, measured: Mapping[str, Any]) -> Iterator[Row]:
    """Yield operation, size, the profile's time, the measured one, and the profile's error."""
    new = hardware.parse("measured", measured)
    for kind, times in new.times.items():
        for side in times.sides if kind in known.times else ():
            sender, end = known.times[kind].seconds(side), times.seconds(side)
            yield _row(kind, f"{side:.0f} columns", sender, end)
    for title, size in (("a small exchange", _SMALL), ("a large exchange", _LARGE)):
        transfers = (x.transfer(size, 2, 2) for x in (known, new))
        yield _row(title, f"{size / 1e6:.3g} MB", *transfers)
    yield _row("passes", "1 GFLOP", 1e9 / known.flops, 1e9 / new.flops)
    yield _row("memory", "1 GB", 1e9 / known.memory_bandwidth, 1e9 / new.memory_bandwidth)
    yield _row("host", "a group of layers", known.host, new.host)
    yield _row("host", "a layer", known.host_layer, new.host_layer)


def _row(title: str, size: str, known: float, measured: float) -> Row:
    error = f"{100 * (known / measured - 1):+.0f} %"
    return title, size, milliseconds(known), milliseconds(measured), error
