"""Layers of single parameters, whose use in the forward pass is watched.

A module that no kind knows may hold parameters of its own. The shape of a parameter tells its
factors, so that they have their place before the first pass. A matrix has two factors, a stack of
matrices two for each matrix. The base optimizer steps all other parameters. The calls that use a
matrix tell its statistics (see ``uses`` and ``watch``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import Layer
from .kinds import SequenceRows

# Modules of torch whose calls tell too little, and why: their parameters keep raw gradients.
_OPAQUE: dict[type[nn.Module], str] = {
    torch.jit.ScriptModule: "TorchScript runs its calls, and Python sees none of them",
    nn.RNNBase: "fused kernels show none of its steps",
    nn.RNNCellBase: "fused kernels do not show what its weights give",
    nn.Bilinear: "a product of two inputs with its weight",
    nn.EmbeddingBag: "sums of rows do not show the gradient of each",
    nn.utils.parametrize.ParametrizationList: "it is the original of a parametrized weight",
}

# Norms whose weights may have the shape of a matrix.
NORMS = nn.LayerNorm, nn.RMSNorm

# The reason for parameters that only scale or shift entries.
SCALES = "scales or shifts entries: the base optimizer steps it"


class MatrixLayer(SequenceRows):
    """A matrix, or a stack of them such as experts', that multiplies rows.

    Its use is watched in the forward of the modules that hold it.
    """

    reads_dense_only = True
    watchable = True
    by_use = True
    input_dim = 1

    def __init__(self, path: str, module: nn.Module, name: str) -> None:
        super().__init__(path, module)
        weight = module._parameters[name]
        assert weight is not None
        self.weight, self.bias, self.names = weight, None, (name, "")
        self.watched_in = (module,)
        self.blocks = weight.shape[0] if weight.dim() == 3 else 1
        self.in_shape, self.outputs = (weight.shape[-1],), weight.shape[-2]

    @property
    def sections(self) -> int:
        return self.blocks

    def weight_view(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() == 3 else tensor[None]


def declared(name: str, module: nn.Module) -> tuple[list[Layer], dict[Tensor, str]]:
    """Return the layers of a module that no kind knows, and why other parameters have none."""
    title = type(module).__name__
    own = {n: p for n, p in module._parameters.items() if p is not None}
    for cls, why in _OPAQUE.items():
        if isinstance(module, cls):
            reason = f"no layer kind is registered for {title}: {why}"
            return [], dict.fromkeys(own.values(), reason)
    layers: list[Layer] = []
    reasons: dict[Tensor, str] = {}
    for own_name, p in own.items():
        if not p.is_floating_point():
            reasons[p] = f"{title}: not real-valued"
        elif p.numel() == 0:
            reasons[p] = f"{title}: no entries"
        elif not p.is_contiguous():
            reasons[p] = f"{title}: not contiguous in memory"
        elif sum(size > 1 for size in p.shape) > 3:
            reasons[p] = f"{title}: more than three dimensions, outside of any convolution"
        elif p.dim() in (2, 3) and 1 not in p.shape[-2:] and not isinstance(module, NORMS):
            path = f"{name}.{own_name}" if name else own_name
            layers.append(MatrixLayer(path, module, own_name))
        else:
            reasons[p] = SCALES
    return layers, reasons
