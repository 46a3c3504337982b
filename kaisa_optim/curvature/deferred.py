"""Refreshes of which the host hears in the next step whether they were enough.

At its turn, a factor F with a basis Q gets one near to it, for 0.3 of a decomposition's work or
less. Its owner estimates what is left outside of the diagonal of QᵀFQ. Where that is too much, all
ranks learn of it in the exchange of the next step, and the factor is decomposed then: no host waits
for a device's work of the same step to hear whether it has to. So, too, with damped inverses on a
GPU: where one fails the older stays, and the next step makes all the attempts that there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layers import Layer
from .stacks import WITH_STREAMS, Factor, Shelf, Specs, Stack, device_of

Key = tuple[Layer, str]  # a layer's factor: side "a" or "g"


class Notes:
    """Numbers on their way from a device to the host, beside the work that follows."""

    def __init__(self) -> None:
        self._arriving: dict[Any, tuple[Tensor, Any]] = {}

    def send(self, of: Any, numbers: Tensor) -> None:
        if numbers.device.type in WITH_STREAMS:
            self._arriving[of] = _sent(numbers)

    def read(self, of: Any, numbers: Tensor) -> list[Any]:
        """As they were sent; what was not is waited for."""
        if of not in self._arriving:
            return numbers.cpu().tolist()
        host, arrival = self._arriving.pop(of)
        arrival.synchronize()
        return host.tolist()

    def clear(self) -> None:
        self._arriving.clear()


class Tracking:
    """Which factors the host waits for at a refresh, and which it hears of in the next step."""

    def __init__(self, tolerance: float, *, inverts: bool) -> None:
        self.tolerance = tolerance  # of QᵀFQ, the norm outside of its diagonal, as a share
        self._inverts = inverts  # by Cholesky, which on a device needs no look from the host
        self.plan: dict[Key, bool] = {}  # the factors of this refresh; True: with a look
        self.number = 0  # of the turn; it grows from each turn of a factor to its next
        self.asked: list[Layer] = []  # not waited for in the last refresh; alike on all ranks
        self.stale: set[Key] = set()  # to be decomposed: bases do not fit, an inverse has failed
        self._notes = Notes()

    def covers(self, device: torch.device) -> bool:
        """Whether refreshes there can do without a look; on the CPU an inverse's costs nothing."""
        return self.tolerance > 0 or (self._inverts and device.type in WITH_STREAMS)

    def specs(self, count: int) -> Specs:
        """What an owner keeps of ``count`` factors, wherever they may be moved."""
        return {"stale": ((count,), torch.int32)} if self.tolerance or self._inverts else {}

    def lay_out(self, shelf: Shelf) -> None:
        self._notes.clear()  # of stacks that are gone
        for stack in shelf.stacks.values():
            stack.new(self.specs(stack.count))

    # ---- what all ranks know alike ----

    def begin(
        self, due: Iterable[Layer], turn: Collection[Layer], known: Collection[Layer], number: int
    ) -> None:
        """Plan a refresh: ``turn`` have their turn ``number``, ``known`` have a state to keep."""
        self.plan, self.number = {}, number
        for layer in due:
            looked_at = layer not in known or not self.covers(device_of(layer))
            for side in "ag":
                anew = looked_at or (layer, side) in self.stale
                if anew or layer in turn:
                    self.plan[layer, side] = anew
        self.asked = list(dict.fromkeys(x for (x, _), anew in self.plan.items() if not anew))
        self.stale.clear()

    def forget(self, layer: Layer) -> None:
        # It stays among those asked: how many answers ranks exchange must not differ.
        self.stale -= {(layer, "a"), (layer, "g")}

    def resume(self, layers: Iterable[Layer]) -> None:
        """After a load: what owners had found out is asked for once more."""
        self.asked = list(layers) if self.specs(1) else []

    def hear(self, flags: Sequence[float]) -> None:
        """The answers of all ranks, added up, to :meth:`flags`."""
        keys = [(layer, side) for layer in self.asked for side in "ag"]
        self.stale.update(key for key, flag in zip(keys, flags, strict=True) if flag)
        self.asked = []
        self._notes.clear()

    # ---- what an owner finds out ----

    def look(
        self, factors: list[Factor], slots: slice | Tensor, outside: Tensor, whole: Tensor
    ) -> None:
        """Note the factors of which too much is outside of the diagonal."""
        # Not, where either is not a number.
        self.note(factors, slots, (outside <= self.tolerance * whole) & whole.isfinite())

    def note(self, factors: list[Factor], slots: slice | Tensor, fits: Tensor) -> None:
        """Note the factors that are to be decomposed in the next step: where it is not ``fits``."""
        kept = factors[0].tensors
        # A sum that was left out is named by the full refresh.
        kept["stale"][slots] = (~fits | (kept["rejected"][slots] > 0)).int()

    def send(self, shelf: Shelf) -> None:
        """Start the notes' way to the host, beside the work that follows."""
        for stack in shelf.stacks.values() if self.asked else ():
            self._notes.send(stack, stack.tensors["stale"])

    def flags(self, shelf: Shelf) -> list[float]:
        """This rank's notes on what was asked, A and G of each layer; 0 for what others keep."""
        notes: dict[Stack, list[int]] = {}
        answers = []
        for key in [(layer, side) for layer in self.asked for side in "ag"]:
            factor = shelf.factors.get(key)
            if factor is None:
                answers.append(0.0)
                continue
            stack = shelf.stacks[factor.key]
            if stack not in notes:
                notes[stack] = self._notes.read(stack, stack.tensors["stale"])
            answers.append(float(any(notes[stack][factor.slots])))
        return answers


def _sent(notes: Tensor) -> tuple[Tensor, Any]:
    """Where the notes will be on the host, and the event of their arrival."""
    host = torch.empty(notes.shape, dtype=notes.dtype, pin_memory=True)
    host.copy_(notes, non_blocking=True)
    return host, torch.cuda.current_stream(notes.device).record_event()
