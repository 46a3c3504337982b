"""Rules: how running averages become state, and state turns gradients into new ones."""

from .base import Rule, StepValues
from .cholesky import CholeskyRule
from .eigen import EigenRule, StoredProductRule
from .muon import MuonRule

__all__ = [
    "CholeskyRule",
    "EigenRule",
    "MuonRule",
    "Rule",
    "StepValues",
    "StoredProductRule",
]
