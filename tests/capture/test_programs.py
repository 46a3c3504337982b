"""Random models: the sums of every layer are right, or a report names the layer."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from kaisa_optim import KFACSGD
from kaisa_optim.capture.hooks import Capture
from kaisa_optim.capture.passes import accumulates_into
from kaisa_optim.layers import Layer, watch
from kaisa_optim.layers.base import GATHER
from tests.support.programs import Program, Rows
from tests.support.training import warnings_as

COUNT = int(os.environ.get("PROGRAMS", "100"))
GROUPS = 10
STEPS = 3  # uses that the first step missed are looked for again; what stays is named then


def near(found: Tensor, wanted: Tensor) -> bool:
    rtol = 1e-6 if wanted.dtype == torch.float64 else 1e-3
    return bool((found - wanted).norm() <= rtol * wanted.norm() + 1e-12)


def far(found: Tensor, wanted: Tensor) -> float:
    """Return the share of a gradient that is not made."""
    return float((found - wanted).norm() / max(found.norm(), wanted.norm()))


class Reference:
    """A layer's gradient, and its sums by the rows that the uses noted."""

    def __init__(self, layer: Layer, notes: list[Rows]) -> None:
        weight = layer.weight.detach()
        self.layer = layer
        self.gradient = self.matrix(layer.weight.grad)
        self.of_bias = layer.bias.grad.flatten().clone() if layer.covers[1] else None
        places = torch.arange(weight.numel()).view(weight.shape)
        # Which dimension of the stored matrix meets the layer's inputs.
        own = int(torch.equal(self.matrix(places).flatten(), places.flatten()))
        blocks, outputs, inputs = self.gradient.shape
        self.a, self.g = (
            weight.new_zeros(2, blocks, size, size) for size in (inputs + layer.covers[1], outputs)
        )
        self.counts = [[0] * blocks, [0] * blocks]
        self.made = torch.zeros_like(self.gradient)
        self.made_of_bias = weight.new_zeros(outputs)
        for one in notes:
            a, g, crossed = one.a, one.g(), int(one.input_dim != own)
            a, g = (g, a) if crossed else (a, g)
            self.made[one.block] += g.mT @ a
            if layer.covers[1]:
                added = a.new_full((len(a), 1), float(one.bias))
                self.made_of_bias += (g * added).sum(0)
                a = torch.cat([a, added], 1)
            self.a[crossed, one.block] += a.mT @ a
            self.g[crossed, one.block] += g.mT @ g
            self.counts[crossed][one.block] += len(a)

    def matrix(self, tensor: Tensor) -> Tensor:
        return self.layer.weight_view(tensor).flatten(2)

    @property
    def knows_all(self) -> bool:
        """Whether the noted rows make the gradients: no use is without rows."""
        own = self.of_bias is None or near(self.made_of_bias, self.of_bias)
        return own and near(self.made, self.gradient)

    def difference(self, sums: Any, seen: list[Seen]) -> str:
        """Return in what the sums differ from the reference, and nothing if they are right."""
        seen = [one for one in seen if one.layer is self.layer]
        made, of_bias = torch.zeros_like(self.made), torch.zeros_like(self.made_of_bias)
        for one in seen:
            made[one.blocks] += one.made
            of_bias += one.of_bias.sum(0)
        if not near(made, self.gradient):
            return f"Σ g aᵀ is off by {far(made, self.gradient)}"
        if self.of_bias is not None and not near(of_bias, self.of_bias):
            return f"Σ g is off by {far(of_bias, self.of_bias)}"
        if not self.knows_all:
            return ""  # a use without noted rows was read, and makes the gradient
        for crossed, found in enumerate((sums, sums and sums.crossed)):
            counts = [] if found is None or found.a is None else found.count
            counts = list(counts) * (len(self.made) if len(counts) == 1 else 1)
            if (counts or [0] * len(self.made)) != self.counts[crossed]:
                return f"{counts} rows for {self.counts[crossed]}, crossed: {crossed}"
            for side, name in zip("ag", "ga" if crossed else "ag", strict=True) if counts else ():
                wanted, factor = getattr(self, side)[crossed], getattr(found, name)
                if name == "g" and found.unit is not None:
                    factor = factor * found.unit.square()
                if factor.dim() == 2:
                    wanted = wanted.diagonal(dim1=1, dim2=2)
                if not near(factor, wanted):
                    return f"{side.upper()} is off by {far(factor, wanted)}, crossed: {crossed}"
        return ""


class Seen(NamedTuple):
    """The gradients that one call's rows make, as the statistics have them."""

    layer: Layer
    made: Tensor
    of_bias: Tensor
    blocks: slice


def noting(seen: list[Seen]) -> AbstractContextManager[Any]:
    """Note all calls whose rows enter the sums."""
    real = Capture.record

    def record(self: Capture, call: Any, x: Tensor, grad: Tensor) -> None:
        if call.task >= GATHER and accumulates_into(call.anchor):
            layer = call.layer
            made = layer.gradient(x, grad)
            of_bias = layer.output_rows(x, grad).sum((1, 2)) * layer.adds_bias
            if layer.crossed:
                made, of_bias = made.mT, torch.zeros(())
            seen.append(Seen(layer.primary, made, of_bias, call.blocks))
        real(self, call, x, grad)

    return mock.patch.object(Capture, "record", record)


def outcome_of(seed: int) -> Counter[str]:
    """Return how many layers end exact, named or raw; raise if one is wrong in silence."""
    program = Program(seed)
    try:
        notes = program.rows()
        program.zero_grad()
        program.train_once()
    except RuntimeError:
        return Counter()  # some changes in place go with no backward pass, or with no checkpoint
    told = f"program {seed}, {program.dtype}:\n" + "\n".join(program.described)
    often: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 100}
    with warnings_as("ignore"):
        opt = KFACSGD(program, lr=1e-30, **often, **program.options)
        kfac = opt.preconditioner
        references = [
            Reference(layer, [one for one in notes if one.parameter is layer.weight])
            for layer in kfac.registry.layers.values()
            if layer.weight.grad is not None
        ]
        for _ in range(STEPS):
            opt.zero_grad()
            seen: list[Seen] = []
            with noting(seen):
                program.train_once()
            sums = kfac.sums.of_layer
            wrong = {one.layer: one.difference(sums.get(one.layer), seen) for one in references}
            for one in references:
                assert near(one.matrix(one.layer.weight.grad), one.gradient), told
            opt.step()
    report, found = kfac.coverage(), Counter[str]()
    names = {p: name for name, p in program.named_parameters()}
    for layer, why in wrong.items():
        if names[layer.weight] in report.left:
            found["raw"] += 1
        elif layer.name in report.elsewhere:
            found["named"] += 1
        else:
            assert not why, f"{layer.name}: {why}\n{told}\n{kfac}"
            found["exact"] += 1
    return found


@pytest.mark.parametrize("group", range(GROUPS))
def test_sums_of_random_programs_are_right_or_named(group):
    total: Counter[str] = Counter()
    for seed in range(group, COUNT, GROUPS):
        total += outcome_of(seed)
    print(dict(total))
    assert total["exact"] > total.total() / 2, total


def _twice(capture: Capture, layer: Layer, output: Tensor, *call: Any) -> Tensor:
    return TAP(capture, layer, TAP(capture, layer, output, *call), *call)


def _trains(view: Tensor, base: Any) -> bool:
    return True


TAP = Capture._tap
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a use counts twice": (Capture, "_tap", _twice),
    "uses that were found are not watched": (Capture, "_note", lambda *_: None),
    "views under no_grad are uses": (watch, "_trains", _trains),
}


@functools.cache
def outcome(fault: str | None) -> Counter[str]:
    total: Counter[str] = Counter()
    with contextlib.nullcontext() if fault is None else mock.patch.object(*FAULTS[fault]):
        for seed in range(6):
            try:
                total += outcome_of(seed)
            except AssertionError:
                total["wrong"] += 1
    return total


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_wrong_or_named(fault):
    right, faulty = outcome(None), outcome(fault)
    assert not right["wrong"] and faulty["exact"] < right["exact"], (right, faulty)
    assert faulty["wrong"] or faulty["named"] > right["named"]
