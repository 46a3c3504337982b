"""A small one-stage detector: shared heads, a prior of 1 %, losses divided by positives.

Each contestant has a rate at which its base optimizer trains. Preconditioned gradients without a
length of their own raised the loss to twice and three times its first value here; so did steps of
the heads that were a third of their weights' size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam

CLASSES, WIDTH, SIDE, IMAGES, BATCH, STEPS = 3, 32, 64, 8, 2, 40


class Detector(nn.Module):
    """A pyramid of three levels under a class head and a box head, which all levels share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = self._body(3, 4)
        self.levels = nn.ModuleList(self._body(WIDTH, 2) for _ in range(3))
        self.classes, self.boxes = self._head(CLASSES), self._head(4)
        nn.init.constant_(self.classes[-1].bias, -math.log(99))

    @staticmethod
    def _body(inputs: int, stride: int) -> nn.Sequential:
        conv = nn.Conv2d(inputs, WIDTH, 3, stride, 1, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        return nn.Sequential(conv, nn.BatchNorm2d(WIDTH), nn.ReLU())

    @staticmethod
    def _head(outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()]
        head = nn.Sequential(*layers, nn.Conv2d(WIDTH, outputs, 3, padding=1))
        for layer in head:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)
        return head

    def forward(self, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        x, found = self.stem(images), []
        for level in self.levels:
            x = level(x)
            found.append((self.classes(x), self.boxes(x)))
        return found


def samples() -> tuple[Tensor, Tensor, Tensor]:
    """Return images with one coloured square each, the squares, and their classes."""
    draws = torch.Generator().manual_seed(0)
    images = 0.3 * torch.rand(IMAGES, 3, SIDE, SIDE, generator=draws)
    sides = torch.randint(12, 32, (IMAGES,), generator=draws)
    labels = torch.randint(CLASSES, (IMAGES,), generator=draws)
    squares = []
    for image, side, label in zip(images, sides.tolist(), labels.tolist(), strict=True):
        x, y = torch.randint(SIDE - side, (2,), generator=draws).tolist()
        image[label, y : y + side, x : x + side] += 0.6
        squares.append([x, y, x + side, y + side])
    return images, torch.tensor(squares, dtype=torch.float32), labels


def loss_of(found: list[tuple[Tensor, Tensor]], squares: Tensor, labels: Tensor) -> Tensor:
    """Return the focal loss and the box loss, divided by the number of positive places."""
    total, positives = torch.zeros(()), 0
    for scores, boxes in found:
        stride = SIDE // scores.shape[-1]
        centres = stride * (torch.arange(scores.shape[-1]) + 0.5)
        across, down = centres[None, None, :], centres[None, :, None]
        left, top, right, bottom = squares[:, :, None, None].unbind(1)
        to_sides = across - left, down - top, right - across, bottom - down
        distances = torch.stack(torch.broadcast_tensors(*to_sides), 1)
        inside = distances.amin(1) > 0
        wanted = F.one_hot(labels, CLASSES)[:, :, None, None] * inside[:, None]
        chance = torch.where(wanted > 0, scores, -scores)
        weight = torch.where(wanted > 0, 0.25, 0.75) * (1 - chance.sigmoid()) ** 2
        total = total - (weight * F.logsigmoid(chance)).sum()
        total = total + ((boxes - distances / SIDE).abs() * inside[:, None]).sum()
        positives += int(inside.sum())
    return total / max(1, positives)


def train(make: Callable[[nn.Module], torch.optim.Optimizer], seed: int) -> list[float]:
    torch.manual_seed(seed)
    model = Detector()
    images, squares, labels = samples()
    optimizer = make(model)
    losses = []
    for step in range(STEPS):
        batch = slice(step * BATCH % IMAGES, step * BATCH % IMAGES + BATCH)
        optimizer.zero_grad()
        loss = loss_of(model(images[batch]), squares[batch], labels[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# And how far losses may jump above the first.
CONTESTANTS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], float]] = {
    "KFACAdam": (lambda model: KFACAdam(model, lr=1e-3), 1.3),
    "KFACSGD": (lambda model: KFACSGD(model, lr=0.02, momentum=0.9), 1.3),
    "KFACSGD, fast": (lambda model: KFACSGD(model, lr=0.05, momentum=0.9), 1.6),
}


@pytest.mark.maintainer
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CONTESTANTS)
def test_loss_divided_by_positives_jumps_little(name, seed):
    make, most = CONTESTANTS[name]
    losses = train(make, seed)
    assert max(losses) < most * losses[0]
    assert sum(losses[-4:]) < sum(losses[:4])
