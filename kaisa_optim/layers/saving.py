"""The hooks that pack the tensors which autograd saves for a backward pass."""

from __future__ import annotations

import torch

UNKNOWN = "unknown"  # torch 2.6 does not tell

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saving_hooks() -> str | None:
    """Return the module whose hooks pack saved tensors now, as a checkpoint's do, or ``None``."""
    if _top_hooks is None:
        return UNKNOWN
    hooks = _top_hooks(False)
    return None if hooks is None else getattr(hooks[0], "__module__", None) or ""
