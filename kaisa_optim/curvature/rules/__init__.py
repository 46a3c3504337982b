"""Rules: how running averages become state, and state turns gradients into new ones."""

from .base import Rule
from .cholesky import CholeskyRule
from .eigen import EigenRule, StoredProductRule
from .polar import PolarRule

RULES: tuple[type[Rule], ...] = (PolarRule, EigenRule, StoredProductRule, CholeskyRule)

__all__ = [
    "RULES",
    "CholeskyRule",
    "EigenRule",
    "PolarRule",
    "Rule",
    "StoredProductRule",
]
