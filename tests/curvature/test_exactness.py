"""Identities that K-FAC must hold exactly, as properties in float64.

Where curvature is compared with the generalised Gauss-Newton matrix Σ_n J_nᵀ H_n J_n, the output
gradients are fed by the test ("type 2"): for H_n = Σ_c r_cn r_cnᵀ the batch is repeated once per c
and the loss is Σ_{c,n} ⟨r_cn, f_cn⟩ / √K. With B_n = ∂f_n/∂s_n the rows are g_cn = B_nᵀ r_cn / √K,
hence G = K Σ g gᵀ = Σ_n B_nᵀ H_n B_n for every K, and A = Σ a aᵀ / rows is the batch's own, since
each row occurs equally often. The exact block Σ_n B_nᵀ H_n B_n ⊗ a_n a_nᵀ is the product G ⊗ A
just where the one or the other does not vary with n; H is the same for all n here.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from tests.support import reference as ref
from tests.support.training import descend
from tests.support.watch import Body

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")

property_test = settings(max_examples=12)
widths = st.integers(1, 4)
seeds = st.integers(0, 2**16)
methods = st.sampled_from(list(ref.METHODS))
sharings = st.sampled_from(["expand", "reduce"])


def drawn_from(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


@st.composite
def tensors(draw, *shape: int) -> Tensor:
    """Values of several characters: rank-deficient, repeated, mostly zero, of any scale."""
    generator = drawn_from(draw(seeds))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    sparse = values * (torch.rand(shape, generator=generator) < 0.4)
    equal_rows = values[:1].expand(shape).clone()
    styles = (values, values.round(), sparse, equal_rows, 10.0 * values, 0.1 * values)
    return styles[draw(st.integers(0, 5))]


def seeded(net: nn.Module, seed: int) -> nn.Module:
    generator = drawn_from(seed)
    net = net.double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.6)
    return net


@st.composite
def mlps(draw, activations=(nn.Identity,), depth: int = 3) -> nn.Sequential:
    sizes = draw(st.lists(widths, min_size=2, max_size=depth + 1))
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(sizes):
        layers.append(nn.Linear(inside, outside, bias=draw(st.booleans())))
        layers.append(draw(st.sampled_from(activations))())
    return seeded(nn.Sequential(*layers[:-1]), draw(seeds))


BENT = (nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ReLU)


def plain(net: nn.Module, **options) -> KFACSGD:
    """An optimizer whose step subtracts the preconditioned gradient and nothing else."""
    return KFACSGD(net, lr=1.0, kl_clip=None, compute_method="eigen", **options)


def linears(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]


def blocks(net: nn.Module, name: str, values: dict[str, Tensor]) -> Tensor:
    weight, bias = (values.get(f"{name}.{key}") for key in ("weight", "bias"))
    return ref.matrix(net.get_submodule(name), weight, bias)


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / (2 * len(output))


def first_step(opt, net: nn.Module, loss: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and what one step subtracted."""
    loss.backward()
    gradients = ref.gradients_of(net)
    return gradients, ref.take_step(opt, net)


# ---------------------------------------------------------------- equal to Gauss-Newton


def feed(opt, net: nn.Module, x: Tensor, root: Tensor, how: str) -> None:
    """Type-2 output gradients: each row r of ``root`` ``[C, O]`` for each example."""
    terms = len(root) * len(x)  # the K that ``how`` implies
    if how == "positions":
        terms *= x.shape[1]
    elif how == "number":
        opt.preconditioner.loss_terms = terms = 2.5
    for rows in root.split(1) if how == "micro-batches" else [root]:
        outputs = net(x.repeat(len(rows), *[1] * (x.dim() - 1)))
        fed = rows.repeat_interleave(len(x), 0).div(math.sqrt(terms))
        (outputs * (fed[:, None] if how == "positions" else fed)).sum().backward()


feeding = st.sampled_from(["repeated", "micro-batches", "number"])


def exact_blocks(net: nn.Module, x: Tensor, root: Tensor) -> dict[str, Tensor]:
    hessians = (root.T @ root).expand(len(x), -1, -1)
    return {name: ref.ggn(net, name, x, hessians) for name in linears(net)}


def block_of(opt, name: str) -> Tensor:
    a, g = opt.preconditioner.factors(name)
    return torch.kron(g[0], a[0])


def check_blocks(data, net, x, how, layers=slice(None), **options) -> None:
    """Blocks from fed gradients are exact; a step along any gradient then is (F + γI)⁻¹∇."""
    root = data.draw(tensors(data.draw(widths), net(x).shape[-1]))
    exact = exact_blocks(net, x.flatten(0, 1) if how == "positions" else x, root)
    opt = plain(net, damping=0.1, **options)
    feed(opt, net, x, root, how)
    generator = drawn_from(data.draw(seeds))
    for p in net.parameters():
        p.grad.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    gradients, steps = ref.gradients_of(net), ref.take_step(opt, net)
    for name in linears(net)[layers]:
        ref.assert_close(block_of(opt, name), exact[name], what=f"{name}: block")
        damped = exact[name] + 0.1 * torch.eye(len(exact[name]), dtype=torch.float64)
        expected = torch.linalg.solve(damped, blocks(net, name, gradients).flatten())
        ref.assert_close(blocks(net, name, steps).flatten(), expected, what=f"{name}: step")


# Nets, different and equal examples, and the layers whose blocks are exact.
EXACT = {
    "a deep_linear net": (mlps(), widths, 1, slice(None)),
    "one example": (mlps(BENT), st.just(1), 1, slice(None)),
    "copies of one": (mlps(BENT), st.just(1), 3, slice(None)),
    "the last layer": (mlps(BENT), widths, 1, slice(-1, None)),
}


@pytest.mark.parametrize("case", EXACT)
@property_test
@given(data=st.data(), how=feeding)
def test_exact_for(case, data, how):
    nets, examples, copies, layers = EXACT[case]
    net = data.draw(nets)
    x = data.draw(tensors(data.draw(examples), net[0].in_features)).repeat(copies, 1)
    check_blocks(data, net, x, how, layers)


@property_test
@given(data=st.data(), body=mlps(), n=widths, positions=widths)
def test_reduce_is_exact_for_a_linear_net_that_pools(data, body, n, positions):
    """ā = Σa/P and ḡ = P Bᵀr: their block is B_nᵀHB_n ⊗ (Σa)(Σa)ᵀ, the pooled net's own."""
    net = Body(lambda m, x: m.body(x).sum(1), body=body)
    x = data.draw(tensors(n, positions, body[0].in_features))
    check_blocks(data, net, x, "repeated", weight_sharing="reduce")


@property_test
@given(data=st.data(), net=mlps(), n=widths, positions=widths)
def test_expand_is_exact_for_a_linear_net_whose_loss_averages_positions(data, net, n, positions):
    x = data.draw(tensors(n, positions, net[0].in_features))
    check_blocks(data, net, x, "positions", loss_terms="positions")


@property_test
@given(seed=seeds, n=st.integers(3, 5))
def test_not_exact_for_a_tanh_first_layer(seed, n):
    """The control: these tests can tell a K-FAC block from the exact one."""
    net = seeded(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), seed)
    x = 2 * torch.randn(n, 3, generator=drawn_from(seed), dtype=torch.float64)
    root = torch.eye(2, dtype=torch.float64)
    exact = exact_blocks(net, x, root)
    opt = plain(net)
    feed(opt, net, x, root, "repeated")
    opt.step()
    error = {name: (block_of(opt, name) - f).norm() / f.norm() for name, f in exact.items()}
    assert error["0"] > 0.02
    assert error["2"] < 1e-9


# ---------------------------------------------------------------- the clip


class Varied(nn.Module):
    """A small net with several layer kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2, padding=1)
        self.grouped = nn.Conv2d(2, 4, 2, groups=2)
        self.norm = nn.GroupNorm(2, 4)  # left to the base, as "free"
        self.tokens = nn.Linear(9, 3)
        self.head = nn.Linear(12, 3)
        self.free = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.free(self.conv(x))
        x = self.norm(self.grouped(x))
        return self.head(self.tokens(x.flatten(2)).flatten(1))


COVERED = ("conv", "grouped", "tokens", "head")


def varied(seed: int) -> nn.Module:
    return seeded(Varied(), seed)


def varied_batch(data, n: int) -> tuple[Tensor, Tensor]:
    return data.draw(tensors(n, 1, 3, 3)), data.draw(tensors(n, 3)) + 2


@property_test
@given(
    data=st.data(),
    n=widths,
    method=methods,
    kappa=st.sampled_from([1e-6, 1e-3, 0.1, 1e6]),
    lr=st.sampled_from([0.01, 0.5, 3.0]),
    other_lr=st.sampled_from([0.1, 1.0]),
)
def test_the_clip_bounds_the_predicted_change(data, n, method, kappa, lr, other_lr):
    """ν = min(1, √(κ / Σα²⟨v,∇⟩)), so that ν²Σα²⟨v,∇⟩ ≤ κ; each group with its own α."""
    seed = data.draw(seeds)
    x, target = varied_batch(data, n)

    def run(clip):
        net = varied(seed)
        head = [*net.head.parameters()]
        body = [p for name, p in net.named_parameters() if not name.startswith("head")]
        groups = [{"params": head, "lr": other_lr}, {"params": body}]
        opt = KFACSGD(groups, lr, model=net, kl_clip=clip, **ref.METHODS[method])
        gradients, steps = first_step(opt, net, half_square(net(x), target))
        alpha = {key: other_lr if key.startswith("head") else lr for key in steps}
        return gradients, {key: step / alpha[key] for key, step in steps.items()}, alpha

    gradients, raw, alpha = run(None)
    _, clipped, _ = run(kappa)
    total = sum(
        alpha[key] ** 2 * float((v * gradients[key]).sum())
        for key, v in raw.items()
        if key.rsplit(".", 1)[0] in COVERED
    )
    nu = min(1.0, math.sqrt(kappa / total)) if total > 0 else 1.0
    assert nu**2 * total <= kappa * (1 + 1e-9)
    for key in raw:
        expected = raw[key] if key.startswith(("free", "norm")) else nu * raw[key]
        # A step is a difference of parameters: digits below their last one are lost.
        assert (clipped[key] - expected).abs().max() <= 1e-9 * expected.abs().max() + 1e-13


# ---------------------------------------------------------------- what changes nothing
@property_test
@given(data=st.data(), sizes=st.lists(widths, min_size=1, max_size=4), sharing=sharings)
def test_micro_batches_are_one_batch(data, sizes, sharing):
    """k losses divided by k; ragged ones weighed by their share, as a user must."""
    seed, n = data.draw(seeds), sum(sizes)
    x, target = varied_batch(data, n)
    whole, parts = varied(seed), varied(seed)
    opt, opt_parts = (plain(net, damping=0.1, weight_sharing=sharing) for net in (whole, parts))
    _, steps = first_step(opt, whole, half_square(whole(x), target))
    equal = len(set(sizes)) == 1
    for one_x, one_target in zip(x.split(sizes), target.split(sizes), strict=True):
        weight = 1 / len(sizes) if equal else len(one_x) / n
        (half_square(parts(one_x), one_target) * weight).backward()
    steps_parts = ref.take_step(opt_parts, parts)
    for name in COVERED:
        found, wanted = (o.preconditioner.factors(name) for o in (opt_parts, opt))
        for one, other, side in zip(found, wanted, "AG", strict=True):
            ref.assert_close(one, other, 1e-8, f"{name}: {side}")
        step = blocks(parts, name, steps_parts)
        ref.assert_close(step, blocks(whole, name, steps), 1e-8, f"{name}: step")


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    "decays",
    [[0.001], [0.95], [1.0, 1.0], [0.0, 0.0, 0.0], [0.05, 0.3], [0.3, 0.999, 0.5, 0.95, 0.5]],
    ids=str,
)
def test_an_average_is_weighed_and_its_first_value_is_exact(decays, sharing):
    """x̂ ← x̂ + ((1−β)/w)(x − x̂), w ← βw + 1 − β: a convex mean.

    A decay of 0 takes the newest statistics, and a decay of 1 keeps the first.
    """
    net = varied(2)
    intervals = {"factor_update_steps": 1, "inv_update_steps": 1, "weight_sharing": sharing}
    opt = KFACSGD(net, lr=0.01, compute_method="eigen", **intervals)
    values: dict[str, list] = {name: [] for name in COVERED}
    generator = drawn_from(0)
    for decay in decays:
        x = torch.randn(2, 1, 3, 3, generator=generator, dtype=torch.float64)
        fresh = copy.deepcopy(net)
        single = plain(fresh, weight_sharing=sharing, factor_decay=0.5)
        first_step(single, fresh, half_square(fresh(x), x.flatten(1)[:, :3]))
        opt.param_groups[0]["factor_decay"] = decay
        descend(opt, half_square(net(x), x.flatten(1)[:, :3]))
        for name in COVERED:
            values[name].append(single.preconditioner.factors(name))
    # The weight of each value, written out: (1 − β_i) times all later β, over their sum.
    weights = [(1 - d) * math.prod(decays[i + 1 :]) for i, d in enumerate(decays)]
    weights[0] += not any(weights)
    for name in COVERED:
        for side, factor in enumerate(opt.preconditioner.factors(name)):
            mean = sum(w * pair[side] for w, pair in zip(weights, values[name], strict=True))
            assert mean.abs().max() > 0
            ref.assert_close(factor, mean / sum(weights), what=f"{name}: {'AG'[side]}")
