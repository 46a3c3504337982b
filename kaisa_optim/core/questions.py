"""The questions that users may ask of one model's K-FAC."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..capture import fisher
from ..capture.hooks import Capture
from ..curvature.refresh import Refresher
from ..curvature.rules import Rule
from ..curvature.stacks import AppliedFactors, Factors
from ..layers import Layer
from ..plan.account import Account
from ..plan.moves import Sizes
from ..plan.schedule import Schedule
from ..plan.step_plan import LayerState
from . import reports
from .coverage import CoverageReport
from .hyperparameters import Hyperparameters
from .registry import Registry
from .reports import Assigned
from .store import FactorStore


class Questions(Hyperparameters):
    """Answers from the parts of a preconditioner; none of them changes anything."""

    model: nn.Module
    registry: Registry
    rule: Rule
    sizes: Sizes
    refresher: Refresher
    store: FactorStore
    schedule: Schedule
    _defers: set[str]  # layers whose refresh is checked in the step after it
    _capture: Capture | None = None

    @property
    def capture(self) -> Capture:
        assert self._capture is not None
        return self._capture

    @property
    def owned(self) -> Factors:
        """The factors whose averages this rank keeps and decomposes."""
        return self.store.owned

    @property
    def applied(self) -> AppliedFactors:
        """The factors of the layers whose gradients this rank preconditions."""
        return self.store.applied

    @property
    def layers(self) -> dict[str, Layer]:
        """The covered layers by name."""
        return self.registry.layers

    @property
    def uncovered(self) -> dict[str, str]:
        """The trained parameters that the base updates with their raw gradients, and why."""
        return self.registry.uncovered | self.registry.unseen

    def coverage(self) -> CoverageReport:
        """Return how many of the trained parameters are covered, and why the others are not.

        Before the first step, the report goes by shapes; afterwards, by the calls that were seen.
        """
        return reports.coverage(self.registry)

    @property
    def skipped(self) -> dict[str, str]:
        """The parameters that ``skip_layers`` leaves out, and the pattern."""
        return self.registry.skipped

    @property
    def states(self) -> dict[str, LayerState]:
        """The state of each covered layer, alike on all ranks."""
        return self.registry.states

    @property
    def assignment(self) -> Assigned:
        """The owners of each layer's factors: a mapping from layer names, printed as a table."""
        return Assigned(self.registry, self.ranks.grid)

    @property
    def account(self) -> Account:
        """The bytes that every rank keeps and receives, as shapes and placements tell."""
        facts, ranks = [*self.registry.facts.values()], self.ranks
        defers = tuple(name for name in self.layers if name in self._defers)
        return Account(facts, ranks.grid, self.sizes, defers, ranks.bucket_bytes)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Gather no statistics in forward passes under this context."""
        with self.capture.pause():
            yield

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the running averages A and G: ``[blocks, n, n]``, or ``[blocks, n]`` if diagonal.

        Both tensors are the state itself: ask for them again after a step, and do not change them.
        """
        return reports.factors(self.registry, self.owned, name)

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes of K-FAC state on this rank, by kind; no collective is called.

        Sums of the running step are apart, as "pending". Momenta are in the base's entries, and do
        not count.
        """
        usage: Counter[str] = Counter()
        kinds = {spec.name: spec.kind for spec in self.sizes.specs}
        for name, tensor in (*self.owned.tensors(), *self.applied.tensors()):
            usage[kinds[name]] += tensor.nbytes
        return {**usage, "total": usage.total(), "pending": self.sums.bytes()}

    def communication_volume(self) -> dict[str, float]:
        """Return the bytes of K-FAC that arrive at this rank in a step, by kind, as a mean.

        The mean is over whole intervals as they are now set, with every layer in use. "factors" go
        to their owners, "second_order" state to the gradient workers, and "gradients" to receivers;
        "status" is the numbers that ranks exchange. The bytes follow from shapes: no collective is
        called, and on one process nothing arrives. The mean leaves out early refreshes, each
        about as much as the first step, and the all-reduce of gradients, such as
        DistributedDataParallel's.
        """
        intervals = self.factor_update_steps, self.inv_update_steps
        return self.account.per_step(self.schedule, *intervals)[self.ranks.rank]

    def sample_fisher(
        self,
        outputs: Tensor,
        kind: fisher.Kind,
        *,
        dim: int | None = None,
        weight: Tensor | None = None,
        exact: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        """Take G from labels drawn from the model's own distribution, and not from the data's.

        Call this method between the forward pass and ``loss.backward()``, on all ranks, with the
        ``outputs`` that the loss is computed from. ``kind`` is the loss: "cross_entropy" of logits,
        "mse", "bce" of logits; or a callable of ``outputs`` that draws labels by itself and returns
        the loss, summed over the terms that K counts, or the loss's gradient. A call costs one
        backward pass in steps that gather statistics, in others nothing; no ``.grad`` changes.

        ``dim`` is the dimension of classes (by default as in torch's cross_entropy) or of features.
        ``weight`` has a number for each loss, 0 for padding. ``exact`` takes the expectation in
        place of a draw, with one backward pass for each number of an example's outputs.
        ``generator`` draws the labels; without one, step and rank are the seed, not torch's seed.
        """
        reports.check_draws(self.options)
        draws = fisher.Fisher(outputs, kind, dim, weight, exact, generator)
        if self.capture.due:
            draws.seed(self.steps, self.ranks.rank, self.capture.draws)
            fisher.draw_before_backward(draws, self.capture, self.sums)

    def _has_drawn(self) -> bool:
        return self._capture is not None and self._capture.draws > 0

    def __repr__(self) -> str:
        return reports.describe(self)
