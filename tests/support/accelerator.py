"""A device that is none: its tensors lie in the host's memory, and only say that they do not.

What would not run on a GPU does not run here: an operator over tensors of both devices raises. What
would make the host wait for a GPU is noted, of operators that a list here names and of copies. The
numbers are the CPU's own. To import it is to register it with torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

NAME = "pretended"
backend_registration._setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)

_aten = torch.ops.aten
# On CUDA these look at a device's numbers, or at whether a solver went well.
_LOOKING = {
    *(_aten._local_scalar_dense, _aten.is_nonzero, _aten.equal, _aten.nonzero, _aten.masked_select),
    *(_aten.repeat_interleave, _aten.multinomial, _aten.bincount, _aten._unique2),
    *(_aten.unique_consecutive, _aten.cholesky_inverse, _aten.linalg_eig, _aten.linalg_lstsq),
    *(_aten._linalg_check_errors, _aten._linalg_eigh, _aten._linalg_svd),
}
_COPYING = {_aten.copy_, _aten._foreach_copy_}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class _There(Tensor):
    """A tensor of the device, around the one with its numbers."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> _There:
        place = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset()}
        how = {"dtype": numbers.dtype, "device": DEVICE}
        return torch.Tensor._make_wrapper_subclass(cls, numbers.size(), **place, **how)

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"_There({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def numbers_of(tensor: Tensor) -> Tensor:
    """On the host, without a wait that would be noted."""
    return tensor.numbers if isinstance(tensor, _There) else tensor


class _Waits(TorchDispatchMode):
    """While it is on, tensors can be made on the device; keeps where the host waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        why = _wait(func, args, kwargs or {})
        if why:
            frames = [f for f in traceback.extract_stack()[:-1] if "kaisa_optim/" in f.filename]
            places = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in frames[-3:]]
            self.found.append(f"{func}, {why}, at {' > '.join(places)}")
        return _run(func, args, kwargs or {})

    def taken(self) -> list[str]:
        """What was found since the last time."""
        found, self.found = self.found, []
        return found


class Launches(TorchDispatchMode):
    """Counts the calls that a GPU would have work of; views have none, nor what is left empty."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [r.alias_info for r in func._schema.returns]
        looks = any(alias is not None and not alias.is_write for alias in aliases)
        result = func(*args, **(kwargs or {}))
        makes = args if result is None else result
        works = not looks and "empty" not in func.__name__
        self.count += works and any(isinstance(x, _There) for x in _tensors(makes))
        return result


@contextmanager
def device() -> Iterator[_Waits]:
    former = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor copies where it can be seen
    try:
        with _Waits() as waits:
            yield waits
    finally:
        torch._C._set_only_lift_cpu_tensors(former)


def _tensors(tree: Any) -> list[Tensor]:
    """Those in lists, tuples and dicts; torch's own way took half of all tests' time."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [x for part in tree for x in _tensors(part)]


def _changed(tree: Any, kind: type[Tensor], change: Callable[[Any], Tensor]) -> Any:
    """The same with other tensors for those of this kind."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, list | tuple):
        return type(tree)([_changed(part, kind, change) for part in tree])
    if isinstance(tree, dict):
        return {key: _changed(part, kind, change) for key, part in tree.items()}
    return tree


def _places(args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor], str]:
    """Tensors there, tensors here, and where the results go."""
    tensors = _tensors((args, kwargs))
    there = [x for x in tensors if isinstance(x, _There)]
    here = [x for x in tensors if not isinstance(x, _There)]
    asked = kwargs.get("device")
    where = NAME if there else "cpu"
    return there, here, where if asked is None else torch.device(asked).type


def _wait(func: Any, args: Any, kwargs: Any) -> str | None:
    """Why the host would wait for a GPU, if it would."""
    there, here, where = _places(args, kwargs)
    packet = func.overloadpacket
    if packet is _aten._to_copy and where != (NAME if there else "cpu"):
        # To the host it is there only after a wait, whoever takes care of that.
        overlaps = kwargs.get("non_blocking") and where == NAME
        return None if overlaps else f"a copy to {where}"
    if packet in _COPYING and there and here:
        overlaps = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        onto = _tensors(args[0])[0]
        return None if overlaps and isinstance(onto, _There) else "a copy between devices"
    if not there:
        return None
    if packet in _INDEXING:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "indices from a mask"
        on_host = any(not isinstance(index, _There) for index in indices)
        return "indices on the host" if on_host else None
    return "a look at numbers" if packet in _LOOKING else None


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    there, here, where = _places(args, kwargs)
    packet = func.overloadpacket
    if packet in _INDEXING:  # indices may come from the host, but not go to it
        there, here, _ = _places((args[0], *args[2:], there), {})
    crosses = packet is _aten._to_copy or packet in _COPYING
    # As on CUDA, one number of the host's may be anywhere.
    if there and not crosses and any(x.dim() > 0 for x in here):
        raise RuntimeError(
            f"{func}: tensors {[tuple(x.shape) for x in here]} on the CPU, others on {DEVICE}"
        )
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = func(*_changed(args, _There, numbers_of), **_changed(kwargs, _There, numbers_of))
    if where != NAME:
        return result
    result = _changed(result, Tensor, _There)
    return return_and_correct_aliasing(func, args, kwargs, result) if there else result
