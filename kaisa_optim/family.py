"""The optimizer family, and K-FAC classes over other bases."""

from __future__ import annotations

import copyreg
import inspect
import textwrap
from typing import Any

import torch
from torch.optim import Optimizer

from .arguments import ZERO_REDUNDANCY
from .errors import invalid, invalid_because
from .lamb import LAMB
from .optimizer import KFACMixin
from .options import SECTIONS

# K-FAC needs one gradient a step, dense, and makes it orthogonal itself.
_REFUSED = {
    "LBFGS": "it evaluates the closure several times a step and approximates the curvature itself",
    "SparseAdam": "it takes sparse gradients only",
    "Muon": "steps of KFACAdam are orthogonalized already; use KFACAdam",
}

_FAMILY: dict[type[Optimizer], type[KFACMixin]] = {}


def _sign(cls: type[KFACMixin]) -> type[KFACMixin]:
    """Give a class its signature, with K-FAC's options by keyword, and their documentation."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(cls._base.__init__).parameters.values()
    _, *first = [p for p in parameters if p.kind not in variadic]  # without self
    annotation = "nn.Module | Iterable[Any] | None"
    first[:1] = [p.replace(annotation=annotation) for p in first[:1]]  # a base of *args has none
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter("model", keyword, default=None, annotation="nn.Module | None")]
    lines = ["K-FAC's options; those marked (s) may be callables of the step."]
    for section, options in SECTIONS.items():
        lines += ["", f"{section}:"]
        for x in options:
            added.append(
                inspect.Parameter(x.name, keyword, default=x.default, annotation=x.annotation)
            )
            text = f"{x.name}: {x.help}{' (s)' if x.schedulable else ''}"
            lines += textwrap.wrap(text, 92, initial_indent="    ", subsequent_indent=" " * 8)
    cls.__signature__ = inspect.Signature([*first, *added])  # type: ignore[attr-defined]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", *lines])
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
        if issubclass(base, getattr(torch.optim, name, ())):  # torch 2.8 has no Muon
            raise invalid_because("base", f"{base.__name__} can't take K-FAC: {reason}")
    if any(kind.__module__ == ZERO_REDUNDANCY for kind in base.__mro__):
        why = (
            f"{base.__name__} spreads states over ranks and would lose K-FAC's in saves; give "
            'the class that it wraps, and for Adam, AdamW or LAMB let assignment="layer-wise" '
            "spread moments over ranks as ZeRO 1 does"
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

    Each layer steps along K-FAC's direction, until the loss has fallen, to first order, as by SGD's
    step.
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
class KFACLAMB(KFACMixin, LAMB):
    """LAMB with K-FAC inside: ``KFACLAMB(model, lr=1e-3, ...)``.

    K-FAC's directions are as long as :class:`KFACAdam`'s; LAMB clips gradients, adds its weight
    decay and multiplies by its trust ratio.
    """

    _base = LAMB
