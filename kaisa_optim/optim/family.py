"""The optimizer family, and K-FAC classes over other bases."""

from __future__ import annotations

import copyreg
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import invalid, invalid_because
from . import arguments, notices
from .lamb import LAMB
from .mixin import KFACMixin
from .muon import Muon

# K-FAC needs one gradient a step, dense: these bases evaluate several, or take sparse ones.
_REFUSED = {
    "LBFGS": "it evaluates the closure several times a step and approximates the curvature itself",
    "SparseAdam": "it takes sparse gradients only",
}

_FAMILY: dict[type[Optimizer], type[KFACMixin]] = {}


def _sign(cls: type[KFACMixin]) -> type[KFACMixin]:
    """Give a class its signature and the documentation of its options."""
    parameters = list(arguments.signature(cls._base).parameters.values())[1:]
    cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    text = inspect.cleandoc(cls.__doc__ or "")
    cls.__doc__ = f"{text}\n\n{arguments.documentation(cls._base)}"
    _FAMILY[cls._base] = cls
    return cls


def with_kfac(base: type[Optimizer]) -> type[Any]:
    """Return a K-FAC class over any dense optimizer class: ``with_kfac(torch.optim.RAdam)``.

    Equal calls give the same class; ``with_kfac(torch.optim.SGD)`` is :class:`KFACSGD`.
    """
    if isinstance(base, Optimizer):
        name = type(base).__name__
        why = f"this is an optimizer already; give its class: with_kfac({name})(model, ...)"
        raise invalid_because("base", why)
    if not (isinstance(base, type) and issubclass(base, Optimizer)):
        raise invalid("base", base, "it must be a subclass of torch.optim.Optimizer")
    if issubclass(base, KFACMixin):
        raise invalid_because("base", f"{base.__name__} has K-FAC inside already; use it as it is")
    for name, reason in _REFUSED.items():
        if issubclass(base, getattr(torch.optim, name)):
            raise invalid_because("base", f"{base.__name__} can't take K-FAC: {reason}")
    if any(kind.__module__ == notices.ZERO_REDUNDANCY for kind in base.__mro__):
        why = (
            f"{base.__name__} spreads states over ranks and would lose K-FAC's in saves; give "
            'the class that it wraps, and for Adam, AdamW or LAMB let assignment="layer-wise" '
            "spread moments over ranks as ZeRO 1 does"
        )
        raise invalid_because("base", why)
    if issubclass(base, Muon) and base is not Muon:
        why = (
            f"KFACMuon replaces Muon's step, and {base.__name__}, a subclass of Muon, would lose "
            "that step; subclass KFACMuon instead"
        )
        raise invalid_because("base", why)
    if base not in _FAMILY:
        members = {"_base": base, "__reduce__": _reduce, "__doc__": f"{base.__name__} with K-FAC."}
        _sign(type(f"KFAC{base.__name__}", (KFACMixin, base), members))
    return _FAMILY[base]


def _reduce(self: KFACMixin) -> Any:
    """Pickle an object so that a class made at run time is found again through its base."""
    cls = type(self)
    if _FAMILY.get(cls._base) is cls:
        return _blank, (cls._base,), self.__getstate__()
    return copyreg.__newobj__, (cls,), self.__getstate__()  # type: ignore[attr-defined]


def _blank(base: type[Optimizer]) -> KFACMixin:
    cls: type[KFACMixin] = with_kfac(base)
    return cls.__new__(cls)


@_sign
class KFACSGD(KFACMixin, torch.optim.SGD):
    """torch.optim.SGD with K-FAC inside: ``KFACSGD(model, lr=0.1, momentum=0.9, ...)``.

    All layers step along K-FAC's directions with one scale, until the loss has fallen, to first
    order, as by SGD's step.
    """

    _base = torch.optim.SGD


@_sign
class KFACAdam(KFACMixin, torch.optim.Adam):
    """torch.optim.Adam with K-FAC inside: ``KFACAdam(model, lr=1e-3, ...)``.

    Each layer steps along K-FAC's direction, until the loss has fallen, to first order, as by
    Adam's step.
    """

    _base = torch.optim.Adam


@_sign
class KFACMuon(KFACMixin, Muon):
    """:class:`Muon` with K-FAC inside: steps along K-FAC's directions are as long as Muon's.

    ``KFACMuon([{"params": inner}, {"params": ends, "use_muon": False, "lr": 3e-3}], lr=0.02,
    model=model)``. The arguments are Muon's, then K-FAC's without those of the papers' methods.

    AdamW takes embeddings, norms, parameters of fewer than two dimensions, and groups with
    ``use_muon=False``; matrices that K-FAC does not cover take Muon's own step.
    """

    _base = Muon

    def _of_its_own(self, saved: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
        """Return the group's ``use_muon``, from which coverage follows, and its damping.

        Another class's damping is no share of G's eigenvalues.
        """
        kept = {"use_muon": here["use_muon"]}
        if saved.get("use_muon", here["use_muon"]) is not here["use_muon"]:
            warnings.warn(
                f"the checkpoint has use_muon={saved['use_muon']!r} for a parameter group that was "
                f"built with {here['use_muon']!r}, and the group keeps {here['use_muon']!r}",
                stacklevel=4,
            )
        return kept if "ns_steps" in saved else {**kept, "damping": here["damping"]}

    def takes_muon(self, group: dict[str, Any], p: Tensor) -> bool:
        return super().takes_muon(group, p) and p not in self.preconditioner.registry.excluded


@_sign
class KFACLAMB(KFACMixin, LAMB):
    """LAMB with K-FAC inside: ``KFACLAMB(model, lr=1e-3, ...)``.

    K-FAC's directions are as long as :class:`KFACAdam`'s; LAMB clips gradients, adds its weight
    decay and multiplies by its trust ratio.
    """

    _base = LAMB
