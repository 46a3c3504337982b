"""What a real torch.optim optimizer owes: groups, hooks, schedulers, closures, scalers, models."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from kaisa_optim import KFACLAMB, KFACSGD, LAMB, KFACAdam, with_kfac
from tests.optim.bases import AS_THE_BASE, BASES
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


@pytest.mark.parametrize("method", METHODS)
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
    train(model, opt, range(4))
    train(expected, reference, range(4))
    assert_same(model, expected)
    assert opt.device == torch.device("cpu")
    if form == "named":
        assert opt.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]


def test_groups_have_their_own_damping_and_decay():
    model = network()
    opt = KFACSGD(
        [
            {"params": model[0].parameters(), "damping": 0.5, "factor_decay": 0.5},
            {"params": model[2].parameters()},
        ],
        lr=1.0,
        model=model,
        damping=0.01,
        **EVERY_STEP,
    )
    assert [g["damping"] for g in opt.param_groups] == [0.5, 0.01]
    assert [g["factor_decay"] for g in opt.param_groups] == [0.5, 0.95]
    strong, weak = Probe(model, damping=0.5, factor_decay=0.5), Probe(model, damping=0.01)
    for i in range(3):
        of_strong, of_weak = strong.step(model, i), weak.step(model, i)
        before = values(model)
        train(model, opt, [i])
        moved = difference(before, model)
        for name, change in moved.items():
            expected = (of_strong if name.startswith("0") else of_weak)[name]
            assert_near(change, expected)


# ---- models and parameters that do not fit ----


def of_group(**given: Any) -> Any:
    model = network()
    return KFACSGD([{"params": model.parameters(), **given}], lr=0.1, model=model)


def with_a_stranger() -> Any:
    groups = [{"params": (model := network()).parameters()}, {"params": [STRANGER]}]
    return KFACAdam(groups, lr=0.1, model=model)


STRANGER = nn.Parameter(torch.zeros(5, 7))
# fmt: off
# Calls, and what their errors say.
REFUSED: list[tuple[Any, str]] = [
    (lambda: KFACSGD(network(), differentiable=True), "Invalid differentiable: True; .*leave it F"),
    (lambda: of_group(differentiable=True), "Invalid differentiable: True; .*leave it False"),
    (lambda: of_group(damping=-1.0), "Invalid damping: -1.0"),
    (lambda: of_group(factor_decay=-0.5), "Invalid factor_decay: -0.5"),
    (lambda: of_group(kl_clip=1e-9), "Invalid kl_clip: 1e-09 in a parameter group; it is one"),
    (lambda: KFACSGD(nn.Sequential(nn.PReLU())),
     r"Invalid model: .*no layer that K-FAC covers.*0\.weight.*scales.*register_layer"),
    (lambda: KFACSGD(network(), skip_layers=["Lin"]),
     r"Invalid model: .*covers \(skip_layers 'Lin' leaves out 4 parameters\); .*skip less, or"),
    (lambda: KFACSGD([STRANGER], model=network()),
     r"Invalid params: .*shape \(5, 7\) does not belong .*model="),
    (with_a_stranger, "Invalid params: .*does not belong"),
    (lambda: KFACSGD(network().parameters(), model=network()),
     "does not belong to the model; pass the model whose"),
    *((lambda cls=cls: cls(nn.Sequential(nn.LazyLinear(3))),
       r"Invalid params: 0\.weight has no shape yet; run the la") for cls in (KFACSGD, KFACAdam)),
    (lambda: Join([KFACSGD(network())]), r"KFACSGD does not work in Join.*drop_last=True"),
]
# fmt: on


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_does_not_fit_is_refused(call, said):
    with pytest.raises((ValueError, RuntimeError), match=said):
        call()


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


# ---- the learning rate ----


RATES = torch.optim.lr_scheduler


def schedulers() -> dict[str, Any]:
    s = RATES
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
        "SequentialLR": lambda o: s.SequentialLR(
            o, [s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.5)], [2]
        ),
        "ChainedScheduler": lambda o: s.ChainedScheduler(
            [s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.5)], optimizer=o
        ),
        "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, factor=0.5, patience=0),
        "CyclicLR": lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=True),
        "OneCycleLR": lambda o: s.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=True),
    }


@pytest.mark.parametrize(
    ("name", "base", "method"),
    [
        *((c.__name__, torch.optim.SGD, "eigen") for c in classes_in(RATES, RATES.LRScheduler)),
        *((name, torch.optim.Adam, "eigen") for name in ("OneCycleLR", "CyclicLR")),
        *(
            (name, base, "polar")
            for name in ("StepLR", "OneCycleLR", "CyclicLR", "ReduceLROnPlateau")
            for base in (torch.optim.SGD, torch.optim.Adam, torch.optim.RAdam)
        ),
    ],
)
def test_learning_rate_schedulers(name, base, method):
    """Rates and momenta are a plain optimizer's; set by hand, they make the same steps."""
    # At a higher rate, the limit of SGD's directions would hide the rate.
    settings: dict[str, Any] = {"lr": 1e-3 if method == "polar" else 0.1, "momentum": 0.9}
    settings = settings if base is torch.optim.SGD else {"lr": 0.1}
    models = [network() for _ in range(3)]
    model, expected, fixed = models
    opts = opt, by_hand, _ = [with_kfac(base)(m, **settings, **METHODS[method]) for m in models]
    plain = base(network().parameters(), **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        pair = [schedulers()[name](o) for o in (opt, plain)]
        rates = []
        for i in range(5):
            group = plain.param_groups[0]
            for key in {"lr", "momentum", "betas"} & group.keys():
                assert opt.param_groups[0][key] == group[key]
                by_hand.param_groups[0][key] = group[key]
            rates.append(group["lr"])
            for own, of in zip(models, opts, strict=True):
                train(own, of, [i])
            plain.step()
            for scheduler in pair:
                # A loss that never improves.
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            assert_same(model, expected)
    assert len(set(rates)) > 1
    assert difference(values(fixed), model)["0.weight"].abs().max() > 1e-6
    assert method == "polar" or opt.param_groups[0]["kl_clip_lr"] == 0.1


# ---- the KL clip, and the first step ----


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


@pytest.mark.parametrize("method", METHODS)
def test_zero_gradients_change_nothing(method):
    """Neither the clip nor a length divides by them."""
    model = network()
    opt = KFACSGD(model, lr=0.1, compute_method=method)
    before = values(model)
    x, _ = batch(0)
    (0 * model(x).sum()).backward()
    opt.step()
    assert_same(values(model), before)


# ---- gradients, zero_grad, closures ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", BASES, ids=lambda c: c.__name__)
def test_grad_is_left_as_backward_made_it(base, method):
    model = network()
    opt = with_kfac(base)(model, compute_method=method)
    params = list(model.parameters())
    for i in range(2):
        opt.zero_grad()
        backward(model, i)
        gradients = [p.grad for p in params]
        copies = [g.clone() for g in gradients]
        opt.step()
        assert all(p.grad is g for p, g in zip(params, gradients, strict=True))
        assert_same([p.grad for p in params], copies)


class Failing(torch.optim.SGD):
    fails = True

    def step(self, closure=None):
        if self.fails:
            raise ZeroDivisionError


@pytest.mark.parametrize("method", METHODS)
def test_grad_is_left_as_it_was_when_the_base_raises(method):
    model = network()
    opt = with_kfac(Failing)(model, compute_method=method)
    before = values(model)
    backward(model, 0)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    copies = copy.deepcopy(gradients)
    with pytest.raises(ZeroDivisionError):
        opt.step()
    assert_same(values(model), before)
    assert all(p.grad is gradients[n] for n, p in model.named_parameters())
    assert_same(gradients, copies)


def test_the_passes_of_a_step_that_raised_are_not_counted_in_the_next():
    options = {"compute_method": "eigen", "factor_decay": 0.0, "factor_update_steps": 1}
    opts = [with_kfac(Failing)(network(), **options) for _ in range(2)]
    for opt, fails in zip(opts, (True, False), strict=True):
        model = opt.preconditioner.model
        backward(model, 0)
        opt.fails = fails
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            opt.step()
        opt.fails = False
        backward(model, 1)  # onto the gradients that are there
        opt.step()
    for name in opts[0].preconditioner.layers:
        assert_same(*(opt.preconditioner.factors(name) for opt in opts))


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_wrapper_may_take_over_an_optimizers_attributes(cls):
    models = [network(), network()]
    opts = [cls(model, lr=0.1) for model in models]
    wrapper = object.__new__(cls)
    wrapper.__dict__.update(opts.pop().__dict__)
    for opt, model in zip((*opts, wrapper), models, strict=True):
        train(model, opt, range(2))
    assert_same(values(models[1]), values(models[0]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_gradients_and_statistics(set_to_none, method):
    model, expected = network(), network()
    opt = KFACSGD(model, lr=0.1, **METHODS[method])
    backward(model, 7)  # aborted: a leftover
    assert opt.preconditioner.memory_usage()["pending"] > 0
    opt.zero_grad(set_to_none)
    assert opt.preconditioner.memory_usage()["pending"] == 0
    if set_to_none:
        assert all(p.grad is None for p in model.parameters())
    else:
        assert all(not p.grad.any() for p in model.parameters())
    backward(model, 0)
    opt.step()
    fresh = KFACSGD(expected, lr=0.1, **METHODS[method])
    train(expected, fresh, [0])
    assert_same(model, expected)
    assert_same(factors(opt), factors(fresh))


# ---- hooks ----


def fresh_base() -> type[Optimizer]:
    """A class of its own, whose step no other test has had wrapped."""

    class Plain(Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for p in (p for group in self.param_groups for p in group["params"]):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=self.param_groups[0]["lr"])

    return Plain


def check_hooks(opt: Any, model: nn.Module) -> None:
    """All hooks run once in each step, whether the base steps once more or not at all."""
    counters = {
        name: Mock(return_value=None) for name in ("pre", "post", "global pre", "global post")
    }
    handles = [
        opt.register_step_pre_hook(counters["pre"]),
        opt.register_step_post_hook(counters["post"]),
        register_optimizer_step_pre_hook(counters["global pre"]),
        register_optimizer_step_post_hook(counters["global post"]),
    ]
    try:
        for i in range(1, 3):
            train(model, opt, [i])
            assert all(counter.call_count == i for counter in counters.values())
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (fresh_base, "never"),
        (fresh_base, "before"),
        (fresh_base, "after"),
        (lambda: torch.optim.SGD, "after"),
        (lambda: torch.optim.Adam, "after"),
        (lambda: LAMB, "after"),
    ],
)
def test_step_hooks_fire_exactly_once(make, plain, method):
    base, model = make(), network()
    if plain == "before":
        base(network().parameters())
    opt = with_kfac(base)(model, compute_method=method)
    if plain == "after":
        base(network().parameters())
    check_hooks(opt, model)


def test_hooks_of_the_base_fire_once_too():
    base = fresh_base()
    model, other = network(), network()
    with_kfac(base)(network())
    opt = base(model.parameters())
    with_kfac(base)(other)
    check_hooks(opt, model)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_pre_hook_may_change_the_gradients(method):
    """It runs before K-FAC sees them: a hook that zeroes them makes a step of nothing."""
    model = network()
    opt = KFACSGD(model, lr=0.1, compute_method=method)
    opt.register_step_pre_hook(
        lambda o, a, k: [p.grad.zero_() for p in model.parameters()] and None
    )
    before = values(model)
    train(model, opt, [0])
    assert_same(values(model), before)


@pytest.mark.parametrize("method", METHODS)
def test_state_dict_and_load_hooks_fire_exactly_once(method):
    model = network()
    opt = KFACSGD(model, lr=0.1, momentum=0.9, compute_method=method)
    train(model, opt, [0])
    names = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    counters = {name: Mock(return_value=None) for name in names}
    for name, counter in counters.items():
        getattr(opt, f"register_{name}_hook")(counter)
    for i in range(1, 3):
        opt.load_state_dict(opt.state_dict())
        assert all(counter.call_count == i for counter in counters.values())


# ---- groups and parameters that change ----


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


@pytest.mark.parametrize(
    ("group", "error", "said"),
    [
        ([1], TypeError, "dict"),
        ({"params": nn.Linear(2, 2).parameters()}, ValueError, "does not belong"),
        ({"params": [], "damping": -1.0}, ValueError, "Invalid damping: -1.0"),
        ({"params": [], "factor_decay": -0.5}, ValueError, "Invalid factor_decay: -0.5"),
    ],
)
def test_a_refused_group_leaves_no_trace(group, error, said):
    model, expected = network(), network()
    opt = KFACSGD(model, lr=0.1)
    with pytest.raises(error, match=said):
        opt.add_param_group(group)
    assert len(opt.param_groups) == 1
    train(model, opt, range(2))
    train(expected, KFACSGD(expected, lr=0.1), range(2))
    assert_same(model, expected)
    copy.deepcopy(opt)


# ---- models beside the trained one ----


@pytest.mark.parametrize("method", METHODS)
def test_copied_models_have_no_live_hooks(method):
    model, alone = network(), network()
    opt = KFACSGD(model, lr=0.1, **METHODS[method])
    train(model, opt, [0])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        backward(twin, 5)
        assert "Tap" not in type(twin(batch(5)[0]).grad_fn).__name__
        assert opt.preconditioner.memory_usage()["pending"] == 0
        alone.load_state_dict(twin.state_dict())
        alone.zero_grad()
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
    two = KFACAdam(model[2].parameters(), lr=0.1, model=model, **AS_THE_BASE)
    of_one, of_two = Probe(model, ["0.weight", "0.bias"]), Probe(model, ["2.weight", "2.bias"])
    sgd = torch.optim.SGD(expected[0].parameters(), lr=0.1)
    adam = torch.optim.Adam(expected[2].parameters(), lr=0.1)
    for i in range(3):
        one.zero_grad()
        two.zero_grad()
        backward(model, i)
        one.step()
        two.step()
        v = of_one.step(expected, i)
        w = of_two.step(expected, i)
        for name, p in expected.named_parameters():
            p.grad = (v if name.startswith("0") else w)[name].clone()
        sgd.step()
        adam.step()
        assert_near(model, expected, rtol=1e-6)
    # One's zero_grad leaves the other's statistics alone.
    backward(model, 9)
    one.zero_grad()
    assert one.preconditioner.memory_usage()["pending"] == 0
    assert two.preconditioner.memory_usage()["pending"] > 0


# ---- GradScaler ----


def told(method: str, scaler: Any) -> dict[str, Any]:
    """Directions do not depend on the scale of the loss."""
    return {"compute_method": method, **({"grad_scaler": scaler} if method == "eigen" else {})}


def scaled_training(model, opt, scaler, steps, broken=(), zero_grad=None):
    """Training under a GradScaler; the batches in ``broken`` overflow."""
    zero_grad = zero_grad or (lambda: opt.zero_grad())
    for i in steps:
        zero_grad()
        factor = float("inf") if i in broken else 1.0
        backward(model, i, lambda loss, factor=factor: scaler.scale(loss * factor))
        scaler.step(opt)
        scaler.update()
    opt.zero_grad()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("cls", "settings", "zeroing"),
    [
        (KFACSGD, {"momentum": 0.9}, "optimizer"),
        (KFACSGD, {"momentum": 0.9}, "optimizer, to zero"),
        (KFACSGD, {"momentum": 0.9, "fused": True}, "model"),
        (KFACAdam, {"fused": True}, "optimizer"),
        (KFACAdam, {}, "model"),
        (KFACLAMB, {}, "optimizer"),
    ],
)
def test_a_skipped_step_leaves_no_trace(cls, settings, zeroing, method):
    model, expected = network(dtype=torch.float32), network(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    opt = cls(model, lr=0.05, **told(method, scaler), **ANEW, **settings)
    other = cls(expected, lr=0.05, compute_method=method, **ANEW, **settings)
    assert opt._step_supports_amp_scaling is False
    zero_grad = {
        "optimizer": opt.zero_grad,
        "optimizer, to zero": lambda: opt.zero_grad(set_to_none=False),
        "model": model.zero_grad,
    }[zeroing]
    broken = (10, 11, 12, 13)
    scaled_training(model, opt, scaler, [10, 0, 11, 1, 2, 12, 13, 3], broken, zero_grad)
    assert scaler.get_scale() == 2.0**6
    assert opt.preconditioner.steps == 4
    train(expected, other, range(4))
    assert_near(factors(opt), factors(other), rtol=1e-4, atol=1e-6)
    assert_near(model, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["scaler", "number", "tensor", "callable", None])
def test_neither_factors_nor_steps_depend_on_the_loss_scale(form):
    """The papers' methods are told the scale; directions need no word of it."""
    results = []
    for scale in (1.0, 2.0**4, 2.0**12):
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        scales = {
            "scaler": scaler,
            "number": scale,
            "tensor": torch.tensor(scale),
            "callable": lambda scaler=scaler: scaler.get_scale(),
        }
        options = ANEW if form is None else {"grad_scaler": scales[form], **EVERY_STEP}
        opt = KFACSGD(model, lr=0.05, momentum=0.9, **options)
        steps = range(1) if form in ("number", "tensor") else range(5)  # the scale grows
        with warnings_as("error"):
            scaled_training(model, opt, scaler, steps)
        assert scaler.get_scale() == scale * (1 if len(steps) == 1 else 4)
        results.append((factors(opt), values(model)))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_without_the_option_the_scale_is_in_the_factors():
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    opt = KFACSGD(model, lr=0.05, **EVERY_STEP)
    scaled_training(model, opt, scaler, [0])
    other = network()
    plain = KFACSGD(other, lr=0.05, **EVERY_STEP)
    train(other, plain, [0])
    for name in ("0", "2"):
        (a, g), (of_plain, wanted) = factors(opt)[name], factors(plain)[name]
        assert_near((a, g), (of_plain, 16 * wanted))


@pytest.mark.parametrize("method", METHODS)
def test_unscaled_and_clipped_gradients(method):
    """unscale_ and clip_grad_norm_ between backward and step, as torch's examples do."""
    model, expected = network(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    opt = KFACSGD(model, lr=0.05, **told(method, scaler))
    other = KFACSGD(expected, lr=0.05, compute_method=method)
    for i in range(3):
        opt.zero_grad()
        backward(model, i, scaler.scale)
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        other.zero_grad()
        backward(expected, i)
        nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        other.step()
    assert_same(model, expected)
