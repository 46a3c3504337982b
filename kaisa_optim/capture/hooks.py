"""Hooks that see, in each backward pass that trains a layer, its input with its output gradient.

A forward hook passes the layer's output through an identity autograd function that holds the input;
the pair is complete when the backward pass reaches it. So layers used twice, forwards without a
backward and evaluations beside training cannot mix up the pairs.

Beside its own module, other modules' code may use a layer's weight. In the first step that gathers,
a mode over the whole model's forward looks for all uses. From then on, calls are watched in the
modules in which uses were found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
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
from .passes import (
    NUMBERS,
    ForwardPass,
    ForwardPasses,
    accumulates_into,
    batch_of,
    first_tensor,
    graph_task,
    is_checkpointed,
    is_transformed,
    sequence_nr,
    top_hooks,
)
from .witness import FirstError, Witness

_NOTHING = contextlib.nullcontext()
_requires_grad = operator.attrgetter("requires_grad")


class Tap(torch.autograd.Function):
    """Identity on a layer's output, which in-place activations may follow.

    The output is marked as changed in place, so that activations may change it. For a view,
    autograd would then copy the gradient three times: if nothing else can see the view, a new
    tensor is returned. There is no setup_context, since torch would look up its signature in every
    call. Torch's transforms need one, so that nothing is tapped under them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        x: Tensor | None,
        call: Call | None,  # None: the tap is idle
        probe: Tensor | None,
        unseen: bool,
    ) -> Tensor:
        # Saved through autograd, so that checkpointing and offloading treat it as their own.
        ctx.save_for_backward(x)
        ctx.call = call
        if unseen and type(output) is Tensor and output._is_view():
            return torch.ops.aten._unsafe_view(output, output.shape)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @torch.compiler.disable  # for compiled functions that run the backward pass
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if ctx.call is not None:
            ctx.call.capture.record(ctx.call, x, grad)
        return grad, None, None, None, None


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer in a forward pass, as its backward pass has to know it.

    The forward decides what is gathered: the task of the layer may be another one by then.
    """

    capture: Capture
    layer: Layer
    forward_pass: ForwardPass
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
        own = layer.bias if by_bias else layer.weight
        assert own is not None
        # The parameter that its gradients go to, and that parameter or the sharded one that it
        # stands for. While a layer runs, the whole parameter stands in a sharded one's place.
        anchor: Tensor | None = own
        if layer.primary in self.capture.sharded:
            anchor = gathered_in(layer.module, layer.names[by_bias], own)
        assert anchor is not None
        self.anchor, self.own = anchor, own


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
    """A hook on one layer's module. It reads the layer's task, and leaves most calls at once."""

    def __init__(self, method: Any, layer: Layer, passes: ForwardPasses) -> None:
        super().__init__(method, layer)
        self.layer, self.passes = layer, passes

    @torch.compiler.disable  # as above
    def __call__(self, *args: Any) -> Any:
        layer = self.layer
        # A checkpoint may run, under which outputs are tapped for their number alone. Without the
        # model around it, a layer looks itself whether it was frozen or unfrozen.
        leaves = layer.task == LEAVE and top_hooks is not None and top_hooks(False) is None
        if leaves and (self.passes.calls or layer.covers_now() == layer.covers):
            return None
        return super().__call__(*args)


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

    Where K ``counts`` the passes of all layers, those that do not gather note their passes. Where K
    does not count, G has no scale: moments are of gradients divided by a unit.
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
        self._layers, self._sums = layers, sums
        self._counts, self.reduce = counts, reduce
        self._precision = precision  # of float32 products
        self.errors = FirstError(holds=keep_errors)
        self.witness = Witness(layers, self.errors)
        self.is_armed = self.gathers = False  # whether layers may gather, and whether any does
        self.wanted: frozenset[Layer] = frozenset()
        self._missing: Collection[Layer] = ()
        self.sample: Sample | None = None
        self.was_paused = False  # since the last reset
        self.backwards = 0  # calls since the last reset that a pass reached and trained
        self.draws = 0  # calls of fisher.draw since the last reset
        self.tapped = False  # whether a pass since the last reset may gather
        self.ran = False  # whether the model ran since the last reset, in a pass that may train
        self.drawing: dict[Call, Moments] | None = None  # while fisher draws
        # An input of every tap that gathers: a derivative by it runs taps, but no parameter's node.
        self.probe = torch.empty(0, requires_grad=True, device="cpu")
        self._begun: dict[Layer, int | None] = {}  # the backward pass that last found no gradient
        self._looked: int | None = None  # the backward pass that last looked for all gradients
        self._passes = ForwardPasses()
        # The function modes that run modules' forwards, the innermost last; None: no mode.
        self._modes: list[Any] = []
        # Autograd runs the backward pass of each GPU in a thread of its own.
        self._lock = threading.Lock()
        self.sharded = frozenset(x for x in layers if is_sharded(x.weight) or is_sharded(x.bias))
        self._waiting = waiting_gradients(model) if self.sharded else {}
        self.shared = WeakIdKeyDictionary()
        for layer in layers:
            layer.shared, layer.task = self.shared, LEAVE
        self._trainable = [p for layer in layers for p in layer.trainable]
        self._requiring: list[bool] = []  # which of them required gradients when layers were armed
        self._changed = layers  # who had other parameters frozen then than in its statistics
        # Layers whose uses are looked for in the passes of the next step that gathers, whether a
        # pass since the last reset was searched, and the modules in which uses were found.
        self.sought = {layer for layer in layers if layer.interceptor is None}
        self._searched = False
        self._noted: dict[tuple[Layer, nn.Module], None] = {}
        self._watched: dict[nn.Module, list[Layer]] = {}  # layers whose uses each module may hold
        # The NUMBERS at which watches of weights' uses began.
        self._since: dict[tuple[nn.Module, Tensor | None], int] = {}
        self._handles: list[Any] = []
        if layers:  # TorchScript has no hooks
            self._attach(model)
        # Hooks end with their optimizer: another may be built on the model.
        for handles in (self._handles, self.witness.handles):
            weakref.finalize(self, _remove, handles).atexit = False

    def _attach(self, model: nn.Module) -> None:
        handles, starts = self._handles, _Hook(self._model_starts)
        handles.append(model.register_forward_pre_hook(starts, with_kwargs=True))
        by_module: dict[nn.Module, list[Layer]] = {}
        for layer in self._layers:
            for module in layer.watched_in:
                self._watch_at(layer, module)
            if not layer.watched_in:
                by_module.setdefault(layer.module, []).append(layer)
        for module, layers in by_module.items():
            if layers[0].interceptor is None:
                hook = _OutputHook(self._output, layers[0], self._passes)
                # First: a user's hook may return something else than the layer's own output.
                handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
                handles.append(handle)
            else:
                handles.append(module.register_forward_pre_hook(_Hook(self._enter, layers)))
                handles.append(module.register_forward_hook(_Hook(self._exit), always_call=True))
        # Last, since the model may itself be a layer.
        handles.append(model.register_forward_hook(_Hook(self._model_ends), always_call=True))

    # ---- a step ----

    def arm(
        self,
        gathering: Collection[Layer] | None,
        missing: Collection[Layer] = (),
        sample: Sample | None = None,
    ) -> None:
        """Write what each layer's hook does in the passes up to the next step.

        ``gathering`` gather by their slot; None: nothing gathers. ``missing`` have no average: they
        gather if they train. ``sample`` are the rows that are read; None: all rows.
        """
        self.is_armed = gathering is not None
        if not (self.is_armed or self.gathers):
            return  # the fields are as they are to be
        self.wanted, self._missing, self.sample = frozenset(gathering or ()), missing, sample
        former, self._requiring = self._requiring, [*map(_requires_grad, self._trainable)]
        # A layer that was frozen or unfrozen since gathers anew. While flags stay, none joins those
        # that were found to differ from their statistics.
        if self._requiring != former or self._changed:
            self._changed = [x for x in self._layers if x.covers_now() != x.covers]
        trains = [x for x in (*missing, *self._changed) if self.is_armed and any(x.covers_now())]
        due = self.wanted.union(trains)
        self.gathers = bool(due)
        idle = COUNT if due and self._counts else LEAVE
        for layer in self._layers:
            layer.task = GATHER if layer in due else idle
        if not self.witness.due.isdisjoint(due):
            self.witness.arm(due)

    def _follow_changes(self) -> None:
        """Arm anew if a parameter was frozen or unfrozen since."""
        if self.is_armed and [*map(_requires_grad, self._trainable)] != self._requiring:
            self.arm(self.wanted, self._missing, self.sample)

    def compared(self) -> bool:
        """Read what was compared since the last step; return whether a layer has to be named.

        First, its uses are looked for once more.
        """
        if self.witness.waits:
            with self.errors:
                self.sought |= self.witness.settle()
        return bool(self.witness.elsewhere.keys() - self.witness.named)

    def reset(self) -> None:
        """Start anew after a step, which has consumed the statistics.

        After a quiet step, which must stay cheap, no other function is called.
        """
        passes = self._passes
        if passes.calls or self._modes or self.shared:
            self.break_off()
        if passes.loose is not None:
            passes.close_loose()
        self.backwards = self.draws = 0
        self.tapped = self.ran = False
        self.errors.error = None
        if self._searched:  # the search ends with the step whose passes were searched
            self._searched = False
            self.sought.clear()
        self.was_paused = passes.paused > 0

    def resume(self, former: Capture) -> None:
        """Go on in a step that another capture has begun; other layers may train by now."""
        self.backwards, self.was_paused = former.backwards, former.was_paused
        self.draws, self.tapped, self.ran = former.draws, former.tapped, former.ran
        self._since |= {x: former._since[x] for x in self._since.keys() & former._since.keys()}

    def detach(self) -> None:
        _remove(self._handles)
        _remove(self.witness.handles)

    def break_off(self) -> None:
        """Leave calls of modules that were interrupted, and forget the last input's moment.

        After an interrupt, as by Ctrl-C, torch runs no hook that ends a call.
        """
        self.shared.clear()
        self._passes.calls.clear()
        while self._modes:
            mode = self._modes[-1]
            if mode is not None:
                if mode is not _get_current_function_mode():
                    break  # another mode is above this one, and has to end first
                mode.__exit__(None, None, None)
            self._modes.pop()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Gather nothing in forward passes under this context."""
        self._passes.paused += 1
        self.was_paused = True
        try:
            yield
        finally:
            self._passes.paused -= 1

    # ---- the model's forward pass ----

    def _model_starts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        refuse_data_parallel(module)
        trains = torch.is_grad_enabled() and not is_transformed()
        calls = self._passes.calls
        forward_pass = calls[-1] if calls else None
        if forward_pass is None and trains:
            forward_pass = self._passes.begin(batch_of(args, kwargs))
        calls.append(forward_pass)
        self._follow_changes()
        self.ran |= trains
        searches = bool(self.sought) and trains and self.gathers
        self._searched |= searches
        self._run_under(Scope(self.sought, searches=True) if searches else None)

    def _model_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._exit(module, args, output)
        calls = self._passes.calls
        forward_pass = calls.pop() if calls else None
        if forward_pass is not None and forward_pass not in calls:
            forward_pass.end = sequence_nr()
        for layer, around in self._noted:
            self._watch_at(layer, around)
        self._noted.clear()

    def _sees(self, layers: list[Layer]) -> bool:
        """Return whether this pass has to see calls of these layers; most passes need not."""
        # Under a transform no call is tapped, and TorchScript traces no mode.
        if not layers or not torch.is_grad_enabled() or is_transformed():
            return False
        if not self._passes.calls:
            self._follow_changes()
        return any([layer.task for layer in layers]) or is_checkpointed()

    def _enter(self, layers: list[Layer], module: nn.Module, args: Any) -> None:
        mode = layers[0].interceptor(layers, self._tap) if self._sees(layers) else None
        if mode is not None:
            mode.__enter__()
        self._modes.append(mode)

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        mode = self._modes.pop() if self._modes else None
        if mode is not None:
            mode.__exit__(None, None, None)

    # ---- uses beside a layer's own module ----

    def _run_under(self, scope: Scope | None) -> None:
        """Run the module whose call begins under the mode, if it has a scope."""
        mode: WatchMode | None = None
        if scope is not None:
            mode = next((m for m in self._modes if isinstance(m, WatchMode)), None)
            mode = mode or WatchMode(self)
            mode.scopes.append(scope)  # until the exit that belongs to this call
            if len(mode.scopes) == 1:
                mode.__enter__()
        self._modes.append(mode)

    def _note(self, layer: Layer) -> None:
        """Note the module that uses a layer's weight, or that casts it, as one to be watched."""
        self._noted[layer, next(running_calls())["self"]] = None

    def _watch_at(self, layer: Layer, module: nn.Module) -> None:
        """Watch a layer's calls in a module, if they are not watched yet."""
        watched = self._watched.setdefault(module, [])
        if layer in watched:
            return
        if not watched:
            hooks = _Hook(self._watch_calls), _Hook(self._exit)
            self._handles.append(module.register_forward_pre_hook(hooks[0]))
            self._handles.append(module.register_forward_hook(hooks[1], always_call=True))
        self._since[module, layer.weight] = next(NUMBERS)
        watched.append(layer)

    def _watch_calls(self, module: nn.Module, args: Any) -> None:
        """Run a module's forward under a mode that finds uses, if the pass gathers.

        If a checkpoint recomputes a forward that was not watched, taps would save more tensors.
        """
        layers = self._watched[module]
        checkpointed = self._passes.again() if is_checkpointed() else None
        if checkpointed is not None:
            began = checkpointed.number
            layers = [x for x in layers if began > self._since[module, x.weight]]
        self._run_under(Scope(layers) if self._sees(layers) else None)

    def look_around(self, model: nn.Module, layers: Collection[Layer]) -> None:
        """Watch calls of layers, of which no call was seen, in all modules around their own.

        A search sees the model's own calls alone, and users may call its parts.
        """
        paths = {module: name for name, module in model.named_modules()} if layers else {}
        for layer in layers:
            path = "" if layer.interceptor else paths.get(layer.module, "")
            while path:
                path = path.rpartition(".")[0]
                self._watch_at(layer, model.get_submodule(path))

    def takes(self, layer: Layer) -> bool:
        """Return whether a call with a layer's weight is left to the mode.

        The hook of the layer's own module goes first.
        """
        return bool(layer.watched_in) or all(
            call["self"] is not layer.module for call in running_calls()
        )

    def wholes(self, layer: Layer) -> list[Tensor | None]:
        """Return the whole parameters that stand in the places of a layer's sharded ones now."""
        parameters = zip(layer.names, (layer.weight, layer.bias), strict=True)
        sharded = [(name, p) for name, p in parameters if p is not None and is_sharded(p)]
        return [gathered_in(layer.module, name, p) for name, p in sharded]

    # ---- a layer's call ----

    def _output(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._passes.calls:
            self._follow_changes()
        if not torch.is_grad_enabled() or not isinstance(output, Tensor):
            return None
        # functional_call or a later parametrization may stand in for the weight.
        weight = layer.weight
        if weight is not None and layer in self.sharded:
            substituted = gathered_in(module, layer.names[0], weight) is None
        elif "weight" in module._parameters:
            substituted = module._parameters["weight"] is not weight
        else:
            substituted = is_parametrized(module, "weight")
        if substituted:
            return None
        x = args[0] if args else first_tensor(kwargs)
        return None if x is None else self._tap(layer, output, x)

    def _tap(self, layer: Layer, output: Tensor, x: Tensor, blocks: slice = slice(None)) -> Tensor:
        """Return the output behind a tap, or unchanged if the call has no part in training."""
        covers, outer, checkpointed = layer.covers_now(), graph_task(), is_checkpointed()
        again = None if outer is None else self._passes.again()
        paused = bool(self._passes.paused if again is None else again.paused)
        task = LEAVE if paused else layer.primary.task
        trains = any(covers) and output.requires_grad and not output.is_meta
        # Under a checkpoint every output is tapped: its forward and its recomputation, in which
        # other layers may gather, must save the same tensors.
        leaves = task == LEAVE and not checkpointed
        if not trains or leaves or is_transformed():
            return output
        # Forward-mode differentiation knows no rule for a tap.
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(output).tangent is not None:
            return output
        call, gathers, whole = None, task >= GATHER, checkpointed
        if task:
            forward_pass = self._passes.current(layer, x)
            call = Call(self, layer, forward_pass, covers, blocks, outer, task)
        if call is not None and gathers:
            call.part = layer.part(x, output, self.sample)
            whole |= covers[0] and self.witness.watches(call)
            self.tapped = True
            dense = not x.is_nested and x.layout is torch.strided
            if covers[0] and layer.reads_dense_only and not dense:
                kind = "a nested tensor" if x.is_nested else f"of layout {x.layout}"
                raise TypeError(
                    f"Invalid input of layer {layer.name!r}: it is {kind}, whose rows K-FAC does "
                    "not read; give it a padded or dense one, or build the optimizer with "
                    f"skip_layers=[{layer.name!r}]"
                )
        held = x if covers[0] and (gathers or checkpointed) else None
        device, dtype = x.device.type, x.dtype
        casts = layer.cast_by_autocast and torch.is_autocast_enabled(device)
        if casts and x.is_floating_point() and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        if held is not None and (layer.keeps_another or dtype != x.dtype):
            # As autocast hands it to the layer, whose backward keeps such a copy. Where the layer
            # keeps another tensor in its place, later operations may change the input in place.
            part = WHOLE if whole or call is None else call.part
            held = part.of(x.detach()).to(dtype, copy=layer.keeps_another)
        # The mark would raise the output's version, and a selective checkpoint that keeps the
        # output would take it for changed.
        untouched = _unsafe_preserve_version_counter(output) if checkpointed else _NOTHING
        with untouched:
            probe = self.probe if gathers else None
            return Tap.apply(output, held, call, probe, layer.unseen_output)

    # ---- the backward pass ----

    def record(self, call: Call, x: Tensor | None, grad: Tensor) -> None:
        """Take the gradient that a backward pass brings to a call's output."""
        with self.errors:
            drawing = self.drawing
            if drawing is None and not accumulates_into(call.anchor):
                return
            layer, covers, device = call.layer, call.covers, grad.device.type
            precision = full_precision(self._precision)
            profiled = torch._C._autograd._profiler_enabled()
            label = (record_function if profiled else contextlib.nullcontext)(PREFIX + "capture")
            with self._lock, torch.no_grad(), precision, without_autocast(device), label:
                if drawing is None:
                    self._reach(call)
                if call.task < GATHER:
                    return
                dtype = torch.promote_types(call.own.dtype, torch.float32)
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
        """Note that a pass that trains comes to a layer; drop sums whose gradients are gone."""
        self.backwards += 1
        self._passes.close_loose()
        layer, sums = call.layer.primary, self._sums
        task = graph_task() if call.outer is None else call.outer
        # This pass may add to a gradient that fully_shard holds back.
        waiting = getattr(self._waiting.get(call.own), "unsharded_accumulated_grad", None)
        begins = call.own.grad is None and call.anchor.grad is None and waiting is None
        # Every use of a layer in one pass meets the same missing gradient: the first drops.
        if begins and self._begun.get(layer) != task:
            self._begun[layer] = task
            sums.drop(layer)
            if call.outer is None and task != self._looked:
                # Gradients of layers that this pass need not reach may be gone, too. Look once a
                # pass: the next pass drops what a hook clears in it. Gradients that fully_shard
                # holds back can't be told from gradients that are gone.
                self._looked = task
                for other in sums.passes.keys() - self.sharded:
                    p = other.weight if other.covers_now()[0] else other.bias
                    if p is not None and p.grad is None and self._begun.get(other) != task:
                        sums.drop(other)
        sums.passes.setdefault(layer, set()).add(call.forward_pass)
