"""The compiled plan: what makes it anew, and the momenta that lie in its stacks."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kaisa_optim import KFACSGD, KFACAdam, with_kfac
from kaisa_optim.comm.sharding import is_sharded, local
from tests.support.ranks import run
from tests.support.training import assert_near, assert_same

ALWAYS: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 1}


class Net(nn.Module):
    """Weights in several layouts: a convolution, channels last or not, and rows of two shapes."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3)
        self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)
        self.double().to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.conv(x).flatten(2).mean(1)).tanh()))


def learn(
    model: nn.Module, opt: Any, step: int, batches: int = 1, leaves: Sequence[Tensor] = ()
) -> None:
    """Take a step, in which ``leaves`` have no gradient."""
    generator = torch.Generator().manual_seed(step)
    opt.zero_grad()
    for _ in range(batches):
        x = torch.randn(6, 2, 6, 6, generator=generator, dtype=torch.float64)
        model(x).square().mean().backward()
    for p in leaves:
        p.grad = None
    opt.step()


def test_what_compiles_anew():
    model = Net()
    opt = KFACAdam(model, lr=0.01, damping=lambda step: 0.01 / (1 + step), weight_decay=0.01)
    cycle = torch.optim.lr_scheduler.OneCycleLR(opt, 0.01, total_steps=500)
    groups, taken = opt.preconditioner.groups, iter(range(500))

    def compiles(steps: int, batches: int = 1) -> int:
        before = groups.compilations
        for _ in range(steps):
            learn(model, opt, next(taken), batches)
            cycle.step()
        return groups.compilations - before

    assert compiles(1) == 1  # the first states
    assert compiles(30) == 0  # rates, betas and dampings move; gathering and refreshes
    assert compiles(4, batches=2) == 0
    opt.preconditioner.factor_update_steps = 4
    assert compiles(10) == 0
    frozen = model.body[1].weight.requires_grad_(False)  # a step that gathers looks at flags
    assert compiles(10) == 1
    frozen.requires_grad_(True)
    assert 1 <= compiles(20) <= 2  # its flag, and its first state
    former, model.head = model.head, nn.Linear(16, 3).double()
    opt.param_groups[0]["params"][-2:] = []
    for p in former.parameters():
        del opt.state[p]
    opt.add_param_group({"params": list(model.head.parameters())})
    cycle = torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 1.0)
    assert 1 <= compiles(20) <= 2
    assert former.weight not in groups.plan.index and model.head.weight in groups.plan.index
    assert compiles(20) == 0
    model.to(memory_format=torch.channels_last)
    assert compiles(5) == 1
    opt.load_state_dict(opt.state_dict())
    assert compiles(5) == 1


def test_a_momentum_of_another_kind_is_another_way():
    model = Net()
    opt = KFACSGD(model, lr=0.01, momentum=0.9, **ALWAYS)
    groups, seen = opt.preconditioner.groups, []
    for step, momentum in enumerate([0.9, 0.8, 0.7, 0.0, 0.0, 0.9]):
        opt.param_groups[0]["momentum"] = momentum
        learn(model, opt, step)
        seen.append(groups.compilations)
        assert ("momentum_buffer" in opt.state[model.head.weight]) == (momentum != 0)
    assert seen == [1, 1, 1, 2, 2, 3]


def test_a_step_that_a_scaler_skips_compiles_nothing():
    model = Net().float()
    opt = KFACAdam(model, lr=0.01, **ALWAYS)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        opt.zero_grad()
        loss = model(torch.randn(6, 2, 6, 6)).square().mean()
        scaler.scale(loss * (float("inf") if step == 3 else 1)).backward()
        scaler.step(opt)
        scaler.update()
    assert opt.preconditioner.steps == 5 and opt.preconditioner.groups.compilations == 1


@pytest.mark.parametrize("how", ["entry", "tensor", "state", "cleared"])
@pytest.mark.parametrize(("cls", "key"), [(KFACSGD, "momentum_buffer"), (KFACAdam, "exp_avg")])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_entries_that_a_user_replaced(how, cls, key, layout):
    """What is in the entries counts, and comes back into the stacks."""
    options = {"momentum": 0.9} if cls is KFACSGD else {}
    pairs = []
    for replaced in (True, False):
        model = Net(layout)
        opt = cls(model, lr=0.01, **options, **ALWAYS)
        for step in range(3):
            learn(model, opt, step)
        weights = [model.conv.weight, model.body[1].weight]
        for p in weights:
            entry = opt.state[p]
            assert entry[key].stride() == p.stride()
            if replaced and how in ("entry", "state"):
                opt.state[p] = {**entry, key: entry[key].clone().mul_(2)}
            elif replaced and how == "tensor":
                entry[key] = entry[key] * 2
            elif how == "cleared":
                # A momentum that is away begins at zero.
                entry.pop(key) if replaced else entry[key].zero_()
            else:
                entry[key].mul_(2)
        if replaced and how == "state":
            opt.state = defaultdict(dict, opt.state)
        for step in range(3, 6):
            learn(model, opt, step)
        pairs.append((model, [opt.state[p][key].clone() for p in model.parameters()]))
    (one, momenta), (other, expected) = pairs
    if how == "cleared" and cls is KFACSGD:  # SGD's first momentum is the gradient as it is
        assert_near(momenta, expected, 1e-9, 1e-12)
    else:
        assert_same(momenta, expected)
        assert_same(one, other)


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_pickle_has_each_number_once(cls):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    opt = cls(model, lr=0.01, **({"momentum": 0.9} if cls is KFACSGD else {}))
    model(torch.randn(8, 64)).square().mean().backward()
    opt.step()
    tensors = [x for entry in opt.state.values() for x in entry.values() if torch.is_tensor(x)]
    state = sum(x.nbytes for x in tensors)
    assert len(pickle.dumps(opt)) - len(pickle.dumps(model)) <= 1.1 * state
    copied = pickle.loads(pickle.dumps(opt))
    assert_same(copied.state_dict()["state"], opt.state_dict()["state"])


def rests(cls: Any, options: dict[str, Any], shards: bool) -> int:
    """Take a step in which two parameters have no gradient; return how many momenta are here."""
    model = Net()
    if shards:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    opt = with_kfac(cls)(model, lr=0.01, weight_decay=0.01, **options)
    learn(model, opt, 0)
    learn(model, opt, 1)
    resting = [model.body[1].weight, model.body[1].bias, model.norm.weight]

    def held() -> list[Tensor]:
        entries = [{k: v for k, v in opt.state[p].items() if k in KEYS} for p in resting]
        tensors = [*resting, *(v for entry in entries for v in entry.values())]
        return [local(x).clone() if is_sharded(x) else x.clone() for x in tensors]

    before = held()
    learn(model, opt, 2, leaves=resting)
    assert_same(held(), before)
    return len(before)


MOMENTA = "momentum_buffer", "exp_avg", "kfac-momentum"
KEYS = (*MOMENTA, "exp_avg_sq", "square_avg", "step", "kfac_square_sum")
SPREADS: dict[str, dict[str, Any]] = {
    "local": {"assignment": "opt"},
    "rows": {"assignment": "layer-wise"},
    "shards": {},
}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    ("cls", "options", "count"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, 6),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, 6),
        (torch.optim.Adam, {}, 11),
        (torch.optim.RMSprop, {}, 11),
    ],
    ids=["SGD", "nesterov", "Adam", "RMSprop"],
)
def test_a_parameter_without_a_gradient_keeps_all_bits(cls, options, count, spread):
    """Weight, momentum, second moment and count; one rank has the layer's momenta, or both."""
    found = run(2, rests, cls, {**options, **SPREADS[spread]}, spread == "shards")
    assert max(found) == count


def pair(cls: Any = KFACAdam, **options: Any) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    return model, cls(model, lr=0.01, **{**ALWAYS, **options})


def fit(model: nn.Module, opt: Any, *, leaves: tuple[Tensor, ...] = ()) -> None:
    opt.zero_grad()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (model(x) - 1).square().mean().backward()
    for p in leaves:
        p.grad = None
    opt.step()


def test_rows_that_change_places_are_read_before_they_are_written():
    model, opt = pair()
    fit(model, opt)
    both = model[0].weight, model[2].weight
    one, other = (opt.state[p] for p in both)
    expected = [x["exp_avg"].clone() for x in (other, one)]
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]
    fit(model, opt, leaves=tuple(model.parameters()))
    assert_same([opt.state[p]["exp_avg"] for p in both], expected)


def test_a_count_that_a_user_sets_goes_on():
    model, opt = pair()
    fit(model, opt)
    entry = opt.state[model[0].weight]
    del entry["step"]
    entry["step"] = torch.tensor(100.0)  # perhaps where the former one lay
    fit(model, opt)
    fit(model, opt)
    assert entry["step"] == 102 and opt.state[model[2].weight]["step"] == 3


@pytest.mark.filterwarnings("ignore:the checkpoint has no K-FAC factors")
@pytest.mark.parametrize("how", ["goes on", "pickled", "loaded"])
def test_a_first_momentum_is_the_gradient_whenever_it_comes(how):
    """With dampening, as in torch; until then there is no entry."""
    model, opt = pair(KFACSGD, momentum=0.9, dampening=0.5)
    late = model[0].weight
    for _ in range(3):
        fit(model, opt, leaves=(late,))
    assert "momentum_buffer" not in opt.state.get(late, {})
    if how == "pickled":
        model, opt = pickle.loads(pickle.dumps((model, opt)))
    elif how == "loaded":
        opt.load_state_dict(opt.state_dict())
    late = model[0].weight
    fit(model, opt)
    assert_near(opt.state[late]["momentum_buffer"], late.grad, 1e-12)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_layer_that_begins_anew_goes_on_from_a_checkpoint():
    """Its first statistics were not finite: the base steps it until it gathers again."""
    model, opt = pair(factor_update_steps=10, inv_update_steps=10)
    used = [model[0], model[2]]
    for step in range(29):
        opt.zero_grad()
        x = torch.ones(8, 6, dtype=torch.float64)
        late = step == 20 or step > 25
        loss = (used[0](used[1](x) if late else x) - 1).square().mean()
        (loss * (float("nan") if step == 20 else 1)).backward()
        for p in model.parameters() if step == 20 else ():
            p.grad = torch.full_like(p, 1e-3)
        opt.step()
    other, copied = pair(factor_update_steps=10, inv_update_steps=10)
    other.load_state_dict(model.state_dict())
    copied.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict())))
    for _ in range(4):
        fit(model, opt)
        fit(other, copied)
        assert_same(other, model)
