"""Images with the box, the class and the mask of each object."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch
from pycocotools.coco import COCO
from torch import Tensor

from benchmarks import data as sets

from .common import seeded
from .vision import torchvision

Example = tuple[Tensor, dict[str, Tensor]]


def target(labels: Tensor) -> dict[str, Tensor]:
    """Return boxes, classes and masks of a map with a number for each instance."""
    numbers = labels.unique()
    masks = labels[None] == numbers[numbers > 0, None, None]
    boxes = torchvision.ops.masks_to_boxes(masks) + torch.tensor([0.0, 0.0, 1.0, 1.0])
    return {
        "boxes": boxes,
        "labels": torch.ones(len(masks), dtype=torch.long),
        "masks": masks.byte(),
    }


def generated(count: int) -> tuple[Tensor, Tensor]:
    """Two bright squares an image."""
    labels = torch.zeros(count, 1, 64, 64, dtype=torch.int32)
    for i, places in enumerate(torch.randint(40, (count, 2), generator=seeded(1)).tolist()):
        for number, place in enumerate(places, 1):
            labels[i, :, place : place + 20, 32 * number - 30 : 32 * number - 6] = number
    noise = torch.randint(100, (count, 3, 64, 64), generator=seeded(2))
    return (noise + 100 * (labels > 0)).byte(), labels


class Instances:
    """Images in memory, with maps of instances."""

    classes = 2  # with the background

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> Example:
        return self.images[place].float() / 255, target(self.labels[place, 0])


class Coco:
    """COCO's images and instances; images without an instance are left out."""

    classes = 91

    def __init__(self, folder: Path, part: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.coco = COCO(str(sets.find(folder, "annotations") / f"instances_{part}.json"))
        self.folder = sets.find(folder, part)
        self.names = sorted(
            {one["image_id"] for one in self.coco.anns.values() if not one["iscrowd"]}
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, place: int) -> Example:
        name = self.names[place]
        image = torchvision.io.decode_image(
            str(self.folder / self.coco.imgs[name]["file_name"]), torchvision.io.ImageReadMode.RGB
        )
        found = [
            a for a in self.coco.imgToAnns[name] if not a["iscrowd"] and min(a["bbox"][2:]) > 0
        ]
        boxes = torch.tensor([one["bbox"] for one in found]).view(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        masks = [torch.from_numpy(self.coco.annToMask(one)) for one in found]
        shape = (0, *image.shape[1:])
        return image.float() / 255, {
            "boxes": boxes,
            "labels": torch.tensor([one["category_id"] for one in found], dtype=torch.long),
            "masks": torch.stack(masks) if masks else torch.zeros(shape, dtype=torch.uint8),
        }


def mirrored(example: Example) -> Example:
    image, objects = example
    boxes = objects["boxes"].clone()
    boxes[:, [0, 2]] = image.shape[-1] - boxes[:, [2, 0]]
    return image.flip(-1), {**objects, "boxes": boxes, "masks": objects["masks"].flip(-1)}
