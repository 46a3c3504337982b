"""nn.MultiheadAttention: its projections are function calls inside, not submodule calls.

The packed in-projection is three blocks of one layer: query, key and value. With separate sizes it
is three layers. The out-projection is a layer of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .base import Layer, register_layer


class _AttentionMode(TorchFunctionMode):
    """Runs torch's own attention with its calls of ``linear`` tapped."""

    # Torch's function runs over a copy of its globals: no other thread or module is patched.

    def __init__(self, layers: list[Layer], tap: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers, self.tap = layers, tap

    @torch.compiler.disable  # a compiled model runs its attention as it is
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.multi_head_attention_forward:
            return func(*args, **kwargs)
        query = args[0] if args else kwargs["query"]
        batch = query.shape[1] if query.dim() == 3 else 1

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            out = F.linear(x, weight, bias)
            for layer in self.layers:
                whole = layer.weight
                if whole is not None and (weight is whole or weight._base is whole):
                    # The offset tells the block: chunks of one weight have it as their base.
                    first = (weight.storage_offset() - whole.storage_offset()) // whole.stride(0)
                    start = int(first) // layer.outputs
                    blocks = slice(start, start + weight.shape[0] // layer.outputs)
                    if out.dim() == 3:
                        return self.tap(layer, out, x, blocks)
                    # The out-projection's rows come flattened: positions, then batch.
                    sizes = out.shape[0] // max(1, batch), batch
                    rows, inputs = out.unflatten(0, sizes), x.unflatten(0, sizes)
                    return self.tap(layer, rows, inputs, blocks).flatten(0, 1)
            return out

        names: dict[str, Any] = dict(F.multi_head_attention_forward.__globals__)
        names["linear"] = linear
        names["has_torch_function"] = lambda tensors: False  # this call is dispatched already
        for name in ("_in_projection_packed", "_in_projection", "multi_head_attention_forward"):
            function = names[name]
            names[name] = FunctionType(
                function.__code__, names, name, function.__defaults__, function.__closure__
            )
        try:
            return names["multi_head_attention_forward"](*args, **kwargs)
        finally:
            names.clear()  # functions and their globals are a circle, which would outlive the model


@register_layer(nn.MultiheadAttention)
class ProjectionLayer(Layer):
    """One projection of an attention module; it sees ``[positions, batch, features]``."""

    cast_by_autocast = unseen_output = reads_dense_only = sectioned = True
    interceptor = _AttentionMode

    def __init__(
        self, name: str, module: nn.Module, weight: Any, bias: Any, blocks: int, at: int
    ) -> None:
        super().__init__(name, module)
        self.weight, self.bias, self.blocks = weight, bias, blocks
        self.at = at  # the first of its rows in a bias shared with other projections

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        return x.transpose(0, 1)[None]

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        return grad.unflatten(2, (-1, self.outputs)).permute(2, 1, 0, 3)

    def example_dim(self, output: Tensor) -> int | None:
        return 1

    def bias_view(self, tensor: Tensor) -> Tensor:
        end = self.at + self.blocks * self.outputs
        return tensor[self.at : end].unflatten(0, (self.blocks, self.outputs))

    @classmethod
    def layers_of(cls, name: str, module: nn.Module) -> list[Layer]:
        assert isinstance(module, nn.MultiheadAttention)
        prefix = f"{name}." if name else ""
        bias, out = module.in_proj_bias, module.out_proj
        layers: list[Layer] = []
        if module.in_proj_weight is not None:
            layers.append(cls(f"{prefix}in_proj", module, module.in_proj_weight, bias, 3, 0))
        for i, letter in enumerate("qkv" if module.in_proj_weight is None else ""):
            weight, at = getattr(module, f"{letter}_proj_weight"), i * module.embed_dim
            layers.append(cls(f"{prefix}{letter}_proj", module, weight, bias, 1, at))
            layers[-1].tag = f"{letter}_"
        return [*layers, cls(f"{prefix}out_proj", module, out.weight, out.bias, 1, 0)]

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        return "a parametrized projection" if hasattr(module, "parametrizations") else None
