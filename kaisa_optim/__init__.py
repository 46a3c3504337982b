"""Second-order optimizers: K-FAC inside real torch.optim classes."""

from .layers import Layer, Moments, register_layer
from .optim.family import KFACLAMB, KFACSGD, KFACAdam, KFACMuon, with_kfac
from .optim.lamb import LAMB
from .optim.muon import Muon
from .optim.scheduler import KFACParamScheduler, decay_at
from .plan.assignment import Grid, Hybrid, LayerWise, Opt, Placement, Task, WorkAssignment

__version__ = "0.1.0"

__all__ = [
    "KFACLAMB",
    "KFACSGD",
    "LAMB",
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
