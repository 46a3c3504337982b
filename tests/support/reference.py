"""Slow, dense K-FAC by definition, sharing no method with the package that it checks.

Input rows are derivatives of the layer's output with respect to its own weight (not patches);
output gradient rows come from autograd on an explicit output tensor; every system is solved as one
dense Kronecker matrix. Rows have the shape ``[blocks, examples, positions, width]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.close import assert_close as assert_close
from tests.support.training import difference
from tests.support.training import values as parameters_of

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


# How a step can be computed: the optimizer's options and what they mean for `precondition`.
METHODS = {
    "eigen": {"compute_method": "eigen"},
    "eigen-outer": {"compute_method": "eigen", "compute_eigenvalue_outer_product": True},
    "inverse-pi": {"compute_method": "inverse", "damping_split": "pi"},
    "inverse-full": {"compute_method": "inverse", "damping_split": "full"},
}


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def take_step(opt: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """One ``opt.step()``; what it subtracted from each parameter."""
    before = parameters_of(module)
    opt.step()
    return difference(before, module)


def groups_of(module: nn.Module) -> int:
    return module.groups if isinstance(module, (*CONVS, *TRANSPOSED)) else 1


def split_rows(module: nn.Module, output: Tensor) -> Tensor:
    """An output-shaped tensor as ``[blocks, examples, positions, width]``."""
    if isinstance(module, (*CONVS, *TRANSPOSED)):
        spatial = len(module.kernel_size)
        if output.dim() == spatial + 1:
            output = output[None]
        output = output.flatten(2).movedim(1, 2)
        return torch.stack(output.chunk(module.groups, dim=-1))
    if output.dim() == 1:
        output = output[None]
    return output.reshape(1, output.shape[0], -1, output.shape[-1])


def trained(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad


def input_rows(module: nn.Module, *args, **kwargs) -> Tensor:
    """What the layer's weight multiplies, from the output's derivatives, then a 1 for a bias."""
    weight, blocks = getattr(module, "weight", None), groups_of(module)
    output = module.forward(*args, **kwargs)  # without its hooks
    if not trained(weight):
        return torch.ones_like(split_rows(module, output.detach())[..., :1])
    channels, batched = output, output.dim() > 1
    if isinstance(module, (*CONVS, *TRANSPOSED)):
        spatial = len(module.kernel_size)
        channels, batched = output.movedim(-1 - spatial, -1), output.dim() > spatial + 1
    size = weight.shape[0] // blocks
    rows = []
    for block in range(blocks):
        channel, part = 0, slice(block * size, (block + 1) * size)
        place: tuple[Any, ...] = (0,)  # in the derivative by the weight
        if isinstance(module, TRANSPOSED):
            channel, place = block * weight.shape[1], (part, 0)
        elif isinstance(module, CONVS):
            channel, place = part.start, (part.start,)
        elif isinstance(module, nn.Embedding):
            place = (slice(None), 0)
        entries = channels[..., channel]
        whole = [torch.autograd.grad(x, weight, retain_graph=True)[0] for x in entries.flatten()]
        parts = torch.stack([derivative[place].flatten() for derivative in whole])
        rows.append(parts.reshape(len(entries) if batched else 1, -1, parts.shape[1]))
    stacked = torch.stack(rows)
    if trained(getattr(module, "bias", None)):
        stacked = torch.cat([stacked, torch.ones_like(stacked[..., :1])], dim=-1)
    return stacked


def gradient_rows(module: nn.Module, loss: Callable[[Tensor], Tensor], *args, **kwargs) -> Tensor:
    """∂loss/∂s for the layer's output s, a leaf of its own."""
    with torch.no_grad():
        output = module(*args, **kwargs)
    s = output.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(s), s)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        gradient = gradient * (args[0] != module.padding_idx)[..., None]
    return split_rows(module, gradient)


def matrix(module: nn.Module, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """A (gradient of the) weight and bias as ``[blocks, g, a]``; ``None`` where not trained."""
    blocks = groups_of(module)
    parts = []
    if weight is not None:
        if isinstance(module, TRANSPOSED):
            by_group = weight.reshape(blocks, weight.shape[0] // blocks, *weight.shape[1:])
            parts.append(by_group.movedim(2, 1).flatten(2))
        elif isinstance(module, nn.Embedding):
            parts.append(weight.T[None])
        else:
            parts.append(weight.reshape(blocks, weight.shape[0] // blocks, -1))
    if bias is not None:
        parts.append(bias.reshape(blocks, -1, 1))
    return torch.cat(parts, dim=-1)


def factors(
    a: Tensor,
    g: Tensor,
    terms: float,
    sharing: str = "expand",
    diagonal_a: bool = False,
    diagonal_g: bool = False,
) -> tuple[Tensor, Tensor]:
    """A = Σ a aᵀ / rows and G = terms · Σ g gᵀ, one outer product at a time."""
    if sharing == "reduce":
        a, g = a.mean(2, keepdim=True), g.sum(2, keepdim=True)
    a, g = a.flatten(1, 2), g.flatten(1, 2)
    rows = a.shape[1]
    moment_a = sum(a[:, i, :, None] * a[:, i, None, :] for i in range(rows)) / rows
    moment_g = terms * sum(g[:, i, :, None] * g[:, i, None, :] for i in range(g.shape[1]))
    if diagonal_a:
        moment_a = moment_a.diagonal(dim1=1, dim2=2)
    if diagonal_g:
        moment_g = moment_g.diagonal(dim1=1, dim2=2)
    return moment_a, moment_g


def dense(factor: Tensor) -> Tensor:
    return torch.diag_embed(factor) if factor.dim() == 2 else factor


def pi_split(a: Tensor, g: Tensor, damping: float) -> tuple[float, float]:
    """γ_A and γ_G of one block: product γ, quotient that of the mean eigenvalues."""
    mean_a, mean_g = (float(torch.linalg.eigvalsh(f).mean()) for f in (a, g))
    # With either factor zero the gradient is zero, and so is the step of every split.
    ratio = mean_a / mean_g if mean_a > 0 and mean_g > 0 else 1.0
    return math.sqrt(damping * ratio), math.sqrt(damping / ratio)


def curvature(a: Tensor, g: Tensor, damping: float, method: str) -> Tensor:
    """The damped matrix of one block that acts on ``W.flatten()``."""
    eye_a, eye_g = torch.eye(len(a), dtype=a.dtype), torch.eye(len(g), dtype=g.dtype)
    if method.startswith("eigen"):
        return torch.kron(g, a) + damping * torch.kron(eye_g, eye_a)
    split = pi_split(a, g, damping) if method == "inverse-pi" else (damping, damping)
    return torch.kron(g + split[1] * eye_g, a + split[0] * eye_a)


def precondition(a: Tensor, g: Tensor, gradient: Tensor, damping: float, method: str) -> Tensor:
    """The dense solution, block by block."""
    blocks = [
        torch.linalg.solve(curvature(one_a, one_g, damping, method), one.flatten()).view_as(one)
        for one_a, one_g, one in zip(dense(a), dense(g), gradient, strict=True)
    ]
    return torch.stack(blocks)


def ggn(net: nn.Module, name: str, x: Tensor, hessians: Tensor) -> Tensor:
    """Σ_n J_nᵀ H_n J_n for one layer's [W | b], J by reverse mode; ``hessians`` ``[N, O, O]``."""
    layer = net.get_submodule(name)
    own = {f"{name}.{key}": p.detach() for key, p in layer.named_parameters()}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(own)
    weight, bias = jacobians.get(f"{name}.weight"), jacobians.get(f"{name}.bias")
    total = 0
    for n, hessian in enumerate(hessians):
        biases = [None] * len(hessian) if bias is None else bias[n]
        rows = [matrix(layer, w, b).flatten() for w, b in zip(weight[n], biases, strict=True)]
        jacobian = torch.stack(rows).detach()
        total = total + jacobian.T @ hessian @ jacobian
    return total


# ---------------------------------------------------------------- attention by hand

Taps = dict[str, tuple[Tensor, Tensor]]


def attention_by_hand(
    mha: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Taps]:
    """nn.MultiheadAttention as four linear maps: output, weights per head, (input, output) of each.

    The taps are ``[examples, positions, width]`` whatever the layout of the call.
    """
    batched = query.dim() == 3
    if not batched:
        query, key, value = query[None], key[None], value[None]
    elif not mha.batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    if mha.in_proj_weight is not None:
        weights = mha.in_proj_weight.chunk(3)
    else:
        weights = (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight)
    biases = (None,) * 3 if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
    taps: Taps = {}
    for label, x, weight, bias in zip("qkv", (query, key, value), weights, biases, strict=True):
        taps[label] = (x, F.linear(x, weight, bias))

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (mha.num_heads, -1)).transpose(1, 2)

    k, v = taps["k"][1], taps["v"][1]
    if mha.bias_k is not None:
        k = torch.cat([k, mha.bias_k.expand(len(k), 1, -1)], dim=1)
        v = torch.cat([v, mha.bias_v.expand(len(v), 1, -1)], dim=1)
    if mha.add_zero_attn:
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
    q, k, v = (heads(t) for t in (taps["q"][1], k, v))
    scores = q @ k.mT / math.sqrt(mha.head_dim)
    for mask in (attn_mask, key_padding_mask):
        if mask is None:
            continue
        if mask is key_padding_mask:
            mask = mask.reshape(-1, 1, 1, mask.shape[-1])
        elif mask.dim() == 3:
            mask = mask.unflatten(0, (-1, mha.num_heads))
        scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    mixed = (weights @ v).transpose(1, 2).flatten(2)
    out = F.linear(mixed, mha.out_proj.weight, mha.out_proj.bias)
    taps["out"] = (mixed, out)
    if not batched:
        return out[0], weights[0], taps
    return (out if mha.batch_first else out.transpose(0, 1)), weights, taps


def tap_rows(taps: Taps, loss: Tensor, bias: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
    """Input rows (1 appended) and ∂loss/∂output rows of each tap."""
    outputs = [output for _, output in taps.values()]
    gradients = torch.autograd.grad(loss, outputs, retain_graph=True)
    rows = {}
    for (label, (x, _)), g in zip(taps.items(), gradients, strict=True):
        x = x.detach()
        if bias:
            x = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
        rows[label] = (x[None], g[None])
    return rows
