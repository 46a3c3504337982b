"""Where the host waits for the device, for every rule, in each kind of step."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.muon import Muon
from benchmarks.networks import CifarResNet, Transformer
from kaisa_optim import KFACLAMB, KFACSGD, LAMB, KFACAdam

from .settings import Settings

_HERE = Path(__file__).name
_OFTEN: dict[str, Any] = {"factor_update_steps": 3, "inv_update_steps": 6}
STEPS = 18  # three intervals between refreshes; the first step, which begins all, is apart

Build = Callable[[nn.Module, dict[str, Any]], torch.optim.Optimizer]
RULES: dict[str, Build] = {
    "SGD": lambda m, _: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    "AdamW": lambda m, _: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "LAMB": lambda m, _: LAMB(m.parameters(), lr=1e-3),
    "Muon": lambda m, _: Muon([p for p in m.parameters() if p.dim() == 2], lr=0.01),
    "KFACSGD": lambda m, o: KFACSGD(m, lr=0.01, momentum=0.9, **o),
    "KFACAdam": lambda m, o: KFACAdam(m, lr=1e-3, **o),
    "KFACLAMB": lambda m, o: KFACLAMB(m, lr=1e-3, **o),
    "KFACSGD, bfloat16": lambda m, o: KFACSGD(m, lr=0.01, inv_dtype=torch.bfloat16, **o),
    "KFACSGD, a quarter": lambda m, o: KFACSGD(m, lr=0.01, statistics_fraction=0.25, **o),
    "KFACSGD, inverse": lambda m, o: KFACSGD(m, lr=0.01, compute_method="inverse", **o),
    "KFACSGD, eigen": lambda m, o: KFACSGD(m, lr=0.01, compute_method="eigen", **o),
}
# In no ordinary step and in no refresh of these does the host wait.
DIRECTIONS = [n for n in RULES if n.startswith("KFAC") and not n.endswith(("eigen", "inverse"))]


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    tokens = torch.randint(96, (4, 33), device=settings.device)
    images = torch.randn(16, 3, 32, 32, device=settings.device)
    labels = torch.randint(10, (16,), device=settings.device)
    text = tokens[:, :-1], tokens[:, 1:]
    waiting: list[str] = []
    tasks: dict[str, Any] = {
        "convolutions": (lambda: CifarResNet(8), (images, labels)),
        "transformer": (lambda: Transformer(width=64, layers=2, wide=128), text),
    }
    for title, (network, batch) in tasks.items():
        for name, build in RULES.items():
            torch.manual_seed(0)
            model = network().to(settings.device)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "the base optimizer updates these")
                optimizer = build(model, _OFTEN)
                found = _look(optimizer, model, batch, settings)
            yield {"rule": f"{name}, {title}"} | found
            if name in DIRECTIONS and found["steps that wait later"]:
                waiting.append(f"{name}, {title}")
    if waiting:
        raise RuntimeError(f"the host waits for the device under {'; '.join(waiting)}")


def _look(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    settings: Settings,
) -> dict[str, Any]:
    """The steps after the first in which the host waited, and where it did."""
    x, y = batch
    steps: dict[int, list[str]] = {}
    for step in range(4 if settings.rehearse else STEPS):
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        with watched() as found:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if found:
            steps[step] = found
    later = [where for step, found in steps.items() if step > 0 for where in found]
    return {
        "waits in the first step": len(steps.get(0, ())),
        "steps that wait later": sum(step > 0 for step in steps),
        "where": sorted({f"{later.count(where)} × {where}" for where in later}),
    }


@contextmanager
def watched() -> Iterator[list[str]]:
    """Collect where the host waits for the device, as torch warns of it."""
    found: list[str] = []

    def note(message: Any, category: Any, *_: Any, **__: Any) -> None:
        if "synchron" in str(message):
            found.append(_place())

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")


def _place() -> str:
    """The frames of this package and of the optimizers below, the innermost first."""
    frames = [f for f in traceback.extract_stack() if Path(f.filename).name != _HERE]
    own = [f for f in frames if "kaisa_optim" in f.filename or "optim" in f.filename]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(own[-4:]))
