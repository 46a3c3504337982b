"""Layer kinds, one file a kind."""

from . import attention, conv, embedding, linear  # noqa: F401 (each registers its kinds)
from .base import (
    COMPARE,
    COUNT,
    GATHER,
    LEAVE,
    Layer,
    Moments,
    PassSettings,
    Shared,
    check_sizes,
    inherited_kind,
    kind_of,
    register_layer,
)
from .embedding import EmbeddingLayer
from .linear import Conv1DLayer, LinearLayer
from .parameters import SCALES, MatrixLayer, declared
from .watch import Scope, WatchMode

__all__ = [
    "COMPARE",
    "COUNT",
    "GATHER",
    "LEAVE",
    "SCALES",
    "Conv1DLayer",
    "EmbeddingLayer",
    "Layer",
    "LinearLayer",
    "MatrixLayer",
    "Moments",
    "PassSettings",
    "Scope",
    "Shared",
    "WatchMode",
    "check_sizes",
    "declared",
    "inherited_kind",
    "kind_of",
    "register_layer",
]
