"""The form of errors about arguments, and checks that need nothing but the standard library."""

from __future__ import annotations

import difflib
import inspect
import numbers
from collections.abc import Callable, Iterable
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


def check_flag(name: str, value: Any, none: bool = False) -> Any:
    """Return True or False, and None where ``none`` allows it; refuse other values."""
    if not isinstance(value, bool) and not (none and value is None):
        rest = ", or None for what follows from other options" if none else ""
        raise invalid(name, value, f"it must be True or False{rest}")
    return value


def check_callable(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Refuse a callable that does not take ``arguments``, before a step calls it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some builtins have none
    try:
        signature.bind(*arguments)
    except TypeError:
        taken = " and ".join(arguments) if arguments else "nothing"
        like = f"lambda {', '.join(arguments)}: ..." if arguments else "lambda: ..."
        raise invalid(name, function, f"it must be a callable of {taken}, such as {like}") from None


# ---- names that do not exist ----

# Arguments of kfac-pytorch that this package does not have, or has under another name, and names
# that went before the first release.
FORMER = {
    "allreduce_bucket_cap_mb": "it is called bucket_cap_mb here",
    "accumulation_steps": "leave it out: any number of backward passes is counted",
    "symmetry_aware": "leave it out: factors always travel as triangles",
    "assignment_strategy": "leave it out: the cost() of a WorkAssignment says what is balanced",
    "update_factors_in_hook": "leave it out: sums are taken in the backward pass, averages in "
    "step()",
    "loglevel": 'leave it out: set that of logging.getLogger("kaisa_optim")',
    "grafting": 'leave it out: compute_method="polar" has the base\'s own length',
    "warmup_steps": "leave it out: a scheduler of lr warms up",
    "compound": "leave it out: factors multiply the first value, so let a callable return the "
    "product of its factors",
    "use_muon": "leave it out: KFACAdam steps all parameters, and a group may have its own lr",
}


def unexpected(owner: str, name: str, ours: Iterable[str], theirs: Iterable[str] = ()) -> TypeError:
    """Return the error for an argument that neither ``owner``'s options nor its base have."""
    ours = list(ours)
    # SGD's dampening is as near to some spellings as damping is.
    near = difflib.get_close_matches(name, ours, 1, 0.9)
    near = near or difflib.get_close_matches(name, [*ours, *theirs], 1)
    remedy = f"did you mean {near[0]}?" if near else f"help({owner}) lists what there is"
    remedy = FORMER.get(name, remedy)
    if name == "momentum" and "betas" in theirs:
        remedy = "here it is the first of betas"
    return TypeError(f"{owner}() got an unexpected keyword argument {name!r}; {remedy}")
