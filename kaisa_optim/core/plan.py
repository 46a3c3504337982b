"""What a step needs, compiled from facts that seldom change: stacks, shares, transports, lists."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.sharding import parts_here
from ..curvature.group import ParameterStack
from ..curvature.lengths import BaseNumbers, Length, Share, are_alike
from .transport import Local, Shards

Entry = dict[str, Any]

CLIP_TERMS = 2  # numbers of each block that the clip needs
# A scale of the clip's terms. With a loss of 1e20, gradients are as long, and plain terms would
# overflow float32. A power of two changes no digit of the clip. Products that become zero by the
# scale are far below any clip.
_SCALE = 2.0**-64


class Plan:
    """The parameters that K-FAC gives new gradients or steps, and how.

    ``rest`` has, for each of the optimizer's groups, the parameters that the base alone steps.
    ``stacks`` are in the order of the plan's parameters.
    """

    def __init__(self, stacks: Sequence[ParameterStack], rest: list[list[Tensor]]) -> None:
        self.stacks, self.rest = list(stacks), rest
        self.parameters = [p for stack in stacks for p in stack.parameters]
        self.index = {p: i for i, p in enumerate(self.parameters)}
        self.numbers = [stack.number for stack in stacks for _ in stack.parameters]
        start = 0
        for stack in stacks:
            stack.at = slice(start, start + len(stack.parameters))
            start = stack.at.stop
        self.transports: list[Local | Shards] = []
        self.whole: Share | None = None  # all blocks, where some number goes by all of them
        self.entries: list[Entry] = []  # of the parameters, in the optimizer's state
        self.counts: Tensor | None = None  # of the parameters' steps, if the base counts them
        # Parameters that K-FAC stepped before, and the base is to step from now on.
        self.leaving: list[Tensor] = []
        # Parameters of one kind, which foreach calls take: their group's number, and their places.
        kinds: dict[Any, list[int]] = {}
        for i, (p, number) in enumerate(zip(self.parameters, self.numbers, strict=True)):
            kinds.setdefault((number, p.device, p.dtype, type(p)), []).append(i)
        self.kinds = [(number, places) for (number, *_), places in kinds.items()]

    def collect(self) -> list[bool] | None:
        """Stack the gradients; return whether each parameter has one, ``None`` if all have."""
        gradients: list[Any] = parts_here([p.grad for p in self.parameters])  # type: ignore[misc]
        for stack in self.stacks:
            if stack.mine or stack.is_partial:
                stack.buffer = stack.stacked(gradients[stack.at])
            else:
                stack.buffer = stack.empty()
        present = [gradient is not None for gradient in gradients]
        return None if all(present) else present

    def rows(self) -> list[Tensor]:
        """Return the buffers' rows, one for each parameter."""
        buffers = [stack.buffer for stack in self.stacks]
        return [*itertools.chain.from_iterable(map(Tensor.unbind, buffers))]

    def measure(self, measures: str) -> None:
        """Sum over blocks what the length needs: of the buffers, and of the parameters' squares."""
        tensors = self.rows() if measures else []
        for transport in self.transports:
            transport.measure(tensors, self.parameters, squares=measures == "squares")

    def finish(self, length: Length, base: BaseNumbers) -> None:
        """Write all directions into the buffers, with lengths that go by all of them."""
        scales = None
        if self.whole is not None and length.terms:
            terms = [x for transport in self.transports for x in transport.terms()]
            device = self.whole.like.device
            all_scales = length.finish(torch.cat([x.to(device) for x in terms]), self.whole, base)
            assert all_scales is not None
            scales = iter(all_scales.split([len(x) for x in terms]))
        for transport in self.transports:
            transport.deliver(scales)

    def clip(self, limit: float, alphas: list[Any]) -> Tensor | None:
        """Write new gradients times ν = min(1, √(κ / |Σ α²⟨v, ∇⟩|)); return ν.

        ``alphas`` has the α of each of the optimizer's groups. The host does not wait. The layers'
        terms, rows of :func:`products`, are added up in the layers' order, so that ν has the same
        bits on all ranks.
        """
        assert self.whole is not None
        share = self.whole
        terms = [x for transport in self.transports for x in transport.terms()]
        each = torch.cat([x.to(share.like.device) for x in terms]).index_select(0, share.order)
        order = sorted(range(len(share.layers)), key=lambda i: share.layers[i].number)
        rows = torch.stack(
            [
                x[0] if len(x) == 1 else x.sum(0)
                for x in each.split([share.counts[i] for i in order])
            ]
        )
        weights, biases = share.of_groups([*alphas, 0.0])
        if are_alike([*weights, *biases]):
            total: Any = rows.select(1, 0).sum() * _squared(weights[0])
        else:  # a layer's weight, and its bias, the last column, may have an α each
            total = sum(
                (row[0] - row[1]) * _squared(weights[i]) + row[1] * _squared(biases[i])
                for i, row in zip(order, rows, strict=True)
            )
        scale: Tensor = (limit * _SCALE / total.abs()).sqrt_().clamp_(max=1)
        for transport in self.transports:
            transport.deliver(iter([scale.expand(len(x)) for x in transport.terms()]))
        return scale

    def missing(self, present: list[bool]) -> list[tuple[ParameterStack, list[int]]]:
        """Return stacks of momenta with rows whose parameters have no gradient."""
        each = [(stack, present[stack.at]) for stack in self.stacks if stack.mine]
        rows = [(stack, [i for i, x in enumerate(flags) if not x]) for stack, flags in each]
        return [(stack, own) for stack, own in rows if own]

    def clear(self) -> None:
        for stack in self.stacks:
            stack.clear()


def products(raw: Tensor, new: Tensor) -> Tensor:
    """Return the clip's terms, ``[blocks, 2]``: ⟨new, raw⟩, and ⟨new, raw⟩ of the last column.

    Both are multiplied by :data:`_SCALE`. ``raw`` is overwritten.
    """
    columns = raw.mul_(_SCALE).mul_(new).sum(1)
    return torch.stack([columns.sum(1), columns.select(1, -1)], 1)


def _squared(alpha: Any) -> Any:
    """Return α² as a scalar: only a scalar CPU tensor goes with tensors of other devices."""
    return alpha.reshape(()) ** 2 if isinstance(alpha, Tensor) else alpha**2
