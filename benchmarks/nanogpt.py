"""The recipe for CPUs of nanoGPT (Karpathy, 2022), unchanged but for the optimizer.

    python -m benchmarks.nanogpt --data FOLDER [--only KFACAdam Muon] [--seeds 3] [--widths]

Tiny Shakespeare by characters: 4 layers, 128 wide, passages of 64, 12 a step, 2,000 steps, no
dropout, gradients clipped at 1, a warm-up of 100 steps and a cosine to a tenth of the rate. Its
authors publish a validation loss of 1.88 by AdamW. Everyone is tuned on a grid of rates with the
first seed; who is best at the end trains with the other seeds, too. Runs that are done are kept in
a file, and a command that is started again goes on from there. Seconds are those that one thread
computes, without the measurements. --widths trains AdamW and KFACAdam at several widths and rates.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks.applications.gpt import next_character, passages
from benchmarks.convergence.search import now
from benchmarks.data import characters
from benchmarks.machine import keep
from benchmarks.muon import hidden_and_rest
from benchmarks.recipes import Curve, Runs, arguments, best_rate, going_on
from kaisa_optim import KFACSGD, KFACAdam

LAYERS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 4, 128, 4, 64, 12, 2000
TARGET = 1.88  # the loss that nanoGPT's authors publish for this recipe
EVERY = 50  # steps between two measurements
HELD = 512  # passages that the loss is measured on
OWN_RATE = 0.001  # nanoGPT's, for AdamW
WIDTHS = (32, 64, 128, 256)


class Block(nn.Module):
    """Attention and two products, each beside a residual path, with norms before them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class GPT(nn.Module):
    """GPT-2 without biases, its head tied to the words."""

    def __init__(self, vocabulary: int, width: int = WIDTH) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                ends = name.endswith(("out.weight", "narrow.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if ends else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def _adamw(model: nn.Module, lr: float) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [{"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    groups = [{"params": matrices, "weight_decay": 0.1}, *vectors]
    return [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99))]


def _muon(model: nn.Module, lr: float) -> list[Optimizer]:
    hidden, rest = hidden_and_rest(model)
    others = torch.optim.AdamW(rest, lr=OWN_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    muon: Any = torch.optim.Muon
    return [muon(hidden, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"), others]


def _soap(model: nn.Module, lr: float) -> list[Optimizer]:
    from pytorch_optimizer import SOAP

    how: Any = {"betas": (0.9, 0.99), "weight_decay": 0.0, "precondition_frequency": 10}
    return [SOAP(model.parameters(), lr=lr, **how)]


CONTESTANTS: dict[str, tuple[Callable[[nn.Module, float], list[Optimizer]], list[float]]] = {
    "AdamW": (_adamw, [0.001, 0.003, 0.01, 0.03]),
    "Muon": (_muon, [0.002, 0.005, 0.01, 0.03]),
    "SOAP": (_soap, [0.001, 0.003, 0.01, 0.03]),
    "KFACAdam": (
        lambda model, lr: [KFACAdam(model, lr=lr, betas=(0.9, 0.99))],
        [0.002, 0.005, 0.01, 0.03],
    ),
    "SGD": (
        lambda model, lr: [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)],
        [0.03, 0.1, 0.3, 1.0],
    ),
    "KFACSGD": (
        lambda model, lr: [KFACSGD(model, lr=lr, momentum=0.9)],
        [0.03, 0.1, 0.3, 1.0],
    ),
}


class Training:
    """A network on its way through the recipe."""

    def __init__(
        self, name: str, lr: float, seed: int, text: Tensor, steps: int, width: int = WIDTH
    ) -> None:
        torch.manual_seed(seed)
        self.model = GPT(int(text.max()) + 1, width)
        build, _ = CONTESTANTS[name]
        self.optimizers = build(self.model, lr)
        self.rates = [(g, g["lr"]) for x in self.optimizers for g in x.param_groups]
        self.text, self.drawn = text, torch.Generator().manual_seed(1000 + seed)
        self.steps, self.taken = steps, 0

    def backward(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        next_character(self.model, passages(self.text, BATCH, LENGTH, self.drawn)).backward()

    def apply(self) -> None:
        share = share_of_rate(self.taken, self.steps)
        for group, peak in self.rates:
            group["lr"] = peak * share
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.taken += 1


def share_of_rate(step: int, steps: int) -> float:
    if step < 100:
        return (step + 1) / 101
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 100) / max(1, steps - 100)))


def measure(model: nn.Module, rows: Tensor) -> float:
    with torch.no_grad():
        return statistics.fmean(next_character(model, part).item() for part in rows.split(64))


def train(text: Tensor, name: str, lr: float, seed: int, steps: int, width: int = WIDTH) -> Curve:
    """Return the curve of a run: steps, seconds, and the loss on the last tenth of the text."""
    cut = len(text) * 9 // 10
    training = Training(name, lr, seed, text[:cut], steps, width)
    held = passages(text[cut:], HELD, LENGTH, torch.Generator().manual_seed(0))
    curve: Curve = []
    seconds, start = 0.0, now("cpu")
    for step in range(1, steps + 1):
        training.backward()
        training.apply()
        if step % EVERY == 0:
            seconds += now("cpu") - start
            curve.append((step, seconds, measure(training.model, held)))
            if not curve[-1][2] < 10:
                break
            start = now("cpu")
    return curve


def last(run: dict[str, Any]) -> float:
    return run["curve"][-1][2] if run["curve"][-1][0] == run["steps"] else math.inf


def reached(run: dict[str, Any]) -> tuple[int, float] | None:
    """Return the steps and seconds to nanoGPT's loss, at the measurement that first met it."""
    met = ((step, seconds) for step, seconds, loss in run["curve"] if loss <= TARGET)
    return next(met, None)


def tell(run: dict[str, Any]) -> str:
    return f"{last(run):.4f}, to {TARGET}: {reached(run)}"


def row(runs: list[dict[str, Any]], base: float) -> dict[str, Any]:
    """Return the means over seeds; ``base`` are the seconds that AdamW takes for its steps."""
    steps, curves = runs[0]["steps"], [run["curve"] for run in runs]
    # A run that diverged is broken off.
    losses = [[x[2] for x in curve] + [math.inf] * (steps // EVERY) for curve in curves]
    parts = [round(part * steps / EVERY / 4) - 1 for part in (1, 2, 3, 4)]
    means = [round(statistics.fmean(of_run[i] for of_run in losses), 4) for i in parts]
    step = statistics.fmean(curve[-1][1] / curve[-1][0] for curve in curves)
    result: dict[str, Any] = {"optimizer": runs[0]["name"], "lr": runs[0]["lr"], "steps": steps}
    result |= {"seeds": len(runs), "losses": means, "ms per step": round(1e3 * step, 1)}
    result["last losses"] = [round(last(run), 4) for run in runs]
    if base:
        ended = [run for run in runs if last(run) < math.inf]
        within = [[loss for _, s, loss in run["curve"] if s <= base][-1] for run in ended]
        within += [math.inf] * (len(runs) - len(ended))
        result["of a step"] = round(step / base * STEPS, 3)
        result["loss at AdamW's seconds"] = round(statistics.fmean(within), 4)
    met = [point for run in runs if (point := reached(run)) is not None]
    if len(met) == len(runs):
        to_target = [round(statistics.fmean(part), 1) for part in zip(*met, strict=True)]
        result |= zip(("steps to the target", "seconds to the target"), to_target, strict=True)
    return result


def main() -> None:
    parser = arguments(__doc__, "shakespeare.txt", CONTESTANTS, 3, "nanogpt.json")
    parser.add_argument("--widths", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text, _ = characters(options.data)
    runs = Runs(options.out.with_name(f"{options.out.stem}_runs.json"))
    get = going_on(runs, partial(train, text), tell)
    if options.widths:
        widths = []
        for width, name in itertools.product(WIDTHS, ("AdamW", "KFACAdam")):
            key = {"name": name, "seed": 0, "steps": STEPS}
            key |= {"width": width} if width != WIDTH else {}
            losses = {lr: last(get(lr=lr, **key)) for lr in CONTESTANTS[name][1]}
            widths.append({"optimizer": name, "width": width, "losses": losses})
        keep(options.out.with_name(f"{options.out.stem}_widths.json"), rows=widths)
        return
    best = {}
    for name in options.only:
        loss_at = lambda lr: last(get(name=name, lr=lr, seed=0, steps=STEPS))  # noqa: B023, E731
        best[name] = best_rate(CONTESTANTS[name][1], loss_at)
    asked = [(name, lr, STEPS) for name, lr in best.items()]
    if "AdamW" in best:
        asked += [("AdamW", OWN_RATE, STEPS), ("AdamW", best["AdamW"], 3 * STEPS // 2)]
    # Seeds take turns, so that a machine that slows down slows all of them.
    by_seed = [
        [get(name=name, lr=lr, seed=seed, steps=n) for name, lr, n in asked]
        for seed in range(options.seeds)
    ]
    bases = [x for x in runs.done.values() if x["name"] == "AdamW" and x["steps"] == STEPS]
    seconds = [x["curve"][-1][1] for x in bases if "width" not in x and last(x) < math.inf]
    base = statistics.fmean(seconds) if seconds else 0.0
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rows = [each for each in rows if each["optimizer"] not in best]
    rows += [row([*same], base) for same in zip(*by_seed, strict=True)]
    keep(options.out, target=TARGET, rows=rows)
    for each in rows:
        print(each)


if __name__ == "__main__":
    main()
