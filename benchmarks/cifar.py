"""ResNet-20 on CIFAR-10: steps and seconds to 90 % of the test images.

    python -m benchmarks.cifar --data FOLDER [--only SGD KFACSGD] [--seeds 2] [--out PATH]

All 50,000 images, shifted by up to four pixels and mirrored, 128 a step, 390 steps an epoch, cross
entropy. The rate warms up in a line over the first epoch, and falls along a cosine to zero. Each
optimizer tries a grid of rates with the first seed over the shortest length; a grid whose best is
at an end goes on there. At the best rate, or at half of it where less than 2 % is missing,
bisection finds a length at whose end the first seed has 90 %; lengths grow from there until the
mean of all seeds has. The last length, at the best rate alone, is told where none has. SGD's
momentum is Nesterov's, KFACSGD's is not. Steps and seconds go to the first mean of 90 %. One thread
trains, in channels_last, and forward in bfloat16 where the CPU has instructions for it. Seconds are
its CPU time, without measurements. Runs are kept in a file, from which a new start goes on.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.convergence.search import now, share_of_rate
from benchmarks.convergence.tasks import Pairs, augmented, epochs, normalized
from benchmarks.data import cifar10
from benchmarks.machine import keep
from benchmarks.muon import Muon, muons_groups
from benchmarks.networks import CifarResNet
from benchmarks.recipes import Curve, Runs, arguments, best_rate, going_on
from kaisa_optim import KFACSGD, with_kfac
from kaisa_optim.linalg.products import multiplies_in_half

DEPTH, BATCH, TARGET, NEAR = 20, 128, 0.9, 0.88
LENGTHS = (6, 10, 12, 14, 16, 18, 21, 24, 28, 32, 37)  # epochs

_SGD: Any = {"momentum": 0.9, "weight_decay": 5e-4}
_DECAY: Any = {"weight_decay": 0.05}
CONTESTANTS: dict[str, tuple[Callable[[nn.Module, float], Optimizer], list[float]]] = {
    "SGD": (lambda m, lr: SGD(m.parameters(), lr, nesterov=True, **_SGD), [0.1, 0.2, 0.4]),
    "AdamW": (lambda m, lr: AdamW(m.parameters(), lr, **_DECAY), [0.003, 0.01, 0.03]),
    "Muon": (
        lambda m, lr: Muon(muons_groups(m, 0.003), lr=lr, momentum=0.95, **_DECAY),
        [0.01, 0.03, 0.1],
    ),
    "KFACSGD": (lambda model, lr: KFACSGD(model, lr=lr, **_SGD), [0.1, 0.2, 0.4]),
    "KFACAdamW": (lambda m, lr: with_kfac(AdamW)(m, lr=lr, **_DECAY), [0.003, 0.01, 0.03]),
}


def logits(model: nn.Module, images: Tensor, forward: str) -> Tensor:
    x = normalized(images).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16, enabled=forward == "bfloat16"):
        out: Tensor = model(x)
    return out.float()


def measure(model: nn.Module, test: Pairs, forward: str) -> float:
    """Return the share of images that are classified right."""
    model.eval()
    with torch.no_grad():
        parts = zip(*(part.split(500) for part in test), strict=True)
        right = sum(int((logits(model, x, forward).argmax(1) == y).sum()) for x, y in parts)
    model.train()
    return right / len(test[1])


def train(
    data: tuple[Pairs, Pairs], name: str, lr: float, seed: int, length: int, forward: str
) -> Curve:
    """Return a run's curve: steps, seconds, accuracy; a run that diverges is broken off."""
    torch.manual_seed(seed)
    model: Any = CifarResNet(DEPTH)
    model.to(memory_format=torch.channels_last)
    optimizer = CONTESTANTS[name][0](model, lr)
    rates = [(group, group["lr"]) for group in optimizer.param_groups]
    (images, labels), test = data
    drawn = torch.Generator().manual_seed(1000 + seed)
    places = epochs(len(images), BATCH, drawn)
    each = len(images) // BATCH
    curve: Curve = []
    seconds, start = 0.0, now("cpu")
    for step in range(length * each):
        share = share_of_rate(step, length * each, 1 / length)
        for group, peak in rates:
            group["lr"] = peak * share
        chosen = next(places)
        optimizer.zero_grad()
        out = logits(model, augmented(images[chosen], drawn), forward)
        loss = F.cross_entropy(out, labels[chosen])
        loss.backward()
        optimizer.step()
        epoch, within = divmod(step + 1, each)
        if within == 0 and (2 * epoch > length or epoch % 2 == 0):
            seconds += now("cpu") - start
            curve.append((step + 1, seconds, measure(model, test, forward)))
            if not math.isfinite(loss.item()):
                break
            start = now("cpu")
    return curve


def last(run: dict[str, Any]) -> float:
    return run["curve"][-1][2]


def row(name: str, seeds: int, get: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Return a length that reaches the target, by bisection, its steps and seconds to it."""
    trial = partial(get, name=name, seed=0)
    best = best_rate(CONTESTANTS[name][1], lambda lr: -last(trial(lr=lr, length=LENGTHS[0])))

    def reaching(length: int) -> Iterator[float]:
        for lr in (best, best / 2):  # a longer schedule may need the lower one
            if (share := last(trial(lr=lr, length=length))) >= TARGET:
                yield lr
            elif share < NEAR:
                return

    shortest = bisect_left(LENGTHS[:-1], True, key=lambda length: any(reaching(length)))
    ways = ((n, lr) for n in LENGTHS[shortest:] for lr in reaching(n))
    for length, lr in itertools.chain(ways, [(LENGTHS[-1], best)]):
        runs = [get(name=name, lr=lr, seed=seed, length=length) for seed in range(seeds)]
        ends = [last(run) for run in runs]
        if statistics.fmean(ends) >= TARGET:
            break
    ms = statistics.fmean(1e3 * run["curve"][-1][1] / run["curve"][-1][0] for run in runs)
    result = {"optimizer": name, "lr": lr, "epochs": length, "seeds": seeds, "accuracies": ends}
    result |= {"steps": None, "seconds": None, "ms per step": round(ms, 1)}
    for points in zip(*(run["curve"] for run in runs), strict=False):
        steps, seconds, accuracy = map(statistics.fmean, zip(*points, strict=True))
        if accuracy >= TARGET:
            return result | {"steps": round(steps), "seconds": round(seconds, 1)}
    return result


def with_shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with their shares of SGD's steps and seconds."""
    sgd = next((each for each in rows if each["optimizer"] == "SGD"), {})
    for each in rows:
        for field in ("steps", "seconds"):
            both = each[field] and sgd.get(field)
            each[f"of SGD's {field}"] = round(each[field] / sgd[field], 3) if both else None
    return rows


def main() -> None:
    folder = "cifar-10-batches-bin or cifar-10-batches-py"
    options = arguments(__doc__, folder, CONTESTANTS, 2, "cifar.json").parse_args()
    torch.set_num_threads(1)
    in_half = multiplies_in_half(torch.float32, torch.device("cpu"))
    forward = "bfloat16" if in_half else "float32"
    tell = lambda run: f"{last(run):.4f}, {run['curve'][-1][1]:.0f} s"  # noqa: E731
    runs = Runs(options.out.with_name(f"{options.out.stem}_runs.json"))
    get = going_on(runs, partial(train, cifar10(options.data)), tell)
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for name in options.only:
        rows = [each for each in rows if each["optimizer"] != name]
        rows.append(row(name, options.seeds, partial(get, forward=forward)))
        keep(options.out, forward=forward, target=TARGET, rows=with_shares(rows))
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
