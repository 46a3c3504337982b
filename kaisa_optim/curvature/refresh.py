"""Second-order state: what a refresh makes of the running averages, and how it is applied."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm import agreement
from ..comm.ranks import BroadcastItem, RankGroup, Ranks
from ..layers import Basis, Layer
from ..linalg import eigen, kronecker, moments, orthogonal, precision, products
from ..plan.routes import cargo_bytes, chunks, in_turn, side_by_side
from .deferred import Key, Tracking
from .rules import adam as eigenbasis
from .rules import ekfac as correction
from .rules import muon as metric
from .rules import truncated as truncation
from .rules.adam import Settings
from .rules.ekfac import Gradients
from .rules.truncated import Truncation
from .stacks import (
    Factor,
    Layout,
    Pair,
    Shelf,
    Specs,
    Stack,
    StackKey,
    by_device,
    by_place,
    common_or_each,
    joined,
    per_block,
    slots_of,
    stack_key,
)
from .sums import Statistics, Tally
from .underway import COPIED, UnderWay

LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
DampingOf = Callable[[Layer], float]
OwnerOf = Callable[[Layer, str], int]
# Numbers of factors in one batch: on CPUs larger ones only take memory, elsewhere they take fewer
# calls, and the host waits once for each batch that is decomposed.
_AT_ONCE_ON_CPUS = 1 << 20
_AT_ONCE = 1 << 24
_KEPT_AT_ONCE = 8  # buckets, of older bases beside the new ones
_MULTIPLIED = "vectors", "inverse", "root"  # with gradients
_OF_CUSOLVER = re.compile(
    r"cusolver error: CUSOLVER_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)(?!.*cusolverDnCreate)", re.S
)
# What workers have of a factor, by how it is prepared.
_STATE = {"eigen": ("values", "vectors"), "inverse": ("inverse",), "root": ("root",)}


@dataclass
class Outcome:
    """What became of the layers of a refresh."""

    failed: set[Layer] = field(default_factory=set)  # the older state stays
    empty: set[Layer] = field(default_factory=set)  # none of their statistics was finite
    rejected: set[Layer] = field(default_factory=set)  # some were not
    error: Exception | None = None  # of this rank alone

    def flags(self, layers: Sequence[Layer]) -> list[float]:
        return [float(x in part) for part in self._parts() for x in layers]

    @classmethod
    def of_all(cls, layers: Sequence[Layer], flags: list[float]) -> Outcome:
        """From the sum of all ranks' flags."""
        outcome, numbers = cls(), iter(flags)
        for part in outcome._parts():
            part.update([x for x in layers if next(numbers)])
        return outcome

    def _parts(self) -> tuple[set[Layer], ...]:
        return self.failed, self.empty, self.rejected


class Landed(NamedTuple):
    """What was found beside the training for factors of one stack."""

    stack: Stack
    factors: list[Factor]
    results: list[Tensor]
    good: Tensor  # on the host


class Older(NamedTuple):
    """What layers have from before a refresh."""

    layers: set[Layer]  # those that have something
    bases: dict[Key, Tensor]  # that moments are in, until they have turned


class SecondOrder:
    """Eigendecompositions or damped inverses of the factors of some layers."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        method: str,
        split: str | None,
        stored_product: bool,
        dtype: torch.dtype | None,
        max_failures: int,
        moments: str,
        nesterov: bool,
        orthogonal: bool,
        tolerance: float,
        truncation: float,
        correction: str | None,
        lag: int,
    ) -> None:
        self.ranks = ranks
        self.tracking = Tracking(tolerance, inverts=method != "eigen" or moments == "metric")
        self.truncation = Truncation(truncation) if truncation else None
        self.under_way = UnderWay(lag)
        self.moments = moments != "parameters"  # they are kept where gradients are multiplied
        self.metric = moments == "metric"  # a momentum of Muon's, in place of Adam's
        self.nesterov = nesterov  # and lead one step ahead
        self.orthogonal = orthogonal  # and their directions have nearly equal singular values
        self.correction = correction  # of the eigenvalues: by "examples", by "gradients"
        self.parted = False  # A and G of a layer may lie on two ranks
        self.method = "root" if self.metric else method
        self.split = split
        self.stored_product = stored_product
        self.dtype = dtype
        self.max_failures = max_failures
        self.halves = False  # whether all ranks have products in bfloat16, as they last agreed
        self.ready: set[Layer] = set()
        self.failures: dict[Layer, int] = {}  # in a row

    def allocate(self, shelf: Shelf, layout: Layout) -> None:
        self.tracking.lay_out(shelf)
        if self.truncation is not None:
            self.truncation.clear()
        for stack in layout.stacks.values():
            stack.new(self.specs(stack.key, stack.count))
        for pair in layout.pairs:
            for name, (shape, dtype) in self.pair_specs(*pair.shape, pair.g.key.dtype).items():
                pair.tensors[name] = torch.zeros(shape, dtype=dtype, device=pair.g.key.device)

    def specs(self, key: StackKey, count: int) -> Specs:
        """What workers have of ``count`` factors of one shape."""
        dtype = self.dtype or key.dtype
        if self.method != "eigen":
            return {self.method: (key.shape(count), dtype)}
        specs: Specs = {"values": ((count, key.size), key.dtype)}
        if not key.diagonal:
            specs["vectors"] = (key.shape(count), dtype)
        return specs

    def pair_specs(self, count: int, g: int, a: int, arithmetic: torch.dtype) -> Specs:
        """The same of ``count`` pairs of factors."""
        if self.moments:
            kind = metric if self.metric else eigenbasis
            return kind.specs(count, g, a, arithmetic)
        if self.correction:
            return correction.specs(count, g, a, arithmetic)
        if self.truncation is not None:
            return truncation.specs(count)
        return {"scale": ((count, g, a), self.dtype or arithmetic)} if self.stored_product else {}

    # ---- refresh ----

    @contextlib.contextmanager
    def planned(
        self,
        shelf: Shelf,
        layout: Layout,
        due: Sequence[Layer],
        turn: Collection[Layer],
        number: int,
        step: int,
    ) -> Iterator[tuple[list[Layer], Older]]:
        """Settle how each layer in ``due`` is refreshed.

        ``turn`` are those whose turn it is; ``number`` grows from each turn of a layer to its next.
        Yields those that get something new in this step, and what they have from before. Where the
        refresh raises, as it does on all ranks or on none, the bases that moments are in are back,
        and all that was to begin or to be renewed is decomposed from the next step on.
        """
        known = self.ready.difference(self.failures)
        self.tracking.begin(due, turn, known, number)
        plan = self.tracking.plan
        self.under_way.divide(plan, known, step)
        renewing = [layer for layer in due if (layer, "a") in plan or (layer, "g") in plan]
        older = Older(self.ready.intersection(renewing), {})
        self._keep_bases(layout, shelf.factors.keys() & plan.keys(), older)
        begun = self.under_way.starting | plan.keys()
        try:
            yield renewing, older
        except BaseException:
            # Those that are kept still are what moments are in, whatever has taken their place; of
            # what has turned none is kept.
            for key, basis in older.bases.items():
                layout.factors[key]["vectors"].copy_(basis)
            self.under_way.take_back(shelf)
            self.tracking.stale |= begun
            raise

    def forget(self, layer: Layer) -> None:
        self.ready.discard(layer)
        self.tracking.forget(layer)
        self.under_way.forget(layer)

    def go_on(self, shelf: Shelf, key: Key, step: int, copies: dict[str, Tensor]) -> bool:
        """Note what was under way since ``step`` when a state was saved.

        Without its copies, as torch.distributed.checkpoint loads a state, it begins with the factor
        as saved: False.
        """
        if not self.under_way.lag:
            self.tracking.stale.add(key)  # it is decomposed at once
            return True
        self.under_way.begun[key] = step
        factor = shelf.factors.get(key)
        if factor is None:
            return True
        if copies.keys() != set(COPIED):
            return False
        place = factor.key
        self.under_way.copies[key] = {
            "average": copies["average"].to(place.device, place.dtype, copy=True),
            "rejected": copies["rejected"].to(place.device, torch.int32, copy=True),
        }
        return True

    def start(self, shelf: Shelf) -> None:
        """Begin with what is decomposed beside the steps that follow, when all sums are in.

        What goes together must not depend on how they came in: a load knows the steps alone.
        """
        self._start(shelf, self.under_way.starting)

    def take_up(self, shelf: Shelf) -> None:
        """Begin once more with what was under way when a state was saved, in the same batches."""
        begun = self.under_way.begun
        for step in sorted(set(begun.values())):
            self._start(shelf, {key for key in begun if begun[key] == step})

    def refresh(
        self,
        shelf: Shelf,
        layout: Layout,
        due: Sequence[Layer],
        damping_of: DampingOf,
        outcome: Outcome,
    ) -> None:
        """Renew what this rank keeps of the layers in ``due``; notes in ``outcome`` what failed.

        All ranks call it for the same layers, also those that keep none.
        """
        if not due:
            return
        with precision.full_precision():
            shifts = self._split_damping(shelf, due, damping_of)
            try:
                self._decompose(shelf, layout, due, shifts, outcome)
            except Exception as error:
                self._keep(error, outcome)

    def _decompose(
        self,
        shelf: Shelf,
        layout: Layout,
        due: Sequence[Layer],
        shifts: dict[Key, Tensor],
        outcome: Outcome,
    ) -> None:
        plan, landing = self.tracking.plan, self.under_way.landing
        now = {key for key, anew in plan.items() if anew and key not in landing}
        rejections = _rejections(shelf, {x for x in due if (x, "a") in now or (x, "g") in now})
        outcome.rejected.update(rejections)
        outcome.empty.update(layer for layer, nothing in rejections.items() if nothing)
        wanted = set(due) - outcome.empty
        for stack in shelf.stacks.values():
            mine = {(f.layer, f.side): f for f in stack.factors if f.layer in wanted}
            anew = [f for key, f in mine.items() if key in now]
            for some in chunks(anew, _numbers, _at_once(stack)):
                outcome.failed |= self._refresh_stack(stack, some, layout, shifts)
            unseen = [f for key, f in mine.items() if not plan.get(key, True)]
            for some in chunks(unseen, _numbers, _at_once(stack)):
                if self.method == "eigen":
                    self._follow(stack, some, layout)
                else:
                    self._invert(stack, some, layout, shifts)

    def _start(self, shelf: Shelf, keys: Collection[Key]) -> None:
        """Decompose beside the steps that follow.

        Float32 is full precision there as it is: TF32 is for products and convolutions, and a
        setting of it would be the whole process's.
        """
        for stack in shelf.stacks.values() if keys else ():
            mine = [f for f in stack.factors if (f.layer, f.side) in keys]
            beside = functools.partial(_decompose_beside, diagonal=stack.key.diagonal)
            for some in chunks(mine, _numbers, _at_once(stack)):
                try:
                    self.under_way.start(some, beside)
                except Exception as error:
                    if self.ranks.world == 1:
                        raise
                    # The others will wait for this rank where results are due, and learn of it.
                    self.under_way.fail(some, error)

    def land(self, shelf: Shelf, step: int, outcome: Outcome) -> list[Landed]:
        """Wait for what comes into use in this step; on no rank before all have theirs."""
        landed = []
        try:
            self.under_way.ask_dropped(step)
            for stack in shelf.stacks.values():
                mine = [f for f in stack.factors if (f.layer, f.side) in self.under_way.landing]
                for some, (*results, good, rejected) in self.under_way.results(mine):
                    landed.append(Landed(stack, some, results, good))
                    outcome.failed |= _flagged(some, ~good)
                    outcome.rejected |= _flagged(some, rejected)
        except Exception as error:
            self._keep(error, outcome)
        return landed

    def enter(self, layout: Layout, landed: Sequence[Landed]) -> None:
        """Put into use what has landed."""
        for one in landed:
            self._enter(one.stack, one.factors, layout, one.results, one.good)
        self.under_way.landed()

    def _keep(self, error: Exception, outcome: Outcome) -> None:
        """Other ranks wait for this one at the next exchange: they learn of it there."""
        if self.ranks.world == 1:
            raise error
        outcome.error = outcome.error or error

    def settle(self, due: Sequence[Layer], outcome: Outcome) -> list[Layer]:
        """Count what has been decomposed and what has failed on any rank; the layers to apply."""
        failed = outcome.failed | outcome.empty
        done = [layer for layer in due if layer not in failed]
        self.ready.update(done)
        self._count([layer for layer in due if layer in failed], done)
        if outcome.rejected:
            names = ", ".join(repr(layer.name) for layer in due if layer in outcome.rejected)
            text = f"statistics that were not finite have been left out for {names}"
            agreement.warn(self.ranks, text, stacklevel=2)
        self.ready -= outcome.empty
        # Also where one factor failed: its older state goes with the other's new one.
        return [layer for layer in due if layer in self.ready]

    def hand_out(
        self,
        layout: Layout,
        layers: Sequence[Layer],
        older: Older,
        owner_of: OwnerOf,
        damping_of: DampingOf,
    ) -> None:
        """Bring new state from the owners to all gradient workers, and moments into it.

        Some layers at a time: workers keep the older bases until moments have turned. Of each
        column as many, as its ranks keep theirs alone.
        """
        plan, columns = self.tracking.plan, self.ranks.grid.columns
        by_column: list[list[Layer]] = [[] for _ in range(columns)]
        for layer in layers:
            by_column[owner_of(layer, "g") % columns].append(layer)
        limit = _KEPT_AT_ONCE * columns * self.ranks.bucket_bytes
        at_once = limit if self._is_in_bases else math.inf
        for some in chunks(in_turn(by_column), self._bytes_of_layer, at_once):
            keys = [(layer, side) for layer in some for side in "ag" if (layer, side) in plan]
            self._keep_bases(layout, set(keys) - older.bases.keys(), older)
            self._share(layout, some, owner_of)
            self._multiply(layout, some, damping_of)
            self._turn(layout, some, older)
            for key in keys:
                older.bases.pop(key, None)

    def _bytes_of_layer(self, layer: Layer) -> int:
        return self._bytes((layer, "a")) + self._bytes((layer, "g"))

    def _share(self, layout: Layout, layers: Sequence[Layer], owner_of: OwnerOf) -> None:
        """Bring new state from the owners to all gradient workers."""
        grid = self.ranks.grid
        if grid.workers == 1:
            return
        for same in by_device(layers):
            device = stack_key(same[0], "g").device
            columns: dict[int, dict[int, list[Key]]] = {}
            for layer in same:
                for side in "ag":
                    root = owner_of(layer, side)
                    if (layer, side) in self.tracking.plan:
                        keys = columns.setdefault(root % grid.columns, {}).setdefault(root, [])
                        keys.append((layer, side))
            circles = []
            for column, by_root in columns.items():
                total = sum(self._bytes(key) for own in by_root.values() for key in own)
                limit = side_by_side(total, len(by_root), self.ranks.bucket_bytes)
                shipments = [
                    [
                        self._shipment(layout, root, keys, sum(map(self._bytes, keys)))
                        for keys in chunks(own, self._bytes, limit)
                    ]
                    for root, own in by_root.items()
                ]
                circles.append(RankGroup(grid.workers_of(column), in_turn(shipments)))
            self.ranks.broadcast(circles, device, "second_order")

    def _shipment(self, layout: Layout, root: int, keys: list[Key], size: int) -> BroadcastItem:
        """State of some factors; halves of matrices live from their packing to their arrival."""
        packed: list[tuple[Factor, Tensor]] = []

        def unpack() -> None:
            for factor, half in packed:
                whole = moments.unpack(half, factor.key.size)
                factor[self.method].copy_(whole.triu_() if self.method == "root" else whole)
            packed.clear()

        return BroadcastItem(
            root, size, functools.partial(self._states, layout, keys, packed), unpack
        )

    def _bytes(self, key: Key) -> int:
        layer, side = key
        shape = stack_key(layer, side)
        specs = self.specs(shape, layer.blocks)
        if self.method != "eigen" and not shape.diagonal:
            dtype = specs[self.method][1]
            specs = {"half": ((layer.blocks, moments.packed_size(shape.size)), dtype)}
        return cargo_bytes(math.prod(s) * dtype.itemsize for s, dtype in specs.values())

    def _states(
        self, layout: Layout, keys: list[Key], packed: list[tuple[Factor, Tensor]]
    ) -> list[Tensor]:
        """What there is to send of factors; an inverse or a root goes as half of it, noted in
        ``packed``."""
        tensors = []
        for key in keys:
            factor = layout.factors[key]
            shape = factor.key
            if self.method == "eigen" or shape.diagonal:
                tensors += [factor[name] for name in self.specs(shape, key[0].blocks)]
            else:
                # Its root unpacks it, too, so that all have the same bits.
                whole = factor[self.method]
                if self.method == "root":  # packed is what is symmetric
                    whole = whole + whole.triu(1).mT
                tensors.append(moments.pack(whole))
                packed.append((factor, tensors[-1]))
        return tensors

    def basis(self, layout: Layout, layer: Layer) -> Basis | None:
        """What captured gradients of a layer are projected to, if there is anything yet."""
        return _vectors(layout, layer) if layer in self.ready else None

    def take_examples(
        self, layout: Layout, statistics: Statistics, tally: Tally, decay_of: correction.DecayOf
    ) -> None:
        """Correct eigenvalues by what was captured in the bases as they still are."""
        if self.correction == "examples":
            layers = [layer for layer in tally.counts if layer in self.ready]
            with precision.full_precision():
                correction.take_examples(self.ranks, layout, statistics, tally, layers, decay_of)

    def _multiply(self, layout: Layout, layers: Sequence[Layer], damping_of: DampingOf) -> None:
        """Form the eigenvalue products of layers with a new state, where they are stored."""
        if not self.stored_product:
            return
        for layer in layers:
            pair = layout.pair_of.get(layer)
            if pair is not None:
                a, g = layout.factors[layer, "a"], layout.factors[layer, "g"]
                product = kronecker.damped_product(g["values"], a["values"], damping_of(layer))
                scale = pair.tensors["scale"]
                scale[pair.slots[layer]] = _stored(product.reciprocal_(), scale.dtype)

    def count(self, layout: Layout, layers: Sequence[Layer], damping_of: DampingOf) -> None:
        """Which eigenvectors lead from the next step on; ``layers`` have a new state."""
        if self.truncation is not None:
            self.truncation.count(layout, self.ready, set(layers), damping_of)

    @property
    def _is_in_bases(self) -> bool:
        """Whether something is kept of gradients that turns with the eigenvectors."""
        return self.correction is not None or (self.moments and not self.metric)

    def _keep_bases(self, layout: Layout, keys: Collection[Key], older: Older) -> None:
        """Copy the bases that moments are in, of these factors, before new ones take their place;
        a diagonal factor has none."""
        for key in keys if self._is_in_bases else ():
            factor = layout.factors.get(key)
            if key[0] in older.layers and factor is not None and not factor.key.diagonal:
                older.bases[key] = factor["vectors"].clone()

    def _turn(self, layout: Layout, layers: Sequence[Layer], older: Older) -> None:
        """Express moments in the new bases; those of layers without an older one start anew."""
        for layer in layers:
            pair = layout.pair_of.get(layer)
            if pair is None or not self._is_in_bases:
                continue
            slots = pair.slots[layer]
            if layer not in older.layers:
                for tensor in pair.tensors.values():
                    tensor[slots] = 0
            dtype, now = pair.g.key.dtype, _vectors(layout, layer)
            bases = [older.bases.get((layer, side)) for side in "ga"]
            turns = [_turn(old, new, dtype) for old, new in zip(bases, now, strict=True)]
            if not self.moments:
                g, a = (layout.factors[layer, side]["values"] for side in "ga")
                product = g[:, :, None] * a[:, None, :]
                correction.start_or_turn(pair.tensors, slots, product, *turns)
            elif turns != [None, None]:
                eigenbasis.turn(pair.tensors, slots, *turns)

    def _split_damping(
        self, shelf: Shelf, due: Sequence[Layer], damping_of: DampingOf
    ) -> dict[Key, Tensor]:
        """What to add to the diagonals of each factor, ``[blocks]``; nothing for eigen."""
        if self.method == "eigen":
            return {}
        shifts: dict[Key, Tensor] = {}
        for layers in by_place(due):
            key = stack_key(layers[0], "g")
            damping = per_block(layers, damping_of, key)
            if self.metric:
                both = torch.zeros_like(damping), damping
            elif self.split == "full":
                both = damping, damping
            else:
                both = kronecker.split_damping(damping, *self._means(shelf, layers, key))
            sizes = [layer.blocks for layer in layers]
            for side, values in zip("ag", both, strict=True):
                parts = zip(layers, values.split(sizes), strict=True)
                shifts.update(((layer, side), part) for layer, part in parts)
        return shifts

    def _means(self, shelf: Shelf, layers: Sequence[Layer], key: StackKey) -> Tensor:
        """Mean eigenvalues of all their A and all their G, ``[2, blocks]``."""
        none = torch.zeros(sum(x.blocks for x in layers), dtype=key.dtype, device=key.device)
        sides = []
        for side in "ag":
            means, at = none.clone(), 0
            for layer in layers:
                factor = shelf.factors.get((layer, side))
                if factor is not None:
                    means[at : at + layer.blocks] = kronecker.mean_eigenvalue(
                        factor["average"].to(key.dtype), diagonal=factor.key.diagonal
                    )
                at += layer.blocks
            sides.append(means)
        both = torch.stack(sides)
        # Where A and G of a layer lie on two ranks, each needs to know the other's.
        return self.ranks.sum_on_device(both, "second_order") if self.parted else both

    def _refresh_stack(
        self, stack: Stack, factors: list[Factor], layout: Layout, shifts: dict[Key, Tensor]
    ) -> set[Layer]:
        """Decompose these factors; the layers of those that failed every attempt."""
        average = self._averages(stack, factors)
        shift = torch.cat([shifts[f.layer, f.side] for f in factors]) if shifts else None
        results, good = _robustly(average, shift, self.method, stack.key.diagonal)
        return self._enter(stack, factors, layout, results, good)

    def _enter(
        self,
        stack: Stack,
        factors: list[Factor],
        layout: Layout,
        results: Sequence[Tensor],
        good: Tensor,
    ) -> set[Layer]:
        """Put decompositions into use where they are good; the layers of which some are not."""
        state, slots = self._state(stack, factors, layout)
        if "stale" in stack.tensors:
            stack.tensors["stale"][slots_of(factors)] = 0
        fine = None if good.all() else good.to(stack.key.device)
        names = _STATE[self.method]
        for name, result in zip(names, results, strict=False):  # of diagonal ones the first alone
            _put(state[name], slots, result.to(stack.key.device), fine)
        return _flagged(factors, ~good)

    def _averages(self, stack: Stack, factors: list[Factor]) -> Tensor:
        average = stack.tensors["average"][slots_of(factors)]
        return moments.mirrored(average.to(stack.key.dtype))

    def _state(
        self, stack: Stack, factors: list[Factor], layout: Layout
    ) -> tuple[dict[str, Tensor], slice | Tensor]:
        """Where the factors' state goes: their owner is one of the workers."""
        applied = [layout.factors[f.layer, f.side] for f in factors]
        return layout.stacks[stack.key].tensors, slots_of(applied)

    def _invert(
        self, stack: Stack, factors: list[Factor], layout: Layout, shifts: dict[Key, Tensor]
    ) -> None:
        """New state where that goes well; the host hears in the next step where it did not."""
        average = self._averages(stack, factors)
        shift = torch.cat([shifts[f.layer, f.side] for f in factors])
        (result, *_), good = _attempted(average, shift, self.method, stack.key.diagonal)
        state, slots = self._state(stack, factors, layout)
        _put(state[self.method], slots, result, good)
        self.tracking.note(factors, slots_of(factors), good)

    def _follow(self, stack: Stack, factors: list[Factor], layout: Layout) -> None:
        """New state from that of the last refresh, and a look at how well it fits."""
        average = self._averages(stack, factors)
        state, slots = self._state(stack, factors, layout)
        names = ("values",) if stack.key.diagonal else ("values", "vectors")
        if stack.key.diagonal:
            results, outside = [average.clamp(min=0)], average.new_zeros(len(average))
            whole = results[0].norm(dim=1)
        else:
            values, vectors = (state[name][slots].to(average.dtype) for name in names)
            number = self.tracking.number
            *results, outside, whole = eigen.followed(average, vectors, values, number)
        # An average that overflowed must not get in: its factor is stale, and fails by name then.
        fine = (outside + whole).isfinite()
        for name, result in zip(names, results, strict=True):
            _put(state[name], slots, result, fine)
        self.tracking.look(factors, slots_of(factors), outside, whole)

    def _count(self, failed: Sequence[Layer], succeeded: Sequence[Layer]) -> None:
        for layer in succeeded:
            self.failures.pop(layer, None)
        for layer in failed:
            count = self.failures[layer] = self.failures.get(layer, 0) + 1
            what = f"the decomposition of layer {layer.name!r} failed, {count} in a row"
            if count > self.max_failures:
                raise RuntimeError(
                    f"{what} (max_failures={self.max_failures}): its statistics are not finite or "
                    "too ill-conditioned; look for a loss that is not finite and for diverging "
                    "activations, raise damping, store factors in float32 or skip the layer with "
                    "skip_layers"
                )
            kept = "its older state" if layer in self.ready else "its raw gradient"
            text = f"{what}; {kept} stays in use. See whether the loss is finite"
            agreement.warn(self.ranks, text, stacklevel=2)

    # ---- application ----

    def precondition(
        self,
        pair: Pair,
        gradient: Tensor,
        members: list[Layer],
        damping_of: DampingOf,
        taken: Gradients | None,
    ) -> Tensor:
        """The preconditioned gradients of ``members``, stacked like ``gradient``.

        Afterwards those of some members are ``taken`` for the correction of the eigenvalues.
        """
        slots = _slots(pair, members)
        of = self._picked(pair, slots, gradient)
        if self.method == "inverse":
            inverse_g, inverse_a = of("g", "inverse"), of("a", "inverse")
            assert inverse_g is not None and inverse_a is not None
            return kronecker.apply_inverse(gradient, inverse_g, inverse_a)
        bases = of("g", "vectors"), of("a", "vectors")
        if self.correction:
            damping = _common_or_each(members, damping_of, pair)
            projected = kronecker.into_basis(gradient, *bases)
            new = projected * correction.reciprocal(pair.tensors, slots, damping)
            if taken is not None and any(layer in taken.decays for layer in members):
                correction.take_gradients(pair, slots, projected, members, taken)
            return kronecker.out_of_basis(new, *bases)
        runs = None if self.truncation is None else self.truncation.runs(pair, members)
        if runs is not None:
            values_g, values_a = of("g", "values"), of("a", "values")
            assert values_g is not None and values_a is not None
            left_out = pair.tensors["left_out"][slots]
            damping = _common_or_each(members, damping_of, pair)
            values = values_g, values_a
            return truncation.precondition(gradient, bases, values, left_out, runs, damping)
        projected = kronecker.into_basis(gradient, *bases)
        if projected is gradient:  # by two diagonal factors; it is wanted as it is
            projected = gradient.clone()
        if self.stored_product:
            projected.mul_(pair.tensors["scale"][slots].to(gradient.dtype))
        else:
            values_g, values_a = of("g", "values"), of("a", "values")
            assert values_g is not None and values_a is not None
            damping = _common_or_each(members, damping_of, pair)
            projected.div_(kronecker.damped_product(values_g, values_a, damping))
        return kronecker.out_of_basis(projected, *bases)

    def direction(
        self,
        pair: Pair,
        gradient: Tensor,
        members: list[Layer],
        present: list[bool],
        settings_of: Mapping[Layer, Any],
    ) -> Tensor:
        """Adam's directions from moments in the eigenbasis, or Muon's in the metric of G; these
        move where there are gradients.

        Called once a step for each layer.
        """
        if self.metric:
            return self._in_metric(pair, gradient, members, present, settings_of)
        slots = _slots(pair, members)
        of = self._picked(pair, slots, gradient)
        g, a = of("g", "vectors"), of("a", "vectors")
        given = None
        if not all(present):
            given = per_block(members, _among(members, present), pair.g.key) > 0
        adam, *others = dict.fromkeys(settings_of[layer] for layer in members)
        if others:
            each = zip(*(settings_of[layer] for layer in members), strict=True)
            adam = Settings(*(_common_or_each(members, _among(members, n), pair) for n in each))
        projected = kronecker.into_basis(gradient, g, a)
        found = eigenbasis.direction(pair.tensors, slots, projected, given, adam, self.nesterov)
        # Not tables, nor what is too wide for a factor; and a vector is as it should be.
        if self.orthogonal and g is not None and a is not None and 1 not in found.shape[1:]:
            # Before it is turned back, which comes to the same.
            in_half = self._orthogonal_in_half(found)
            with precision.full_precision(found.device.type):
                found = orthogonal.orthogonalized(found, in_half=in_half)
            if in_half:  # as it was already
                g, a = g.bfloat16(), a.bfloat16()
        return kronecker.out_of_basis(found, g, a)

    def _in_metric(
        self,
        pair: Pair,
        gradient: Tensor,
        members: list[Layer],
        present: list[bool],
        settings_of: Mapping[Layer, metric.Settings],
    ) -> Tensor:
        """Each of the members' settings apart, of which there is one as a rule."""
        own, *others = dict.fromkeys(settings_of[layer] for layer in members)
        if others:
            parts = gradient.split([layer.blocks for layer in members])
            each = zip(members, parts, present, strict=True)
            return torch.cat([self._in_metric(pair, g, [x], [p], settings_of) for x, g, p in each])
        slots = _slots(pair, members)
        given = None
        if not all(present):
            given = per_block(members, _among(members, present), pair.g.key) > 0
        root = self._picked(pair, slots, gradient)("g", "root")
        assert root is not None
        in_half = self._orthogonal_in_half(gradient)
        with precision.full_precision(gradient.device.type):
            return metric.direction(pair.tensors, slots, gradient, given, root, own, in_half)

    def lacks_halves(self, devices: Iterable[torch.device]) -> bool:
        """Whether some product in bfloat16 that is asked for would be none on these devices."""
        if not (self.orthogonal or self.metric or self.dtype == torch.bfloat16):
            return False
        ones = [torch.empty(0, dtype=torch.float32, device=device) for device in devices]
        return not all(products.multiplies_in_half(torch.bfloat16, one) for one in ones)

    def _multiplies_in_half(self, dtype: torch.dtype, like: Tensor) -> bool:
        if self.ranks.world == 1:
            return products.multiplies_in_half(dtype, like)
        # As agreed, also where this rank's device has changed since: weights must not drift apart.
        return self.halves and (dtype, like.dtype) == (torch.bfloat16, torch.float32)

    def _orthogonal_in_half(self, matrices: Tensor) -> bool:
        return self._multiplies_in_half(torch.bfloat16, matrices) and not orthogonal.narrow(
            matrices
        )

    def _picked(
        self, pair: Pair, slots: slice | Tensor, like: Tensor
    ) -> Callable[[str, str], Tensor | None]:
        """What some layers have of one side, ready for arithmetic with ``like``."""
        sides = {"g": (pair.g, pair.g_slots), "a": (pair.a, pair.a_slots)}

        def of(side: str, name: str) -> Tensor | None:
            stack, own = sides[side]
            tensor = stack.tensors.get(name)
            if tensor is None:
                return None
            half = name in _MULTIPLIED and self._multiplies_in_half(tensor.dtype, like)
            return tensor[own][slots] if half else tensor[own][slots].to(like.dtype)

        return of

    def curvature(self, pair: Pair, change: Tensor, members: list[Layer]) -> Tensor:
        """δᵀFδ in all, of changes δ stacked like gradients; in eigenbases."""
        slots = _slots(pair, members)
        of = self._picked(pair, slots, change)
        values_g, values_a = of("g", "values"), of("a", "values")
        assert values_g is not None and values_a is not None
        squares = kronecker.into_basis(change, of("g", "vectors"), of("a", "vectors")).square()
        if self.correction:
            return (pair.tensors["corrected"][slots] * squares).sum()
        return (values_g[:, None, :] @ squares @ values_a[:, :, None]).sum()


def _vectors(layout: Layout, layer: Layer) -> Basis:
    """A layer's bases, of G and of A; None for a diagonal factor."""
    g, a = (layout.factors[layer, side] for side in "ga")
    return (
        None if g.key.diagonal else g["vectors"],
        None if a.key.diagonal else a["vectors"],
    )


def _numbers(factor: Factor) -> int:
    return math.prod(factor.key.shape(factor.layer.blocks))


def _at_once(stack: Stack) -> int:
    """The most numbers of factors that are decomposed in one batch."""
    return _AT_ONCE_ON_CPUS if stack.key.device.type == "cpu" else _AT_ONCE


def _flagged(factors: Sequence[Factor], flags: Tensor) -> set[Layer]:
    """The layers with a flag, on the host, of any of their blocks."""
    parts = flags.split([f.layer.blocks for f in factors])
    return {f.layer for f, part in zip(factors, parts, strict=True) if part.any()}


def _slots(pair: Pair, members: list[Layer]) -> slice | Tensor:
    if len(members) == len(pair.layers):
        return slice(None)
    return joined([pair.slots[layer] for layer in members], pair.g.key.device)


def _among(members: list[Layer], values: Sequence[float]) -> Callable[[Layer], float]:
    return dict(zip(members, values, strict=True)).__getitem__


def _common_or_each(
    members: list[Layer], value_of: Callable[[Layer], float], pair: Pair
) -> Tensor | float:
    found = common_or_each(members, value_of, pair.g.key)
    return found[:, None, None] if isinstance(found, Tensor) else found


def _turn(old: Tensor | None, new: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """From an older basis to a new one, Q_newᵀ Q_old; None where it does not move."""
    if old is None or new is None:
        return None
    return products.product(new.to(dtype).mT, old.to(dtype))


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of storage; a finite number stays finite in half precision."""
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(tensor.dtype).max:
        tensor = tensor.clamp(-limit, limit)
    return tensor.to(dtype)


def _put(kept: Tensor, slots: slice | Tensor, new: Tensor, fine: Tensor | None) -> None:
    """Into storage, but for what is not ``fine``."""
    new = _stored(new, kept.dtype)
    if fine is not None:
        new = torch.where(fine.view(-1, *[1] * (new.dim() - 1)), new, kept[slots])
    kept[slots] = new


def _decompose(matrices: Tensor, damping: Tensor | None, method: str) -> tuple[Tensor, ...]:
    if damping is None:
        return eigen.eigendecompose(matrices)
    by = kronecker.damped_root if method == "root" else kronecker.damped_inverse
    return (by(matrices, damping),)


def _attempted(
    matrices: Tensor, damping: Tensor | None, method: str, diagonal: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Decompose a batch, once. With the results come flags, where they are: which are good."""
    if diagonal:
        return _diagonals(matrices, damping, method)
    try:
        results = _decompose(matrices, damping, method)
    except RuntimeError as error:
        _raise_unless_a_solvers(error)
        results = (torch.zeros_like(matrices),)
        if damping is None:
            results = torch.zeros_like(matrices[..., 0]), *results
        return results, matrices.new_zeros(len(matrices), dtype=torch.bool)
    return results, torch.stack([r.isfinite().flatten(1).all(1) for r in results]).all(0)


def _robustly(
    matrices: Tensor, damping: Tensor | None, method: str, diagonal: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Decompose a batch; retry what fails, one by one. Here the flags are on the host."""
    results, good = _attempted(matrices, damping, method, diagonal)
    good = good.cpu()
    if diagonal:
        return results, good  # of which none fails but what is not finite
    for i in good.logical_not().nonzero().flatten().tolist():
        shift = None if damping is None else damping[i : i + 1]
        for attempt in _attempts(matrices[i : i + 1], shift, method):
            if all(part.isfinite().all() for part in attempt):
                for result, part in zip(results, attempt, strict=True):
                    result[i] = part[0]
                good[i] = True
                break
    return results, good


def _decompose_beside(averages: Tensor, rejected: Tensor, *, diagonal: bool) -> tuple[Tensor, ...]:
    """Eigenvalues, eigenvectors; on the host, which are good, and of which sums were left out."""
    results, good = _robustly(averages, None, "eigen", diagonal)
    return *results, good, (rejected > 0).cpu()


def _diagonals(
    matrices: Tensor, damping: Tensor | None, method: str
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The same of diagonal factors."""
    if damping is None:
        new = matrices.clamp(min=0)
    elif method == "root":
        new = kronecker.damped_root_of_diagonal(matrices, damping)
    else:
        new = 1 / (matrices + damping[:, None])
    return (new,), (matrices.isfinite() & new.isfinite()).all(1)


def _raise_unless_a_solvers(error: RuntimeError) -> None:
    """Failures of cuSOLVER's algorithms come as plain errors, too; not so a lack of memory."""
    if not isinstance(error, LinAlgError) and not _OF_CUSOLVER.match(str(error)):
        raise error


def _attempts(matrix: Tensor, damping: Tensor | None, method: str) -> Iterator[tuple[Tensor, ...]]:
    """Alone, in float64, with jitter on the diagonal, and on the CPU."""
    double = matrix.double()
    scale = double.diagonal(dim1=-2, dim2=-1).mean()
    jittered = double + 1e-8 * scale * torch.eye(matrix.shape[-1], device=matrix.device).double()
    for candidate in (matrix, double, jittered, jittered.cpu()):
        shift = None if damping is None else damping.to(candidate)
        try:
            yield _decompose(candidate, shift, method)
        except RuntimeError as error:
            _raise_unless_a_solvers(error)


def _rejections(shelf: Shelf, due: set[Layer]) -> dict[Layer, bool]:
    """Layers with sums that were not finite since their last refresh; True: they have no others."""
    stacks = [s for s in shelf.stacks.values() if any(f.layer in due for f in s.factors)]
    counts = [stack.tensors["rejected"] for stack in stacks]
    if not counts:
        return {}
    if not torch.stack([count.any().to(counts[0].device) for count in counts]).any():
        return {}  # one look from the host, for all that is well
    found: dict[Layer, bool] = {}
    for stack in stacks:
        rejected = stack.tensors["rejected"].cpu() > 0
        nothing = rejected & (stack.tensors["weight"].cpu() == 0)
        for factor in stack.factors:
            if factor.layer in due and rejected[factor.slots].any():
                empty = bool(nothing[factor.slots].any())
                found[factor.layer] = found.get(factor.layer, False) or empty
                factor["rejected"].zero_()
    return found
