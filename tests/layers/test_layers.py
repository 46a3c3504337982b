"""All kinds of layers, in each precision, with frozen parameters, against the dense reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kaisa_optim import KFACSGD, Layer, register_layer
from kaisa_optim.linalg import moments
from tests.linalg.test_moments import emulated
from tests.support import reference as ref
from tests.support.training import descend
from tests.support.watch import PAPERS, Body, normal

pytestmark = [
    pytest.mark.filterwarnings("ignore:the base optimizer updates these"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
]

DAMPING = 0.07
WIDEST = 16_384  # what ``max_factor_size`` is by default


class Case(NamedTuple):
    """A layer, its input or that one's shape, and ``call``: what else its forward is given."""

    layer: Callable[[], nn.Module]
    given: Any
    call: dict[str, Any] = {}  # noqa: RUF012 (nobody writes into it)
    unbatched: bool = False  # one example: K is 1
    channels_last: bool = False  # weight and input

    @property
    def x(self) -> Tensor:
        x = normal(*self.given) if isinstance(self.given, tuple) else self.given
        return x.to(memory_format=torch.channels_last) if self.channels_last else x

    @property
    def terms(self) -> float:
        return 1.0 if self.unbatched else float(len(self.x))


def of(kind: type[nn.Module]) -> Callable[..., Callable[[], nn.Module]]:
    return lambda *args, **kwargs: lambda: kind(*args, **kwargs)


linear, table = of(nn.Linear), of(nn.Embedding)
conv1, conv2, conv3 = map(of, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
deconv1, deconv2, deconv3 = map(of, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))

CASES = {
    "linear": Case(linear(4, 3), (5, 4)),
    "linear 3d": Case(linear(4, 3), (5, 2, 4)),
    "linear 4d": Case(linear(4, 3), (3, 2, 3, 4)),
    "linear 1d": Case(linear(4, 3), (4,), unbatched=True),
    "linear, one example": Case(linear(4, 3), (1, 4)),
    "linear, no bias": Case(linear(4, 3, bias=False), (5, 4)),
    "linear, one output": Case(linear(4, 1), (5, 4)),
    "linear, more outputs": Case(linear(2, 5), (4, 3, 2)),
    "linear, non-contiguous": Case(linear(4, 3), normal(4, 10).T[::2]),
    "linear, transposed 3d": Case(linear(4, 3), normal(2, 5, 4).transpose(0, 1)),
    "linear, expanded": Case(linear(4, 3), normal(1, 2, 4).expand(5, 2, 4)),
    "linear, input with gradient": Case(linear(4, 3), normal(5, 4).requires_grad_()),
    "table": Case(table(6, 3), torch.tensor([3, 0, 5, 3, 1])),
    "table, sequences": Case(table(6, 3), torch.arange(12).view(3, 4) ** 2 % 6),
    "table 4d": Case(table(4, 2), torch.arange(12).view(2, 3, 2) ** 2 % 4),
    "table, repeated": Case(table(6, 3), torch.tensor([[1, 1, 4], [1, 4, 4]])),
    "table, padding_idx": Case(table(6, 3, padding_idx=2), torch.tensor([[1, 2, 4], [2, 2, 0]])),
    "table, last padding_idx": Case(
        table(6, 3, padding_idx=-1), torch.tensor([[5, 2, 4], [2, 5, 0]])
    ),
    "conv1": Case(conv1(2, 3, 3), (3, 2, 7)),
    "conv1, same dilated": Case(conv1(2, 3, 4, padding="same", dilation=2), (2, 2, 9)),
    "conv1, circular": Case(conv1(2, 3, 3, padding=2, padding_mode="circular"), (2, 2, 6)),
    "conv1, groups": Case(conv1(4, 6, 2, groups=2), (6, 4, 5)),
    "conv1, unbatched": Case(conv1(2, 3, 3, padding=1), (2, 6), unbatched=True),
    "conv2": Case(conv2(2, 3, 2), (3, 2, 4, 4)),
    "conv2, padding": Case(conv2(2, 3, 3, padding=1), (2, 2, 4, 3)),
    "conv2, same even": Case(conv2(2, 3, (2, 4), padding="same"), (2, 2, 3, 5)),
    "conv2, same reflect": Case(
        conv2(1, 2, (2, 3), padding="same", padding_mode="reflect"), (2, 1, 4, 5)
    ),
    "conv2, replicate": Case(
        conv2(2, 2, 3, padding=2, padding_mode="replicate", stride=2), (2, 2, 3, 4)
    ),
    "conv2, everything": Case(
        conv2(4, 6, (3, 2), (2, 1), (1, 2), dilation=(1, 2), groups=2, padding_mode="circular"),
        (2, 4, 4, 3),
    ),
    "conv2, groups": Case(conv2(4, 6, 2, groups=2), (2, 4, 3, 4)),
    "conv2, groups no bias": Case(conv2(4, 2, 2, groups=2, bias=False), (2, 4, 3, 4)),
    "conv2, depthwise multiplied": Case(conv2(2, 4, 2, groups=2, padding=1), (2, 2, 3, 2)),
    "conv2, unbatched": Case(conv2(2, 3, 2), (2, 3, 4), unbatched=True),
    "conv2, unbatched groups": Case(conv2(2, 4, 2, groups=2), (2, 3, 4), unbatched=True),
    "conv2, channels_last": Case(conv2(3, 2, 2), (2, 3, 3, 4), channels_last=True),
    "conv2, channels_last groups": Case(conv2(4, 6, 2, groups=2), (2, 4, 3, 4), channels_last=True),
    "conv3": Case(conv3(2, 3, 2), (2, 2, 2, 3, 3)),
    "conv3, mixed": Case(
        conv3(1, 2, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), dilation=(1, 1, 2)),
        (2, 1, 2, 3, 4),
    ),
    "conv3, groups": Case(conv3(2, 4, (1, 2, 2), groups=2, bias=False), (2, 2, 2, 3, 2)),
    "conv3, unbatched": Case(conv3(1, 2, 2), (1, 2, 3, 3), unbatched=True),
    "deconv1": Case(deconv1(2, 3, 3), (2, 2, 4)),
    "deconv1, stride": Case(deconv1(2, 3, 3, stride=2, padding=1, output_padding=1), (6, 2, 3)),
    "deconv1, dilation groups": Case(deconv1(4, 2, 2, dilation=2, groups=2), (2, 4, 3)),
    "deconv1, output_size": Case(deconv1(2, 3, 3, stride=3), (2, 2, 3), {"output_size": [10]}),
    "deconv1, unbatched": Case(deconv1(2, 3, 2, stride=2), (2, 3), unbatched=True),
    "deconv2": Case(deconv2(2, 3, 2), (2, 2, 3, 2)),
    "deconv2, groups": Case(deconv2(4, 6, 2, groups=2, stride=2), (2, 4, 2, 2)),
    "deconv2, depthwise": Case(deconv2(3, 3, 2, groups=3), (2, 3, 2, 2)),
    "deconv2, output_size": Case(
        deconv2(2, 2, 3, stride=2, padding=1), (2, 2, 2, 3), {"output_size": (4, 5)}
    ),
    "deconv2, unbatched": Case(deconv2(2, 3, 2), (2, 2, 3), unbatched=True),
    "deconv2, channels_last": Case(deconv2(3, 2, 2), (2, 3, 2, 3), channels_last=True),
    "deconv3": Case(deconv3(1, 2, 2), (2, 1, 2, 2, 1)),
    "deconv3, mixed": Case(
        deconv3(
            2, 4, (1, 2, 2), stride=(1, 2, 1), padding=(0, 1, 0), groups=2, output_padding=(0, 1, 0)
        ),
        (1, 2, 2, 2, 2),
    ),
}


def wrapped(layer: nn.Module) -> nn.Module:
    return Body(lambda m, *args, **call: m.layer(*args, **call), layer=layer)


def build(case: Case, frozen: str = "") -> nn.Module:
    torch.manual_seed(2)
    layer = case.layer().double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    if case.channels_last:
        layer.to(memory_format=torch.channels_last)
    if frozen:
        getattr(layer, frozen).requires_grad_(False)
    return wrapped(layer)


def loss_of(output: Tensor) -> Tensor:
    """Not linear in the output, so that output gradients depend on it."""
    count = output.numel()
    mix = torch.linspace(-1.0, 1.3, count, dtype=torch.float64).view(output.shape)
    return torch.sum(torch.sin(output + mix) * (1 + mix)) / max(len(output), 1)


def rows_of(net: nn.Module, case: Case) -> tuple[Tensor, Tensor]:
    """Rows of a layer's inputs and output gradients, ``[blocks, examples, positions, width]``."""
    a = ref.input_rows(net.layer, case.x, **case.call)
    return a, ref.gradient_rows(net.layer, loss_of, case.x, **case.call)


def factors_of(
    layer: nn.Module, a: Tensor, g: Tensor, terms: float, sharing: str, widest: int = WIDEST
) -> tuple[Tensor, Tensor]:
    """A and G of these rows, diagonal where a side is wider than ``widest``, and of a table."""
    diagonal_a = isinstance(layer, nn.Embedding) or a.shape[-1] > widest
    return ref.factors(a, g, terms, sharing, diagonal_a, g.shape[-1] > widest)


def assert_factors(actual: Any, expected: Any, what: str = "") -> None:
    for side, factor, wanted in zip("AG", actual, expected, strict=True):
        ref.assert_close(factor, wanted, what=f"{what}: factor {side}")


def changed(layer: nn.Module, tensors: dict[str, Tensor]) -> Tensor:
    picked = [
        tensors.get(f"layer.{key}") if ref.trained(getattr(layer, key, None)) else None
        for key in ("weight", "bias")
    ]
    return ref.matrix(layer, *picked)


SHARINGS = "expand", "reduce"
ALL_WAYS = [*itertools.product(SHARINGS, ref.METHODS)]
# Each sharing with half of the methods: a method sees no more of a layer than its factors.
WAYS = [
    *itertools.product(["expand"], ["eigen", "inverse-full"]),
    *itertools.product(["reduce"], ["eigen-outer", "inverse-pi"]),
]


def optimizer(net: nn.Module, sharing: str, method: str, **options: Any) -> KFACSGD:
    """Return an optimizer whose step is the preconditioned gradient."""
    options = {"damping": DAMPING, "kl_clip": None, **ref.METHODS[method], **options}
    return KFACSGD(net, lr=1.0, weight_sharing=sharing, **options)


def check(case: Case, ways: Any = WAYS, frozen: str = "", widest: int = WIDEST) -> None:
    """Factors and step, with the gradients' layouts as they were."""
    a, g = rows_of(build(case, frozen), case)
    for sharing, method in ways:
        net, what = build(case, frozen), f"{sharing}, {method}"
        opt = optimizer(net, sharing, method, max_factor_size=widest)
        loss_of(net(case.x, **case.call)).backward()
        gradient = changed(net.layer, ref.gradients_of(net))
        ref.assert_close(torch.einsum("bnpg,bnpa->bga", g, a), gradient, what="reference's rows")
        layouts = [p.stride() for p in net.parameters()]
        step = changed(net.layer, ref.take_step(opt, net))
        assert layouts == [p.stride() for p in net.parameters()], what
        expected = factors_of(net.layer, a, g, case.terms, sharing, widest)
        assert_factors(opt.preconditioner.factors("layer"), expected, what)
        wanted = ref.precondition(*expected, gradient, DAMPING, method)
        ref.assert_close(step, wanted, what=f"{what}: step")


FROZEN = [
    (name, side)
    for name, case in CASES.items()
    for side in ("weight", "bias")
    if getattr(case.layer(), "bias", None) is not None
]


@pytest.mark.parametrize(("name", "frozen"), [*((name, "") for name in CASES), *FROZEN])
def test_a_layer(name, frozen):
    check(CASES[name], WAYS[::2] if frozen else WAYS, frozen)


@pytest.mark.parametrize(
    ("dtype", "emulates"), [(torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("name", CASES)
def test_halves_lose_nothing_but_what_is_rounded_already(name, dtype, emulates, monkeypatch):
    """Also where a device multiplies halves into float32, as means over positions are not."""
    asked = emulated(monkeypatch) if emulates else []
    monkeypatch.setattr(moments, "_MUCH", 1)
    monkeypatch.setattr(moments, "_LEAST", 1)
    case = CASES[name]
    net, x = build(case).to(dtype), case.x
    x = x.to(dtype) if x.is_floating_point() else x
    grad = normal(*net(x, **case.call).shape, seed=9).to(dtype)
    twin, exact_x = net.double().layer, x.to(case.x.dtype)
    a = ref.input_rows(twin, exact_x, **case.call)
    g = ref.gradient_rows(twin, lambda out: (out * grad).sum(), exact_x, **case.call)
    for sharing, widest in itertools.product(SHARINGS, (WIDEST, 1)):
        net = build(case).to(dtype)
        opt = optimizer(net, sharing, "eigen", max_factor_size=widest)
        net(x, **case.call).backward(grad)
        opt.step()
        expected = factors_of(net.layer, a, g, case.terms, sharing, widest)
        expected = [side.float() for side in expected]
        assert_factors(opt.preconditioner.factors("layer"), expected, f"{sharing}, {widest}")
    assert bool(asked) == emulates


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("linear 3d", 5),  # the size of its A
        ("linear 3d", 4),  # the 1 counts
        ("linear, no bias", 4),
        ("linear 3d", 2),  # narrower than both sides
        ("linear, more outputs", 3),  # than G alone
        ("conv2, padding", 18),
        ("conv2, groups", 2),
        ("deconv2, groups", 8),
        ("table, sequences", 2),
    ],
)
def test_a_side_beyond_max_factor_size_is_diagonal(name, limit):
    check(CASES[name], ALL_WAYS, widest=limit)


def attending(batch_first: bool, **options: int) -> nn.Module:
    def use(m: nn.Module, x: Tensor) -> Tensor:
        other = x[..., :6] if m.attention.kdim == 6 else x
        return m.head(m.attention(x, other, other)[0])

    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
    return Body(use, attention=attention, head=nn.Linear(8, 2))


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 2))


EMPTY = {
    "attention, no examples": (lambda: attending(True), (0, 5, 8)),
    "attention, no positions": (lambda: attending(True), (3, 0, 8)),
    "attention, positions first": (lambda: attending(False), (5, 0, 8)),
    "attention of other widths": (lambda: attending(True, kdim=6, vdim=6), (0, 5, 8)),
    "table, one a row": (words, (0,)),
    "table, no rows": (words, (0, 4)),
    "table, no tokens": (words, (3, 0)),
}


@pytest.mark.parametrize(
    ("sharing", "fraction"), [("expand", None), ("reduce", None), ("expand", 0.5)]
)
@pytest.mark.parametrize(("make", "shape"), EMPTY.values(), ids=list(EMPTY))
def test_an_empty_batch_after_others_changes_no_factor(make, shape, sharing, fraction):
    torch.manual_seed(0)
    model = make().double()
    options = {"weight_sharing": sharing, "statistics_fraction": fraction}
    opt = KFACSGD(model, lr=0.1, factor_update_steps=1, **options)
    factors = []
    for sizes in ([max(3, n) for n in shape], shape):
        x = torch.arange(math.prod(sizes)).remainder(5).reshape(sizes)
        x = x if isinstance(model, nn.Sequential) else x.double()
        descend(opt, model(x).square().sum())
        layers = opt.preconditioner.layers
        factors.append([f.clone() for name in layers for f in opt.preconditioner.factors(name)])
    assert all(map(torch.equal, *factors))


@pytest.mark.parametrize("options", [{"loss_terms": 4.0}, {"loss_reduction": "sum"}])
def test_a_number_of_terms_is_that_of_the_whole_step(options):
    """Not of each micro-batch: a user who masks counts what all of them average."""
    net = build(CASES["linear 3d"])
    x, (_, g) = CASES["linear 3d"].x, rows_of(net, CASES["linear 3d"])
    opt = KFACSGD(net, lr=1.0, **PAPERS, **options)
    out = net(x)
    opt.zero_grad()
    (gradient,) = torch.autograd.grad(loss_of(leaf := out.detach().requires_grad_()), leaf)
    for row, of_row in zip(x.split(1), gradient.split(1), strict=True):
        net(row).backward(of_row)
    opt.step()
    terms = options.get("loss_terms", 1.0)
    ref.assert_close(opt.preconditioner.factors("layer")[1], ref.factors(g, g, terms)[1])


class Attention(NamedTuple):
    """Options of one nn.MultiheadAttention and of its call; 2 examples, 3 queries, 4 keys."""

    make: dict[str, Any] = {}  # noqa: RUF012 (nobody writes into it)
    cross: bool = False
    one_memory: bool = False  # key and value are the same tensor
    call: dict[str, Any] = {}  # noqa: RUF012
    batched: bool = True


first = {"batch_first": True}
sizes = {"kdim": 3, "vdim": 5}
ATTENTION = {
    "self": Attention(),
    "self batch first": Attention(first),
    "self no bias": Attention({"bias": False, **first}),
    "self unbatched": Attention(batched=False),
    "cross": Attention(cross=True),
    "cross batch first": Attention(first, cross=True),
    "cross to one memory": Attention(cross=True, one_memory=True),
    "cross to one memory batch first": Attention(first, cross=True, one_memory=True),
    "kdim and vdim": Attention(sizes, cross=True),
    "kdim and vdim batch first": Attention({**sizes, **first}, cross=True),
    "kdim and vdim no bias": Attention({**sizes, "bias": False}, cross=True),
    "kdim alone": Attention({"kdim": 3, **first}, cross=True),
    "one bias key and value": Attention({"add_bias_kv": True, **first}),
    "zero attention": Attention({"add_zero_attn": True}, cross=True),
    "boolean mask": Attention(first, call={"attn_mask": torch.ones(3, 3).triu(1).bool()}),
    "float mask": Attention(cross=True, call={"attn_mask": normal(3, 4, seed=8)}),
    "mask per head": Attention(call={"attn_mask": normal(4, 3, 3, seed=8)}),
    "padded keys": Attention(
        first, cross=True, call={"key_padding_mask": torch.arange(4) >= torch.tensor([[4], [2]])}
    ),
}


def attends(case: Attention) -> tuple[nn.MultiheadAttention, tuple[Tensor, ...], dict[str, Any]]:
    """A module, query, key and value, and what else its forward is given."""
    torch.manual_seed(3)
    mha = nn.MultiheadAttention(4, 2, **case.make).double()
    with torch.no_grad():
        for p in mha.parameters():
            p.add_(0.3 * torch.randn_like(p))
    if not case.cross:
        query = normal(2, 3, 4, seed=5)
        inputs = (query, query, query)
    else:
        key = normal(2, 4, mha.kdim, seed=6)
        value = key if case.one_memory else normal(2, 4, mha.vdim, seed=7)
        inputs = (normal(2, 3, 4, seed=5), key, value)
    moved = {id(t): t if mha.batch_first else t.transpose(0, 1) for t in inputs}
    if not case.batched:
        moved = {id(t): t[0] for t in inputs}
    # A self-attention passes one tensor three times.
    return mha, tuple(moved[id(t)] for t in inputs), case.call


def attention_matrices(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A gradient or update of the whole module by projection: ``[1, g, a]`` each."""
    tensors = {name.removeprefix("layer."): tensor for name, tensor in tensors.items()}
    packed = tensors.get("in_proj_weight")
    if packed is None:
        weights = [tensors[f"{label}_proj_weight"] for label in "qkv"]
    else:
        weights = packed.chunk(3)
    bias = tensors.get("in_proj_bias")
    biases = [None] * 3 if bias is None else bias.chunk(3)
    weights = [*weights, tensors["out_proj.weight"]]
    biases = [*biases, tensors.get("out_proj.bias")]
    return {
        label: torch.cat([w] if b is None else [w, b[:, None]], dim=1)[None]
        for label, w, b in zip(("q", "k", "v", "out"), weights, biases, strict=True)
    }


def attention_factors(opt: KFACSGD) -> dict[str, tuple[Tensor, Tensor]]:
    kfac = opt.preconditioner
    if "layer.in_proj" in kfac.layers:
        a, g = kfac.factors("layer.in_proj")
        assert len(a) == len(g) == 3
        result = {label: (a[i : i + 1], g[i : i + 1]) for i, label in enumerate("qkv")}
    else:
        result = {label: kfac.factors(f"layer.{label}_proj") for label in "qkv"}
    return result | {"out": kfac.factors("layer.out_proj")}


def attention_loss(output: Tensor, weights: Tensor | None) -> Tensor:
    loss = loss_of(output)
    if weights is not None:
        mix = torch.linspace(0, 1, weights.numel(), dtype=weights.dtype).view_as(weights)
        loss = loss + (mix * weights).square().sum()
    return loss


def attention_rows(
    mha: nn.MultiheadAttention, inputs: Any, call: Any, need: str = "none"
) -> dict[str, tuple[Tensor, Tensor]]:
    """Rows of inputs and of output gradients by projection, by hand."""
    out, weights, taps = ref.attention_by_hand(mha, *inputs, **call)
    shown = {"none": None, "averaged": weights.mean(-3), "per head": weights}[need]
    return ref.tap_rows(taps, attention_loss(out, shown), bias=ref.trained(mha.out_proj.bias))


def check_attention(
    name: str,
    sharing: str,
    method: str,
    need: str = "none",
    widest: int = WIDEST,
    frozen_bias: bool = False,
) -> None:
    mha, inputs, call = attends(ATTENTION[name])
    if frozen_bias:
        mha.in_proj_bias.requires_grad_(False)
        mha.out_proj.bias.requires_grad_(False)
    rows, net = attention_rows(mha, inputs, call, need), wrapped(mha)
    opt = optimizer(net, sharing, method, loss_terms=2.0, max_factor_size=widest)
    shows = {"need_weights": need != "none", "average_attn_weights": need != "per head"}
    attention_loss(*net(*inputs, **shows, **call)).backward()
    gradients = ref.gradients_of(net)
    steps = {key: v for key, v in ref.take_step(opt, net).items() if key in gradients}
    gradients, steps = attention_matrices(gradients), attention_matrices(steps)
    for label, factors in attention_factors(opt).items():
        a, g = rows[label]
        gradient = torch.einsum("bnpg,bnpa->bga", g, a)
        ref.assert_close(gradient, gradients[label], what=f"{label}: rows by hand")
        expected = factors_of(mha, a, g, 2.0, sharing, widest)
        assert_factors(factors, expected, label)
        wanted = ref.precondition(*expected, gradients[label], DAMPING, method)
        ref.assert_close(steps[label], wanted, what=f"{label}: step")


@pytest.mark.parametrize("need", ["none", "averaged", "per head"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, need):
    for sharing, method in (("expand", "eigen"), ("reduce", "inverse-pi")):
        check_attention(name, sharing, method, need)


@pytest.mark.parametrize("name", ["self batch first", "cross", "kdim alone"])
@pytest.mark.parametrize("limit", [4, 2])  # A alone is wider, but for a narrow key's; both are
def test_a_wide_attention_is_diagonal(name, limit):
    for sharing, method in WAYS:
        check_attention(name, sharing, method, widest=limit)


@pytest.mark.parametrize("name", ["self batch first", "cross", "kdim and vdim"])
def test_attention_with_frozen_biases(name):
    for sharing in ("expand", "reduce"):
        check_attention(name, sharing, "eigen", frozen_bias=True)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_while_layers_gather_takes_torchs_own_attention():
    net = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    opt, x = KFACSGD(net, lr=0.1, factor_update_steps=1), normal(3, 5, 4)
    for _ in range(2):
        traced = torch.jit.trace(net, x)  # torch traces twice, and compares
        torch.testing.assert_close(traced(x), net(x))
        descend(opt, net(x).square().mean())
    assert opt.preconditioner.coverage().elsewhere == {}


class Projections(nn.Module):
    """Query, key and value of one input; then of another one, and of one that is overwritten."""

    def __init__(self, way: str = "once", copies: bool = False) -> None:
        super().__init__()
        self.way, self.copies = way, copies  # each layer is given a copy of its own
        self.body = nn.Linear(5, 6)
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
        self.value = nn.Linear(6, 4, bias=False)

    def project(self, x: Tensor) -> Tensor:
        q, k, v = (x.clone() if self.copies else x for _ in range(3))
        return self.query(q) * self.key(k) + self.value(v)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).tanh()
        if self.way == "checkpointed":
            return checkpoint(self.project, x, use_reentrant=False)
        if self.way == "twice":
            return self.project(x) + self.project(2 * x)
        return self.project(x)


@pytest.mark.parametrize("way", ["once", "twice", "checkpointed"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("normalization", ["fisher", "kaisa"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_shared_moment_is_each_layers_own(way, passes, normalization, fraction):
    options = {"normalization": normalization, "statistics_fraction": fraction}
    factors, flops = [], []
    for copies in (False, True):
        torch.manual_seed(0)
        model = Projections(way, copies).double()
        opt = KFACSGD(model, lr=0.1, compute_method="eigen", **options)
        with FlopCounterMode(display=False) as counter:
            for i in range(passes):
                (model(normal(7, 5, seed=i)).square().sum() / 7 / passes).backward()
        opt.step()
        kfac = opt.preconditioner
        factors.append([kfac.factors(name)[0].clone() for name in kfac.layers])
        flops.append(counter.get_total_flops())
    torch.testing.assert_close(*factors, rtol=1e-12, atol=1e-14)
    if way == "once" and normalization == "fisher":
        rows = 7 if fraction == 1 else 4
        assert flops[1] - flops[0] == passes * 2 * rows * 7 * 7  # key's, which is query's


def assert_a(opt: KFACSGD, name: str, rows: Tensor) -> None:
    rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
    ref.assert_close(opt.preconditioner.factors(name)[0][0], rows.mT @ rows / len(rows))


def test_another_part_of_an_input_is_another_moment():
    model, x = Projections().double(), normal(4, 6)
    opt = KFACSGD(model, lr=0.1, skip_layers="body|value", statistics_fraction=0.5)
    for layer, fraction in ((model.query, 0.5), (model.key, 1.0)):
        opt.preconditioner.statistics_fraction = fraction
        layer(x).sum().backward()
    opt.step()
    assert_a(opt, "query", x[::2])
    assert_a(opt, "key", x)


def test_an_input_that_is_written_into_is_another_one():
    model, x = Projections().double(), normal(3, 6)
    opt = KFACSGD(model, lr=0.1, skip_layers="body|value")
    model.query(x).sum().backward()
    x.mul_(3)
    descend(opt, model.key(x).sum())
    assert_a(opt, "query", x / 3)
    assert_a(opt, "key", x)


def own_kind(**members: Any) -> Any:
    """A class of modules, each ``[2, 3]``, and its kind with these members in place of others."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self, x):
            return x @ self.weight.T

    class Kind(Layer):
        in_shape, outputs = (3,), 2

        def input_rows(self, x, grad):
            return x[None, :, None]

        def output_rows(self, x, grad):
            return grad[None, :, None]

    register_layer(Own)(type("Kind", (Kind,), members))
    return Own()


def test_it_is_told_module_classes_and_takes_layers():
    for module in (3, "Linear", nn.Linear(2, 2), int, Layer):
        with pytest.raises(TypeError, match=r"register_layer needs module classes, not .*ModuleCl"):
            register_layer(nn.Linear, module)
    with pytest.raises(TypeError, match=r"needs module classes, not \(\).*@register_layer\(Modul"):
        register_layer()
    for kind in (nn.Linear, 3, lambda name, module: None):
        with pytest.raises(TypeError, match="register_layer takes a subclass of Layer, not "):
            register_layer(nn.Identity)(kind)


def test_a_layer_kind_without_rows():
    for members, text in (
        ({"input_rows": lambda layer, x, grad: x}, r"output_rows, which must return rows \[blocks"),
        ({}, "input_rows and output_rows, which"),
    ):
        with pytest.raises(TypeError, match=f"Kind lacks {text}"):
            register_layer(nn.Identity)(type("Kind", (Layer,), members))


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"outputs": 3}, r"say \(3, 3\), the weight is \(2, 3\)"),
        ({"in_shape": (2,), "outputs": 3}, r"say \(3, 2\), the weight is \(2, 3\); .*weight_view"),
    ],
)
def test_a_layer_kind_of_another_size(sizes, text):
    """A kind may not know the size of a weight that is not trained, as of a packed one."""
    model = nn.Sequential(own_kind(**sizes), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=f"Invalid Kind of '0': .*{text}"):
        KFACSGD(model, lr=0.1)
    opt = KFACSGD(model[1].parameters(), lr=0.1, model=model)
    descend(opt, model(torch.ones(4, 3)).square().mean())
    assert list(opt.preconditioner.layers) == ["1"]


@pytest.mark.parametrize(("method", "features"), [("input_rows", 3), ("output_rows", 2)])
@pytest.mark.parametrize(
    ("index", "shape"),
    [
        ((0,), r"\(4, 1, \d\)"),
        (([0, 0],), r"\(2, 4, 1, \d\)"),
        ((..., slice(1)), r"\(1, 4, 1, 1\)"),
    ],
)
def test_rows_of_another_shape(method, features, index, shape):
    def rows(layer, x, grad):
        rows = x if method == "input_rows" else grad
        return rows[None, :, None][index]

    model = nn.Sequential(own_kind(**{method: rows}))
    opt = KFACSGD(model, lr=0.1)
    text = rf"Invalid Kind\.{method}: {shape} in layer '0'; .* here \[1, batch, .*, {features}\]"
    with pytest.raises(ValueError, match=text):
        model(torch.randn(4, 3)).sum().backward()
    assert list(opt.preconditioner.layers) == ["0"]
