"""The factors' tensors on a rank: what they take, and that they outlive a move of the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kaisa_optim import KFACSGD
from tests.curvature.test_refresh import ALWAYS
from tests.support.training import assert_same, difference, factors, network, train, values
from tests.support.watch import Body


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_a_model_moved_to_another_dtype_keeps_its_factors(dtype, kept):
    model = network(dtype=torch.float32)
    opt = KFACSGD(model, lr=0.1, momentum=0.9, factor_update_steps=2, staggered=False)
    train(model, opt, range(3))
    former = {name: [f.to(kept) for f in fs] for name, fs in factors(opt).items()}
    model.to(dtype)
    before = values(model)
    train(model, opt, [3])  # not due for factors
    assert_same({name: list(fs) for name, fs in factors(opt).items()}, former)
    assert all(change.abs().max() > 0 for change in difference(before, model).values())
    train(model, opt, range(4, 6))
    assert all(p.isfinite().all() for p in model.parameters())


ZOO_SLOTS = {  # layer: blocks, a (True where diagonal), g
    "words": (1, (11, True), 4),
    "conv": (2, (2 * 3 + 1, False), 3),
    "head": (1, (7, False), 3),
}


@pytest.mark.parametrize("method", ALWAYS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_memory_usage_adds_up_to_the_byte(method, dtype):
    conv = nn.Conv1d(4, 6, 3, groups=2, padding=1)
    parts = {"words": nn.Embedding(11, 4), "conv": conv, "head": nn.Linear(6, 3)}
    model = Body(lambda m, x: m.head(m.conv(m.words(x).mT).mean(2)), **parts)
    opt = KFACSGD(model, lr=0.1, inv_dtype=dtype, **ALWAYS[method])
    kfac = opt.preconditioner

    def pass_backward() -> None:
        x = torch.randint(11, (5, 6), generator=torch.Generator().manual_seed(0))
        F.cross_entropy(model(x), torch.arange(5) % 3).backward()

    pass_backward()
    size, full = (4 if dtype is None else 2), 4
    a_of = {name: n if diagonal else n * n for name, (_, (n, diagonal), _) in ZOO_SLOTS.items()}
    in_average = sum(b * (a_of[name] + g * g) for name, (b, _, g) in ZOO_SLOTS.items())
    assert kfac.memory_usage()["pending"] == in_average * full
    opt.step()
    usage = kfac.memory_usage()
    assert usage["pending"] == 0
    slots = sum(2 * b for b, _, _ in ZOO_SLOTS.values())
    wanted = {"factors": in_average * full, "counters": slots * (full + 2 * 4)}
    if method == "polar" or "inverse" in method:
        wanted["roots" if method == "polar" else "inverses"] = in_average * size
    else:
        wanted["eigenvectors"] = (in_average - 11) * size
        wanted["eigenvalues"] = sum(b * (a + g) for b, (a, _), g in ZOO_SLOTS.values()) * full
    if method == "outer product":
        wanted["eigenvalue_products"] = sum(b * a * g for b, (a, _), g in ZOO_SLOTS.values()) * size
    assert usage == {**wanted, "total": sum(wanted.values()), "pending": 0}
    # What the optimizer holds, each storage once; the counts beside it are of the checkpoint's.
    held: dict[int, int] = {}
    for entry in opt.state.values():
        for key, tensor in entry.items():
            if key.startswith("kfac") and not key.endswith(("step", "status")):
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert sum(held.values()) == usage["total"]
