"""Corrected eigenvalues: against the dense Fisher, the equations step by step, and other ranks."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kaisa_optim import KFACSGD, Layer, WorkAssignment, register_layer
from kaisa_optim.curvature.rules import EkfacRule
from kaisa_optim.layers import base
from kaisa_optim.linalg import kronecker, moments
from tests.comm.test_sharded import Plan as Sharding
from tests.comm.test_sharded import check as check_sharded
from tests.layers.test_layer_kinds import (
    ATTENTION,
    CONV,
    EMBEDDING,
    LINEAR,
    NORMS,
    TRANSPOSED,
    WIDE,
    Case,
    Net,
    attention_factors,
    attention_inputs,
    attention_matrices,
    build,
    changed,
    each_sharing,
    loss_of,
)
from tests.support import reference as ref
from tests.support.cluster import Plan, assert_alike, average, error, even, train, train_alone
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import assert_near, assert_same
from tests.support.watch import Watch, factors_of, normal, rows_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:the base optimizer updates these"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
]

DAMPING = 0.07
MODES = ("examples", "gradients")
each_mode = pytest.mark.parametrize("mode", MODES)


# ---- one basis: S is the diagonal of the Fisher there ----


def fisher(a: Tensor, g: Tensor, terms: float, sharing: str) -> Tensor:
    """K Σ vec(∇) vec(∇)ᵀ of each block; ∇ is a row's g aᵀ, under "reduce" an example's sum."""
    rows = torch.einsum("bnpg,bnpa->bnpga", g, a)
    rows = rows.sum(2) if sharing == "reduce" else rows.flatten(1, 2)
    rows = rows.flatten(2)
    return terms * sum(rows[:, i, :, None] * rows[:, i, None, :] for i in range(rows.shape[1]))


def kron(g: Tensor, a: Tensor) -> Tensor:
    return torch.stack([torch.kron(one_g, one_a) for one_g, one_a in zip(g, a, strict=True)])


def views(opt: Any, name: str) -> dict[str, Tensor]:
    kfac = opt.preconditioner
    return dict(kfac.applied.views(kfac.layers[name]))


def basis(opt: Any, name: str, blocks: slice = slice(None)) -> Tensor:
    """Q_G ⊗ Q_A of some blocks."""
    kept = views(opt, name)
    sides = []
    for side in "ga":
        vectors = kept.get(f"{side}_vectors")
        if vectors is None:
            vectors = torch.diag_embed(torch.ones_like(kept[f"{side}_values"]))
        sides.append(vectors[blocks])
    return kron(*sides)


def check_spectrum(opt: Any, name: str, expected: Tensor, blocks: slice = slice(None)) -> None:
    """S is the diagonal of Qᵀ F Q: then it has F's trace, and no other is nearer to F."""
    kept = views(opt, name)
    found, q = kept["corrected"][blocks], basis(opt, name, blocks)
    inside = (q.mT @ expected @ q).diagonal(0, 1, 2)
    ref.assert_close(found.flatten(1), inside, what=f"{name}: S")
    ref.assert_close(
        found.sum((1, 2)), expected.diagonal(0, 1, 2).sum(1), what=f"{name}: trace", floor=1e-9
    )
    product = kept["g_values"][blocks, :, None] * kept["a_values"][blocks, None, :]
    errors = [
        (expected - q @ torch.diag_embed(values.flatten(1)) @ q.mT).norm(dim=(1, 2))
        for values in (found, product)
    ]
    assert (errors[0] <= errors[1] * (1 + 1e-12) + 1e-12).all()


def check_step(opt: Any, name: str, gradient: Tensor, step: Tensor, blocks: Any = None) -> None:
    blocks = slice(None) if blocks is None else blocks
    q, values = basis(opt, name, blocks), views(opt, name)["corrected"][blocks].flatten(1)
    projected = (q.mT @ gradient.flatten(1)[..., None])[..., 0]
    expected = (q @ (projected / (values + DAMPING))[..., None])[..., 0]
    ref.assert_close(step, expected.view_as(step), what=f"{name}: step")


def exact(model: nn.Module, mode: Any = True, **options: Any) -> KFACSGD:
    return KFACSGD(
        model,
        lr=1.0,
        damping=DAMPING,
        kl_clip=None,
        factor_update_steps=1,
        eigenvalue_correction=mode,
        **options,
    )


def check_kind(case: Case, sharing: str, **options: Any) -> None:
    net, x = build(case)
    opt = exact(net, weight_sharing=sharing, **options)
    plain, twin = copy.deepcopy(net), copy.deepcopy(net)
    without = exact(plain, False, weight_sharing=sharing, **options)
    uncorrected = exact(twin, False, weight_sharing=sharing, **options)
    terms = len(x) if case.terms is None else case.terms
    for i in range(2):
        opt.zero_grad()
        a, g = ref.input_rows(net.layer, x, **case.call), None
        g = ref.gradient_rows(net.layer, loss_of, x, **case.call)
        loss_of(net(x, **case.call)).backward()
        gradient = changed(net.layer, ref.gradients_of(net))
        twin.load_state_dict(net.state_dict())
        uncorrected.zero_grad()
        loss_of(twin(x, **case.call)).backward()
        uncorrected.step()
        step = changed(net.layer, ref.take_step(opt, net))
        # What is gathered beside them leaves the factors as they are.
        both = (o.preconditioner.factors("layer") for o in (opt, uncorrected))
        for mine, other in zip(*both, strict=True):
            ref.assert_close(mine, other, 1e-12, what="a factor")
        if i == 0:
            # There is no basis yet in which to see an example: K-FAC's own step.
            loss_of(plain(x, **case.call)).backward()
            expected = changed(plain.layer, ref.take_step(without, plain))
            ref.assert_close(step, expected, 1e-11, what="the first step")
        else:
            check_spectrum(opt, "layer", fisher(a, g, terms, sharing))
        check_step(opt, "layer", gradient, step)


KINDS = {
    **{f"linear {name}": LINEAR[name] for name in ("2d", "4d", "1d", "no bias 3d")},
    **{f"linear {name}": LINEAR[name] for name in ("frozen weight", "frozen bias", "expanded")},
    **{f"conv {name}": CONV[name] for name in ("1d", "1d unbatched", "2d everything", "3d")},
    **{f"conv {name}": CONV[name] for name in ("2d groups no bias", "2d frozen weight groups")},
    **{f"transposed {n}": TRANSPOSED[n] for n in ("1d unbatched", "2d groups", "2d depthwise")},
    **{f"embedding {name}": case for name, case in EMBEDDING.items()},
    **{f"norm {n}": NORMS[n] for n in ("layer sequences", "layer frozen bias", "group", "batch2d")},
}


@each_sharing
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_kind(kind, sharing):
    check_kind(KINDS[kind], sharing)


@each_sharing
@pytest.mark.parametrize("wide", WIDE)
def test_diagonal_factors(wide, sharing):
    case, limit, _ = WIDE[wide]
    check_kind(case, sharing, max_factor_size=limit)


@each_sharing
@pytest.mark.parametrize("kind", ["linear 4d", "conv 1d", "conv 2d everything"])
def test_parts_of_a_batch(kind, sharing, monkeypatch):
    """Room for the rows of about one example."""
    monkeypatch.setattr(base, "_CHUNK_ELEMENTS", 40)
    check_kind(KINDS[kind], sharing)


@each_sharing
@pytest.mark.parametrize("name", ["self batch first", "cross", "kdim and vdim"])
def test_attention(name, sharing):
    case = ATTENTION[name]
    torch.manual_seed(3)
    mha = nn.MultiheadAttention(4, 2, dropout=0.0, **case.make).double()
    net, inputs = Net(mha), attention_inputs(case, 4)
    opt = exact(net, weight_sharing=sharing, loss_terms=2.0)  # not all have the batch first
    for i in range(2):
        opt.zero_grad()
        out, _, taps = ref.attention_by_hand(mha, *inputs)
        # Of any layout, rows are [examples, positions, width].
        rows = ref.tap_rows(taps, loss_of(out), bias=mha.in_proj_bias is not None)
        loss_of(net(*inputs)[0]).backward()
        gradients = attention_matrices(mha, ref.gradients_of(net), "layer.")
        steps = attention_matrices(mha, ref.take_step(opt, net), "layer.")
        assert rows.keys() == attention_factors(opt, mha, "layer").keys()
        for label, (a, g) in rows.items():
            packed = mha.in_proj_weight is not None and label in "qkv"
            at = "qkv".index(label) if packed else 0
            blocks = slice(at, at + 1)
            layer = "layer." + ("in_proj" if packed else f"{label}_proj")
            if i > 0:
                check_spectrum(opt, layer, fisher(a, g, 2, sharing), blocks)
            check_step(opt, layer, gradients[label], steps[label], blocks)


sizes = st.integers(1, 5)
seeds = st.integers(0, 10_000)
often = settings(max_examples=25)


def orthogonal(blocks: int, n: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(blocks, n, n, seed=seed)).Q.contiguous()


@given(sizes, sizes, sizes, sizes, st.integers(1, 3), seeds, st.booleans(), st.booleans())
@often
def test_projected_rows_are_the_diagonal_of_their_fisher(
    batch, positions, g, a, blocks, seed, append_one, shared
):
    rows_g = normal(blocks, batch, positions, g, seed=seed)
    rows_a = normal(1 if shared else blocks, batch, positions, a, seed=seed + 1)
    bases = orthogonal(blocks, g, seed), orthogonal(blocks, a + append_one, seed + 1)
    whole_a = rows_a.expand(blocks, -1, -1, -1)
    if append_one:
        whole_a = torch.cat([whole_a, torch.ones_like(whole_a[..., :1])], -1)
    for sharing in ("expand", "reduce"):
        expected = fisher(whole_a, rows_g, 1.0, sharing)
        for q_g, q_a in ((bases[0], bases[1]), (None, bases[1]), (bases[0], None), (None, None)):
            found = moments.projected_moment(
                rows_g, rows_a, q_g, q_a, append_one=append_one, by_example=sharing == "reduce"
            )
            eye_g, eye_a = (torch.eye(n.shape[1]).double().expand_as(n) for n in bases)
            q = kron(eye_g if q_g is None else q_g, eye_a if q_a is None else q_a)
            inside = (q.mT @ expected @ q).diagonal(0, 1, 2).view(blocks, g, a + append_one)
            ref.assert_close(found, inside)


def test_k_of_a_mean_gradient_counts_as_much_as_its_terms():
    """Over all signs of its terms, K ∇² of their sum is K Σ ∇²."""
    rows_g, rows_a = normal(1, 4, 1, 3), normal(1, 4, 1, 2, seed=1)
    bases = orthogonal(1, 3, 0), orthogonal(1, 2, 1)
    expected = moments.projected_moment(rows_g, rows_a, *bases, append_one=False, by_example=False)
    total = torch.zeros_like(expected)
    for signs in torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 4):
        gradient = torch.einsum("n,bnpg,bnpa->bga", signs, rows_g, rows_a)
        total += kronecker.into_basis(gradient, *bases).square() / 16
    ref.assert_close(total, expected)


# ---- step by step, while bases move ----

INTERVAL = 4
LAYERS = ("0", "2", "4")
ROWS = 24  # every factor's eigenvalues differ: no basis is a matter of rounding


def chain() -> nn.Sequential:
    """Two layers of one shape, and another."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)
    ).double()


def backward(
    model: nn.Module,
    i: int,
    sizes: tuple[int, ...] = (ROWS,),
    scale: float = 1,
    part: slice | None = None,
) -> None:
    """Micro-batches; each loss weighs as much as its rows. ``part`` is a rank's of one batch."""
    x, y = normal(sum(sizes), 5, seed=100 + i), normal(sum(sizes), 3, seed=200 + i)
    if part is not None:
        x, y = x[part], y[part]
        sizes = (len(x),)
    for part_x, part_y in zip(x.split(sizes), y.split(sizes), strict=True):
        loss = (model(part_x) - part_y).square().sum() / sum(sizes)
        (scale * loss).backward()
    if part is not None:
        average(model.parameters())


def learn(model: nn.Module, opt: Any, steps: Iterable[int], **how: Any) -> None:
    for i in steps:
        opt.zero_grad()
        backward(model, i, **how)
        opt.step()


def pair(mode: Any = "examples", **options: Any) -> tuple[nn.Sequential, KFACSGD]:
    model = chain()
    given_options = {
        "lr": 0.1,
        "damping": DAMPING,
        "kl_clip": None,
        "factor_update_steps": 1,
        "inv_update_steps": INTERVAL,
        "staggered": False,
        "eigenvalue_correction": mode,
        **options,
    }
    return model, KFACSGD(model, **given_options)


class Kept(NamedTuple):
    """Of one layer."""

    a: Tensor
    g: Tensor
    weight: float
    q: tuple[Tensor, Tensor] | None = None  # of G, of A
    spectrum: Tensor = torch.zeros(())
    mass: float = 0.0


class Reference:
    """The equations for one layer after another, in dense matrices."""

    def __init__(self, mode: str, every: int, decay: float) -> None:
        self.model, self.mode, self.every, self.decay = chain(), mode, every, decay
        self.watch = Watch(self.model, *LAYERS)
        self.kept: dict[str, Kept] = {}

    def step(self, i: int, sizes: tuple[int, ...]) -> None:
        for calls in self.watch.calls.values():
            calls.clear()
        self.model.zero_grad()
        backward(self.model, i, sizes)
        with torch.no_grad():
            for name in LAYERS:
                self.step_layer(name, i, sum(sizes))

    def step_layer(self, name: str, i: int, terms: int) -> None:
        module, beta = self.model.get_submodule(name), self.decay
        a, g = rows_of(module, self.watch.trained(name))
        new_a, new_g = (f[0] for f in factors_of(a, g, terms))
        kept = self.kept.get(name) or Kept(0 * new_a, 0 * new_g, 0.0)
        fed = i % self.every == 0
        if fed:
            kept = kept._replace(
                a=beta * kept.a + (1 - beta) * new_a,
                g=beta * kept.g + (1 - beta) * new_g,
                weight=beta * kept.weight + 1 - beta,
            )
            if kept.q is not None and self.mode == "examples":
                q = torch.kron(*kept.q)
                seen = (q.T @ fisher(a[:, :, None], g[:, :, None], terms, "expand")[0] @ q).diag()
                mass = beta * kept.mass + 1 - beta
                old = beta * kept.mass * kept.spectrum.flatten() + (1 - beta) * seen
                kept = kept._replace(spectrum=(old / mass).view_as(kept.spectrum), mass=mass)
        if i % INTERVAL == 0:
            kept = moved(kept)
        assert kept.q is not None
        columns = [p.grad.reshape(len(module.weight), -1) for p in module.parameters()]
        projected = kept.q[0].T @ torch.cat(columns, 1) @ kept.q[1]
        step = kept.q[0] @ (projected / (kept.spectrum + DAMPING)) @ kept.q[1].T
        if fed and self.mode == "gradients":
            new = beta * kept.spectrum + (1 - beta) * terms * projected**2
            kept = kept._replace(spectrum=new, mass=1.0)
        module.weight -= 0.1 * step[:, : module.in_features]
        if module.bias is not None:
            module.bias -= 0.1 * step[:, -1]
        self.kept[name] = kept


def moved(kept: Kept) -> Kept:
    """S goes over to the bases of the factors as they are now, unless nothing has gone into it."""
    (v_g, q_g), (v_a, q_a) = (torch.linalg.eigh(f / kept.weight) for f in (kept.g, kept.a))
    spectrum = torch.outer(v_g, v_a)
    if kept.mass > 0:
        turn = torch.kron(q_g, q_a).T @ torch.kron(*kept.q)
        spectrum = (turn @ kept.spectrum.flatten().diag() @ turn.T).diag().view_as(spectrum)
    return kept._replace(q=(q_g, q_a), spectrum=spectrum)


@each_mode
@pytest.mark.parametrize("every", [1, 3, 8])
def test_steps_follow_the_equations(mode, every):
    """Of 8, S goes over to a second basis before anything has gone into it."""
    sizes, decay = (ROWS, 10, 14), 0.7
    model, opt = pair(mode, factor_update_steps=every, factor_decay=decay)
    reference = Reference(mode, every, decay)
    for i in range(11):
        learn(model, opt, [i], sizes=sizes)
        reference.step(i, sizes)
        assert_near(model, reference.model, rtol=1e-9, atol=1e-11)


@each_mode
def test_the_first_step_is_that_of_k_fac(mode):
    (model, opt), (plain, without) = pair(mode), pair(False)
    learn(model, opt, [0])
    learn(plain, without, [0])
    assert_near(model, plain, rtol=1e-12, atol=1e-14)
    learn(model, opt, [1])
    learn(plain, without, [1])
    assert (model[0].weight - plain[0].weight).abs().max() > 1e-4


@each_sharing
def test_layers_that_take_turns(sharing):
    """Of one batch and weights that stand still, S is the diagonal at every time."""
    model, opt = pair(
        lr=1e-30, staggered=True, factor_update_steps=2, inv_update_steps=3, weight_sharing=sharing
    )
    seen = set()
    for _ in range(9):
        learn(model, opt, [0])
        watched = copy.deepcopy(model)
        watch = Watch(watched, *LAYERS)
        backward(watched, 0)
        for name in LAYERS:
            if views(opt, name)["corrected_mass"] > 0:
                rows = rows_of(watched.get_submodule(name), watch.trained(name))
                a, g = (part[:, :, None] for part in rows)
                check_spectrum(opt, name, fisher(a, g, ROWS, sharing))
                seen.add(name)
    assert seen == set(LAYERS)


@given(sizes, sizes, seeds, st.booleans(), st.booleans())
@often
def test_a_turn_keeps_what_has_been_seen(g, a, seed, with_g, with_a):
    before = normal(4, g, a, seed=seed).square()
    state = {"corrected": before.clone(), "corrected_mass": torch.tensor([1.0, 0.0, 0.5, 1.0])}
    values = {side: normal(2, n, seed=seed + 1).square() for side, n in (("g", g), ("a", a))}
    product = values["g"][:, :, None] * values["a"][:, None, :]
    turns = [orthogonal(2, n, seed) if on else None for n, on in ((g, with_g), (a, with_a))]
    applied: Any = SimpleNamespace(
        group_of={None: SimpleNamespace(tensors=state)},
        by_key={(None, side): {"values": values[side]} for side in "ga"},
    )
    layer: Any = None
    EkfacRule(None, "examples").rotate(applied, layer, slice(1, 3), turns)
    found = state["corrected"]
    assert torch.equal(found[[0, 3]], before[[0, 3]])
    assert torch.equal(found[1], product[0])  # nothing had gone into it
    eyes = [torch.eye(n).double() for n in (g, a)]
    whole = torch.kron(*(eye if t is None else t[1] for t, eye in zip(turns, eyes, strict=True)))
    expected = (whole @ before[2].flatten().diag() @ whole.T).diag().view(g, a)
    ref.assert_close(found[2], expected)
    assert (found >= 0).all()
    torch.testing.assert_close(found[2].sum(), before[2].sum())


@each_mode
def test_a_batch_that_overflows_leaves_no_trace(mode):
    model, opt = pair(mode)
    learn(model, opt, range(2))
    before = {name: views(opt, name)["corrected"].clone() for name in LAYERS}
    backward(model, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.grad.fill_(torch.inf)
    kfac = opt.preconditioner
    for gathered in kfac.sums.of_layer.values():
        for total in (gathered.a, gathered.g, gathered.projected):
            if total is not None:
                total.fill_(torch.nan)
    weights = copy.deepcopy(model.state_dict())
    opt.step()
    model.load_state_dict(weights)
    for name in LAYERS:
        assert torch.equal(views(opt, name)["corrected"], before[name])
    learn(model, opt, [3])
    for name in LAYERS:
        after = views(opt, name)["corrected"]
        assert after.isfinite().all() and not torch.equal(after, before[name])


def test_a_loss_scale_is_taken_out():
    (model, opt), (scaled, other) = pair(), pair(grad_scaler=8.0)
    for i in range(6):
        learn(model, opt, [i])
        other.zero_grad()
        backward(scaled, i, scale=8.0)
        for p in scaled.parameters():
            p.grad /= 8.0
        other.step()
    assert_near(scaled, model)


@each_mode
def test_a_layer_without_a_gradient_keeps_its_own(mode):
    model, opt = pair(mode)
    learn(model, opt, range(2))
    before = [views(opt, name)["corrected"].clone() for name in ("0", "2")]
    opt.zero_grad()
    x = normal(ROWS, 5, seed=5)
    model[2](x).square().sum().div(ROWS).backward()  # of the same shape as the one left out
    opt.step()
    after = [views(opt, name)["corrected"] for name in ("0", "2")]
    assert torch.equal(after[0], before[0]) and not torch.equal(after[1], before[1])


def test_a_frozen_bias_starts_its_layer_anew():
    model, opt = pair()
    learn(model, opt, range(3))
    model[2].bias.requires_grad_(False)
    learn(model, opt, [3])
    kept = views(opt, "2")
    assert kept["corrected"].shape == (1, 5, 5) and kept["corrected_mass"] == 0
    ref.assert_close(kept["corrected"], kept["g_values"][:, :, None] * kept["a_values"][:, None])
    assert views(opt, "0")["corrected_mass"] > 0
    learn(model, opt, [4])
    assert views(opt, "2")["corrected_mass"] > 0


# ---- several ranks ----

WHERE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "examples": ("examples", 2, {}),
    "examples in small buckets": ("examples", 3, {"assignment": "opt", "bucket_cap_mb": 2e-4}),
    "gradients": ("gradients", 2, {"assignment": "layer-wise"}),
    "gradients of some": ("gradients", 4, {"grad_worker_fraction": 0.5}),
}


def plan_of(mode: str, world: int, name: str, where: dict[str, Any], **changes: Any) -> Plan:
    options = {
        "eigenvalue_correction": mode,
        "factor_update_steps": 2,
        "inv_update_steps": INTERVAL,
        "kl_clip": 1e-2,
    }
    sizes = changes.pop("sizes", even(world, ROWS // world))
    return Plan(sizes, name, options=options, spread=where, wrapper=None, steps=7, **changes)


@functools.lru_cache
def alone(mode: str, world: int, name: str) -> dict[str, Tensor]:
    return train_alone(plan_of(mode, world, name, {})).parameters


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("examples", "images"),
        ("gradients of some", "images"),
        ("examples in small buckets", "tokens"),
        ("gradients", "tokens"),
    ],
)
def test_ranks_take_the_steps_of_one_process(where, name):
    mode, world, options = WHERE[where]
    ranks = run(world, train, plan_of(mode, world, name, options))
    assert_alike([rank.parameters for rank in ranks])
    assert error(ranks[0].parameters, alone(mode, world, name)) < 1e-9


@each_mode
def test_ragged_micro_batches_are_one_batch(mode):
    plan = plan_of(mode, 2, "chain", {}, sizes=((5, 9), (7, 3)), weighed=True)
    ranks = run(2, train, plan)
    assert_alike([rank.parameters for rank in ranks])
    assert error(ranks[0].parameters, train_alone(plan).parameters) < 1e-9


@pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")
def test_sharded_parameters():
    options = {"eigenvalue_correction": "gradients", "factor_update_steps": 1}
    check_sharded(Sharding(options=options))


def without_a_gradient() -> list[tuple[Tensor, Tensor, bool]]:
    """S before and after a step with statistics of a layer, whose gradient someone has taken."""
    model, opt = pair("gradients", assignment="layer-wise")
    learn(model, opt, range(2))
    before = spectra(opt)
    opt.zero_grad()
    backward(model, 2)
    model[2].weight.grad = model[2].bias.grad = None
    opt.step()
    after = spectra(opt)
    return [(before[name]["corrected"], after[name]["corrected"], name == "2") for name in before]


def test_a_gradient_that_is_missing_everywhere_is_not_a_zero():
    kept = [layer for rank in run(2, without_a_gradient) for layer in rank]
    assert [left_out for *_, left_out in kept].count(True) == 1
    for before, after, left_out in kept:
        assert torch.equal(before, after) == left_out


def refused(options: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        pair(**options)
    return str(caught.value)


class One(WorkAssignment):
    def gradient_workers(self, world: int) -> int:
        return 1


@pytest.mark.parametrize("assignment", ["layer-wise", One()])
def test_all_ranks_refuse_examples_of_which_some_lack_the_basis(assignment):
    for text in run(2, refused, {"assignment": assignment}):
        assert 'eigenvalue_correction: "examples"' in text and "1 of 2" in text
        assert 'assignment="opt"' in text and 'eigenvalue_correction="gradients"' in text


# ---- state ----


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def spectra(opt: Any) -> dict[str, dict[str, Tensor]]:
    kfac = opt.preconditioner
    kept = {x.name: dict(kfac.applied.views(x)) for x in kfac.applied.group_of}
    names = ("corrected", "corrected_mass")
    return {name: {n: x[n].clone() for n in names} for name, x in kept.items()}


@each_mode
@pytest.mark.parametrize("stop", [1, 6])
def test_a_state_dict_goes_on_bit_for_bit(mode, stop):
    model, opt = pair(mode)
    learn(model, opt, range(stop))
    other, fresh = pair(mode)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(through_a_file(opt.state_dict()))
    assert_same(spectra(fresh), spectra(opt))
    for own, steps in ((model, opt), (other, fresh)):
        learn(own, steps, range(stop, 11))
    assert_same(other, model)
    assert_same(fresh.state_dict(), opt.state_dict())


@each_mode
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_bit_for_bit(mode, copied):
    model, opt = pair(mode)
    learn(model, opt, range(6))
    other, twin = copied((model, opt))
    before = spectra(twin)
    assert_same(before, spectra(opt))
    learn(model, opt, range(6, 11))
    assert_same(spectra(twin), before)  # it shares no tensor
    learn(other, twin, range(6, 11))
    assert_same(other, model)


def consolidated(mode: str, where: dict[str, Any]) -> tuple[Any, Any]:
    """Rank 1's state after 6 steps, gathered; and its parameters after those to come."""
    model, opt = pair(mode, **where)
    half = slice(dist.get_rank(), None, 2)
    learn(model, opt, range(6), part=half)
    opt.consolidate_state_dict(to=1)
    state = copy.deepcopy((model.state_dict(), opt.state_dict())) if dist.get_rank() else None
    learn(model, opt, range(6, 11), part=half)
    return state, ref.parameters_of(model)


@pytest.mark.filterwarnings("ignore:state_dict")
@pytest.mark.parametrize("mode, where", [("examples", "opt"), ("gradients", "layer-wise")])
def test_a_consolidated_state_goes_on_alone(mode, where):
    _, (state, expected) = run(2, consolidated, mode, {"assignment": where})
    model, opt = pair(mode)
    model.load_state_dict(state[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.load_state_dict(state[1])
    learn(model, opt, range(6, 11))
    assert_near(model, expected)


@each_mode
def test_a_state_without_corrected_eigenvalues_starts_from_products(mode):
    model, opt = pair(False)
    learn(model, opt, range(6))
    other, fresh = pair(mode)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(through_a_file(opt.state_dict()))
    for state in opt.preconditioner.states.values():
        state.has_state = False  # decompose here, too, as there it must
    learn(model, opt, [6])
    learn(other, fresh, [6])
    assert_near(other, model, rtol=1e-12, atol=1e-14)
    learn(other, fresh, [7])
    assert all(x["corrected_mass"] > 0 for x in spectra(fresh).values())


# ---- what is refused ----


@pytest.mark.parametrize(
    ("value", "options", "words"),
    [
        ("typo", {}, ["'typo'", "True", "'examples'", "'gradients'"]),
        (1, {}, ["1;", "True"]),
        (True, {"compute_method": "inverse"}, ["True", "compute_method='inverse'"]),
        ("gradients", {"compute_method": "inverse"}, ["'gradients'", "no eigenvalues"]),
        (True, {"compute_eigenvalue_outer_product": True}, ["outer_product=True"]),
        (True, {"normalization": "kaisa"}, ["normalization='kaisa'"]),
    ],
)
def test_options_that_cannot_work_together(value, options, words):
    text = refused({"mode": value, **options})
    assert text.startswith("Invalid eigenvalue_correction: ")
    for word in words:
        assert word in text


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3).double())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def test_a_kind_without_rows_is_refused_by_name():
    @register_layer(Squared)
    class SquaredLayer(Layer):
        def __init__(self, name: str, module: nn.Module) -> None:
            super().__init__(name, module)
            self.in_shape, self.outputs = (3,), 2

        def input_moment(self, x: Tensor, grad: Tensor, **asked: Any) -> Tensor:
            return x.mT[None] @ x

        def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
            return grad[None, :, None]

    make: Callable[..., Any] = functools.partial(KFACSGD, nn.Sequential(Squared()), lr=0.1)
    with pytest.raises(ValueError, match=r"'0'.*SquaredLayer.*input_rows.*skip_layers"):
        make(eigenvalue_correction=True)
    assert set(make(eigenvalue_correction="gradients").preconditioner.layers) == {"0"}
