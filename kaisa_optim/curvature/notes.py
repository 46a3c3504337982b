"""Numbers on their way from a device to the host, while the next work goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .group import WITH_STREAMS


class Notes:
    """Small tensors that were sent to the host, each under the object that they belong to."""

    def __init__(self) -> None:
        self._arriving: dict[Any, tuple[Tensor, Any]] = {}

    def send(self, of: Any, numbers: Tensor) -> None:
        if numbers.device.type in WITH_STREAMS:
            self._arriving[of] = _sent(numbers)

    def read(self, of: Any, numbers: Tensor) -> list[Any]:
        """Return the numbers as they were sent; wait for numbers that were not sent."""
        if of not in self._arriving:
            return numbers.cpu().tolist()
        host, arrival = self._arriving.pop(of)
        arrival.synchronize()
        return host.tolist()

    def clear(self) -> None:
        self._arriving.clear()


def _sent(notes: Tensor) -> tuple[Tensor, Any]:
    """Return the host tensor that the notes are copied to, and the event of their arrival."""
    host = torch.empty(notes.shape, dtype=notes.dtype, device="cpu", pin_memory=True)
    host.copy_(notes, non_blocking=True)
    return host, torch.cuda.current_stream(notes.device).record_event()
