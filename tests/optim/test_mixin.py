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


def forms():
    def two_groups(model):
        first = {"params": list(model[2].parameters()), "lr": 0.05, "momentum": 0.5}
        return [first, {"params": model[0].parameters()}]

    return {
        "model": lambda m: ((m,), {}),
        "parameters": lambda m: ((m.parameters(),), {"model": m}),
        "groups": lambda m: ((two_groups(m),), {"model": m}),
        "named": lambda m: ((m.named_parameters(),), {"model": m}),
        "model twice": lambda m: ((m,), {"model": m}),
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", forms())
def test_every_form_of_params_trains_alike(form, method):
    without_clip = {k: v for k, v in METHODS[method].items() if k not in ANEW}
    model, expected = network(), network()
    args, kwargs = forms()[form](model)
    opt = KFACSGD(*args, lr=0.1, momentum=0.9, **without_clip, **kwargs)
    reference = KFACSGD(expected, lr=0.1, momentum=0.9, **without_clip)
    if form == "groups":  # the same two, the second added to the first
        params = expected[2].parameters()
        reference = KFACSGD(params, lr=0.05, momentum=0.5, model=expected, **without_clip)
        reference.add_param_group({"params": expected[0].parameters(), "lr": 0.1, "momentum": 0.9})
    train(model, opt, range(3))
    train(expected, reference, range(3))
    assert_same(model, expected)
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cls", [KFACSGD, KFACLAMB])
def test_a_first_group_may_be_empty(cls, method):
    """As torch's own optimizers have it."""
    options = {"lr": 0.01, **METHODS[method], "inv_update_steps": 2}
    plain, model = network(), network()
    train(plain, cls(plain, **options), range(4))
    opt = cls([{"params": []}, {"params": model.parameters()}], model=model, **options)
    train(model, opt, range(4))
    assert_same(model, plain)
    assert opt.device == torch.device("cpu")


@pytest.mark.parametrize(("name", "value"), [("damping", -1.0), ("factor_decay", -0.5)])
def test_group_with_a_bad_value(name, value):
    model = network()
    with pytest.raises(ValueError, match=f"Invalid {name}: {value!r}"):
        KFACSGD([{"params": model.parameters(), name: value}], lr=0.1, model=model)
    opt = KFACSGD(model[0].parameters(), lr=0.1, model=model)
    with pytest.raises(ValueError, match=f"Invalid {name}: {value!r}"):
        opt.add_param_group({"params": model[2].parameters(), name: value})


def test_a_group_must_not_be_differentiable():
    model = network()
    for params, more in (
        (model, {"differentiable": True}),
        ([{"params": model.parameters(), "differentiable": True}], {"model": model}),
    ):
        with pytest.raises(ValueError, match=r"Invalid differentiable: True; .*leave it False"):
            KFACSGD(params, lr=0.1, **more)


# ---- models and parameters that do not fit ----


def test_a_model_without_covered_layers():
    text = r"Invalid model: .*no layer that K-FAC covers.*0\.weight.*scales.*register_layer"
    with pytest.raises(ValueError, match=text):
        KFACSGD(nn.Sequential(nn.PReLU()), lr=0.1)
    text = r"Invalid model: .*covers \(skip_layers 'Lin' leaves out 4 parameters\); .*skip less, or"
    with pytest.raises(ValueError, match=text):
        KFACSGD(network(), lr=0.1, skip_layers=["Lin"])


def test_parameters_that_are_not_the_models():
    stranger = nn.Parameter(torch.zeros(5, 7))
    text = r"Invalid params: .*shape \(5, 7\) does not belong .*model="
    with pytest.raises(ValueError, match=text):
        KFACSGD([stranger], lr=0.1, model=network())
    model = network()
    groups = [{"params": model.parameters()}, {"params": [stranger]}]
    with pytest.raises(ValueError, match=r"Invalid params: .*does not belong"):
        KFACAdam(groups, lr=0.1, model=model)
    with pytest.raises(ValueError, match="does not belong to the model; pass the model whose"):
        KFACSGD(copy.deepcopy(model).parameters(), lr=0.1, model=model)


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_lazy_model_that_has_not_run(cls):
    with pytest.raises(ValueError, match=r"Invalid params: 0\.weight has no shape yet; run the la"):
        cls(nn.Sequential(nn.LazyLinear(3)), lr=0.1)


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
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    assert not hooks
    with warnings_as("error"):
        train(model, KFACSGD(model, lr=0.1), [0])


def test_skip_layers_pattern_that_matches_nothing():
    matches = "skip_layers: 'heda' matches no module.*named_modules"
    with pytest.warns(UserWarning, match=matches) as caught:
        opt = KFACSGD(network(), lr=0.1, skip_layers=["heda", "^0$"])
    assert caught[0].filename == __file__
    assert list(opt.preconditioner.layers) == ["2"]


def test_an_option_of_the_whole_optimizer_in_a_group_is_refused():
    net = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="Invalid kl_clip: 1e-09 in a parameter group; it is one"):
        KFACSGD([{"params": net.parameters(), "kl_clip": 1e-9}], lr=0.1, model=net)


# ---- the learning rate ----


def test_tensor_lr_in_the_clip():
    """With the current lr as α an active clip cancels it, as a number or as a tensor."""
    ends = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.3).double()):
        model = network()
        options = {"compute_method": "eigen", "kl_clip": 1e-4, "kl_clip_lr": "current"}
        opt = KFACSGD(model, lr=lr, **options)
        train(model, opt, [0])
        ends.append(values(model))
    assert_near(ends[1], ends[0])
    assert_near(ends[2], ends[0])


def schedulers() -> dict[str, Any]:
    s = torch.optim.lr_scheduler
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


def scheduler_classes() -> list[str]:
    module = torch.optim.lr_scheduler
    return [c.__name__ for c in classes_in(module, module.LRScheduler)]


@pytest.mark.parametrize(
    ("name", "base", "method"),
    [
        *((name, torch.optim.SGD, "eigen") for name in scheduler_classes()),
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


def clip_of(v: dict[str, Any], gradients: dict[str, Any], alpha: float, kappa: float) -> float:
    inner = sum((v[n] * gradients[n]).sum() for n in v)
    return min(1.0, float((kappa / (alpha**2 * inner)) ** 0.5))


def gradients_at(model: nn.Module, i: int) -> dict[str, Any]:
    twin = copy.deepcopy(model)
    twin.zero_grad()
    backward(twin, i)
    return {n: p.grad for n, p in twin.named_parameters()}


@pytest.mark.parametrize("choice", [None, "initial", "current"])
def test_kl_clip_alpha(choice):
    """By default the lr of construction, whatever the schedule; else the current one."""
    model, kappa = network(), 1e-4
    opt = KFACSGD(model, lr=0.5, kl_clip_lr=choice, **{**EVERY_STEP, "kl_clip": kappa})
    assert opt.param_groups[0]["kl_clip_lr"] == ("current" if choice == "current" else 0.5)
    probe = Probe(model)
    for i, lr in enumerate([0.5, 0.05, 0.01]):
        opt.param_groups[0]["lr"] = lr
        v, before = probe.step(model, i), values(model)
        nu = clip_of(v, gradients_at(model, i), lr if choice == "current" else 0.5, kappa)
        assert nu < 1
        train(model, opt, [i])
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


@pytest.mark.parametrize("method", METHODS)
def test_grad_is_left_as_it_was_when_the_base_raises(method):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ZeroDivisionError

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
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise ZeroDivisionError

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


def test_step_does_not_track_gradients():
    model = network()
    opt = KFACSGD(model, lr=0.1)
    train(model, opt, [0])
    state = [t for entry in opt.state.values() for t in entry.values()]
    assert not any(t.requires_grad for t in state)
    assert torch.is_grad_enabled()


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


def test_group_added_after_training_began():
    model = network()
    opt = KFACSGD(model[0].parameters(), lr=1.0, model=model, **EVERY_STEP)
    probe = Probe(model, ["0.weight", "0.bias"])
    for i in range(3):
        probe.step(model, i)
        train(model, opt, [i])
    kept = factors(opt)
    opt.add_param_group({"params": model[2].parameters(), "lr": 0.5, "damping": 0.3})
    assert_same(factors_of(opt, "0"), kept["0"])
    of_body, of_head = probe.step(model, 3), Probe(model, damping=0.3).step(model, 3)
    before = values(model)
    train(model, opt, [3])
    for name, change in difference(before, model).items():
        expected = of_body[name] if name.startswith("0") else 0.5 * of_head[name]
        assert_near(change, expected)


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_group_added_between_directions(cls):
    """The body's factors and momenta go on, and the head begins as in a first step."""
    model, alone = network(), network()
    settings = {"lr": 0.01, **({"momentum": 0.9} if cls is KFACSGD else {}), **ANEW}
    opt = cls(model[0].parameters(), model=model, **settings)
    train(model, opt, range(3))
    kept = factors(opt)["0"], copy.deepcopy(opt.state[model[0].weight])
    opt.add_param_group({"params": model[2].parameters(), "lr": 0.005})
    assert_same((factors_of(opt, "0"), opt.state[model[0].weight]), kept)
    alone.load_state_dict(model.state_dict())
    head = cls(alone[2].parameters(), model=alone, **{**settings, "lr": 0.005})
    before = values(model)
    train(model, opt, [3])
    train(alone, head, [3])
    moved = difference(before, model)
    assert all(change.abs().max() > 0 for change in moved.values())
    own = difference(before, alone)
    assert_near([moved[n] for n in ("2.weight", "2.bias")], [own["2.weight"], own["2.bias"]])


def factors_of(opt: Any, name: str) -> tuple[torch.Tensor, ...]:
    return opt.preconditioner.factors(name)


@pytest.mark.parametrize(
    ("group", "error"),
    [
        ([1], TypeError),
        ({"params": nn.Linear(2, 2).parameters()}, ValueError),
        ({"params": [], "damping": -1}, ValueError),
    ],
)
def test_a_refused_group_leaves_no_trace(group, error):
    model, expected = network(), network()
    opt = KFACSGD(model, lr=0.1)
    with pytest.raises(error):
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
        assert_near(factors_of(opt, name)[0], factors_of(plain, name)[0])
        assert_near(factors_of(opt, name)[1], 16 * factors_of(plain, name)[1])


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


def test_join_is_refused_with_the_remedy():
    opt = KFACSGD(nn.Linear(2, 2), lr=0.1)
    with pytest.raises(RuntimeError, match=r"KFACSGD does not work in Join.*drop_last=True"):
        Join([opt])
