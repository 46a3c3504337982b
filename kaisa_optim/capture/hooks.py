"""Hooks that see, in each backward pass that trains a layer, its input with its output gradient.

A forward hook passes the layer's output through an identity autograd function that holds the input;
the pair is complete when the backward pass reaches it. So layers used twice, forwards without a
backward and evaluations beside training cannot mix up the pairs.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.overrides import TorchFunctionMode

from ..comm.sharding import is_sharded, waiting_gradients
from ..errors import invalid_because
from ..layers import Layer, Moments, PassSettings, Scope, Shared
from ..layers.sampling import WHOLE, Sample
from ..linalg.moments import unit_of
from ..linalg.precision import full_precision, without_autocast
from ..stages import stage
from .forward_pass import NUMBERS, ForwardPass, ForwardPasses, first_tensor, graph_task
from .tap import (
    Call,
    Drawn,
    FirstError,
    Tap,
    accumulates_into,
    as_used,
    check_layout,
    has_tangent,
    is_checkpointed,
    is_substituted,
    is_transformed,
    top_hooks,
)
from .uses import Uses
from .witness import Witness

_NOTHING = contextlib.nullcontext()
_requires_grad = operator.attrgetter("requires_grad")


class _Hook:
    """A module hook that ends with its capture and turns inert in a copy of the model."""

    def __init__(self, method: Any, *bound: Any) -> None:
        self.owner = weakref.ref(method.__self__)
        self.function = method.__func__
        self.bound = bound

    @torch.compiler.disable  # compiled code breaks its graph here and calls the hook as it is
    def __call__(self, *args: Any) -> Any:
        owner = self.owner()
        return None if owner is None else self.function(owner, *self.bound, *args)

    def __reduce__(self) -> Any:
        # A deepcopied or saved model carries a callable that does nothing, from the standard
        # library alone: the copy trains nothing here, and loads where this package is absent.
        return getattr, (contextlib.nullcontext(), "__exit__")


class _OutputHook(_Hook):
    """A hook on one layer's module, which leaves most calls at once.

    A pass calls it for each layer: so all is decided here, without further calls.
    """

    @torch.compiler.disable  # as above
    def __call__(self, *args: Any) -> Any:
        capture, layer = self.owner(), self.bound[0]
        if capture is None:
            return None
        wanted = capture.wanted
        sees = layer in wanted or (wanted and capture.counts)
        sees = sees or (capture.missing and capture.misses())
        same = not sees and [*map(_requires_grad, layer.trainable)] == layer.flags
        if same and top_hooks is not None and top_hooks(False) is None:
            return None  # no checkpoint runs
        return self.function(capture, layer, *args)


def refuse_data_parallel(module: nn.Module) -> None:
    """Refuse nn.DataParallel, and the copies of a model that it makes."""
    if isinstance(module, nn.DataParallel) or getattr(module, "_is_replica", False):
        why = (
            "nn.DataParallel runs copies of the model in threads, which K-FAC does not read; use "
            "DistributedDataParallel, with one process for each device"
        )
        raise invalid_because("model", why)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


class Capture:
    """Owns the hooks on one model for one optimizer, and adds moments to the sums.

    Where K ``counts`` the passes of all layers, those that do not gather report a pass without
    moments. Where K does not count, G has no scale: moments are of gradients divided by a unit.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[Layer],
        sums: Any,  # the FactorSums that moments are added to
        *,
        reduce: bool,
        counts: bool = True,
        precision: str = "highest",
        keep_errors: bool = False,
    ) -> None:
        self._sums = sums
        self.counts = counts
        self._reduce = reduce
        self._precision = precision  # of float32 products
        self.errors = FirstError(holds=keep_errors)
        self.wanted = frozenset(layers)  # layers that gather in this step by their slot
        self.missing = set(layers)  # layers without an average that gather in any pass
        self.sample: Sample | None = None  # the rows of a pass that are read; None: all rows
        self.was_paused = False  # since the last reset
        self.backwards = 0  # passes since the last reset that reached a layer and trained it
        self.draws = 0  # calls of draw since the last reset
        self._missed = False  # misses(), as the model's last call began
        self.tapped = False  # whether a pass since the last reset may gather
        self.ran = False  # whether the model ran since the last reset, in a pass that may train
        self._drawing: dict[Drawn, tuple[ForwardPass, Moments]] | None = None
        # An input of every tap that gathers: a derivative by it runs taps, but no parameter's node.
        self._probe = torch.empty(0, requires_grad=True, device="cpu")
        self._begun: dict[Layer, int | None] = {}  # the backward pass that last found no gradient
        self._looked: int | None = None  # the backward pass that last ran _drop_gone
        # Layers with sums since the last reset, each with the tensors that hold its gradient.
        self._added: dict[Layer, tuple[Tensor, Tensor]] = {}
        self.witness = Witness(layers, self.errors)
        self._passes = ForwardPasses()
        # Autograd runs the backward pass of each GPU in a thread of its own.
        self._lock = threading.Lock()
        sharded = any(is_sharded(layer.weight) for layer in layers)
        self._waiting = waiting_gradients(model) if sharded else {}
        self.shared = Shared()
        for layer in layers:
            layer.shared = self.shared
        self.uses = Uses(layers, self._passes)
        self._watched: dict[nn.Module, list[Layer]] = {}  # layers whose uses each module may hold
        # The NUMBERS at which watches of weights' uses began.
        self._since: dict[tuple[nn.Module, Tensor | None], int] = {}
        self._handles: list[Any] = []
        if layers:  # TorchScript has no hooks
            self._attach(model, layers)
        # Hooks end with their optimizer: another may be built on the model.
        for handles in (self._handles, self.witness.handles):
            weakref.finalize(self, _remove, handles).atexit = False

    def _attach(self, model: nn.Module, layers: list[Layer]) -> None:
        handles, starts = self._handles, _Hook(self._model_starts)
        handles.append(model.register_forward_pre_hook(starts, with_kwargs=True))
        by_module: dict[nn.Module, list[Layer]] = {}
        for layer in layers:
            self._watch_at((layer, module) for module in layer.watched_in)
            if not layer.watched_in:
                by_module.setdefault(layer.module, []).append(layer)
        for module, own in by_module.items():
            if own[0].interceptor(own, self._tap) is None:
                hook = _OutputHook(self._output, own[0])
                # First: a user's hook may return something else than the layer's own output.
                handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
                handles.append(handle)
            else:
                handles.append(module.register_forward_pre_hook(_Hook(self._enter, own)))
                handles.append(module.register_forward_hook(_Hook(self._exit), always_call=True))
        # Last, since the model may itself be a layer.
        handles.append(model.register_forward_hook(_Hook(self._model_ends), always_call=True))

    def _model_starts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        refuse_data_parallel(module)
        counts = torch.is_grad_enabled() and not is_transformed()
        self._passes.starts(args, kwargs, counts=counts)
        self._missed = any([any(layer.covers_now()) for layer in self.missing])
        if counts:
            self.witness.starts(self.wanted, self.missing)
            self.ran = True
        searches = self.uses.sought and counts and (self.wanted or self.misses())
        self.uses.watch(self.uses.search(self._tap) if searches else None)

    def _model_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._exit(module, args, output)
        self._passes.ends()
        self._watch_at(self.uses.noted())

    def _watch_at(self, places: Iterable[tuple[Layer, nn.Module]]) -> None:
        """Watch layers' calls in modules, if they are not watched yet."""
        for layer, module in places:
            watched = self._watched.setdefault(module, [])
            if layer in watched:
                continue
            if not watched:
                hooks = _Hook(self._watch_calls), _Hook(self._exit)
                self._handles.append(module.register_forward_pre_hook(hooks[0]))
                self._handles.append(module.register_forward_hook(hooks[1], always_call=True))
            self._since[module, layer.weight] = next(NUMBERS)
            watched.append(layer)

    def look_around(self, model: nn.Module, layers: Iterable[Layer]) -> None:
        """Watch calls of these layers, of which no call was seen, in all modules around them."""
        self._watch_at(self.uses.around(model, layers))

    def compared(self) -> bool:
        """Read what was compared since the last step; return whether a layer has to be named.

        First, its uses are looked for once more.
        """
        with self.errors:
            self.uses.sought |= self.witness.settle()
        return bool(self.witness.unnamed)

    def reset(self) -> None:
        """Start anew after a step, which has consumed the statistics."""
        self.break_off()
        self._passes.close_loose()
        self.backwards = self.draws = 0
        self.tapped = self.ran = False
        self.errors.error = None
        self.uses.reset()
        self._added.clear()
        self.was_paused = self._passes.paused > 0

    def resume(self, former: Capture) -> None:
        """Go on in a step that another capture has begun; other layers may train by now."""
        self.backwards, self.was_paused = former.backwards, former.was_paused
        self.draws, self.tapped, self.ran = former.draws, former.tapped, former.ran
        self._added = former._added
        self._since |= {x: former._since[x] for x in self._since.keys() & former._since.keys()}

    def detach(self) -> None:
        _remove(self._handles)
        _remove(self.witness.handles)

    def break_off(self) -> None:
        """Leave calls of modules that were interrupted, and forget the last input's moment."""
        self._passes.break_off()
        self.shared.clear()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Gather nothing in forward passes under this context."""
        self._passes.paused += 1
        self.was_paused = True
        try:
            yield
        finally:
            self._passes.paused -= 1

    # ---- drawn gradients ----

    @property
    def due(self) -> bool:
        """True if layers gather in this step; a checkpoint may have kept them from being tapped."""
        return bool(self.wanted or self.tapped or self.misses())

    def misses(self) -> bool:
        """Return whether a layer that trains has no average.

        In a call of the model it is as it was when the call began: frozen layers may be many.
        """
        if self.missing and self._passes.calls:
            return self._missed
        return any([any(layer.covers_now()) for layer in self.missing])

    def draw(
        self,
        outputs: Tensor,
        gradients: Tensor,
        scale_of: Callable[[Iterable[ForwardPass]], float],
    ) -> None:
        """Send drawn gradients of the outputs back to the layers that gather.

        Their G, times ``scale_of`` the forward passes that they went through, replaces the G of the
        training pass to come. No parameter receives a gradient.
        """
        self.draws += 1
        drawing: dict[Drawn, tuple[ForwardPass, Moments]] = {}
        self._drawing = drawing
        try:
            torch.autograd.grad(
                outputs, self._probe, gradients, retain_graph=True, allow_unused=True
            )
        finally:
            self._drawing = None
        if drawing:
            scale = scale_of({forward_pass for forward_pass, _ in drawing.values()})
            torch._foreach_mul_([moments.g for _, moments in drawing.values()], scale)
        for drawn, (_, moments) in drawing.items():
            drawn.add(moments)

    # ---- the layers' forward passes ----

    def _output(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not isinstance(output, Tensor):
            return None
        if is_substituted(module, layer):
            return None
        x = args[0] if args else first_tensor(kwargs)
        return None if x is None else self._tap(layer, output, x)

    def _concerns(self, layers: list[Layer]) -> bool:
        """Return whether this pass has to see calls of these layers; most passes need not."""
        if is_transformed():  # no call is tapped, and TorchScript traces no mode
            return False
        if not self.wanted.isdisjoint(layers) or self._counts_all() or is_checkpointed():
            return True
        return any([layer.covers_now() != layer.covers for layer in layers])

    def _counts_all(self) -> bool:
        """Return whether K counts passes of layers that do not gather, too."""
        return bool(self.wanted and self.counts) or self.misses()

    def _enter(self, layers: list[Layer], module: nn.Module, args: Any) -> None:
        mode: TorchFunctionMode | None = None
        if torch.is_grad_enabled() and self._concerns(layers):
            mode = layers[0].interceptor(layers, self._tap)
            assert mode is not None
            mode.__enter__()
        self._passes.modes.append(mode)

    def _watch_calls(self, module: nn.Module, args: Any) -> None:
        """Run a module's forward under a mode that finds uses, if the pass gathers.

        If a checkpoint recomputes a forward that was not watched, taps would save more tensors.
        """
        layers, scope = self._watched[module], None
        checkpointed = self._passes.again() if is_checkpointed() else None
        if checkpointed is not None:
            began = checkpointed.number
            layers = [x for x in layers if began > self._since[module, x.weight]]
        if layers and torch.is_grad_enabled() and self._concerns(layers):
            scope = Scope(layers, self._tap)
        self.uses.watch(scope)

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        mode = self._passes.modes.pop() if self._passes.modes else None
        if mode is not None:
            mode.__exit__(None, None, None)

    def _tap(self, layer: Layer, output: Tensor, x: Tensor, blocks: slice = slice(None)) -> Tensor:
        """Return the output behind a tap, or unchanged if the call has no part in training."""
        primary, covers, outer = layer.primary, layer.covers_now(), graph_task()
        again = None if outer is None else self._passes.again()
        changed = primary.covers_now() != primary.covers  # frozen or unfrozen
        gathers = primary in self.wanted or primary in self.missing or changed
        paused = bool(self._passes.paused if again is None else again.paused)
        counts, checkpointed = gathers or self._counts_all(), is_checkpointed()
        trains = any(covers) and output.requires_grad and not output.is_meta
        # Under a checkpoint every output is tapped: its forward and its recomputation, in which
        # other layers may gather, must save the same tensors.
        leaves = not checkpointed and (paused or not counts)
        if not trains or leaves or is_transformed() or has_tangent(output):
            return output
        record, part, whole = None, WHOLE, False
        gathers = gathers and not paused
        if counts and not paused:
            forward_pass = self._passes.current(layer, x)
            call = Call(layer, forward_pass, covers, blocks, outer)
            if not gathers and not checkpointed:
                self._watch(call, output)
                return output
            if gathers:
                part = layer.part(x, output, self.sample)
                whole = covers[0] and self.witness.watches(layer, forward_pass, call.anchor)
            call.part, call.gathers = part, gathers
            record = functools.partial(self._backward, call)
        whole = whole or checkpointed
        kept = covers[0] and (gathers or checkpointed)
        if kept and gathers and layer.reads_dense_only:
            check_layout(layer, x)
        held = as_used(layer, x, WHOLE if whole else part) if kept else None
        probe = self._probe if gathers else None
        self.tapped |= gathers
        # The mark would raise the output's version, and a selective checkpoint that keeps the
        # output would take it for changed.
        untouched = _unsafe_preserve_version_counter(output) if checkpointed else _NOTHING
        with untouched:
            return Tap.apply(output, held, record, probe, layer.unseen_output)

    def _watch(self, call: Call, output: Tensor) -> None:
        """Notice a backward pass without a tap, in a quarter of a tap's time.

        The hook sits on a view's base: a view that is changed in place leaves its own node.
        """
        base = output._base if output._is_view() else output
        node = output.grad_fn if base is None or base.grad_fn is None else base.grad_fn
        assert node is not None
        node.register_prehook(functools.partial(self._notice, call))

    # ---- the backward pass ----

    @torch.compiler.disable  # as Tap's
    def _notice(self, call: Call, grads: Any) -> None:
        if self._drawing is not None or call.forward_pass.reached == graph_task():
            return
        if accumulates_into(call.anchor):
            with self._lock:
                self._reach(call)
                self._sums.add(call.layer, call.forward_pass, call.covers, None)

    def _backward(self, call: Call, x: Tensor | None, grad: Tensor) -> None:
        with self.errors:
            self._record(call, x, grad)

    def _record(self, call: Call, x: Tensor | None, grad: Tensor) -> None:
        drawing, drawn = self._drawing, call.drawn
        if drawing is None and not accumulates_into(call.anchor):
            return
        layer, covers, device = call.layer, call.covers, grad.device.type
        dtype = torch.promote_types(call.own.dtype, torch.float32)
        how = PassSettings(self._reduce, dtype, call.blocks, call.part)
        precision = full_precision(self._precision)
        with self._lock, torch.no_grad(), precision, without_autocast(device), stage("capture"):
            if drawing is not None:
                if call.gathers:
                    known_a = None if drawn.moments is None else drawn.moments.a
                    of_draw = layer.moments(x, grad, covers, how, known_a)
                    drawing[drawn] = call.forward_pass, of_draw
                return
            self._reach(call)
            moments = None
            if call.gathers and drawn.ever:
                moments = drawn.take()
            elif call.gathers:
                # Float32 has the squares of all float16 numbers; a division would lose some.
                scaled = self.counts or grad.dtype == torch.float16 or grad.numel() == 0
                unit = None if scaled else unit_of(grad)
                rows = grad if unit is None else grad / unit
                moments = layer.moments(x, rows, covers, how)._replace(unit=unit)
            self._sums.add(layer, call.forward_pass, covers, moments, drawn.ever)
            if call.gathers and covers[0]:
                self.witness.add(call, x, grad)

    def _reach(self, call: Call) -> None:
        """Note that a pass that trains comes to a layer."""
        self.backwards += 1
        self._passes.close_loose()
        layer, gradient = call.layer.primary, (call.own, call.anchor)
        call.forward_pass.reached = task = graph_task()
        if call.outer is not None:
            task = call.outer
        # Every use of a layer in one pass meets the same missing gradient: the first drops.
        if not self._has_gradient(*gradient) and self._begun.get(layer) != task:
            self._begun[layer] = task
            self._sums.drop(layer)
            if call.outer is None and (task is None or task != self._looked):
                self._looked = task  # once a pass: the next pass drops what a hook clears in it
                self._drop_gone(task)
        self._added[layer] = gradient

    def _drop_gone(self, task: int | None) -> None:
        """Drop the sums of layers whose gradients are gone, though the pass need not reach them.

        Gradients that fully_shard holds back can't be told from gradients that are gone.
        """
        for layer, gradient in list(self._added.items()):
            gone = not self._has_gradient(*gradient) and not is_sharded(gradient[0])
            if gone and self._begun.get(layer) != task:
                del self._added[layer]
                self._sums.drop(layer)

    def _has_gradient(self, own: Tensor, anchor: Tensor) -> bool:
        """Return whether this pass adds to a gradient, also to one that fully_shard holds back."""
        waiting = getattr(self._waiting.get(own), "unsharded_accumulated_grad", None)
        return own.grad is not None or anchor.grad is not None or waiting is not None
