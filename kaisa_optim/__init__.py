"""Distributed second-order optimizers: K-FAC inside real torch.optim classes."""

from .lamb import LAMB
from .layers import Layer, Moments, register_layer
from .optimizers import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from .scheduler import KFACParamScheduler, decay_at

__version__ = "0.1.0"

__all__ = [
    "KFACSGD",
    "KFACAdam",
    "KFACLAMB",
    "with_kfac",
    "LAMB",
    "KFACParamScheduler",
    "decay_at",
    "Layer",
    "Moments",
    "register_layer",
]
