"""The forward passes of a model: how many terms each pass's loss averages, and which pass runs."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
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


class ForwardPass:
    """One forward pass of the model, and how many terms its loss averages if the pass trains."""

    def __init__(self, batch: Any, *, paused: bool, first: Layer | None = None) -> None:
        self.paused = paused
        self.first = first  # the layer that began the pass, if the model itself was not called
        self.calls: Counter[Layer] = Counter()  # those that gather
        # Autograd numbers a thread's nodes: the nodes of this pass lie between start and end.
        self.thread = threading.get_ident()
        self.start = sequence_nr()
        self.end: int | None = None
        self.is_over = False  # of a pass without the model: a backward pass came since
        self.measure(batch)

    def measure(self, batch: Any) -> None:
        """Count the examples and positions of an input; unknown inputs have ``None`` examples."""
        self.shape: torch.Size | None = None
        self.examples: int | None = None
        self.positions = 0
        images = batch if isinstance(batch, list) else [None]
        tensor = first_tensor(batch)
        if isinstance(batch, PackedSequence):
            self.examples, self.positions = int(batch.batch_sizes[0]), batch.data.shape[0]
        elif all(isinstance(x, Tensor) and x.dim() == 3 for x in images):
            # Images of different sizes, as detection models take them.
            self.examples, self.positions = len(batch), sum(x.shape[1:].numel() for x in batch)
        elif tensor is not None:
            self.shape = tensor.shape
            self.examples = tensor.shape[0] if tensor.dim() else 1
            self.positions = tensor.numel()
            if tensor.is_floating_point() and tensor.dim() > 1:
                # Channels are last in sequences, second in images.
                self.positions //= max(1, tensor.shape[-1 if tensor.dim() <= 3 else 1])


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor with dimensions in an argument, else a scalar, as a time may be."""
    if isinstance(value, Tensor):
        return value
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, part.name) for part in dataclasses.fields(value)]
    elif isinstance(value, list | tuple):
        parts = value
    scalar: Tensor | None = None
    for part in parts:
        tensor = first_tensor(part)
        if tensor is not None and tensor.dim():
            return tensor
        scalar = tensor if scalar is None else scalar
    return scalar


def batch_of(args: Any, kwargs: Any) -> Any:
    """Return the first argument of a module's call that holds examples; else a scalar, if any."""
    arguments = [*args, *kwargs.values()]
    for argument in arguments:
        tensor = first_tensor(argument)
        if tensor is not None and tensor.dim():
            return argument
    return first_tensor(arguments)


class ForwardPasses:
    """Finds the forward pass of a layer's call, although calls nest."""

    def __init__(self) -> None:
        self.paused = 0
        # How many calls of the model run, one within another, and the pass that they share: it
        # begins with the first that trains, and ends with the outermost call.
        self.depth = 0
        self.running: ForwardPass | None = None
        self.loose: ForwardPass | None = None  # the last pass of layers without the model
        # Bounded, since passes that never meet a backward pass would pile up.
        self._recent: deque[ForwardPass] = deque(maxlen=1024)
        self._recomputed: dict[int | None, ForwardPass] = {}  # by its backward pass

    def begin(self, batch: Any, first: Layer | None = None) -> ForwardPass:
        self.close_loose()
        forward_pass = ForwardPass(batch, paused=self.paused > 0, first=first)
        self._recent.append(forward_pass)
        return forward_pass

    def current(self, layer: Layer, x: Tensor) -> ForwardPass:
        forward_pass = self.running or self.again() or self._loose_pass(layer, x)
        if forward_pass.examples is None:
            forward_pass.measure(x)
        if layer.unbatched(x) and forward_pass.shape == x.shape:
            forward_pass.examples = 1
        return forward_pass

    def again(self) -> ForwardPass | None:
        """Return the forward pass that a reentrant checkpoint recomputes a part of, if any."""
        if graph_task() is None:
            return None
        # The checkpoint's node, which runs now, was made in that pass. Taps could not remember it:
        # the first forward ran without gradients, and none was made.
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        for recent in reversed(self._recent):
            if recent.start <= number and (recent.end is None or number < recent.end):
                return recent
        return None

    def _loose_pass(self, layer: Layer, x: Tensor) -> ForwardPass:
        # A pass without the model lasts until a backward pass, or until its first layer is called
        # again. All layers that one backward pass recomputes share one pass.
        task, loose = graph_task(), self.loose
        if task in self._recomputed:
            return self._recomputed[task]
        if task is None and loose is not None and not loose.is_over and loose.first is not layer:
            return loose
        # Take the batch of the outermost module that runs: a router may give the first layer a part
        # of the examples, or none, and K would be too small.
        batch: Any = x
        for call in running_calls():  # from the innermost outwards
            argument = batch_of(call["args"], call["kwargs"])
            batch = batch if argument is None else argument
        if task is None:
            self.loose = self.begin(batch, layer)
            return self.loose
        # A table of one: a pass that only a recomputation sees ends with its backward pass.
        self._recomputed = {task: ForwardPass(batch, paused=self.paused > 0)}
        return self._recomputed[task]

    def close_loose(self) -> None:
        """End the pass of layers that were called without the model."""
        if self.loose is None:
            return
        self.loose.is_over = True
        # A GPU's backward pass runs in another thread, which can't read this thread's numbers: its
        # own would end the pass too early, or never. The next call in this thread ends it then.
        if self.loose.thread == threading.get_ident():
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
    """Return whether torch.utils.checkpoint's forward or recomputation runs."""
    # Both must save the same tensors, though other layers may gather by the time of the second: so
    # under a checkpoint every output is tapped, and the record of the first forward decides.
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
