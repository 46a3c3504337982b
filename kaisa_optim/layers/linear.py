"""Linear layers."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor, nn

from .base import _KINDS, Layer, register_layer


class SequenceRows(Layer):
    """Rows of a product with a matrix: the last dimension holds the features."""

    cast_by_autocast = True
    unseen_output = True
    reads_input = False

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        return SequenceRows.output_rows(self, None, x)

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        # [batch, ..., features], or one example.
        grad = grad[None] if grad.dim() == 1 else grad
        return grad.reshape(1, grad.shape[0], grad.shape[1:-1].numel(), grad.shape[-1])

    def unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1


@register_layer(nn.Linear)
class LinearLayer(SequenceRows):
    in_papers = True
    watchable = True
    input_dim = 1
    reads_dense_only = True

    def __init__(self, name: str, module: nn.Linear) -> None:
        super().__init__(name, module)
        self.in_shape = (module.in_features,)
        self.outputs = module.out_features

    def input_rows_key(self) -> Hashable:
        same = type(self).input_rows is LinearLayer.input_rows
        return LinearLayer if same else None


class Conv1DLayer(LinearLayer):
    """GPT-2's linear layer, whose weight is stored ``[inputs, outputs]``."""

    in_papers = False
    input_dim = 0

    def __init__(self, name: str, module: nn.Module) -> None:
        Layer.__init__(self, name, module)
        assert self.weight is not None
        inputs, self.outputs = self.weight.shape
        self.in_shape = (inputs,)

    def weight_view(self, tensor: Tensor) -> Tensor:
        return tensor.mT[None]


_KINDS["transformers.pytorch_utils.Conv1D"] = Conv1DLayer
