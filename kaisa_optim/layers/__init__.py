"""Layer kinds."""

from . import attention, conv  # noqa: F401 (each registers its kinds)
from .base import Layer, Moments, check_sizes, kind_of, register_layer
from .kinds import SCALES, Conv1DLayer, EmbeddingLayer, LinearLayer, MatrixLayer, declared

__all__ = [
    "SCALES",
    "Conv1DLayer",
    "EmbeddingLayer",
    "Layer",
    "LinearLayer",
    "MatrixLayer",
    "Moments",
    "check_sizes",
    "declared",
    "kind_of",
    "register_layer",
]
