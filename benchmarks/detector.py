"""RetinaNet with random weights, small: whether the loss jumps in the first twenty steps.

    python -m benchmarks.detector [--steps N] [--seeds N ...] [--only NAME ...] [--out FILE]

torchvision's RetinaNet, over a narrow ResNet and a feature pyramid of 32 channels, finds coloured
boxes in eight images. Its losses are sums over anchors, divided by the number of positive anchors.
The gradients of nearly all anchors are tiny at first, since the class head begins with a prior of
1 %, and the loss falls off a plateau: at once the gradient is some hundred times as long. A loss
jumps if it rises by 1 % more above its first value than the base optimizer's worst run does.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.applications.vision import torchvision
from benchmarks.machine import keep
from kaisa_optim import KFACSGD, KFACAdam

CLASSES, SIDE, IMAGES, BATCH, WIDTH = 4, 128, 8, 2, 32
PLANES = (16, 32, 64, 64)
LAST = 16  # steps whose mean loss is told

detection = torchvision.models.detection
pyramid = torchvision.ops.feature_pyramid_network
Sample = tuple[Tensor, dict[str, Tensor]]
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Backbone(nn.Module):
    """A narrow ResNet of four blocks under a feature pyramid of five levels."""

    out_channels = WIDTH

    def __init__(self) -> None:
        super().__init__()
        stem = nn.Conv2d(3, PLANES[0], 7, 2, 3, bias=False)
        norm = nn.BatchNorm2d(PLANES[0])
        self.stem = nn.Sequential(stem, norm, nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        sides = zip((PLANES[0], *PLANES), PLANES, (1, 2, 2, 2), strict=False)
        self.blocks = nn.ModuleList(_block(*side) for side in sides)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        top = pyramid.LastLevelP6P7(WIDTH, WIDTH)
        self.pyramid = pyramid.FeaturePyramidNetwork(list(PLANES[1:]), WIDTH, top)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        levels = OrderedDict()
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number:
                levels[str(number)] = x
        return self.pyramid(levels)


def _block(inputs: int, outputs: int, stride: int) -> nn.Module:
    shortcut = nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
    )
    block: nn.Module = torchvision.models.resnet.BasicBlock(inputs, outputs, stride, shortcut)
    return block


def network() -> Any:
    third = 2 ** (1 / 3)
    sizes = tuple((x, int(x * third), int(x * third**2)) for x in (32, 64, 128, 256, 512))
    anchors = detection.anchor_utils.AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    return detection.RetinaNet(
        Backbone(), CLASSES, min_size=SIDE, max_size=SIDE, anchor_generator=anchors
    )


def samples() -> list[Sample]:
    """Return images of noise with one to three boxes, of a colour for each class."""
    draws = torch.Generator().manual_seed(0)
    found = []
    for _ in range(IMAGES):
        image = 0.3 * torch.rand(3, SIDE, SIDE, generator=draws)
        count = int(torch.randint(1, 4, (1,), generator=draws))
        labels = torch.randint(1, CLASSES, (count,), generator=draws)
        sides = SIDE / 6 + SIDE / 3 * torch.rand(count, 2, generator=draws)
        corners = (SIDE - sides) * torch.rand(count, 2, generator=draws)
        boxes = torch.cat((corners, corners + sides), 1)
        for box, label in zip(boxes.int().tolist(), labels.tolist(), strict=True):
            image[label - 1, box[1] : box[3], box[0] : box[2]] += 0.6
        found.append((image, {"boxes": boxes, "labels": labels}))
    return found


def of(cls: Any, lr: float, **settings: Any) -> Make:
    """Return what builds one optimizer, for a model or for its parameters."""
    ours = issubclass(cls, KFACSGD | KFACAdam)
    return lambda model: cls(model if ours else model.parameters(), lr=lr, **settings)


SGD, ADAM = torch.optim.SGD, torch.optim.Adam
BASES = {"KFACSGD": "SGD", "KFACAdam": "Adam"}
CONTESTANTS: dict[str, Make] = {
    **{f"SGD, lr {lr}": of(SGD, lr, momentum=0.9) for lr in (0.02, 0.01)},
    **{f"KFACSGD, lr {lr}": of(KFACSGD, lr, momentum=0.9) for lr in (0.02, 0.01)},
    "Adam, lr 0.0003": of(ADAM, 0.0003),
    "KFACAdam, lr 0.0003": of(KFACAdam, 0.0003),
}


def train(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one network; return the highest loss and the mean of the last ones."""
    torch.manual_seed(seed)
    model, data = network(), samples()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer: Any = CONTESTANTS[name](model)
    losses = []
    for step in range(steps):
        batch = [data[(step * BATCH + place) % IMAGES] for place in range(BATCH)]
        optimizer.zero_grad()
        images, targets = zip(*batch, strict=True)
        loss = sum(model(list(images), [dict(target) for target in targets]).values())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "optimizer": name,
        "seed": seed,
        "first": losses[0],
        "highest": max(losses),
        "last": statistics.fmean(losses[-LAST:]),
    }


def rises(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the worst rise of each class: its highest loss over its first one."""
    found: dict[str, float] = {}
    for run in runs:
        name = run["optimizer"].split(",")[0]
        found[name] = max(found.get(name, 0.0), run["highest"] / run["first"])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.detector",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    runs = []
    for name in options.only:
        for seed in options.seeds:
            runs.append(train(name, seed, options.steps))
            print(runs[-1], flush=True)
            if options.out is not None:
                keep(options.out, steps=options.steps, runs=runs)
    worst = rises(runs)
    for name, base in BASES.items():
        if name in worst and base in worst:
            jumps = "jumps" if worst[name] > 1.01 * worst[base] else "does not jump"
            both = f"{worst[name]:.3f}, {base}'s to {worst[base]:.3f}"
            print(f"{name} {jumps}: its loss rises to {both} of the first one")


if __name__ == "__main__":
    main()
