"""Which parameters KFACMuon takes, its states, and other ranks."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from kaisa_optim import (
    KFACAdam,
    KFACMuon,
    KFACParamScheduler,
    Layer,
    Muon,
    register_layer,
)
from tests.support.cluster import (
    Plan,
    assert_alike,
    batch,
    build,
    error,
    even,
    network,
    train_share,
)
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import assert_near, assert_same, values

EACH: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 1, "staggered": False}


def backward(model: nn.Module, name: str, step: int) -> None:
    x, y = batch(name, step, 24)
    F.cross_entropy(model(x), y).backward()


def momenta_of(opt: Any) -> dict[str, Tensor]:
    """Momenta of the layers whose gradients this rank preconditions."""
    layers = opt.preconditioner.store.applied.group_of
    return {x.name: opt.state[x.weight]["momentum_buffer"].clone() for x in layers}


def steps_of(model: nn.Module, opt: Any, steps: Any, name: str = "tokens") -> None:
    for step in steps:
        opt.zero_grad()
        backward(model, name, step)
        opt.step()


def pair(name: str = "tokens", cls: Any = KFACMuon, **options: Any) -> Any:
    model = network(name)
    common = {"lr": 0.03, "factor_update_steps": 2, "inv_update_steps": 3}
    return model, cls(model, **{**common, **options})


def test_what_is_not_covered_takes_the_bases_steps():
    """Biases, norms, tables and what a group says, AdamW's; a matrix without a layer, Muon's."""
    options = {"lr": 0.03, "weight_decay": 0.1}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.loose = network("tokens"), Loose(4, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.loose(self.body(x))

    def groups(model: Net) -> list[dict[str, Any]]:
        head = list(model.body.head.parameters())
        rest = [p for p in model.parameters() if all(p is not q for q in head)]
        return [{"params": rest}, {"params": head, "use_muon": False, "lr": 0.001}]

    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    opt = KFACMuon(groups(model), model=model, skip_layers="Loose", **options)
    assert not opt.preconditioner.uncovered  # what was skipped by name is no surprise
    base = Muon(groups(plain), **options)
    assert set(opt.preconditioner.layers) == {
        "body.attention.in_proj", "body.attention.out_proj", "body.wide", "body.narrow"
    }  # fmt: skip
    listed = repr(opt.preconditioner).split("AdamW:\n")[1]
    assert "    body.words.weight: of an embedding or a norm\n" in listed
    assert "    body.wide.bias: fewer than two dimensions\n" in listed
    assert "    body.head.weight: use_muon=False" in listed
    assert "body.wide.weight" not in listed
    table = torch.optim.AdamW([copy.deepcopy(model.body.words.weight)], **options)
    (words,) = table.param_groups[0]["params"]
    for step in range(3):
        for one, own in ((model, opt), (plain, base)):
            own.zero_grad()
            backward(one, "tokens", step)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        words.grad = model.body.words.weight.grad.clone()
        for own in (opt, base, table):
            own.step()
    covered = {id(x.weight) for x in opt.preconditioner.layers.values()}
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name == "body.words.weight":
            assert_same(p.data, words.data)
        elif id(p) in covered:
            assert not torch.allclose(p, q)
        else:
            assert_same(p.data, q.data)


def test_a_table_is_muons_where_it_is_given_to_it():
    model = network("tokens")
    rest = [p for n, p in model.named_parameters() if n != "words.weight"]
    groups = [{"params": rest}, {"params": [model.words.weight], "use_muon": True}]
    opt = KFACMuon(groups, model=model, lr=0.1)
    assert "words" in opt.preconditioner.layers
    steps_of(model, opt, range(1))
    assert "momentum_buffer" in opt.state[model.words.weight]


def test_without_statistics_it_is_muon():
    """The base steps a skipped layer by Muon's own step."""
    model, opt = pair("chain", skip_layers="middle", weight_decay=0.0)
    plain = network("chain")
    base = Muon(plain.parameters(), lr=0.03, weight_decay=0.0)
    backward(model, "chain", 0)
    backward(plain, "chain", 0)
    for own in (opt, base):
        own.step()
    for one, other in zip(model.middle, plain.middle, strict=True):
        assert_near(one.weight, other.weight)
    assert not torch.allclose(model.head.weight, plain.head.weight, atol=1e-4)


def test_settings_of_groups():
    """Layers of one shape with momenta of their own step as if each were alone with its own."""
    model = network("chain")
    slow, rest = (
        model.middle[1].weight,
        [p for p in model.parameters() if p is not model.middle[1].weight],
    )
    groups = [{"params": rest}, {"params": [slow], "momentum": 0.2, "nesterov": False, "lr": 0.1}]
    opt = KFACMuon(groups, model=model, lr=0.03, momentum=0.7, **EACH)
    twins = []
    for options in ({"momentum": 0.7, "lr": 0.03}, {"momentum": 0.2, "nesterov": False, "lr": 0.1}):
        twin = network("chain")
        twins.append((twin, KFACMuon(twin, **options, **EACH)))
    for step in range(3):
        for one, own in ((model, opt), *twins):
            one.load_state_dict(model.state_dict())
            own.zero_grad()
            backward(one, "chain", step)
        for _, own in ((model, opt), *twins):
            own.step()
        (a, _), (b, _) = twins
        for name, p in model.named_parameters():
            assert_near(p.data, (b if p is slow else a).get_parameter(name).data)


def test_damping_may_be_scheduled():
    model, opt = pair("chain", damping=lambda step: 0.1 if step < 3 else 10.0, inv_update_steps=1)
    plain, other = pair("chain", damping=0.1, inv_update_steps=1)
    for own, optimizer in ((model, opt), (plain, other)):
        steps_of(own, optimizer, range(3), "chain")
    assert_same(model, plain)
    for own, optimizer in ((model, opt), (plain, other)):
        steps_of(own, optimizer, range(3, 4), "chain")
    assert not torch.allclose(model.head.weight, plain.head.weight)
    KFACParamScheduler(other, damping=lambda epoch: 0.5).step()
    assert other.param_groups[0]["damping"] == 0.05


def test_schedules_of_the_clip_are_refused():
    _, opt = pair("chain")
    with pytest.raises(ValueError, match=r"Invalid kl_clip: .* has no use for it"):
        KFACParamScheduler(opt, kl_clip=lambda epoch: 0.5)
    with pytest.raises(ValueError, match="it has no layer that K-FAC covers"):
        pair("chain", use_muon=False)


def disk(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_state_goes_on_bit_for_bit():
    stop = 4
    model, opt = pair()
    steps_of(model, opt, range(stop))
    other, fresh = pair()
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(disk(opt.state_dict()))
    assert_same(momenta_of(fresh), momenta_of(opt))
    for own, optimizer in ((model, opt), (other, fresh)):
        steps_of(own, optimizer, range(stop, 8))
    assert_same(other, model)
    assert_same(fresh.state_dict(), opt.state_dict())


def test_a_state_of_the_plain_base_loads():
    model = network("tokens")
    plain = Muon(model.parameters(), lr=0.03)
    steps_of(model, plain, range(3))
    other, opt = pair()
    other.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="has no K-FAC factors"):
        opt.load_state_dict(disk(plain.state_dict()))
    former = dict(zip(other.parameters(), model.parameters(), strict=True))
    for layer in opt.preconditioner.layers.values():
        of_plain = plain.state[former[layer.weight]]
        assert_same(momenta_of(opt)[layer.name], of_plain["momentum_buffer"])
    before = values(other)
    steps_of(other, opt, range(3, 6))
    assert all(torch.isfinite(p).all() for p in other.parameters())
    assert all(not torch.equal(before[n], p) for n, p in other.named_parameters())


def test_a_state_of_other_moments_is_refused():
    model = network("tokens")
    adam = KFACAdam(model, lr=0.01)
    steps_of(model, adam, range(3))
    other, opt = pair()
    other.load_state_dict(model.state_dict())
    state = disk(adam.state_dict())
    state["param_groups"] = opt.state_dict()["param_groups"]
    with pytest.raises(ValueError, match="its K-FAC factors do not fit the model's layers"):
        opt.load_state_dict(state)


def test_frozen_and_unfrozen_layers():
    model, opt = pair("chain")
    steps_of(model, opt, range(2), "chain")
    model.middle[1].weight.requires_grad_(False)
    at = model.middle[1].weight.detach().clone()
    steps_of(model, opt, range(2, 4), "chain")
    assert_same(model.middle[1].weight.data, at)
    model.middle[1].weight.requires_grad_(True)
    steps_of(model, opt, range(4, 8), "chain")
    assert not torch.equal(model.middle[1].weight, at)


def test_a_layer_without_a_gradient_keeps_its_momentum():
    model, opt = pair("chain")
    steps_of(model, opt, range(3), "chain")
    before, weight = momenta_of(opt), model.middle[1].weight
    at = weight.detach().clone()
    opt.zero_grad()
    backward(model, "chain", 3)
    weight.grad = None
    opt.step()
    after = momenta_of(opt)
    for name in before:
        assert torch.equal(after[name], before[name]) is (name == "middle.1")
    assert_same(weight.data, at)


def test_roots_in_half_precision_of_narrow_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 70), nn.Tanh(), nn.Linear(70, 8))
    opt = KFACMuon(model, lr=0.01, inv_dtype=torch.bfloat16)
    for _ in range(3):
        opt.zero_grad()
        F.cross_entropy(model(torch.randn(64, 30)), torch.randint(8, (64,))).backward()
        opt.step()
    assert all(p.isfinite().all() for p in model.parameters())


# ---- which parameters are Muon's ----


def test_a_replaced_head_stays_in_its_group():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    apart = {"params": [model[2].weight], "use_muon": False}
    rest = [*model[0].parameters(), model[2].bias]
    opt = KFACMuon([{"params": rest}, apart], model=model, lr=0.01)
    gone = model[2]

    def steps() -> None:
        for _ in range(2):
            opt.zero_grad(set_to_none=False)  # the former one's gradients are zeros, and no None
            model(torch.randn(8, 5).double()).square().mean().backward()
            opt.step()

    steps()
    model[2] = nn.Linear(6, 3).double()
    opt.add_param_group({"params": list(model[2].parameters())})
    before = model[2].weight.detach().clone()
    steps()
    assert not torch.equal(before, model[2].weight)
    for p in gone.parameters():
        assert opt.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"} and opt.state[p]["step"] > 2


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(6, 20), nn.LayerNorm((4, 5))
        self.head = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x).tanh().unflatten(1, (4, 5))).flatten(1))


def test_a_norm_of_two_dimensions_is_adamws():
    torch.manual_seed(0)
    model = Norms().double()
    opt = KFACMuon(model, lr=0.01)
    F.mse_loss(model(torch.randn(9, 6).double()), torch.zeros(9, 3).double()).backward()
    opt.step()
    assert set(opt.preconditioner.layers) == {"body", "head"}
    assert "exp_avg" in opt.state[model.norm.weight]


class Words(nn.Module):
    """A model with a bag, a table tied to the head, and a table that scales gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.tied = nn.EmbeddingBag(9, 4), nn.Embedding(9, 4)
        self.scaled = nn.Embedding(9, 4, scale_grad_by_freq=True)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        mean = (self.tied(x) + self.scaled(x)).mean(1)
        return self.head(self.body(mean + self.bag(x)))


def test_tables_are_adamws_whatever_reads_them():
    torch.manual_seed(0)
    model = Words().double()
    opt = KFACMuon(model, lr=0.01)
    F.cross_entropy(model(torch.arange(12).view(4, 3) % 9), torch.arange(4)).backward()
    opt.step()
    assert set(opt.preconditioner.layers) == {"body"}
    for table in (model.bag, model.tied, model.scaled):
        assert opt.state[table.weight].keys() >= {"exp_avg"}
    assert "momentum_buffer" not in opt.state[model.tied.weight]


def of_two_groups(use_muon: bool | None) -> tuple[nn.Module, Any]:
    model = network("chain")
    names = ["middle.0.weight", "head.weight"], ["middle.1.weight"]
    groups = [{"params": [model.get_parameter(n) for n in some]} for some in names]
    groups[1]["use_muon"] = use_muon
    return model, KFACMuon(groups, model=model, lr=0.01, **EACH)


def test_a_change_of_use_muon_is_refused():
    model, opt = of_two_groups(None)
    steps_of(model, opt, range(2), "chain")
    opt.param_groups[1]["use_muon"] = False
    with pytest.raises(ValueError, match="Invalid use_muon: False of parameter group 1, which was"):
        steps_of(model, opt, range(2, 3), "chain")
    opt.param_groups[1]["use_muon"] = None
    steps_of(model, opt, range(3, 4), "chain")


def test_a_load_keeps_use_muon_as_it_was_built():
    model, opt = of_two_groups(False)
    steps_of(model, opt, range(2), "chain")
    other, fresh = of_two_groups(None)
    with pytest.warns(UserWarning) as found:
        fresh.load_state_dict(disk(opt.state_dict()))
    said = " ".join(str(w.message) for w in found)
    assert "has use_muon=False for a parameter group that was built with None, and" in said
    assert "has no K-FAC factors of this kind for 'middle.1'" in said
    steps_of(other, fresh, range(2, 4), "chain")
    assert set(fresh.preconditioner.layers) == {"middle.0", "middle.1", "head"}
    assert "exp_avg" not in fresh.state[other.middle[1].weight]


@pytest.mark.filterwarnings("ignore:the checkpoint has no K-FAC factors")
@pytest.mark.parametrize("cls", [KFACAdam, torch.optim.SGD])
def test_a_load_of_another_class_keeps_muons_own_keys(cls):
    model = network("chain")
    plain = cls(model if cls is KFACAdam else model.parameters(), lr=0.3)
    _, opt = pair("chain", momentum=0.8)
    state = plain.state_dict()
    opt.load_state_dict({**state, "state": {}})
    (group,) = opt.param_groups
    assert group["lr"] == 0.3
    assert (group["damping"], group["momentum"], group["nesterov"]) == (0.01, 0.8, True)


# ---- ranks ----


def of_two_ranks(plan: Any) -> str:
    model, opt = of_two_groups(None)
    steps_of(model, opt, range(2), "chain")
    if dist.get_rank() == 1:
        opt.param_groups[1]["use_muon"] = False
    with pytest.raises((ValueError, RuntimeError)) as error:
        steps_of(model, opt, range(2, 3), "chain")
    return str(error.value)


def test_ranks_that_differ_in_use_muon_all_raise():
    for text in run(2, of_two_ranks, None):
        assert "use_muon of parameter group 1" in text


class Spread(NamedTuple):
    parameters: dict[str, Tensor]
    momenta: dict[str, Tensor]
    memory: dict[str, int]
    expected_memory: dict[str, int]
    received: dict[str, float]


def spread(plan: Plan) -> Spread:
    model, opt = train_share(plan)
    kfac = opt.preconditioner
    memory = kfac.view.account.memory()[dist.get_rank()]
    return Spread(
        values(model), momenta_of(opt), kfac.memory_usage(), memory, kfac.communication_volume()
    )


def plan_of(world: int, name: str, where: dict[str, Any]) -> Plan:
    options = {"factor_update_steps": 1, "inv_update_steps": 2}
    return Plan(even(world, 24 // world), name, "muon", options=options, spread=where)


WHERE: dict[str, tuple[int, dict[str, Any]]] = {
    "layer-wise 2": (2, {"assignment": "layer-wise"}),
    "opt 2": (2, {"assignment": "opt"}),
    "split 4": (4, {"grad_worker_fraction": 0.5, "colocate_factors": False}),
}


@pytest.mark.parametrize(
    ("where", "name"), [("layer-wise 2", "images"), ("opt 2", "tokens"), ("split 4", "tokens")]
)
def test_ranks_take_the_steps_of_one_process(where, name):
    world, options = WHERE[where]
    plan = plan_of(world, name, options)
    model = network(name)
    opt = build(plan, model, model, staggered=world)
    steps_of(model, opt, range(plan.steps), name)
    ranks = run(world, spread, plan)
    assert_alike([rank.parameters for rank in ranks])
    # Orthogonal directions carry on what rounding makes of singular values near zero.
    assert error(ranks[0].parameters, values(model)) < 1e-7
    whole = {x for rank in ranks for x in rank.momenta}
    assert whole == set(opt.preconditioner.layers)
    for rank in ranks:
        for name_, momentum in rank.momenta.items():
            assert_near(momentum, momenta_of(opt)[name_], 1e-6, 1e-8)
        expected = {kind: size for kind, size in rank.expected_memory.items() if size}
        assert {kind: rank.memory[kind] for kind in expected} == expected
    if "opt" not in where:
        assert all(rank.momenta.keys() < whole for rank in ranks)


def consolidated() -> Any:
    model, opt = pair(assignment="layer-wise", staggered=1)
    for step in range(4):
        opt.zero_grad()
        backward(model, "tokens", step)
        opt.step()
    opt.consolidate_state_dict(to=0)
    return copy.deepcopy((model.state_dict(), opt.state_dict())) if dist.get_rank() == 0 else None


@pytest.mark.filterwarnings("ignore:state_dict")
def test_a_consolidated_state_goes_on_alone():
    state, _ = run(2, consolidated)
    model, opt = pair()
    steps_of(model, opt, range(4))
    other, fresh = pair()
    other.load_state_dict(state[0])
    fresh.load_state_dict(state[1])
    assert_near(momenta_of(fresh), momenta_of(opt), 1e-6, 1e-8)
    for own, optimizer in ((model, opt), (other, fresh)):
        steps_of(own, optimizer, range(4, 8))
    assert_near(other, model, 1e-6, 1e-8)


class Loose(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.own


class OwnLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


@register_layer(OwnLinear)
class OwnLinearLayer(Layer):
    """A kind whose rows of gradients follow the shape of the input."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.in_shape, self.outputs = (5,), 4

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        return x.reshape(1, len(x), -1, 5)

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        assert x is not None
        return grad.reshape(1, len(x), -1, 4)


def test_a_kind_of_ones_own_may_read_its_input():
    model = nn.Sequential(OwnLinear(), nn.Tanh(), nn.Linear(4, 3))
    opt = KFACMuon(model, lr=0.01)
    F.cross_entropy(model(torch.randn(8, 5)), torch.arange(8) % 3).backward()
    opt.step()
    a, g = opt.preconditioner.factors("0")
    assert (a.shape, g.shape) == ((1, 5, 5), (1, 4, 4))


class Matrices(nn.Module):
    """Two matrices of one shape that belong to no layer."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.first, self.second = Loose(rows, columns), Loose(rows, columns)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x).tanh()


def uncovered(dtype: torch.dtype, part: str, cls: Any) -> dict[str, Tensor]:
    """Train on the same batches on all ranks; return the whole parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), Matrices(6, 9), nn.Linear(9, 3)).to(dtype)
    if part == "all":
        fully_shard(model)
    elif part == "some":
        fully_shard(model[2].first)
    kfac = {"model": model, "skip_layers": "Loose", **EACH} if cls is KFACMuon else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the base optimizer updates these")
        opt = cls(model.parameters(), lr=0.05, adam_eps=1e-2, **kfac)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 5, generator=generator).to(dtype)
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


@pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")
@pytest.mark.parametrize(
    ("cls", "part", "dtype"),
    [(Muon, "some", torch.float32), (KFACMuon, "all", torch.float64)],
)
def test_sharded_matrices_of_no_layer_take_the_steps_of_whole_ones(cls, part, dtype):
    expected = uncovered(dtype, "none", cls)
    for found in run(2, uncovered, dtype, part, cls):
        assert error(found, expected) < (1e-9 if dtype == torch.float64 else 1e-3)
