"""The form of errors about arguments, and checks that need nothing but the standard library."""

from __future__ import annotations

import difflib
import inspect
import numbers
from collections.abc import Callable, Collection
from typing import Any, TypeGuard


def invalid(name: str, value: Any, must: str) -> ValueError:
    """Return the error for a bad argument: its name, its value, and what it must be instead."""
    return invalid_because(name, f"{value!r}; {must}")


def invalid_because(name: str, why: str) -> ValueError:
    """Return the error for an argument whose value alone does not say what is wrong with it."""
    return ValueError(f"Invalid {name}: {why}")


def is_real(value: Any) -> TypeGuard[float]:
    """Return whether a value is a real number; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_callable(name: str, function: Callable[..., Any], argument: str = "") -> None:
    """Refuse a callable that does not take one ``argument``, or none, before a step calls it."""
    # Builtins without a signature raise ValueError, and pass: no value of theirs is known to fail.
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(argument) if argument else signature.bind()
    except TypeError:
        like = f"lambda {argument}".rstrip()
        must = f"it must be a callable of {argument or 'nothing'}, such as {like}: ..."
        raise invalid(name, function, must) from None


# Arguments of kfac-pytorch that have no use or another name here, and names that went.
FORMER = {
    "allreduce_bucket_cap_mb": "it is called bucket_cap_mb here",
    "accumulation_steps": "leave it out: any number of backward passes is counted",
    "symmetry_aware": "leave it out: factors always travel as triangles",
    "assignment_strategy": "leave it out: the cost() of a WorkAssignment says what is balanced",
    "update_factors_in_hook": "leave it out: step() takes averages of the backward passes' sums",
    "loglevel": 'leave it out: set that of logging.getLogger("kaisa_optim")',
    "grafting": 'leave it out: compute_method="polar" has the base\'s own length',
    "warmup_steps": "leave it out: a scheduler of lr warms up",
    "compound": "leave it out: factors multiply the first value, so let a callable return products",
    "momentum": "in Adam and LAMB it is the first of betas",
    "use_muon": "leave it out: KFACAdam steps all parameters, and a group may have its own lr",
}


def unexpected(owner: str, name: str, ours: Collection[str], base: Any = ()) -> TypeError:
    """Return the error for an argument that neither ``owner``'s options nor its base have."""
    # SGD's dampening is as near to some spellings as damping is: options come first.
    near = difflib.get_close_matches(name, ours, 1, 0.9)
    near = near or difflib.get_close_matches(name, [*ours, *base], 1)
    remedy = f"did you mean {near[0]}?" if near else f"help({owner}) lists what there is"
    remedy = FORMER.get(name, remedy)
    return TypeError(f"{owner}() got an unexpected keyword argument {name!r}; {remedy}")
