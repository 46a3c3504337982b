"""Attention against the dense reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from tests.layers.cases import DAMPING, WAYS, each_sharing, loss_of, normal, optimizer, wrapped
from tests.support import reference as ref
from tests.support.training import descend

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")


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


PROJECTIONS = ("q", "k", "v", "out")


def attention_inputs(case: Attention) -> tuple[Tensor, Tensor, Tensor]:
    if not case.cross:
        query = normal(2, 3, 4, seed=5)
        inputs = (query, query, query)
    else:
        key = normal(2, 4, case.kdim, seed=6)
        value = key if case.one_memory else normal(2, 4, case.vdim, seed=7)
        inputs = (normal(2, 3, 4, seed=5), key, value)
    if not case.batched:
        moved = {id(t): t[0] for t in inputs}
    elif not case.make.get("batch_first"):
        moved = {id(t): t.transpose(0, 1) for t in inputs}
    else:
        moved = {id(t): t for t in inputs}
    return tuple(moved[id(t)] for t in inputs)  # a self-attention passes one tensor three times


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
        for label, w, b in zip(PROJECTIONS, weights, biases, strict=True)
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
    inputs = attention_inputs(case)
    call = case.call()
    net = wrapped(mha)

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
    gradients, steps = attention_matrices(gradients), attention_matrices(steps)
    for label, (a, g) in attention_factors(opt).items():
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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_while_layers_gather_takes_torchs_own_attention():
    net = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    opt, x = KFACSGD(net, lr=0.1, factor_update_steps=1), normal(3, 5, 4)
    for _ in range(2):
        traced = torch.jit.trace(net, x)  # torch traces twice, and compares
        torch.testing.assert_close(traced(x), net(x))
        descend(opt, net(x).square().mean())
    assert opt.preconditioner.coverage().elsewhere == {}
