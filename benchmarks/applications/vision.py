"""torchvision, also beside a torch in which its compiled operators do not load.

Its wheel for Linux on the Python package index is built for CUDA. Beside torch's CPU build
``import torchvision`` fails there. Here it is imported after stand-ins of ``nms`` and ``roi_align``
in plain torch, which are slower, and good enough for a small trial.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor


def _compiled() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchvision is not installed", name="torchvision")
    try:
        for path in Path(spec.origin).parent.glob("_C.*"):
            torch.ops.load_library(path)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the places of the boxes that no better box overlaps by more, the best first."""
    order = scores.argsort(descending=True, stable=True)
    sides = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0)
    areas = sides.prod(1)
    kept = []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        low = torch.maximum(boxes[order, :2], boxes[best, :2])
        high = torch.minimum(boxes[order, 2:], boxes[best, 2:])
        common = (high - low).clamp(min=0).prod(1)
        order = order[common <= iou_threshold * (areas[order] + areas[best] - common)]
    return torch.stack(kept) if kept else order


def roi_align(
    images: Tensor,
    boxes: Tensor,
    scale: float,
    height: int,
    width: int,
    samples: int,
    aligned: bool,
) -> Tensor:
    """Return the means of each box's bins, [boxes, channels, height, width].

    ``boxes`` are [boxes, 5]: the image, left, top, right, bottom. Bilinear weights are products of
    those along the two sides, so that a box is two products of matrices.
    """
    low, high = (boxes[:, 1:] * scale - 0.5 * aligned).view(-1, 2, 2).unbind(1)
    sides = high - low if aligned else (high - low).clamp(min=1)
    across, down = (
        _weights(low[:, i], sides[:, i], bins, images.shape[3 - i], samples)
        for i, bins in enumerate((width, height))
    )
    found = images.new_zeros(len(boxes), images.shape[1], height, width)
    for number in boxes[:, 0].unique():
        own = (boxes[:, 0] == number).nonzero()[:, 0]
        pooled = images[int(number)] @ across[own, None].mT
        found = found.index_copy(0, own, (down[own, None] @ pooled).to(found.dtype))
    return found


def _weights(start: Tensor, side: Tensor, bins: int, length: int, samples: int) -> Tensor:
    """Return the weights of pixels along a side in the mean of each bin, [boxes, bins, length]."""
    counts = (side / bins).ceil() if samples <= 0 else torch.full_like(side, samples)
    counts = counts[:, None, None]
    each = torch.arange(max(1, int(counts.max())) if len(side) else 1, device=side.device)
    bin_of = torch.arange(bins, device=side.device)[:, None]
    places = start[:, None, None] + side[:, None, None] / bins * (bin_of + (each + 0.5) / counts)
    counted = (each < counts) & (places >= -1) & (places <= length)
    pixels = torch.arange(length, device=side.device)
    near = 1 - (places.clamp(0, length - 1)[..., None] - pixels).abs()
    return (near.clamp(min=0) * counted[..., None]).sum(2) / counts.clamp(min=1)


COMPILED = _compiled()
if not COMPILED:
    # torchvision registers kernels for tracing with these operators as it is imported.
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import torchvision  # noqa: E402

if not COMPILED:
    torchvision.ops.boxes.nms = nms
    # Its own stand-in is compiled at the first call, and takes as many samples as an image has
    # pixels: minutes a step.
    sys.modules["torchvision.ops.roi_align"]._roi_align = roi_align  # type: ignore[attr-defined]

__all__ = ["COMPILED", "torchvision"]
