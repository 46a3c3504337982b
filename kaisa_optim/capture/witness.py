"""The gradient as the witness: the rows of all calls that were seen must make it.

A layer's rows are right and complete if Σ g aᵀ over its calls is the weight's gradient. What is
left of the gradient comes from a call that nobody saw, from rows that were read wrongly or twice,
or from a penalty. Each pattern of calls is compared once: the first time that a layer gathers, and
again when its calls change in number or kind.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ..comm.sharding import is_sharded
from ..layers import Layer
from .forward_pass import ForwardPass, graph_task

OTHER = 0.01  # share of a gradient from other sources, above which a layer is named
# Rounding of Σ g aᵀ, as a share of the norms of g and a.
_ROUNDING, _ROUNDING_IN_HALF = 1e-4, 2e-2


class _Seen:
    """The calls of one layer that one backward pass has reached so far."""

    def __init__(self, layer: Layer, like: Tensor) -> None:
        matrix = layer.weight_view(like).flatten(2)
        self.made = torch.zeros_like(matrix, dtype=torch.promote_types(like.dtype, torch.float32))
        self.scale = self.made.new_zeros(())

    def add(self, call: Layer, x: Tensor, grad: Tensor, blocks: slice) -> bool:
        """Add a call's Σ g aᵀ; return False if its kind does not tell."""
        part = call.gradient(x, grad)
        if part is None:
            return False
        part = part.mT if call.crossed else part
        self.made[blocks] += part.to(self.made.device, self.made.dtype)
        halves = {x.dtype, grad.dtype} & {torch.float16, torch.bfloat16}
        norm = x.float().norm() if x.is_floating_point() else max(1, x.numel()) ** 0.5
        rounding = _ROUNDING_IN_HALF if halves else _ROUNDING
        self.scale += (rounding * norm * grad.float().norm()).to(self.scale.device)
        return True


class Witness:
    """Compares gradients with the calls that made them; results wait on the device."""

    def __init__(self, layers: list[Layer]) -> None:
        self.due = {layer for layer in layers if layer.weight is not None}
        self.shares: dict[Layer, float] = {}  # of gradients that come from other sources
        self._later: set[Layer] = set()  # layers to compare in the steps to come
        self._found: dict[Layer, Tensor] = {}
        self._known: dict[Layer, set[tuple[type, int]]] = {}  # kinds of calls, numbered in a pass
        self._calls: Counter[tuple[ForwardPass, Layer]] = Counter()
        self._hooks: dict[Layer, Any] = {}
        self._seen: dict[tuple[Layer, int | None], _Seen | None] = {}  # None: kinds do not tell

    def watches(self, call: Layer, forward_pass: ForwardPass, weight: Tensor) -> bool:
        """Note a call that gathers; return whether its input is wanted whole, for a comparison."""
        layer, known = call.primary, self._known.setdefault(call.primary, set())
        self._calls[forward_pass, layer] += 1
        kind = type(call), self._calls[forward_pass, layer]
        if kind not in known:
            known.add(kind)
            if layer not in self.due:
                self._later.add(layer)  # earlier calls of this pass were not kept whole
        # A rank's shard of a weight has no gradient of its own calls.
        if layer not in self.due or is_sharded(weight) or not weight.is_leaf:
            return False
        if layer not in self._hooks:
            self._hooks[layer] = weight.register_hook(lambda grad: self._compare(layer, grad))
        return True

    def add(
        self, call: Layer, weight: Tensor, x: Tensor | None, grad: Tensor, blocks: slice
    ) -> None:
        """Add the rows of a call to those of its backward pass."""
        layer = call.primary
        if layer not in self._hooks:
            return
        key = layer, graph_task()
        if key not in self._seen:
            self._seen[key] = _Seen(layer, weight)
        seen = self._seen[key]
        if seen is not None and (x is None or not seen.add(call, x, grad, blocks)):
            self._seen[key] = None

    def _compare(self, layer: Layer, grad: Tensor) -> None:
        key = layer, graph_task()
        if key not in self._seen:
            return  # another backward pass, through no call that gathers
        seen = self._seen.pop(key)
        self._hooks.pop(layer).remove()
        self.due.discard(layer)
        if seen is None or grad.is_sparse:
            return
        whole = layer.weight_view(grad.detach()).flatten(2).to(seen.made.dtype)
        rest, size = (whole - seen.made).norm(), whole.norm()
        share = (rest / torch.maximum(size, seen.made.norm())).clamp_(max=1)
        self._found[layer] = torch.where(rest > seen.scale, share, torch.zeros_like(share))

    def settle(self) -> bool:
        """Read what was compared since the last step; return whether a layer has to be named."""
        self.due |= self._later
        self._later.clear()
        self._calls.clear()
        self._seen.clear()
        found, self._found = self._found, {}
        before = set(self.strange)
        for layer, share in zip(found, _numbers(found), strict=True):
            self.shares[layer] = share
        return not before.issuperset(self.strange)

    @property
    def strange(self) -> dict[str, float]:
        """Layers whose gradients have other sources, with these sources' share."""
        return {layer.name: share for layer, share in self.shares.items() if share > OTHER}


def _numbers(found: dict[Layer, Tensor]) -> list[float]:
    """Return the shares; the host waits here once for each device."""
    on_host = [share.double().cpu() for share in found.values()]
    return torch.stack(on_host).nan_to_num_(nan=0.0).tolist() if on_host else []
