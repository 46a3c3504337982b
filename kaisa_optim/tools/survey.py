"""What a plan must know of a model and its optimizer; nothing is allocated, no rank is asked."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from .. import bases, reports
from ..comm.ranks import Ranks
from ..compiled import CompiledPlan, sizes_of
from ..curvature.group import ParameterStack
from ..errors import invalid_because
from ..model import Registry, task_of, unwrapped
from ..optimizer import KFACMixin
from ..options import Group
from ..plan.assignment import LayerWise, Opt
from ..preconditioner import make_rule
from .choice import Case, Momentum

# Arguments of a base that a step on the meta device can't have, and values in their place.
_ON_META = {"fused": None, "capturable": False}
_RATE = 1e-3  # any rate: the state of a step does not depend on it


def survey(optimizer: KFACMixin) -> tuple[Case, Registry]:
    """Return the facts for plans, and the layers that they tell of.

    ``optimizer`` needs no preconditioner yet.
    """
    options, groups = optimizer._kfac_options, optimizer.param_groups
    chosen = LayerWise() if options.colocate_factors is not False else Opt()
    options = options.having({"assignment": chosen, "grad_worker_fraction": None})
    base = bases.step_of(optimizer._base, optimizer.defaults)
    rule = make_rule(options, base.length())
    group, cap = options.process_group, options.bucket_cap_mb
    ranks = Ranks(group, bucket_cap_mb=cap, comm_dtype=options.comm_dtype)
    registry = Registry(optimizer._kfac_model, options, ranks, ())
    registry.match_groups(groups)
    registry.rebuild(registry.cover(groups, first=False), groups)
    layers = registry.layers
    if not layers:
        raise reports.nothing_covered(registry)
    if registry.sharded:
        why = '"auto" for parameters sharded by fully_shard, which are always layer-wise'
        raise invalid_because("grad_worker_fraction", f"{why}; leave it out")
    registry.find_facts()
    intervals = options.factor_update_steps, options.inv_update_steps
    gather, refresh = (n(0) if callable(n) else n for n in intervals)
    model = unwrapped(optimizer._kfac_model)
    stepped: dict[Tensor, list[str]] = {}
    for layer in registry.active if rule.makes_directions else ():
        for p in layer.parameters:
            stepped.setdefault(p, []).append(layer.name)
    everywhere, momenta = _state(optimizer, base, stepped)
    # The base alone keeps second moments where K-FAC keeps a number a block, and not K-FAC's own.
    copies = 0 if base.momentum == bases.MOMENTUM else 1 + bool(base.second)
    case = Case(
        [*registry.facts.values()],
        sizes_of(rule, options),
        rule.work,
        (gather, refresh),
        options.staggered,
        weights=sum(x.nbytes for x in {*model.parameters(), *model.buffers()}),
        gradients=sum(p.nbytes for p in model.parameters() if p.requires_grad),
        base=everywhere,
        whole=everywhere + copies * sum(momentum.size for momentum in momenta),
        momenta=momenta,
        tasks=[task_of(layer) for layer in layers.values()],
        colocate=options.colocate_factors,
        bucket_bytes=ranks.bucket_bytes,
    )
    return case, registry


@torch.no_grad()
def _state(
    optimizer: KFACMixin, step: type[bases.BaseStep], stepped: dict[Tensor, list[str]]
) -> tuple[int, list[Momentum]]:
    """Return the bytes of the base's state on all ranks, and the momenta on some.

    The base steps copies of the parameters on the meta device; ``stepped`` are those that K-FAC
    steps, with the names of their layers.
    """
    twin_of: dict[Tensor, Tensor] = {}
    groups: list[Group] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            twin = twin_of[p] = torch.empty_like(p, device="meta", requires_grad=p.requires_grad)
            twin.grad = torch.empty_like(twin) if p.requires_grad else None
        twins = [twin_of[p] for p in group["params"]]
        groups.append(_plain(group) | {"params": twins})
    taken = inspect.signature(optimizer._base.__init__).parameters
    arguments = {n: v for n, v in _plain(optimizer.defaults).items() if n in taken}
    kind: Any = optimizer._base
    base = kind(groups or [{"params": []}], **arguments)

    def base_step() -> None:
        try:
            base.step()
        except Exception as error:  # some bases read numbers, after they have made all entries
            if not all(base.state.get(x) for x in twin_of.values() if x.requires_grad):
                why = f"the entries of {kind.__name__} are not known before a step: {error}"
                raise invalid_because("base", why) from error

    base.base_step = base_step
    numbered = [(i, p) for i, x in enumerate(optimizer.param_groups) for p in x["params"]]
    ours = [(i, twin_of[p]) for i, p in numbered if p in stepped]
    stacks = [ParameterStack([twin], twin, i, keeps=True) for i, twin in ours]
    plan, part = CompiledPlan(stacks, base.param_groups), step(base)
    part.adopt(plan)
    part.open(plan)
    plan.present = [False] * len(ours)
    part.step_uncovered(plan)
    everywhere, momenta = 0, []
    for group in optimizer.param_groups:
        for p in group["params"]:
            entry = dict(base.state.get(twin_of[p], {}))
            if p in stepped and part.keeps(group, [entry]):
                size = entry.pop(part.momentum).nbytes
                momenta.append(Momentum(tuple(stepped[p]), size))
            everywhere += sum(x.nbytes for x in entry.values() if isinstance(x, Tensor))
    return everywhere, momenta


def _plain(group: Group) -> Group:
    """Return a group's values without its parameters, as a step on the meta device takes them."""
    values = {n: _ON_META.get(n, v) for n, v in group.items() if n != "params"}
    return {n: _RATE if isinstance(v, Tensor) else v for n, v in values.items()}
