"""Ranks that run out of data before others do: ``Join([ddp, optimizer])``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as DDP

from kaisa_optim import KFACSGD, KFACAdam, KFACMuon, KFACParamScheduler
from tests.support.ranks import run
from tests.support.training import assert_near, assert_same

ROWS = 3  # of a batch on one rank
INTERVALS = {"factor_update_steps": 2, "inv_update_steps": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "polar": INTERVALS,
    "eigen": {"compute_method": "eigen", "kl_clip": 1e-2, **INTERVALS},
}
FAMILY: dict[type[Any], dict[str, Any]] = {
    KFACSGD: {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    KFACAdam: {"lr": 0.01, "eps": 1e-2},
    KFACMuon: {"lr": 0.02, "adam_eps": 1e-2},
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def batch(i: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + i)
    x, y = (torch.randn(ROWS, k, generator=generator, dtype=torch.float64) for k in (4, 3))
    return x, y


def loss_of(model: nn.Module, i: int, ranks: Sequence[int]) -> Tensor:
    x, y = (torch.cat(parts) for parts in zip(*(batch(i, r) for r in ranks), strict=True))
    return F.mse_loss(model(x), y)


def scheduled(opt: Any) -> list[Any]:
    """Return schedulers, which only ranks with data step, after each of their steps."""
    lr = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    settings = {"damping": 0.9, "kl_clip": 0.7, "inv_update_steps": 0.5}
    if opt.preconditioner.options.compute_method == "polar":  # has no such clip
        del settings["kl_clip"]
    own = {name: lambda epoch, by=by: by**epoch for name, by in settings.items()}
    return [lr, KFACParamScheduler(opt, **own)]


class Recorder:
    """Records the state after each step, since DDP alone makes the last weights alike."""

    def __init__(self, model: nn.Module, opt: Any) -> None:
        self.model, self.opt = model, opt
        self.steps: list[list[Any]] = []
        opt.register_step_post_hook(lambda *_: self.steps.append(self.now()))

    def now(self) -> list[Any]:
        parameters = list(self.model.parameters())
        kept = ("momentum_buffer", "exp_avg", "exp_avg_sq", "kfac_square_sum")
        states = [self.opt.state[p].get(key) for p in parameters for key in kept]
        groups = [{k: g[k] for k in ("lr", "damping")} for g in self.opt.param_groups]
        kfac = self.opt.preconditioner
        return [
            [p.detach().clone() for p in parameters],
            [None if s is None else s.clone() for s in states],
            groups,
            [kfac.kl_clip, kfac.inv_update_steps, kfac.steps],
        ]


def train(
    batches: list[list[int]],
    cls: type[Any],
    method: str,
    schedule: bool,
    spread: dict[str, Any],
    **join: Any,
) -> list[list[Any]]:
    """Train under Join; ``batches`` are the counts of all ranks, epoch by epoch."""
    rank = dist.get_rank()
    model = DDP(net())
    opt = cls(model, **FAMILY[cls], **OPTIONS[method], **spread)
    schedulers = scheduled(opt) if schedule else []
    recorder = Recorder(model, opt)
    for epoch, counts in enumerate(batches):
        with Join([model, opt], **join):
            for i in range(counts[rank]):
                opt.zero_grad()
                loss_of(model, 10 * epoch + i, [rank]).backward()
                opt.step()
                for scheduler in schedulers:
                    scheduler.step()
            mine = gradients(model)
        assert_same(gradients(model), mine)
        recorder.steps.append([p.detach().clone() for p in model.parameters()])
    return recorder.steps


def alike(results: Sequence[Any]) -> Any:
    """Compare the ranks' recordings bit for bit; return one with the momenta of all ranks.

    Ranks that receive directions have no momenta of them.
    """
    kept = [x for x in results if x is not None]
    if not kept or not isinstance(kept[0], list):
        assert_same(kept, kept[:1] * len(kept))
        return kept[0] if kept else None
    return [alike(parts) for parts in zip(*kept, strict=True)]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def train_alone(
    batches: list[list[int]],
    cls: type[Any],
    method: str,
    schedule: bool,
    initial: bool,
    ranks: int = 0,
) -> list[list[Any]]:
    """Train one process on the joined batch of the ranks that have data.

    Where DDP divides by all ranks, a rank without data counts as zero in the gradient, but not in
    the factors.
    """
    model = net()
    turns = {"staggered": ranks or len(batches[0])}
    opt = cls(model, **FAMILY[cls], **OPTIONS[method], **turns)
    schedulers = scheduled(opt) if schedule else []
    recorder = Recorder(model, opt)
    for epoch, counts in enumerate(batches):
        for i in range(max(counts)):
            active = [r for r, count in enumerate(counts) if i < count]
            opt.zero_grad()
            loss_of(model, 10 * epoch + i, active).backward()
            for p in model.parameters():
                p.grad *= len(active) / len(counts) if initial else 1
            opt.step()
            for scheduler in schedulers:
                scheduler.step()
        recorder.steps.append([p.detach().clone() for p in model.parameters()])
    return recorder.steps


COUNTS = {2: [[5, 2]], 4: [[3, 0, 6, 1]]}
SPREADS: list[tuple[int, dict[str, Any]]] = [
    (2, {"assignment": "opt"}),
    (2, {"assignment": "layer-wise"}),
    (4, {"grad_worker_fraction": 0.5}),
    (4, {"assignment": "layer-wise"}),
]


@pytest.mark.parametrize(
    ("cls", "method", "world", "spread"),
    [
        *((KFACSGD, "eigen", *where) for where in SPREADS),
        (KFACSGD, "polar", *SPREADS[0]),
        (KFACSGD, "polar", *SPREADS[3]),
        (KFACAdam, "polar", *SPREADS[0]),
        (KFACAdam, "polar", *SPREADS[2]),
        (KFACAdam, "eigen", *SPREADS[2]),
        (KFACMuon, "polar", *SPREADS[1]),
    ],
)
def test_ranks_without_data_take_the_steps_of_the_others(world, spread, cls, method):
    results = run(world, train, COUNTS[world], cls, method, False, spread)
    found = alike(results)
    assert_near(found, train_alone(COUNTS[world], cls, method, False, True), 1e-9, 1e-11)


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize(("world", "spread"), SPREADS[2:3])
def test_ranks_without_data_follow_the_schedules_of_the_others(world, spread, method):
    results = run(world, train, COUNTS[world], KFACSGD, method, True, spread)
    found = alike(results)
    expected = train_alone(COUNTS[world], KFACSGD, method, True, True)
    assert_near(found, expected, 1e-9, 1e-11)
    lrs = [step[2][0]["lr"] for step in expected[:-1]]
    assert lrs[-1] == pytest.approx(0.1 * 0.8 ** (len(lrs) - 1))  # they did change


@pytest.mark.parametrize(("world", "spread"), SPREADS[2:3])
def test_a_mean_over_the_ranks_with_data(world, spread):
    join = {"divide_by_initial_world_size": False}
    results = run(world, train_joined, COUNTS[world], spread, join)
    found = alike(results)
    expected = train_alone(COUNTS[world], KFACSGD, "polar", False, False)
    assert_near(found, expected, 1e-9, 1e-11)


def train_joined(
    batches: list[list[int]], spread: dict[str, Any], join: dict[str, Any]
) -> list[list[Any]]:
    return train(batches, KFACSGD, "polar", False, spread, **join)


def test_epochs_that_end_on_another_rank_each():
    """What the ranks without data learned is what they go on with."""
    epochs = [[1, 4], [3, 2], [2, 2], [0, 1]]
    results = run(2, train, epochs, KFACAdam, "polar", False, {"assignment": "layer-wise"})
    found = alike(results)
    assert_near(found, train_alone(epochs, KFACAdam, "polar", False, True), 1e-9, 1e-11)


def ends_early(counts: list[int]) -> tuple[str, int, list[Tensor]]:
    model = DDP(net())
    opt = KFACSGD(model, lr=0.1, **INTERVALS)
    with pytest.raises(RuntimeError) as caught:
        learn_joined(model, opt, counts, throw_on_early_termination=True)
    return str(caught.value), opt.preconditioner.steps, [p.detach() for p in model.parameters()]


def learn_joined(model: nn.Module, opt: Any, counts: list[int], **join: Any) -> None:
    with Join([model, opt], **join):
        learn(model, opt, counts)


def learn(model: nn.Module, opt: Any, counts: list[int]) -> None:
    rank = dist.get_rank()
    for i in range(counts[rank]):
        opt.zero_grad()
        loss_of(model, i, [rank]).backward()
        opt.step()


def test_all_ranks_may_end_with_the_first():
    texts, steps, weights = zip(*run(2, ends_early, [4, 2]), strict=True)
    assert texts[1] == "Rank 1 exhausted all inputs."
    assert "exhausted" in texts[0]
    assert steps == (2, 2)
    assert_same(weights[0], weights[1])


# ---- other wrappers, and none ----


class Averaging(Joinable):
    """A user's own wrapper of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = list(model.parameters())

    def average(self) -> None:
        Join.notify_join_context(self)
        for p in self.parameters:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Zeros(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class _Zeros(JoinHook):
    def __init__(self, averaging: Averaging) -> None:
        self.averaging = averaging

    def main_hook(self) -> None:
        for p in self.averaging.parameters:
            dist.all_reduce(torch.zeros_like(p))


def with_own_wrapper(counts: list[int], spread: dict[str, Any]) -> list[list[Any]]:
    rank = dist.get_rank()
    model = net()
    averaging = Averaging(model)
    opt = KFACSGD(model, **FAMILY[KFACSGD], **INTERVALS, **spread)
    recorder = Recorder(model, opt)
    with Join([averaging, opt]):
        for i in range(counts[rank]):
            opt.zero_grad()
            loss_of(model, i, [rank]).backward()
            averaging.average()
            opt.step()
    return recorder.steps


@pytest.mark.parametrize(("world", "spread"), SPREADS[2:3])
def test_a_users_own_wrapper(world, spread):
    results = run(world, with_own_wrapper, *COUNTS[world], spread)
    found = alike(results)
    expected = train_alone(COUNTS[world], KFACSGD, "polar", False, True)[:-1]
    assert_near(found, expected, 1e-9, 1e-11)


def without_wrapper(spread: dict[str, Any]) -> list[Tensor]:
    """One rank has all the data, and nobody averages."""
    model = net()
    opt = KFACSGD(model, **FAMILY[KFACSGD], **INTERVALS, **spread)
    with Join([opt]):
        learn(model, opt, [5, 0])
    return [p.detach() for p in model.parameters()]


def test_the_optimizer_alone_in_the_join():
    spread = {"assignment": "layer-wise"}
    results = run(2, without_wrapper, spread)
    assert_same(results[1], results[0])
    assert_near(results[0], train_alone([[5]], KFACSGD, "polar", False, True, 2)[-1], 1e-9, 1e-11)


def joined_without_optimizer(earlier: bool) -> tuple[str, int]:
    model = DDP(net())
    if earlier:
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            learn(model, plain, [2, 1])
    opt = KFACSGD(model, lr=0.1, **INTERVALS)
    learn(model, opt, [1, 1])
    text = ""
    try:
        with model.join():
            learn(model, opt, [3, 1])
    except RuntimeError as error:
        text = str(error)
    return text, opt.preconditioner.steps


@pytest.mark.parametrize("earlier", [False, True])
def test_a_join_of_the_model_alone_names_the_remedy(earlier):
    for text, steps in run(2, joined_without_optimizer, earlier):
        assert "use torch.distributed.algorithms.Join([model, optimizer])" in text
        assert steps == 1
