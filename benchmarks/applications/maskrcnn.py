"""Mask R-CNN: boxes and masks of objects, K-FAC on the two heads and SGD on the rest.

    python -m benchmarks.applications.maskrcnn --data FOLDER [--optimizer KFACSGD]
    torchrun --standalone --nproc-per-node 8 -m benchmarks.applications.maskrcnn --set coco ...

FOLDER has ``nuclei`` (``images`` and ``labels``, PNGs with a number for each instance), or COCO's
``train2017``, ``val2017`` and ``annotations``. AP is pycocotools'. For nuclei the network is small:
ResNet-18 with group norms, from scratch. ``--preset paper``: ResNet-50 with feature pyramid on
COCO, four images a rank, from ``--pretrained`` weights of ResNet-50 (KAISA, SC '21).
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pycocotools import mask as runs
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from benchmarks import data as sets

from .arguments import Defaults, kaisa, tell_terms
from .common import Job, Order, Ranks, by_preset, entry, seeded
from .instances import Coco, Example, Instances, generated, mirrored
from .vision import torchvision

detection = torchvision.models.detection

DEFAULTS: Defaults = {
    "all": {"batch": 2, "steps": 300, "every": 50, "save_every": 100},
    "KFAC": {"skip_layers": ("^backbone", "^rpn")},  # K-FAC on box head and mask head alone
    # From scratch, SGD diverges within 40 steps at rates of 0.02 and more.
    "SGD": {"lr": 0.005, "momentum": 0.9, "weight_decay": 1e-4},
    "KFACSGD": {"lr": 0.005, "momentum": 0.9, "weight_decay": 1e-4},
}
PRESETS: dict[str, Defaults] = {
    "paper": {
        "all": {
            **{"set": "coco", "backbone": "resnet50", "channels": 256, "representation": 1024},
            **{"size": 800, "proposals": 512, "batch": 4, "steps": 25_000, "lr": 0.005},
        },
        "KFACSGD": kaisa(0.003, 50, 500),
    }
}
SMOKE: Defaults = {
    "all": {
        **{"channels": 8, "representation": 16, "size": 64, "proposals": 16, "batch": 1},
        **{"steps": 2, "every": 2, "save_every": 2},
    },
}
DECAYS = {False: (17, 23), True: (14, 19)}  # thousands of steps; True: with K-FAC


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--set", choices=("nuclei", "coco"), default="nuclei")
    add("--backbone", choices=("resnet18", "resnet50", "resnet101"), default="resnet18")
    add("--pretrained", type=Path, help="torchvision's weights of the backbone; its norms freeze")
    add("--channels", type=int, default=32, help="of the feature pyramid and of the mask head")
    add("--representation", type=int, default=128, help="width of the box head")
    add("--size", type=int, default=256, help="shorter side of the images in the network")
    add("--proposals", type=int, default=64, help="boxes that an image's loss averages")


def network(options: argparse.Namespace, classes: int) -> nn.Module:
    frozen = torchvision.ops.FrozenBatchNorm2d
    norm: Callable[[int], nn.Module] = lambda n: nn.GroupNorm(8, n)  # noqa: E731
    body = torchvision.models.get_model(
        options.backbone, norm_layer=frozen if options.pretrained else norm
    )
    if options.pretrained:
        body.load_state_dict(torch.load(options.pretrained, weights_only=True), strict=False)
    width, channels = body.inplanes // 8, options.channels
    backbone = detection.backbone_utils.BackboneWithFPN(
        body,
        {f"layer{i + 1}": str(i) for i in range(4)},
        [width * 2**i for i in range(4)],
        channels,
    )
    rcnn = detection.mask_rcnn
    return detection.MaskRCNN(
        backbone,
        min_size=options.size,
        max_size=2 * options.size,
        rpn_anchor_generator=None if options.set == "coco" else _anchors(),
        rpn_post_nms_top_n_train=2000 if options.set == "coco" else 200,
        rpn_pre_nms_top_n_train=2000 if options.set == "coco" else 300,
        rpn_pre_nms_top_n_test=1000 if options.set == "coco" else 300,
        rpn_post_nms_top_n_test=1000 if options.set == "coco" else 200,
        box_batch_size_per_image=options.proposals,
        box_head=detection.faster_rcnn.TwoMLPHead(channels * 49, options.representation),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(options.representation, classes),
        mask_head=rcnn.MaskRCNNHeads(channels, (channels,) * 4, 1),
        mask_predictor=rcnn.MaskRCNNPredictor(channels, channels, classes),
    )


def _anchors() -> Any:
    """Nuclei are small: a side of 8 to 128 pixels."""
    sides = tuple((side,) for side in (8, 16, 32, 64, 128))
    return detection.rpn.AnchorGenerator(sides, ((0.5, 1.0, 2.0),) * 5)


def precision(
    truth: list[dict[str, Any]], found: list[dict[str, Any]], images: int
) -> dict[str, float]:
    """Return pycocotools' AP of boxes and masks, each over overlaps of 0.5 to 0.95 and at 0.5."""
    scores: dict[str, float] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        sizes = {one["image_id"]: one["segmentation"]["size"] for one in truth}
        categories = sorted({one["category_id"] for one in truth})
        coco.dataset = {
            "info": {},
            "images": [
                {"id": i, "height": sizes.get(i, (1, 1))[0], "width": sizes.get(i, (1, 1))[1]}
                for i in range(images)
            ],
            "annotations": [{"id": i, **one} for i, one in enumerate(truth, 1)],
            "categories": [{"id": number} for number in categories],
        }
        coco.createIndex()
        for kind, name in (("bbox", "box"), ("segm", "mask")):
            scores |= {f"{name}_ap": 0.0, f"{name}_ap50": 0.0}
            if found:
                judge = COCOeval(coco, coco.loadRes([dict(one) for one in found]), kind)
                judge.evaluate(), judge.accumulate(), judge.summarize()
                scores |= {
                    f"{name}_ap": float(judge.stats[0]),
                    f"{name}_ap50": float(judge.stats[1]),
                }
    return scores


def records(image: int, objects: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return COCO's records of one image's objects; truth has no scores."""
    boxes, masks = objects["boxes"].cpu(), objects["masks"].cpu()
    masks = masks[:, 0] > 0.5 if masks.ndim == 4 else masks > 0
    told = []
    for i, (box, mask) in enumerate(zip(boxes.tolist(), masks.numpy(), strict=True)):
        code = runs.encode(np.asfortranarray(mask.astype(np.uint8)))
        one = {"image_id": image, "category_id": int(objects["labels"][i]), "segmentation": code}
        one |= {"bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]]}
        one |= {"area": float(mask.sum()), "iscrowd": 0}
        told.append(one | ({"score": float(objects["scores"][i])} if "scores" in objects else {}))
    return told


def job(options: argparse.Namespace, ranks: Ranks) -> Job:
    train: Instances | Coco
    held: Instances | Coco
    if options.set == "coco":
        train, held = (Coco(options.data, part) for part in ("train2017", "val2017"))
    else:
        both = generated(10) if options.smoke else sets.nuclei_instances(options.data)
        last = torch.arange(len(both[0])) % 10 == 9
        train, held = (Instances(*(part[p] for part in both)) for p in (~last, last))
    torch.manual_seed(options.seed)
    model = network(options, train.classes)
    order = Order(len(train), ranks, options)
    # The box head's loss averages over an image's proposals.
    tell_terms(options, options.batch * options.accumulate * options.proposals)

    def to(example: Example) -> Example:
        image, objects = example
        return image.to(ranks.device), {n: t.to(ranks.device) for n, t in objects.items()}

    def batches(step: int) -> Iterator[list[Example]]:
        for number, places in order(step):
            flips = torch.rand(len(places), generator=seeded(options.seed, number)) < 0.5
            yield [
                to(mirrored(train[place]) if flip else train[place])
                for place, flip in zip(places.tolist(), flips.tolist(), strict=True)
            ]

    def loss(net: nn.Module, batch: list[Example]) -> Tensor:
        images, objects = zip(*batch, strict=True)
        found: dict[str, Tensor] = net(list(images), list(objects))
        return torch.stack(list(found.values())).sum()

    def evaluate(net: nn.Module) -> dict[str, float]:
        truth, found, total = [], [], 0.0
        for place in ranks.share(len(held)):
            image, objects = to(held[place])
            truth += records(place, objects)
            found += records(place, net([image])[0])
            net.train()
            torch.manual_seed(place)  # which proposals the loss takes
            total += loss(net, [(image, objects)]).item()
            net.eval()
        parts: list[Any] = [(truth, found)]
        if ranks.world > 1:
            parts = [None] * ranks.world
            dist.all_gather_object(parts, (truth, found))
        truth, found = ([one for part in parts for one in part[i]] for i in (0, 1))
        (total,) = ranks.sum(total)
        return {"loss": total / len(held), **precision(truth, found, len(held))}

    rate = by_preset(options, ranks, order, DECAYS, steps=1000)
    return Job(model, order.steps, rate, batches, loss, evaluate)


main = entry(__doc__, job, DEFAULTS, PRESETS, SMOKE, arguments)

if __name__ == "__main__":
    main()
