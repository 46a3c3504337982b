"""Decompositions under way: begun in one step, in use a fixed number of steps later.

Which ones are follows from the numbers of steps, alike on all ranks; what is decomposed is a copy
that the owner keeps until then. Results wait for their step, and a step for its results: how long
they take changes nothing but time, so that runs can be repeated and ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from ..layers import Layer
from ..linalg.moments import mirrored
from .background import Background, Failure, Job, Results
from .stacks import Factor, Shelf, Specs, StackKey, joined, slots_of

Key = tuple[Layer, str]  # a layer's factor: side "a" or "g"
COPIED = "average", "rejected"


class UnderWay:
    """The decompositions that have begun and are not yet in use."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.begun: dict[Key, int] = {}  # in which step; alike on all ranks
        self.copies: dict[Key, dict[str, Tensor]] = {}  # of what this rank owns
        self.starting: set[Key] = set()  # in this step
        self.landing: set[Key] = set()
        self._background = Background()
        # With the blocks among a job's results.
        self._jobs: dict[Key, tuple[Job | Failure, slice]] = {}
        self._dropped: dict[Job | Failure, int] = {}  # nobody wants their results, but their errors

    # ---- what all ranks know alike ----

    def due(self, step: int) -> set[Layer]:
        """The layers of which something comes into use in this step."""
        return {layer for (layer, _), begun in self.begun.items() if begun + self.lag <= step}

    def divide(self, plan: dict[Key, bool], known: Collection[Layer], step: int) -> None:
        """Take out of a refresh's plan what begins now or is under way, and put in what lands.

        ``known`` have a state to go on with; others can't wait.
        """
        self.starting, self.landing = set(), set()
        if not self.lag:
            return
        for layer in {layer for layer, _ in self.begun}.difference(known):
            self.forget(layer)  # it has lost its state, or a factor has failed
        for key, begun in self.begun.items():
            plan.pop(key, None)
            if begun + self.lag <= step:
                self.landing.add(key)
        for key, anew in plan.items():
            if anew and key[0] in known:
                self.starting.add(key)
        for key in self.starting:
            del plan[key]
            self.begun[key] = step
        for key in self.landing:
            plan[key] = True
            del self.begun[key]

    def take_back(self, shelf: Shelf) -> None:
        """Drop what this step was to begin or to put into use: it has failed, on all ranks."""
        for key in self.starting | self.landing:
            if key in self._jobs:
                self._jobs[key][0].give_up()
            if key in self.copies:  # what was counted there is yet to be said
                shelf.factors[key]["rejected"].add_(self.copies[key]["rejected"])
            self._drop(key)
        self.starting, self.landing = set(), set()

    def landed(self) -> None:
        """What was to come into use in this step is."""
        for key in self.landing:
            self._drop(key)

    def specs(self, key: StackKey, count: int) -> Specs:
        """What an owner keeps meanwhile of ``count`` factors."""
        return {"average": (key.shape(count), key.dtype), "rejected": ((count,), torch.int32)}

    def forget(self, layer: Layer) -> None:
        for key in ((layer, "a"), (layer, "g")):
            if key in self._jobs and key in self.begun:  # it has not been asked yet
                self._dropped[self._jobs[key][0]] = self.begun[key]
            self._drop(key)

    def clear(self) -> None:
        """Leave all of it, as another state takes the place of this one."""
        for of_key in (self.begun, self.copies, self._jobs, self._dropped):
            of_key.clear()
        self.starting, self.landing = set(), set()

    def _drop(self, key: Key) -> None:
        self.begun.pop(key, None)
        self.copies.pop(key, None)
        self._jobs.pop(key, None)

    # ---- on owners ----

    def start(
        self, factors: Sequence[Factor], decompose: Callable[[Tensor, Tensor], Results]
    ) -> None:
        """Begin with copies of factors of one stack, as they are now or were before a load.

        ``decompose`` takes their averages and counts of rejected sums.
        """
        new = [factor for factor in factors if (factor.layer, factor.side) not in self.copies]
        batch = self._copy(new) if new else []
        if len(new) < len(factors):
            copies = [self.copies[factor.layer, factor.side] for factor in factors]
            batch = [torch.cat([copy[name] for copy in copies]) for name in COPIED]
        job = self._background.start(lambda: decompose(*batch), factors[0].key.device)
        for factor, own in _parts(factors):
            self._jobs[factor.layer, factor.side] = job, own

    def _copy(self, factors: Sequence[Factor]) -> list[Tensor]:
        """Of factors of one stack, as they are now; what has been counted goes with the copy."""
        key, tensors, slots = factors[0].key, factors[0].tensors, slots_of(factors)
        average, rejected = (tensors[name][slots] for name in COPIED)
        batch = [mirrored(average.to(key.dtype, copy=True)), rejected.clone()]
        tensors["rejected"][slots] = 0
        for factor, own in _parts(factors):
            copy = {name: tensor[own] for name, tensor in zip(COPIED, batch, strict=True)}
            self.copies[factor.layer, factor.side] = copy
        return batch

    def fail(self, factors: Sequence[Factor], error: Exception) -> None:
        """Note what kept these from beginning: it is raised where their results are due."""
        failure = Failure(error)
        for factor in factors:
            self._jobs[factor.layer, factor.side] = failure, slice(0)

    def ask_dropped(self, step: int) -> None:
        """Raise the errors of what has been dropped and would have landed by this step."""
        for job, begun in list(self._dropped.items()):
            if begun + self.lag <= step:
                del self._dropped[job]
                job.results()

    def results(self, factors: Sequence[Factor]) -> Iterator[tuple[list[Factor], Results]]:
        """What was found for factors of one stack, those of one job together."""
        by_job: dict[Job | Failure, list[tuple[Factor, slice]]] = {}
        for factor in factors:
            job, slots = self._jobs[factor.layer, factor.side]
            by_job.setdefault(job, []).append((factor, slots))
        for job, members in by_job.items():
            found = job.results()
            parts = [slots for _, slots in members]
            picked = tuple(tensor[joined(parts, tensor.device)] for tensor in found)
            yield [factor for factor, _ in members], picked

    def bytes(self) -> int:
        """What the copies take."""
        tensors = [tensor for copy in self.copies.values() for tensor in copy.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _parts(factors: Sequence[Factor]) -> Iterator[tuple[Factor, slice]]:
    """Each factor's blocks where these lie one after the other."""
    at = 0
    for factor in factors:
        yield factor, slice(at, at + factor.layer.blocks)
        at += factor.layer.blocks
