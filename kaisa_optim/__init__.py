"""Second-order optimizers: K-FAC inside real torch.optim classes."""

from .lamb import LAMB
from .layers import Layer, Moments, register_layer
from .optimizers import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from .scheduler import KFACParamScheduler, decay_at

__version__ = "0.1.0"

__all__ = [
    "KFACLAMB",
    "KFACSGD",
    "LAMB",
    "KFACAdam",
    "KFACParamScheduler",
    "Layer",
    "Moments",
    "decay_at",
    "register_layer",
    "with_kfac",
]
