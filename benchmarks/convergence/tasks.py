"""What is trained: data, network, loss, horizon, and how the loss is measured.

The target of every task is the loss at which the baseline ends its whole horizon. Horizons are such
that a run of them takes one to three minutes of one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import data as sets
from benchmarks.networks import Autoencoder, CifarResNet, Transformer, UNet

Batch = tuple[Tensor, Tensor]  # inputs and what they are compared with
Step = Sequence[Batch]  # the micro-batches of one step
Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Score:
    """What is measured beside the loss, on the last part of the data; a mean over its terms."""

    name: str
    of: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """One thing to train.

    ``load`` gives the data to train on, to measure the loss on, and where it differs to score on;
    ``batches`` yields steps without end, from a generator of its own, so that all contestants see
    the same ones.
    """

    name: str
    about: str
    network: Callable[[], nn.Module]
    load: Callable[[Path | None], tuple[Any, ...]]
    batches: Callable[[Any, torch.Generator], Iterator[Step]]
    loss: Callable[[Tensor, Tensor], Tensor]  # averages over the terms
    measured: Callable[[Any], Iterator[Batch]]
    steps: int  # the horizon
    every: int  # steps between two measurements
    kfac: dict[str, Any]  # what K-FAC has to know of the loss
    # The terms of a target where their number varies: K-FAC is told it in each step.
    terms: Callable[[Tensor], int] | None = None
    score: Score | None = None
    # Whether the network's ends and its vectors are given a learning rate of their own, as Muon's
    # users do: on text it is worth more than any other setting.
    ends: bool = False
    # What the learning rates of Adam's kind are multiplied with, where few steps have to go far.
    pace: float = 1

    def weight(self, target: Tensor) -> int:
        return len(target) if self.terms is None else self.terms(target)

    def measure(
        self, model: nn.Module, data: tuple[Any, ...], device: str = "cpu"
    ) -> tuple[float, float | None]:
        """The loss, and the score if there is one."""
        model.eval()
        loss, score = self._measure(model, data[1], device)
        if len(data) > 2:
            _, score = self._measure(model, data[2], device)
        model.train()
        return loss, score

    def _measure(self, model: nn.Module, part: Any, device: str) -> tuple[float, float | None]:
        sums, count = [0.0, 0.0], 0
        with torch.no_grad():
            for x, y in self.measured(part):
                n, target = self.weight(y), y.to(device)
                out = model(x.to(device))
                sums[0] += n * self.loss(out, target).item()
                if self.score is not None:
                    sums[1] += n * self.score.of(out, target).item()
                count += n
        return sums[0] / count, None if self.score is None else sums[1] / count


def epochs(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Places of the examples of whole batches, in a new order in every epoch."""
    if size > count:
        raise ValueError(f"Invalid batch: {size} of {count} examples; take at most these")
    while True:
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % size].split(size)


def _scaled(images: Tensor) -> Tensor:
    return images.float() / 255


# ---- autoencoders: a loss averaged over examples, which is what K-FAC expects ----


def _squares(out: Tensor, target: Tensor) -> Tensor:
    """Half the squared error of an example, averaged over examples."""
    return (out - target).square().sum(1).mean() / 2


def _whole(data: Tensor) -> Iterator[Batch]:
    yield data, data


def _drawn(size: int | None) -> Callable[[Tensor, torch.Generator], Iterator[Step]]:
    def draw(data: Tensor, generator: torch.Generator) -> Iterator[Step]:
        while True:
            picked = data
            if size is not None:
                picked = data[torch.randint(len(data), (size,), generator=generator)]
            yield [(picked, picked)]

    return draw


def _digits(folder: Path | None) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    return data, data


def _autoencoder(name: str, size: int | None, steps: int) -> Task:
    return Task(
        name,
        f"digits autoencoder 64-128-64-32-8, tanh, {'full batch' if size is None else size}",
        lambda: Autoencoder((64, 128, 64, 32, 8)),
        _digits,
        _drawn(size),
        _squares,
        _whole,
        steps,
        10,
        {},
    )


def _fashion(folder: Path | None) -> tuple[Tensor, Tensor, Tensor]:
    """Measured on the first 5,000 training images, scored on as many test images."""
    train, test = (images.flatten(1) for images in sets.fashion_mnist(folder))
    return train, train[:5000], test[:5000]


def _reordered(size: int) -> Callable[[Tensor, torch.Generator], Iterator[Step]]:
    def draw(data: Tensor, generator: torch.Generator) -> Iterator[Step]:
        for picked in epochs(len(data), size, generator):
            images = _scaled(data[picked])
            yield [(images, images)]

    return draw


def _parts(data: Tensor) -> Iterator[Batch]:
    for part in data.split(1000):
        images = _scaled(part)
        yield images, images


def fashion(size: int, steps: int) -> Task:
    return Task(
        f"fashion-{size}",
        f"Fashion-MNIST autoencoder 784-256-128-64-16, tanh, {size}",
        lambda: Autoencoder((784, 256, 128, 64, 16)),
        _fashion,
        _reordered(size),
        _squares,
        _parts,
        steps,
        max(1, steps // 40),
        {},
        score=Score("test loss", _squares),
    )


# ---- images with labels: a loss averaged over examples again ----

# Of CIFAR-10's channels, in units of their bytes.
_MEAN = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1)
_DEVIATION = torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1)


def normalized(images: Tensor) -> Tensor:
    mean, deviation = (t.to(images.device) for t in (_MEAN, _DEVIATION))
    return (images.float() - mean) / deviation


def augmented(images: Tensor, generator: torch.Generator, shift: int = 4) -> Tensor:
    """Each image moved by up to ``shift`` pixels, black coming in, and every other one mirrored."""
    return cropped(F.pad(images, (shift,) * 4), images.shape[2:], generator)


def _cifar(folder: Path | None) -> tuple[Pairs, Pairs, Pairs]:
    """20,000 images; measured on the first 1,000 of these, scored on 1,000 test images."""
    (images, labels), (held, answers) = sets.cifar10(folder, batches=2)
    return (images, labels), (images[:1000], labels[:1000]), (held[:1000], answers[:1000])


def _pictures(size: int) -> Callable[[Pairs, torch.Generator], Iterator[Step]]:
    def draw(data: Pairs, generator: torch.Generator) -> Iterator[Step]:
        images, labels = data
        for picked in epochs(len(images), size, generator):
            yield [(normalized(augmented(images[picked], generator)), labels[picked])]

    return draw


def _plain_pictures(data: Pairs) -> Iterator[Batch]:
    for images, labels in zip(*(part.split(500) for part in data), strict=True):
        yield normalized(images), labels


def right(out: Tensor, target: Tensor) -> Tensor:
    return (out.argmax(1) == target).float().mean()


def resnet8(size: int, steps: int) -> Task:
    return Task(
        f"resnet8-{size}",
        f"ResNet-8 on 20,000 images of CIFAR-10, moved and mirrored, {size}",
        lambda: CifarResNet(8),
        _cifar,
        _pictures(size),
        F.cross_entropy,
        _plain_pictures,
        steps,
        max(1, steps // 8),
        {},
        score=Score("test accuracy", right),
    )


# ---- segmentation: the mean over pixels ----

_CROP = 128


def _nuclei(folder: Path | None) -> tuple[Pairs, Pairs, Pairs]:
    """Every tenth image is scored on; the loss is measured on 32 of the others."""
    images, labels = sets.nuclei(folder)
    held = torch.arange(len(images)) % 10 == 9
    train = images[~held], labels[~held]
    return train, (train[0][:32], train[1][:32]), (images[held], labels[held])


def cropped(both: Tensor, sides: Sequence[int], generator: torch.Generator) -> Tensor:
    """Cut a part out of each of [n, channels, height, width], mirrored or not, at random."""
    count, rooms = len(both), zip(both.shape[2:], sides, strict=True)
    starts = [torch.randint(n - side + 1, (count, 1), generator=generator) for n, side in rooms]
    rows, columns = (start + torch.arange(n) for start, n in zip(starts, sides, strict=True))
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    which = torch.arange(count)[:, None, None]
    found = both.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]
    return found.permute(0, 3, 1, 2)


def _crops(size: int) -> Callable[[Pairs, torch.Generator], Iterator[Step]]:
    """Anywhere in the image, mirrored or not; image and mask alike."""

    def draw(data: Pairs, generator: torch.Generator) -> Iterator[Step]:
        both = torch.cat(data, 1)
        for picked in epochs(len(both), size, generator):
            crops = cropped(both[picked], (_CROP, _CROP), generator)
            yield [(_scaled(crops[:, :-1]), crops[:, -1:].float())]

    return draw


def _centres(data: Pairs) -> Iterator[Batch]:
    top, left = ((side - _CROP) // 2 for side in data[0].shape[2:])
    centres = (part[:, :, top : top + _CROP, left : left + _CROP].split(16) for part in data)
    for images, masks in zip(*centres, strict=True):
        yield _scaled(images), masks.float()


def dice(out: Tensor, target: Tensor) -> Tensor:
    """Twice the common area over the sum of both, of each image; 1 where both are empty."""
    found = (out > 0).float()
    common, sums = ((t.sum((1, 2, 3))) for t in (found * target, found + target))
    return torch.where(sums > 0, 2 * common / sums.clamp(min=1), 1.0)


def unet(size: int, steps: int) -> Task:
    return Task(
        f"unet-{size}",
        f"U-Net of widths 16-32-64 on nuclei, crops of {_CROP}, mirrored, {size}",
        UNet,
        _nuclei,
        _crops(size),
        F.binary_cross_entropy_with_logits,
        _centres,
        steps,
        max(1, steps // 8),
        {"loss_terms": "positions"},
        score=Score("Dice", lambda out, target: dice(out, target).mean()),
        pace=4,
    )


# ---- text: the mean over tokens, of all or of those that were masked ----

_LENGTH = 64
_ALPHABET = 65
_MASK = _ALPHABET  # one more token
_IGNORED = -100  # cross_entropy's own sign for what is not in the loss


def _text(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Characters of ``shakespeare.txt``; the last tenth is measured on."""
    data, different = sets.characters(folder)
    if different != _ALPHABET:
        raise ValueError(f"shakespeare.txt has {different} characters; {_ALPHABET} are expected")
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def _passages(data: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - length + 1, (count, 1), generator=generator)
    return data[starts + torch.arange(length)]


def _following(data: Tensor, generator: torch.Generator) -> Batch:
    rows = _passages(data, 32, _LENGTH + 1, generator)
    return rows[:, :-1], rows[:, 1:]


def _masked(data: Tensor, generator: torch.Generator) -> Batch:
    """As for BERT: of 15 % of the tokens, 80 % are masked, 10 % replaced, 10 % left as they are."""
    rows = _passages(data, 64, _LENGTH, generator)
    chosen = torch.rand(rows.shape, generator=generator) < 0.15
    kind = torch.rand(rows.shape, generator=generator)
    others = torch.randint(_ALPHABET, rows.shape, generator=generator)
    shown = torch.where(kind < 0.8, _MASK, torch.where(kind < 0.9, others, rows))
    return torch.where(chosen, shown, rows), torch.where(chosen, rows, _IGNORED)


def _steps(
    draw: Callable[[Tensor, torch.Generator], Batch], micro: int
) -> Callable[[Tensor, torch.Generator], Iterator[Step]]:
    def batches(data: Tensor, generator: torch.Generator) -> Iterator[Step]:
        while True:
            yield [draw(data, generator) for _ in range(micro)]

    return batches


def _some(
    draw: Callable[[Tensor, torch.Generator], Batch], count: int
) -> Callable[[Tensor], Iterator[Batch]]:
    def measured(data: Tensor) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(count):
            yield draw(data, generator)

    return measured


def _characters(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=_IGNORED)


def _count_masked(target: Tensor) -> int:
    return int((target != _IGNORED).sum())


def _guessed(out: Tensor, target: Tensor) -> Tensor:
    return (out.argmax(-1) == target)[target != _IGNORED].float().mean()


TASKS = {
    task.name: task
    for task in (
        _autoencoder("digits-full", None, 2000),
        _autoencoder("digits-256", 256, 2000),
        fashion(256, 1000),
        fashion(8192, 150),
        resnet8(256, 3 * (20_000 // 256)),
        resnet8(1024, 3 * (20_000 // 1024)),
        unet(8, 120),
        Task(
            "characters",
            "GPT of 4 layers, d = 128, on Shakespeare's characters, 32 passages of 64",
            lambda: Transformer(_ALPHABET, _LENGTH, 128, 4, 4, 512),
            _text,
            _steps(_following, 1),
            _characters,
            _some(_following, 8),
            300,
            15,
            {"loss_terms": "positions"},
            ends=True,
        ),
        Task(
            "masked",
            "BERT of 4 layers, d = 64, on Shakespeare's characters, 64 passages of 64",
            lambda: Transformer(_ALPHABET + 1, _LENGTH, 64, 4, 4, 256, causal=False),
            _text,
            _steps(_masked, 1),
            _characters,
            _some(_masked, 8),
            2000,
            50,
            {},
            terms=_count_masked,
            score=Score("accuracy", _guessed),
            ends=True,
        ),
    )
}
