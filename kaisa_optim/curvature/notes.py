"""Numbers on their way from a device to the host, while the next work goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .stacks import WITH_STREAMS


class Notes:
    """Small tensors that were sent to the host, each under the object that they belong to."""

    def __init__(self) -> None:
        self._arriving: dict[Any, tuple[Tensor, Any]] = {}

    def send(self, of: Any, numbers: Tensor) -> None:
        if numbers.device.type in WITH_STREAMS:
            host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            arrival = torch.cuda.current_stream(numbers.device).record_event()
            self._arriving[of] = host, arrival

    def read(self, of: Any, numbers: Tensor) -> list[Any]:
        """Return the numbers as they were sent; wait for numbers that were not sent."""
        if of not in self._arriving:
            return numbers.cpu().tolist()
        host, arrival = self._arriving.pop(of)
        arrival.synchronize()
        return host.tolist()

    def clear(self) -> None:
        self._arriving.clear()
