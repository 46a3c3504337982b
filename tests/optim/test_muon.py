"""Muon against torch's own and its equations; AdamW beside it, states."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import (
    LAMB,
    KFACMuon,
    Muon,
)
from kaisa_optim.linalg import orthogonal
from tests.support.cluster import (
    batch,
    network,
)
from tests.support.reference import muon_direction, muon_ratio
from tests.support.training import assert_near, assert_same

EACH: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 1, "staggered": False}

with_torchs = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon yet")


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(10 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


# ---- the base ----


SHAPES = [(6, 6), (4, 9), (9, 4), (5, 2, 3, 3), (9, 4), (1, 7)]


def backward(model: nn.Module, name: str, step: int) -> None:
    x, y = batch(name, step, 24)
    F.cross_entropy(model(x), y).backward()


def built(cls: Any) -> tuple[nn.Module, Any]:
    model = network("chain")
    return model, cls(model.parameters(), 0.03, **({} if cls is Muon else {"model": model}))


@pytest.mark.parametrize(
    ("nesterov", "adjust", "maximize"),
    [(True, None, False), (False, "original", True), (True, "match_rms_adamw", True)],
)
def test_matrices_and_kernels_follow_the_equations(nesterov, adjust, maximize):
    params = weights(*SHAPES)
    options = {"nesterov": nesterov, "adjust_lr_fn": adjust, "maximize": maximize}
    opt = Muon(params, lr=0.1, weight_decay=0.2, momentum=0.8, **options)
    expected = [p.detach().flatten(1).clone() for p in params]
    momenta = [torch.zeros_like(x) for x in expected]
    for step in range(3):
        give_gradients(params, step)
        opt.step()
        for p, weight, momentum in zip(params, expected, momenta, strict=True):
            gradient = p.grad.flatten(1) * (-1 if maximize else 1)
            momentum.mul_(0.8).add_(gradient, alpha=0.2)
            ahead = 0.8 * momentum + 0.2 * gradient if nesterov else momentum
            weight.mul_(1 - 0.1 * 0.2)
            weight.sub_(0.1 * muon_ratio(*weight.shape, adjust) * muon_direction(ahead))
            assert_near(p.detach().flatten(1), weight)


@with_torchs
@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_torchs_muon(nesterov):
    """Torch's products are in bfloat16."""
    ours, theirs = (weights(*SHAPES[:3], dtype=torch.float32) for _ in range(2))
    pair = Muon(ours, 0.05, nesterov=nesterov), torch.optim.Muon(theirs, 0.05, nesterov=nesterov)
    for step in range(4):
        for params, opt in zip((ours, theirs), pair, strict=True):
            give_gradients(params, step)
            opt.step()
    assert_near(ours, theirs, rtol=0.02, atol=0.02)
    for p, q in zip(ours, theirs, strict=True):
        assert_near(pair[0].state[p]["momentum_buffer"], pair[1].state[q]["momentum_buffer"], 1e-6)


@with_torchs
def test_it_has_torchs_arguments():
    plain = torch.optim.Muon(weights((2, 2)))
    opt = Muon(weights((2, 2)))
    assert list(opt.defaults)[: len(plain.defaults)] == list(plain.defaults)
    assert {k: opt.defaults[k] for k in plain.defaults} == plain.defaults


def test_autocast_changes_no_step():
    params, others = (weights((48, 48), dtype=torch.float32) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(48, 4, generator=generator) for _ in range(2))
    for own, autocast in ((params, True), (others, False)):
        own[0].grad = left @ right.T
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            Muon(own, 0.1).step()
    assert_same(params, others)


def test_many_of_one_shape_are_taken_some_at_a_time(monkeypatch):
    together, apart = weights(*[(4, 6)] * 5), weights(*[(4, 6)] * 5)
    for own, at_once in ((together, 1 << 20), (apart, 48)):
        monkeypatch.setattr(orthogonal, "_AT_ONCE", at_once)
        give_gradients(own, 0)
        Muon(own, 0.1).step()
    assert_near(together, apart)


def test_vectors_and_excluded_matrices_take_adamws_steps():
    ours, theirs = (weights((4,), (), (3, 3), (2, 2)) for _ in range(2))
    common, betas = {"lr": 0.03, "weight_decay": 0.1}, (0.8, 0.9)
    table = {"params": ours[2:3], "use_muon": False, "lr": 0.01}
    first = {"params": [*ours[:2], ours[3]]}
    opt = Muon([first, table], adam_betas=betas, adam_eps=1e-4, **common)
    apart = {"params": theirs[2:3], "lr": 0.01}
    plain = torch.optim.AdamW([{"params": theirs[:2]}, apart], betas=betas, eps=1e-4, **common)
    for step in range(4):
        for params in (ours, theirs):
            give_gradients(params, step)
        opt.step()
        plain.step()
    assert_same(ours[:3], theirs[:3])
    assert not torch.equal(ours[3], theirs[3])
    assert opt.state[ours[0]].keys() == plain.state[theirs[0]].keys()
    assert opt.state[ours[3]].keys() == {"momentum_buffer"}


def test_steps_of_one_shape_together_are_those_of_each_alone():
    together, alone = weights((4, 6), (4, 6), (4, 6)), weights((4, 6), (4, 6), (4, 6))
    opts = [Muon(together, 0.1), *(Muon([p], 0.1) for p in alone)]
    for step in range(3):
        for params in (together, alone):
            give_gradients(params, step)
        if step == 1:  # one without a gradient keeps its momentum
            together[1].grad = alone[1].grad = None
        for opt in opts:
            opt.step()
    assert_near(together, alone)


def test_copies_and_closures():
    params = weights((3, 4), (3,))
    opt = Muon(params, 0.1)
    give_gradients(params, 0)
    assert opt.step(lambda: 5.0) == 5.0
    twin: Any = pickle.loads(pickle.dumps(opt))
    for own in (opt, twin):
        give_gradients([p for g in own.param_groups for p in g["params"]], 1)
        own.step()
    assert_same(twin.param_groups[0]["params"], params)
    assert_same(copy.deepcopy(opt).state_dict(), opt.state_dict())


def test_a_tensor_lr_is_as_good_as_a_number():
    params, others = weights((3, 4), (3,)), weights((3, 4), (3,))
    for own, lr in ((params, 0.1), (others, torch.tensor(0.1, dtype=torch.float64))):
        give_gradients(own, 0)
        Muon(own, lr).step()
    assert_near(params, others)


def test_schedules_of_the_momentum_are_muons():
    plain = network("chain")
    for model, opt in ((plain, Muon(plain.parameters(), 0.1)), built(KFACMuon)):
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10)
        before = opt.param_groups[0]["adam_betas"]
        backward(model, "chain", 0)
        opt.step()
        schedule.step()
        assert opt.param_groups[0]["momentum"] != 0.95
        assert opt.param_groups[0]["adam_betas"] == before


def test_sparse_and_complex_are_refused():
    (p,) = weights((3, 3))
    p.grad = torch.eye(3, dtype=torch.float64).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        Muon([p]).step()
    q = nn.Parameter(torch.eye(3, dtype=torch.complex64))
    q.grad = torch.ones_like(q)
    with pytest.raises(RuntimeError, match="complex"):
        Muon([q]).step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1}, "Invalid learning rate: -1"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"weight_decay": -1}, "Invalid weight_decay: -1; it must be a number 0 or above"),
        ({"momentum": 1.0}, r"Invalid momentum: 1.0; it must be a number in \[0, 1\)"),
        ({"adam_betas": (0.9, 1.0)}, "Invalid adam_betas"),
        ({"ns_coefficients": (1.0, 2.0)}, "Invalid ns_coefficients"),
        ({"lr": None}, "Invalid learning rate: None"),
        ({"eps": 0.0}, "Invalid eps: 0.0; it must be a number above 0"),
        ({"adam_betas": (0.9,)}, "Invalid adam_betas"),
        ({"nesterov": "no"}, "Invalid nesterov"),
        ({"ns_steps": 0}, "Invalid ns_steps: 0"),
        ({"adjust_lr_fn": "matched"}, "Invalid adjust_lr_fn: 'matched'; choose from None"),
        ({"use_muon": "yes"}, "Invalid use_muon: 'yes'"),
        ({"ns_steps": True}, "Invalid ns_steps: True"),
        ({"use_muon": True}, r"Invalid use_muon: True for a parameter of shape \(3,\)"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Muon(weights((3, 3), (3,)), **options)
    opt = Muon(weights((2, 2)))
    with pytest.raises(ValueError, match=words):
        opt.add_param_group({"params": weights((3, 3), (3,)), **options})
    assert len(opt.param_groups) == 1


def test_adamws_own_names_in_a_group_are_refused():
    """As other packages' groups have them."""
    group = {"params": weights((3,)), "use_muon": False, "betas": (0.9, 0.95)}
    with pytest.raises(ValueError, match=r"Invalid betas: .* no effect; give adam_betas"):
        Muon([group], 0.1)


def test_a_vector_that_is_given_to_it_later_is_refused():
    params = weights((3,))
    opt = Muon(params, 0.1)
    give_gradients(params, 0)
    opt.param_groups[0]["use_muon"] = True
    with pytest.raises(ValueError, match=r"Invalid use_muon: True for a parameter of shape \(3,\)"):
        opt.step()


# ---- half precision ----


def test_half_precision_parameters_of_adamw():
    """In float16 the squares of small gradients are zero."""
    dtype = torch.float16
    ours, theirs = weights((5,), dtype=dtype), weights((5,), dtype=dtype)
    wide = [nn.Parameter(p.detach().float()) for p in theirs]
    opt, plain = Muon(ours, 0.01), torch.optim.AdamW(wide, 0.01, weight_decay=0.1)
    for _ in range(3):
        ours[0].grad = torch.full((5,), 1e-5, dtype=dtype)
        wide[0].grad = ours[0].grad.float()
        opt.step()
        plain.step()
    assert_near(ours[0].float(), wide[0].data, 1e-2, 1e-2)
    assert opt.state[ours[0]]["exp_avg_sq"].dtype == torch.float32
    opt.load_state_dict(opt.state_dict())
    ours[0].grad = torch.full((5,), 1e-5, dtype=dtype)
    opt.step()
    assert ours[0].isfinite().all()


def test_a_momentum_of_half_precision_parameters():
    """Float16 hardly holds these gradients."""
    ours, theirs = weights((8, 8), dtype=torch.float16), weights((8, 8), dtype=torch.float16)
    wide = [nn.Parameter(p.detach().float()) for p in theirs]
    opts = Muon(ours, 0.1), Muon(wide, 0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        ours[0].grad = (3e-7 * torch.randn(8, 8, generator=generator)).half()
        wide[0].grad = ours[0].grad.float()
        for opt in opts:
            opt.step()
    assert_near(ours[0].float(), wide[0].data, 1e-2, 1e-2)


@pytest.mark.parametrize(("cls", "dtype"), [(Muon, torch.float16), (KFACMuon, torch.bfloat16)])
def test_half_precision_parameters_go_on_bit_for_bit_after_a_load(cls, dtype):
    """Their moments are in float32, and a load in torch's manner would round them."""

    def built(model):
        return cls(model.parameters(), 0.01, **({} if cls is Muon else {"model": model}))

    def step(model, opt, seed):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
        opt.zero_grad()
        (1e-3 * model(x).float().square().mean()).backward()  # whose squares float16 has not
        opt.step()

    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)
    model = nn.Sequential(*layers).to(dtype)
    opt = built(model)
    for seed in range(5):
        step(model, opt, seed)
    seen = []
    other = copy.deepcopy(model)
    again = built(other)
    again.register_load_state_dict_post_hook(lambda o: seen.append(copy.deepcopy(o.state_dict())))
    saved = io.BytesIO()
    torch.save(opt.state_dict(), saved)
    saved.seek(0)
    again.load_state_dict(torch.load(saved, weights_only=True))
    moments = copy.deepcopy(opt.state_dict()["state"])
    for i, entry in seen[0]["state"].items():
        for name in entry.keys() & {"momentum_buffer", "exp_avg", "exp_avg_sq"}:
            assert torch.equal(entry[name], moments[i][name])
    for seed in range(5, 8):
        step(model, opt, seed)
        step(other, again, seed)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


# ---- states ----


class _Large(Tensor):
    def to(self, *args, **kwargs):
        raise torch.OutOfMemoryError("there is no room for it")


@pytest.mark.parametrize("cls", [Muon, KFACMuon])
def test_a_load_for_which_there_is_no_room_changes_nothing(cls):
    model, opt = built(cls)
    for i in range(2):
        backward(model, "chain", i)
        opt.step()
    before = copy.deepcopy(opt.state_dict())
    loaded = copy.deepcopy(before)
    entry = next(x for x in reversed(loaded["state"].values()) if "exp_avg" in x)
    entry["exp_avg"] = entry["exp_avg"].as_subclass(_Large)
    with pytest.raises(torch.OutOfMemoryError):
        opt.load_state_dict(loaded)
    assert_same(opt.state_dict(), before)
    opt.step()


def test_a_load_shares_no_moments_with_what_was_loaded():
    mine, other = weights((3, 4), dtype=torch.bfloat16), weights((3, 4), dtype=torch.bfloat16)
    one, two = Muon(mine, 0.1), Muon(other, 0.1)
    mine[0].grad = other[0].grad = torch.ones(3, 4, dtype=torch.bfloat16)
    one.step()
    two.load_state_dict(one.state_dict())
    before = one.state[mine[0]]["momentum_buffer"].clone()
    two.step()
    assert torch.equal(one.state[mine[0]]["momentum_buffer"], before)


@pytest.mark.parametrize("base", [torch.optim.AdamW, LAMB])
def test_a_state_of_another_base_loads(base):
    params, others = weights((3, 4), (4,)), weights((3, 4), (4,))
    plain, opt = base(params, 0.1), Muon(others, 0.3, momentum=0.8)
    give_gradients(params, 0)
    plain.step()
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    (group,) = opt.param_groups
    assert (group["lr"], group["eps"], group["ns_steps"]) == (0.1, 1e-7, 5)
    if base is torch.optim.AdamW:
        assert (group["adam_eps"], group["adam_betas"]) == (1e-8, (0.9, 0.999))
        assert_same(opt.state[others[1]]["exp_avg"], plain.state[params[1]]["exp_avg"])
    give_gradients(others, 1)
    opt.step()
    assert all(p.isfinite().all() for p in others)


@with_torchs
def test_a_state_of_torchs_muon_leaves_what_it_lacks():
    params, others = weights((3, 3), (4, 4)), weights((3, 3), (4, 4))
    plain = torch.optim.Muon([{"params": params[:1]}, {"params": params[1:]}], 0.1)
    give_gradients(params, 0)
    plain.step()
    opt = Muon([{"params": others[:1]}, {"params": others[1:], "use_muon": False}], 0.3)
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert [group["use_muon"] for group in opt.param_groups] == [None, False]
    give_gradients(others, 1)
    opt.step()
    assert opt.state[others[1]].keys() == {"step", "exp_avg", "exp_avg_sq"}


@with_torchs
def test_a_state_of_torchs_muon_goes_on():
    params, others = weights(*SHAPES[:3]), weights(*SHAPES[:3])
    plain, opt = torch.optim.Muon(params, 0.1), Muon(others, 0.3)
    give_gradients(params, 0)
    plain.step()
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert opt.param_groups[0]["lr"] == 0.1 and opt.param_groups[0]["use_muon"] is None
    for p, q in zip(params, others, strict=True):
        assert_same(opt.state[q]["momentum_buffer"], plain.state[p]["momentum_buffer"])
    give_gradients(others, 1)
    opt.step()


def test_moments_of_the_other_step_are_dropped():
    params, others = weights((3, 3)), weights((3, 3))
    plain, opt = torch.optim.AdamW(params, 0.1), Muon(others, 0.1)
    give_gradients(params, 0)
    plain.step()
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    give_gradients(others, 1)
    opt.step()
    assert opt.state[others[0]].keys() == {"momentum_buffer"}
    opt.param_groups[0]["use_muon"] = False
    opt.step()
    assert opt.state[others[0]].keys() == {"step", "exp_avg", "exp_avg_sq"}
