"""The gradient as the witness: the rows of all calls that were seen must make it.

A layer's rows are right and complete if Σ g aᵀ over its calls is the weight's gradient. What is
left of the gradient comes from a call that nobody saw, from rows that were read wrongly or twice,
or from a penalty. A layer is compared the first time that it gathers, again when a call comes that
is new in number or kind, and else ever more rarely: in the second pass, the fourth, the eighth.
"""

from __future__ import annotations

import functools
import math
import weakref
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
_WITHOUT_WAITING = "cpu", "cuda"  # devices whose results the host reads without waiting


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


class Hooks:
    """Hooks on weights, one a layer, which wait for the layer's whole gradient."""

    def __init__(self) -> None:
        self.handles: dict[Layer, Any] = {}

    def remove(self) -> None:
        for handle in self.handles.values():
            handle.remove()
        self.handles.clear()


class Witness:
    """Compares gradients with the calls that made them; results wait on the device."""

    def __init__(self, layers: list[Layer]) -> None:
        self.due = {layer for layer in layers if layer.weight is not None}
        self.hooks = Hooks()
        self.named: set[str] = set()  # layers that a warning named
        self._shares: dict[Layer, float] = {}  # of gradients that come from other sources
        self._again: set[Layer] = set()  # layers whose uses were looked for once more
        self._later: set[Layer] = set()  # layers to compare in the steps to come
        self._results: dict[Layer, tuple[Tensor, Any]] = {}  # with events of their arrival
        self._known: dict[Layer, set[tuple[type, int]]] = {}  # kinds of calls, numbered in a pass
        self._gathered: Counter[Layer] = Counter()  # passes in which the layer gathered
        self._calls: Counter[tuple[ForwardPass, Layer]] = Counter()  # since the last step
        self._seen: dict[tuple[Layer, int | None], _Seen | None] = {}  # None: kinds do not tell

    def watches(self, call: Layer, forward_pass: ForwardPass, weight: Tensor) -> bool:
        """Note a call that gathers; return whether its input is wanted whole, for a comparison."""
        layer, known = call.primary, self._known.setdefault(call.primary, set())
        self._calls[forward_pass, layer] += 1
        number = self._calls[forward_pass, layer]
        self._gathered[layer] += number == 1
        count = self._gathered[layer]
        again = number == 1 and not count & (count - 1) and weight.device.type in _WITHOUT_WAITING
        if again or (type(call), number) not in known:
            known.add((type(call), number))
            if layer not in self.due:
                self._later.add(layer)  # earlier calls of this pass were not kept whole
        # A rank's shard of a weight has no gradient of its own calls.
        if layer not in self.due or is_sharded(weight) or not weight.is_leaf:
            return False
        if layer not in self.hooks.handles:
            me = weakref.ref(self)
            hook = functools.partial(_compare, me, weakref.ref(layer))
            self.hooks.handles[layer] = weight.register_hook(hook)
        return True

    def add(
        self, call: Layer, weight: Tensor, x: Tensor | None, grad: Tensor, blocks: slice
    ) -> None:
        """Add the rows of a call to those of its backward pass."""
        layer = call.primary
        if layer not in self.hooks.handles:
            return
        key = layer, graph_task()
        if key not in self._seen:
            self._seen[key] = _Seen(layer, weight)
        seen = self._seen[key]
        if seen is not None and (x is None or not seen.add(call, x, grad, blocks)):
            self._seen[key] = None

    def compare(self, layer: Layer, grad: Tensor) -> None:
        """Compare a layer's whole gradient with its calls' in this backward pass."""
        key = layer, graph_task()
        if key not in self._seen:
            return  # another backward pass, through no call that gathers
        seen = self._seen.pop(key)
        self.hooks.handles.pop(layer).remove()
        self.due.discard(layer)
        if seen is None or grad.is_sparse:
            return
        whole = layer.weight_view(grad.detach()).flatten(2).to(seen.made.dtype)
        rest, size = (whole - seen.made).norm(), whole.norm()
        share = (rest / torch.maximum(size, seen.made.norm())).clamp_(max=1)
        self._results[layer] = _sent(torch.where(rest <= seen.scale, share * 0, share))

    def settle(self) -> set[Layer]:
        """Read what was compared since the last step; return layers to look for once more."""
        arrived = [x for x, (_, event) in self._results.items() if event is None or event.query()]
        again: set[Layer] = set()
        for layer in arrived:
            share = self._results.pop(layer)[0].item()
            if math.isnan(share):  # zero, or not finite: that tells nothing
                self.due.add(layer)
            elif share > OTHER and layer not in self._again:
                again.add(layer)
            else:
                self._shares[layer] = share
        self._again |= again
        self.due |= again | self._later
        self._later.clear()
        self._calls.clear()
        self._seen.clear()
        return again

    @property
    def strange(self) -> dict[str, float]:
        """Layers whose gradients have other sources, with these sources' share."""
        return {layer.name: share for layer, share in self._shares.items() if share > OTHER}

    @property
    def unnamed(self) -> set[str]:
        """Those of them that no warning has named."""
        return self.strange.keys() - self.named


def _compare(witness: Any, layer: Any, grad: Tensor) -> None:
    """Compare, as a hook on a weight; the hook keeps neither alive."""
    compared, of = witness(), layer()
    if compared is not None and of is not None:
        compared.compare(of, grad)


def _sent(share: Tensor) -> tuple[Tensor, Any]:
    """Return a share on its way to the host, and the event of its arrival, if there is one."""
    if share.device.type != "cuda":
        return share, None
    host = torch.empty(share.shape, dtype=share.dtype, device="cpu", pin_memory=True)
    host.copy_(share, non_blocking=True)
    return host, torch.cuda.current_stream(share.device).record_event()
