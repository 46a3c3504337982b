"""Layer kinds, one file a kind."""

from . import attention, conv  # noqa: F401 (each registers its kinds)
from .base import (
    COMPARE,
    COUNT,
    GATHER,
    LEAVE,
    WHOLE,
    Layer,
    Moments,
    Part,
    PassSettings,
    Sample,
    Shared,
    check_sizes,
    kind_of,
    register_layer,
    sample_of,
)
from .kinds import Conv1DLayer, EmbeddingLayer, LinearLayer
from .parameters import SCALES, MatrixLayer, declared
from .watch import Scope, WatchMode

__all__ = [
    "COMPARE",
    "COUNT",
    "GATHER",
    "LEAVE",
    "SCALES",
    "WHOLE",
    "Conv1DLayer",
    "EmbeddingLayer",
    "Layer",
    "LinearLayer",
    "MatrixLayer",
    "Moments",
    "Part",
    "PassSettings",
    "Sample",
    "Scope",
    "Shared",
    "WatchMode",
    "check_sizes",
    "declared",
    "kind_of",
    "register_layer",
    "sample_of",
]
