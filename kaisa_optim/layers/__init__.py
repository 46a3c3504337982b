"""Layer kinds, one file a kind."""

from . import attention, conv, embedding, linear, norm  # noqa: F401 (each registers its kinds)
from .base import (
    Basis,
    Layer,
    Moments,
    PassSettings,
    Shared,
    check_sizes,
    is_registered,
    kind_of,
    register_layer,
)

__all__ = [
    "Basis",
    "Layer",
    "Moments",
    "PassSettings",
    "Shared",
    "check_sizes",
    "is_registered",
    "kind_of",
    "register_layer",
]
