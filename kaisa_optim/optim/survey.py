"""What a plan must know of a model and its optimizer; nothing is allocated, no rank is asked."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm.ranks import Ranks
from ..core import reports
from ..core.coverage import unwrapped
from ..core.options import Group, Options
from ..core.placements import task_of
from ..core.preconditioner import make_rule, sizes_of
from ..core.registry import Registry
from ..curvature.stacks import WITH_STREAMS
from ..errors import invalid_because
from ..plan.assignment import LayerWise, Opt
from ..plan.choice import Case, Momentum
from . import bases
from .bases import BaseStep, Entry

# Arguments of a base that a step on the meta device can't have, and values in their place.
_ON_META = {"fused": None, "capturable": False}
_RATE = 1e-3  # any rate: the state of a step does not depend on it


class Survey:
    """One model's registry, rule and bases, as the constructor would make them."""

    def __init__(
        self,
        model: nn.Module,
        base: type[Optimizer],
        defaults: Group,
        groups: list[Group],
        options: Options,
        process_group: Any = None,
    ) -> None:
        """Cover a model; ``groups`` are the optimizer's, of its base class with ``defaults``."""
        self.model = unwrapped(model)
        together = options.colocate_factors is not False
        self.options = options.choosing(LayerWise() if together else Opt(), "")
        self.groups = groups
        self._base, self._defaults = base, defaults
        self._part: BaseStep = bases.step_of(base, defaults)
        self.rule = make_rule(self.options, self._part.length())
        ranks = Ranks(
            process_group, bucket_cap_mb=options.bucket_cap_mb, comm_dtype=options.comm_dtype
        )
        self._bucket_bytes = ranks.bucket_bytes
        self.registry = Registry(model, self.options, ranks, self.rule, ())
        self.registry.match_groups(groups)
        self.registry.rebuild(self.registry.cover(groups, first=False), groups)
        if not self.registry.layers:
            raise reports.nothing_covered(self.registry)
        if self.registry.placements.sharded:
            why = (
                '"auto" for parameters sharded by fully_shard, which are always layer-wise; leave '
                "it out"
            )
            raise invalid_because("grad_worker_fraction", why)

    def case(self, device: str) -> Case:
        """Return the facts for plans on this type of device."""
        registry, options = self.registry, self.options
        intervals = options.factor_update_steps, options.inv_update_steps
        gather, refresh = (n(0) if callable(n) else n for n in intervals)
        defers = self.rule.checks_later and device in WITH_STREAMS
        base, momenta = self._state()
        placements = registry.placements
        placements.find_facts(registry.layers.values())
        held: set[Tensor] = {*self.model.parameters(), *self.model.buffers()}
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return Case(
            [*placements.facts.values()],
            sizes_of(self.rule, options),
            self.rule.work,
            (gather, refresh),
            options.at_once,
            weights=sum(p.nbytes for p in held),
            gradients=sum(p.nbytes for p in trained),
            base=base,
            momenta=momenta,
            tasks=[task_of(layer) for layer in registry.layers.values()],
            colocate=options.colocate_factors,
            defers=tuple(registry.layers) if defers else (),
            bucket_bytes=self._bucket_bytes,
        )

    def _state(self) -> tuple[int, list[Momentum]]:
        """Return the bytes of the base's state on all ranks, and the momenta on some."""
        layers_of: defaultdict[Tensor, list[str]] = defaultdict(list)
        for layer in self.registry.active if self.rule.makes_directions else ():
            for p in filter(lambda p: p.requires_grad, layer.parameters):
                layers_of[p].append(layer.name)
        everywhere, momenta = 0, []
        for group, parameter, entry in self._entries():
            if parameter not in layers_of:
                everywhere += _bytes(entry)
                continue
            common, own = self._part.bytes_of(group, parameter, entry)
            everywhere += common
            if own:
                momenta.append(Momentum(tuple(layers_of[parameter]), own))
        return everywhere, momenta

    def _entries(self) -> list[tuple[Group, Tensor, Entry]]:
        """Return the base's own entries, on meta; some bases make those of frozen parameters."""
        twin_of: dict[Tensor, Tensor] = {}
        twins: list[Group] = []
        for group in self.groups:
            own = {p: torch.empty_like(p, device="meta") for p in group["params"]}
            for p, twin in own.items():
                if p.requires_grad:
                    twin.requires_grad_().grad = torch.empty_like(twin)
            if own:
                twins.append(_plain(group) | {"params": [*own.values()]})
            twin_of |= own
        taken = inspect.signature(self._base.__init__).parameters
        arguments = {n: v for n, v in _plain(self._defaults).items() if n in taken}
        base: Any = self._base
        optimizer = base(twins or [{"params": []}], **arguments)
        try:
            optimizer.step()
        except Exception as error:  # some bases read numbers, after they have made all entries
            if not all(optimizer.state.get(x) for p, x in twin_of.items() if p.requires_grad):
                why = f"the entries of {self._base.__name__} are not known before a step: {error}"
                raise invalid_because("base", why) from error
        return [
            (group, p, dict(optimizer.state.get(twin_of[p], {})))
            for group in self.groups
            for p in group["params"]
        ]


def _plain(group: Mapping[str, Any]) -> Group:
    """Return a group's values without its parameters, as a step on the meta device takes them."""
    values = {n: _ON_META.get(n, v) for n, v in group.items() if n != "params"}
    return {n: _RATE if isinstance(v, Tensor) else v for n, v in values.items()}


def _bytes(entry: Entry) -> int:
    return sum(x.nbytes for x in entry.values() if isinstance(x, Tensor))
