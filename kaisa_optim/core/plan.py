"""What a step needs: a rank's groups, and the plan that is compiled from seldom changing facts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.ranks import Ranks
from ..comm.sharding import is_sharded, local, parts_here
from ..curvature.group import Group, ParameterStack, alike, by_device, strides
from ..curvature.lengths import BaseNumbers, Length, Share, are_alike
from ..curvature.rules import Rule
from ..layers import Layer
from ..plan.facts import Sizes
from ..plan.routes import Round, chunks, gradient_rounds, grouped
from ..stages import stage
from .options import Group as ParamGroup
from .options import Options
from .registry import Registry
from .transport import Local, Rows, Shards

Entry = dict[str, Any]

CLIP_TERMS = 2  # numbers of each block that the clip needs
# A scale of the clip's terms. With a loss of 1e20, gradients are as long, and plain terms would
# overflow float32. A power of two changes no digit of the clip. Products that become zero by the
# scale are far below any clip.
_SCALE = 2.0**-64


class CompiledPlan:
    """The parameters that K-FAC gives new gradients or steps, and how.

    ``rest`` has, for each of the optimizer's groups, the parameters that the base alone steps.
    ``stacks`` are in the order of the plan's parameters.
    """

    def __init__(self, stacks: Sequence[ParameterStack], rest: list[list[Tensor]]) -> None:
        self.stacks, self.rest = list(stacks), rest
        self.parameters = [p for stack in stacks for p in stack.parameters]
        self.index = {p: i for i, p in enumerate(self.parameters)}
        self.numbers = [stack.number for stack in stacks for _ in stack.parameters]
        start = 0
        for stack in stacks:
            stack.at = slice(start, start + len(stack.parameters))
            start = stack.at.stop
        self.transports: list[Local | Shards] = []
        self.nu: Tensor | None = None  # of the last step's clip
        self.whole: Share | None = None  # all blocks, where some number goes by all of them
        self.entries: list[Entry] = []  # of the parameters, in the optimizer's state
        self.present: list[bool] | None = None  # which have a gradient in this step; None: all
        self.counts: Tensor | None = None  # of the parameters' steps, if the base counts them
        self.count_rows: Sequence[Tensor] = ()  # as the entries have them
        # Parameters that K-FAC stepped before, and the base is to step from now on.
        self.leaving: list[Tensor] = []
        # Parameters of one kind, which foreach calls take: their group's number, and their places.
        kinds: dict[Any, list[int]] = {}
        for i, (p, number) in enumerate(zip(self.parameters, self.numbers, strict=True)):
            kinds.setdefault((number, p.device, p.dtype, type(p)), []).append(i)
        self.kinds = [(number, places) for (number, *_), places in kinds.items()]

    def collect(self) -> None:
        """Stack the gradients, and note which parameters have one."""
        gradients: list[Any] = parts_here([p.grad for p in self.parameters])  # type: ignore[misc]
        for stack in self.stacks:
            if stack.mine or stack.is_partial:
                stack.buffer = stack.stacked(gradients[stack.at])
            else:
                stack.buffer = stack.empty()
        present = [gradient is not None for gradient in gradients]
        self.present = None if all(present) else present

    def rows(self) -> list[Tensor]:
        """Return the buffers' rows, one for each parameter."""
        buffers = [stack.buffer for stack in self.stacks]
        return [*itertools.chain.from_iterable(map(Tensor.unbind, buffers))]

    def measure(self, measures: str) -> None:
        """Sum over blocks what the length needs: of the buffers, and of the parameters' squares."""
        tensors = self.rows() if measures else []
        for transport in self.transports:
            transport.measure(tensors, self.parameters, squares=measures == "squares")

    def finish(self, length: Length | None, base: BaseNumbers) -> None:
        """Write all directions into the buffers, with lengths that go by all of them."""
        scales = None
        if self.whole is not None and length is not None and length.terms:
            terms = [x for transport in self.transports for x in transport.terms()]
            device = self.whole.like.device
            with stage("length"):
                each = torch.cat([x.to(device) for x in terms])
                all_scales = length.finish(each, self.whole, base)
            assert all_scales is not None
            scales = iter(all_scales.split([len(x) for x in terms]))
        for transport in self.transports:
            transport.deliver(scales)

    def clip(self, limit: float, alphas: list[Any]) -> None:
        """Write new gradients times ν = min(1, √(κ / |Σ α²⟨v, ∇⟩|)).

        ``alphas`` has the α of each of the optimizer's groups. The host does not wait. The layers'
        terms, rows of :func:`products`, are added up in the layers' order, so that ν has the same
        bits on all ranks.
        """
        assert self.whole is not None
        share = self.whole
        terms = [x for transport in self.transports for x in transport.terms()]
        each = torch.cat([x.to(share.like.device) for x in terms]).index_select(0, share.order)
        order = share.ordered
        of_layers = each.split([share.counts[i] for i in order])
        rows = torch.stack([x[0] if len(x) == 1 else x.sum(0) for x in of_layers])
        weights, biases = share.of_groups([*alphas, 0.0])
        if are_alike([*weights, *biases]):
            total: Any = rows.select(1, 0).sum() * _squared(weights[0])
        else:  # a layer's weight, and its bias, the last column, may have an α each
            total = sum(
                (row[0] - row[1]) * _squared(weights[i]) + row[1] * _squared(biases[i])
                for i, row in zip(order, rows, strict=True)
            )
        scale: Tensor = (limit * _SCALE / total.abs()).sqrt_().clamp_(max=1)
        scales = iter([scale.expand(len(x)) for x in terms])
        for transport in self.transports:
            transport.deliver(scales)
        self.nu = scale

    def missing(self, present: list[bool]) -> list[tuple[ParameterStack, list[int]]]:
        """Return stacks of momenta with rows whose parameters have no gradient."""
        each = [(stack, present[stack.at]) for stack in self.stacks if stack.mine]
        rows = [(stack, [i for i, x in enumerate(flags) if not x]) for stack, flags in each]
        return [(stack, own) for stack, own in rows if own]


def products(raw: Tensor, new: Tensor) -> Tensor:
    """Return the clip's terms, ``[blocks, 2]``: ⟨new, raw⟩, and ⟨new, raw⟩ of the last column.

    Both are multiplied by :data:`_SCALE`. ``raw`` is overwritten.
    """
    columns = raw.mul_(_SCALE).mul_(new).sum(1)
    return torch.stack([columns.sum(1), columns.select(1, -1)], 1)


def _squared(alpha: Any) -> Any:
    """Return α² as a scalar: only a scalar CPU tensor goes with tensors of other devices."""
    return alpha.reshape(()) ** 2 if isinstance(alpha, Tensor) else alpha**2


class Groups:
    """The groups of all active layers, and the plans that are compiled from them."""

    def __init__(self, registry: Registry, ranks: Ranks, rule: Rule, options: Options) -> None:
        self._registry, self._ranks, self._options = registry, ranks, options
        self._rule, self.sizes = rule, sizes_of(rule, options)
        self.all: list[Group] = []
        self.of: dict[Layer, Group] = {}
        self.places: list[tuple[torch.device, torch.dtype]] = []  # of the layers, when laid out
        self._rounds: list[tuple[torch.device, list[Round]]] = []  # of new gradients to receivers
        self._chunks: list[list[Layer]] = []  # sharded layers whose gradients travel together
        self.plan = CompiledPlan((), [])
        self.compilations = 0
        self.published: dict[Layer, list[int]] = {}  # flags as the optimizer's state has them
        # The facts that the plan was compiled from, or None, and what its entries held since.
        self.facts: Any = None
        self.held: Any = None

    def allocate(self) -> None:
        """Make all groups anew; layers that have an average keep their values."""
        registry, ranks, options, known = self._registry, self._ranks, self._options, self.of
        placements, active = registry.placements, registry.active
        values = {x: dict(known[x].views(x)) for x in registry.with_average if x in known}
        whole = [layer for layer in active if layer not in placements.sharded]
        columns, facts, self._rounds = ranks.grid.columns, placements.facts, []
        lists = alike(whole) if columns == 1 else []
        for same in by_device(whole) if columns > 1 else ():
            row, limit = ranks.grid.receivers_of(ranks.rank), ranks.bucket_bytes
            rounds = gradient_rounds(same, facts.__getitem__, self.sizes, row, limit)
            self._rounds.append((same[0].parameters[0].device, rounds))
            lists += [x for (bucket,) in rounds for item in bucket.items for x in item.content]
        sharded = [layer for layer in active if layer in placements.sharded]
        # Each rank has only a part of the bytes of a chunk.
        limit = ranks.bucket_bytes * ranks.world
        parts = chunks(sharded, lambda x: facts[x].gradient * facts[x].itemsize, limit)
        self._chunks = [*parts]
        for chunk in self._chunks:
            owned = grouped(chunk, lambda x: placements.owner(x, "g")).values()
            lists += [same for layers in owned for same in alike(layers)]
        self.all = []
        for layers in lists:
            owner = placements.owner(layers[0], "g")
            group = Group(layers, applied=owner % columns == ranks.rank % columns)
            self.all.append(group)
            if group.applied:
                group.allocate(
                    self.sizes,
                    options.factor_dtype,
                    self._rule.dtype,
                    lambda layer, side: placements.owner(layer, side) == ranks.rank,
                    at_identity=options.kaisa_scaling,
                )
        self.published.clear()
        self.of = {layer: group for group in self.all for layer in group.layers}
        self.places = registry.devices
        for layer in values.keys() & self.of.keys():
            for name, view in self.of[layer].views(layer):
                if name in values[layer]:
                    view.copy_(values[layer][name])

    def stepped(self, *, all_layers: bool = False) -> tuple[set[Tensor], set[Tensor]]:
        """Return the parameters that K-FAC steps in the base's place, and those with momenta here.

        All layers of these parameters have a state; ``all_layers`` takes all for ready.
        """
        registry = self._registry
        if not self._rule.makes_directions:
            return set(), set()
        layers = registry.active if all_layers else registry.with_state
        chosen = set(layers)
        raw = {p for x in registry.active if x not in chosen for p in x.parameters}
        ready: set[Tensor] = {p for x in layers for p in x.parameters if p not in raw}
        return ready, ready & self._here(layers)

    def _here(self, layers: Iterable[Layer]) -> set[Tensor]:
        """Return the parameters of layers whose gradients this rank collects."""
        sharded = self._registry.placements.sharded
        here = [x for x in layers if x in sharded or self.of[x].applied]
        return {p for x in here for p in x.parameters}

    def compile(self, groups: list[ParamGroup], base: Any, *, all_layers: bool = False) -> None:
        """Make the plan of the steps to come, for the layers that have a state."""
        registry, ranks, sharded = self._registry, self._ranks, self._registry.placements.sharded
        layers = dict.fromkeys(registry.active if all_layers else registry.with_state)
        ready, mine = self.stepped(all_layers=all_layers)
        if not self._rule.makes_directions:
            ready, mine = {p for x in layers for p in x.parameters}, self._here(layers)
        number_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        placed = [x.parameters for g in self.all for x in g.layers if x in layers]
        chosen = [p for p in itertools.chain(*placed) if p in ready and p in number_of]
        stacks = self._stacked(chosen, number_of, mine)
        rows = {p: (stack, i) for stack in stacks for i, p in enumerate(stack.parameters)}
        room: dict[Tensor, int] = {}
        for group in self.all:
            if group.layers[0] not in sharded:
                group.place([x for x in group.layers if x in layers], rows, room)
        for stack in stacks:
            whole = math.prod(stack.shape[1:])
            stack.is_partial = any(room.get(p, 0) < whole for p in stack.parameters)
        rest = [[p for p in group["params"] if p not in rows] for group in groups]
        plan = CompiledPlan(stacks, rest)

        def share_of(some: Sequence[Group]) -> Share:
            return Share(some, plan.index, number_of)

        terms = self.sizes.terms
        if self._rounds and layers:
            plan.transports.append(Rows(self._rounds, ranks, terms, self.of, share_of))
        elif ranks.grid.columns == 1:
            plan.transports.append(Local(self.all, share_of))
        begun = [chunk for chunk in self._chunks if not layers.keys().isdisjoint(chunk)]
        if begun:
            part = registry.placements, ranks, terms, rows, self.of, share_of
            plan.transports.append(Shards(begun, *part, measures=self._rule.makes_directions))
        every = [group for transport in plan.transports for group in transport.groups]
        plan.whole = share_of(every) if every and terms else None
        base.adopt(plan)
        base.part_from(plan)
        for transport in plan.transports:
            transport.take_former()
        self.plan = plan
        self.compilations += 1

    def _stacked(
        self, parameters: Iterable[Tensor], number_of: Mapping[Tensor, int], mine: set[Tensor]
    ) -> list[ParameterStack]:
        """Return stacks of parameters that lie alike, in one of the optimizer's groups.

        A stack of the former plan is used again, so that its tensors stay where they are.
        """
        kinds: dict[Any, dict[Tensor, Tensor]] = {}  # parameters, and this rank's parts
        for p in parameters:
            part, apart = (local(p), id(p)) if is_sharded(p) else (p, None)
            layout = part.shape, strides(part), part.dtype, part.device
            kinds.setdefault((layout, number_of[p], p in mine, apart), {})[p] = part
        former = {x.key: x for x in self.plan.stacks}
        stacks = []
        for (_, number, keeps, _), parts in kinds.items():
            stack = ParameterStack([*parts], next(iter(parts.values())), number, mine=keeps)
            stacks.append(former.get(stack.key, stack))
        return stacks


def sizes_of(rule: Rule, options: Options) -> Sizes:
    """Return what the bytes of this rule depend on under these options."""
    dtypes, clips = (options.factor_dtype, options.comm_dtype), options.kl_clip is not None
    average, wire = (None if dtype is None else dtype.itemsize for dtype in dtypes)
    terms = rule.sizes.terms if rule.makes_directions else CLIP_TERMS * clips
    return rule.sizes._replace(average=average, wire=wire, terms=terms)
