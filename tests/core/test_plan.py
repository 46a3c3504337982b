"""The compiled plan: what makes it anew, what a step does by it, and what lies in its stacks."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kaisa_optim import KFACSGD, KFACAdam, with_kfac
from tests.curvature.test_refresh import ALWAYS
from tests.support import groups
from tests.support.close import assert_close
from tests.support.ranks import run
from tests.support.training import ANEW, assert_near, assert_same, descend, early
from tests.support.watch import Body, exact, normal, seeded, taken


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
        model(x.to(model.head.weight.dtype)).square().mean().backward()
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
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = opt.preconditioner.steps, groups.compilations
    for scale in (float("inf"), 1.0):
        opt.zero_grad()
        scaler.scale(model(normal(6, 2, 6, 6)).square().mean() * scale).backward()
        scaler.step(opt)  # skips the first one
        scaler.update()
    assert (opt.preconditioner.steps - 1, groups.compilations) == before
    model.to(memory_format=torch.channels_last)
    assert compiles(5) == 1
    opt.load_state_dict(opt.state_dict())
    assert compiles(5) == 1


def test_a_momentum_of_another_kind_is_another_way():
    model = Net()
    opt = KFACSGD(model, lr=0.01, momentum=0.9, **ANEW)
    groups, seen = opt.preconditioner.groups, []
    for step, momentum in enumerate([0.9, 0.8, 0.7, 0.0, 0.0, 0.9]):
        opt.param_groups[0]["momentum"] = momentum
        learn(model, opt, step)
        seen.append(groups.compilations)
        assert ("momentum_buffer" in opt.state[model.head.weight]) == (momentum != 0)
    assert seen == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("how", ["entry", "tensor", "state", "cleared"])
@pytest.mark.parametrize(("cls", "key"), [(KFACSGD, "momentum_buffer"), (KFACAdam, "exp_avg")])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_entries_that_a_user_replaced(how, cls, key, layout):
    """What is in the entries counts, and comes back into the stacks."""
    options = {"momentum": 0.9} if cls is KFACSGD else {}
    pairs = []
    for replaced in (True, False):
        model = Net(layout)
        opt = cls(model, lr=0.01, **options, **ANEW)
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


def rests(cls: Any, options: dict[str, Any], spread: str) -> int:
    """Take a step in which three parameters have no gradient; return how many tensors are here."""
    model = Net()
    if spread == "shards":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        options = options | {"assignment": spread}
    opt = with_kfac(cls)(model, lr=0.01, weight_decay=0.01, **options)
    learn(model, opt, 0)
    learn(model, opt, 1)
    resting = [model.body[1].weight, model.body[1].bias, model.norm.weight]

    def held() -> list[Tensor]:
        entries = [item for p in resting for item in opt.state[p].items()]
        # Those of the base, K-FAC's momentum and its sums of squares, but no factors.
        tensors = [x for key, x in entries if key[:5] != "kfac_" or key == "kfac_square_sum"]
        return [(x.to_local() if isinstance(x, DTensor) else x).clone() for x in resting + tensors]

    before = held()
    learn(model, opt, 2, leaves=resting)
    assert_same(held(), before)
    return len(before)


@pytest.mark.parametrize("spread", ["opt", "layer-wise", "shards"])
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
    assert max(run(2, rests, cls, options, spread)) == count


def test_rows_that_change_places_are_read_before_they_are_written():
    model = Net()
    opt = KFACAdam(model, lr=0.01, **ANEW)
    learn(model, opt, 0)
    both = model.body[0].weight, model.body[1].weight
    one, other = (opt.state[p] for p in both)
    expected = [x["exp_avg"].clone() for x in (other, one)]
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]
    learn(model, opt, 1, leaves=list(model.parameters()))
    assert_same([opt.state[p]["exp_avg"] for p in both], expected)


def test_a_count_that_a_user_sets_goes_on():
    model = Net()
    opt = KFACAdam(model, lr=0.01, **ANEW)
    learn(model, opt, 0)
    entry = opt.state[model.body[0].weight]
    del entry["step"]
    entry["step"] = torch.tensor(100.0)  # perhaps where the former one lay
    learn(model, opt, 1)
    learn(model, opt, 2)
    assert entry["step"] == 102 and opt.state[model.body[1].weight]["step"] == 3


@pytest.mark.filterwarnings("ignore:the checkpoint has no K-FAC factors")
@pytest.mark.parametrize("how", ["goes on", "pickled", "loaded"])
def test_a_first_momentum_is_the_gradient_whenever_it_comes(how):
    """With dampening, as in torch; until then there is no entry."""
    model = Net()
    opt = KFACSGD(model, lr=0.01, momentum=0.9, dampening=0.5, **ANEW)
    late = model.body[0].weight
    for step in range(3):
        learn(model, opt, step, leaves=[late])
    assert "momentum_buffer" not in opt.state.get(late, {})
    if how == "pickled":
        model, opt = pickle.loads(pickle.dumps((model, opt)))
    elif how == "loaded":
        opt.load_state_dict(opt.state_dict())
    late = model.body[0].weight
    learn(model, opt, 3)
    assert_near(opt.state[late]["momentum_buffer"], late.grad, 1e-12)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_layer_that_begins_anew_goes_on_from_a_checkpoint():
    """Its first statistics were not finite: the base steps it until it gathers again."""

    def build() -> tuple[nn.ModuleList, Any]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]).double()
        return model, KFACAdam(model, lr=0.01, factor_update_steps=10, inv_update_steps=10)

    def fit(model: nn.ModuleList, opt: Any, late: bool = True, spoilt: bool = False) -> None:
        x = torch.ones(8, 6, dtype=torch.float64)
        loss = (model[0](model[1](x) if late else x) - 1).square().mean()
        opt.zero_grad()
        (loss * (float("nan") if spoilt else 1)).backward()
        for p in model.parameters() if spoilt else ():
            p.grad = torch.full_like(p, 1e-3)
        opt.step()

    straight, resumed = build(), build()
    for step in range(29):
        fit(*straight, late=step == 20 or step > 25, spoilt=step == 20)
    for one, its in zip(resumed, straight, strict=True):
        one.load_state_dict(pickle.loads(pickle.dumps(its.state_dict())))
    for _ in range(4):
        fit(*straight)
        fit(*resumed)
        assert_same(resumed[0], straight[0])


class Operations(TorchDispatchMode):
    """Records each operation with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.seen.append((str(func), [tuple(x.shape) for x in tensors]))
        return func(*args, **(kwargs or {}))


def addresses(model: nn.Module, opt: Any) -> dict[Any, int]:
    """Return where parameters, momenta, averages and decompositions lie; counts are numbers."""
    found: dict[Any, Tensor] = dict(model.named_parameters())
    for name, p in model.named_parameters():
        for key, value in opt.state[p].items():
            if isinstance(value, Tensor) and key != "step":
                found[name, key] = value
    for i, (name, tensor) in enumerate(groups.tensors(opt)):
        found[i, name] = tensor
    return {key: tensor.data_ptr() for key, tensor in found.items()}


@pytest.mark.parametrize(
    ("cls", "options", "kept"),
    [
        (KFACSGD, {"momentum": 0.9}, "momentum_buffer"),
        (KFACAdam, {}, "exp_avg"),
        (KFACSGD, {"momentum": 0.9, "compute_method": "eigen"}, "momentum_buffer"),
    ],
    ids=["KFACSGD", "KFACAdam", "eigen"],
)
def test_quiet_steps_are_alike_and_move_nothing(cls, options, kept):
    """A step that neither gathers nor refreshes makes the same operations as the one before."""
    model = Net()  # of which the base steps the norm
    with early():
        long = {"factor_update_steps": 1000, "inv_update_steps": 1000}
        opt = cls(model, lr=0.01, weight_decay=0.01, **long, **options)
    seen, places = [], []
    for _ in range(5):
        opt.zero_grad()
        model(normal(8, 2, 6, 6)).square().mean().backward()
        with Operations() as operations:
            opt.step()
        seen.append(operations.seen)
        places.append(addresses(model, opt))
    assert len(seen[0]) > len(seen[3]) > 10
    assert seen[3] == seen[4]
    assert ("conv.weight", kept) in places[0]
    assert places[1] == places[2] == places[3] == places[4]


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_a_model_moved_to_another_dtype_keeps_its_factors(dtype, kept):
    model = Net().float()
    opt = KFACSGD(model, lr=0.1, momentum=0.9, factor_update_steps=2, staggered=False)
    for step in range(3):
        learn(model, opt, step)
    former = {key: average.to(kept) for key, average in groups.averages(opt).items()}
    model.to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    learn(model, opt, 3)  # not due for factors
    assert_same(groups.averages(opt), former)
    assert not any(map(torch.equal, model.parameters(), before))
    for step in range(4, 6):
        learn(model, opt, step)
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

    x = torch.randint(11, (5, 6), generator=torch.Generator().manual_seed(0))
    F.cross_entropy(model(x), torch.arange(5) % 3).backward()
    size, full = (4 if dtype is None else 2), 4
    a_of = {name: n if diagonal else n * n for name, (_, (n, diagonal), _) in ZOO_SLOTS.items()}
    in_average = sum(b * (a_of[name] + g * g) for name, (b, _, g) in ZOO_SLOTS.items())
    assert kfac.memory_usage()["pending"] == in_average * full
    opt.step()
    usage = kfac.memory_usage()
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


class Kinds(nn.Module):
    """Two layers of each kind whose parameters have several dimensions."""

    def __init__(self) -> None:
        super().__init__()
        pairs = {
            "conv": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2),
            "back": lambda: nn.ConvTranspose2d(4, 4, 3, padding=1),
            "linear": lambda: nn.Linear(12, 12),
            "words": lambda: nn.Embedding(5, 12),
            "attend": lambda: nn.MultiheadAttention(12, 2, batch_first=True),
        }
        for name, make in pairs.items():
            setattr(self, name, nn.ModuleList([make(), make()]))
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.LayerNorm(12)])

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        for layer in (*self.conv, self.norms[0], *self.back):
            images = layer(images).tanh()
        rows = self.norms[1](self.words[0](tokens) + self.words[1](tokens) + images.flatten(2))
        for layer in self.linear:
            rows = layer(rows).tanh()
        for layer in self.attend:
            rows = rows + layer(rows, rows, rows)[0]
        return rows.square().sum((1, 2)).mean()


@pytest.mark.parametrize("how", [{}, {"compute_method": "eigen", "kl_clip": 1e-3}])
def test_parameters_and_gradients_laid_out_in_any_way(how):
    """Convolutions are channels last or not; of two layers of a shape, one's gradients are as its
    parameters, the other's have their dimensions reversed. The second step lacks a layer."""
    plain = seeded(Kinds)
    turned = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    start = {name: (p.detach().clone(), p.stride()) for name, p in turned.named_parameters()}
    opts = [KFACSGD(x, lr=0.01, momentum=0.9, inv_update_steps=1, **how) for x in (plain, turned)]
    images, tokens = normal(3, 4, 3, 4), torch.arange(12).remainder(5).view(3, 4)
    for step in range(3):
        for net, opt in zip((plain, turned), opts, strict=True):
            opt.zero_grad()
            net(images, tokens).backward()
            for p in net.linear[0].parameters() if step == 1 else ():
                p.grad = None
            for name, p in net.named_parameters():
                if net is turned and ".0." in name and p.grad is not None:
                    back = list(reversed(range(p.dim())))
                    p.grad = p.grad.permute(back).contiguous().permute(back)
            opt.step()
        for (name, p), other in zip(turned.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                p, other, rtol=1e-9, atol=1e-12, msg=name, check_stride=False
            )
    assert not turned.conv[1].weight.is_contiguous()
    for name, p in turned.named_parameters():
        assert not torch.equal(p, start[name][0]) and p.stride() == start[name][1]
        assert opts[1].state[p]["momentum_buffer"].stride() == p.stride()


def test_a_weight_without_a_gradient_rests_and_its_bias_steps():
    """The bias takes the step that it takes beside a gradient of zero."""
    steps = []
    for missing in (True, False):
        net = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
        opt = exact(net)
        net(normal(6, 4)).square().sum(1).mean().backward()
        rests = [net[0].weight, net[2].weight, net[2].bias]
        for p in rests:
            p.grad = None if missing else torch.zeros_like(p)
        steps.append(taken(opt, net))
        assert all((p.grad is None) == missing for p in rests)
    assert not any(step.any() for name, step in steps[0].items() if name != "0.bias")
    assert steps[0]["0.bias"].any()
    assert_close(steps[0]["0.bias"], steps[1]["0.bias"], 1e-8)


@pytest.mark.parametrize("optimizer", [KFACSGD, KFACAdam])
@pytest.mark.parametrize("method", ["polar", "eigen"])
@pytest.mark.parametrize("spike", [1e20, 1e28])
def test_a_spike_of_the_loss_leaves_weights_finite(optimizer, method, spike):
    """The clip's sum overflowed at once, and Adam's second moment where its basis turned later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
    opt = optimizer(model, lr=0.01, compute_method=method)
    for i in range(12):
        x = torch.randn(8, 20)
        x[:, :5] = 0
        descend(opt, model(x).square().mean() * (spike if i == 3 else 1))
    assert all(p.abs().max() < 2 for p in model.parameters())
