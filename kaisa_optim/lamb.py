"""LAMB with the equations and defaults of NVIDIA apex's FusedLAMB, in PyTorch's foreach operations.

The equations were read from apex (``apex/optimizers/fused_lamb.py``, ``csrc/multi_tensor_lamb.cu``)
and from You et al., "Large Batch Optimization for Deep Learning" (arXiv:1904.00962).
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from .comm.sharding import is_sharded, parts_here
from .errors import invalid, invalid_because

__all__ = ["LAMB"]

Pairs = list[tuple[Tensor, Tensor | None]]  # parameters, and gradients for the base
# The number of elements in each chunk of work of apex's kernels, as apex chooses it.
_APEX_CHUNK = 2048 * 32
_APEX_DEVICE = "cuda"
_DENSE_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_APEX_MISSING = (
    'backend="apex" needs the extension module amp_C with multi_tensor_lamb, which cannot be '
    "imported. Build NVIDIA apex from its source repository (github.com/NVIDIA/apex) with its CUDA "
    "extensions: APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation . (the package "
    'named "apex" on the public index is something else). backend="torch" runs without it.'
)


class LAMB(Optimizer):
    r"""LAMB: Adam's direction, rescaled for each tensor by its trust ratio.

    With g the gradient, |.| the L2 norm, :math:`\beta_3 = 1-\beta_1` (1 without
    ``grad_averaging``) and t the number of steps that the group has taken::

        g = g / max(1, |all gradients of all groups| / max_grad_norm)
        g = g + weight_decay p                                  adam_w_mode=False only
        m = beta1 m + beta3 g,   v = beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        u = u + weight_decay p                                  adam_w_mode=True only
        p = p - lr (|p| / |u|) u

    The ratio of norms counts as 1 where either is 0 and, unless ``use_nvlamb``, in groups with
    ``weight_decay=0``. ``bias_correction=False`` leaves both divisions by 1 - beta^t out.

    LAMB reads ``p.grad`` when ``step`` runs, and leaves it unchanged. In KFACLAMB, clipping and
    moments see raw gradients, and trust ratios see K-FAC's directions. With the K-FAC papers'
    methods, all three see preconditioned gradients.

    Args:
        params: parameters, or dicts of parameter groups; dense and real.
        lr, bias_correction, betas, eps: as in the equations; ``lr`` may be a Tensor of one element.
        weight_decay: decay; 0 also turns the group's trust ratio off, unless ``use_nvlamb``.
        amsgrad, set_grad_none: in their places for apex; refused unless left at their defaults.
        adam_w_mode: True decouples the decay from the moments, False adds it to the gradient (L2).
        grad_averaging: weigh the gradient in m by 1 - beta1 rather than 1.
        max_grad_norm: limit of the norm over all groups' gradients; None or <= 0 is "off". A group
            may have its own limit of that same norm.
        use_nvlamb: use the trust ratio where ``weight_decay`` is 0, too.
        backend: None takes apex's kernel for the tensors that suit it (CUDA, float32 or float16,
            contiguous or channels_last with strides equal, 1 to 2^31 - 1 elements), if its
            ``amp_C.multi_tensor_lamb`` can be imported, and PyTorch for the others; "torch" never
            takes the kernel; "apex" raises where the kernel cannot be taken.
        maximize: ascend rather than descend.

    State, one layout for both backends and the same as apex's: ``exp_avg`` and ``exp_avg_sq`` in
    the parameter's dtype and layout, ``step`` (an int) in the parameter group, counting the steps
    that found a gradient in the group. Arithmetic is in float32 for float16 and bfloat16 and in the
    parameter's own dtype otherwise. Moments stored in half precision are coarse (squares
    of small gradients underflow in float16): prefer float32 parameters under autocast.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        *,
        backend: str | None = None,
        maximize: bool = False,
    ) -> None:
        if amsgrad:
            raise NotImplementedError("LAMB does not support amsgrad=True; leave it out")
        if not set_grad_none:
            why = "LAMB does not support set_grad_none=False; call zero_grad(set_to_none=False)"
            raise NotImplementedError(why)
        if backend not in (None, "torch", "apex"):
            raise invalid("backend", backend, 'use None, "torch" or "apex"')
        defaults: dict[str, Any] = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
            "maximize": maximize,
        }
        _check_options(defaults)
        self.backend = backend
        self._kernel = _find_kernel(backend)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        sharded = {is_sharded(p) for group in self.param_groups for p in group["params"]}
        if len(sharded) > 1:  # a refused group must leave no trace
            self.param_groups.pop()
            why = "some are sharded and some are not, and LAMB takes one norm over all; wrap the "
            why += "whole model with fully_shard, or none of it"
            raise invalid_because("params", why)

    def __getstate__(self) -> dict[str, Any]:
        # The backend belongs to the machine: it is pickled, but is no part of state_dict().
        return {**super().__getstate__(), "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Look for the kernel again: this machine may lack it.
        self._kernel = _find_kernel(self.backend)
        for group in self.param_groups:  # apex's checkpoints lack these
            for key in ("adam_w_mode", "use_nvlamb", "maximize"):
                group.setdefault(key, self.defaults[key])

    # Fills lists and returns no tensors, as in torch.optim: torch.compile relies on both.
    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        with_grad = [p for p in group["params"] if p.grad is not None]
        # Refuse before any entry is made: a refused step must leave no trace.
        for p in with_grad:
            if p.grad.layout is not torch.strided:
                why = "LAMB does not support sparse gradients, please consider SparseAdam instead"
                raise RuntimeError(why)
            if p.is_complex():
                raise RuntimeError("LAMB does not support complex parameters")
        for p in with_grad:
            state = self.state[p]
            if "exp_avg" not in state:  # a subclass may keep entries of its own there
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            tensors = p, p.grad, state["exp_avg"], state["exp_avg_sq"]
            for parts, tensor in zip(lists, tensors, strict=True):
                parts.append(tensor)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure``, if given, re-evaluates the model and returns the loss."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("LAMB cannot be captured in a CUDA graph: the host counts its steps")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        batches: list[tuple[list[Tensor], ...]] = []
        for group in self.param_groups:
            batches.append(([], [], [], []))
            self._init_group(group, *batches[-1])
        grads = [grad for batch in batches for grad in batch[1]]
        if not grads:
            return loss
        clipping = any(_limit(group) < math.inf for group in self.param_groups)
        grad_norm = global_norm(grads) if clipping else grads[0].new_zeros((), dtype=torch.float32)

        for group, batch in zip(self.param_groups, batches, strict=True):
            if batch[0]:
                group["step"] = group.get("step", 0) + 1
                # With the norm over all groups, also where a group has a limit of its own.
                self._step_group(group, batch, grad_norm)
        return loss

    def _step_group(
        self, group: dict[str, Any], batch: tuple[list[Tensor], ...], grad_norm: Tensor
    ) -> None:
        lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        step, correction, decay = group["step"], group["bias_correction"], group["weight_decay"]
        averaging, decoupled = group["grad_averaging"], group["adam_w_mode"]
        limit, use_nvlamb = _limit(group), group["use_nvlamb"]
        if isinstance(lr, Tensor) and lr.device.type == "cpu":
            lr = lr.item()
        for p, g, m, v in _buckets(*batch):
            dtype = math_dtype(p[0].dtype)
            norm = grad_norm.to(p[0].device, dtype).reshape(1)
            objection = "" if self._kernel is None else _apex_objection(lr, p, g, m, v)
            if objection and self.backend == "apex":
                raise RuntimeError(f'backend="apex" cannot step {objection}; use backend=None')
            if self._kernel is not None and not objection:
                # Apex overwrites its gradients with the update; p.grad stays as backward left it.
                lists = [list(torch._foreach_mul(g, -1 if group["maximize"] else 1)), p, m, v]
                no_skip = torch.zeros(1, dtype=torch.int, device=p[0].device)
                flags = int(correction), decay, int(averaging), int(decoupled)
                # This call was verified only against a fake amp_C that follows apex's source, never
                # on a GPU. Apex rounds float16 updates before the trust ratio; this code does not.
                numbers = lr, beta1, beta2, eps, step, *flags, norm, limit, use_nvlamb
                self._kernel(_APEX_CHUNK, no_skip, lists, *numbers)
                # Autograd did not see the write. Without new versions, a backward pass through an
                # older graph would use the new weights without an error.
                for param in p:
                    torch.autograd.graph.increment_version(param)
                continue

            # `to` gives back a tensor of this dtype itself, and a copy of one in half precision. So
            # moments are rounded once, from float32, when they are stored below.
            stored = p, m, v
            p, g = [t.to(dtype) for t in p], [t.to(dtype) for t in g]
            m, v = [t.to(dtype) for t in m], [t.to(dtype) for t in v]
            if group["maximize"]:
                g = torch._foreach_neg(g)
            if limit < math.inf:
                g = _clipped(g, norm, limit)
            if decay != 0 and not decoupled:
                g = torch._foreach_add(g, p, alpha=decay)
            # Not as a lerp, whose last bits are other ones than apex's.
            torch._foreach_mul_(m, beta1)
            torch._foreach_add_(m, g, alpha=1 - beta1 if averaging else 1)
            torch._foreach_mul_(v, beta2)
            torch._foreach_addcmul_(v, g, g, 1 - beta2)
            denominator = torch._foreach_div(v, 1 - beta2**step if correction else 1)
            # eps comes after the root, as in apex: under the root, its own root would count.
            torch._foreach_sqrt_(denominator)
            torch._foreach_add_(denominator, eps)
            update = torch._foreach_div(m, 1 - beta1**step if correction else 1)
            torch._foreach_div_(update, denominator)
            descend(p, list(update), lr, decay, decoupled, use_nvlamb)
            if stored[0][0].dtype != dtype:
                for former, values in zip(stored, (p, m, v), strict=True):
                    torch._foreach_copy_(parts_here(former), parts_here(values))


def rate_for(lr: float | Tensor, like: Tensor) -> float | Tensor:
    """Return a number if the host has it, else a scalar on the device of ``like``."""
    if not isinstance(lr, Tensor):
        return lr
    return lr.item() if lr.device.type == "cpu" else lr.to(like.device, like.dtype).reshape(())


def descend(
    p: list[Tensor],
    update: list[Tensor],
    lr: float | Tensor,
    weight_decay: float,
    adam_w_mode: int,
    use_nvlamb: bool,
) -> None:
    """Move parameters of one device and dtype against Adam's directions, which are overwritten."""
    # The decay is part of the direction whose norm the trust ratio divides by: keep it before.
    if weight_decay != 0 and adam_w_mode:
        torch._foreach_add_(update, p, alpha=weight_decay)
    rate = rate_for(lr, p[0])
    if use_nvlamb or weight_decay != 0:
        p_norm, u_norm = (torch.stack(torch._foreach_norm(ts)) for ts in (p, update))
        # On the device: to ask the norms in Python would make the host wait in each step.
        trust = torch.where((p_norm != 0) & (u_norm != 0), p_norm / u_norm, 1.0)
        torch._foreach_mul_(update, (trust * rate).unbind())
    else:
        torch._foreach_mul_(update, rate)
    torch._foreach_sub_(p, update)


def clipped_gradients(groups: list[dict[str, Any]]) -> Pairs:
    """Return parameters and gradients under each group's limit on the norm over all groups."""
    graded: list[list[Tensor]] = []
    for group in groups:
        graded.append([p for p in group["params"] if p.grad is not None])
    gradients: Any = [p.grad for params in graded for p in params]
    result: Pairs = []
    norm = global_norm(gradients) if gradients else None
    for group, params in zip(groups, graded, strict=True):
        if norm is None or not params or _limit(group) == math.inf:
            continue
        for (bucket,) in _buckets(params):
            new = _clipped([p.grad for p in bucket], norm, _limit(group))
            result += zip(bucket, new, strict=True)
    return result


def _clipped(gradients: list[Tensor], norm: Tensor, limit: float) -> list[Tensor]:
    norm = norm.to(gradients[0].device, math_dtype(gradients[0].dtype))
    excess = torch.where(norm > limit, norm / limit, 1.0)
    return list(torch._foreach_div(gradients, excess.reshape(())))


def _apex_objection(lr: float | Tensor, *lists: list[Tensor]) -> str | None:
    # Return why apex can't step these parameters, gradients and moments of one kind, or None.
    params = lists[0]
    device, dtype = params[0].device, params[0].dtype
    if isinstance(lr, Tensor):
        return f"with a Tensor lr on {lr.device}, which would have to be read back"
    if device.type != _APEX_DEVICE:
        return f"parameters on {device}"
    if dtype not in (torch.float32, torch.float16):
        return f"{dtype} parameters"
    for tensors in zip(*lists, strict=True):
        p, shape = tensors[0], tuple(tensors[0].shape)
        if any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors):
            return f"tensor subclasses (shape {shape})"
        # An empty tensor at the end of a list makes apex drop its last launch.
        if not 0 < p.numel() < 2**31:
            return f"a parameter with {p.numel()} elements"
        if not any(p.is_contiguous(memory_format=f) for f in _DENSE_FORMATS):
            return f"a parameter that is not contiguous (shape {shape}, strides {p.stride()})"
        if any(t.stride() != p.stride() for t in tensors):
            return f"a parameter whose gradient or state has other strides (shape {shape})"
    return None


def _find_kernel(backend: str | None) -> Callable[..., None] | None:
    if backend == "torch":
        return None
    kernel: Callable[..., None] | None = None
    # Only an apex that was built from source has this module. The package never needs it.
    with contextlib.suppress(ImportError):
        kernel = getattr(importlib.import_module("amp_C"), "multi_tensor_lamb", None)
    if kernel is None and backend == "apex":
        raise RuntimeError(_APEX_MISSING)
    return kernel


def _check_options(options: dict[str, Any]) -> None:
    lr, betas, limit = options["lr"], options["betas"], options["max_grad_norm"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise invalid_because("learning rate", f"{lr}")
    if not options["eps"] >= 0.0:
        raise invalid_because("epsilon value", f"{options['eps']}")
    if len(betas) != 2 or any(isinstance(beta, Tensor) for beta in betas):
        raise invalid_because("betas", f"{betas}; two floats are needed")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise invalid_because(f"beta parameter at index {index}", f"{beta}")
    if not options["weight_decay"] >= 0.0:
        raise invalid_because("weight_decay value", f"{options['weight_decay']}")
    if limit is not None and math.isnan(limit):
        raise invalid_because("max_grad_norm value", f"{limit}; None or a value <= 0 is off")


def _limit(group: dict[str, Any]) -> float:
    limit = group["max_grad_norm"]
    return math.inf if limit is None or limit <= 0 else limit


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic on tensors of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _buckets(*lists: list[Tensor]) -> Iterator[list[Any]]:
    # Split the lists by device and dtype: foreach takes mixed ones tensor by tensor, silently.
    groups = _group_tensors_by_device_and_dtype([list[Tensor | None](ts) for ts in lists])
    return (bucket for bucket, _ in groups.values())


def global_norm(grads: list[Tensor]) -> Tensor:
    """Return the norm of all gradients together: 0-d, on the device of the first gradient."""
    wide = any(grad.dtype == torch.float64 for grad in grads)
    parts = []
    for (bucket,) in _buckets(grads):
        dtype = math_dtype(bucket[0].dtype)
        if is_sharded(bucket[0]):  # torch 2.15 takes the dtype for a dimension there
            norms = torch._foreach_norm([grad.to(dtype) for grad in bucket])
        else:
            norms = torch._foreach_norm(bucket, 2, dtype=dtype)
        part: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        parts.append(part.to(grads[0].device, torch.float64 if wide else torch.float32))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return norm
