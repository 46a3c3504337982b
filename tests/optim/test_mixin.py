"""What a real torch.optim optimizer owes: groups, schedulers, gradients, hooks, models, scalers."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from kaisa_optim import KFACLAMB, KFACSGD, LAMB, KFACAdam, with_kfac
from tests.optim.bases import BASES, Descent, assert_equal_runs, name_of, pair
from tests.support.training import (
    ANEW,
    EVERY_STEP,
    METHODS,
    Probe,
    assert_near,
    assert_same,
    backward,
    batch,
    classes_in,
    difference,
    factors,
    network,
    train,
    values,
    warnings_as,
)

every_method = pytest.mark.parametrize("method", METHODS)

# ---- parameters, groups and models ----


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    first = {"params": list(model[2].parameters()), "lr": 0.05, "momentum": 0.5}
    return [first, {"params": model[0].parameters()}]


FORMS: dict[str, Any] = {
    "model": lambda m: ((m,), {}),
    "parameters": lambda m: ((m.parameters(),), {"model": m}),
    "groups": lambda m: ((two_groups(m),), {"model": m}),
    "named": lambda m: ((m.named_parameters(),), {"model": m}),
    "model twice": lambda m: ((m,), {"model": m}),
    # As torch's own optimizers have it.
    "an empty group": lambda m: (
        ([{"params": []}, {"params": m.parameters()}],),
        {"model": m, "inv_update_steps": 2},
    ),
}


@every_method
@pytest.mark.parametrize(
    ("form", "cls"), [*((form, KFACSGD) for form in FORMS), ("an empty group", KFACLAMB)]
)
def test_every_form_of_params_trains_alike(form, cls, method):
    options = {k: v for k, v in METHODS[method].items() if k not in ANEW} | {"lr": 0.1}
    options |= {"momentum": 0.9} if cls is KFACSGD else {}
    model, expected = network(), network()
    args, kwargs = FORMS[form](model)
    opt = cls(*args, **options, **kwargs)
    if form == "groups":  # the same two, the second added to the first
        first = {**options, "lr": 0.05, "momentum": 0.5}
        reference = KFACSGD(expected[2].parameters(), model=expected, **first)
        reference.add_param_group({"params": expected[0].parameters(), "lr": 0.1, "momentum": 0.9})
    else:
        kwargs.pop("model", None)
        reference = cls(expected, **options, **kwargs)
    assert_equal_runs(range(4), (expected, reference), (model, opt))
    assert opt.device == torch.device("cpu")
    if form == "named":
        assert opt.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]


def test_groups_have_their_own_damping_and_decay():
    model, changed = network(), {"damping": 0.5, "factor_decay": 0.5}
    groups = [{"params": model[0].parameters(), **changed}, {"params": model[2].parameters()}]
    opt = KFACSGD(groups, lr=1.0, model=model, damping=0.01, **EVERY_STEP)
    assert [g["damping"] for g in opt.param_groups] == [0.5, 0.01]
    assert [g["factor_decay"] for g in opt.param_groups] == [0.5, 0.95]
    strong, weak = Probe(model, **changed), Probe(model, damping=0.01)
    for i in range(3):
        of_strong, of_weak, before = strong.step(model, i), weak.step(model, i), values(model)
        v = {n: (of_strong if n.startswith("0") else of_weak)[n] for n in before}
        train(model, opt, [i])
        assert_near(difference(before, model), v)


@pytest.mark.parametrize("frozen", [False, True])
def test_model_that_was_on_the_meta_device(frozen):
    """Sizes can be asked of it; its parameters are others afterwards."""
    with torch.device("meta"):
        model = network()
    if frozen:
        model[0].requires_grad_(False)
    opt = KFACSGD([p for p in model.parameters() if p.requires_grad], lr=0.1, model=model)
    assert opt.preconditioner.memory_usage()["total"] > 0
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.uniform_(p)
    backward(model, 0)
    with pytest.raises(
        RuntimeError, match=rf"Invalid params: {2 * frozen}\.weight was .*to_empty, "
    ):
        opt.step()
    train(model, KFACSGD(model, lr=0.1), [0])


def test_optimizer_that_could_not_be_built_leaves_the_model_alone():
    model = network()
    for bad in ({"damping": -1}, {"skip_layers": ["Linear"]}, {"kl_clip": 1e-3}):
        with pytest.raises(ValueError):
            KFACSGD(model, lr=0.1, **bad)
    modules = list(model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    with warnings_as("error"):
        train(model, KFACSGD(model, lr=0.1), [0])


def test_skip_layers_pattern_that_matches_nothing():
    matches = "skip_layers: 'heda' matches no module.*named_modules"
    with pytest.warns(UserWarning, match=matches) as caught:
        opt = KFACSGD(network(), lr=0.1, skip_layers=["heda", "^0$"])
    assert caught[0].filename == __file__
    assert list(opt.preconditioner.layers) == ["2"]


# ---- the learning rate and the KL clip ----


def schedulers() -> dict[str, Any]:
    s = lr_scheduler
    return {
        "LambdaLR": lambda o: s.LambdaLR(o, lambda e: 1 / (1 + e)),
        "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda e: 0.7),
        "StepLR": lambda o: s.StepLR(o, 2, 0.5),
        "MultiStepLR": lambda o: s.MultiStepLR(o, [1, 3], 0.5),
        "ConstantLR": lambda o: s.ConstantLR(o, 0.5, 2),
        "LinearLR": lambda o: s.LinearLR(o, 0.1, total_iters=4),
        "ExponentialLR": lambda o: s.ExponentialLR(o, 0.8),
        "PolynomialLR": lambda o: s.PolynomialLR(o, 5),
        "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 5),
        "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 2),
        "SequentialLR": lambda o: s.SequentialLR(o, two_rates(o), [2]),
        "ChainedScheduler": lambda o: s.ChainedScheduler(two_rates(o), optimizer=o),
        "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, factor=0.5, patience=0),
        "CyclicLR": lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=True),
        "OneCycleLR": lambda o: s.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=True),
    }


def two_rates(opt: Any) -> list[Any]:
    return [lr_scheduler.ConstantLR(opt, 0.1, 2), lr_scheduler.ExponentialLR(opt, 0.5)]


NAMES = [c.__name__ for c in classes_in(lr_scheduler, lr_scheduler.LRScheduler)]
SCHEDULED = [(name, optim.SGD, "eigen") for name in NAMES]
SCHEDULED += [(name, optim.Adam, "eigen") for name in ("OneCycleLR", "CyclicLR")]
for name in ("StepLR", "OneCycleLR", "CyclicLR", "ReduceLROnPlateau"):
    SCHEDULED += [(name, base, "polar") for base in (optim.SGD, optim.Adam, optim.RAdam)]


@pytest.mark.parametrize(("name", "base", "method"), SCHEDULED)
def test_learning_rate_schedulers(name, base, method):
    """Rates and momenta are a plain optimizer's; set by hand, they make the same steps."""
    # At a higher rate, the limit of SGD's directions would hide the rate.
    settings: dict[str, Any] = {"lr": 0.1}
    if base is optim.SGD:
        settings = {"lr": 1e-3 if method == "polar" else 0.1, "momentum": 0.9}
    models = model, expected, fixed = [network() for _ in range(3)]
    opts = opt, by_hand, _ = [with_kfac(base)(m, **settings, **METHODS[method]) for m in models]
    plain = base(network().parameters(), **settings)
    rates = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        both = [schedulers()[name](o) for o in (opt, plain)]
        for i in range(5):
            group = plain.param_groups[0]
            for key in {"lr", "momentum", "betas"} & group.keys():
                assert opt.param_groups[0][key] == group[key]
                by_hand.param_groups[0][key] = group[key]
            rates.append(group["lr"])
            for own, of in zip(models, opts, strict=True):
                train(own, of, [i])
            plain.step()
            for scheduler in both:
                # A loss that never improves.
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            assert_same(model, expected)
    assert len(set(rates)) > 1
    assert difference(values(fixed), model)["0.weight"].abs().max() > 1e-6
    assert method == "polar" or opt.param_groups[0]["kl_clip_lr"] == 0.1


@pytest.mark.parametrize("of", [float, lambda lr: torch.tensor(lr, dtype=torch.float64)])
@pytest.mark.parametrize("choice", [None, "initial", "current"])
def test_kl_clip_alpha(choice, of):
    """By default the lr of construction, whatever the schedule; else the current one."""
    model, kappa = network(), 1e-4
    opt = KFACSGD(model, lr=of(0.5), kl_clip_lr=choice, **{**EVERY_STEP, "kl_clip": kappa})
    assert opt.param_groups[0]["kl_clip_lr"] == ("current" if choice == "current" else 0.5)
    probe = Probe(model)
    for i, lr in enumerate([0.5, 0.05, 0.01]):
        opt.param_groups[0]["lr"] = of(lr)
        v, before = probe.step(model, i), values(model)
        train(model, opt, [i])
        inner = sum(float((v[n] * p.grad).sum()) for n, p in model.named_parameters())
        alpha = lr if choice == "current" else 0.5
        nu = (kappa / (alpha**2 * inner)) ** 0.5
        assert nu < 1
        assert_near(difference(before, model), {n: lr * nu * x for n, x in v.items()}, rtol=1e-6)


# ---- gradients and zero_grad ----


class Failing(optim.SGD):
    fails = True

    def step(self, closure=None):
        if self.fails:
            raise ZeroDivisionError


@every_method
@pytest.mark.parametrize("base", [*BASES, Failing], ids=name_of)
def test_grad_is_left_as_backward_made_it(base, method):
    """Also if the base raises."""
    model, opt = pair(with_kfac(base), compute_method=method)
    start = values(model)
    for i in range(2):
        opt.zero_grad()
        backward(model, i)
        gradients = [p.grad for p in model.parameters()]
        copies = [g.clone() for g in gradients]
        with pytest.raises(ZeroDivisionError) if base is Failing else contextlib.nullcontext():
            opt.step()
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        assert_same(gradients, copies)
    if base is Failing:
        assert_same(values(model), start)


def test_the_passes_of_a_step_that_raised_are_not_counted_in_the_next():
    options = {"compute_method": "eigen", "factor_decay": 0.0, "factor_update_steps": 1}
    opts = []
    for fails in (True, False):
        model, opt = pair(with_kfac(Failing), **options)
        backward(model, 0)
        opt.fails = fails
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            opt.step()
        opt.fails = False
        backward(model, 1)  # onto the gradients that are there
        opt.step()
        opts.append(opt)
    assert_same(factors(opts[0]), factors(opts[1]))


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_wrapper_may_take_over_an_optimizers_attributes(cls):
    (model, opt), (expected, reference) = pair(cls, lr=0.1), pair(cls, lr=0.1)
    wrapper = object.__new__(cls)
    wrapper.__dict__.update(opt.__dict__)
    del opt
    assert_equal_runs(range(2), (expected, reference), (model, wrapper))


@every_method
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_gradients_and_statistics(set_to_none, method):
    (model, opt), (expected, fresh) = (pair(KFACSGD, lr=0.1, **METHODS[method]) for _ in range(2))
    backward(model, 7)  # aborted: a leftover
    assert opt.preconditioner.memory_usage()["pending"] > 0
    opt.zero_grad(set_to_none)
    assert opt.preconditioner.memory_usage()["pending"] == 0
    assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())
    backward(model, 0)
    opt.step()
    train(expected, fresh, [0])
    assert_same(model, expected)
    assert_same(factors(opt), factors(fresh))


# ---- hooks ----


def fresh_base() -> type[optim.Optimizer]:
    """A class of its own, whose step no other test has had wrapped."""

    class Plain(Descent):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.move(p, self.param_groups[0])

    return Plain


def child() -> type[optim.Optimizer]:
    """A class that calls the step of its parent, which has hooks, too."""
    optim.RAdam(network().parameters())  # which wraps that step

    class Child(optim.RAdam):
        def step(self, closure=None):
            return super().step(closure)

    return Child


@every_method
@pytest.mark.parametrize(
    ("make", "plain", "times"),
    [
        *((fresh_base, plain, 1) for plain in ("never", "before", "after", "itself")),
        *((lambda cls=cls: cls, "after", 1) for cls in (optim.SGD, optim.Adam, LAMB)),
        *((child, plain, 2) for plain in ("never", "itself")),
    ],
)
def test_step_hooks_fire_as_often_as_without_kfac(make, plain, times, method):
    """Whether the base steps once more or not at all, and in a plain base beside K-FAC."""
    base, model = make(), network()
    if plain == "before":
        base(network().parameters())
    opt = with_kfac(base)(model, compute_method=method)
    if plain == "after":
        base(network().parameters())
    if plain == "itself":
        opt = base(model.parameters())
        with_kfac(base)(network())
    hooks = [Mock(return_value=None) for _ in range(4)]
    with (
        opt.register_step_pre_hook(hooks[0]),
        opt.register_step_post_hook(hooks[1]),
        register_optimizer_step_pre_hook(hooks[2]),
        register_optimizer_step_post_hook(hooks[3]),
    ):
        for i in range(1, 3):
            train(model, opt, [i])
            assert [hook.call_count for hook in hooks] == [times * i] * 4


@every_method
def test_a_step_pre_hook_may_change_the_gradients(method):
    """It runs before K-FAC sees them: a hook that zeroes them makes a step of nothing."""
    model, opt = pair(KFACSGD, lr=0.1, compute_method=method)
    opt.register_step_pre_hook(lambda *_: model.zero_grad(set_to_none=False))
    before = values(model)
    train(model, opt, [0])
    assert_same(values(model), before)


@every_method
def test_state_dict_and_load_hooks_fire_exactly_once(method):
    model, opt = pair(KFACSGD, lr=0.1, momentum=0.9, compute_method=method)
    train(model, opt, [0])
    hooks = [Mock(return_value=None) for _ in range(4)]
    names = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    for name, hook in zip(names, hooks, strict=True):
        getattr(opt, f"register_{name}_hook")(hook)
    for i in range(1, 3):
        opt.load_state_dict(opt.state_dict())
        assert [hook.call_count for hook in hooks] == [i] * 4


# ---- groups that come later, and models beside the trained one ----


@pytest.mark.parametrize(
    ("cls", "method"), [(KFACSGD, "polar"), (KFACAdam, "polar"), (KFACSGD, "eigen")]
)
def test_a_group_added_later_begins_as_in_a_first_step(cls, method):
    """Factors and momenta of the others go on as though it had not come."""
    model, alone = network(), network()
    settings = {"lr": 0.01, **({"momentum": 0.9} if cls is KFACSGD else {}), **METHODS[method]}
    opt = cls(model[0].parameters(), model=model, **settings)
    train(model, opt, range(3))
    kept = factors(opt)["0"], copy.deepcopy(opt.state[model[0].weight])
    body, of_body = copy.deepcopy((model, opt))
    added = {"lr": 0.005, "damping": 0.3}
    opt.add_param_group({"params": model[2].parameters(), **added})
    assert_same((opt.preconditioner.factors("0"), opt.state[model[0].weight]), kept)
    alone.load_state_dict(model.state_dict())
    head = cls(alone[2].parameters(), model=alone, **{**settings, **added})
    before = values(model)
    for net, its in ((model, opt), (alone, head), (body, of_body)):
        train(net, its, [3])
    for name, change in difference(before, model).items():
        twin = body if name.startswith("0") else alone
        assert change.abs().max() > 0
        assert_near(change, difference(before, twin)[name])


@every_method
def test_copied_models_have_no_live_hooks(method):
    model, opt = pair(KFACSGD, lr=0.1, **METHODS[method])
    train(model, opt, [0])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        backward(twin, 5)
        assert "Tap" not in type(twin(batch(5)[0]).grad_fn).__name__
        assert opt.preconditioner.memory_usage()["pending"] == 0
        alone = network()
        alone.load_state_dict(twin.state_dict())
        backward(alone, 5)
        assert_same([p.grad for p in twin.parameters()], [p.grad for p in alone.parameters()])
    # Steps for which only the copies saw a backward pass are still without statistics.
    opt.zero_grad()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="no covered layer saw a backward pass"):
        for _ in range(25):
            opt.step()


def test_two_optimizers_on_parts_of_one_model():
    model, expected = network(), network()
    one = KFACSGD(model[0].parameters(), lr=0.1, model=model, **EVERY_STEP)
    two = KFACAdam(model[2].parameters(), lr=0.1, model=model, **EVERY_STEP)
    of_one, of_two = Probe(model, ["0.weight", "0.bias"]), Probe(model, ["2.weight", "2.bias"])
    sgd = optim.SGD(expected[0].parameters(), lr=0.1)
    adam = optim.Adam(expected[2].parameters(), lr=0.1)
    for i in range(3):
        one.zero_grad()
        two.zero_grad()
        backward(model, i)
        v, w = of_one.step(expected, i), of_two.step(expected, i)
        for name, p in expected.named_parameters():
            p.grad = (v if name.startswith("0") else w)[name]
        for opt in (one, two, sgd, adam):
            opt.step()
        assert_near(model, expected, rtol=1e-6)
    # One's zero_grad leaves the other's statistics alone.
    backward(model, 9)
    one.zero_grad()
    assert one.preconditioner.memory_usage()["pending"] == 0
    assert two.preconditioner.memory_usage()["pending"] > 0


# ---- GradScaler ----


def told(method: str, scale: Any) -> dict[str, Any]:
    """The papers' methods are told the scale of the loss; directions need no word of it."""
    return {"compute_method": method, **({"grad_scaler": scale} if method == "eigen" else {})}


def scaled_training(model, opt, scaler, steps, broken=(), zero_grad=None, clip=None):
    """Training under a GradScaler; the batches in ``broken`` overflow."""
    for i in steps:
        (zero_grad or opt.zero_grad)()
        factor = float("inf") if i in broken else 1.0
        backward(model, i, lambda loss, factor=factor: scaler.scale(loss * factor))
        if clip is not None:  # between backward and step, as in torch's examples
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt)
        scaler.update()
    opt.zero_grad()


@every_method
@pytest.mark.parametrize(
    ("cls", "settings", "zeroing", "told_by"),
    [
        (KFACSGD, {"momentum": 0.9}, "optimizer", "scaler"),
        (KFACSGD, {"momentum": 0.9}, "optimizer, to zero", "callable"),
        (KFACSGD, {"momentum": 0.9, "fused": True}, "model", "scaler"),
        (KFACAdam, {"fused": True}, "optimizer", "scaler"),
        (KFACAdam, {}, "model", "callable"),
        (KFACLAMB, {}, "optimizer", "scaler"),
    ],
)
def test_a_skipped_step_leaves_no_trace(cls, settings, zeroing, told_by, method):
    """Neither do the scales of the loss, which fall and grow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    settings = {"lr": 0.05, **ANEW, **settings}
    scale = scaler if told_by == "scaler" else scaler.get_scale
    model, opt = pair(cls, torch.float32, **told(method, scale), **settings)
    expected, other = pair(cls, torch.float32, compute_method=method, **settings)
    assert opt._step_supports_amp_scaling is False
    zero_grad = {
        "optimizer": opt.zero_grad,
        "optimizer, to zero": lambda: opt.zero_grad(set_to_none=False),
        "model": model.zero_grad,
    }[zeroing]
    broken = (10, 11, 12, 13)
    with warnings_as("error"):
        scaled_training(model, opt, scaler, [10, 0, 11, 1, 2, 12, 13, 3], broken, zero_grad)
    assert scaler.get_scale() == 2.0**7
    assert opt.preconditioner.steps == 4
    train(expected, other, range(4))
    assert_near(factors(opt), factors(other), rtol=1e-4, atol=1e-6)
    assert_near(model, expected, rtol=1e-4, atol=1e-6)


@every_method
def test_unscaled_and_clipped_gradients(method):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    model, opt = pair(KFACSGD, lr=0.05, **told(method, scaler))
    expected, other = pair(KFACSGD, lr=0.05, compute_method=method)
    scaled_training(model, opt, scaler, range(3), clip=0.1)
    for i in range(3):
        other.zero_grad()
        backward(expected, i)
        nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        other.step()
    assert_same(model, expected)
