"""Which parameters of a model K-FAC covers, and why not the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from .capture.hooks import refuse_data_parallel
from .comm.sharding import cut_otherwise, is_sharded
from .errors import invalid_because
from .layers import (
    SCALES,
    Conv1DLayer,
    EmbeddingLayer,
    Layer,
    LinearLayer,
    MatrixLayer,
    check_sizes,
    declared,
    kind_of,
)
from .plan.facts import widest

_CUT = "tensor parallelism cuts it, or another sharding than fully_shard over one mesh dimension"
_PAPERS_ONLY = 'normalization="kaisa" knows Linear and Conv2d with one group only'
BY_OPTION = {_PAPERS_ONLY}  # reasons that follow from what the user has chosen
_MATRICES = Conv1DLayer, EmbeddingLayer, LinearLayer, MatrixLayer  # kinds that may share a weight

Candidates = list[tuple[Layer, list[Tensor]]]  # a layer, and its module's trained parameters
Reasons = dict[Tensor | None, str]  # why a parameter is left to the base


@dataclass
class Coverage:
    """The covered layers of a model, and the reasons why other parameters are left out."""

    layers: dict[str, Layer] = field(default_factory=dict)
    uncovered: dict[str, str] = field(default_factory=dict)  # parameter: reason
    skipped: dict[str, str] = field(default_factory=dict)  # parameter: the pattern that skips it
    unmatched: list[str] = field(default_factory=list)  # patterns that match no module


class Left(NamedTuple):
    """A parameter that K-FAC leaves to the base optimizer."""

    size: int
    reason: str


@dataclass(frozen=True)
class CoverageReport:
    """The number of trained parameters that K-FAC covers; the parameters that are left, and why."""

    covered: int
    total: int
    left: dict[str, Left]  # the largest first
    skipped: dict[str, str]  # left by an option, or by the kind of optimizer, and why
    # For each layer that a warning named: the share of its gradient that its rows do not make.
    elsewhere: dict[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.covered / max(1, self.total)

    @property
    def amount(self) -> str:
        # Never say 100 % while a parameter is left.
        percent = 100 * self.share if self.covered == self.total else min(99.9, 100 * self.share)
        units = (" G", 10**9), (" M", 10**6), (" k", 10**3)
        rounded = [f"{self.total / n:.3g}{unit}" for unit, n in units if self.total >= n]
        count = rounded[0] if rounded else str(self.total)
        return f"K-FAC covers {percent:.3g} % of {count} parameters"

    def __str__(self) -> str:
        names = [*self.left, *self.skipped]
        if not names:
            return self.amount
        shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
        see = "print(optimizer.preconditioner)"
        return f"{self.amount}; the base optimizer updates the rest ({shown}): {see}"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own module from inside DDP and torch.compile."""
    while True:
        is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        inner = getattr(model, "module" if is_ddp else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def cover(
    model: nn.Module,
    trained: Collection[Tensor],
    *,
    skip_layers: tuple[str, ...],
    max_factor_size: float | None,
    papers_only: bool,
) -> Coverage:
    """Match the model's modules with the layer kinds, for the parameters in ``trained``."""
    names = _checked_names(model, trained)
    model, found, candidates = unwrapped(model), Coverage(), Candidates()
    skipped_by = _skipped_modules(model, skip_layers, found.unmatched)
    reasons: Reasons = {}
    claimed: set[nn.Module] = set()  # parts of a covered module
    for name, module in model.named_modules():
        if module in claimed:
            continue
        trains = [p for p in module._parameters.values() if p in trained]
        if module in skipped_by:
            found.skipped.update((names[p][0], skipped_by[module]) for p in trains)
            reasons.update((p, "") for p in trains)
            continue
        kind = kind_of(module)
        reason = _why_not(module, kind)
        if kind is not None and (reason is None or kind.intercepts()):
            parts = [part for part in module.modules() if part is not module]
            claimed.update(parts)
            if kind.intercepts():  # such a module calls no part as a module
                trains += [p for x in parts for p in x._parameters.values() if p in trained]
        if kind is not None and reason is None:
            candidates += [(layer, trains) for layer in kind.layers_of(name, module)]
            continue
        reasons.update((p, reason or "") for p in trains)
        if kind is None and trains:
            candidates += [(layer, trains) for layer in _watched(name, module, reasons)]
    reasons = {**dict.fromkeys(cut_otherwise(model), _CUT), **reasons}
    tied = set() if papers_only else _tie(candidates, names, reasons)
    for layer, trains in candidates:
        if papers_only and (layer.by_use or not layer.in_papers):
            reasons |= {p: _PAPERS_ONLY for p in trains if p not in reasons}
        elif layer.weight in tied or _claims(layer, trains, names, reasons):
            has_bias = layer.bias is not None and layer.bias in trained
            layer.trained = (layer.weight in trained, has_bias)
            if any(layer.trained):
                check_sizes(layer)
                layer.wide = max_factor_size or widest(layer.inputs, layer.outputs)
                layer.cover(layer.covers_now())
                found.layers[layer.name] = layer
    _leave_out_biases_in_part(found, reasons)
    covered = {p for x in found.layers.values() for p in (x.weight, x.bias)}
    left = [p for p in trained if p not in covered and reasons.get(p) != ""]
    unused = "a parameter that its layer kind does not use"
    found.uncovered = {names[p][0]: reasons.get(p, unused) for p in left}
    return found


def _checked_names(model: nn.Module, trained: Collection[Tensor]) -> dict[Tensor, list[str]]:
    """Return every name under which a parameter is registered, each module counted once.

    Refuse wrappers under which no layer has a matrix, and trained parameters that are not the
    model's, or have no shape yet.
    """
    for module in model.modules():
        refuse_data_parallel(module)
        if type(module).__name__ == "FullyShardedDataParallel":
            why = (
                "FullyShardedDataParallel flattens parameters, so that no layer has a weight "
                "matrix left; use torch.distributed.fsdp.fully_shard, its successor, or "
                "DistributedDataParallel"
            )
            raise invalid_because("model", why)
    names: dict[Tensor, list[str]] = {}
    for prefix, module in unwrapped(model).named_modules():
        for name, p in module._parameters.items():
            if p is not None:
                names.setdefault(p, []).append(f"{prefix}.{name}" if prefix else name)
    for p in trained:
        if p not in names:
            why = (
                f"a parameter of shape {tuple(p.shape)} does not belong to the model; pass the "
                "model whose parameters you optimize as model="
            )
            raise invalid_because("params", why)
        if isinstance(p, UninitializedParameter):
            why = (
                f"{names[p][0]} has no shape yet; run the lazy model once before you build the "
                "optimizer"
            )
            raise invalid_because("params", why)
    return names


def _tie(layers: Candidates, names: dict[Tensor, list[str]], reasons: Reasons) -> set[Tensor]:
    """Make one layer of each table or matrix that several modules share; return these weights.

    The layer takes the rows of all uses. The base optimizer steps the biases of these modules.
    """
    tied: set[Tensor] = set()
    users_of: dict[Tensor, list[Layer]] = {}
    for layer, _ in layers:
        if layer.weight is not None and len(names[layer.weight]) > 1:
            users_of.setdefault(layer.weight, []).append(layer)
    for weight, users in users_of.items():
        plain = all(type(layer) in _MATRICES and layer.blocks == 1 for layer in users)
        if not plain or len(users) != len(names[weight]):  # some module has no layer
            continue
        # A table before a matrix: its factor is a diagonal on the side of the vocabulary.
        primary = next((layer for layer in users if layer.diagonal_input), users[0])
        tied.add(weight)
        primary.tied = len({layer.input_dim for layer in users}) > 1
        primary.watched_in = tuple(dict.fromkeys(layer.module for layer in users))
        for layer in users:
            if layer.bias is not None:
                reasons[layer.bias], layer.bias = SCALES, None
        layers[:] = [x for x in layers if x[0] is primary or x[0] not in users]
    return tied


def _watched(name: str, module: nn.Module, reasons: Reasons) -> list[Layer]:
    """Return layers for a module's parameters; their use will be watched."""
    kind = kind_of(module, overridden=True)
    layers: list[Layer] = []
    if kind is None:
        layers, why = declared(name, module)
        reasons.update(why.items())
    elif not kind.intercepts() and kind.unsupported(module) is None:
        layers = kind.layers_of(name, module)
    for layer in layers:
        if layer.weight is not None:
            layer.watched_in, layer.by_use = (module,), True
            reasons.pop(layer.weight, None)
            reasons.pop(layer.bias, None)
    return layers


def _claims(
    layer: Layer, trains: list[Tensor], names: dict[Tensor, list[str]], reasons: Reasons
) -> bool:
    """Return whether a layer's weight is its own; note why other parameters are left out."""
    for parameter in (layer.weight, layer.bias):
        if parameter is not None and len(names[parameter]) > 1:
            reasons[parameter] = "shared by " + " and ".join(names[parameter])
    if layer.weight is None or layer.weight in reasons:
        # A weight that is computed, or used elsewhere too, is no Kronecker product here.
        reason = f"{type(layer.module).__name__} whose weight is no parameter of its own"
        inner = [p for part in layer.module.modules() for p in part._parameters.values()]
        unread = inner if layer.weight is None else trains
        reasons.update((p, reason) for p in unread if p not in reasons)
        return False
    if layer.bias in reasons:
        layer.bias = None
    return True


def _leave_out_biases_in_part(found: Coverage, reasons: Reasons) -> None:
    """Uncover a bias if some of its rows belong to no layer: its step would lack these rows."""
    rows: Counter[Tensor] = Counter()
    for layer in found.layers.values():
        if layer.bias is not None:
            rows[layer.bias] += layer.blocks * layer.outputs
    for name, layer in list(found.layers.items()):
        if layer.bias is not None and rows[layer.bias] < layer.bias.numel():
            reasons[layer.bias] = "a bias that projections share, one of which is not covered"
            layer.bias = None
            layer.trained = (layer.trained[0], False)
            layer.cover(layer.covers_now())
            if not any(layer.trained):
                del found.layers[name]


def _why_not(module: nn.Module, kind: type[Layer] | None) -> str | None:
    title = type(module).__name__
    if kind is None and kind_of(module, overridden=True) is not None:
        return f"{title} overrides a covered forward"
    if kind is None and next(module.children(), None) is not None:
        return f"a parameter of {title}'s own, outside of any layer"
    if kind is None:
        return f"no layer kind is registered for {title}"
    if any(p is not None and not p.is_floating_point() for p in module._parameters.values()):
        return f"{title} is not real-valued"
    if kind.intercepts() and any(is_sharded(p) for p in module._parameters.values()):
        return f"{title}: its weights are sharded, and its projections can't be told apart then"
    why = kind.unsupported(module)
    return None if why is None else f"{title}: {why}"


def _skipped_modules(
    model: nn.Module, patterns: tuple[str, ...], unmatched: list[str]
) -> dict[nn.Module, str]:
    """Return the modules whose name or class matches a pattern, each with all that it contains."""
    skipped: dict[nn.Module, str] = {}
    for pattern in patterns:
        matches = [
            module
            for name, module in model.named_modules()
            if re.search(pattern, name) or re.search(pattern, type(module).__name__)
        ]
        if not matches:
            unmatched.append(pattern)
        for module in matches:
            skipped.update((child, pattern) for child in module.modules())
    return skipped
