"""Parameters that ``fully_shard`` spreads over the ranks: FSDP2, HSDP, and models in parts."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from kaisa_optim import KFACSGD, LAMB
from kaisa_optim.lamb import global_norm
from tests.core.test_uses_on_ranks import Around
from tests.support.cluster import OPTIMIZERS, assert_alike, average, error, kept, share, taken_by
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import assert_same, descend, recorded_warnings, warnings_as
from tests.support.watch import Body

pytestmark = [
    pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7"),
]

WORDS = 11
ROWS = 8  # of a batch, over all ranks
STEPS = 6
INTERVALS = {"factor_update_steps": 2, "inv_update_steps": 3, "kl_clip": 1e-3}
EIGEN = {"compute_method": "eigen"}


class Net(nn.Module):
    """One layer of each kind that can be sharded; over four ranks, some shards are empty.

    With ``groups``, shards of the convolution's weight have parts of several blocks.
    """

    def __init__(self, channels: int = 5, groups: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.image = nn.Conv2d(4, channels, 2, groups=groups)
        self.body = nn.Sequential(nn.Linear(channels, 6), nn.Tanh(), nn.Linear(6, 6))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).mT.unflatten(2, (3, 3))
        x = self.image(x).tanh().mean((2, 3))
        return self.head(self.norm(self.body(x)))


# ---- parts of a model that are sharded ----


def whole(model: nn.Module) -> list[nn.Module]:
    return [model]


def each(model: nn.Module) -> list[nn.Module]:
    return [model.words, model.image, *model.body[::2], model.head, model]


def some(model: nn.Module) -> list[nn.Module]:
    """The rest stays whole on every rank."""
    return [model.image, model.body]


@functools.lru_cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("copies", "shards")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@dataclass(frozen=True)
class Plan:
    mesh: tuple[int, ...] = (2,)
    parts: Any = each
    optimizer: str = "sgd"
    options: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)  # fully_shard's arguments
    micro: int = 1  # batches before a step
    sync: bool = True  # whether gradients are reduced in each of them

    @property
    def world(self) -> int:
        return torch.Size(self.mesh).numel()


class Trained(NamedTuple):
    parameters: dict[str, Tensor]
    factors: dict[tuple[str, str], Tensor]
    owners: dict[tuple[str, str], int]
    memory: dict[str, int]


def net(dtype: torch.dtype = torch.float64, **sizes: int) -> Net:
    torch.manual_seed(0)
    return Net(**sizes).to(dtype)


def sharded(plan: Plan, dtype: torch.dtype = torch.float64, **sizes: int) -> Net:
    model = net(dtype, **sizes)
    for part in plan.parts(model):
        fully_shard(part, mesh=mesh_of(plan.mesh), **plan.shard)
    return model


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    tokens = torch.randint(WORDS, (ROWS, 9), generator=generator)
    return tokens, torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)


def optimizer(plan: Plan, model: nn.Module, **options: Any) -> Any:
    cls, base = OPTIMIZERS[plan.optimizer]
    return cls(model, **taken_by({**base, **INTERVALS, **plan.options, **options}))


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def full_values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p) for name, p in model.named_parameters()}


def backward(plan: Plan, model: nn.Module, i: int) -> None:
    """The gradient of the joined batch, in whatever way this rank has its part of it."""
    parts = zip(*(tensor.chunk(plan.micro) for tensor in share(*batch(i))), strict=True)
    for k, (x, y) in enumerate(parts, 1):
        if dist.is_initialized() and not plan.sync:
            for part in plan.parts(model):
                part.set_requires_gradient_sync(k == plan.micro)
        (F.mse_loss(model(x).to(y), y) / plan.micro).backward()
    average(p for p in model.parameters() if not isinstance(p, DTensor))


def train_alone(plan: Plan) -> Trained:
    model = net()
    opt = optimizer(plan, model)
    learn(plan, model, opt, range(STEPS))
    return Trained(full_values(model), kept(opt), {}, opt.preconditioner.memory_usage())


def learn(plan: Plan, model: nn.Module, opt: Any, steps: range) -> None:
    for i in steps:
        opt.zero_grad()
        backward(plan, model, i)
        opt.step()


def train(plan: Plan) -> Trained:
    model = sharded(plan)
    opt = optimizer(plan, model)
    for i in range(STEPS):
        opt.zero_grad()
        backward(plan, model, i)
        gradients = {p: (p.grad, full(p.grad)) for p in model.parameters()}
        opt.step()
        for p, (own, before) in gradients.items():
            assert p.grad is own and torch.equal(full(own), before)
    check_placements(model, opt)
    kfac = opt.preconditioner
    owners = {(x.name, s): kfac.registry.owner(x, s) for x in kfac.layers.values() for s in "ag"}
    return Trained(full_values(model), kept(opt), owners, kfac.memory_usage())


def check_placements(model: nn.Module, opt: Any) -> None:
    """What the base keeps lies as its parameter does."""
    for name, p in model.named_parameters():
        for key in opt.state[p].keys() & {"momentum_buffer", "exp_avg", "exp_avg_sq"}:
            value = opt.state[p][key]
            assert isinstance(value, DTensor) == isinstance(p, DTensor), (name, key)
            if isinstance(p, DTensor):
                assert value.placements == p.placements and value.device_mesh == p.device_mesh
                assert value.to_local().shape == p.to_local().shape
                assert value.to_local().numel() < p.numel()


def check(plan: Plan, tolerance: float = 1e-9) -> list[Trained]:
    ranks = run(plan.world, train, plan)
    alone = train_alone(plan)
    assert_alike([rank.parameters for rank in ranks])
    assert error(ranks[0].parameters, alone.parameters) < tolerance
    check_owners(ranks, alone, tolerance)
    return ranks


def check_owners(ranks: list[Trained], alone: Trained, tolerance: float) -> None:
    """Every factor is on one rank, and so is all that follows from it."""
    found: dict[tuple[str, str], Tensor] = {}
    for rank, one in enumerate(ranks):
        assert one.factors.keys() == {key for key, owner in one.owners.items() if owner == rank}
        found |= one.factors
    assert error(found, alone.factors) < tolerance
    kinds = alone.memory.keys() - {"counters", "total", "pending"}
    for kind in kinds:
        assert sum(one.memory.get(kind, 0) for one in ranks) == alone.memory[kind]
    assert max(one.memory["total"] for one in ranks) < 0.8 * alone.memory["total"]


# ---- the steps of one process ----


@pytest.mark.parametrize(
    ("parts", "optimizer"),
    [
        *((each, o) for o in OPTIMIZERS),
        *((whole, o) for o in ("sgd", "lamb")),
        (some, "adam"),
    ],
)
@pytest.mark.parametrize("method", ["polar", "eigen"])
def test_sharded_ranks_take_the_steps_of_one_process(parts, optimizer, method):
    check(Plan((2,), parts, optimizer, {"compute_method": method}))


def train_grouped(plan: Plan) -> tuple[dict[str, Tensor], int]:
    """On ranks, or alone; return parameters, and how many blocks the convolution has."""
    sizes = {"channels": 6, "groups": 2}
    model = sharded(plan, **sizes) if dist.is_initialized() else net(**sizes)
    opt = optimizer(plan, model)
    learn(plan, model, opt, range(STEPS))
    return full_values(model), opt.preconditioner.layers["image"].blocks


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_a_sharded_weight_of_several_blocks(mesh, optimizer):
    """Over four ranks, a shard begins within a block."""
    plan = Plan(mesh, optimizer=optimizer)
    ranks = run(plan.world, train_grouped, plan)
    assert_alike([parameters for parameters, _ in ranks])
    alone, blocks = train_grouped(plan)
    assert blocks == 2
    assert error(ranks[0][0], alone) < 1e-8


def norms_in_half() -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(n, 8, generator=generator).bfloat16() for n in (50, 7, 1)]
    spread = [distribute_tensor(gradient, mesh_of((2,)), [Shard(0)]) for gradient in gradients]
    exact = torch.cat([gradient.flatten() for gradient in gradients]).double().norm()
    return full(global_norm(spread)).item(), exact.item()


def test_lamb_takes_norms_of_sharded_halves_in_single_precision():
    for found, exact in run(2, norms_in_half):
        assert found == pytest.approx(exact, rel=1e-6)


def lamb_in_part() -> str:
    model = sharded(Plan((2,), some), torch.float32)
    with pytest.raises(ValueError) as error:
        LAMB(model.parameters())
    return str(error.value)


def test_lamb_says_that_it_takes_no_model_that_is_sharded_in_part():
    for text in run(2, lamb_in_part):
        assert text.startswith("Invalid params: some are sharded") and "fully_shard" in text


@pytest.mark.parametrize(
    ("mesh", "parts", "optimizer", "options"),
    [
        ((4,), each, "sgd", {}),
        ((2, 2), some, "sgd", {}),
        ((4,), each, "sgd", EIGEN),
        ((2, 2), some, "sgd", EIGEN),
        ((2, 2), each, "lamb", {}),
        ((4,), some, "adam", {"compute_method": "inverse", "bucket_cap_mb": 1e-4}),
        ((2, 2), each, "adam", {"compute_method": "inverse", "bucket_cap_mb": 1e-4}),
    ],
)
def test_four_ranks(mesh, parts, optimizer, options):
    check(Plan(mesh, parts, optimizer, options))


@pytest.mark.parametrize(("sync", "reshard"), [(False, True), (True, False)])
def test_micro_batches(sync, reshard):
    """Without ``sync``, torch holds gradients back whole until the last one."""
    check(Plan((2,), each, micro=2, sync=sync, shard={"reshard_after_forward": reshard}))


def test_a_reduction_in_another_dtype():
    """Gradients wait elsewhere than in ``.grad`` then; statistics of the first batch wait, too."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    check(Plan((2,), each, micro=2, sync=False, shard={"mp_policy": policy}), 1e-5)


def in_half(plan: Plan) -> tuple[dict[str, Tensor], dict[tuple[str, str], Tensor]]:
    model = sharded(plan, torch.float32)
    opt = optimizer(plan, model)
    learn(plan, model, opt, range(STEPS))
    return full_values(model), kept(opt)


@pytest.mark.parametrize("parts", [whole, each])
@pytest.mark.parametrize(("method", "most"), [("polar", 0.5), ("eigen", 0.1)])
def test_parameters_in_half_precision(parts, method, most):
    """Activations and their gradients have eight bits then, sums and what is kept have more.

    A polar factor has all of the noise in small singular values.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plan = Plan(
        (2,), parts, options={"damping": 0.1, "compute_method": method}, shard={"mp_policy": policy}
    )
    ranks = run(2, in_half, plan)
    alone = train_alone(plan)
    assert_alike([parameters for parameters, _ in ranks])
    found = ranks[0][1] | ranks[1][1]
    assert {value.dtype for value in found.values()} == {torch.float32}
    before = full_values(net())
    moves = [{n: p - before[n] for n, p in x.items()} for x in (ranks[0][0], alone.parameters)]
    assert 1e-6 < error(*moves) < most
    assert error(found, alone.factors) < 0.05


def moved_halves(plan: Plan) -> dict[str, Tensor]:
    spread = dist.is_initialized()
    model = sharded(plan, torch.bfloat16) if spread else net(torch.bfloat16)
    before = full_values(model)
    opt = optimizer(plan, model)
    backward(plan, model, 0)
    # A polar factor has all of the noise in small singular values: gradients are set, and equal.
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        made = torch.randn(before[name].shape, generator=generator).bfloat16() * 1e-2
        p.grad = distribute_tensor(made, p.device_mesh, p.placements) if spread else made
    opt.step()
    return {name: p - before[name] for name, p in full_values(model).items()}


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [*(("polar", optimizer) for optimizer in OPTIMIZERS), ("eigen", "adam"), ("eigen", "lamb")],
)
def test_parameters_that_are_kept_in_half_precision(method, optimizer):
    plan = Plan((2,), each, optimizer, {"compute_method": method, "lr": 0.2, "damping": 0.1})
    ranks = run(2, moved_halves, plan)
    assert_alike(ranks)
    assert error(ranks[0], moved_halves(plan)) < 0.1


# ---- what fits no sharding ----


def attentive() -> nn.Module:
    def use(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(m.attention(x, x, x, need_weights=False)[0])

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    return Body(use, attention=attention, head=nn.Linear(4, 3))


def refused(options: dict[str, Any]) -> str:
    """Without options, each rank has a shard of its own mesh."""
    mesh = mesh_of((2,)) if options else mesh_of((2, 1))["shards"]
    model = fully_shard(net(), mesh=mesh)
    with pytest.raises(ValueError) as caught:
        KFACSGD(model, lr=0.1, **options)
    return str(caught.value)


ONE_RANK = "Invalid assignment: .* exactly one rank preconditions each gradient; use"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"assignment": "opt"}, ONE_RANK),
        ({"grad_worker_fraction": 1.0}, ONE_RANK),
        ({}, r"is sharded over ranks \[\d\], K-FAC's group has \[0, 1\]; pass the group of"),
    ],
)
def test_what_cannot_work_is_refused_on_all_ranks(options, text):
    for problem in run(2, refused, options):
        assert re.search(text, problem)


def divided() -> tuple[dict[str, str], list[str], list[Tensor], list[Tensor]]:
    """What coverage says of tensor-parallel layers, and a step's weights, ours and plain SGD's."""

    def parallel() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 3))
        ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, mesh_of((2,)), ways)

    def stepped(model: nn.Module, opt: torch.optim.Optimizer) -> list[Tensor]:
        descend(opt, model(torch.ones(5, 6)).square().mean())
        return [p.to_local().clone() for p in model.parameters() if isinstance(p, DTensor)]

    ours, plain = parallel(), parallel()
    with warnings_as("ignore"):  # of the parameters that are left; rank 0 alone warns
        opt = KFACSGD(ours, lr=0.1)
    weights = stepped(ours, opt), stepped(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    left = {name: why for name, (_, why) in opt.preconditioner.coverage().left.items()}
    return left, list(opt.preconditioner.layers), *weights


def test_tensor_parallel_layers_take_the_bases_step_and_are_named():
    for left, covered, ours, plain in run(2, divided):
        assert covered == ["3"]
        assert sorted(left) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        assert all("tensor parallelism cuts it" in why for why in left.values())
        assert_same(ours, plain)


def taught(
    plan: Plan, make: Callable[[], nn.Module], shape: tuple[int, ...], **options: Any
) -> tuple[dict[str, Tensor], list[str], str]:
    """Train on this rank's part of the examples, or alone on all of them.

    Return parameters, the names of those that are left to the base, and warnings.
    """
    torch.manual_seed(0)
    model, spread = make().double(), dist.is_initialized()
    if spread:
        fully_shard(model, mesh=mesh_of(plan.mesh))
    with recorded_warnings() as texts:
        opt = optimizer(plan, model, staggered=False, **options)
        for i in range(STEPS):
            generator = torch.Generator().manual_seed(i)
            x, y = (torch.randn(*shape, k, generator=generator).double() for k in (4, 3))
            if spread:
                x, y = (t.chunk(2)[dist.get_rank()] for t in (x, y))
            descend(opt, F.mse_loss(model(x), y))
    return full_values(model), list(opt.preconditioner.coverage().left), "\n".join(texts)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("method", ["polar", "eigen"])
def test_sharded_attention_is_left_to_the_base(method, sharing):
    plan = Plan(options={"compute_method": method, "weight_sharing": sharing})
    expected, *_ = taught(plan, attentive, (4, 3), skip_layers="attention")
    results = run(2, taught, plan, attentive, (4, 3))
    for parameters, *_ in results:
        assert error(parameters, expected) < 1e-9
    for name, size in (("in_proj_weight", 48), ("in_proj_bias", 12)):
        said = f"attention.{name}: {size}, MultiheadAttention: its weights are sharded"
        assert [said in text for *_, text in results] == [True, False]  # one says it
    # It is not called as a module, so its gradient is raw, too.
    assert any("attention.out_proj" in text for *_, text in results)


def around(calls: bool) -> nn.Module:
    return nn.Sequential(Around(calls))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("method", ["polar", "eigen"])
@pytest.mark.parametrize("calls", [True, False])
def test_a_weight_that_is_used_outside_of_its_layer(calls, method, optimizer):
    plan = Plan((2,), optimizer=optimizer, options={"compute_method": method})
    learner = plan, functools.partial(around, calls), (8,)
    expected, *_ = taught(*learner)
    for parameters, left, _ in run(2, taught, *learner):
        assert left == []
        assert error(parameters, expected) < 1e-9


def product(inputs: int, outputs: int) -> nn.Module:
    """Return a linear layer without a bias, whose weight is stored the other way round."""
    return Body(lambda m, x: x @ m.matrix, matrix=0.5 * torch.randn(inputs, outputs))


class Text(nn.Module):
    """Tables of words and positions, blocks of products, experts, and a head tied to the words."""

    def __init__(self, *, experts: bool, registered: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.places = nn.Parameter(0.5 * torch.randn(6, 4))
        wide = [nn.Sequential(product(4, 8), nn.Tanh(), product(8, 4)) for _ in range(2)]
        self.blocks = nn.ModuleList(wide)
        self.experts = nn.Parameter(0.5 * torch.randn(2, 4, 4)) if experts else None
        if registered:
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.words.weight
        self.registered = registered

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places[torch.arange(6)]
        for block in self.blocks:
            x = x + block(x)
        if self.experts is not None:
            x = torch.stack([half @ e for half, e in zip(x.chunk(2, 1), self.experts, strict=True)])
            x = x.transpose(0, 1).flatten(1, 2).tanh()
        return self.head(x) if self.registered else F.linear(x, self.words.weight)


def reads_text(
    plan: Plan, shards: bool, experts: bool, registered: bool
) -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(0)
    model = Text(experts=experts, registered=registered).double()
    if shards:
        for block in model.blocks:
            fully_shard(block, mesh=mesh_of(plan.mesh))
        fully_shard(model, mesh=mesh_of(plan.mesh))
    opt = optimizer(plan, model, staggered=False)
    runs = model if shards else nn.parallel.DistributedDataParallel(model)
    for i in range(STEPS):
        tokens = torch.randint(8, (8, 6), generator=torch.Generator().manual_seed(i))
        part = tokens.chunk(2)[dist.get_rank()]
        descend(opt, F.cross_entropy(runs(part).flatten(0, 1), part.roll(1, 1).flatten()))
    report = opt.preconditioner.coverage()
    assert report.elsewhere == {}
    return full_values(model), report.share


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("registered", [True, False])
def test_parameters_that_are_covered_by_use_are_so_in_shards(experts, registered, optimizer):
    plan = Plan((2,), optimizer=optimizer, options={"compute_method": "polar"})
    each = [run(2, reads_text, plan, shards, experts, registered) for shards in (False, True)]
    for (expected, whole), (parameters, covered) in zip(*each, strict=True):
        assert covered == whole == 1
        assert error(parameters, expected) < 1e-9


# ---- a gradient scaler ----


def scales(plan: Plan, spoils: bool) -> tuple[dict[str, Tensor], list[Any], int]:
    """In step 2 one shard of a gradient is not finite: on one rank of those that make a copy."""
    model = sharded(plan)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    opt = optimizer(plan, model, grad_scaler=scaler)
    for i in range(5):
        if i == 2 and not spoils:
            scaler.update(2.0**11)
            continue
        x, y = share(*batch(i))
        opt.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        if i == 2 and mesh_of(plan.mesh).get_local_rank("shards") == 1:
            model.body[0].weight.grad.to_local()[0, 0] = torch.inf
        scaler.step(opt)
        scaler.update()
    return full_values(model), [kept(opt), scaler.get_scale()], opt.preconditioner.steps


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_a_grad_scaler_that_skips_for_one_shard(mesh):
    """All ranks skip, and nothing of the step is left."""
    plan = Plan(mesh)
    results, expected = (run(plan.world, scales, plan, spoils) for spoils in (True, False))
    assert [steps for *_, steps in results] == [4] * plan.world
    assert_same(results, expected)


# ---- checkpoints ----


def resumes(plan: Plan, full: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """From each rank's own share, or from a full state, on rank 0, of a consolidated optimizer.

    Return parameters, those of a run without the load, and warnings of lost factors.
    """
    model, other = sharded(plan), sharded(plan)
    opt, fresh = optimizer(plan, model), optimizer(plan, other)
    learn(plan, model, opt, range(4))
    if full:
        opt.consolidate_state_dict(to=0)
        how = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = [get_model_state_dict(model, options=how)]
        state.append(get_optimizer_state_dict(model, opt, options=how))
        things = [copy.deepcopy(state) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(things, src=0)
    else:
        things = [copy.deepcopy([model.state_dict(), opt.state_dict()])]
    with recorded_warnings("factors") as texts:
        if full:
            how = StateDictOptions(full_state_dict=True)
            set_model_state_dict(other, things[0][0], options=how)
            set_optimizer_state_dict(other, fresh, things[0][1], options=how)
        else:
            other.load_state_dict(things[0][0])
            fresh.load_state_dict(things[0][1])
    for own, steps in ((model, opt), (other, fresh)):
        learn(plan, own, steps, range(4, STEPS))
    check_placements(other, fresh)
    return full_values(other), full_values(model), texts


@pytest.mark.parametrize(
    ("plan", "full"),
    [
        (Plan((2,), some), False),
        (Plan((2, 2), some, "adam"), False),
        (Plan((2,), each), True),
    ],
)
@pytest.mark.filterwarnings("ignore:state_dict")
def test_ranks_go_on_from_their_shares_or_from_a_full_state(plan, full):
    for resumed, straight, texts in run(plan.world, resumes, plan, full):
        assert not texts
        assert_same(resumed, straight)


def from_plain_adam(plan: Plan) -> list[tuple[Tensor, Tensor]]:
    """Momenta and sums of squares after one step from plain Adam's state, beside Adam's own."""
    model, other = sharded(plan), sharded(plan)
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    learn(plan, model, plain, range(3))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    opt = optimizer(plan, other, lr=0.01)
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    # From equal weights, both meet equal gradients in this step.
    learn(plan, model, plain, range(3, 4))
    learn(plan, other, opt, range(3, 4))
    twins = dict(zip(other.parameters(), model.parameters(), strict=True))
    found = []
    for layer in opt.preconditioner.layers.values():
        entries = {p: plain.state[twins[p]] for p in layer.parameters}
        found += [(full(opt.state[p]["exp_avg"]), full(x["exp_avg"])) for p, x in entries.items()]
        total = sum(full(x["exp_avg_sq"]).sum() for x in entries.values())
        if opt.preconditioner.groups.of[layer].applied:
            found.append((opt.state[layer.parameters[0]]["kfac_square_sum"], total.view(1)))
    return found


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.filterwarnings("ignore:the checkpoint has no K-FAC factors")
def test_a_plain_state_goes_on(mesh):
    ranks = run(torch.Size(mesh).numel(), from_plain_adam, Plan(mesh, each, "adam"))
    # Two momenta a layer, but for one each without a bias; sums on owners alone.
    assert sum(map(len, ranks)) == 8 * len(ranks) + 5
    for one in ranks:
        for moved, expected in one:
            assert error({"": moved}, {"": expected}) < 1e-9


def saves(plan: Plan, how: dict[str, Any], path: str) -> None:
    model = sharded(plan)
    opt = optimizer(plan, model)
    learn(plan, model, opt, range(4))
    state = get_optimizer_state_dict(model, opt, options=StateDictOptions(**how))
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=path)


def loads(plan: Plan, how: dict[str, Any], path: str) -> tuple[dict[str, Tensor], list[str]]:
    model = sharded(plan)
    opt = optimizer(plan, model)
    options = StateDictOptions(**how)
    loaded = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, opt, options=options),
    }
    dcp.load(loaded, checkpoint_id=path)
    model.load_state_dict(loaded["model"])
    with recorded_warnings("factors") as texts:
        set_optimizer_state_dict(model, opt, loaded["optimizer"], options=options)
    learn(plan, model, opt, range(4, STEPS))
    check_placements(model, opt)
    return full_values(model), texts


@pytest.mark.parametrize(
    ("before", "after", "optimizer", "flatten"),
    [
        ((4,), (2,), "adam", False),
        ((2,), (2, 2), "adam", True),
        ((2, 2), (4,), "adam", False),
        ((4,), (2,), "sgd", True),
    ],
)
@pytest.mark.filterwarnings("ignore:state_dict")
def test_distributed_checkpoints_of_other_meshes(before, after, optimizer, flatten, tmp_path):
    how = {"flatten_optimizer_state_dict": flatten}
    plans = Plan(before, each, optimizer), Plan(after, some, optimizer)
    run(plans[0].world, saves, plans[0], how, str(tmp_path / "state"))
    results = run(plans[1].world, loads, plans[1], how, str(tmp_path / "state"))
    alone = train_alone(plans[1])
    for parameters, texts in results:
        assert not texts
        assert error(parameters, alone.parameters) < 1e-9


# ---- its predecessor ----


def flattened(original: bool) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(model, use_orig_params=original, device_id=cpu)
    with pytest.raises(ValueError) as refused:
        KFACSGD(model, lr=0.1)
    return str(refused.value)


@pytest.mark.parametrize("original", [True, False])
def test_fully_sharded_data_parallel_is_refused_by_name(original):
    for text in run(2, flattened, original):
        assert re.match("Invalid model: FullyShardedDataParallel flattens .*fully_shard", text)
