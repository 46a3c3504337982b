"""Hooks that see, in each backward pass that trains a layer, its input with its output gradient.

A forward hook passes the layer's output through the tap: an identity of autograd's that holds the
input. The pair is complete when the backward pass reaches the tap. So layers used twice, forwards
without a backward and evaluations beside training cannot mix up the pairs.

    armed:     Schedule.at -> Preconditioner._choose -> Capture.arm, which writes each layer's task
    forward:   _Hook -> Capture._output -> Capture._tap -> Tap.forward, which holds input and Call
    backward:  Tap.backward -> Capture.record -> Layer.moments -> FactorSums.add

Beside its own module, other modules' code may use a layer's weight. In the first step that gathers,
a mode over the whole model's forward looks for all uses. From then on, calls are watched in the
modules in which uses were found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import _get_current_function_mode
from torch.profiler import record_function
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.sharding import gathered_in, is_sharded, waiting_gradients
from ..errors import invalid_because
from ..layers.base import COUNT, GATHER, LEAVE, WHOLE, Layer, Moments, Part, PassSettings, Sample
from ..layers.watch import Scope, WatchMode, running_calls
from ..linalg.moments import unit_of
from ..linalg.products import full_precision, without_autocast
from ..stages import PREFIX
from . import passes
from .witness import FirstError, Witness

_NOTHING = contextlib.nullcontext()
Layers = Collection[Layer]


class Tap(torch.autograd.Function):
    """Identity on a layer's output; its backward pass hands input and output gradient to a call."""

    # There is no setup_context: torch would look up its signature in every call. Torch's transforms
    # need one, so nothing is tapped under them.
    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Any, call: Any, probe: Any, unseen: bool) -> Tensor:
        # Save the input by autograd's own way: as an attribute of ctx, a checkpoint could not drop
        # it, and offloading would not see it. Without a call the tap is idle, and only saves.
        ctx.save_for_backward(x)
        ctx.call = call
        # Of a view that is changed in place, autograd would copy the gradient three times. If
        # nothing else sees the view, as in a linear layer of sequences, return a new tensor.
        if unseen and type(output) is Tensor and output._is_view():
            return torch.ops.aten._unsafe_view(output, output.shape)
        # Without this mark, autograd would hand out a view of the output, and then refuse the
        # activation in place that often comes next.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @torch.compiler.disable  # for compiled functions that run the backward pass
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors  # here a checkpoint recomputes its part of the forward
        if ctx.call is not None:
            ctx.call.capture.record(ctx.call, x, grad)
        return grad, None, None, None, None


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer in a forward pass, as its backward pass has to know it."""

    # The forward decides what is gathered, and the backward pass must read these fields alone: by
    # then, task and frozen parameters of the layer may be those of another step.
    capture: Capture
    layer: Layer
    forward_pass: passes.ForwardPass
    covers: tuple[bool, bool]
    blocks: slice
    outer: int | None  # the backward pass that a reentrant checkpoint runs this in, if any
    task: int
    part: Part = WHOLE
    # Moments of drawn gradients, until the training pass takes them, and whether there were any.
    moments: Moments | None = None
    drawn: bool = False

    def __post_init__(self) -> None:
        layer, by_bias = self.layer, not self.covers[0]
        parameter = layer.bias if by_bias else layer.weight
        # Autograd adds to the anchor's gradient. Under fully_shard this is the whole parameter,
        # which stands in the sharded one's place while the layer runs, and can be read only now.
        is_cut = layer.primary in self.capture.sharded
        anchor = self.capture.wholes(layer)[by_bias] if is_cut else parameter
        assert anchor is not None and parameter is not None
        self.anchor, self.parameter = anchor, parameter


class _Hook:
    # Calls a method of the capture, but does not keep it alive: the model outlives optimizers.
    def __init__(self, method: Any, layer: Layer | None = None) -> None:
        self.capture, self.function = weakref.ref(method.__self__), method.__func__
        self.layer = layer  # whose output is all that the hook sees, if any

    @torch.compiler.disable  # compiled code breaks its graph here and calls the hook as it is
    def __call__(self, *args: Any) -> Any:
        capture, layer = self.capture(), self.layer
        if capture is None:
            return None
        # Most calls of layers leave here, and must not reach another function before. Where tensors
        # are packed, a checkpoint may run, under which outputs are tapped for their number. Without
        # the model around it, the layer has to look itself whether it was frozen or unfrozen.
        if layer is not None and layer.task == LEAVE and capture._passes.depth:
            get = passes.top_hooks
            if get is not None and get(False) is None:  # no tensors are packed
                return None
        return self.function(capture, *args)

    def __reduce__(self) -> Any:
        # A deepcopied or saved model carries nullcontext().__exit__, which takes any arguments and
        # does nothing. It is the standard library's: the copy loads where this package is absent.
        return getattr, (contextlib.nullcontext(), "__exit__")


def refuse_data_parallel(module: nn.Module) -> None:
    """Refuse nn.DataParallel, and the copies of a model that it makes."""
    if isinstance(module, nn.DataParallel) or getattr(module, "_is_replica", False):
        why = "nn.DataParallel runs copies of the model in threads, which K-FAC does not read; use "
        why += "DistributedDataParallel, with one process for each device"
        raise invalid_because("model", why)


def _remove(handles: list[Any]) -> None:
    # Empty the list itself: finalizers hold it, and would else remove the hooks twice.
    while handles:
        handles.pop().remove()


class Capture:
    """Owns the hooks on one model for one optimizer, and adds moments to the sums."""

    # Where K ``counts`` the passes of all layers, those that do not gather note their passes. Where
    # K does not count, G has no scale: moments are of gradients divided by a unit.
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
        self._layers, self._sums = layers, sums
        self._counts, self.reduce = counts, reduce
        self._precision = precision  # of float32 products
        self.errors = FirstError(holds=keep_errors)
        self.witness = Witness(layers, self.errors)
        self.is_armed = self.gathers = False  # whether layers may gather, and whether any does
        self.wanted: frozenset[Layer] = frozenset()
        self._missing: Layers = ()
        self.sample: Sample | None = None
        self._trainable: list[Any] = [p for layer in layers for p in layer.trainable]
        self._flags: list[bool] = []  # which of them required gradients when layers were armed
        self._changed = layers  # who had other parameters frozen then than in its statistics
        self.was_paused = False  # since the last reset
        self.backwards = 0  # calls since the last reset that a pass reached and trained
        self.draws = 0  # calls of fisher.draw since the last reset
        self.tapped = False  # whether a pass since the last reset may gather
        self.ran = False  # whether the model ran since the last reset, in a pass that may train
        self.drawing: dict[Call, Moments] | None = None  # while fisher draws
        # An input of every tap that gathers: a derivative by it runs taps, but no parameter's node.
        self.probe = torch.empty(0, requires_grad=True, device="cpu")
        self._begun: dict[Layer, int | None] = {}  # the backward pass that last found no gradient
        self._passes = passes.ForwardPasses()
        # The function modes that run modules' forwards, the innermost last; None: no mode.
        self._modes: list[Any] = []
        # Autograd runs the backward pass of each GPU in a thread of its own.
        self._lock = threading.Lock()
        self.sharded = frozenset(x for x in layers if is_sharded(x.weight) or is_sharded(x.bias))
        self._waiting = waiting_gradients(model) if self.sharded else {}
        # Layers whose uses are looked for in the passes of the next step that gathers, whether a
        # pass since the last reset was searched, and the modules in which uses were found.
        self.sought = {layer for layer in layers if layer.interceptor is None}
        self._searched = False
        self._noted: dict[tuple[Layer, nn.Module], None] = {}
        self._watched: dict[nn.Module, list[Layer]] = {}  # layers whose uses each module may hold
        self._by_module: dict[nn.Module, list[Layer]] = {}
        self.shared = WeakIdKeyDictionary()
        for layer in layers:
            layer.shared, layer.task = self.shared, LEAVE
        self._handles: list[Any] = []
        if layers:  # TorchScript has no hooks
            self._attach(model)
        # Hooks end with their optimizer: another may be built on the model. The finalizer holds
        # lists alone: if it held layers, a model that knows its optimizer would never be freed.
        for handles in (self._handles, self.witness.handles):
            weakref.finalize(self, _remove, handles).atexit = False

    def _attach(self, model: nn.Module) -> None:
        handles, starts, ends = self._handles, _Hook(self._model_starts), _Hook(self._model_ends)
        handles.append(model.register_forward_pre_hook(starts, with_kwargs=True))
        for layer in self._layers:
            for module in layer.watched_in:
                self._watch_at(layer, module)
            if not layer.watched_in:
                self._by_module.setdefault(layer.module, []).append(layer)
        for module, layers in self._by_module.items():
            if layers[0].interceptor is not None:
                self._run_around(module, self._enter)
                continue
            hook = _Hook(self._output, layers[0])
            # First: a user's hook may return something else than the layer's own output.
            handles.append(module.register_forward_hook(hook, with_kwargs=True, prepend=True))
        # Last, since the model may itself be a layer.
        handles.append(model.register_forward_hook(ends, always_call=True))

    def _run_around(self, module: nn.Module, starts: Any) -> None:
        self._handles.append(module.register_forward_pre_hook(_Hook(starts)))
        self._handles.append(module.register_forward_hook(_Hook(self._end_mode), always_call=True))

    # ---- a step ----

    def arm(self, due: Layers | None, missing: Layers, sample: Sample | None) -> None:
        """Write what each layer's hook does in the passes up to the next step; None: nothing."""
        # ``missing`` layers have no average: they gather if they train, in their slot or not.
        self.is_armed = due is not None
        if not (self.is_armed or self.gathers):
            return  # the tasks are as they are to be
        self.wanted, self._missing, self.sample = frozenset(due or ()), missing, sample
        former, self._flags = self._flags, [p.requires_grad for p in self._trainable]
        # A layer that was frozen or unfrozen since gathers anew. While flags stay, none joins those
        # that were found to differ from their statistics.
        if self._flags != former or self._changed:
            self._changed = [x for x in self._layers if x.covers_now() != x.covers]
        trains = [x for x in (*missing, *self._changed) if self.is_armed and any(x.covers_now())]
        gathering = self.wanted.union(trains)
        self.gathers = bool(gathering)
        idle = COUNT if gathering and self._counts else LEAVE
        for layer in self._layers:
            layer.task = GATHER if layer in gathering else idle
        if not self.witness.due.isdisjoint(gathering):
            self.witness.arm(gathering)

    def _follow_changes(self) -> None:
        # Arm anew if a parameter was frozen or unfrozen since. The model's call does so once, and
        # its layers must not: the list of flags would cost each of them more than its hook.
        looks = self.is_armed and self._passes.depth == 0
        if looks and [p.requires_grad for p in self._trainable] != self._flags:
            self.arm(self.wanted, self._missing, self.sample)

    def compared(self) -> bool:
        """Read what was compared since the last step; return whether a layer has to be named."""
        witness = self.witness
        if witness.handles or witness.later or witness.results:
            with self.errors:
                self.sought |= witness.settle()
        return bool(witness.elsewhere.keys() - witness.named)

    def reset(self) -> None:
        """Start anew after a step, which has consumed the statistics."""
        # After a quiet step, which must stay cheap, no other function may be called.
        calls = self._passes
        if calls.depth or self._modes or self.shared:
            self.break_off()
        if calls.loose is not None:
            calls.close_loose()
        self.backwards = self.draws = 0
        self.tapped = self.ran = False
        self.errors.error = None
        if self._searched:  # the search ends with the step whose passes were searched
            self._searched = False
            self.sought.clear()
            # Watch from now on, and not within the step: a checkpoint's recomputation would save
            # more tensors than its forward, which was not watched, and raise an error.
            for layer, around in self._noted:
                self._watch_at(layer, around)
            self._noted.clear()
        self.was_paused = calls.paused > 0

    def resume(self, former: Capture) -> None:
        """Go on in a step that another capture has begun; other layers may train by now."""
        self.backwards, self.was_paused = former.backwards, former.was_paused
        self.draws, self.tapped, self.ran = former.draws, former.tapped, former.ran

    def detach(self) -> None:
        _remove(self._handles)
        _remove(self.witness.handles)

    def break_off(self) -> None:
        """Leave calls of modules that were interrupted, and forget the last input's moment."""
        # After an interrupt, as by Ctrl-C, torch runs no hook that ends a call. A mode that stays
        # would see all that this thread runs from then on.
        self.shared.clear()
        self._passes.depth, self._passes.running = 0, None
        # A mode of the user's may be above the innermost one, and has to end first.
        while self._modes and self._modes[-1] in (None, _get_current_function_mode()):
            self._end_mode()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Gather nothing in forward passes under this context."""
        self._passes.paused += 1
        self.was_paused = True
        try:
            yield
        finally:
            self._passes.paused -= 1

    # ---- calls of the model, and of modules that run under a mode ----

    def _model_starts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        refuse_data_parallel(module)
        self._follow_changes()
        calls, trains = self._passes, torch.is_grad_enabled() and not passes.is_transformed()
        calls.depth += 1
        if trains and calls.running is None:
            calls.running = calls.begin(passes.batch_of(args, kwargs))
        self.ran |= trains
        searches = bool(self.sought) and trains and self.gathers
        self._searched |= searches
        self._run_under(Scope(self.sought, searches=True) if searches else None)

    def _model_ends(self, *call: Any) -> None:
        self._end_mode()
        calls = self._passes
        calls.depth = max(0, calls.depth - 1)  # zero_grad in the model's own code breaks off
        if calls.depth == 0 and calls.running is not None:
            calls.running.end, calls.running = passes.sequence_nr(), None

    def _sees(self, layers: list[Layer]) -> bool:
        # Most passes need not see the calls, and must not pay for a mode. Under a transform no call
        # is tapped, and TorchScript traces no mode.
        if not layers or not torch.is_grad_enabled() or passes.is_transformed():
            return False
        self._follow_changes()
        return any([layer.task for layer in layers]) or passes.is_checkpointed()

    def _enter(self, module: nn.Module, args: Any) -> None:
        layers = self._by_module[module]
        mode = layers[0].interceptor(layers, self._tap) if self._sees(layers) else None
        if mode is not None:
            mode.__enter__()
        self._modes.append(mode)

    def _end_mode(self, *call: Any) -> None:
        mode = self._modes.pop() if self._modes else None
        if mode is not None:
            mode.__exit__(None, None, None)

    # ---- uses beside a layer's own module ----

    def _run_under(self, scope: Scope | None) -> None:
        # Each call of a module pushes one entry, and its end pops one. Within a mode that sees
        # calls already, a second mode would tap each of them twice: the running one is taken.
        mode: WatchMode | None = None
        if scope is not None:
            mode = next((m for m in self._modes if isinstance(m, WatchMode)), None)
            mode = mode or WatchMode(self)
            mode.scopes.append(scope)  # until the exit that belongs to this call
            if len(mode.scopes) == 1:
                mode.__enter__()
        self._modes.append(mode)

    def _note(self, layer: Layer) -> None:
        self._noted[layer, next(running_calls())["self"]] = None

    def _watch_at(self, layer: Layer, module: nn.Module) -> None:
        watched = self._watched.setdefault(module, [])
        if not watched:
            self._run_around(module, self._watch_calls)
        if layer not in watched:
            watched.append(layer)

    def _watch_calls(self, module: nn.Module, args: Any) -> None:
        layers = self._watched[module]
        self._run_under(Scope(layers) if self._sees(layers) else None)

    def takes(self, layer: Layer) -> bool:
        """Return whether the mode reads a call with a layer's weight, and not its module's hook."""
        runs_now = (call["self"] is layer.module for call in running_calls())
        return bool(layer.watched_in) or not any(runs_now)

    def wholes(self, layer: Layer) -> list[Tensor | None]:
        """Return the tensors that stand in the places of a layer's weight and bias now."""
        pairs = zip(layer.names, (layer.weight, layer.bias), strict=True)
        return [None if p is None else gathered_in(layer.module, name, p) for name, p in pairs]

    # ---- a layer's call ----

    def _output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        layer = self._by_module[module][0]
        self._follow_changes()
        if not torch.is_grad_enabled() or not isinstance(output, Tensor):
            return None
        # functional_call or a later parametrization may stand in for the weight.
        if layer.weight is not None and layer in self.sharded:
            substituted = self.wholes(layer)[0] is None
        elif "weight" in module._parameters:
            substituted = module._parameters["weight"] is not layer.weight
        else:
            substituted = is_parametrized(module, "weight")
        x = args[0] if args else passes.first_tensor(kwargs)
        return None if substituted or x is None else self._tap(layer, output, x)

    def _tap(self, layer: Layer, output: Tensor, x: Tensor, blocks: slice = slice(None)) -> Tensor:
        # Return the output behind a tap, or unchanged if the call has no part in training.
        covers, outer = layer.covers_now(), passes.graph_task()
        again = None if outer is None else self._passes.again()
        paused = bool(self._passes.paused if again is None else again.paused)
        task = LEAVE if paused else layer.primary.task
        trains = any(covers) and output.requires_grad and not output.is_meta
        # Under a checkpoint every output is tapped: its forward and its recomputation, in which
        # other layers may gather, must save the same tensors.
        checkpointed = passes.is_checkpointed()
        leaves = task == LEAVE and not checkpointed
        if not trains or leaves or passes.is_transformed():
            return output
        # Forward-mode differentiation knows no rule for a tap.
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(output).tangent is not None:
            return output
        call, gathers, whole = None, task >= GATHER, checkpointed
        if task != LEAVE:
            call = Call(self, layer, self._passes.current(layer, x), covers, blocks, outer, task)
        if call is not None and gathers:
            if covers[0] and layer.reads_dense_only and (x.is_nested or x.layout != torch.strided):
                kind = "a nested tensor" if x.is_nested else f"of layout {x.layout}"
                why = f"Invalid input of layer {layer.name!r}: it is {kind}, whose rows K-FAC does "
                why += "not read; give it a padded or dense one, or build the optimizer with "
                why += f"skip_layers=[{layer.name!r}]"
                raise TypeError(why)
            self.tapped = True
            call.part = layer.part(x, output, self.sample)
            whole |= covers[0] and self.witness.watches(call)
        held = None
        if covers[0] and (gathers or checkpointed):
            held = _held(layer, x, WHOLE if whole or call is None else call.part)
        # A tap marks the output as changed in place. A selective checkpoint that keeps the output
        # looks at its version, and would refuse it.
        untouched = _unsafe_preserve_version_counter(output) if checkpointed else _NOTHING
        with untouched:
            probe = self.probe if gathers else None
            return Tap.apply(output, held, call, probe, layer.unseen_output)

    # ---- the backward pass ----

    def record(self, call: Call, x: Tensor | None, grad: Tensor) -> None:
        """Take the gradient that a backward pass brings to a call's output."""
        with self.errors:
            drawing = self.drawing
            # A penalty's torch.autograd.grad runs the tap, too, and trains nothing.
            if drawing is None and not passes.accumulates_into(call.anchor):
                return
            layer, covers, device = call.layer, call.covers, grad.device.type
            precision = full_precision(self._precision)
            profiled = torch._C._autograd._profiler_enabled()
            label = record_function(PREFIX + "capture") if profiled else _NOTHING
            with self._lock, torch.no_grad(), precision, without_autocast(device), label:
                if drawing is None:
                    self._reach(call)
                if call.task < GATHER:
                    return
                dtype = torch.promote_types(call.parameter.dtype, torch.float32)
                how = PassSettings(self.reduce, dtype, call.blocks, call.part)
                if drawing is not None:
                    drawing[call] = layer.moments(x, grad, covers, how)
                    return
                moments = call.moments
                if not call.drawn:
                    # Float32 has the squares of all float16 numbers; a division would lose some.
                    scaled = self._counts or grad.dtype == torch.float16 or grad.numel() == 0
                    unit = None if scaled else unit_of(grad)
                    rows = grad if unit is None else grad / unit
                    moments = layer.moments(x, rows, covers, how)._replace(unit=unit)
                call.moments = None  # a second training pass through the same graph adds nothing
                if moments is not None:
                    self._sums.add(layer, covers, moments, drawn=call.drawn)
                self.witness.add(call, x, grad)

    def _reach(self, call: Call) -> None:
        # Note that a pass that trains comes to a layer. Sums end with their gradients, which users
        # drop by the model's own zero_grad: sums that stayed would count in the next step's K.
        self.backwards += 1
        self._passes.close_loose()
        layer, sums, parameter = call.layer.primary, self._sums, call.parameter
        task = passes.graph_task() if call.outer is None else call.outer
        # This pass may add to a gradient that fully_shard holds back.
        waiting = getattr(self._waiting.get(parameter), "unsharded_accumulated_grad", None)
        begins = parameter.grad is None and call.anchor.grad is None and waiting is None
        # Every use of a layer in one pass meets the same missing gradient: the first drops.
        if begins and self._begun.get(layer) != task:
            self._begun[layer] = task
            sums.drop(layer)
        sums.passes.setdefault(layer, set()).add(call.forward_pass)


def _held(layer: Layer, x: Tensor, part: Part) -> Tensor:
    # A tap holds the input itself if the layer's own node holds it, which costs no memory.
    device, dtype = x.device.type, x.dtype
    casts = layer.cast_by_autocast and torch.is_autocast_enabled(device)
    if casts and x.is_floating_point() and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    if dtype == x.dtype and not layer.keeps_another:
        return x
    # Under autocast the layer keeps a copy in half precision; hold one as small. A layer that keeps
    # another tensor leaves the input to changes in place, after which autograd would refuse it.
    return part.of(x.detach()).to(dtype, copy=layer.keeps_another)
