"""Labels of a step's stages, for ``torch.profiler``; free where no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

PREFIX = "kaisa::"  # of the labels that a profiler shows
# In the order of a step. Stages nest: gradients are preconditioned while others travel.
STAGES = (
    *("capture", "agree", "reduce", "average", "decompose", "share"),
    *("precondition", "length", "hand out", "base step"),
)
_NOTHING = nullcontext()


def stage(name: str) -> AbstractContextManager[Any]:
    """Return a context that labels what runs in it as one of the :data:`STAGES`."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(PREFIX + name)
    return _NOTHING
