"""Where the time of a step goes, stage by stage: K-FAC's part of a training step, measured."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity
from torch.utils import _pytree as tree

from ..errors import invalid_because
from ..optimizer import KFACAdam
from ..stages import PREFIX, STAGES
from .passes import arguments
from .texts import aligned

_HOST = torch._C._autograd.DeviceType.CPU
REST = "passes and the rest"  # all that no stage labels
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Row:
    """Milliseconds of one stage."""

    stage: str
    first: float  # in the first step, which gathers and refreshes everything
    mean: float  # in a step of an interval afterwards


@dataclass(frozen=True)
class Profile:
    """The stages of a step, with their times; its ``repr`` is a table."""

    optimizer: str
    device: str
    steps: int  # of the interval
    rows: tuple[Row, ...]  # the stages that ran, then all the rest

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table's cells: a row a stage, and the whole step."""
        first, mean = sum(x.first for x in self.rows), sum(x.mean for x in self.rows)
        whole = (*self.rows, Row("whole step", first, mean))
        head: tuple[str, ...] = ("stage", "first ms", "mean ms", "share")
        return [head] + [
            (x.stage, f"{x.first:.2f}", f"{x.mean:.2f}", f"{100 * x.mean / mean:.1f} %")
            for x in whole
        ]

    def __repr__(self) -> str:
        head = f"{self.optimizer} on {self.device}, means over {self.steps} steps"
        return "\n".join([head, *aligned(self.cells())])

    def to_json(self) -> str:
        """Return all numbers."""
        return json.dumps(asdict(self), indent=1)


def profile(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    *,
    optimizer: Callable[..., Optimizer] = KFACAdam,
    device: torch.device | str = "cpu",
    steps: int | None = None,
    **options: Any,
) -> Profile:
    """Train a model for some steps, and return the time of each stage.

    ``batch`` is the model's input. A model or a batch on the meta device is filled with random
    numbers. ``loss`` makes a number of the model's output; without it, the mean square of the
    output's numbers is the loss. The interval has ``steps`` steps: by default as many as lie
    between two refreshes of a layer, after the early ones. On a GPU, times are those of the
    kernels. Labels and operations are recorded meanwhile, which makes a step longer, and small
    models most of all.
    """
    net, (args, kwargs) = _filled(model, device), arguments(_drawn(batch, device))
    made: Any = optimizer(net, **options)
    measure = _mean_square if loss is None else loss

    def train(count: int) -> tuple[Counter[str], float]:
        return _timed(count, net, lambda: measure(net(*args, **kwargs)), made)

    first, first_whole = train(1)
    kfac = made.preconditioner
    if steps is None:  # pass by the early refreshes, which are not those of an interval
        for _ in range(max(kfac.options.early, default=0)):
            _step(lambda: measure(net(*args, **kwargs)), made)
    count = steps or max(kfac.inv_update_steps, kfac.factor_update_steps)
    later, whole = train(count)
    rows = [Row(x, first[x], later[x] / count) for x in STAGES if x in first or x in later]
    remainder = first_whole - first.total(), (whole - later.total()) / count
    rows.append(Row(REST, *remainder))
    return Profile(type(made).__name__, str(torch.device(device)), count, tuple(rows))


def _timed(
    count: int, net: nn.Module, passes: Callable[[], Tensor], optimizer: Optimizer
) -> tuple[Counter[str], float]:
    """Return the milliseconds of each stage in so many steps, and of all of them together."""
    on_gpu = next(net.parameters()).is_cuda
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(activities=kinds) as profiler:
        begun = time.perf_counter()
        for _ in range(count):
            _step(passes, optimizer)
        if on_gpu:
            torch.cuda.synchronize()
        whole = time.perf_counter() - begun
    return own_times(profiler.events(), on_gpu=on_gpu), 1e3 * whole


def _step(passes: Callable[[], Tensor], optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    passes().backward()
    optimizer.step()


def own_times(events: Iterable[Any], *, on_gpu: bool) -> Counter[str]:
    """Return the milliseconds of each stage, without the stages within it."""
    times: Counter[str] = Counter()
    for event in events:
        if not event.name.startswith(PREFIX) or event.device_type != _HOST:
            continue  # a GPU's own record of a label is a second one
        took = 1e-3 * (event.device_time_total if on_gpu else event.cpu_time_total)
        times[event.name.removeprefix(PREFIX)] += took
        around = event.cpu_parent
        while around is not None and not around.name.startswith(PREFIX):
            around = around.cpu_parent
        if around is not None:
            times[around.name.removeprefix(PREFIX)] -= took
    return times


def _filled(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Return the model on a device; parameters without numbers are drawn."""
    if any(p.is_meta for p in model.parameters()):
        model = model.to_empty(device=device)
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None) or getattr(
                module, "_reset_parameters", None
            )
            if callable(reset):
                reset()
            else:
                for p in module._parameters.values():
                    if p is not None:
                        nn.init.normal_(p, std=0.02)
            for buffer in module._buffers.values():
                if buffer is not None and not callable(reset):
                    buffer.zero_()
    return model.to(device)


def _drawn(batch: Any, device: torch.device | str) -> Any:
    """Return a batch on a device; tensors without numbers are drawn, and whole numbers are zero."""

    def drawn(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_meta:
            return x.to(device) if isinstance(x, Tensor) else x
        empty = torch.zeros(x.shape, dtype=x.dtype, device=device)
        return empty.normal_() if x.is_floating_point() else empty

    return tree.tree_map(drawn, batch)


def _mean_square(output: Any) -> Tensor:
    """Return the loss in place of the user's."""
    tensors = [x for x in tree.tree_leaves(output) if isinstance(x, Tensor)]
    numbers = [x for x in tensors if x.is_floating_point() and x.requires_grad]
    if not numbers:
        why = "the model returned no floating tensor that trains it; give loss="
        raise invalid_because("model", why)
    return torch.stack([x.float().square().mean() for x in numbers]).sum()
