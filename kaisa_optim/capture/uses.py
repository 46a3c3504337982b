"""The modules whose code uses a layer's weight, beside the layer's own module.

In the first pass that gathers, a mode over the whole model's forward looks for all uses. From then
on, calls are watched in the modules in which uses were found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..comm.sharding import gathered_in, is_sharded
from ..layers import Layer, WatchMode
from .forward_pass import ForwardPasses, calling_module
from .tap import tap_for_mode


class Uses:
    """Finds the modules to watch, and lets each use count once."""

    def __init__(self, layers: list[Layer], passes: ForwardPasses) -> None:
        self._passes = passes
        self._watched = {layer: layer.watched_in for layer in layers}
        # Layers whose uses are looked for in the next pass that gathers.
        self.sought = {layer for layer in layers if not layer.intercepts()}
        self.sharded = frozenset(x for x in layers if is_sharded(x.weight) or is_sharded(x.bias))
        self._found: dict[Layer, dict[nn.Module, None]] = {}

    def seek(self, layers: Iterator[Layer]) -> None:
        """Look for uses of these layers' weights once more."""
        self.sought.update(layer for layer in layers if not layer.intercepts())

    def search(self, tap: Callable[..., Tensor]) -> WatchMode:
        """Return a mode for the whole model's forward that taps other uses, and notes them."""

        def noted(layer: Layer, output: Tensor, *call: Any) -> Tensor:
            module = calling_module()
            assert module is not None  # the model's own call runs
            self._found.setdefault(layer.primary, {})[module] = None
            return tap(layer, output, *call)

        return WatchMode(list(self.sought), tap_for_mode(noted), self)

    def found(self, mode: WatchMode) -> Iterator[tuple[Layer, nn.Module]]:
        """End a search; yield layers with modules that are to be watched from now on."""
        self.sought -= mode.layers
        uses, self._found = self._found, {}
        for layer, modules in uses.items():
            new = tuple(module for module in modules if module not in self._watched[layer])
            self._watched[layer] += new
            yield from ((layer, module) for module in new)

    def takes(self, mode: WatchMode, layer: Layer) -> bool:
        """Return whether a call with a layer's weight is left to this mode.

        An inner mode goes first, and so does the hook of the layer's own module.
        """
        modes = [m for m in self._passes.modes if isinstance(m, WatchMode) and layer in m.layers]
        own = not layer.watched_in and calling_module() is layer.module
        return modes[-1] is mode and not own

    def gathered(self, layer: Layer) -> list[Tensor]:
        """Return the whole parameters that stand in the places of a layer's sharded ones now."""
        both = zip(layer.names, (layer.weight, layer.bias), strict=True)
        sharded = [(name, p) for name, p in both if p is not None and is_sharded(p)]
        wholes = [gathered_in(layer.module, name, p) for name, p in sharded]
        return [whole for whole in wholes if whole is not None]
