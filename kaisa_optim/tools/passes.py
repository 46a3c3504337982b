"""The cost of a batch: operations and bytes of a model's passes, and the rows of its layers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..errors import invalid, invalid_because
from ..layers import Layer
from ..model import task_of
from .prices import Passes

_BACKWARD = 2  # operations and bytes of a backward pass, in forward passes
# Operations that move nothing, though they are no views.
_STILL = {torch.ops.aten._unsafe_view, torch.ops.aten.empty, torch.ops.aten.new_empty}


class _Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.embedding:  # reads the chosen rows alone
            self.add(args[1], output, output)
        elif not (func.is_view or func.overloadpacket in _STILL):
            self.add(args, kwargs, output)
        return output

    def add(self, *values: Any) -> None:
        self.size += sum(x.nbytes for x in tree.tree_leaves(values) if isinstance(x, Tensor))

    @contextlib.contextmanager
    def fused_attention(self) -> Iterator[None]:
        """Count attention as one operation: devices never write its scores to memory."""
        plain = nn.functional.scaled_dot_product_attention

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            before = self.size
            output = plain(*args, **kwargs)
            self.size = before
            self.add(args, kwargs, output)
            return output

        nn.functional.scaled_dot_product_attention = counted
        try:
            yield
        finally:
            nn.functional.scaled_dot_product_attention = plain


class _CopiesOnMeta(TorchFunctionMode):
    """Puts deep copies of tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0].to("meta")
        return func(*args, **(kwargs or {}))


def passes_of(
    model: nn.Module, batch: Any, layers: Iterable[Layer], fraction: float | None
) -> Passes:
    """Return what one batch costs; the forward pass runs on the meta device, without numbers.

    ``batch`` is the model's input: a tensor, a tuple of arguments or a dict of them. ``fraction``
    is the part of the examples that statistics are taken from; None: by rows.
    """
    args, kwargs = arguments(tree.tree_map_only(Tensor, lambda x: x.to("meta"), batch))
    rows: dict[str, int] = {}
    counter, traffic = FlopCounterMode(display=False), _Traffic()
    try:
        with torch.no_grad():
            # A model may cache tables that its pass makes. Those of the meta device go with a
            # copy; in the model itself they would fail the next real pass.
            copies: dict[int, Any] = {id(x): x.to("meta") for x in model.parameters()}
            with _CopiesOnMeta():
                twin = copy.deepcopy(model, copies)
            for layer in layers:
                copies[id(layer.module)].register_forward_hook(_reader(layer, rows, fraction))
            with traffic.fused_attention(), counter, traffic, torch.device("meta"):
                twin(*args, **kwargs)
    except Exception as error:
        why = f"the model can't be run with it on the meta device: {error}"
        raise invalid_because("batch", why) from error
    share = 1 + _BACKWARD
    return Passes(share * float(counter.get_total_flops()), rows, share * traffic.size)


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    if isinstance(batch, Tensor):
        return (batch,), {}
    must = "it must be a model's input: a tensor, a tuple of arguments, or a dict of them"
    raise invalid("batch", batch, must)


def _reader(layer: Layer, rows: dict[str, int], fraction: float | None) -> Any:
    """Return a hook that adds the rows of a call: one for each vector of outputs."""
    task = task_of(layer)
    # Blocks of a convolution are groups of its outputs; blocks of attention share an output.
    outputs_of_row = task.g * (1 if layer.interceptor else task.blocks)

    def count(module: nn.Module, *passed: Any) -> None:
        x, out = (next(filter(torch.is_tensor, tree.tree_leaves(y)), None) for y in passed)
        if out is not None:
            part = layer.part(out if x is None else x, out, (fraction, 0))
            read = round(out.numel() // outputs_of_row * part.taken / part.whole)
            rows[task.name] = rows.get(task.name, 0) + max(1, read)

    return count
