"""Attention against the dense reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from tests.layers.cases import DAMPING, WAYS, Net, each_sharing, loss_of, normal, optimizer
from tests.support import reference as ref
from tests.support.watch import PAPERS

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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_while_layers_gather_takes_torchs_own_attention():
    net = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    opt, x = KFACSGD(net, lr=0.1, factor_update_steps=1), normal(3, 5, 4)
    for _ in range(2):
        traced = torch.jit.trace(net, x)  # torch traces twice, and compares
        torch.testing.assert_close(traced(x), net(x))
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()
    assert opt.preconditioner.coverage().elsewhere == {}
