"""The recipe of airbench94 on CIFAR-10 with SGD, Muon, KFACSGD and KFACAdam, in turns on one GPU.

    python -m benchmarks.airbench --data FOLDER [--minutes 6] [--out FILE] [--rehearse]

The recipe is of Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (arXiv 2404.00498, 2024),
for 8 epochs at batch 2,000, as in the author's variant with Muon. First each optimizer trains once
at each of three learning rates. Then all train in turns with new seeds at their best rates, until
the minutes are over. FOLDER has the binary version of CIFAR-10. Each run leaves its accuracy, with
test-time augmentation, and its seconds, without that, in FILE. --rehearse tries the program out on
a CPU in tiny sizes, with generated images.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks import data as sets
from benchmarks.convergence.search import now
from benchmarks.machine import keep
from benchmarks.muon import Muon
from benchmarks.recipes import command_line
from kaisa_optim import KFACSGD, KFACAdam

WIDTHS, EPOCHS, BATCH, SHIFT, WHITENED = (64, 256, 256), 8, 2000, 2, 5000
BIAS_EPOCHS = 3  # that the biases of the whitening layer are trained
# The publication's rates are decoupled from momentum, and of 1,024 summed losses; ours are of mean
# losses.
RATE, DECAY, MOMENTUM = 11.5 * BATCH / (1024 * (1 + 1 / (1 - 0.85))), 0.0153 / 11.5, 0.85
BIAS_FACTOR = 64
# The author's rates of the rest beside Muon, of mean losses. His logits are divided by 256 and
# start alike, so that rates of the head convert as squares of these scales.
BIASES, HEAD, REST_DECAY = 0.053 * BATCH, 0.67 * BATCH * (9 / 256) ** 2, 2e-6 * BATCH
DIFFERS = (
    "bfloat16 by autocast over float32 weights, not float16 alone; torch.compile left out; "
    "8 epochs at batch 2,000"
)


class Run(NamedTuple):
    """The images of one size of the benchmark, and what is trained on them."""

    train: tuple[Tensor, Tensor]  # normalized, [n, height, width, 3], with a reflected border
    test: tuple[Tensor, Tensor]
    widths: Sequence[int] = WIDTHS
    epochs: int = EPOCHS
    batch: int = BATCH


# ---- network and images ----


def patches(images: Tensor, size: int = 2) -> Tensor:
    """Return all patches of images [n, 3, height, width] as rows."""
    return F.unfold(images, size).transpose(1, 2).flatten(0, 1)


def whitening(images: Tensor, eps: float = 5e-4) -> Tensor:
    """Return filters that whiten the patches of the images, and these filters' negatives."""
    rows = patches(images)
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    filters = (vectors / (values + eps).sqrt()).T.reshape(-1, images.shape[1], 2, 2)
    return torch.cat([filters, -filters])


def _norm(width: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(width, eps=1e-12, momentum=1 - 0.6)
    norm.weight.requires_grad_(False)
    return norm


class Block(nn.Sequential):
    def __init__(self, inputs: int, width: int) -> None:
        first, second = (nn.Conv2d(i, width, 3, padding=1, bias=False) for i in (inputs, width))
        for conv in (first, second):  # the first filters hand their inputs on
            nn.init.dirac_(conv.weight.data[: conv.in_channels])
        super().__init__(
            first, nn.MaxPool2d(2), _norm(width), nn.GELU(), second, _norm(width), nn.GELU()
        )


class Network(nn.Module):
    def __init__(self, images: Tensor, widths: Sequence[int]) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad_(False).copy_(whitening(images))
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        self.blocks = nn.Sequential(*map(Block, (24, *widths[:-1]), widths))
        self.head = nn.Linear(widths[-1], 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.gelu(self.whiten(x)))
        return self.head(x.amax((2, 3))) / 9


def augmented(padded: Tensor, mirrored: Tensor) -> Tensor:
    """Return crops [n, 3, height, width] of images with borders, some of them ``mirrored``."""
    count, size = len(padded), padded.shape[1] - 2 * SHIFT
    moves = torch.randint(2 * SHIFT + 1, (2, count, 1), device=padded.device)
    rows, columns = moves + torch.arange(size, device=padded.device)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    which = torch.arange(count, device=padded.device)[:, None, None]
    return padded[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def with_border(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return bytes [n, 3, height, width] normalized, channels last, with a reflected border."""
    pixels = (images.float() - mean[:, None, None]) / std[:, None, None]
    return F.pad(pixels, (SHIFT,) * 4, mode="reflect").permute(0, 2, 3, 1).contiguous()


@torch.no_grad()
def accuracy(net: nn.Module, padded: Tensor, labels: Tensor) -> float:
    """Return the share of right answers: half by the image, half by two crops, all mirrored too."""
    size, right = padded.shape[1] - 2 * SHIFT, 0
    net.eval()
    for images, answers in zip(padded.split(BATCH), labels.split(BATCH), strict=True):
        total = torch.zeros(len(images), 10, device=images.device)
        for place, weight in ((SHIFT, 0.5), (SHIFT - 1, 0.25), (SHIFT + 1, 0.25)):
            crop = images[:, place : place + size, place : place + size].permute(0, 3, 1, 2)
            for view in (crop, crop.flip(3)):
                total += weight * net(view).float()
        right += int((total.argmax(1) == answers).sum())
    return right / len(labels)


# ---- optimizers ----


def _groups(net: Network, rate: float) -> list[dict[str, Any]]:
    """Return weights, then biases with the publication's larger rate."""
    trained = [p for p in net.parameters() if p.requires_grad]
    weights, biases = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    larger = {"lr": BIAS_FACTOR * rate, "weight_decay": DECAY / BIAS_FACTOR}
    return [{"params": weights, "lr": rate, "weight_decay": DECAY}, {"params": biases, **larger}]


def _sgd(net: Network, rate: float) -> list[Optimizer]:
    return [torch.optim.SGD(_groups(net, rate), momentum=MOMENTUM, nesterov=True)]


def _kfac_sgd(net: Network, rate: float) -> list[Optimizer]:
    how: dict[str, Any] = {"model": net, "momentum": MOMENTUM, "nesterov": True}
    return [KFACSGD(_groups(net, rate), lr=rate, **how)]


def _kfac_adam(net: Network, rate: float) -> list[Optimizer]:
    return [KFACAdam(net, lr=rate)]


def _muon(net: Network, rate: float) -> list[Optimizer]:
    filters, biases = list(net.blocks.parameters()), [net.whiten.bias]
    biases += [p for p in filters if p.dim() == 1 and p.requires_grad]
    filters = [p for p in filters if p.dim() > 1]
    rates = zip((biases, [net.head.weight]), (BIASES, HEAD), strict=True)
    others = [{"params": some, "lr": lr, "weight_decay": REST_DECAY / lr} for some, lr in rates]
    muon = Muon(filters, lr=rate, weight_decay=0.0, momentum=0.6)

    def normalize(*_: Any) -> None:
        for p in filters:
            p.data.mul_(len(p) ** 0.5 / p.data.norm())

    muon.register_step_pre_hook(normalize)
    return [muon, torch.optim.SGD(others, momentum=MOMENTUM, nesterov=True)]


CONTESTANTS: dict[str, tuple[Callable[[Network, float], list[Optimizer]], list[float], str]] = {
    "SGD": (_sgd, [RATE / 2, RATE, 2 * RATE], ""),
    "Muon": (
        _muon,
        [0.12, 0.24, 0.48],
        "; 5 iterations of Newton and Schulz, not 3; one schedule for all biases",
    ),
    "KFACSGD": (_kfac_sgd, [RATE / 4, RATE / 2, RATE], "; SGD's recipe"),
    "KFACAdam": (
        _kfac_adam,
        [0.01, 0.03, 0.1],
        "; SGD's schedule and Lookahead, one rate for all parameters, no weight decay",
    ),
}


def share(name: str, part: float) -> float:
    """Return the share of the rate at a ``part`` of training: Muon's falls, others rise before."""
    if name == "Muon":
        return 1 - part
    return 0.2 + 0.8 * part / 0.23 if part < 0.23 else 1 - 0.93 * (part - 0.23) / 0.77


# ---- training ----


def train(run: Run, name: str, rate: float, seed: int) -> dict[str, Any]:
    """Return the accuracy and the seconds of one training."""
    padded, labels = run.train
    device = padded.device
    torch.manual_seed(seed)
    start = now(device.type)
    inside = padded[:WHITENED, SHIFT:-SHIFT, SHIFT:-SHIFT].permute(0, 3, 1, 2)
    net = Network(inside, run.widths).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizers = CONTESTANTS[name][0](net, rate)
    peaks = [(group, group["lr"]) for each in optimizers for group in each.param_groups]
    state = [x for x in net.state_dict().values() if x.is_floating_point()]
    slow = [x.clone() for x in state]
    first = torch.rand(len(labels), device=device) < 0.5
    steps, step = run.epochs * (len(labels) // run.batch), 0
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    for epoch in range(run.epochs):
        net.whiten.bias.requires_grad_(epoch < BIAS_EPOCHS)
        order = torch.randperm(len(labels), device=device)
        for some in order.split(run.batch)[: len(labels) // run.batch]:
            for group, peak in peaks:
                group["lr"] = peak * share(name, step / steps)
            with half:
                out = net(augmented(padded[some], mirrored(first[some], epoch)))
                loss = F.cross_entropy(out, labels[some], label_smoothing=0.2)
            net.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            step += 1
            if name != "Muon" and step % 5 == 0:
                look_ahead(slow, state, 0.95**5 * (step / steps) ** 3)
    if name != "Muon":
        look_ahead(slow, state, 1.0)
    seconds = now(device.type) - start
    with half:
        right = accuracy(net, *run.test)
    return {"name": name, "lr": rate, "seed": seed, "accuracy": right, "seconds": seconds}


def mirrored(first: Tensor, epoch: int) -> Tensor:
    """Return which images an epoch mirrors: those of the ``first`` epoch, then the others."""
    return first ^ bool(epoch % 2)


def look_ahead(slow: list[Tensor], state: list[Tensor], decay: float) -> None:
    """Move slow weights towards the weights, and set these to them (Zhang et al., 2019)."""
    with torch.no_grad():
        torch._foreach_lerp_(slow, state, 1 - decay)
        torch._foreach_copy_(state, slow)


# ---- the command ----


def row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means and standard deviations of runs at one rate."""
    found: dict[str, Any] = {"optimizer": name, "lr": runs[0]["lr"], "n": len(runs)}
    for field in ("accuracy", "seconds"):
        values = [run[field] for run in runs]
        sigma = statistics.stdev(values) if len(values) > 1 else None
        found |= {field: statistics.fmean(values), f"σ of {field}": sigma}
    return found | {"differs from the publication": DIFFERS + CONTESTANTS[name][2]}


def noise(count: int) -> tuple[Tensor, Tensor]:
    """Return noise around one colour a class, and the classes."""
    drawn, labels = torch.Generator().manual_seed(0), torch.arange(count) % 10
    colours = torch.randint(100, (10, 3, 1, 1), generator=drawn)
    images = torch.randint(156, (count, 3, 32, 32), generator=drawn) + colours[labels]
    return images.byte(), labels


def loaded(folder: Path | None, rehearse: bool, device: str) -> Run:
    pairs = (noise(64), noise(32)) if rehearse else sets.cifar10(folder)
    (train_, labels), (test, answers) = ([x.to(device) for x in pair] for pair in pairs)
    mean, std = train_.float().mean((0, 2, 3)), train_.float().std((0, 2, 3))
    tiny: dict[str, Any] = {"widths": (8, 8, 8), "epochs": 4, "batch": 16} if rehearse else {}
    of_test = with_border(test, mean, std), answers
    return Run((with_border(train_, mean, std), labels), of_test, **tiny)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("airbench", __doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/airbench.json"))
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --rehearse tries the program out without one")
    end = time.monotonic() + 60 * options.minutes
    torch.backends.cudnn.benchmark = True
    device = "cpu" if options.rehearse else "cuda"
    run = loaded(options.data, options.rehearse, device)
    tries: list[dict[str, Any]] = []
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}

    def take(name: str, rate: float, seed: int, kept: list[dict[str, Any]]) -> None:
        kept.append(train(run, name, rate, seed))
        rows = [row(name, own) for name, own in runs.items() if own]
        keep(options.out, device=device, rows=rows, tries=tries, runs=runs)
        print(", ".join(f"{key} {value}" for key, value in kept[-1].items()), flush=True)

    start, best, seed = time.monotonic(), {}, 0
    for name, (_, rates, _) in CONTESTANTS.items():
        for rate in rates:
            take(name, rate, 0, tries)
        best[name] = max(tries[-len(rates) :], key=lambda x: x["accuracy"])["lr"]
    turn = (time.monotonic() - start) / len(rates)  # so many times all have trained
    while time.monotonic() + 1.2 * turn < end and not (options.rehearse and seed == 2):
        start, seed = time.monotonic(), seed + 1
        for name, rate in best.items():
            take(name, rate, seed, runs[name])
        turn = time.monotonic() - start
    for name, own in runs.items() if seed else ():
        print(", ".join(f"{key} {value}" for key, value in row(name, own).items()))


if __name__ == "__main__":
    main()
