"""Layer kinds of one's own: what register_layer and the first pass refuse, and by which words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD, Layer, register_layer
from kaisa_optim.layers import base


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return x @ self.weight.T


class OwnLayer(Layer):
    def __init__(self, name, module):
        super().__init__(name, module)
        self.in_shape, self.outputs = (3,), 2

    def input_rows(self, x, grad):
        return x[None, :, None]

    def output_rows(self, x, grad):
        return grad[None, :, None]


@pytest.fixture
def kinds():
    """The register as it was, afterwards."""
    former = dict(base._KINDS)
    yield
    base._KINDS.clear()
    base._KINDS.update(former)


def test_it_is_told_module_classes_and_takes_layers():
    with pytest.raises(TypeError, match=r"needs the module classes: @register_layer\(ModuleClass"):

        @register_layer
        class Kind(Layer):
            pass

    for module in (3, "Linear", nn.Linear(2, 2), int):
        with pytest.raises(TypeError, match=r"register_layer needs module classes, not .*ModuleCl"):
            register_layer(nn.Linear, module)
    for kind in (nn.Linear, 3, lambda name, module: None):
        with pytest.raises(TypeError, match="register_layer takes a subclass of Layer, not "):
            register_layer(Own)(kind)


def test_a_layer_kind_without_rows():
    class Kind(Layer):
        def input_rows(self, x, grad):
            return x

    with pytest.raises(TypeError, match=r"Kind lacks output_rows, which must return rows \[blocks"):
        register_layer(Own)(Kind)
    with pytest.raises(TypeError, match="Other lacks input_rows and output_rows, which"):
        register_layer(Own)(type("Other", (Layer,), {}))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"outputs": 2}, "it has no in_shape; set it in __init__"),
        ({"in_shape": (3,)}, "it has no outputs; set it in __init__"),
        ({"in_shape": (2,), "outputs": 3}, r"say \(3, 2\), the weight is \(2, 3\); .*weight_view"),
    ],
)
def test_a_layer_kind_of_another_size(kinds, sizes, said):
    class Kind(OwnLayer):
        def __init__(self, name, module):
            Layer.__init__(self, name, module)
            self.__dict__.update(sizes)

    register_layer(Own)(Kind)
    with pytest.raises(ValueError, match=f"Invalid Kind of '0': .*{said}"):
        KFACSGD(nn.Sequential(Own()), lr=0.1)


def test_a_layer_that_is_not_trained_may_be_of_any_size(kinds):
    """A kind may not know it, as of one whose weight was packed; nobody asks."""

    class Kind(OwnLayer):
        def __init__(self, name, module):
            super().__init__(name, module)
            self.outputs = 5

    register_layer(Own)(Kind)
    model = nn.Sequential(Own(), nn.Linear(2, 2))
    opt = KFACSGD(model[1].parameters(), lr=0.1, model=model)
    model(torch.ones(4, 3)).square().mean().backward()
    opt.step()
    assert list(opt.preconditioner.layers) == ["1"]


@pytest.mark.parametrize("method", ["input_rows", "output_rows"])
@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (lambda rows: rows[0], r"\(4, 1, \d\)"),
        (lambda rows: rows.expand(2, -1, -1, -1), r"\(2, 4, 1, \d\)"),
        (lambda rows: rows[..., :1], r"\(1, 4, 1, 1\)"),
    ],
)
def test_rows_of_another_shape(kinds, method, change, shape):
    def changed(self, x, grad):
        return change(getattr(OwnLayer, method)(self, x, grad))

    register_layer(Own)(type("Kind", (OwnLayer,), {method: changed}))
    model = nn.Sequential(Own())
    opt = KFACSGD(model, lr=0.1)
    features = 3 if method == "input_rows" else 2
    text = rf"Invalid Kind\.{method}: {shape} in layer '0'; .* here \[1, batch, .*, {features}\]"
    with pytest.raises(ValueError, match=text):
        model(torch.randn(4, 3)).sum().backward()
    assert list(opt.preconditioner.layers) == ["0"]
