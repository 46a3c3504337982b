"""The modules whose code uses a layer's weight, beside the layer's own module.

In the first step that gathers, a mode over the whole model's forward looks for all uses. From then
on, calls are watched in the modules in which uses were found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from ..comm.sharding import gathered_in, is_sharded
from ..layers import Layer, Scope, WatchMode
from .forward_pass import ForwardPasses, running_modules


class Uses:
    """Finds the modules to watch, and lets each use count once."""

    def __init__(self, layers: list[Layer], passes: ForwardPasses) -> None:
        self._passes = passes
        # Layers whose uses are looked for in the passes of the next step that gathers.
        self.sought = {layer for layer in layers if not layer.intercepts()}
        self.sharded = frozenset(x for x in layers if is_sharded(x.weight) or is_sharded(x.bias))
        self.searched = False  # whether a pass since the last step was searched
        self._noted: dict[tuple[Layer, nn.Module], None] = {}

    def search(self, tap: Callable[..., Tensor]) -> Scope:
        """Return a scope for the whole model's forward that taps other uses, and notes them."""
        self.searched = True
        return Scope(self.sought, tap, self._note)

    def watch(self, scope: Scope | None) -> None:
        """Run the module whose call begins under the mode, if the module is watched."""
        mode: WatchMode | None = None
        if scope is not None:
            mode = next((m for m in self._passes.modes if isinstance(m, WatchMode)), None)
            mode = mode or WatchMode(self)
            mode.begin(scope)
        self._passes.modes.append(mode)

    def _note(self, layer: Layer) -> None:
        """Note the module that uses a layer's weight, or that casts it, as one to be watched."""
        self._noted[layer, next(running_modules())] = None

    def noted(self) -> Iterable[tuple[Layer, nn.Module]]:
        """Return layers with modules that are to be watched from now on."""
        noted, self._noted = self._noted, {}
        return noted

    def around(
        self, model: nn.Module, layers: Iterable[Layer]
    ) -> Iterator[tuple[Layer, nn.Module]]:
        """Yield layers with all modules around their own.

        A search sees the model's own calls alone, and users may call its parts.
        """
        paths: dict[nn.Module, str] = {}
        for layer in layers:
            paths = paths or {module: name for name, module in model.named_modules()}
            path = "" if layer.intercepts() else paths.get(layer.module, "")
            while path:
                path = path.rpartition(".")[0]
                yield layer, model.get_submodule(path)

    def reset(self) -> None:
        """End the search with the step whose passes were searched."""
        if self.searched:
            self.searched = False
            self.sought.clear()

    def takes(self, layer: Layer) -> bool:
        """Return whether a call with a layer's weight is left to the mode.

        The hook of the layer's own module goes first.
        """
        return bool(layer.watched_in) or all(m is not layer.module for m in running_modules())

    def gathered(self, layer: Layer) -> list[Tensor]:
        """Return the whole parameters that stand in the places of a layer's sharded ones now."""
        both = zip(layer.names, (layer.weight, layer.bias), strict=True)
        sharded = [(name, p) for name, p in both if p is not None and is_sharded(p)]
        wholes = [gathered_in(layer.module, name, p) for name, p in sharded]
        return [whole for whole in wholes if whole is not None]
