"""The layers' places among the ranks: owners and shards, and the plain facts that plans read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..comm import sharding
from ..comm.ranks import Ranks
from ..curvature.group import stack_key
from ..errors import invalid_because
from ..layers import Layer
from ..plan import assignment
from ..plan.assignment import Placement, Task
from ..plan.facts import LayerFacts
from .options import Options


class Placements:
    """The ranks that own each layer's factors, and the shards of each layer's parameters."""

    def __init__(self, options: Options, ranks: Ranks, *, sharded: bool) -> None:
        self._options = options
        self._ranks = ranks
        self.strategy: assignment.WorkAssignment = options.strategy
        if sharded:  # one rank works for each layer
            chosen = options.assignment, options.grad_worker_fraction
            if chosen != (None, None) and self.strategy.gradient_workers(ranks.world) > 1:
                why = (
                    f"{self.strategy!r} for parameters sharded by fully_shard, where exactly one "
                    'rank preconditions each gradient; use assignment="layer-wise" or leave it out'
                )
                raise invalid_because("assignment", why)
            self.strategy = assignment.LayerWise()
        self.of: dict[str, Placement] = {}
        self.facts: dict[Layer, LayerFacts] = {}  # of all layers, frozen ones included
        self.sharded: dict[Layer, tuple[sharding.ShardPlaces | None, ...]] = {}  # weight's, bias's
        self.splits_owners = False  # whether A and G of some layer have two owners

    def owner(self, layer: Layer, side: str) -> int:
        """Return the rank that owns a factor."""
        placement = self.of[layer.name]
        return placement.a if side == "a" else placement.g

    def shards(self, layer: Layer) -> list[sharding.ShardPlaces]:
        """Return the shards of a layer's covered parameters."""
        both = zip(self.sharded[layer], layer.covers, strict=True)
        return [shards for shards, covered in both if covered and shards is not None]

    def find_shards(self, layers: Iterable[Layer]) -> None:
        """Note how the parameters of these layers lie over the ranks."""
        self.sharded = {}
        for layer in layers:
            shards = [
                sharding.shards_of(f"a parameter of {layer.name!r}", p, self._ranks.members())
                if p is not None and sharding.is_sharded(p)
                else None
                for p in (layer.weight, layer.bias)
            ]
            if any(shards):
                self.sharded[layer] = tuple(shards)

    def place(self, layers: Mapping[str, Layer]) -> None:
        """Give new layers to ranks; layers with a place stay where their factors are."""
        options, ranks = self._options, self._ranks
        grid = assignment.make_grid(self.strategy, ranks.world, options.grad_worker_fraction)
        ranks.grid = grid
        tasks = [task_of(layer) for layer in layers.values()]
        there = [task for task in tasks if task.name in self.of]
        load = assignment.loads(self.strategy, there, self.of, grid.world)
        new = [task for task in tasks if task.name not in self.of]
        self.of |= assignment.assign(self.strategy, new, grid, options.colocate_factors, load)
        self.splits_owners = any(placement.a != placement.g for placement in self.of.values())

    def find_facts(self, layers: Iterable[Layer]) -> None:
        """Find the plain facts of all layers anew."""
        self.facts = {}
        for layer in layers:
            placement, sections = self.of[layer.name], layer.sections
            if not any(layer.covers):
                facts = LayerFacts(task_of(layer), placement, sections=sections, frozen=True)
                self.facts[layer] = facts
                continue
            a, g = stack_key(layer, "a"), stack_key(layer, "g")
            task = Task(layer.name, a.size, g.size, a.diagonal, g.diagonal, layer.blocks)
            sizes = [p.dtype.itemsize for p in layer.parameters]
            shards: tuple[tuple[sharding.ShardPlaces, int], ...] = ()
            if layer in self.sharded:
                shards = tuple(zip(self.shards(layer), sizes, strict=True))
            self.facts[layer] = LayerFacts(
                task, placement, g.dtype.itemsize, g.device, sections, False, shards, layer.tied
            )


def task_of(layer: Layer) -> Task:
    """Return a layer's task by its trained parameters, also while they are frozen."""
    trained = layer.trained
    (a, diagonal_a), (g, diagonal_g) = layer.size_of("a", trained), layer.size_of("g", trained)
    return Task(layer.name, a, g, diagonal_a, diagonal_g, layer.blocks)
