"""Which parameters Muon's step takes, by their groups and by their layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..errors import invalid_because
from ..linalg.orthogonal import MuonSettings
from .coverage import beside_matrices
from .options import Group


def takes_muon(group: Group, p: Tensor) -> bool:
    """Return whether Muon takes a parameter of this group; else AdamW does."""
    if isinstance(p, UninitializedParameter):  # its shape comes before its first gradient
        return True
    return p.dim() >= 2 if group["use_muon"] is None else bool(group["use_muon"])


def muon_step(group: Group) -> MuonSettings:
    """Return the settings of a group's step from a momentum."""
    coefficients: Any = tuple(group["ns_coefficients"])
    return MuonSettings(coefficients, group["ns_steps"], group["eps"], group["adjust_lr_fn"])


def excluded(group_of: Mapping[Tensor, Group], model: nn.Module) -> dict[Tensor, str]:
    """Return the parameters that AdamW takes, and why.

    Embeddings and norms do not count as matrices, unless their group says so: a step sees only some
    rows of an embedding.
    """
    apart = beside_matrices(model)
    found = {}
    for p, group in group_of.items():
        if not takes_muon(group, p):
            told = group["use_muon"] is not None
            found[p] = "use_muon=False" if told else "fewer than two dimensions"
        elif p in apart and not group["use_muon"]:
            found[p] = "of an embedding or a norm"
    return found


def choices(groups: Iterable[Group]) -> list[bool | None]:
    """Return the ``use_muon`` of each group."""
    return [group["use_muon"] for group in groups]


def refuse_changes(groups: Iterable[Group], former: Sequence[bool | None]) -> None:
    for i, (now, before) in enumerate(zip(choices(groups), former, strict=False)):
        if now is not before:
            why = (
                f"{now!r} of parameter group {i}, which was built with {before!r}, and use_muon "
                "decides which layers K-FAC covers; build a new optimizer, and load this one's "
                "state_dict() to continue"
            )
            raise invalid_because("use_muon", why)
