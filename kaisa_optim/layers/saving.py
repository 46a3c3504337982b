"""The hooks that pack the tensors which autograd saves for a backward pass."""

from __future__ import annotations

from typing import Any

import torch

UNKNOWN = "unknown"  # torch 2.6 does not tell

top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def pack_hook() -> Any:
    """Return the function that packs saved tensors now, ``None`` or ``UNKNOWN``."""
    if top_hooks is None:
        return UNKNOWN
    hooks = top_hooks(False)
    return None if hooks is None else hooks[0]


def saving_hooks() -> str | None:
    """Return the module whose hooks pack saved tensors now, as a checkpoint's do, or ``None``."""
    hook = pack_hook()
    return hook if hook in (None, UNKNOWN) else getattr(hook, "__module__", None) or ""
