"""Training runs that mean the same on one process and on several ranks, for comparison."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kaisa_optim import KFACLAMB, KFACSGD, Grid, KFACAdam, Placement, Task, WorkAssignment
from tests.support import groups
from tests.support.training import descend, values

INPUTS, CLASSES = 7, 4


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# Adam and LAMB divide by √v + ε: a gradient that is zero but for its rounding (that of an attention
# key's bias) must not become a whole step by that.
OPTIMIZERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "sgd": (KFACSGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (KFACAdam, {"lr": 0.005, "eps": 1e-2}),
    "lamb": (KFACLAMB, {"lr": 0.01, "eps": 1e-2}),
}


class Images(nn.Module):
    """Convolutions, one of them grouped; norms; a linear layer with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.grouped = nn.Conv2d(4, 4, 3, stride=2, groups=2)
        self.flat = nn.Linear(16, 5)
        self.flat.bias.requires_grad_(False)
        self.again = nn.Linear(5, 5)
        self.scale = nn.LayerNorm(5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        x = self.grouped(x).tanh().flatten(1)
        x = self.flat(x).tanh()
        return self.head(self.scale(self.again(x)))


class Tokens(nn.Module):
    """An embedding, attention, layers on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.wide = nn.Linear(4, 8)
        self.narrow = nn.Linear(8, 4, bias=False)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = x + self.narrow(self.wide(x).tanh())
        return self.head(x.mean(1))


class Chain(nn.Module):
    """Linear layers with factors of sizes 4 and 8; those in the middle are alike."""

    def __init__(self, middle: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 8)
        self.middle = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(middle))
        self.head = nn.Linear(8, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for layer in self.middle:
            x = layer(x).tanh()
        return self.head(x)


class Branched(nn.Module):
    """A branch that examples go through or not; without any, it is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(INPUTS, 6)
        self.branch = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, through: Tensor) -> Tensor:
        x = self.body(x).tanh()
        if through.any():
            x = x.index_add(0, through.nonzero()[:, 0], self.branch(x[through]).tanh())
        return self.head(x)


NETWORKS: dict[str, type[nn.Module]] = {
    "images": Images,
    "tokens": Tokens,
    "chain": Chain,
    "branched": Branched,
}


def network(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return NETWORKS[name]().to(dtype)


def batch(name: str, step: int, rows: int, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """Inputs and labels of a step: all ranks' together."""
    generator = torch.Generator().manual_seed(1000 + step)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    if name == "tokens":
        return torch.randint(9, (rows, 3), generator=generator), labels
    shape = (rows, 2, 5, 5) if name == "images" else (rows, INPUTS)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(dtype), labels


@dataclass(frozen=True)
class Scattered(WorkAssignment):
    """A user's own: as many workers as ``workers`` says, layers one after the other on the ranks.

    G goes to another row of the grid than A, where it may.
    """

    workers: int = 1

    def gradient_workers(self, world: int) -> int:
        return self.workers

    def place(
        self, tasks: Sequence[Task], grid: Grid, *, colocate: bool, load: Sequence[float]
    ) -> list[Placement]:
        places = [(2 * i + 1) % grid.world for i, _ in enumerate(tasks)]
        return [Placement(a, a if colocate else (a + grid.columns) % grid.world) for a in places]


@dataclass(frozen=True)
class Plan:
    """A training run; ``sizes`` are the examples of each rank's micro-batches, by rank."""

    sizes: tuple[tuple[int, ...], ...]
    network: str = "chain"
    optimizer: str = "sgd"
    base: dict[str, Any] = field(default_factory=dict)  # arguments of the base optimizer
    options: dict[str, Any] = field(default_factory=dict)  # K-FAC's
    alone: dict[str, Any] = field(default_factory=dict)  # of one process
    spread: dict[str, Any] = field(default_factory=dict)  # of several ranks
    wrapper: dict[str, Any] | None = field(default_factory=dict)  # DDP's options; None: no DDP
    groups: bool = False  # weights and biases with their own lr
    weighed: bool = False  # ranks have batches of different sizes
    weighs: bool = True  # losses, by the examples that they average; else each rank has a mean
    steps: int = 10
    loss_scale: float = 1.0
    dtype: torch.dtype = torch.float64

    @property
    def world(self) -> int:
        return len(self.sizes)

    @property
    def rows(self) -> int:
        return sum(map(sum, self.sizes))

    @property
    def is_polar(self) -> bool:
        """Polar factors amplify rounding errors: batches need more rows than layers are wide."""
        return self.options.get("compute_method", "polar") == "polar"


def even(world: int, rows: int, micro: int = 1) -> tuple[tuple[int, ...], ...]:
    return ((rows,) * micro,) * world


class Trained(NamedTuple):
    """What is left of a run."""

    parameters: dict[str, Tensor]
    factors: dict[tuple[str, str], Tensor]  # that this rank keeps; by layer and side


def build(plan: Plan, model: nn.Module, wrapped: nn.Module, **options: Any) -> Any:
    cls, base = OPTIMIZERS[plan.optimizer]
    base = {**base, **plan.base}
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    params: Any = wrapped
    if plan.groups:
        biases = {"params": [p for n, p in named if "bias" in n], "lr": base["lr"] / 2}
        params = [{"params": [p for n, p in named if "bias" not in n]}, biases]
        options["model"] = wrapped
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the base optimizer updates these")
        return cls(params, **base, **taken_by({**plan.options, **options}))


OF_PAPERS = {
    *("loss_terms", "loss_reduction", "normalization", "grad_scaler", "damping_split"),
    *("compute_eigenvalue_outer_product", "kl_clip", "kl_clip_lr"),
}


def taken_by(options: dict[str, Any]) -> dict[str, Any]:
    """The options that go with the method: the papers' do not go with "polar"."""
    is_polar = options.get("compute_method", "polar") == "polar"
    return {n: v for n, v in options.items() if not (is_polar and n in OF_PAPERS)}


def micro_batches(plan: Plan, step: int, rank: int) -> Iterator[tuple[Tensor, Tensor, float]]:
    """A rank's batches of a step, and what to weigh their losses with: the mean over the ranks and
    the sum over the micro-batches are then the mean over all examples, or means of ranks."""
    x, y = batch(plan.network, step, plan.rows, plan.dtype)
    start = sum(map(sum, plan.sizes[:rank]))
    averaged = plan.rows / plan.world if plan.weighs else sum(plan.sizes[rank])
    for n in plan.sizes[rank]:
        part = slice(start, start := start + n)
        yield x[part], y[part], n / averaged


def share(*tensors: Tensor) -> list[Tensor]:
    """This rank's part of each, or all of it on one process."""
    return [x.chunk(world())[rank()] for x in tensors]


def average(parameters: Any, group: Any = None) -> None:
    """The mean of the ranks' gradients; a missing one is zero. One process has its own."""
    for p in parameters if dist.is_initialized() else ():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)


def kept(opt: Any) -> dict[tuple[str, str], Tensor]:
    return {key: average.clone() for key, average in groups.averages(opt).items()}


def train_alone(plan: Plan) -> Trained:
    """Train on one process, with the joined batch."""
    model = network(plan.network, dtype=plan.dtype)
    opt = build(plan, model, model, **plan.alone)
    for step in range(plan.steps):
        x, y = batch(plan.network, step, plan.rows, plan.dtype)
        descend(opt, F.cross_entropy(model(x), y) * plan.loss_scale)
    return Trained(values(model), kept(opt))


def train(plan: Plan) -> Trained:
    """On a rank: its share of every batch."""
    rank = dist.get_rank()
    model = network(plan.network, dtype=plan.dtype)
    with_ddp = plan.wrapper is not None
    wrapped = DistributedDataParallel(model, **plan.wrapper) if with_ddp else model
    opt = build(plan, model, wrapped, **plan.spread)
    static = with_ddp and plan.wrapper.get("static_graph")
    if plan.weighed and not plan.is_polar:
        opt.preconditioner.loss_terms = plan.rows / plan.world
    for step in range(plan.steps):
        opt.zero_grad()
        parts = list(micro_batches(plan, step, rank))
        for i, (x, y, weight) in enumerate(parts):
            # DDP itself fails where a static graph is first seen under no_sync.
            waits = with_ddp and i < len(parts) - 1 and not (static and step == 0)
            with wrapped.no_sync() if waits else contextlib.nullcontext():
                loss = F.cross_entropy(wrapped(x), y) * weight * plan.loss_scale
                loss.backward()
        if not with_ddp:
            average(model.parameters())
        opt.step()
    return Trained(values(model), kept(opt))


def error(actual: dict[Any, Tensor], expected: dict[Any, Tensor]) -> float:
    """The largest difference of a tensor, relative to its norm."""
    assert actual.keys() == expected.keys()
    assert all(x.isfinite().all() for x in actual.values())  # max would pass by what is none
    return max(float((actual[name] - x).norm() / x.norm()) for name, x in expected.items())


def assert_alike(ranks: Sequence[dict[str, Tensor]]) -> None:
    """Bit for bit on all ranks."""
    for other in ranks[1:]:
        assert other.keys() == ranks[0].keys()
        for name, value in ranks[0].items():
            assert torch.equal(value, other[name]), f"{name} differs among the ranks"
