"""torchvision, also beside a torch in which its compiled operators do not load.

Its wheel for Linux on the Python package index is built for CUDA. Beside torch's CPU build
``import torchvision`` fails there. Here it is imported after a stand-in of ``nms`` in plain torch;
``roi_align`` has one of torchvision's own. Both are slow, and good enough for a small trial.
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


COMPILED = _compiled()
if not COMPILED:
    # torchvision registers kernels for tracing with these operators as it is imported.
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import torchvision  # noqa: E402

if not COMPILED:
    torchvision.ops.boxes.nms = nms
    # Its own stand-in is compiled at the first call, which takes minutes on a CPU.
    _module = sys.modules["torchvision.ops.roi_align"]
    _module._roi_align = _module._roi_align.__wrapped__  # type: ignore[attr-defined]

__all__ = ["COMPILED", "torchvision"]
