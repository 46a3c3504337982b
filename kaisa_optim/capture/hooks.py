"""Hooks that see, in each backward pass that trains a layer, its input with its output gradient.

A forward hook passes the layer's output through an identity autograd function that holds the input;
the pair is complete when the backward pass reaches it. So layers used twice, forwards without a
backward and evaluations beside training cannot mix up the pairs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from ..comm.sharding import gathered_in, is_sharded, waiting_gradients
from ..layers import Basis, Layer, Moments, Shared
from ..layers.sampling import WHOLE, Part, Sample
from ..linalg.precision import statistics_precision, without_autocast
from .saving import UNKNOWN, saving_hooks

# The number that autograd gives the next node that this thread makes.
_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr

_NOTHING = contextlib.nullcontext()

_Covers = tuple[bool, bool]
# The last: whether the moments are of gradients that were drawn.
Sink = Callable[[Layer, "ForwardPass", _Covers, Moments | None, bool], None]


class ForwardPass:
    """One forward pass of the model: how many terms its loss averages if it trains."""

    __slots__ = (
        "end",
        "examples",
        "first",
        "paused",
        "positions",
        "reached",
        "shape",
        "start",
        "thread",
    )

    def __init__(self, value: Any, *, paused: bool, first: Layer | None = None) -> None:
        self.paused = paused
        self.first = first  # the layer that began it, where the model itself was not called
        self.reached: int | None = None  # by which backward pass that trains, the last of them
        # Autograd numbers the nodes that a thread makes: those of this pass lie between.
        self.thread = threading.get_ident()
        self.start = _sequence_nr()
        self.end: int | None = None
        self.measure(value)

    def measure(self, value: Any) -> None:
        """Count the examples and positions of an input; of an unknown one, None."""
        self.shape: torch.Size | None = None
        if isinstance(value, list) and all(isinstance(v, Tensor) and v.dim() == 3 for v in value):
            # Images of different sizes, as detection models take them.
            self.examples: int | None = len(value)
            self.positions = sum(v.shape[1:].numel() for v in value)
            return
        if isinstance(value, PackedSequence):
            self.examples, self.positions = int(value.batch_sizes[0]), value.data.shape[0]
            return
        tensor = _first_tensor(value)
        self.examples, self.positions = None, 0
        if tensor is not None:
            self.shape = tensor.shape
            self.examples = tensor.shape[0] if tensor.dim() else 1
            self.positions = _positions(tensor)


def _has_examples(value: Any) -> bool:
    if isinstance(value, PackedSequence):
        return True
    tensor = _first_tensor(value)
    return tensor is not None and tensor.dim() > 0


def _first_tensor(value: Any) -> Tensor | None:
    """The first with dimensions, if any has: a model may be told a time or a temperature before."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        value = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, part.name) for part in dataclasses.fields(value)]
    elif not isinstance(value, list | tuple):
        return None
    first: Tensor | None = None
    for part in value:
        tensor = _first_tensor(part)
        if tensor is not None and tensor.dim():
            return tensor
        first = tensor if first is None else first
    return first


def _positions(tensor: Tensor) -> int:
    """Tokens, or the elements of one channel: last in sequences, second in images."""
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return tensor.numel()
    return tensor.numel() // max(1, tensor.shape[-1 if tensor.dim() <= 3 else 1])


class _Tap(torch.autograd.Function):
    """Identity on a layer's output, after which in-place activations may follow.

    Marked in place for that; but for a view autograd would then copy the gradient three times. It
    passes under another name, where nothing else can see it. There is no setup_context, for which
    torch would look up the signature in every call: under its transforms nothing is tapped.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        x: Tensor | None,
        record: Any,
        probe: Tensor | None,
        unseen: bool,
    ) -> Tensor:
        # Saved through autograd, so that checkpointing and offloading treat it as their own.
        ctx.save_for_backward(x)
        ctx.record = record
        if unseen and type(output) is Tensor and output._is_view():
            return torch.ops.aten._unsafe_view(output, output.shape)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @torch.compiler.disable  # where a function is compiled that runs the backward pass
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if ctx.record is not None:
            ctx.record(x, grad)
        return grad, None, None, None, None


@dataclasses.dataclass(eq=False)
class _Drawn:
    """What drawn gradients made of one call of a layer, until the training pass takes it."""

    moments: Moments | None = None
    ever: bool = False

    def add(self, moments: Moments) -> None:
        if self.moments is not None:
            moments = self.moments._replace(g=self.moments.g + moments.g)
        self.moments, self.ever = moments, True

    def take(self) -> Moments | None:
        """Once: a second training pass through the same graph adds nothing."""
        moments, self.moments = self.moments, None
        return moments


class _Passage(NamedTuple):
    """One call of a layer in a forward pass, as its backward pass has to know it."""

    layer: Layer
    run: ForwardPass
    anchor: Tensor  # the parameter that its gradients go to
    covers: _Covers
    outer: int | None  # the backward pass that a reentrant checkpoint runs this in, if one does

    @property
    def own(self) -> Tensor:
        return _own(self.layer, self.covers)


@dataclasses.dataclass(eq=False)
class _Call:
    """What moments are made of, beside the input and the gradient."""

    passage: _Passage
    blocks: slice
    mode: Any
    part: Part
    gathers: bool
    drawn: _Drawn = dataclasses.field(default_factory=_Drawn)


class _Entered(NamedTuple):
    """What a call of a module began, and torch's frame of that call, which lives as long."""

    what: Any
    frame: FrameType


class _OfThread(threading.local):
    """What a thread is in: DataParallel runs its replicas in several."""

    def __init__(self) -> None:
        # Calls of the model, several of one that calls itself: all are one pass, that of the
        # outermost which trains.
        self.calls: list[_Entered] = []
        self.modes: list[_Entered] = []  # of attention


def _frame_of_call() -> FrameType:
    """For a module's hook: the frame of torch's function that called it."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__") != "torch.nn.modules.module":
        frame = frame.f_back
    return frame


def _is_running(frame: FrameType) -> bool:
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return here is frame


class _Hook:
    """A module hook that ends with its capture and turns inert in a copy of the model."""

    def __init__(self, method: Callable[..., Any], *bound: Any) -> None:
        self.method = weakref.WeakMethod(method)
        self.bound = bound

    @torch.compiler.disable  # compiled code breaks its graph here and calls the hook as it is
    def __call__(self, *args: Any) -> Any:
        method = self.method()
        return None if method is None else method(*self.bound, *args)

    def __reduce__(self) -> Any:
        # A deepcopied or saved model carries a callable that does nothing, from the standard
        # library alone: the copy trains nothing here, and loads where this package is absent.
        return getattr, (contextlib.nullcontext(), "__exit__")


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


class Capture:
    """Owns the hooks on one model for one optimizer; hands moments to ``sink``.

    Where a pass comes first to a layer whose turn it is not, that hands None, so that every pass
    that trains is known.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[Layer],
        sink: Sink,
        drop: Callable[[Layer], None],
        *,
        reduce: bool,
        precision: str = "highest",
        keep_errors: bool = False,
    ) -> None:
        # The basis in which a layer's gradients' second moments are wanted, if in any.
        self.basis_of: Callable[[Layer], Basis | None] | None = None
        self.keep_errors = keep_errors  # until a step asks for them, instead of raising
        self.error: Exception | None = None
        self.sink = sink
        self.drop = drop  # called for a layer whose gradient starts anew
        self.wanted = frozenset(layers)  # those whose turn it is to gather statistics
        self.missing = set(layers)  # those that have none
        self.reduce = reduce
        self.precision = precision  # of float32 products
        self.sample: Sample | None = None  # of the rows of a pass; None: all
        self.paused = 0
        self.was_paused = False  # since the last reset, as the next one
        self.backwards = 0  # passes that reached a layer and trained it
        self.draws = 0  # calls of draw since the last reset
        self.tapped = False  # whether a pass since then may gather
        # A layer, and its positions and examples, of which K counts the former.
        self.misread: tuple[str, int, int] | None = None
        self._drawing: dict[_Drawn, tuple[ForwardPass, Moments]] | None = None
        # An input of every tap that gathers: differentiating by it runs them, and no parameter.
        self._probe = torch.empty(0, requires_grad=True, device="cpu")
        self._begun: dict[Layer, int | None] = {}  # the pass that last found no gradient
        self._looked: int | None = None  # the pass that last looked for gradients that are gone
        # Who handed anything since the last reset, and where its gradient is.
        self._handed: dict[Layer, tuple[Tensor, Tensor]] = {}
        self._local = _OfThread()
        self._lock = threading.Lock()  # backward passes of replicas run in several threads, too
        self._recent: deque[ForwardPass] = deque(maxlen=1024)
        self._loose: ForwardPass | None = None
        self._left_open: list[ForwardPass] = []  # until their own thread is here again
        self._recomputed: tuple[int, ForwardPass] | None = None
        sharded = any(is_sharded(layer.weight) for layer in layers)
        self._waiting = waiting_gradients(model) if sharded else {}
        self.shared = Shared()
        for layer in layers:
            layer.shared = self.shared
        self._handles = self._attach(model, layers)
        # With an optimizer that is gone go its hooks: another may be built on the model.
        weakref.finalize(self, _remove, self._handles).atexit = False

    def _attach(self, model: nn.Module, layers: list[Layer]) -> list[Any]:
        starts = _Hook(self._run_starts)
        handles: list[Any] = [model.register_forward_pre_hook(starts, with_kwargs=True)]
        by_module: dict[nn.Module, list[Layer]] = {}
        for layer in layers:
            by_module.setdefault(layer.module, []).append(layer)
        for module, own in by_module.items():
            if own[0].interceptor(own, self._tap) is None:
                hook = _Hook(self._output, own[0])
                # First: a user's hook may return something else than the layer's own output.
                handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
                handles.append(handle)
            else:
                handles.append(module.register_forward_pre_hook(_Hook(self._enter, own)))
                handles.append(module.register_forward_hook(_Hook(self._exit), always_call=True))
        # Last, since the model may itself be a layer.
        handles.append(model.register_forward_hook(_Hook(self._run_ends), always_call=True))
        return handles

    def reset(self) -> None:
        """A step has consumed what was gathered."""
        self.break_off()
        self._close_loose()
        self.shared.clear()
        self.backwards = self.draws = 0
        self.tapped = False
        self.error = None
        self._handed.clear()
        self.was_paused = self.paused > 0

    def resume(self, former: Capture) -> None:
        """In a step that another one has begun, on a model of which other layers train by now."""
        self.backwards, self.was_paused = former.backwards, former.was_paused
        self.draws, self.tapped = former.draws, former.tapped
        self._handed = former._handed

    def detach(self) -> None:
        _remove(self._handles)

    # ---- the model's forward passes ----

    def _run_starts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.break_off()
        calls = self._local.calls
        run = calls[-1].what if calls else None
        if run is None and torch.is_grad_enabled() and not _transformed():
            given = (*args, *kwargs.values())
            value = next(filter(_has_examples, given), given)
            self._close_loose()
            run = self._remember(ForwardPass(value, paused=self.paused > 0))
        calls.append(_Entered(run, _frame_of_call()))

    def _run_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        calls = self._local.calls
        run = calls.pop().what if calls else None
        if run is not None and all(call.what is not run for call in calls):
            run.end = _sequence_nr()

    def break_off(self) -> None:
        """Leave calls that were interrupted, by Ctrl-C for one, after which torch runs no hook."""
        calls, modes = self._local.calls, self._local.modes
        while calls and not _is_running(calls[-1].frame):
            calls.pop()
        while modes and not _is_running(modes[-1].frame):
            mode = modes[-1].what
            if mode is not None:
                if mode is not _get_current_function_mode():
                    break  # under another one, which has to end first
                mode.__exit__(None, None, None)
            modes.pop()

    def _remember(self, run: ForwardPass) -> ForwardPass:
        self._recent.append(run)
        return run

    def _current_run(self, layer: Layer, x: Tensor) -> ForwardPass:
        calls = self._local.calls
        run = (calls[-1].what if calls else None) or self._run_again()
        if run is None:
            run = self._loose_run(layer, x)
        if run.examples is None:
            run.measure(x)
        if layer.unbatched(x) and run.shape == x.shape:
            run.examples = 1
        return run

    def _run_again(self) -> ForwardPass | None:
        """The forward pass of which a reentrant checkpoint runs its part again."""
        if _graph_task() is None:
            return None
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        for run in reversed(self._recent):
            if run.start <= number and (run.end is None or number < run.end):
                return run
        return None

    def _loose_run(self, layer: Layer, x: Tensor) -> ForwardPass:
        """A pass through layers that are called without the model around them.

        It lasts until a backward pass or until the layer that began it is called again; what one
        backward pass recomputes is one.
        """
        task = _graph_task()
        if task is not None:
            if self._recomputed is None or self._recomputed[0] != task:
                self._recomputed = task, ForwardPass(x, paused=self.paused > 0, first=layer)
            return self._recomputed[1]
        if self._loose is None or self._loose.first is layer:
            self._close_loose()
            self._loose = self._remember(ForwardPass(x, paused=self.paused > 0, first=layer))
        return self._loose

    def _close_loose(self) -> None:
        # A GPU's backward pass runs in another thread, which does not know where this one is.
        if self._loose is not None:
            self._left_open.append(self._loose)
            self._loose = None
        here = threading.get_ident()
        for run in self._left_open:
            if run.thread == here:
                run.end = _sequence_nr()
        self._left_open = [run for run in self._left_open if run.thread != here]

    # ---- drawn gradients ----

    @property
    def due(self) -> bool:
        """Whether layers gather in this step, be it under a checkpoint, where no tap shows yet."""
        return bool(self.wanted or self.tapped or self._misses())

    def _misses(self) -> bool:
        """Whether a layer that trains has no statistics."""
        return any(any(layer.covers_now()) for layer in self.missing)

    def draw(
        self,
        outputs: Tensor,
        columns: Iterable[Tensor],
        scale_of: Callable[[Iterable[ForwardPass]], float],
    ) -> None:
        """Send ``columns``, gradients of the outputs, back to the layers that gather.

        The G of all together, times ``scale_of`` the forward passes that they went through, stands
        in for that of the training pass to come. No parameter receives anything.
        """
        self.draws += 1
        self.misread = None  # what is drawn has a scale of its own
        drawing: dict[_Drawn, tuple[ForwardPass, Moments]] = {}
        self._drawing = drawing
        try:
            for column in columns:
                torch.autograd.grad(
                    outputs, self._probe, column, retain_graph=True, allow_unused=True
                )
        finally:
            self._drawing = None
        if drawing:
            scale = scale_of({run for run, _ in drawing.values()})
            torch._foreach_mul_([moments.g for _, moments in drawing.values()], scale)
        for drawn, (_, moments) in drawing.items():
            drawn.add(moments)

    # ---- the layers' forward passes ----

    def _output(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not isinstance(output, Tensor):
            return None
        if module is layer.module and _substituted(module, layer):
            return None
        x = args[0] if args else _first_tensor(kwargs)
        return None if x is None else self._tap(layer, output, x)

    def _enter(self, layers: list[Layer], module: nn.Module, args: Any) -> None:
        mode: TorchFunctionMode | None = None
        if torch.is_grad_enabled():
            mode = layers[0].interceptor(layers, self._tap)
            assert mode is not None
            mode.__enter__()
        self._local.modes.append(_Entered(mode, _frame_of_call()))

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        modes = self._local.modes
        mode = modes.pop().what if modes else None
        if mode is not None:
            mode.__exit__(None, None, None)

    def _tap(self, layer: Layer, output: Tensor, x: Tensor, blocks: slice = slice(None)) -> Tensor:
        covers = layer.covers_now()
        if not any(covers) or not output.requires_grad or _transformed() or _has_tangent(output):
            return output
        gathers = layer in self.wanted or layer in self.missing or covers != layer.covers
        again = self._run_again()
        paused = self.paused if again is None else again.paused
        wanted = not paused and (gathers or bool(self.wanted) or self._misses())
        checkpointed = _checkpointed()
        if not wanted and not checkpointed:
            return output
        record, part = None, WHOLE
        if wanted:
            run = self._current_run(layer, x)
            passage = _Passage(layer, run, _anchor(layer, covers), covers, _graph_task())
            if not gathers and not checkpointed:
                self._watch(passage, output)
                return output
            if gathers:
                part = layer.part(x, output, self.sample, reduce=self.reduce)
            order = layer.sequence_first(x)
            # A model may take examples first and turn them itself: then K is right.
            if order is not None and run.examples == order[0] != order[1]:
                self.misread = self.misread or (layer.name, *order)
            call = _Call(passage, blocks, layer.mode(output), part, gathers)
            record = functools.partial(self._backward, call)
        kept = layer.needs_input(covers) and (gathers or checkpointed)
        if kept and wanted and gathers and layer.reads_dense_only:
            _check_layout(layer, x)
        held = _as_used(layer, x, WHOLE if checkpointed else part) if kept else None
        probe = self._probe if wanted and gathers else None
        self.tapped |= probe is not None
        # Marked in place, it would pass for changed where a selective checkpoint keeps it.
        untouched = _unsafe_preserve_version_counter(output) if checkpointed else _NOTHING
        with untouched:
            return _Tap.apply(output, held, record, probe, layer.unseen_output)

    def _watch(self, passage: _Passage, output: Tensor) -> None:
        """Notice a backward pass through what is not tapped, for a quarter of a tap's time.

        A view's own node is not on the way any more once the view is changed in place.
        """
        base = output._base if output._is_view() else output
        node = output.grad_fn if base is None or base.grad_fn is None else base.grad_fn
        assert node is not None
        node.register_prehook(functools.partial(self._notice, passage))

    # ---- the backward pass ----

    @torch.compiler.disable  # as _Tap's
    def _notice(self, passage: _Passage, grads: Any) -> None:
        if self._drawing is not None or passage.run.reached == _graph_task():
            return
        if _accumulates_into(passage.anchor):
            with self._lock:
                self._reach(passage)
                self.sink(passage.layer, passage.run, passage.covers, None, False)

    def _backward(self, call: _Call, x: Tensor | None, grad: Tensor) -> None:
        try:
            self._record(call, x, grad)
        except Exception as error:
            if not self.keep_errors:
                raise
            self.error = self.error or error

    def _record(self, call: _Call, x: Tensor | None, grad: Tensor) -> None:
        passage, drawing, drawn = call.passage, self._drawing, call.drawn
        if drawing is None and not _accumulates_into(passage.anchor):
            return
        layer, covers, device = passage.layer, passage.covers, grad.device.type

        def moments(known_a: Tensor | None = None) -> Moments:
            return layer.moments(
                x,
                grad,
                covers,
                reduce=self.reduce,
                dtype=torch.promote_types(passage.own.dtype, torch.float32),
                blocks=call.blocks,
                mode=call.mode,
                known_a=known_a,
                part=call.part,
            )

        in_half = x is not None and x.dtype in (torch.bfloat16, torch.float16)
        precision = statistics_precision(self.precision, device, in_half=in_half)
        with self._lock, torch.no_grad(), precision, without_autocast(device):
            if drawing is not None:
                if call.gathers:
                    known = drawing[drawn][1] if drawn in drawing else drawn.moments
                    new = moments(None if known is None else known.a)
                    if drawn in drawing:
                        new.g.add_(drawing[drawn][1].g)
                    drawing[drawn] = passage.run, new
                return
            self._reach(passage)
            found = None
            if call.gathers and drawn.ever:
                found = drawn.take()
            elif call.gathers:
                found = self._projected(call, x, grad, moments())
            self.sink(layer, passage.run, covers, found, drawn.ever)

    def _reach(self, passage: _Passage) -> None:
        """A pass that trains comes to a layer."""
        self.backwards += 1
        self._close_loose()
        layer, gradient = passage.layer, (passage.own, passage.anchor)
        passage.run.reached = task = _graph_task()
        if passage.outer is not None:
            task = passage.outer
        # Every use of a layer in one pass meets the same missing gradient: the first drops.
        if not self._has_gradient(*gradient) and self._begun.get(layer) != task:
            self._begun[layer] = task
            self.drop(layer)
            if passage.outer is None and (task is None or task != self._looked):
                self._looked = task  # once: what a hook clears within a pass, the next one drops
                self._drop_gone(task)
        self._handed[layer] = gradient

    def _drop_gone(self, task: int | None) -> None:
        """Of layers whose gradients are gone, too; the pass ``task`` need not come to them.

        Where fully_shard holds gradients back, they can't be told from those that are gone.
        """
        for layer, gradient in list(self._handed.items()):
            gone = not self._has_gradient(*gradient) and not is_sharded(gradient[0])
            if gone and self._begun.get(layer) != task:
                del self._handed[layer]
                self.drop(layer)

    def _projected(self, call: _Call, x: Tensor | None, grad: Tensor, moments: Moments) -> Moments:
        """With the gradients' second moments in the layer's basis, where there is one of them."""
        layer, covers, part = call.passage.layer, call.passage.covers, call.part
        empty = moments.rows == 0 or moments.positions == 0
        if self.basis_of is None or covers != layer.covers or empty:
            return moments
        basis = self.basis_of(layer)
        if basis is None:
            return moments
        g, a = (None if q is None else q[moments.blocks].to(moments.g) for q in basis)
        x, grad = None if x is None else part.of(x), part.of(grad)
        moment_g = moments.g if part.weight == 1 else moments.g / part.weight
        found = layer.projected_moment(x, grad, moment_g, (g, a), covers, reduce=self.reduce)
        return moments._replace(projected=part.weighted(found))

    def _has_gradient(self, own: Tensor, anchor: Tensor) -> bool:
        """Whether this backward adds to a gradient, also to one that fully_shard holds back."""
        waiting = getattr(self._waiting.get(own), "unsharded_accumulated_grad", None)
        return own.grad is not None or anchor.grad is not None or waiting is not None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        self.was_paused = True
        try:
            yield
        finally:
            self.paused -= 1


def _as_used(layer: Layer, x: Tensor, part: Part) -> Tensor:
    """The input as autocast hands it to the layer, which keeps such a copy and not ``x``.

    Of what has to be copied for that, only the part. A copy, too, where the layer keeps another
    tensor, as what follows may then change ``x`` in place.
    """
    device = x.device.type
    cast = layer.cast_by_autocast and torch.is_autocast_enabled(device)
    dtype = x.dtype
    if cast and x.is_floating_point() and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    elif not layer.keeps_another:
        return x
    return part.of(x.detach()).to(dtype, copy=layer.keeps_another)


def _substituted(module: nn.Module, layer: Layer) -> bool:
    """By torch.func.functional_call, or by a parametrization that came after the optimizer."""
    if layer.weight is not None and is_sharded(layer.weight):
        return gathered_in(module, "weight", layer.weight) is None
    if "weight" in module._parameters:
        return module._parameters["weight"] is not layer.weight
    return is_parametrized(module, "weight")


def _own(layer: Layer, covers: _Covers) -> Tensor:
    own = layer.weight if covers[0] else layer.bias
    assert own is not None
    return own


def _anchor(layer: Layer, covers: _Covers) -> Tensor:
    """The parameter into which this forward's backward will accumulate."""
    own = _own(layer, covers)
    if not is_sharded(own):
        return own
    # While a layer runs, the whole parameter stands in the place of its sharded one.
    whole = gathered_in(layer.module, "weight" if covers[0] else "bias", own)
    assert whole is not None
    return whole


def _transformed() -> bool:
    """Under a torch.func transform, or traced for TorchScript."""
    return torch._C._functorch.maybe_current_level() is not None or torch._C._is_tracing()


def _has_tangent(output: Tensor) -> bool:
    """Under forward-mode differentiation, which knows no rule for a tap."""
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(output).tangent is not None


def _check_layout(layer: Layer, x: Tensor) -> None:
    if x.is_nested or x.layout is not torch.strided:
        kind = "a nested tensor" if x.is_nested else f"of layout {x.layout}"
        raise TypeError(
            f"Invalid input of layer {layer.name!r}: it is {kind}, whose rows K-FAC does not read; "
            "give it a padded or dense one, or build the optimizer with "
            f"skip_layers=[{layer.name!r}]"
        )


def _graph_task() -> int | None:
    """The backward pass that this thread is in; numbers are never used again."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def _checkpointed() -> bool:
    """Inside torch.utils.checkpoint's forward or recomputation.

    There the same tensors must be saved both times, whatever is wanted by then: the function is
    applied always, and the record of the first forward decides.
    """
    hooks = saving_hooks()
    return hooks in ("torch.utils.checkpoint", UNKNOWN)  # an idle tap holds nothing of its own


def _accumulates_into(parameter: Tensor) -> bool:
    """Whether the running backward pass will add to ``parameter.grad``."""
    if not parameter.requires_grad:
        return False  # frozen since the forward
    node = get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False  # autograd.grad with the parameter among its inputs: it returns, adds nothing
