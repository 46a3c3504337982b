"""The tap on a layer's output: an identity that holds the input until the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.parametrize import is_parametrized

from ..comm.sharding import gathered_in, is_sharded
from ..layers import Layer, Moments, PassSettings
from ..layers.sampling import Part
from .forward_pass import ForwardPass

# Returns the hooks that pack tensors which autograd saves; torch 2.6 lacks it.
top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


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


class Call(PassSettings):
    """One call of a layer in a forward pass, as its backward pass has to know it.

    The forward decides what is gathered: the task of the layer may be another one by then.
    """

    __slots__ = (
        *("anchor", "capture", "covers", "drawn", "forward_pass", "layer", "moments"),
        *("outer", "own", "task"),
    )

    def __init__(
        self,
        capture: Any,  # the Capture that the backward pass reports to
        layer: Layer,
        forward_pass: ForwardPass,
        covers: tuple[bool, bool],
        blocks: slice,
        outer: int | None,  # the backward pass that a reentrant checkpoint runs this in, if any
        task: int,
    ) -> None:
        own = layer.weight if covers[0] else layer.bias
        assert own is not None
        super().__init__(capture.reduce, torch.promote_types(own.dtype, torch.float32), blocks)
        self.capture, self.layer, self.forward_pass = capture, layer, forward_pass
        self.covers, self.outer, self.task = covers, outer, task
        # Moments of drawn gradients, until the training pass takes them, and whether there were any
        self.moments: Moments | None = None
        self.drawn = False
        # The parameter that its gradients go to, and that parameter or the sharded one that it
        # stands for. While a layer runs, the whole parameter stands in a sharded one's place.
        self.anchor: Tensor = own
        self.own: Tensor = own
        if is_sharded(own):
            whole = gathered_in(layer.module, layer.names[not covers[0]], own)
            assert whole is not None
            self.anchor = whole


def as_used(layer: Layer, x: Tensor, part: Part) -> Tensor:
    """Return the input as autocast hands it to the layer, whose backward keeps such a copy.

    Only the ``part`` of an input is copied. An input is also copied if the layer keeps another
    tensor in its place: later operations may then change the input in place.
    """
    device, dtype = x.device.type, x.dtype
    cast = layer.cast_by_autocast and torch.is_autocast_enabled(device)
    if cast and x.is_floating_point() and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    elif not layer.keeps_another:
        return x
    return part.of(x.detach()).to(dtype, copy=layer.keeps_another)


def is_substituted(module: nn.Module, layer: Layer) -> bool:
    """Return whether functional_call or a later parametrization stands in for the weight."""
    if layer.weight is not None and is_sharded(layer.weight):
        return gathered_in(module, layer.names[0], layer.weight) is None
    if "weight" in module._parameters:
        return module._parameters["weight"] is not layer.weight
    return is_parametrized(module, "weight")


class FirstError:
    """Holds the first error of a block until the step asks for it.

    If a rank raised an error of its backward pass alone, the others would wait.
    """

    def __init__(self, *, holds: bool) -> None:
        self._holds = holds  # else the error is raised at once
        self.error: Exception | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not self._holds or not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True


def is_transformed() -> bool:
    """Return whether a torch.func transform runs, or a trace for TorchScript."""
    return torch._C._functorch.maybe_current_level() is not None or torch._C._is_tracing()


def has_tangent(output: Tensor) -> bool:
    """Return whether forward-mode differentiation runs, which knows no rule for a tap."""
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(output).tangent is not None


def check_layout(layer: Layer, x: Tensor) -> None:
    if x.is_nested or x.layout is not torch.strided:
        kind = "a nested tensor" if x.is_nested else f"of layout {x.layout}"
        raise TypeError(
            f"Invalid input of layer {layer.name!r}: it is {kind}, whose rows K-FAC does not read; "
            "give it a padded or dense one, or build the optimizer with "
            f"skip_layers=[{layer.name!r}]"
        )


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
