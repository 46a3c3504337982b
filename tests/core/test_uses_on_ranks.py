"""Parameters covered by their use: on several ranks, in checkpoints, frozen and unfrozen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from kaisa_optim import KFACSGD, KFACAdam
from tests.core.test_ties import Tied
from tests.support import groups
from tests.support.close import assert_close
from tests.support.cluster import average, rank, share, world
from tests.support.ranks import run
from tests.support.training import EVERY_STEP, assert_near, assert_same, descend
from tests.support.watch import Body

ROWS, STEPS = 12, 4


def turned(m: nn.Module, x: Tensor) -> Tensor:
    return torch.addmm(x.new_zeros(4), x, m.weight)


class Net(nn.Module):
    """A transposed product, experts, a scale, a matrix used either way, and an unknown use."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = Body(turned, weight=torch.randn(4, 4) / 2)
        self.experts = nn.Parameter(torch.randn(3, 4, 4) / 2)
        self.scale = nn.Parameter(torch.ones(4))
        self.odd = nn.Parameter(torch.eye(2))
        self.matrix = nn.Parameter(torch.randn(4, 3) / 2)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.turned(x).tanh() * self.scale
        x = (x.unflatten(1, (2, 2)) @ self.odd.exp()).flatten(1)
        # A rank may meet one of the experts alone, and the last of them comes late.
        chosen = (x[:, 0] > 0).long() + (x[:, 1] > 1.0)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            (at,) = torch.where(chosen == expert)
            out = out.index_add(0, at, F.linear(x[at], self.experts[expert]))
        return self.head((x + out) @ self.matrix)


def made() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x, y = (torch.randn(ROWS, k, generator=generator, dtype=torch.float64) for k in (4, 3))
    return x, y


def learn(model: nn.Module, opt: Any, i: int) -> None:
    x, y = share(*batch(i))
    descend(opt, F.mse_loss(model(x), y))


def optimizer(cls: Any, model: nn.Module, **options: Any) -> Any:
    intervals = {name: EVERY_STEP[name] for name in ("factor_update_steps", "inv_update_steps")}
    return cls(model, lr=0.01, **{**intervals, **options})


def trained(cls: Any, options: dict[str, Any]) -> list[Tensor]:
    net = made()
    model = DDP(net, find_unused_parameters=True) if world() > 1 else net
    opt = optimizer(cls, model, **options)
    for i in range(STEPS):
        learn(model, opt, i)
    report = opt.preconditioner.coverage()
    assert list(report.left) == ["scale", "odd"] and report.total - report.covered == 8
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
@pytest.mark.parametrize("assignment", ["layer-wise", "opt"])
def test_ranks_take_the_steps_of_one_process(cls, assignment):
    alone = trained(cls, {})
    results = run(2, trained, cls, {"assignment": assignment})
    assert_same(*results)
    assert_near(results[0], alone, 1e-8, 1e-10)


def tied(same: bool, options: dict[str, Any], joined: int = 1) -> list[Tensor]:
    """Ranks see the same words, and so what one process sees, or words of their own.

    One process may see the words of ``joined`` ranks.
    """
    torch.manual_seed(0)
    net = Tied(bias=True).double()
    model = DDP(net) if world() > 1 else net
    if options.get("compute_method") == "eigen":
        options = {**options, "loss_terms": 20.0 if same else "positions"}
    opt = optimizer(KFACSGD, model, **options)
    for i in range(STEPS):
        seeds = [i] if same else [2 * i + rank() + j for j in range(joined)]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        x = torch.cat([torch.randint(0, 7, (4, 5), generator=one) for one in generators])
        descend(opt, F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten()))
    assert list(opt.preconditioner.coverage().left) == ["head.bias"]
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(
    "options", [{"compute_method": "eigen"}, {"assignment": "opt", "colocate_factors": False}]
)
def test_a_tied_weight_on_two_ranks(same, options):
    results = run(2, tied, same, options)
    assert_same(*results)
    alone = tied(same, options, joined=2)
    assert_near(results[0], alone, 1e-9, 1e-11)


def with_stored_inputs() -> nn.Module:
    """Return places, a matrix and experts stored ``[inputs, outputs]``, and a tied decoder."""

    def use(m: nn.Module, x: Tensor) -> Tensor:
        hidden = ((x + m.places) @ m.matrix).tanh().flatten(0, 1)
        out = torch.zeros_like(hidden)
        for expert in range(3):
            (at,) = torch.where((hidden[:, 0] > 0) + 2 * (hidden[:, 1] > 1.5) == expert)
            out = out.index_add(0, at, hidden[at] @ m.experts[expert])
        return F.linear(m.coder(out).tanh(), m.coder.weight.T)

    sizes = {"places": (3, 4), "matrix": (4, 5), "experts": (3, 5, 5)}
    parameters = {name: torch.randn(size) / 2 for name, size in sizes.items()}
    return Body(use, **parameters, coder=nn.Linear(5, 6))


def stored(sizes: list[int], options: dict[str, Any]) -> dict[tuple[str, int], Tensor]:
    """Return this rank's factors after a step in which ranks have batches of these sizes."""
    torch.manual_seed(0)
    net, x = with_stored_inputs().double(), torch.randn(12, 3, 4, dtype=torch.float64)
    opt = optimizer(KFACSGD, net, **options)
    net(x.split(sizes)[rank()]).square().mean().backward()
    if len(sizes) > 1:
        average(net.parameters())
    opt.step()
    return {key: average.clone() for key, average in groups.averages(opt).items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"assignment": "opt", "colocate_factors": False},
        {"compute_method": "eigen", "max_factor_size": 4},
    ],
)
def test_ranks_with_unequal_batches_have_the_factors_of_the_joined_batch(options):
    alone, found = stored([12], options), {}
    for part in run(2, stored, [9, 3], options):
        found |= part
    assert found.keys() == alone.keys() and len(found) == 8
    for key, factor in alone.items():
        assert_close(found[key], factor, 1e-9, str(key))


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(cls, tmp_path):
    net = made()
    opt = optimizer(cls, net, factor_update_steps=2, inv_update_steps=2)
    for i in range(3):
        learn(net, opt, i)
    torch.save({"model": net.state_dict(), "opt": opt.state_dict()}, tmp_path / "run")
    other = made()
    again = optimizer(cls, other, factor_update_steps=2, inv_update_steps=2)
    loaded = torch.load(tmp_path / "run", weights_only=True)
    other.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["opt"])
    usage = opt.preconditioner.memory_usage()["total"], again.preconditioner.memory_usage()["total"]
    assert usage[0] == usage[1]
    for i in range(3, 7):
        learn(net, opt, i)
        learn(other, again, i)
    assert_same(list(net.parameters()), list(other.parameters()))


class Around(nn.Module):
    """Uses a layer's weight beside its calls, or without any, as a fused block does."""

    def __init__(self, calls: bool = False) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).tanh() if self.calls else x
        return self.head(F.linear(x, self.inner.weight, self.inner.bias).tanh())


def around() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Around()).double()
    return model, optimizer(KFACSGD, model)


@pytest.mark.parametrize("way", ["checkpoint", "copy", "frozen before"])
def test_a_use_found_around_its_module_is_found_again_in_a_resumed_run(way):
    model, opt = around()
    for i in range(3):
        if way == "frozen before":
            model[0].inner.requires_grad_(i != 1)
        learn(model, opt, i)
    if way == "copy":
        other, again = copy.deepcopy((model, opt))
    else:
        other, again = around()
        other.load_state_dict(model.state_dict())
        again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for i in range(3, 7):
        learn(model, opt, i)
        learn(other, again, i)
        assert not again.preconditioner.registry.states["0.inner"].missed
    assert_same(list(model.parameters()), list(other.parameters()))
