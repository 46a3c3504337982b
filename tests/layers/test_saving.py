"""The hooks that pack saved tensors, as a tap finds them."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from kaisa_optim.layers import saving

pytestmark = pytest.mark.skipif(saving.pack_hook() == saving.UNKNOWN, reason="torch does not tell")


def test_the_innermost_hooks_are_told():
    outer, inner = (lambda x: x), (lambda x: x)
    assert saving.pack_hook() is None and saving.saving_hooks() is None
    with saved_tensors_hooks(outer, outer):
        with saved_tensors_hooks(inner, inner):
            assert saving.pack_hook() is inner and saving.saving_hooks() == __name__
        assert saving.pack_hook() is outer
    assert saving.pack_hook() is None


def test_a_checkpoint_is_told_by_its_module():
    def seen(x: torch.Tensor) -> torch.Tensor:
        modules.append(saving.saving_hooks())
        return x.sin()

    modules: list[str | None] = []
    checkpoint(seen, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert modules == [checkpoint.__module__]
