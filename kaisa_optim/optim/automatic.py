"""``grad_worker_fraction="auto"``: the constructor plans, and takes the best that fits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from ..comm import agreement
from ..comm.ranks import Ranks
from ..core.options import Options
from ..errors import invalid_because
from ..plan import hardware
from ..plan.choice import Choice, choose_among
from .survey import Survey

if TYPE_CHECKING:
    from .mixin import KFACMixin

_SHARE = 0.5  # of what a device has free, if no budget is given

logger = logging.getLogger("kaisa_optim")


def settled(optimizer: KFACMixin) -> Options:
    """Return the options with an assignment that is alike on all ranks; all ranks call.

    An error is raised on all ranks if nothing fits, or if ranks differ.
    """
    options, group = optimizer._kfac_options, optimizer._kfac_process_group
    ranks = Ranks(group, bucket_cap_mb=options.bucket_cap_mb, comm_dtype=options.comm_dtype)
    if ranks.world > 1:  # a rank with another fraction compares its options, too
        agreement.compare(ranks, options.described(), "options")
    error: Exception | None = None
    found: Choice | None = None
    try:
        budget = _budget(optimizer, options)
    except ValueError as problem:
        budget, error = 0, problem
    if isinstance(options.memory_budget, float | None):
        budget = min(ranks.gather_objects(budget, "comparing free memory"))
    try:
        found = None if error else _choice(optimizer, options, ranks.world, budget)
        best = None if found is None else found.refuse_if_none_fits()
    except ValueError as problem:
        error = problem
    title = "" if error or best is None else best.candidate.title
    if ranks.world == 1 and error is not None:
        raise error
    agreement.compare(ranks, {"the assignment that a plan chose": title}, "plans", error)
    assert found is not None and best is not None
    if ranks.rank == 0:
        logger.info("%s", found.reason)
    return options.choosing(best.candidate.strategy, found.reason)


def _choice(optimizer: KFACMixin, options: Options, world: int, budget: int) -> Choice:
    device = optimizer.device
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    base, groups = optimizer._base, optimizer.param_groups
    model, group = optimizer._kfac_model, optimizer._kfac_process_group
    survey = Survey(model, base, optimizer.defaults, groups, options, group)
    profile = hardware.load(hardware.named_for(device.type, title))
    return choose_among(survey.case(device.type), world, profile, budget)


def _budget(optimizer: KFACMixin, options: Options) -> int:
    """Return the bytes that weights, gradients and all states may take on this rank."""
    budget, device = options.memory_budget, optimizer.device
    if isinstance(budget, int):
        return budget
    if device.type != "cuda":
        why = (
            f'{budget!r} with grad_worker_fraction="auto" on {device.type}, and K-FAC knows the '
            'free memory of CUDA devices only; give bytes, such as "4GiB"'
        )
        raise invalid_because("memory_budget", why)
    free, _ = torch.cuda.mem_get_info(device)
    share = _SHARE if budget is None else budget
    model = optimizer._kfac_model
    held = {*model.parameters(), *model.buffers()}
    held |= {p.grad for p in model.parameters() if p.grad is not None}
    return int(share * free) + sum(x.nbytes for x in held if x.device == device)
