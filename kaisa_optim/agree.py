"""Values that all ranks must have alike: compared by checksums, named where they differ."""

from __future__ import annotations

import contextlib
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .comm.ranks import Ranks
from .errors import invalid_because

_BITS = 0xFFFFF  # twenty, so that sums of squares over 8,192 ranks are whole numbers in float64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(value: Any) -> int:
    """Return a number that most likely differs where the objects differ."""
    return zlib.crc32(repr(value).encode()) & _BITS


def alike(world: int, total: float, squares: float) -> bool:
    """Return whether whole numbers, one a rank, are equal, from their sum and sum of squares.

    The comparison is in integers: the square of the sum has more digits than a float.
    """
    return world * int(squares) == int(total) ** 2


def compare(
    ranks: Ranks,
    mine: dict[str, Any],
    what: str,
    error: Exception | None = None,
    doing: str = "matching model and parameters",
    told: bool = False,
) -> None:
    """Raise on all ranks if one of them has an error, or if ranks differ in ``mine``.

    ``doing`` is the action that the error came from. With ``told``, each rank has raised its own
    error already, so that an error that all ranks have is not raised again.
    """
    code = checksum(mine)
    numbers = [float(error is not None), code, code**2]
    failed, once, squared = ranks.sum_numbers(
        torch.tensor(numbers, dtype=torch.float64, device="cpu"), f"comparing {what}"
    ).tolist()
    if failed and not (told and failed == ranks.world):
        raise_together(ranks, error, doing)
    if not alike(ranks.world, once, squared):
        raise_difference(ranks, mine, what)


def warn(ranks: Ranks, text: str) -> None:
    """Warn on rank 0 of a finding that all ranks share, at the user's line.

    Where warnings are errors, all ranks raise: no rank is left waiting for the others.
    """
    with contextlib.nullcontext() if ranks.rank == 0 else warnings.catch_warnings(record=True):
        warnings.warn(text, stacklevel=1 + len(list(callers())))


def callers() -> Iterator[FrameType]:
    """Yield frames from the caller outwards, as long as they are torch's or this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "torch",
        "kaisa_optim",
    ):
        yield frame
        frame = frame.f_back


def compare_tensors(ranks: Ranks, named: dict[str, Tensor], remedy: str) -> None:
    """Raise on all ranks if tensors differ in a bit; wait for the device."""
    if not named:
        return
    codes = checksums(named.values()).cpu()
    once, squared = ranks.sum_numbers(
        torch.stack([codes, codes**2]).double(), "comparing weights and gradients"
    ).tolist()
    both = zip(once, squared, strict=True)
    if not all(alike(ranks.world, total, squares) for total, squares in both):
        raise_unlike(ranks, dict(zip(named, codes.tolist(), strict=True)), remedy)


def raise_unlike(ranks: Ranks, codes: dict[str, int], remedy: str) -> None:
    """Raise an error that names the first tensor whose checksum differs, and the ranks."""
    theirs = ranks.gather_objects(codes, "naming what differs")
    for name in codes:
        others = [rank for rank, own in enumerate(theirs) if own.get(name) != theirs[0].get(name)]
        if others:
            raise RuntimeError(f"{name} on ranks {others} differs from rank 0's: {remedy}")


def raise_together(ranks: Ranks, error: Exception | None, doing: str) -> None:
    """Raise on all ranks the errors that some ranks have."""
    mine = f"{doing} failed on rank {ranks.rank}: {type(error).__name__}: {error}"
    texts = ranks.gather_objects(None if error is None else mine, f"{doing} failed")
    if error is not None:
        raise error
    raise RuntimeError(f"K-FAC stops on all ranks, since {'; '.join(filter(None, texts))}")


def raise_difference(ranks: Ranks, mine: dict[str, Any], what: str) -> None:
    """Raise an error that names one value that differs, and the ranks."""
    theirs = ranks.gather_objects(mine, f"comparing {what}")
    of_model = "layer ", "sizes "
    for rank, values in enumerate(theirs[1:], 1):
        # A surplus layer changes its group's sizes, too; its name tells more, so it comes first.
        for name in sorted({**theirs[0], **values}, key=lambda name: name.startswith("sizes ")):
            first, other = theirs[0].get(name, "absent"), values.get(name, "absent")
            if repr(first) != repr(other):  # as in checksums, where True is not 1
                remedy = "; where each rank has a part of a model, as pipeline stages are, give "
                remedy += "process_group= the group of the ranks that hold the same stage"
                why = (
                    f"{other!r} on rank {rank}, {first!r} on rank 0; all ranks need the same "
                    f"model and options{remedy * name.startswith(of_model)}"
                )
                raise invalid_because(name, why)
        # The same values in another order, as when modules were registered in another order.
        for here, there in zip(theirs[0], values, strict=True):
            if here != there:
                why = (
                    f"{there!r} stands on rank {rank} where rank 0 has {here!r}; register "
                    "modules and add parameters in one order on all ranks"
                )
                raise invalid_because(what, why)
    raise invalid_because(what, "they differ among the ranks")


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """Return a checksum of each tensor's bits, on the first one's device, without waiting."""
    sums = [
        t.detach().contiguous().view(_INTEGERS[t.dtype.itemsize]).sum(dtype=torch.int64)
        for t in tensors
    ]
    total = torch.stack([s.to(sums[0].device) for s in sums])
    # Fold all bits in: the low bits of float32 weights in float64 are zero.
    return (total ^ total >> 20 ^ total >> 40) & _BITS
