"""Rules: how running averages become state, and state turns gradients into new ones."""

from .adam import AdamRule
from .base import Rule, StepValues
from .cholesky import CholeskyRule
from .eigen import EigenRule, StoredProductRule
from .ekfac import EkfacRule
from .muon import MuonRule
from .truncated import TruncatedRule

__all__ = [
    "AdamRule",
    "CholeskyRule",
    "EigenRule",
    "EkfacRule",
    "MuonRule",
    "Rule",
    "StepValues",
    "StoredProductRule",
    "TruncatedRule",
]
