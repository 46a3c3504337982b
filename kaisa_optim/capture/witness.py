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


class _Seen:
    """The calls of one layer that one backward pass has reached so far.

    They make the gradients of its weight (0) and of its bias (1), each with some rounding.
    """

    def __init__(self, layer: Layer, like: Tensor) -> None:
        matrix = layer.weight_view(like.detach()).flatten(2)
        dtype = torch.promote_types(matrix.dtype, torch.float32)
        parts = {0: matrix, 1: matrix[..., 0]}
        self.made = {part: torch.zeros_like(x, dtype=dtype) for part, x in parts.items()}
        self.rounding = [matrix.new_zeros((), dtype=dtype) for _ in (0, 1)]

    def add(self, call: Call, x: Tensor, grad: Tensor) -> bool:
        """Add a call's Σ g aᵀ; return False if its kind does not tell."""
        use = call.layer
        matrix = use.gradient(x, grad)
        if matrix is None:
            return False
        norm = x.float().norm() if x.is_floating_point() else max(1, x.numel()) ** 0.5
        terms = [(matrix.mT if use.crossed else matrix, norm)]
        if call.covers[1] and use.adds_bias:
            rows = use.output_rows(x, grad).flatten(1, 2)
            terms.append((rows.sum(1, dtype=self.made[1].dtype), rows.shape[1] ** 0.5))
        halves = {x.dtype, grad.dtype} & {torch.float16, torch.bfloat16}
        error = grad.float().norm() * (_ROUNDING_IN_HALF if halves else _ROUNDING)
        for part, (term, norm) in enumerate(terms):
            made = self.made[part]
            made[call.blocks] += term.to(made.device, made.dtype)
            self.rounding[part] += (error * norm).to(made.device)
        return True

    def share(self, part: int, whole: Tensor) -> Tensor:
        """Return the share of a whole gradient that the calls do not make; free what they make."""
        made = self.made.pop(part)
        whole = whole.reshape(made.shape).to(made.dtype)
        rest = (whole - made).norm()
        share = (rest / torch.maximum(whole.norm(), made.norm())).clamp_(max=1)
        # A weight's gradient of zero tells nothing (NaN), whatever the bias's tells.
        none = share.new_zeros(()) if part else share * 0
        return torch.where(rest <= self.rounding[part], none, share)


class FirstError:
    """Holds the first error of a block until the step asks for it.

    If a rank raised an error of its backward pass alone, the others would wait.
    """

    error: Exception | None = None

    def __init__(self, *, holds: bool) -> None:
        self._holds = holds  # else the error is raised at once

    def __enter__(self) -> None:
        return None

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
        # Hooks on weights (0) and biases (1), which wait for whole gradients, and their layers.
        self.handles: list[Any] = []
        self._waiting: set[tuple[Layer, int]] = set()
        self.named: set[str] = set()  # layers that a warning named
        self.waits = False  # something was noted since the last step
        # Layers whose gradients have other sources, with these sources' share.
        self.elsewhere: dict[str, float] = {}
        self._again: set[Layer] = set()  # layers whose uses were looked for once more
        self._later: set[Layer] = set()  # layers to compare in the steps to come
        self._early: set[Layer] = set()  # layers whose calls a reentrant checkpoint recomputes
        # Of weight and bias, with events of their arrival.
        self._results: dict[Layer, list[tuple[Tensor, Any]]] = {}
        self._known: dict[Layer, set[tuple[type, int]]] = {}  # kinds of calls, numbered in a pass
        self._gathered: Counter[Layer] = Counter()  # passes in which the layer gathered
        # By layer and backward pass: calls (None: kinds do not tell), and gradients of biases.
        self._seen: dict[tuple[Layer, int | None], _Seen | None] = {}
        self._of_bias: dict[tuple[Layer, int | None], Tensor] = {}

    def watches(self, call: Call) -> bool:
        """Note a call that gathers; return whether its input is wanted whole, for a comparison."""
        layer, weight = call.layer.primary, call.anchor
        call.forward_pass.calls[layer] += 1
        number = call.forward_pass.calls[layer]
        kind, known = (type(call.layer), number), self._known.setdefault(layer, set())
        self._gathered[layer] += number == 1
        count = self._gathered[layer]
        # The host would wait for other devices' results.
        told = weight.device.type in ("cpu", "cuda")
        again = number == 1 and not count & (count - 1) and told
        if call.task < COMPARE and (again or kind not in known):
            self._later.add(layer)  # earlier calls of this pass were not kept whole
            self.waits = True
        known.add(kind)
        if call.task < COMPARE or not weight.is_leaf:
            return False
        if graph_task() is not None and (layer, 0) not in self._waiting:
            # A reentrant checkpoint: other gradients of this pass may have come before.
            self._early.add(layer)
            self._later.add(layer)
        self._wait_for(layer, weight)
        return True

    def arm(self, gathering: Collection[Layer]) -> None:
        """Write who is compared; gradients of layers that a checkpoint runs may come early."""
        for layer in self.due.intersection(gathering):
            layer.task = COMPARE
            if layer in self._early and layer.covers_now()[0] and not is_sharded(layer.weight):
                assert layer.weight is not None
                self._wait_for(layer, layer.weight)

    def _wait_for(self, layer: Layer, weight: Tensor) -> None:
        for part, parameter in enumerate((weight, layer.bias)):
            if (layer, part) not in self._waiting and layer.covers_now()[part]:
                assert parameter is not None  # a shard's hook never runs
                hook = functools.partial(_compare, weakref.ref(self), weakref.ref(layer), part)
                self.handles.append(parameter.register_hook(hook))
                self._waiting.add((layer, part))
                self.waits = True

    def add(self, call: Call, x: Tensor | None, grad: Tensor) -> None:
        """Add the rows of a call to those of its backward pass."""
        layer = call.layer.primary
        if not call.covers[0] or (layer, 0) not in self._waiting:
            return
        key = layer, graph_task()
        if key not in self._seen:
            self._seen[key] = _Seen(layer, call.anchor)
        seen = self._seen[key]
        if seen is not None and 0 not in seen.made:  # the whole gradient came without these rows
            self._results.setdefault(layer, []).append((torch.ones(()), None))
        elif seen is not None and (x is None or not seen.add(call, x, grad)):
            self._seen[key] = None

    def compare(self, layer: Layer, part: int, grad: Tensor) -> None:
        """Compare the whole gradient of a weight or bias with its calls' in this backward pass.

        A pass that comes to no call, as within a reentrant checkpoint, trains by other uses alone.
        A bias that a call of its own adds has its gradient before the rows come: it waits.
        """
        key, parameter = (layer, graph_task()), layer.bias if part else layer.weight
        assert parameter is not None
        if grad.is_sparse or (key not in self._seen and not accumulates_into(parameter)):
            return  # another backward pass, which trains nothing
        if part:
            self._of_bias[key] = layer.bias_view(grad.detach().clone())  # .grad may be this tensor
            return
        self.due.discard(layer)
        self._compare(key, part, layer.weight_view(grad.detach()))

    def _compare(self, key: tuple[Layer, int | None], part: int, whole: Tensor) -> None:
        layer = key[0]
        if key not in self._seen:
            share = whole.norm() / whole.norm()  # of zero: that tells nothing
        elif (seen := self._seen[key]) is None:
            return
        else:
            share = seen.share(part, whole)
        arrives = None
        if share.device.type == "cuda":  # on its way to the host, without a wait
            host = torch.empty(share.shape, dtype=share.dtype, device="cpu", pin_memory=True)
            share = host.copy_(share, non_blocking=True)
            arrives = torch.cuda.current_stream(whole.device).record_event()
        self._results.setdefault(layer, []).append((share, arrives))

    def settle(self) -> set[Layer]:
        """Read what was compared since the last step; return layers to look for once more."""
        for key, whole in self._of_bias.items():
            self._compare(key, 1, whole)
        self._of_bias.clear()
        again: set[Layer] = set()
        for layer, results in [*self._results.items()]:
            if not all([arrives is None or arrives.query() for _, arrives in results]):
                continue
            shares = [share.item() for share, _ in self._results.pop(layer)]
            if any(map(math.isnan, shares)):  # zero, or not finite: that tells nothing
                self.due.add(layer)
            elif max(shares) > OTHER and layer not in self._again:
                again.add(layer)
            elif max(shares) > OTHER:
                self.elsewhere[layer.name] = max(shares)
            else:
                self.elsewhere.pop(layer.name, None)
        self._again |= again
        self.due |= again | self._later
        self._later.clear()
        while self.handles:  # the layer may not gather in the next step
            self.handles.pop().remove()
        self._waiting.clear()
        self._seen.clear()
        self.waits = bool(self._results)
        return again


def _compare(witness: Any, layer: Any, part: int, grad: Tensor) -> None:
    """Compare, as a hook on a parameter; the hook keeps neither alive."""
    compared, of = witness(), layer()
    if compared is not None and of is not None:
        with compared.errors:
            compared.compare(of, part, grad)
