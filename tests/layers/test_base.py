"""What all kinds of layers do alike, and what is refused of kinds of one's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD, Layer, register_layer
from kaisa_optim.layers import base
from tests.layers.cases import ALL_WAYS, Case, check, normal
from tests.layers.test_conv import CONV, TRANSPOSED
from tests.layers.test_kinds import EMBEDDING, LINEAR
from tests.support.training import descend
from tests.support.watch import Body


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
    for module in (3, "Linear", nn.Linear(2, 2), int, Layer):
        with pytest.raises(TypeError, match=r"register_layer needs module classes, not .*ModuleCl"):
            register_layer(nn.Linear, module)
    with pytest.raises(TypeError, match=r"needs module classes, not \(\).*@register_layer\(Modul"):
        register_layer()
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
        ({"outputs": 3}, r"say \(3, 3\), the weight is \(2, 3\)"),
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
    descend(opt, model(torch.ones(4, 3)).square().mean())
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


WIDE = {
    # layer and input, limit, whether A and G lie beyond it
    "linear at the limit": (LINEAR["3d"], 5, (False, False)),
    "linear, the 1 counts": (LINEAR["3d"], 4, (True, False)),
    "linear without bias": (LINEAR["no bias 3d"], 4, (False, False)),
    "linear both": (LINEAR["3d"], 2, (True, True)),
    "linear output": (Case(lambda: nn.Linear(2, 5), lambda: normal(4, 3, 2)), 3, (False, True)),
    "convolution": (CONV["2d padding"], 18, (True, False)),
    "convolution both": (CONV["2d groups"], 2, (True, True)),
    "transposed": (TRANSPOSED["2d groups"], 8, (True, False)),
    "embedding output": (EMBEDDING["sequences"], 2, (True, True)),
}


@pytest.mark.parametrize(("case", "limit", "diagonal"), WIDE.values(), ids=list(WIDE))
def test_a_side_beyond_max_factor_size_is_diagonal(case, limit, diagonal):
    check(case, ALL_WAYS, diagonal, max_factor_size=limit)


def attends(batch_first: bool, **options: int) -> nn.Module:
    def use(m: nn.Module, x: Tensor) -> Tensor:
        other = x[..., :6] if m.attention.kdim == 6 else x
        return m.head(m.attention(x, other, other)[0])

    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
    return Body(use, attention=attention, head=nn.Linear(8, 2))


EMPTY = {
    "attention, no examples": (lambda: attends(True), (0, 5, 8)),
    "attention, no positions": (lambda: attends(True), (3, 0, 8)),
    "attention, positions first": (lambda: attends(False), (5, 0, 8)),
    "attention of other widths": (lambda: attends(True, kdim=6, vdim=6), (0, 5, 8)),
    "embedding, one a row": (lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 2)), (0,)),
    "embedding, no rows": (lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 2)), (0, 4)),
    "embedding, no tokens": (lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 2)), (3, 0)),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("make", "shape"), EMPTY.values(), ids=list(EMPTY))
def test_an_empty_batch_after_others_changes_no_factor(make, shape, sharing):
    torch.manual_seed(0)
    model = make().double()
    tokens = isinstance(model, nn.Sequential)
    full = [max(3, n) for n in shape]
    opt = KFACSGD(model, lr=0.1, weight_sharing=sharing, factor_update_steps=1)
    seen = []
    for sizes in (full, shape):
        x = torch.arange(math.prod(sizes)).remainder(5).reshape(sizes)
        descend(opt, model(x if tokens else x.double()).square().sum())
        known = opt.preconditioner
        seen.append([f.clone() for name in known.layers for f in known.factors(name)])
    for before, after in zip(*seen, strict=True):
        assert torch.equal(before, after)
