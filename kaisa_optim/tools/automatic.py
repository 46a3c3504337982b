"""``grad_worker_fraction="auto"``: the constructor plans, and takes the best that fits."""

from __future__ import annotations

import logging

import torch

from .. import agree
from ..comm.ranks import Ranks
from ..errors import invalid_because
from ..optimizer import KFACMixin
from ..options import Options
from . import hardware
from .choice import Choice, candidates, price
from .survey import survey

_SHARE = 0.5  # of what a device has free, if no budget is given

logger = logging.getLogger("kaisa_optim")


def settled(optimizer: KFACMixin) -> Options:
    """Return the options with an assignment that is alike on all ranks; all ranks call.

    An error is raised on all ranks if nothing fits, or if ranks differ.
    """
    options, group = optimizer._kfac_options, optimizer._kfac_options.process_group
    ranks = Ranks(group, bucket_cap_mb=options.bucket_cap_mb, comm_dtype=options.comm_dtype)
    if ranks.world > 1:  # a rank with another fraction compares its options, too
        agree.compare(ranks, options.described(), "options")
    error: Exception | None = None
    title, budget = "", 0
    try:
        budget = budget_of(optimizer)
    except ValueError as problem:
        error = problem
    if not isinstance(options.memory_budget, int):
        budget = min(ranks.gather_objects(budget, "comparing free memory"))
    try:
        if error is None:
            choice = choice_of(optimizer, ranks.world, budget)
            best = choice.refuse_if_none_fits()
            title = best.candidate.title
    except ValueError as problem:
        error = problem
    if ranks.world == 1 and error is not None:
        raise error
    agree.compare(ranks, {"the assignment that a plan chose": title}, "plans", error)
    if ranks.rank == 0:
        logger.info("%s", choice.reason)
    chosen = {"assignment": best.candidate.strategy, "chosen": choice.reason}
    return options.having({**chosen, "grad_worker_fraction": None})


def choice_of(optimizer: KFACMixin, world: int, budget: int) -> Choice:
    """Return all strategies of an optimizer on so many ranks like this one."""
    device = optimizer.device
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    profile = hardware.load(hardware.named_for(device.type, title))
    case, _ = survey(optimizer)
    priced = [price(case, x, world, profile) for x in candidates(world, case.colocate)]
    return Choice(case, profile, world, budget, priced)


def budget_of(optimizer: KFACMixin) -> int:
    """Return the bytes that weights, gradients and all states may take on this rank."""
    budget, device = optimizer._kfac_options.memory_budget, optimizer.device
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
