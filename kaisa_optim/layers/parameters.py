"""Layers of single parameters, whose use in the forward pass is watched.

A module that no kind knows may hold parameters of its own. The shape of a parameter tells its
factors, so that they have their place before the first pass. A matrix has two dense factors, a
stack of matrices two for each matrix. Any other parameter has one number for each of its entries.
The calls that use the parameter tell its statistics (see ``uses`` and ``watch``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .base import Layer
from .linear import SequenceRows
from .product import Product, product_of

# Modules of torch whose calls tell too little, and why: their parameters keep raw gradients.
_OPAQUE: dict[type[nn.Module], str] = {
    torch.jit.ScriptModule: "TorchScript runs its calls, and Python sees none of them",
    nn.RNNBase: "fused kernels show none of its steps",
    nn.RNNCellBase: "fused kernels do not show what its weights give",
    nn.Bilinear: "a product of two inputs with its weight",
    nn.PReLU: "",
    nn.EmbeddingBag: "sums of rows do not show the gradient of each",
    nn.utils.parametrize.ParametrizationList: "it is the original of a parametrized weight",
}


class WatchedLayer(Layer):
    """Parameters whose use is watched in the forward of the modules that hold them."""

    reads_dense_only = True
    watchable = True
    by_use = True

    def __init__(self, name: str, module: nn.Module, weight: nn.Parameter) -> None:
        super().__init__(name, module)
        self.weight, self.bias = weight, None
        self.watched_in = (module,)

    @property
    def sections(self) -> int:
        return self.blocks


class ElementwiseLayer(WatchedLayer):
    """A parameter whose entries scale or shift entries of its input: G is diagonal, A is 1."""

    multiplies = False
    diagonal_input = True

    def __init__(self, name: str, module: nn.Module, weight: nn.Parameter) -> None:
        super().__init__(name, module, weight)
        self.in_shape, self.outputs = (1,), weight.numel()

    def has_diagonal_g(self, covers: tuple[bool, bool]) -> bool:
        return True

    def weight_view(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(1, -1, 1)


class MatrixLayer(SequenceRows, WatchedLayer):
    """A matrix, or a stack of them such as experts', that multiplies rows.

    ``transposed`` stores ``[inputs, outputs]``. A bias belongs to the layer if a product adds it.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__(name, module, weight)
        self.bias = bias
        self.transposed = transposed
        self.input_dim = 0 if transposed else 1
        self.blocks = weight.shape[0] if weight.dim() == 3 else 1
        outputs, inputs = weight.shape[-2:][::-1] if transposed else weight.shape[-2:]
        self.in_shape, self.outputs = (inputs,), outputs

    def weight_view(self, tensor: Tensor) -> Tensor:
        matrices = tensor if tensor.dim() == 3 else tensor[None]
        return matrices.mT if self.transposed else matrices


class Declared(NamedTuple):
    """The layers of a module's parameters, and the reasons why some parameters have none."""

    layers: list[Layer]
    reasons: dict[Tensor, str]


def declared(name: str, module: nn.Module, *, by_shape: bool = True) -> Declared:
    """Return a layer for each parameter of a module that no kind knows, as far as shapes tell.

    Without ``by_shape``, return a layer only for the product that its source states.
    """
    title = type(module).__name__
    own = {n: p for n, p in module._parameters.items() if p is not None}
    for cls, why in _OPAQUE.items():
        if isinstance(module, cls):
            reason = f"no layer kind is registered for {title}" + (f": {why}" if why else "")
            return Declared([], dict.fromkeys(own.values(), reason))
    prefix, found = f"{name}." if name else "", Declared([], {})
    product = product_of(module)
    if product is not None:
        found.layers.append(_of_product(name, module, product))
    inside = () if product is None else (product.weight, product.bias)
    for own_name, p in own.items():
        why = _unshaped(p) if by_shape else ""
        if why:
            found.reasons[p] = f"{title}: {why}"
        elif by_shape and all(p is not other for other in inside):
            full = prefix + own_name
            is_matrix = p.dim() in (2, 3) and 1 not in p.shape
            kind = MatrixLayer if is_matrix else ElementwiseLayer
            found.layers.append(kind(full, module, p))
    return found


def _of_product(name: str, module: nn.Module, product: Product) -> MatrixLayer:
    return MatrixLayer(name, module, product.weight, product.bias, transposed=product.transposed)


def _unshaped(p: Tensor) -> str:
    """Return why no kind of layer fits a parameter's shape; an empty text if one fits."""
    if not p.is_floating_point():
        return "not real-valued"
    if p.numel() == 0:
        return "no entries"
    if not p.is_contiguous():
        return "not contiguous in memory"
    if sum(size > 1 for size in p.shape) > 3:
        return "more than three dimensions, outside of any convolution"
    return ""
