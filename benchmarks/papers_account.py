"""The papers' own scheme in bytes, for comparison with this package's account."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kaisa_optim.plan.account import KEPT, MOVED, Account, Means, Usage
from kaisa_optim.plan.facts import LayerFacts


@dataclass(frozen=True)
class Papers:
    """The same layers under the papers' scheme, on the same ranks.

    All-reduce gives every factor to every rank, where its running average is kept; inverse workers
    broadcast decompositions to the gradient workers, and these the gradients to their receivers.
    The papers decompose into eigenvectors. Numbers are kept and sent in the arithmetic's precision.
    With ``packed``, factors travel as triangles.
    """

    account: Account
    packed: bool = False

    def memory(self) -> list[Usage]:
        """Return the bytes that each rank keeps, by kind."""
        grid, factors = self.account.grid, 0
        usage = [dict.fromkeys(KEPT, 0) for _ in range(grid.world)]
        for layer in self.account.active:
            factors += sum(factor.elements for factor in layer.factors) * layer.itemsize
            for rank in grid.workers_of(layer.placement.g):
                for _, kind, size in self._state(layer):
                    usage[rank][kind] += size
        for own in usage:
            own["factors"] += factors
            own["total"] = sum(own.values())
        return usage

    def per_step(self, factor_update_steps: int, inv_update_steps: int) -> list[Means]:
        """Return the bytes that arrive at each rank in a step, as a mean over whole intervals."""
        grid = self.account.grid
        got: list[Means] = [dict.fromkeys(MOVED, 0.0) for _ in range(grid.world)]
        for layer in self.account.active:
            sizes = [f.size if self.packed else f.elements for f in layer.factors]
            reduced = 2 * (grid.world - 1) / grid.world * sum(sizes) * layer.itemsize
            workers = grid.workers_of(layer.placement.g)
            for rank in range(grid.world):
                got[rank]["factors"] += reduced / factor_update_steps
                if rank not in workers:
                    got[rank]["gradients"] += layer.gradient * layer.itemsize
            for root, _, size in self._state(layer):
                for rank in workers:
                    if rank != root:
                        got[rank]["second_order"] += size / inv_update_steps
        return [own | {"total": sum(own.values())} for own in got]

    def _state(self, layer: LayerFacts) -> Iterator[tuple[int, str, int]]:
        """Yield a decomposition's parts: the rank that makes it, its kind, its bytes."""
        for factor in layer.factors:
            if not factor.diagonal:
                yield factor.owner, "eigenvectors", factor.elements * layer.itemsize
            yield factor.owner, "eigenvalues", layer.task.blocks * factor.n * layer.itemsize
