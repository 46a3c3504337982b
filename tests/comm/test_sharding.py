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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from kaisa_optim import KFACSGD, LAMB
from tests.core.test_rank_checkpoints import load, refusal, save
from tests.core.test_uses_on_ranks import Around
from tests.support.cluster import OPTIMIZERS, assert_alike, average, error, kept, share, taken_by
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import assert_same, descend, recorded_warnings, warnings_as
from tests.support.watch import Body

pytestmark = pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")

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
    sizes: dict[str, int] = field(default_factory=dict)  # the model's arguments
    shard: dict[str, Any] = field(default_factory=dict)  # fully_shard's arguments
    dtype: torch.dtype = torch.float64  # of the ranks' model
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


def sharded(plan: Plan) -> Net:
    model = net(plan.dtype, **plan.sizes)
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
    model = net(**plan.sizes)
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


IN_PARTS = {"compute_method": "inverse", "bucket_cap_mb": 1e-4}
PLANS = {
    **{
        f"{parts.__name__}, {optimizer}, {method}": Plan(
            (2,), parts, optimizer, {"compute_method": method}
        )
        for parts, optimizer in (
            *((each, optimizer) for optimizer in OPTIMIZERS),
            *((whole, optimizer) for optimizer in ("sgd", "lamb")),
            (some, "adam"),
        )
        for method in ("polar", "eigen")
    },
    # Over four ranks, a shard of the convolution's six channels begins within a block.
    **{
        f"blocks, {optimizer}, {len(mesh)} x {mesh[0]}": Plan(
            mesh, optimizer=optimizer, sizes={"channels": 6, "groups": 2}
        )
        for optimizer in OPTIMIZERS
        for mesh in ((2,), (4,), (2, 2))
    },
    "four": Plan((4,)),
    "four, copies": Plan((2, 2), some),
    "four, eigen": Plan((4,), options=EIGEN),
    "four, copies, eigen": Plan((2, 2), some, options=EIGEN),
    "four, copies, lamb": Plan((2, 2), optimizer="lamb"),
    "four, inverse": Plan((4,), some, "adam", IN_PARTS),
    "four, copies, inverse": Plan((2, 2), each, "adam", IN_PARTS),
    # torch holds gradients back whole until the last micro-batch.
    "held back": Plan(micro=2, sync=False),
    "never whole": Plan(micro=2, shard={"reshard_after_forward": False}),
    # Gradients wait elsewhere than in ``.grad``; statistics of the first batch wait, too.
    "reduced in float32": Plan(
        micro=2, sync=False, shard={"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_sharded_ranks_take_the_steps_of_one_process(name):
    tolerances = {"blocks": 1e-8, "reduced in float32": 1e-5}
    check(PLANS[name], tolerances.get(name.split(",")[0], 1e-9))


@pytest.mark.parametrize("parts", [whole, each])
@pytest.mark.parametrize(("method", "most"), [("polar", 0.5), ("eigen", 0.1)])
def test_parameters_in_half_precision(parts, method, most):
    """Activations and their gradients have eight bits then, sums and what is kept have more.

    A polar factor has all of the noise in small singular values.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"damping": 0.1, "compute_method": method}
    plan = Plan((2,), parts, options=options, shard={"mp_policy": policy}, dtype=torch.float32)
    first, second = run(2, train, plan)
    alone = train_alone(plan)
    assert_alike([first.parameters, second.parameters])
    found = first.factors | second.factors
    assert {value.dtype for value in found.values()} == {torch.float32}
    before = full_values(net())
    moves = [{n: p - before[n] for n, p in x.parameters.items()} for x in (first, alone)]
    assert 1e-6 < error(*moves) < most
    assert error(found, alone.factors) < 0.05


def give_gradients(model: nn.Module, size: float) -> None:
    """Set gradients that are equal on ranks and in one process, in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        made = torch.randn(p.shape, generator=generator).bfloat16() * size
        is_sharded = isinstance(p, DTensor)
        p.grad = distribute_tensor(made, p.device_mesh, p.placements) if is_sharded else made


def moved_halves(plan: Plan) -> dict[str, Tensor]:
    model = sharded(plan) if dist.is_initialized() else net(plan.dtype)
    before = full_values(model)
    opt = optimizer(plan, model)
    backward(plan, model, 0)
    give_gradients(model, 1e-2)  # a polar factor has all of the noise in small singular values
    opt.step()
    return {name: p - before[name] for name, p in full_values(model).items()}


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [*(("polar", optimizer) for optimizer in OPTIMIZERS), ("eigen", "adam"), ("eigen", "lamb")],
)
def test_parameters_that_are_kept_in_half_precision(method, optimizer):
    options = {"compute_method": method, "lr": 0.2, "damping": 0.1}
    plan = Plan((2,), each, optimizer, options, dtype=torch.bfloat16)
    ranks = run(2, moved_halves, plan)
    assert_alike(ranks)
    assert error(ranks[0], moved_halves(plan)) < 0.1


def momenta_of_lamb() -> list[Tensor]:
    plan = Plan(dtype=torch.bfloat16)
    model = sharded(plan) if dist.is_initialized() else net(plan.dtype)
    give_gradients(model, 1.0)
    opt = LAMB(model.parameters())
    opt.step()
    return [full(opt.state[p]["exp_avg"]) for p in model.parameters()]


def test_lamb_takes_norms_of_sharded_halves_in_single_precision():
    """They limit the gradients that are averaged; a norm of eight bits would round many anew."""
    for found in run(2, momenta_of_lamb):
        assert_same(found, momenta_of_lamb())


# ---- what fits no sharding ----


def attentive() -> nn.Module:
    def use(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(m.attention(x, x, x, need_weights=False)[0])

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    return Body(use, attention=attention, head=nn.Linear(4, 3))


def flattened(original: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, cpu = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.device("cpu")
    return FullyShardedDataParallel(model, use_orig_params=original, device_id=cpu)


def apart() -> nn.Module:
    """Each rank has a shard of a mesh of its own."""
    return fully_shard(net(), mesh=mesh_of((2, 1))["shards"])


ONE_RANK = "Invalid assignment: .* exactly one rank preconditions each gradient; use"
FLATTENS = "^Invalid model: FullyShardedDataParallel flattens .*fully_shard"
# Calls, and what their errors say.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "opt": (lambda: optimizer(Plan(), sharded(Plan()), assignment="opt"), ONE_RANK),
    "all workers": (
        lambda: optimizer(Plan(), sharded(Plan()), grad_worker_fraction=1.0),
        ONE_RANK,
    ),
    "another mesh": (
        lambda: optimizer(Plan(), apart()),
        r"is sharded over ranks \[\d\], K-FAC's group has \[0, 1\]; pass the group of",
    ),
    "LAMB in part": (
        lambda: LAMB(sharded(Plan((2,), some)).parameters()),
        "^Invalid params: some are sharded.*fully_shard",
    ),
    "FSDP1": (lambda: optimizer(Plan(), flattened(False)), FLATTENS),
    "FSDP1 with views": (lambda: optimizer(Plan(), flattened(True)), FLATTENS),
}


def refused(name: str) -> str:
    return refusal(REFUSED[name][0])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_on_all_ranks(name):
    for text in run(2, refused, name):
        assert re.search(REFUSED[name][1], text)


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


class Taught(NamedTuple):
    parameters: dict[str, Tensor]
    coverage: Any
    warnings: str


def rows(shape: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(*shape, k, generator=generator).double() for k in (4, 3)]


def text(generator: torch.Generator) -> list[Tensor]:
    tokens = torch.randint(8, (8, 6), generator=generator)
    return [tokens, tokens.roll(1, 1)]


def taught(
    plan: Plan,
    make: Callable[[], Any],
    examples: Callable[..., list[Tensor]],
    shards: bool = True,
    **options: Any,
) -> Taught:
    """Train on this rank's part of the examples, in shards or under DDP, or alone on all."""
    torch.manual_seed(0)
    model, spread = make().double(), dist.is_initialized()
    for part in [*getattr(model, "blocks", []), model] if spread and shards else []:
        fully_shard(part, mesh=mesh_of(plan.mesh))
    runs = model if shards else nn.parallel.DistributedDataParallel(model)
    with recorded_warnings() as texts:
        opt = optimizer(plan, model, staggered=False, **options)
        for i in range(STEPS):
            x, y = share(*examples(torch.Generator().manual_seed(i)))
            out = runs(x)
            regresses = y.is_floating_point()
            descend(opt, F.mse_loss(out, y) if regresses else F.cross_entropy(out.mT, y))
    return Taught(full_values(model), opt.preconditioner.coverage(), "\n".join(texts))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("method", ["polar", "eigen"])
def test_sharded_attention_is_left_to_the_base(method, sharing):
    plan = Plan(options={"compute_method": method, "weight_sharing": sharing})
    examples = functools.partial(rows, (4, 3))
    alone = taught(plan, attentive, examples, skip_layers="attention")
    results = run(2, taught, plan, attentive, examples)
    for result in results:
        assert error(result.parameters, alone.parameters) < 1e-9
    for name, size in (("in_proj_weight", 48), ("in_proj_bias", 12)):
        said = f"attention.{name}: {size}, MultiheadAttention: its weights are sharded"
        assert [said in result.warnings for result in results] == [True, False]  # one says it
    # It is not called as a module, so its gradient is raw, too.
    assert "attention.out_proj" in results[0].warnings


def around(calls: bool) -> nn.Module:
    return nn.Sequential(Around(calls))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("method", ["polar", "eigen"])
@pytest.mark.parametrize("calls", [True, False])
def test_a_weight_that_is_used_outside_of_its_layer(calls, method, optimizer):
    plan = Plan((2,), optimizer=optimizer, options={"compute_method": method})
    lesson = plan, functools.partial(around, calls), functools.partial(rows, (8,))
    alone = taught(*lesson)
    for result in run(2, taught, *lesson):
        assert result.coverage.left == {}
        assert error(result.parameters, alone.parameters) < 1e-9


def products(m: nn.Module, x: Tensor) -> Tensor:
    """Multiply by two matrices that are stored the other way round than a linear layer's."""
    return (x @ m.up).tanh() @ m.down


class Text(nn.Module):
    """Tables of words and positions, blocks of products, experts, and a head tied to the words."""

    def __init__(self, *, experts: bool, registered: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.places = nn.Parameter(0.5 * torch.randn(6, 4))
        wide = [{"up": 0.5 * torch.randn(4, 8), "down": 0.5 * torch.randn(8, 4)} for _ in range(2)]
        self.blocks = nn.ModuleList(Body(products, **matrices) for matrices in wide)
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


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("registered", [True, False])
def test_parameters_that_are_covered_by_use_are_so_in_shards(experts, registered, optimizer):
    plan = Plan((2,), optimizer=optimizer, options={"compute_method": "polar"})
    make = functools.partial(Text, experts=experts, registered=registered)
    # Each rank looks the positions up once: one process would have other rows.
    ranks = [run(2, taught, plan, make, text, shards) for shards in (False, True)]
    for whole, result in zip(*ranks, strict=True):
        assert result.coverage.share == whole.coverage.share == 1
        assert result.coverage.elsewhere == whole.coverage.elsewhere == {}
        assert error(result.parameters, whole.parameters) < 1e-9


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


def resumes(plan: Plan, way: str, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return parameters of a run that is loaded on the way, and of one that nothing interrupts."""
    model, other = sharded(plan), sharded(plan)
    opt, fresh = optimizer(plan, model), optimizer(plan, other)
    learn(plan, model, opt, range(4))
    save(model, opt, way, path)
    load(other, fresh, way, path)
    for own, steps in ((model, opt), (other, fresh)):
        learn(plan, own, steps, range(4, STEPS))
    check_placements(other, fresh)
    return full_values(other), full_values(model)


@pytest.mark.parametrize(
    ("plan", "way"),
    [
        (Plan((2,), some), "shares"),
        (Plan((2, 2), some, "adam"), "shares"),
        (Plan((2,), each), "full"),
    ],
)
@pytest.mark.filterwarnings("ignore:state_dict")
def test_ranks_go_on_from_their_shares_or_from_a_full_state(plan, way, tmp_path):
    for resumed, straight in run(plan.world, resumes, plan, way, str(tmp_path / "state")):
        assert_same(resumed, straight)


def consolidates_beside_a_frozen_bias(plan: Plan) -> bool:
    model = sharded(plan)
    opt = optimizer(plan, model)
    learn(plan, model, opt, range(1))
    model.body[0].bias.requires_grad_(False)
    learn(plan, model, opt, range(1, 3))
    opt.consolidate_state_dict()
    return "momentum_buffer" in opt.state[model.body[0].bias]


def test_a_sharded_momentum_that_rests_stays_in_its_shards():
    assert run(2, consolidates_beside_a_frozen_bias, Plan((2,), some)) == [True, True]


def goes_on_from_plain_adam(plan: Plan) -> dict[str, Tensor]:
    """On ranks, or alone."""
    model, other = (sharded(plan) if dist.is_initialized() else net() for _ in range(2))
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    learn(plan, model, plain, range(3))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    opt = optimizer(plan, other)
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    learn(plan, other, opt, range(3, STEPS))
    return full_values(other)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.filterwarnings("ignore:the checkpoint has no K-FAC factors")
def test_a_plain_state_goes_on(mesh):
    plan = Plan(mesh, optimizer="adam")
    alone = goes_on_from_plain_adam(plan)
    for parameters in run(plan.world, goes_on_from_plain_adam, plan):
        assert error(parameters, alone) < 1e-9


def saves(plan: Plan, way: str, path: str) -> None:
    model = sharded(plan)
    opt = optimizer(plan, model)
    learn(plan, model, opt, range(4))
    save(model, opt, way, path)


def loads(plan: Plan, way: str, path: str) -> dict[str, Tensor]:
    model = sharded(plan)
    opt = optimizer(plan, model)
    load(model, opt, way, path)
    learn(plan, model, opt, range(4, STEPS))
    check_placements(model, opt)
    return full_values(model)


@pytest.mark.parametrize(
    ("before", "after", "optimizer", "way"),
    [
        ((4,), (2,), "adam", "dcp"),
        ((2,), (2, 2), "adam", "dcp, flat"),
        ((2, 2), (4,), "adam", "dcp"),
        ((4,), (2,), "sgd", "dcp, flat"),
    ],
)
@pytest.mark.filterwarnings("ignore:state_dict")
def test_distributed_checkpoints_of_other_meshes(before, after, optimizer, way, tmp_path):
    plans, path = (Plan(before, each, optimizer), Plan(after, some, optimizer)), str(tmp_path)
    run(plans[0].world, saves, plans[0], way, path)
    alone = train_alone(plans[1])
    for parameters in run(plans[1].world, loads, plans[1], way, path):
        assert error(parameters, alone.parameters) < 1e-9
