"""Bytes travel in buckets; every rank carries an equal part, whoever owns the items."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from kaisa_optim import KFACSGD
from tests.support.ranks import run
from tests.support.training import ANEW, descend, early

WIDTH = 64
FACTOR = WIDTH * (WIDTH + 1) // 2 * 4  # bytes of a packed triangle


def bytes_sent(layers: int, step: int, cap: float, options: dict[str, Any]) -> list[int]:
    """Return the bytes that leave this rank in each call of one step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    options = {"assignment": "opt", "staggered": False, "bucket_cap_mb": cap / 2**20, **options}
    with early():
        opt = KFACSGD(model, lr=0.1, **options)
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def noted(output: Any, input: Any, sizes_in: Any, sizes_out: list[int], **how: Any) -> Any:
        sent.append((sum(sizes_out) - sizes_out[dist.get_rank()]) * input.element_size())
        return exchange(output, input, sizes_in, sizes_out, **how)

    for _ in range(step + 1):
        sent.clear()
        with mock.patch.object(dist, "all_to_all_single", noted):
            descend(opt, model(torch.randn(8, WIDTH)).square().mean())
    return sent


def test_every_rank_carries_a_quarter_of_what_one_of_four_owns():
    """The sums of a layer on their way to its owner, and the state on its way back."""
    calls = run(4, bytes_sent, 1, 0, 4 * FACTOR, {"colocate_factors": True})
    assert [len(sent) for sent in calls] == [4] * 4
    assert max(max(sent) for sent in calls) <= 3 / 4 * 2 * FACTOR


def test_sums_for_several_owners_travel_together():
    """Eight factors in buckets of their own, whose owners take turns: two calls for the owners.

    To one owner no more travels at once than a bucket.
    """
    quiet = {**ANEW, "inv_update_steps": 100}
    calls = run(4, bytes_sent, 4, 1, FACTOR + 1, quiet)
    assert [len(sent) for sent in calls] == [8 + 2] * 4
