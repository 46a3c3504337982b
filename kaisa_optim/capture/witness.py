"""The gradient as the witness: the rows of all calls that were seen must make it.

A layer's rows are right and complete if Σ g aᵀ over its calls is the weight's gradient. What is
left of the gradient comes from a call that nobody saw, from rows that were read wrongly or twice,
or from a penalty. A layer is compared the first time that it gathers, again when a call comes that
is new in number or kind, and else ever more rarely: in the second pass, the fourth, the eighth.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..comm.sharding import is_sharded
from ..layers.base import COMPARE, Layer
from .passes import accumulates_into, graph_task

if TYPE_CHECKING:
    from .hooks import Call

OTHER = 0.01  # share of a gradient from other sources, above which a layer is named
# Rounding of Σ g aᵀ, as a share of the norms of g and a.
_ROUNDING, _ROUNDING_IN_HALF = 1e-4, 2e-2
_WEIGHT, _BIAS = 0, 1
_Pass = tuple[Layer, int | None]  # a layer in one backward pass


class _Sum:
    # The gradients of weight and bias that a layer's calls in one backward pass make so far.

    def __init__(self, layer: Layer, like: Tensor) -> None:
        matrix = layer.weight_view(like.detach()).flatten(2)
        dtype = torch.promote_types(matrix.dtype, torch.float32)
        parts = {_WEIGHT: matrix, _BIAS: matrix[..., 0]}
        self.made = {part: torch.zeros_like(x, dtype=dtype) for part, x in parts.items()}
        self.rounding = [matrix.new_zeros((), dtype=dtype) for _ in parts]

    def add(self, call: Call, x: Tensor, grad: Tensor) -> bool:
        # Return False if the call's kind does not tell, and the layer can't be compared.
        use = call.layer
        matrix = use.gradient(x, grad)
        if matrix is None:
            return False
        norm = x.float().norm() if x.is_floating_point() else max(1, x.numel()) ** 0.5
        terms = [(matrix.mT if use.crossed else matrix, norm)]
        if call.covers[_BIAS] and use.adds_bias:
            rows = use.output_rows(x, grad).flatten(1, 2)
            terms.append((rows.sum(1, dtype=self.made[_BIAS].dtype), rows.shape[1] ** 0.5))
        halves = {x.dtype, grad.dtype} & {torch.float16, torch.bfloat16}
        error = grad.float().norm() * (_ROUNDING_IN_HALF if halves else _ROUNDING)
        for part, (term, norm) in enumerate(terms):
            made = self.made[part]
            made[call.blocks] += term.to(made.device, made.dtype)
            self.rounding[part] += (error * norm).to(made.device)
        return True

    def share(self, part: int, whole: Tensor) -> Tensor:
        # Free what the calls make: at most one layer's sum may live beside the gradients.
        made = self.made.pop(part)
        whole = whole.reshape(made.shape).to(made.dtype)
        missing = (whole - made).norm()
        share = (missing / torch.maximum(whole.norm(), made.norm())).clamp_(max=1)
        # A weight's gradient of zero tells nothing (NaN), whatever the bias's tells.
        nothing = share * 0 if part == _WEIGHT else share.new_zeros(())
        return torch.where(missing <= self.rounding[part], nothing, share)


class FirstError(contextlib.AbstractContextManager[Any]):
    """Holds the first error of a block until the step asks for it."""

    # If a rank raised an error of its backward pass alone, the others would wait.
    error: Exception | None = None

    def __init__(self, *, holds: bool) -> None:
        self._holds = holds  # else the error is raised at once

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not self._holds or not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True


class Witness:
    """Compares gradients with the calls that made them; results wait on the device."""

    def __init__(self, layers: list[Layer], errors: FirstError) -> None:
        self.errors = errors  # of comparisons, for the step
        self.due = {layer for layer in layers if layer.weight is not None}
        # Hooks on weights and biases, which wait for whole gradients, and their layers.
        self.handles: list[Any] = []
        self._waiting: set[tuple[Layer, int]] = set()
        # Layers whose gradients have other sources, with their share; and those that were named.
        self.elsewhere: dict[str, float] = {}
        self.named: set[str] = set()
        self._again: set[Layer] = set()  # layers whose uses were looked for once more
        self.later: set[Layer] = set()  # layers to compare in the steps to come
        self._early: set[Layer] = set()  # layers whose calls a reentrant checkpoint recomputes
        self._known: dict[Layer, set[tuple[type, int]]] = {}  # kinds of calls, numbered in a pass
        self._gathered: Counter[Layer] = Counter()  # passes in which the layer gathered
        self._sums: dict[_Pass, _Sum | None] = {}  # None: a kind does not tell
        self._of_bias: dict[_Pass, Tensor] = {}  # whole gradients
        # Shares of weight and bias, with events of their arrival on the host.
        self.results: dict[Layer, list[tuple[Tensor, Any]]] = {}

    def arm(self, gathering: Collection[Layer]) -> None:
        """Write who is compared; gradients of layers that a checkpoint runs may come early."""
        for layer in self.due.intersection(gathering):
            layer.task = COMPARE
            if layer in self._early and layer.covers_now()[0] and not is_sharded(layer.weight):
                assert layer.weight is not None
                self._wait_for(layer, layer.weight)

    def watches(self, call: Call) -> bool:
        """Note a call that gathers; return whether its input is wanted whole, for a comparison."""
        layer, weight, calls = call.layer.primary, call.anchor, call.forward_pass.calls
        calls[layer] += 1
        number, known = calls[layer], self._known.setdefault(layer, set())
        kind = type(call.layer), number
        self._gathered[layer] += number == 1
        # In the passes 1, 2, 4, 8 and so on: a power of two is written with a single 1. On other
        # devices than these the host would wait for the result.
        rarely = number == 1 and self._gathered[layer].bit_count() == 1
        rarely = rarely and weight.device.type in ("cpu", "cuda")
        if call.task < COMPARE and (rarely or kind not in known):
            self.later.add(layer)  # not now: earlier calls of this pass were not kept whole
        known.add(kind)
        if call.task < COMPARE or not weight.is_leaf:
            return False
        if graph_task() is not None and (layer, _WEIGHT) not in self._waiting:
            # A reentrant checkpoint: other gradients of this pass may have come before.
            self._early.add(layer)
            self.later.add(layer)
        self._wait_for(layer, weight)
        return True

    def _wait_for(self, layer: Layer, weight: Tensor) -> None:
        for part, parameter in enumerate((weight, layer.bias)):
            if (layer, part) not in self._waiting and layer.covers_now()[part]:
                assert parameter is not None  # a shard's hook never runs
                # The hook hangs on the parameter: weak, or the model would keep both alive.
                hook = functools.partial(_compare, weakref.ref(self), weakref.ref(layer), part)
                self.handles.append(parameter.register_hook(hook))
                self._waiting.add((layer, part))

    def add(self, call: Call, x: Tensor | None, grad: Tensor) -> None:
        """Add the rows of a call to those of its backward pass."""
        layer = call.layer.primary
        if not call.covers[_WEIGHT] or (layer, _WEIGHT) not in self._waiting:
            return
        key = layer, graph_task()
        if key not in self._sums:
            self._sums[key] = _Sum(layer, call.anchor)
        total = self._sums[key]
        if total is not None and _WEIGHT not in total.made:  # the gradient came without these rows
            self.results.setdefault(layer, []).append((torch.ones(()), None))
        elif total is not None and (x is None or not total.add(call, x, grad)):
            self._sums[key] = None

    def compare(self, layer: Layer, part: int, grad: Tensor) -> None:
        """Compare a weight's or bias's whole gradient with its calls' in this backward pass."""
        # A pass without a call, as within a reentrant checkpoint, trains by other uses alone.
        key, parameter = (layer, graph_task()), layer.bias if part else layer.weight
        assert parameter is not None
        if grad.is_sparse or (key not in self._sums and not accumulates_into(parameter)):
            return  # another backward pass, which trains nothing
        if part == _BIAS:
            # A bias that a call of its own adds has its gradient before the rows come: it waits, as
            # a copy, since .grad may be this tensor and grow.
            self._of_bias[key] = layer.bias_view(grad.detach().clone())
            return
        self.due.discard(layer)
        self._take(key, part, layer.weight_view(grad.detach()))

    def _take(self, key: _Pass, part: int, whole: Tensor) -> None:
        if key not in self._sums:
            share = whole.norm() / whole.norm()  # of zero: that tells nothing
        elif (total := self._sums[key]) is None:
            return
        else:
            share = total.share(part, whole)
        arrives = None
        if share.device.type == "cuda":  # on its way to the host, without a wait
            host = torch.empty(share.shape, dtype=share.dtype, device="cpu", pin_memory=True)
            share = host.copy_(share, non_blocking=True)
            arrives = torch.cuda.current_stream(whole.device).record_event()
        self.results.setdefault(key[0], []).append((share, arrives))

    def settle(self) -> set[Layer]:
        """Read what was compared since the last step; return layers to look for once more."""
        for key, whole in self._of_bias.items():
            self._take(key, _BIAS, whole)
        self._of_bias.clear()
        again: set[Layer] = set()
        for layer, results in [*self.results.items()]:
            if not all([arrives is None or arrives.query() for _, arrives in results]):
                continue
            shares = [share.item() for share, _ in self.results.pop(layer)]
            if any(map(math.isnan, shares)):  # zero, or not finite: that tells nothing
                self.due.add(layer)
            elif max(shares) > OTHER and layer not in self._again:
                again.add(layer)
            elif max(shares) > OTHER:
                self.elsewhere[layer.name] = max(shares)
            else:
                self.elsewhere.pop(layer.name, None)
        self._again |= again
        self.due |= again | self.later
        self.later.clear()
        while self.handles:  # the layer may not gather in the next step
            self.handles.pop().remove()
        self._waiting.clear()
        self._sums.clear()
        return again


def _compare(witness: Any, layer: Any, part: int, grad: Tensor) -> None:
    compared, of = witness(), layer()
    if compared is not None and of is not None:
        with compared.errors:
            compared.compare(of, part, grad)
