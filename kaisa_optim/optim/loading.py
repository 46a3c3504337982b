"""Loading a state into a K-FAC optimizer: of its class, of its base's, or of an older version."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..core import checkpoint
from ..core.preconditioner import Preconditioner
from ..errors import invalid_because
from .arguments import GROUP_KEYS

if TYPE_CHECKING:
    from .mixin import KFACMixin


class Load:
    """One call of ``load_state_dict``: the given state, and the outcome of the load."""

    def __init__(self, optimizer: KFACMixin) -> None:
        self._kfac = optimizer.preconditioner
        self.entries: checkpoint.Entries = {}  # K-FAC's part of the state
        self.restored = checkpoint.Restored([], [])
        self._fresh = False  # the state was taken before any step, so that nothing is missing

    def separate(self, optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        """Return the base's part of a state, with K-FAC's keys of its groups."""
        from .mixin import KFACMixin

        assert isinstance(optimizer, KFACMixin)
        checkpoint.check_form(loaded)
        loaded = loaded.copy()
        groups = optimizer.param_groups
        self.entries = checkpoint.take_out(self._kfac, loaded, groups)
        of_base = any("damping" not in group for group in loaded["param_groups"])
        self._fresh = not (of_base or loaded["state"] or any(self.entries.values()))
        # A base optimizer's groups lack K-FAC's keys: these stay as they are in this optimizer.
        loaded["param_groups"] = [
            {
                **{key: here[key] for key in GROUP_KEYS},
                **saved,
                **optimizer._of_its_own(saved, here),
            }
            for saved, here in zip(loaded["param_groups"], groups, strict=False)
        ] + loaded["param_groups"][len(groups) :]
        return loaded

    def warn(self, optimizer: KFACMixin) -> None:
        """Warn of layers whose factors or moments start anew."""
        missing, moments_anew = self.restored
        if moments_anew:
            names = ", ".join(map(repr, moments_anew))
            warnings.warn(
                f"the moments of {names} are missing in this state, or of another kind than this "
                "optimizer's, and begin at zero; for a run to go on, build it with the class that "
                "the state was saved with, and on several ranks call consolidate_state_dict() "
                "before a save",
                stacklevel=3,
            )
        if missing and not self._fresh:
            ranks = self._kfac.ranks
            share = f", which rank {ranks.rank} keeps" if ranks.world > 1 else ""
            cause = " (was it saved without consolidate_state_dict()?)" if share else ""
            anew = ", and their moments begin at zero" if self._kfac.rule.makes_directions else ""
            warnings.warn(
                "the checkpoint holds no K-FAC factors of this kind for "
                f"{', '.join(map(repr, missing))}{share}{cause}; they are estimated anew, from the "
                f"next backward pass on{anew}",
                stacklevel=3,
            )


def warn_of_share(kfac: Preconditioner) -> bool:
    """Warn that a state is one rank's share; return whether it lacks anything."""
    absent = checkpoint.absent(kfac)
    if absent:
        warnings.warn(
            f"state_dict() holds rank {kfac.ranks.rank}'s share of K-FAC's "
            "state; call consolidate_state_dict(to=rank) on all ranks first, or save all "
            f"ranks' shares, as torch.distributed.checkpoint does. Absent are "
            f"{checkpoint.abridged(absent)} and what follows from them",
            stacklevel=3,
        )
    return bool(absent)


def take_entries(state: Any) -> checkpoint.Entries:
    """Take K-FAC's tensors out of a live state; the base must see its own entries only."""
    entries = {
        p: {k: v for k, v in entry.items() if str(k).startswith(checkpoint.PREFIX)}
        for p, entry in state.items()
        if isinstance(entry, dict)
    }
    for p, ours in entries.items():
        for key in ours:
            del state[p][key]
        if ours and not state[p]:
            del state[p]
    return entries


def set_base_state(
    optimizer: KFACMixin, state: dict[str, Any], set_state: Callable[[dict[str, Any]], None]
) -> None:
    """Let the base set a loaded state; the base completes a state of an older version.

    A state that lacks keys which the base reads is refused: a step would end in a KeyError.
    """
    before = {n: optimizer.__dict__[n] for n in state if n in optimizer.__dict__}
    former = before.get("param_groups", [])
    failed: Exception | None = None
    try:
        set_state(state)
    except Exception as error:
        failed = error
    pairs = list(zip(optimizer.param_groups, former, strict=False))
    read = dict(optimizer.defaults)
    if "differentiable" not in inspect.signature(optimizer._base.__init__).parameters:
        read.pop("differentiable", None)  # a load adds it to any optimizer's defaults
    names = [k for k in read if any(k in old and k not in new for new, old in pairs)]
    if failed is None and not names:
        return
    optimizer.__dict__.update(before)
    if not names and not isinstance(failed, KeyError):
        assert failed is not None
        raise failed
    lacks = f"parameter groups lack {', '.join(names)}" if names else f"entries lack {failed}"
    why = (
        f"its {lacks}, which {optimizer._base.__name__} reads; it is of another optimizer, or of "
        "an older version: load it into one of that class, add what it lacks, or begin without "
        "its state"
    )
    raise invalid_because("state_dict", why) from failed
