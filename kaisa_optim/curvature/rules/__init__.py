"""Rules: how running averages become state, and state turns gradients into new ones."""

from .base import Rule, StepValues
from .cholesky import CholeskyRule
from .eigen import EigenRule, StoredProductRule
from .ekfac import EkfacRule
from .polar import PolarRule
from .truncated import TruncatedRule

__all__ = [
    "CholeskyRule",
    "EigenRule",
    "EkfacRule",
    "PolarRule",
    "Rule",
    "StepValues",
    "StoredProductRule",
    "TruncatedRule",
]
