"""Every layer kind against the dense reference: its factors and its preconditioned gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from tests.support import reference as ref
from tests.support.watch import PAPERS

pytestmark = [
    pytest.mark.filterwarnings("ignore:the base optimizer updates these"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
]

DAMPING = 0.07
SHARING = ("expand", "reduce")


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tokens(*shape: int, high: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


@dataclass
class Case:
    """A layer, its input, and ``call``: what else its forward is given."""

    layer: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    call: dict[str, Any] = field(default_factory=dict)
    terms: float | None = None  # the K that the optimizer must find itself; None: the batch size
    prepare: Callable[[nn.Module], None] | None = None


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Tensor, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


def build(case: Case) -> tuple[Net, Tensor]:
    torch.manual_seed(2)
    layer = case.layer().double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    if case.prepare is not None:
        case.prepare(layer)
    return Net(layer), case.inputs()


def loss_of(output: Tensor) -> Tensor:
    """Not linear in the output, so that output gradients depend on it."""
    count = output.numel()
    mix = torch.linspace(-1.0, 1.3, count, dtype=torch.float64).view(output.shape)
    return torch.sum(torch.sin(output + mix) * (1 + mix)) / max(len(output), 1)


def changed(layer: nn.Module, tensors: dict[str, Tensor]) -> Tensor:
    picked = [
        tensors.get(f"layer.{key}") if ref.trained(getattr(layer, key, None)) else None
        for key in ("weight", "bias")
    ]
    return ref.matrix(layer, *picked)


# Each sharing with half of the methods: a method sees no more of a layer than its factors.
WAYS = [
    *(("expand", method) for method in ("eigen", "inverse-full")),
    *(("reduce", method) for method in ("eigen-outer", "inverse-pi")),
]
ALL_WAYS = [(sharing, method) for sharing in SHARING for method in ref.METHODS]


def optimizer(net: nn.Module, sharing: str, method: str, **options: Any) -> KFACSGD:
    """Return an optimizer whose step is the preconditioned gradient."""
    options = {"damping": DAMPING, "kl_clip": None, **ref.METHODS[method], **options}
    return KFACSGD(net, lr=1.0, weight_sharing=sharing, **options)


def check(
    case: Case,
    ways: list[tuple[str, str]] = WAYS,
    diagonal: tuple[bool, bool] = (False, False),
    **options: Any,
) -> None:
    net, x = build(case)
    a = ref.input_rows(net.layer, x, **case.call)
    g = ref.gradient_rows(net.layer, loss_of, x, **case.call)
    terms = len(x) if case.terms is None else case.terms
    for sharing, method in ways:
        net, x = build(case)
        opt = optimizer(net, sharing, method, **options)
        loss_of(net(x, **case.call)).backward()
        gradient = changed(net.layer, ref.gradients_of(net))
        ref.assert_close(torch.einsum("bnpg,bnpa->bga", g, a), gradient, what="reference's rows")
        expected = ref.factors(a, g, terms, sharing, *diagonal)
        check_step(opt, net, expected, gradient, f"{sharing}, {method}", method)


def check_step(
    opt: KFACSGD, net: nn.Module, expected: Any, gradient: Tensor, what: str, method: str
) -> None:
    layouts = [p.stride() for p in net.parameters()]
    step = changed(net.layer, ref.take_step(opt, net))
    assert layouts == [p.stride() for p in net.parameters()], what
    found = opt.preconditioner.factors("layer")
    for actual, wanted, label in zip(found, expected, "AG", strict=True):
        ref.assert_close(actual, wanted, what=f"{what}: factor {label}")
    wanted = ref.precondition(*expected, gradient, DAMPING, method)
    ref.assert_close(step, wanted, what=f"{what}: step")


def freeze(name: str) -> Callable[[nn.Module], None]:
    return lambda layer: getattr(layer, name).requires_grad_(False)


def channels_last(layer: nn.Module) -> None:
    layer.to(memory_format=torch.channels_last)


# ---------------------------------------------------------------- linear

LINEAR = {
    "2d": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 4)),
    "3d": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 2, 4)),
    "4d": Case(lambda: nn.Linear(4, 3), lambda: normal(3, 2, 3, 4)),
    "1d": Case(lambda: nn.Linear(4, 3), lambda: normal(4), terms=1.0),
    "one example": Case(lambda: nn.Linear(4, 3), lambda: normal(1, 4)),
    "no bias": Case(lambda: nn.Linear(4, 3, bias=False), lambda: normal(5, 4)),
    "no bias 3d": Case(lambda: nn.Linear(4, 3, bias=False), lambda: normal(5, 2, 4)),
    "one output": Case(lambda: nn.Linear(4, 1), lambda: normal(5, 4)),
    "frozen weight": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 4), prepare=freeze("weight")),
    "frozen bias": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 4), prepare=freeze("bias")),
    "non-contiguous": Case(lambda: nn.Linear(4, 3), lambda: normal(4, 10).T[::2]),
    "transposed 3d": Case(lambda: nn.Linear(4, 3), lambda: normal(2, 5, 4).transpose(0, 1)),
    "expanded": Case(lambda: nn.Linear(4, 3), lambda: normal(1, 2, 4).expand(5, 2, 4)),
    "input with gradient": Case(lambda: nn.Linear(4, 3), lambda: normal(5, 4).requires_grad_()),
}

# ---------------------------------------------------------------- convolution


def conv1(*args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv1d(*args, **kwargs)


def conv2(*args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(*args, **kwargs)


def conv3(*args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv3d(*args, **kwargs)


def image(*shape: int) -> Callable[[], Tensor]:
    return lambda: normal(*shape)


CONV = {
    "1d": Case(conv1(2, 3, 3), image(3, 2, 7)),
    "1d stride padding": Case(conv1(2, 3, 3, stride=2, padding=1), image(3, 2, 7)),
    "1d same dilated": Case(conv1(2, 3, 4, padding="same", dilation=2), image(2, 2, 9)),
    "1d circular": Case(conv1(2, 3, 3, padding=2, padding_mode="circular"), image(2, 2, 6)),
    "1d groups": Case(conv1(4, 6, 2, groups=2), image(2, 4, 5)),
    "1d unbatched": Case(conv1(2, 3, 3, padding=1), image(2, 6), terms=1.0),
    "1d no bias": Case(conv1(2, 3, 3, bias=False), image(2, 2, 6)),
    "2d": Case(conv2(2, 3, 2), image(3, 2, 4, 4)),
    "2d one by one": Case(conv2(3, 2, 1), image(3, 3, 2, 3)),
    "2d stride": Case(conv2(2, 3, 2, stride=(2, 1)), image(2, 2, 5, 4)),
    "2d stride leaves a rest": Case(conv2(1, 2, 3, stride=2), image(2, 1, 6, 6)),
    "2d padding": Case(conv2(2, 3, 3, padding=1), image(2, 2, 4, 3)),
    "2d uneven padding": Case(conv2(2, 3, (3, 2), padding=(2, 1)), image(2, 2, 3, 4)),
    "2d valid": Case(conv2(2, 3, 2, padding="valid"), image(2, 2, 3, 4)),
    "2d same odd": Case(conv2(2, 3, 3, padding="same"), image(2, 2, 4, 3)),
    "2d same even": Case(conv2(2, 3, (2, 4), padding="same"), image(2, 2, 3, 5)),
    "2d same dilated": Case(conv2(1, 2, (2, 3), padding="same", dilation=2), image(2, 1, 4, 5)),
    "2d same reflect": Case(
        conv2(1, 2, (2, 3), padding="same", padding_mode="reflect"), image(2, 1, 4, 5)
    ),
    "2d circular": Case(conv2(2, 2, 3, padding=1, padding_mode="circular"), image(2, 2, 3, 4)),
    "2d uneven circular": Case(
        conv2(2, 2, 3, padding=(0, 2), padding_mode="circular"), image(2, 2, 3, 4)
    ),
    "2d reflect": Case(conv2(2, 2, 3, padding=(1, 2), padding_mode="reflect"), image(2, 2, 3, 4)),
    "2d replicate": Case(
        conv2(2, 2, 3, padding=2, padding_mode="replicate", stride=2), image(2, 2, 3, 4)
    ),
    "2d dilation": Case(conv2(2, 3, 2, dilation=(2, 1)), image(2, 2, 4, 3)),
    "2d everything": Case(
        conv2(
            4,
            6,
            (3, 2),
            stride=(2, 1),
            padding=(1, 2),
            dilation=(1, 2),
            groups=2,
            padding_mode="circular",
        ),
        image(2, 4, 4, 3),
    ),
    "2d groups": Case(conv2(4, 6, 2, groups=2), image(2, 4, 3, 4)),
    "2d groups no bias": Case(conv2(4, 2, 2, groups=2, bias=False), image(2, 4, 3, 4)),
    "2d depthwise": Case(conv2(3, 3, 2, groups=3), image(2, 3, 3, 4)),
    "2d depthwise multiplied": Case(conv2(2, 4, 2, groups=2, padding=1), image(2, 2, 3, 2)),
    "2d unbatched": Case(conv2(2, 3, 2), image(2, 3, 4), terms=1.0),
    "2d unbatched groups": Case(conv2(2, 4, 2, groups=2), image(2, 3, 4), terms=1.0),
    "2d no bias": Case(conv2(2, 3, 2, bias=False), image(2, 2, 3, 4)),
    "2d frozen weight": Case(conv2(2, 3, 2), image(2, 2, 3, 4), prepare=freeze("weight")),
    "2d frozen bias": Case(conv2(2, 3, 2), image(2, 2, 3, 4), prepare=freeze("bias")),
    "2d frozen weight groups": Case(
        conv2(2, 4, 2, groups=2), image(2, 2, 3, 3), prepare=freeze("weight")
    ),
    "2d channels_last input": Case(
        conv2(3, 2, 2), lambda: normal(2, 3, 3, 4).to(memory_format=torch.channels_last)
    ),
    "2d channels_last": Case(
        conv2(3, 2, 2),
        lambda: normal(2, 3, 3, 4).to(memory_format=torch.channels_last),
        prepare=channels_last,
    ),
    "2d channels_last groups": Case(
        conv2(4, 6, 2, groups=2),
        lambda: normal(2, 4, 3, 4).to(memory_format=torch.channels_last),
        prepare=channels_last,
    ),
    "2d non-contiguous": Case(conv2(2, 3, 2), lambda: normal(2, 4, 3, 8)[:, ::2, :, ::2]),
    "2d transposed": Case(conv2(2, 3, 2), lambda: normal(4, 3, 2, 2).permute(3, 2, 1, 0)),
    "2d input with gradient": Case(
        conv2(2, 3, 2, padding=1), lambda: normal(2, 2, 3, 2).requires_grad_()
    ),
    "3d": Case(conv3(2, 3, 2), image(2, 2, 2, 3, 3)),
    "3d mixed": Case(
        conv3(1, 2, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), dilation=(1, 1, 2)),
        image(2, 1, 2, 3, 4),
    ),
    "3d same": Case(conv3(1, 2, (2, 1, 3), padding="same"), image(2, 1, 2, 2, 3)),
    "3d replicate": Case(conv3(1, 2, 2, padding=1, padding_mode="replicate"), image(1, 1, 2, 2, 2)),
    "3d groups": Case(conv3(2, 4, (1, 2, 2), groups=2, bias=False), image(2, 2, 2, 3, 2)),
    "3d unbatched": Case(conv3(1, 2, 2), image(1, 2, 3, 3), terms=1.0),
}

# ---------------------------------------------------------------- transposed convolution


def deconv1(*args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: nn.ConvTranspose1d(*args, **kwargs)


def deconv2(*args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: nn.ConvTranspose2d(*args, **kwargs)


def deconv3(*args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: nn.ConvTranspose3d(*args, **kwargs)


TRANSPOSED = {
    "1d": Case(deconv1(2, 3, 3), image(2, 2, 4)),
    "1d stride": Case(deconv1(2, 3, 3, stride=2, padding=1, output_padding=1), image(2, 2, 3)),
    "1d dilation groups": Case(deconv1(4, 2, 2, dilation=2, groups=2), image(2, 4, 3)),
    "1d output_size": Case(deconv1(2, 3, 3, stride=3), image(2, 2, 3), call={"output_size": [10]}),
    "1d unbatched": Case(deconv1(2, 3, 2, stride=2), image(2, 3), terms=1.0),
    "2d": Case(deconv2(2, 3, 2), image(2, 2, 3, 2)),
    "2d stride": Case(deconv2(2, 3, (2, 3), stride=(2, 1)), image(2, 2, 2, 3)),
    "2d padding": Case(deconv2(2, 3, 3, padding=(1, 2)), image(2, 2, 3, 4)),
    "2d output_padding": Case(
        deconv2(2, 3, 3, stride=(2, 3), padding=1, output_padding=(1, 2)), image(2, 2, 2, 2)
    ),
    "2d dilation": Case(
        deconv2(2, 2, 2, dilation=(1, 3), padding=(0, 1), output_padding=(0, 2)),
        image(2, 2, 2, 2),
    ),
    "2d groups": Case(deconv2(4, 6, 2, groups=2, stride=2), image(2, 4, 2, 2)),
    "2d depthwise": Case(deconv2(3, 3, 2, groups=3), image(2, 3, 2, 2)),
    "2d no bias": Case(deconv2(2, 3, 2, bias=False), image(2, 2, 2, 2)),
    "2d padding beyond the kernel": Case(deconv2(2, 3, 2, stride=2, padding=2), image(2, 2, 4, 4)),
    "2d output_size": Case(
        deconv2(2, 2, 3, stride=2, padding=1), image(2, 2, 2, 3), call={"output_size": (4, 5)}
    ),
    "2d unbatched": Case(deconv2(2, 3, 2), image(2, 2, 3), terms=1.0),
    "2d channels_last": Case(
        deconv2(3, 2, 2),
        lambda: normal(2, 3, 2, 3).to(memory_format=torch.channels_last),
        prepare=channels_last,
    ),
    "2d frozen weight": Case(deconv2(2, 3, 2), image(2, 2, 2, 2), prepare=freeze("weight")),
    "2d frozen bias": Case(deconv2(2, 3, 2), image(2, 2, 2, 2), prepare=freeze("bias")),
    "3d": Case(deconv3(1, 2, 2), image(2, 1, 2, 2, 1)),
    "3d mixed": Case(
        deconv3(
            2, 4, (1, 2, 2), stride=(1, 2, 1), padding=(0, 1, 0), groups=2, output_padding=(0, 1, 0)
        ),
        image(1, 2, 2, 2, 2),
    ),
}

# ---------------------------------------------------------------- embedding

EMBEDDING = {
    "indices": Case(lambda: nn.Embedding(6, 3), lambda: tokens(5, high=6)),
    "sequences": Case(lambda: nn.Embedding(6, 3), lambda: tokens(3, 4, high=6)),
    "4d": Case(lambda: nn.Embedding(4, 2), lambda: tokens(2, 3, 2, high=4)),
    "repeated": Case(lambda: nn.Embedding(6, 3), lambda: torch.tensor([[1, 1, 4], [1, 4, 4]])),
    "padding_idx": Case(
        lambda: nn.Embedding(6, 3, padding_idx=2), lambda: torch.tensor([[1, 2, 4], [2, 2, 0]])
    ),
    "last padding_idx": Case(
        lambda: nn.Embedding(6, 3, padding_idx=-1), lambda: torch.tensor([[5, 2, 4], [2, 5, 0]])
    ),
}


def each(cases: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases.values(), ids=list(cases))


each_sharing = pytest.mark.parametrize("sharing", SHARING)


@each(LINEAR)
def test_linear(case):
    check(case)


@each(CONV)
def test_convolution(case):
    check(case)


@each(TRANSPOSED)
def test_transposed_convolution(case):
    check(case)


@each(EMBEDDING)
def test_embedding(case):
    check(case, diagonal=(True, False))


# ---------------------------------------------------------------- wide sides

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


# ---------------------------------------------------------------- attention


@dataclass
class Attention:
    """Sizes and options of one nn.MultiheadAttention call; 2 examples, 3 queries, 4 keys."""

    make: dict[str, Any] = field(default_factory=dict)
    cross: bool = False
    one_memory: bool = False  # key and value are the same tensor
    kdim: int = 4
    vdim: int = 4
    call: Callable[[], dict[str, Any]] = dict
    batched: bool = True


ATTENTION = {
    "self": Attention(),
    "self batch first": Attention({"batch_first": True}),
    "self no bias": Attention({"bias": False, "batch_first": True}),
    "self unbatched": Attention(batched=False),
    "cross": Attention(cross=True),
    "cross batch first": Attention({"batch_first": True}, cross=True),
    "cross to one memory": Attention(cross=True, one_memory=True),
    "cross to one memory batch first": Attention(
        {"batch_first": True}, cross=True, one_memory=True
    ),
    "kdim and vdim": Attention({"kdim": 3, "vdim": 5}, cross=True, kdim=3, vdim=5),
    "kdim and vdim batch first": Attention(
        {"kdim": 3, "vdim": 5, "batch_first": True}, cross=True, kdim=3, vdim=5
    ),
    "kdim and vdim no bias": Attention(
        {"kdim": 3, "vdim": 5, "bias": False}, cross=True, kdim=3, vdim=5
    ),
    "kdim alone": Attention({"kdim": 3, "batch_first": True}, cross=True, kdim=3),
    "one bias key and value": Attention({"add_bias_kv": True, "batch_first": True}),
    "zero attention": Attention({"add_zero_attn": True}, cross=True),
    "boolean mask": Attention(
        {"batch_first": True}, call=lambda: {"attn_mask": torch.ones(3, 3).triu(1).bool()}
    ),
    "float mask": Attention(cross=True, call=lambda: {"attn_mask": normal(3, 4, seed=8)}),
    "mask per head": Attention(call=lambda: {"attn_mask": normal(4, 3, 3, seed=8)}),
    "padded keys": Attention(
        {"batch_first": True},
        cross=True,
        call=lambda: {"key_padding_mask": torch.tensor([[False] * 4, [False, False, True, True]])},
    ),
}


def attention_inputs(case: Attention, width: int) -> tuple[Tensor, Tensor, Tensor]:
    if not case.cross:
        query = normal(2, 3, width, seed=5)
        inputs = (query, query, query)
    else:
        key = normal(2, 4, case.kdim, seed=6)
        value = key if case.one_memory else normal(2, 4, case.vdim, seed=7)
        inputs = (normal(2, 3, width, seed=5), key, value)
    if not case.batched:
        moved = {id(t): t[0] for t in inputs}
    elif not case.make.get("batch_first"):
        moved = {id(t): t.transpose(0, 1) for t in inputs}
    else:
        moved = {id(t): t for t in inputs}
    return tuple(moved[id(t)] for t in inputs)  # a self-attention passes one tensor three times


def attention_matrices(mha: nn.MultiheadAttention, tensors: dict[str, Tensor], prefix: str):
    """A gradient or update of the whole module by projection: ``[1, g, a]`` each."""
    packed = tensors.get(f"{prefix}in_proj_weight")
    weights = (
        packed.chunk(3)
        if packed is not None
        else [tensors[f"{prefix}{label}_proj_weight"] for label in "qkv"]
    )
    bias = tensors.get(f"{prefix}in_proj_bias")
    biases = [None] * 3 if bias is None else bias.chunk(3)
    result = {
        label: torch.cat([w] if b is None else [w, b[:, None]], dim=1)[None]
        for label, w, b in zip("qkv", weights, biases, strict=True)
    }
    bias = tensors.get(f"{prefix}out_proj.bias")
    out = tensors[f"{prefix}out_proj.weight"]
    result["out"] = torch.cat([out] if bias is None else [out, bias[:, None]], dim=1)[None]
    return result


def attention_factors(opt, mha: nn.MultiheadAttention, name: str) -> dict[str, tuple]:
    if mha.in_proj_weight is None:
        result = {label: opt.preconditioner.factors(f"{name}.{label}_proj") for label in "qkv"}
    else:
        a, g = opt.preconditioner.factors(f"{name}.in_proj")
        assert len(a) == len(g) == 3
        result = {label: (a[i : i + 1], g[i : i + 1]) for i, label in enumerate("qkv")}
    result["out"] = opt.preconditioner.factors(f"{name}.out_proj")
    return result


def attention_loss(output: Tensor, weights: Tensor | None) -> Tensor:
    loss = loss_of(output)
    if weights is not None:
        mix = torch.linspace(0, 1, weights.numel(), dtype=weights.dtype).view_as(weights)
        loss = loss + (mix * weights).square().sum()
    return loss


def check_attention(
    case: Attention,
    method: str,
    sharing: str,
    need: str = "none",
    diagonal: tuple[bool, bool] = (False, False),
    frozen_bias: bool = False,
    **options: Any,
) -> None:
    torch.manual_seed(3)
    mha = nn.MultiheadAttention(4, 2, **case.make).double()
    with torch.no_grad():
        for p in mha.parameters():
            p.add_(0.3 * torch.randn_like(p))
    if frozen_bias:
        mha.in_proj_bias.requires_grad_(False)
        mha.out_proj.bias.requires_grad_(False)
    inputs = attention_inputs(case, 4)
    call = case.call()
    net = Net(mha)

    out, weights, taps = ref.attention_by_hand(mha, *inputs, **call)
    if need == "none":
        weights = None
    elif need == "averaged":
        weights = weights.mean(-3)
    bias = ref.trained(mha.out_proj.bias)
    rows = ref.tap_rows(taps, attention_loss(out, weights), bias=bias)
    expected = {k: ref.factors(a, g, 2.0, sharing, *diagonal) for k, (a, g) in rows.items()}

    opt = optimizer(net, sharing, method, loss_terms=2.0, **options)
    actual_out, actual_weights = net(
        *inputs, need_weights=need != "none", average_attn_weights=need != "per head", **call
    )
    ref.assert_close(actual_out, out, what="attention by hand")
    attention_loss(actual_out, actual_weights).backward()
    gradients = ref.gradients_of(net)
    steps = {key: v for key, v in ref.take_step(opt, net).items() if key in gradients}
    gradients, steps = (attention_matrices(mha, t, "layer.") for t in (gradients, steps))
    for label, (a, g) in attention_factors(opt, mha, "layer").items():
        ref.assert_close(a, expected[label][0], what=f"{label}: A")
        ref.assert_close(g, expected[label][1], what=f"{label}: G")
        wanted = ref.precondition(*expected[label], gradients[label], DAMPING, method)
        ref.assert_close(steps[label], wanted, what=f"{label}: step")


each_attention = pytest.mark.parametrize("case", ATTENTION.values(), ids=list(ATTENTION))


@pytest.mark.parametrize("need", ["none", "averaged", "per head"])
@each_attention
def test_attention(case, need):
    for sharing, method in (("expand", "eigen"), ("reduce", "inverse-pi")):
        check_attention(case, method, sharing, need)


@pytest.mark.parametrize("case", ["self batch first", "cross", "kdim alone"])
@pytest.mark.parametrize(("limit", "diagonal"), [(4, (True, False)), (2, (True, True))])
def test_a_wide_attention_is_diagonal(case, limit, diagonal):
    if case == "kdim alone" and limit == 4:
        limit, diagonal = 3, (True, True)  # its projections of keys are narrower
    options = {"diagonal": diagonal, "max_factor_size": limit}
    for sharing, method in WAYS:
        check_attention(ATTENTION[case], method, sharing, **options)


@each_sharing
@pytest.mark.parametrize("case", ["self batch first", "cross", "kdim and vdim"])
def test_attention_with_frozen_biases(case, sharing):
    check_attention(ATTENTION[case], "eigen", sharing, frozen_bias=True)


def test_attention_equals_the_same_attention_of_linear_layers():
    """The in-projection is three blocks: each is what an nn.Linear in its place would have."""

    class OfLinears(nn.Module):
        def __init__(self, mha: nn.MultiheadAttention) -> None:
            super().__init__()
            self.heads = mha.num_heads
            self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
            self.out = copy.deepcopy(mha.out_proj)
            with torch.no_grad():
                for i, layer in enumerate((self.q, self.k, self.v)):
                    layer.weight.copy_(mha.in_proj_weight.chunk(3)[i])
                    layer.bias.copy_(mha.in_proj_bias.chunk(3)[i])

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(mixed.transpose(1, 2).flatten(2))

    torch.manual_seed(4)
    mha = nn.MultiheadAttention(4, 2, batch_first=True).double()
    by_hand = OfLinears(mha).double()
    net = Net(mha)
    x = normal(3, 5, 4)
    options = {"lr": 1.0, "damping": DAMPING, "compute_method": "eigen"}
    # The clip is on: the sum over layers must agree, too.
    first, second = KFACSGD(net, **options), KFACSGD(by_hand, **options)
    loss_of(net(x, x, x, need_weights=False)[0]).backward()
    loss_of(by_hand(x)).backward()
    steps = attention_matrices(mha, ref.take_step(first, net), "layer.")
    others = ref.take_step(second, by_hand)
    for label, (a, g) in attention_factors(first, mha, "layer").items():
        other_a, other_g = second.preconditioner.factors(label)
        ref.assert_close(a, other_a, what=f"{label}: A")
        ref.assert_close(g, other_g, what=f"{label}: G")
        other = torch.cat([others[f"{label}.weight"], others[f"{label}.bias"][:, None]], dim=1)
        ref.assert_close(steps[label][0], other, what=f"{label}: step")


@pytest.mark.parametrize(("sharing", "method"), [("expand", "eigen"), ("reduce", "inverse-pi")])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "make", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=["post", "pre", "gelu"]
)
def test_transformer_encoder_layer(make, causal, method, sharing):
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, **make).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    net = Net(layer)
    x = normal(2, 3, 4)
    mask = torch.ones(3, 3).triu(1).bool() if causal else None

    out, taps = ref.encoder_by_hand(layer, x, mask)
    rows = ref.tap_rows(taps, loss_of(out))
    expected = {label: ref.factors(a, g, len(x), sharing) for label, (a, g) in rows.items()}

    opt = optimizer(net, sharing, method)
    actual = net(x, src_mask=mask)
    ref.assert_close(actual, out, what="encoder by hand")
    loss_of(actual).backward()
    gradients, steps = ref.gradients_of(net), None
    steps = ref.take_step(opt, net)
    matrices = []
    for tensors in (gradients, steps):
        found = attention_matrices(layer.self_attn, tensors, "layer.self_attn.")
        for label in ("linear1", "linear2"):
            pair = (tensors[f"layer.{label}.weight"], tensors[f"layer.{label}.bias"])
            found[label] = ref.matrix(layer.get_submodule(label), *pair)
        matrices.append(found)
    found = attention_factors(opt, layer.self_attn, "layer.self_attn")
    for label in ("linear1", "linear2"):
        found[label] = opt.preconditioner.factors(f"layer.{label}")
    assert found.keys() == expected.keys()
    for label, (a, g) in found.items():
        ref.assert_close(a, expected[label][0], what=f"{label}: A")
        ref.assert_close(g, expected[label][1], what=f"{label}: G")
        wanted = ref.precondition(*expected[label], matrices[0][label], DAMPING, method)
        ref.assert_close(matrices[1][label], wanted, what=f"{label}: step")


@each_sharing
def test_a_batch_that_is_not_first_gives_the_same_encoder(sharing):
    """Of the attention; a linear layer's own batch is by definition its input's first dimension."""
    torch.manual_seed(6)
    first = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True).double()
    second = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0).double()
    second.load_state_dict(first.state_dict())
    x = normal(2, 3, 4)
    found = []
    for layer in (first, second):
        net = Net(layer)
        opt = KFACSGD(net, lr=1.0, **PAPERS, loss_terms=2, weight_sharing=sharing)
        out = net(x) if layer is first else net(x.transpose(0, 1)).transpose(0, 1)
        loss_of(out).backward()
        steps = ref.take_step(opt, net)
        found.append((opt, layer, steps))
    names = ["q", "k", "v", "out"]
    pairs = [attention_factors(o, layer.self_attn, "layer.self_attn") for o, layer, _ in found]
    moves = [attention_matrices(m.self_attn, s, "layer.self_attn.") for _, m, s in found]
    for label in names:
        for one, other in zip(pairs[0][label], pairs[1][label], strict=True):
            ref.assert_close(one, other, what=label)
        ref.assert_close(moves[0][label], moves[1][label], what=f"{label}: step")
    if sharing == "expand":
        for key, step in found[0][2].items():
            ref.assert_close(step, found[1][2][key], what=key)


# ---------------------------------------------------------------- several uses in one forward

REUSED = {
    "linear": (lambda: nn.Linear(4, 4), lambda: normal(3, 4)),
    "linear sequences": (lambda: nn.Linear(4, 4), lambda: normal(3, 2, 4)),
    "convolution": (lambda: nn.Conv2d(2, 2, 3, padding=1), lambda: normal(3, 2, 3, 2)),
}


@pytest.mark.parametrize(("sharing", "method"), WAYS)
@pytest.mark.parametrize(("make", "inputs"), REUSED.values(), ids=list(REUSED))
def test_a_layer_used_twice_has_the_rows_of_both_uses(make, inputs, method, sharing):
    class Twice(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(self.layer(x)))

    net, x = build(Case(make, inputs))
    layer = net.layer
    net = Twice(layer)
    between = torch.tanh(layer(x)).detach()
    a = [ref.input_rows(layer, t) for t in (x, between)]
    g = [
        ref.gradient_rows(layer, lambda s: loss_of(layer(torch.tanh(s))), x),
        ref.gradient_rows(layer, loss_of, between),
    ]
    expected = ref.factors(torch.cat(a, dim=1), torch.cat(g, dim=1), len(x), sharing)
    opt = optimizer(net, sharing, method)
    loss_of(net(x)).backward()
    check_step(opt, net, expected, changed(layer, ref.gradients_of(net)), method, method)


# ---------------------------------------------------------------- how many terms the loss has


@pytest.mark.parametrize(("terms", "count"), [("examples", 3.0), ("positions", 12.0), (7.5, 7.5)])
def test_loss_terms(terms, count):
    layer = nn.Embedding(6, 3).double()
    net = Net(layer)
    x = tokens(3, 4, high=6)
    a = ref.input_rows(layer, x)
    g = ref.gradient_rows(layer, loss_of, x)
    opt = KFACSGD(net, lr=1.0, **PAPERS, loss_terms=terms)
    loss_of(net(x)).backward()
    opt.step()
    for actual, wanted in zip(
        opt.preconditioner.factors("layer"), ref.factors(a, g, count, diagonal_a=True), strict=True
    ):
        ref.assert_close(actual, wanted)


def test_a_number_of_terms_is_that_of_the_whole_step():
    """Not of each micro-batch: a user who masks counts what all of them average."""
    net, x = build(LINEAR["3d"])
    g = ref.gradient_rows(net.layer, loss_of, x)
    opt = KFACSGD(net, lr=1.0, **PAPERS, loss_terms=4.0)
    out = net(x)
    opt.zero_grad()
    for rows in range(len(x)):
        (gradient,) = torch.autograd.grad(loss_of(leaf := out.detach().requires_grad_()), leaf)
        net(x[rows : rows + 1]).backward(gradient[rows : rows + 1])
    opt.step()
    ref.assert_close(opt.preconditioner.factors("layer")[1], ref.factors(g, g, 4.0)[1])


def test_a_sum_has_one_term():
    net, x = build(LINEAR["3d"])
    g = ref.gradient_rows(net.layer, loss_of, x)
    opt = KFACSGD(net, lr=1.0, **PAPERS, loss_reduction="sum")
    loss_of(net(x)).backward()
    opt.step()
    ref.assert_close(opt.preconditioner.factors("layer")[1], ref.factors(g, g, 1.0)[1])


def attends(batch_first: bool, **options: int) -> nn.Module:
    return Attends(nn.MultiheadAttention(8, 2, batch_first=batch_first, **options))


class Attends(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention, self.head = attention, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        other = x[..., :6] if self.attention.kdim == 6 else x
        return self.head(self.attention(x, other, other)[0])


EMPTY = {
    "attention, no examples": (lambda: attends(True), (0, 5, 8)),
    "attention, no positions": (lambda: attends(True), (3, 0, 8)),
    "attention, positions first": (lambda: attends(False), (5, 0, 8)),
    "attention of other widths": (lambda: attends(True, kdim=6, vdim=6), (0, 5, 8)),
    "embedding, one a row": (lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 2)), (0,)),
    "embedding, no rows": (lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 2)), (0, 4)),
    "embedding, no tokens": (lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 2)), (3, 0)),
}


@pytest.mark.filterwarnings("ignore:layer .* has batch_first=False")
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
        opt.zero_grad()
        model(x if tokens else x.double()).square().sum().backward()
        opt.step()
        known = opt.preconditioner
        seen.append([f.clone() for name in known.layers for f in known.factors(name)])
    for before, after in zip(*seen, strict=True):
        assert torch.equal(before, after)


PADDED = {
    "circular": lambda: nn.Conv1d(6, 6, 3, padding=1, padding_mode="circular"),
    "same, an even kernel": lambda: nn.Conv1d(6, 6, 4, padding="same"),
    "same, an even kernel in one of two": lambda: nn.Conv2d(6, 6, (3, 2), padding="same"),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", PADDED.values(), ids=list(PADDED))
def test_an_input_that_changes_after_a_convolution_which_copied_it(make, autocast):
    """Torch keeps what it has padded alone: sums in place after it are allowed."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.conv = type(made := make())(4, 6, 1), made

        def forward(self, x: Tensor, in_place: bool) -> Tensor:
            h = self.first(x)
            out = self.conv(h)
            return h.add_(out) if in_place else h + out

    factors = []
    for in_place in (False, True):
        model = Residual()
        opt = KFACSGD(model, lr=0.1)
        x = torch.randn(3, 4, *[5] * model.conv.weight[0, 0].dim())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x, in_place)
        out.float().square().mean().backward()
        opt.step()
        factors.append([f for name in ("first", "conv") for f in opt.preconditioner.factors(name)])
    for apart, within in zip(*factors, strict=True):
        torch.testing.assert_close(within, apart, rtol=1e-2 if autocast else 1e-6, atol=1e-6)
