"""The questions that users may ask of one model's K-FAC."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from torch import Tensor

from ..capture import fisher
from ..errors import invalid_because
from ..layers import Layer
from ..plan.account import Account
from . import reports
from .coverage import CoverageReport
from .reports import Assigned

if TYPE_CHECKING:
    from .preconditioner import Preconditioner


T = TypeVar("T")


class Forward(Generic[T]):
    """An attribute that reads and sets the one of the same name in a part.

    Of the class, it is the part's own attribute, so that ``help`` shows that one's text.
    """

    def __init__(self, kind: type, part: str) -> None:
        self._kind = kind
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, whole: None, owner: type) -> Any: ...

    @overload
    def __get__(self, whole: object, owner: type) -> T: ...

    def __get__(self, whole: object | None, owner: type) -> Any:
        holder = self._kind if whole is None else getattr(whole, self._part)
        return getattr(holder, self._name)

    def __set__(self, whole: object, value: T) -> None:
        setattr(getattr(whole, self._part), self._name, value)


class View:
    """Answers from the parts of a preconditioner; no answer changes anything."""

    __slots__ = ("_kfac",)

    def __init__(self, kfac: Preconditioner) -> None:
        self._kfac = kfac

    @property
    def layers(self) -> dict[str, Layer]:
        """The covered layers by name."""
        return self._kfac.registry.layers

    @property
    def uncovered(self) -> dict[str, str]:
        """The trained parameters that the base updates with their raw gradients, and why."""
        return self._kfac.registry.uncovered | self._kfac.registry.unseen

    def coverage(self) -> CoverageReport:
        """Return how many of the trained parameters are covered, and why the others are not.

        Before the first step, the report goes by shapes; afterwards, by the calls that were seen.
        """
        return reports.coverage(self._kfac.registry)

    @property
    def skipped(self) -> dict[str, str]:
        """The parameters that ``skip_layers`` leaves out, and the pattern."""
        return self._kfac.registry.skipped

    @property
    def assignment(self) -> Assigned:
        """The owners of each layer's factors: a mapping from layer names, printed as a table."""
        return Assigned(self._kfac.registry, self._kfac.ranks.grid)

    @property
    def account(self) -> Account:
        """The bytes that every rank keeps and receives, as shapes and placements tell."""
        kfac = self._kfac
        placements, ranks = kfac.registry.placements, kfac.ranks
        facts = [*placements.facts.values()]
        return Account(facts, ranks.grid, kfac.groups.sizes, ranks.bucket_bytes)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Gather no statistics in forward passes under this context."""
        with self._kfac.capture.pause():
            yield

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the running averages A and G: ``[blocks, n, n]``, or ``[blocks, n]`` if diagonal.

        A is of inputs and G of output gradients, in whichever order the weight is stored.
        Both tensors are the state itself: ask for them again after a step, and do not change them.
        """
        registry, group_of = self._kfac.registry, self._kfac.groups.of
        layer = registry.layers.get(name)
        if layer is None:
            raise KeyError(f"no covered layer {name!r}; there are {', '.join(registry.layers)}")
        if not registry.states[name].has_average:
            raise KeyError(f"layer {name!r} has no statistics yet")
        sides = "ga" if layer.turned else "ag"
        away = [
            f"{label} is on rank {registry.placements.owner(layer, side)}"
            for label, side in zip("AG", sides, strict=True)
            if layer not in getattr(group_of[layer], side).owned
        ]
        if away:
            raise KeyError(
                f"this rank lacks factors of layer {name!r}: {' and '.join(away)}; ask on that "
                "rank. colocate_factors=True puts A and G on one"
            )
        both = (getattr(group_of[layer], side) for side in sides)
        a, g = (side.averages["average"][side.owned[layer]] for side in both)
        return a, g

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes of K-FAC state on this rank, by kind; no collective is called.

        Sums of the running step are apart, as "pending". Momenta are in the base's entries, and do
        not count.
        """
        usage = Counter[str]()
        kinds = {spec.name: spec.kind for spec in self._kfac.groups.sizes.specs}
        for group in self._kfac.groups.all:
            for name, tensor in group.all_tensors():
                usage[kinds[name]] += tensor.nbytes
        return {**usage, "total": usage.total(), "pending": self._kfac.sums.bytes()}

    def communication_volume(self) -> dict[str, float]:
        """Return the bytes of K-FAC that arrive at this rank in a step, by kind, as a mean.

        The mean is over whole intervals as they are now set, with every layer in use. "factors" go
        to their owners, "second_order" state to the gradient workers, and "gradients" to receivers;
        "status" is the numbers that ranks exchange. The bytes follow from shapes: no collective is
        called, and on one process nothing arrives. The mean leaves out early refreshes, each
        about as much as the first step, and the all-reduce of gradients, such as
        DistributedDataParallel's.
        """
        kfac = self._kfac
        intervals = kfac.factor_update_steps, kfac.inv_update_steps
        return self.account.per_step(kfac.schedule, *intervals)[kfac.ranks.rank]

    def metrics(self, *, wait: bool = False) -> dict[str, float]:
        """Return how training goes on this rank, as plain numbers by name; no collective is called.

        Steps, the share of covered parameters, layers without statistics, refreshes done and
        failed, rejected statistics, the largest share of a gradient from elsewhere, bytes kept and
        received in a step, and the age of layers' state in steps. The host does not wait, unless
        ``wait`` asks for the device's numbers, too.

        These are the last step's "clip", and of the factors that this rank owns "residual" (of
        roots S, ‖S F̂ S - I‖ / √n with the averages of now), or "condition" (of factors with the
        damping, under "eigen"), each with "_mean" and "_max".
        """
        kfac = self._kfac
        registry, rule = kfac.registry, kfac.rule
        states = [registry.states[layer.name] for layer in registry.active]
        covered, total = reports.covered_numbers(registry)
        numbers: dict[str, float] = {
            "steps": kfac.steps,
            "covered_share": covered / max(1, total),
            "layers_without_statistics": sum(not x.has_average for x in states),
            "refreshes": sum(x.refreshes for x in states),
            "failures": sum(x.failed for x in states),
            "rejected": sum(x.rejected for x in states),
            "elsewhere_max": max((x.elsewhere for x in states), default=0.0),
            "bytes": self.memory_usage()["total"],
            "bytes_received": self.communication_volume()["total"],
        }
        ages = [kfac.steps - 1 - x.refreshed for x in states if x.has_state and x.refreshes]
        numbers |= _extremes("age", ages)
        clip, damping_of = kfac.groups.plan.nu, kfac.damping_of
        if wait and clip is not None:
            numbers["clip"] = clip.item()
        if wait and rule.quality:
            name, measured = kfac.groups.sizes.of_factor[0].name, []
            for group in kfac.groups.all:
                for side, layer in [(own, x) for own in group.sides for x in own.owned]:
                    if registry.states[layer.name].has_state:
                        average = side.averages["average"][side.owned[layer]]
                        state = side.state[name][group.slots[layer]]
                        measured.append(rule.measure(side.key, average, state, damping_of(layer)))
            numbers |= _extremes(rule.quality, [x for one in measured for x in one.tolist()])
        return numbers

    def sample_fisher(self, outputs: Tensor, kind: str, *, dim: int | None = None) -> None:
        """Take G from labels drawn from the model's own distribution, and not from the data's.

        Call this method between the forward pass and ``loss.backward()``, on all ranks, with the
        ``outputs`` that the loss is computed from, without padding: ``outputs[mask]``. ``kind`` is
        the loss: "cross_entropy" of logits, or "mse". A call costs one backward pass in steps that
        gather statistics, in others nothing; no ``.grad`` changes.

        ``dim`` is the dimension of classes (by default as in torch's cross_entropy) or of features.
        Step and rank are the seed, not torch's seed.
        """
        kfac = self._kfac
        if kfac.options.kaisa_scaling:
            raise invalid_because(
                "normalization",
                '"kaisa" has no scale for the Fisher of drawn labels; use normalization="fisher"',
            )
        dim = fisher.dimension(outputs, kind, dim)
        # A checkpoint may have kept layers that gather from being tapped.
        if kfac.capture.gathers or kfac.capture.tapped:
            seed = kfac.steps, kfac.ranks.rank, kfac.capture.draws
            fisher.draw(outputs, kind, dim, seed, kfac.capture, kfac.sums)


def _extremes(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_mean": sum(values) / len(values), f"{name}_max": max(values)} if values else {}
