"""The papers' own scheme in bytes, for comparison with this package's account."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kaisa_optim.account import Account, Means, Usage
from kaisa_optim.curvature.rules import EigenRule
from kaisa_optim.plan.facts import Sizes


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

    @property
    def of_state(self) -> Account:
        """The account without factors: of eigenvectors, eigenvalues and plain gradients."""
        return replace(self.account, sizes=Sizes(EigenRule.sizes.of_factor, of_owner=()))

    def memory(self) -> list[Usage]:
        """Return the bytes that each rank keeps, by kind."""
        factors = self._factors(packed=False)
        return [
            own | {"factors": factors, "total": own["total"] + factors}
            for own in self.of_state.memory()
        ]

    def per_step(self, factor_update_steps: int, inv_update_steps: int) -> list[Means]:
        """Return the bytes that arrive at each rank in a step, as a mean over whole intervals."""
        world = self.account.grid.world
        reduced = 2 * (world - 1) / world * self._factors(packed=self.packed)
        steps, ours = [], self.of_state
        for state, gradients in zip(ours.state(ours.names), ours.gradients, strict=True):
            means: Means = {
                "factors": reduced / factor_update_steps,
                "second_order": state / inv_update_steps,
                "gradients": gradients,
            }
            steps.append(means | {"total": sum(means.values())})
        return steps

    def _factors(self, *, packed: bool) -> int:
        factors = [factor for layer in self.account.active for factor in layer.factors]
        return sum((f.size if packed else f.elements) * f.layer.itemsize for f in factors)
