"""The forward passes of a model: how many terms each pass's loss averages, and which pass runs."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import PackedSequence

from ..layers import Layer
from ..layers.watch import running_calls

# The number that autograd gives the next node that this thread makes.
sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
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
        self.start = sequence_nr()
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


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that an argument or a container holds, in order."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, part.name) for part in dataclasses.fields(value)]
    elif isinstance(value, list | tuple):
        parts = value
    for part in parts:
        yield from tensors_in(part)


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor with dimensions, if any: a time or a temperature may come before."""
    first: Tensor | None = None
    for tensor in tensors_in(value):
        if tensor.dim():
            return tensor
        first = tensor if first is None else first
    return first


def batch_of(args: Any, kwargs: Any) -> Any:
    """Return the first argument of a module's call that holds examples; else a scalar, if any."""
    scalar = None
    for argument in (*args, *kwargs.values()):
        tensor = first_tensor(argument)
        if tensor is not None and tensor.dim():
            return argument
        scalar = tensor if scalar is None else scalar
    return scalar


class ForwardPasses:
    """Finds the forward pass of a layer's call, although calls nest."""

    def __init__(self) -> None:
        self.paused = 0
        # The passes of the calls of the model that run; a model that calls itself has several.
        # They share one pass, which begins with the outermost call that trains.
        self.calls: list[ForwardPass | None] = []
        self.loose: ForwardPass | None = None  # the last pass of layers without the model
        self._loose_is_over = False
        self._recent: deque[ForwardPass] = deque(maxlen=1024)
        self._recomputed: tuple[int, ForwardPass] | None = None

    def begin(self, batch: Any, first: Layer | None = None) -> ForwardPass:
        """Begin a pass of the model, or of layers without it."""
        self.close_loose()
        forward_pass = ForwardPass(batch, paused=self.paused > 0, first=first)
        self._recent.append(forward_pass)
        return forward_pass

    def current(self, layer: Layer, x: Tensor) -> ForwardPass:
        """Return the pass that a call of a layer belongs to."""
        forward_pass = (self.calls[-1] if self.calls else None) or self.again()
        forward_pass = forward_pass or self._loose_pass(layer, x)
        if forward_pass.examples is None:
            forward_pass.measure(x)
        if layer.unbatched(x) and forward_pass.shape == x.shape:
            forward_pass.examples = 1
        return forward_pass

    def again(self) -> ForwardPass | None:
        """Return the forward pass that a reentrant checkpoint recomputes a part of, if any."""
        if graph_task() is None:
            return None
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        for x in reversed(self._recent):
            if x.start <= number and (x.end is None or number < x.end):
                return x
        return None

    def _loose_pass(self, layer: Layer, x: Tensor) -> ForwardPass:
        """Return the pass through layers that are called without the model around them.

        The pass has the batch of the outermost module that runs: a router may give the first layer
        a part of the examples, or none. The pass lasts until a backward pass, or until its first
        layer is called again. All layers that one backward pass recomputes share one pass.
        """
        task = graph_task()
        if task is not None and self._recomputed is not None and self._recomputed[0] == task:
            return self._recomputed[1]
        goes_on = task is None and not self._loose_is_over
        if goes_on and self.loose is not None and self.loose.first is not layer:
            return self.loose
        batches = [batch_of(call["args"], call["kwargs"]) for call in running_calls()]
        *_, batch = (x, *[batch for batch in batches if batch is not None])
        if task is not None:
            self._recomputed = task, ForwardPass(batch, paused=self.paused > 0, first=layer)
            return self._recomputed[1]
        self.loose = self.begin(batch, layer)
        self._loose_is_over = False
        return self.loose

    def close_loose(self) -> None:
        """End the pass of layers that were called without the model."""
        self._loose_is_over = True
        # A GPU's backward pass runs in another thread, which can't read this thread's numbers.
        if self.loose is not None and self.loose.thread == threading.get_ident():
            self.loose.end = sequence_nr()
            self.loose = None


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
