"""Second-order optimizers: K-FAC inside real torch.optim classes."""

from .assignment import Grid, Hybrid, LayerWise, Opt, Placement, Task, WorkAssignment
from .damping import AdaptiveDamping
from .lamb import LAMB
from .layers import Layer, Moments, register_layer
from .muon import Muon
from .optimizers import KFACLAMB, KFACSGD, KFACAdam, KFACMuon, with_kfac
from .scheduler import KFACParamScheduler, decay_at

__version__ = "0.1.0"

__all__ = [
    "KFACLAMB",
    "KFACSGD",
    "LAMB",
    "AdaptiveDamping",
    "Grid",
    "Hybrid",
    "KFACAdam",
    "KFACMuon",
    "KFACParamScheduler",
    "Layer",
    "LayerWise",
    "Moments",
    "Muon",
    "Opt",
    "Placement",
    "Task",
    "WorkAssignment",
    "decay_at",
    "register_layer",
    "with_kfac",
]
