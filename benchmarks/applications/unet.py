"""U-Net on segmentation: one logit a pixel, with Dice and IoU on images that are held out.

    python -m benchmarks.applications.unet --data FOLDER [--set membranes] [--optimizer KFACAdam]
    torchrun --standalone --nproc-per-node 4 -m benchmarks.applications.unet --data FOLDER ...

FOLDER has ``nuclei`` (``images`` and ``labels``, PNGs of equal names, 0 the background) or
``em_membrane`` (``image_00.png``, ``label_00.png`` and so on). Every tenth image is held out.
``--preset paper``: widths 32 to 512 and Adam, as in KAISA's experiment on MRI slices (SC '21),
whose images are not given out with this package.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import data as sets
from benchmarks.convergence.tasks import Pairs, cropped, dice
from benchmarks.networks import UNet

from .arguments import Defaults, kaisa, tell_terms
from .common import Job, Order, Ranks, entry, seeded, warm_cosine

DEFAULTS: Defaults = {
    "all": {"batch": 8, "steps": 120, "every": 10, "save_every": 60},
    # The rates that the convergence benchmark found best for 120 steps on nuclei; of KFACSGD and
    # KFACAdam the best of few.
    "SGD": {"lr": 0.12, "momentum": 0.95},
    "KFACSGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.029},
    "AdamW": {"lr": 0.029},
    "KFACAdam": {"lr": 0.1},
    "KFACAdamW": {"lr": 0.03, "weight_decay": 0.003},
}
PRESETS: dict[str, Defaults] = {
    "paper": {
        "all": {"widths": "32,64,128,256,512", "crop": 256, "batch": 16, "steps": None},
        "Adam": {"epochs": 50, "lr": 1e-4},
        "KFACAdam": {"epochs": 30, "lr": 1e-4, **kaisa(0.003, 20, 200)},
    }
}
SMOKE: Defaults = {
    "all": {"widths": "4,8", "crop": 32, "batch": 2, "steps": 4, "every": 2, "save_every": 2}
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", choices=("nuclei", "membranes"), default="nuclei")
    parser.add_argument("--widths", default="16,32,64", help="channels by depth")
    parser.add_argument("--crop", type=int, default=128, help="side of the squares to train on")


def generated(count: int) -> Pairs:
    """Bright squares on dark noise."""
    masks = torch.zeros(count, 1, 48, 48, dtype=torch.uint8)
    for i, (top, left) in enumerate(torch.randint(24, (count, 2), generator=seeded(1)).tolist()):
        masks[i, :, top : top + 20, left : left + 20] = 1
    noise = torch.randint(100, (count, 3, 48, 48), generator=seeded(2))
    return (noise + 100 * masks).byte(), masks


def overlap(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over images of Dice and IoU; 1 for an image where both areas are empty."""
    found = dice(out, target)
    return found.sum(), (found / (2 - found)).sum()


def measure(model: nn.Module, held: Pairs, crop: int, ranks: Ranks) -> dict[str, float]:
    """Evaluate on the centres of the images, of a side that each pooling divides."""
    sums = [0.0, 0.0, 0.0]
    mine = torch.tensor(ranks.share(len(held[0])))
    side = min(held[0].shape[-1] // 32 * 32, max(crop, 128))
    top, left = ((length - side) // 2 for length in held[0].shape[2:])
    for places in mine.split(16):
        images, masks = (part[places, :, top : top + side, left : left + side] for part in held)
        target = masks.to(ranks.device).float()
        out = model(images.to(ranks.device).float() / 255)
        loss = F.binary_cross_entropy_with_logits(out, target)
        for i, number in enumerate((loss * len(places), *overlap(out, target))):
            sums[i] += number.item()
    return dict(zip(("loss", "dice", "iou"), ranks.means(sums, len(mine)), strict=True))


def job(options: argparse.Namespace, ranks: Ranks) -> Job:
    if options.smoke:
        images, masks = generated(20)
    else:
        images, masks = (sets.nuclei if options.set == "nuclei" else sets.membranes)(options.data)
    held = torch.arange(len(images)) % 10 == 9
    both = torch.cat([images, masks], 1)[~held]
    torch.manual_seed(options.seed)
    model = UNet(images.shape[1], tuple(map(int, options.widths.split(","))))
    order = Order(len(both), ranks, options)
    tell_terms(options, "positions")  # the loss averages over all pixels

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        for number, places in order(step):
            own = seeded(options.seed, number, ranks.rank)
            crops = cropped(both[places], (options.crop,) * 2, own).to(ranks.device).float()
            yield crops[:, :-1] / 255, crops[:, -1:]

    return Job(
        model,
        order.steps,
        warm_cosine(order.steps),
        batches,
        lambda net, batch: F.binary_cross_entropy_with_logits(net(batch[0]), batch[1]),
        lambda net: measure(net, (images[held], masks[held]), options.crop, ranks),
    )


main = entry(__doc__, job, DEFAULTS, PRESETS, SMOKE, arguments)

if __name__ == "__main__":
    main()
