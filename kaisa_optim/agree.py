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
_REMEDY = "all ranks need the same model and options"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(value: Any) -> int:
    """Return a number that most likely differs where the objects differ."""
    # The text tells 1, 1.0 and True apart. No object in it may print an address.
    return zlib.crc32(repr(value).encode()) & _BITS


def are_equal(world: int, total: float, squares: float) -> bool:
    """Return whether whole numbers, one a rank, are equal, from their sum and sum of squares."""
    # The comparison is in integers: the square of the sum has more digits than a float.
    return world * int(squares) == int(total) ** 2


def compare(
    ranks: Ranks,
    values: dict[str, Any],
    what: str,
    error: Exception | None = None,
    doing: str = "matching model and parameters",
    told: bool = False,
    remedy: str = _REMEDY,
) -> None:
    """Raise on all ranks if one of them has an error, from ``doing``, or if ``values`` differ."""
    # With ``told``, each rank has raised its own error already: one that all have would come twice.
    code = checksum(values)
    numbers = torch.tensor([error is not None, code, code**2], dtype=torch.float64, device="cpu")
    failed, total, squares = ranks.sum_numbers(numbers, f"comparing {what}").tolist()
    if failed and not (told and failed == ranks.world):
        raise_together(ranks, error, doing)
    if not are_equal(ranks.world, total, squares):
        raise_difference(ranks, values, what, remedy)


def warn(ranks: Ranks, text: str) -> None:
    """Warn on rank 0 of a finding that all ranks share, at the user's line.

    Where warnings are errors, all ranks raise: no rank is left waiting for the others.
    """
    with contextlib.nullcontext() if ranks.rank == 0 else warnings.catch_warnings(record=True):
        warnings.warn(text, stacklevel=1 + len(list(callers())))


def callers() -> Iterator[FrameType]:
    """Yield frames from the caller outwards, as long as they are torch's or this package's."""
    frame: FrameType | None = sys._getframe(1)
    packages = "torch", "kaisa_optim"
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in packages:
        yield frame
        frame = frame.f_back


def compare_tensors(ranks: Ranks, named: dict[str, Tensor], remedy: str) -> None:
    """Raise on all ranks if tensors differ in a bit; wait for the device."""
    if not named:
        return
    codes = checksums(named.values()).cpu()
    numbers = torch.stack([codes, codes**2]).double()
    sums = ranks.sum_numbers(numbers, "comparing weights and gradients").mT.tolist()
    if not all(are_equal(ranks.world, total, squares) for total, squares in sums):
        raise_unlike(ranks, dict(zip(named, codes.tolist(), strict=True)), remedy)


def raise_unlike(ranks: Ranks, codes: dict[str, int], remedy: str) -> None:
    """Raise an error that names the first tensor whose checksum differs, and the ranks."""
    of_ranks = ranks.gather_objects(codes, "naming what differs")
    for name in codes:
        first = of_ranks[0].get(name)
        differing = [rank for rank, codes in enumerate(of_ranks) if codes.get(name) != first]
        if differing:
            raise RuntimeError(f"{name} on ranks {differing} differs from rank 0's: {remedy}")


def raise_together(ranks: Ranks, error: Exception | None, doing: str) -> None:
    """Raise on all ranks the errors that some ranks have."""
    text = f"{doing} failed on rank {ranks.rank}: {type(error).__name__}: {error}"
    texts = ranks.gather_objects(None if error is None else text, f"{doing} failed")
    if error is not None:
        raise error
    raise RuntimeError(f"K-FAC stops on all ranks, since {'; '.join(filter(None, texts))}")


def raise_difference(
    ranks: Ranks, values: dict[str, Any], what: str, remedy: str = _REMEDY
) -> None:
    """Raise an error that names one value that differs, and the ranks."""
    first, *following = ranks.gather_objects(values, f"comparing {what}")
    for rank, other in enumerate(following, 1):
        # A surplus layer changes its group's sizes, too; its name tells more, so it comes first.
        for name in sorted({**first, **other}, key=lambda name: name.startswith("sizes ")):
            expected, actual = first.get(name, "absent"), other.get(name, "absent")
            if repr(expected) != repr(actual):  # as in checksums, where True is not 1
                why = f"{actual!r} on rank {rank}, {expected!r} on rank 0; {remedy}"
                if name.startswith(("layer ", "sizes ")):
                    why += "; where each rank has a part of a model, as pipeline stages are, give "
                    why += "process_group= the group of the ranks that hold the same stage"
                raise invalid_because(name, why)
        # The same values in another order, as when modules were registered in another order.
        for expected, actual in zip(first, other, strict=True):
            if expected != actual:
                why = f"{actual!r} stands on rank {rank} where rank 0 has {expected!r}; register "
                why += "modules and add parameters in one order on all ranks"
                raise invalid_because(what, why)
    raise invalid_because(what, "they differ among the ranks")


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """Return a checksum of each tensor's bits, on the first one's device, without waiting."""
    sums: list[Tensor] = []
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.dtype.itemsize])
        total = bits.sum(dtype=torch.int64)
        sums.append(total.to(sums[0].device) if sums else total)
    total = torch.stack(sums)
    # Fold all bits in: the low bits of float32 weights in float64 are zero.
    return (total ^ total >> 20 ^ total >> 40) & _BITS
