"""The forward passes of a model: how many terms each pass's loss averages, and which pass runs."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import _get_current_function_mode

from ..layers import Layer

# The number that autograd gives the next node that this thread makes.
_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
# Returns the hooks that pack tensors which autograd saves; torch 2.6 lacks it.
top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
NUMBERS = itertools.count()  # of forward passes and of watches, in the order in which they began


class ForwardPass:
    """One forward pass of the model, and how many terms its loss averages if the pass trains."""

    def __init__(self, value: Any, *, paused: bool, first: Layer | None = None) -> None:
        self.paused = paused
        self.first = first  # the layer that began the pass, if the model itself was not called
        self.calls: Counter[Layer] = Counter()  # those that gather
        # Autograd numbers a thread's nodes: the nodes of this pass lie between start and end.
        self.number = next(NUMBERS)
        self.thread = threading.get_ident()
        self.start = _sequence_nr()
        self.end: int | None = None
        self.measure(value)

    def measure(self, value: Any) -> None:
        """Count the examples and positions of an input; unknown inputs have ``None`` examples."""
        self.shape: torch.Size | None = None
        if isinstance(value, list) and all(isinstance(v, Tensor) and v.dim() == 3 for v in value):
            # Images of different sizes, as detection models take them.
            self.examples: int | None = len(value)
            self.positions = sum(v.shape[1:].numel() for v in value)
            return
        if isinstance(value, PackedSequence):
            self.examples, self.positions = int(value.batch_sizes[0]), value.data.shape[0]
            return
        tensor = first_tensor(value)
        self.examples, self.positions = None, 0
        if tensor is not None:
            self.shape = tensor.shape
            self.examples = tensor.shape[0] if tensor.dim() else 1
            self.positions = tensor.numel()
            if tensor.is_floating_point() and tensor.dim() > 1:
                # Channels are last in sequences, second in images.
                self.positions //= max(1, tensor.shape[-1 if tensor.dim() <= 3 else 1])


def _has_examples(value: Any) -> bool:
    tensor = first_tensor(value)
    return tensor is not None and tensor.dim() > 0


def _batch(args: Any, kwargs: Any) -> Any:
    """Return the first argument of a module's call that holds examples, or else all arguments."""
    arguments = (*args, *kwargs.values())
    return next(filter(_has_examples, arguments), arguments)


def _parts(value: Any) -> Iterable[Any]:
    """Return the values that a container holds; anything else holds none."""
    if isinstance(value, Mapping):
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, part.name) for part in dataclasses.fields(value)]
    return value if isinstance(value, list | tuple) else ()


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor with dimensions, if any: a time or a temperature may come before."""
    if isinstance(value, Tensor):
        return value
    first: Tensor | None = None
    for part in _parts(value):
        tensor = first_tensor(part)
        if tensor is not None and tensor.dim():
            return tensor
        first = tensor if first is None else first
    return first


def running_calls() -> Iterator[dict[str, Any]]:
    """Yield the local variables of the calls of modules, from the innermost outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        of_torch = frame.f_globals.get("__name__") == "torch.nn.modules.module"
        if of_torch and frame.f_code.co_name == "_call_impl":
            yield frame.f_locals
        frame = frame.f_back


class ForwardPasses:
    """Finds the forward pass of a layer's call, although calls nest."""

    def __init__(self) -> None:
        self.paused = 0
        # The passes of the calls of the model that run; a model that calls itself has several.
        # They share one pass, which begins with the outermost call that trains.
        self.calls: list[ForwardPass | None] = []
        # The function modes that run modules' forwards, the innermost last; None: no mode.
        self.modes: list[Any] = []
        self._recent: deque[ForwardPass] = deque(maxlen=1024)
        self._loose: ForwardPass | None = None
        self._loose_is_over = False
        self._recomputed: tuple[int, ForwardPass] | None = None

    def starts(self, args: Any, kwargs: Any, *, counts: bool) -> None:
        """Note a call of the model; it begins a pass if no pass runs and the call ``counts``."""
        forward_pass = self.calls[-1] if self.calls else None
        if forward_pass is None and counts:
            self.close_loose()
            forward_pass = ForwardPass(_batch(args, kwargs), paused=self.paused > 0)
            self._recent.append(forward_pass)
        self.calls.append(forward_pass)

    def ends(self) -> None:
        """Note that a call of the model is over."""
        forward_pass = self.calls.pop() if self.calls else None
        if forward_pass is not None and forward_pass not in self.calls:
            forward_pass.end = _sequence_nr()

    def break_off(self) -> None:
        """Leave calls that were interrupted, as by Ctrl-C, after which torch runs no hook."""
        self.calls.clear()
        while self.modes:
            mode = self.modes[-1]
            if mode is not None:
                if mode is not _get_current_function_mode():
                    break  # another mode is above this one, and has to end first
                mode.__exit__(None, None, None)
            self.modes.pop()

    def current(self, layer: Layer, x: Tensor) -> ForwardPass:
        """Return the pass that a call of a layer belongs to."""
        forward_pass = (self.calls[-1] if self.calls else None) or self.again()
        if forward_pass is None:
            forward_pass = self._loose_pass(layer, x)
        if forward_pass.examples is None:
            forward_pass.measure(x)
        if layer.unbatched(x) and forward_pass.shape == x.shape:
            forward_pass.examples = 1
        return forward_pass

    def again(self) -> ForwardPass | None:
        """Return the forward pass that a reentrant checkpoint recomputes a part of, if any."""
        if torch._C._current_graph_task_id() == -1:
            return None
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        for forward_pass in reversed(self._recent):
            if forward_pass.start <= number and (
                forward_pass.end is None or number < forward_pass.end
            ):
                return forward_pass
        return None

    def _loose_pass(self, layer: Layer, x: Tensor) -> ForwardPass:
        """Return the pass through layers that are called without the model around them.

        The pass has the batch of the outermost module that runs: a router may give the first layer
        a part of the examples, or none. The pass lasts until a backward pass, or until its first
        layer is called again. All layers that one backward pass recomputes share one pass.
        """
        task = graph_task()
        if task is not None:
            if self._recomputed is None or self._recomputed[0] != task:
                self._recomputed = task, self._begin_loose(layer, x)
            return self._recomputed[1]
        if self._loose is None or self._loose_is_over or self._loose.first is layer:
            self.close_loose()
            self._loose = self._begin_loose(layer, x)
            self._recent.append(self._loose)
            self._loose_is_over = False
        return self._loose

    def _begin_loose(self, layer: Layer, x: Tensor) -> ForwardPass:
        batches = (_batch(call["args"], call["kwargs"]) for call in running_calls())
        *_, batch = (x, *filter(_has_examples, batches))
        return ForwardPass(batch, paused=self.paused > 0, first=layer)

    def close_loose(self) -> None:
        """End the pass of layers that were called without the model."""
        self._loose_is_over = True
        # A GPU's backward pass runs in another thread, which can't read this thread's numbers.
        if self._loose is not None and self._loose.thread == threading.get_ident():
            self._loose.end = _sequence_nr()
            self._loose = None


def graph_task() -> int | None:
    """Return the number of this thread's backward pass; numbers are never used again."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def is_transformed() -> bool:
    """Return whether a torch.func transform runs, or a trace for TorchScript."""
    return torch._C._functorch.maybe_current_level() is not None or torch._C._is_tracing()


def is_checkpointed() -> bool:
    """Return whether torch.utils.checkpoint's forward or recomputation runs.

    Both runs must save the same tensors, though other layers may gather by then: under a
    checkpoint every output is tapped, and the record of the first forward decides.
    """
    if top_hooks is None:
        return True  # torch 2.6 does not tell; an idle tap holds nothing of its own
    hooks = top_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def accumulates_into(parameter: Tensor) -> bool:
    """Return whether the running backward pass will add to ``parameter.grad``."""
    if not parameter.requires_grad:
        return False  # frozen since the forward
    node = get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False  # autograd.grad with the parameter among its inputs: it returns, adds nothing
