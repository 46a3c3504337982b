"""Second-order optimizers: K-FAC inside real torch.optim classes."""

from typing import NoReturn

import torch

from .lamb import LAMB
from .layers import Layer, Moments, register_layer
from .optimizer import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from .plan.assignment import Grid, Hybrid, LayerWise, Opt, Placement, Task, WorkAssignment
from .scheduler import KFACParamScheduler, decay_at


def __getattr__(name: str) -> NoReturn:
    if name in ("KFACMuon", "Muon"):
        raise ImportError(f"kaisa_optim has no {name}; use KFACAdam, which needs no groups")
    if name.startswith("KFAC") and name != "KFACOptimizer" and hasattr(torch.optim, name[4:]):
        raise ImportError(f"kaisa_optim has no {name}; use with_kfac(torch.optim.{name[4:]})")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "KFACLAMB",
    "KFACSGD",
    "LAMB",
    "Grid",
    "Hybrid",
    "KFACAdam",
    "KFACParamScheduler",
    "Layer",
    "LayerWise",
    "Moments",
    "Opt",
    "Placement",
    "Task",
    "WorkAssignment",
    "decay_at",
    "register_layer",
    "with_kfac",
]
