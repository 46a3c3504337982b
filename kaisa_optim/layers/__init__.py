"""Layer kinds."""

from . import attention, conv  # noqa: F401 (each registers its kinds)
from .base import Layer, Moments, kind_of, register_layer
from .kinds import SCALES, LinearLayer

__all__ = ["SCALES", "Layer", "LinearLayer", "Moments", "kind_of", "register_layer"]
