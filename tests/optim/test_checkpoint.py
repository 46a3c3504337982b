"""K-FAC state in checkpoints: where it lives, and that training goes on bit for bit."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from kaisa_optim import KFACSGD, KFACAdam, KFACParamScheduler, with_kfac
from kaisa_optim.linalg import products
from tests.optim.bases import CASES, Descent, assert_equal_runs, entries, pair, pickled
from tests.support.compare_revisions import golden
from tests.support.ranks import run
from tests.support.training import (
    ANEW,
    EVERY_STEP,
    Probe,
    assert_near,
    assert_same,
    backward,
    batch,
    difference,
    factors,
    network,
    recorded_warnings,
    train,
    values,
    warnings_as,
)

DATA = Path(__file__).parents[1] / "data"
BASES = {name: (with_kfac(cls), settings) for name, (cls, settings) in CASES.items()}
MOMENTUM = "SGD with momentum"
# Of each way to step one.
VARIED = ["SGD", MOMENTUM, "Adam", "LAMB", "LARS"]
METHODS = {
    "polar": {},
    "eigen": {"compute_method": "eigen"},
    "outer product": {"compute_method": "eigen", "compute_eigenvalue_outer_product": True},
    "inverse": {"compute_method": "inverse"},
    "kaisa": {"normalization": "kaisa", "compute_method": "inverse"},
}


def disk(state: Any, path: Any) -> Any:
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def quietly_load(opt: Any, state: dict[str, Any]) -> None:
    """A load that has nothing to report."""
    with warnings_as("error"):
        opt.load_state_dict(state)


def resumed(cls: Any, model: nn.Module, opt: Any, seed: int = 5, **options: Any) -> Any:
    """Return another pair that has loaded the states of these two."""
    dtype = next(model.parameters()).dtype
    other, fresh = pair(cls, dtype, seed, **options)
    other.load_state_dict(model.state_dict())
    quietly_load(fresh, copy.deepcopy(opt.state_dict()))
    return other, fresh


def test_names_shapes_and_dtypes_of_states_are_a_contract():
    assert golden() == json.loads((DATA / "golden_state.json").read_text())


# ---- continuation ----


PLANS: dict[str, dict[str, Any]] = {
    "staggered": {"factor_update_steps": 2, "inv_update_steps": 4},
    "at once": {"factor_update_steps": 2, "inv_update_steps": 4, "staggered": False},
    "scheduled": {"factor_update_steps": 1, "inv_update_steps": 2},
}


def schedules(opt: Any) -> list[Any]:
    options = {"damping": lambda e: 0.9**e, "factor_decay": {2: 0.9}}
    options |= {"factor_update_steps": {3: 2}, "inv_update_steps": {1: 2, 7: 0.1}}
    if not opt.preconditioner.rule.makes_directions:
        options["kl_clip"] = {2: 0.5, 6: 0.1}
    rates = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=14)
    return [rates, KFACParamScheduler(opt, **options)]


@pytest.mark.parametrize(
    ("base", "method", "plan"),
    [
        *((base, "polar", "staggered") for base in BASES),
        *((base, "eigen", "staggered") for base in VARIED),
        *((MOMENTUM, x, "staggered") for x in METHODS if x not in ("polar", "eigen")),
        *(("Adam", "polar", "at once"), ("Adam", "eigen", "at once")),
        *((MOMENTUM, "inverse", "at once"), ("LAMB", "kaisa", "at once")),
        *((MOMENTUM, "polar", "scheduled"), (MOMENTUM, "eigen", "scheduled")),
    ],
)
def test_continuation_bit_for_bit_at_every_point_of_an_interval(base, method, plan, tmp_path):
    cls, settings = BASES[base]
    options = {**settings, **METHODS[method], **PLANS[plan]}
    # To float64 a load would cast the counts of NAdam and ASGD.
    dtype = torch.float64 if base in VARIED else torch.float32
    model, opt = pair(cls, dtype, **options)
    old = schedules(opt) if plan == "scheduled" else []
    saved = [disk([x.state_dict() for x in (model, opt, *old)], tmp_path / "0")]

    def save(i: int) -> None:
        for scheduler in old:
            scheduler.step()
        saved.append(disk([x.state_dict() for x in (model, opt, *old)], tmp_path / "next"))

    train(model, opt, range(12), save)
    # Adagrad has a state before the first step, which is loaded with a warning.
    for taken in range(0 if base != "Adagrad" else 1, 8):
        other, fresh = pair(cls, dtype, seed=5, **options)
        new = schedules(fresh) if plan == "scheduled" else []
        with warnings_as("error"):
            for x, state in zip((other, fresh, *new), saved[taken], strict=True):
                x.load_state_dict(state)
        assert_same(fresh.state_dict(), saved[taken][1])
        assert fresh.preconditioner.steps == taken
        train(other, fresh, range(taken, 12), lambda i, new=new: [x.step() for x in new])
        assert_same(other, model)
        assert_same(fresh.state_dict(), opt.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("factor_dtype", "kept"), [(None, torch.float32), (torch.float64,) * 2])
def test_factors_keep_their_dtype_under_half_precision_parameters(dtype, factor_dtype, kept):
    """Optimizer.load_state_dict would cast them to the parameters'."""
    options = {"lr": 0.01, "momentum": 0.9, "factor_dtype": factor_dtype, "inv_update_steps": 3}
    model, opt = pair(KFACSGD, dtype, **options)
    train(model, opt, range(4))
    other, fresh = resumed(KFACSGD, model, opt, **options)
    assert all(f.dtype == kept for pair_of in factors(fresh).values() for f in pair_of)
    assert_same(fresh.state_dict(), opt.state_dict())
    assert_equal_runs(range(4, 8), (model, opt), (other, fresh))


def test_loading_its_own_state_changes_nothing():
    first, second = pair(KFACAdam, lr=0.01), pair(KFACAdam, lr=0.01)
    for i in range(4):
        assert_equal_runs([i], first, second)
        first[1].load_state_dict(first[1].state_dict())


@pytest.mark.parametrize("base", VARIED)
def test_a_trained_optimizer_takes_a_state_from_before_the_first_step(base):
    cls, settings = BASES[base]
    model, opt = pair(cls, **settings)
    other, target = pair(cls, **settings)
    train(other, target, range(3))
    backward(other, 9)  # statistics that wait belong to no step of the loaded run
    other.load_state_dict(model.state_dict())
    quietly_load(target, opt.state_dict())
    assert target.preconditioner.steps == target.preconditioner.memory_usage()["pending"] == 0
    assert_equal_runs(range(4), (model, opt), (other, target))


def test_a_momentum_that_the_checkpoint_lacks_is_named():
    model, opt = pair(KFACAdam, lr=0.1)
    train(model, opt, [0])
    state = copy.deepcopy(opt.state_dict())
    del state["state"][2]["exp_avg"]
    with pytest.warns(UserWarning, match="this state lacks the momenta of '2', or"):
        KFACAdam(network(), lr=0.1).load_state_dict(state)


def test_a_layer_without_factors_in_the_checkpoint_is_estimated_anew():
    options = {"lr": 0.05, **EVERY_STEP}
    model, opt = pair(KFACSGD, skip_layers="^2$", **options)
    train(model, opt, range(3))
    other, target = pair(KFACSGD, **options)
    other.load_state_dict(model.state_dict())
    said = "no K-FAC factors of this kind for '2'; K-FAC estimates them again"
    with pytest.warns(UserWarning, match=said):
        target.load_state_dict(opt.state_dict())
    assert_same(target.preconditioner.factors("0"), opt.preconditioner.factors("0"))
    v, before = Probe(other).step(other, 3), values(other)
    train(other, target, [3])
    assert_near(difference(before, other)["2.weight"], 0.05 * v["2.weight"])


def test_another_method_takes_the_factors_and_refreshes():
    """Second-order state is of the method's own; running averages are not."""
    model, opt = pair(KFACSGD, lr=0.05, **{**EVERY_STEP, "factor_update_steps": 2})
    train(model, opt, range(3))
    options = {**EVERY_STEP, "compute_method": "inverse", "damping_split": "full"}
    options["inv_update_steps"] = 100
    other, target = resumed(KFACSGD, model, opt, lr=0.05, **options)
    assert_same(factors(target), factors(opt))
    train(other, target, [3])
    assert target.preconditioner.registry.with_state == list(target.preconditioner.layers.values())


@pytest.mark.parametrize("base", [MOMENTUM, "Adam", "LAMB"])
@pytest.mark.parametrize(
    ("before", "after"), [("eigen", "polar"), ("inverse", "polar"), ("polar", "eigen")]
)
def test_momenta_of_another_method_begin_anew(before, after, base):
    """The papers' methods have momenta of preconditioned gradients, "polar" of raw ones."""
    cls, settings = BASES[base]
    model, opt = pair(cls, **settings, **METHODS[before])
    train(model, opt, range(3))
    pairs = [pair(cls, **settings, **METHODS[after]) for _ in range(2)]
    for other, _ in pairs:
        other.load_state_dict(model.state_dict())
    (_, target), (_, begun) = pairs
    with pytest.warns(UserWarning) as record:
        target.load_state_dict(copy.deepcopy(opt.state_dict()))
    momenta, factors_anew = (str(w.message) for w in record)
    assert "this state lacks the momenta of '0', '2', or has those of another compute" in momenta
    assert "no K-FAC factors of this kind for '0', '2'" in factors_anew
    kept = {"momentum_buffer", "exp_avg", "exp_avg_sq"}
    assert not any(kept & entry.keys() for entry in target.state.values())
    assert target.preconditioner.steps == 3
    # As from the start, with the weights and counts of then.
    for group, saved in zip(begun.param_groups, opt.param_groups, strict=True):
        group.update({key: saved[key] for key in ("step", "damping") if key in saved})
    begun.preconditioner.resume(3)
    assert_equal_runs(range(3, 6), *pairs)


def freeze(model: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        model[0].get_parameter(name).requires_grad_(False)


@pytest.mark.parametrize(
    ("cls", "options"),
    [(KFACSGD, ANEW), (KFACAdam, ANEW), (KFACSGD, {"momentum": 0.9, **EVERY_STEP})],
    ids=["KFACSGD", "KFACAdam", "eigen"],
)
@pytest.mark.parametrize("names", [("weight", "bias"), ("weight",), ("bias",)])
@pytest.mark.parametrize("way", ["froze first", "built first", copy.deepcopy, pickled])
def test_a_run_that_froze_a_layer_goes_on(cls, options, names, way):
    """However the resuming script orders freezing and building; unfrozen later, it goes on, too."""
    model, opt = pair(cls, lr=0.05, **options)
    train(model, opt, range(2))
    freeze(model, names)
    train(model, opt, range(2, 4))
    if callable(way):
        other, fresh = way((model, opt))
    else:
        other = network(5)
        freeze(other, names if way == "froze first" else ())
        fresh = cls(other, lr=0.05, **options)
        freeze(other, names)
        other.load_state_dict(model.state_dict())
        quietly_load(fresh, copy.deepcopy(opt.state_dict()))
    for steps in (range(4, 6), range(6, 8)):
        assert_equal_runs(steps, (model, opt), (other, fresh))
        for net in (model, other):
            net[0].requires_grad_(True)


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(((), ("weight",)), ((), ("bias",)), (("weight",), ())),
        *((("bias",), ("weight",)), (("weight",), ("bias",))),
    ],
)
def test_a_layer_frozen_otherwise_where_it_is_loaded_is_estimated_anew(cls, before, after):
    model, other = network(), network()
    freeze(model, before)
    freeze(other, after)
    opt, target = (cls(net, lr=0.05, **ANEW) for net in (model, other))
    train(model, opt, range(2))
    with pytest.warns(UserWarning, match="no K-FAC factors of this kind for '0'; K-FAC estimates"):
        target.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(other, target, range(2, 4))
    covers = tuple(name not in after for name in ("weight", "bias"))
    assert target.preconditioner.layers["0"].covers == covers


@pytest.mark.filterwarnings("ignore:the decomposition of layer")
def test_failure_counts_and_rejections_are_kept(monkeypatch):
    def broken(factors):
        values, vectors = torch.linalg.eigh(factors)
        return values * torch.nan, vectors

    options = {"lr": 0.05, "max_failures": 3, **EVERY_STEP}
    model, opt = pair(KFACSGD, **options)
    train(model, opt, [0])
    monkeypatch.setattr(products, "eigendecompose", broken)
    with pytest.warns(UserWarning, match="1 in a row"):
        train(model, opt, range(1, 3))
    other, fresh = resumed(KFACSGD, model, opt, **options)
    for count in (2, 3):  # the second failure was told to nobody before the save
        with pytest.warns(UserWarning, match=f"{count} in a row"):
            train(other, fresh, [1 + count])
    with pytest.raises(RuntimeError, match="4 in a row"):
        train(other, fresh, [5])


def test_a_checkpoint_between_a_rejected_sum_and_its_report():
    options = {"lr": 0.05, "factor_update_steps": 1, "inv_update_steps": 4, "staggered": False}
    model, opt = pair(KFACSGD, **options)
    train(model, opt, range(2))
    opt.zero_grad()
    (model(batch(2)[0]) * 1e200).square().mean().backward()  # the gradients' squares overflow
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    other, fresh = resumed(KFACSGD, model, opt, **options)
    with pytest.warns(UserWarning, match="not finite have been left out for '0', '2'"):
        train(other, fresh, range(3, 6))


# ---- torch.distributed.checkpoint ----


@pytest.fixture
def process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*torch.distributed")
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(
    ("base", "method"),
    [
        *((base, "polar") for base in VARIED),
        *(("SGD", "eigen"), (MOMENTUM, "inverse"), ("Adam", "eigen"), ("LAMB", "eigen")),
    ],
)
def test_distributed_checkpoint_round_trip(base, flatten, method, tmp_path, process_group):
    cls, settings = BASES[base]
    options = {**settings, **METHODS[method], "factor_update_steps": 2, "inv_update_steps": 5}
    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, opt = pair(cls, **options)
    train(model, opt, range(4))
    state = get_optimizer_state_dict(model, opt, options=how)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=tmp_path)

    other, fresh = pair(cls, seed=5, **options)
    at_start = values(other)
    template = get_optimizer_state_dict(other, fresh, options=how)
    # To have something to load into, it steps once with zero gradients and lr 0.
    assert_same(values(other), at_start)
    assert fresh.preconditioner.steps == 0
    assert template.keys() == state.keys()
    loaded = {"model": other.state_dict(), "optimizer": template}
    dcp.load(loaded, checkpoint_id=tmp_path)
    other.load_state_dict(loaded["model"])
    set_optimizer_state_dict(other, fresh, loaded["optimizer"], options=how)
    assert fresh.preconditioner.steps == 4
    assert_same(fresh.state_dict()["state"], opt.state_dict()["state"])
    assert_equal_runs(range(4, 11), (model, opt), (other, fresh))


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_the_initializing_step_of_dcp_changes_nothing(tensor_lr):
    lr = torch.tensor(0.05) if tensor_lr else 0.05
    (model, opt), untouched = (pair(KFACSGD, lr=lr, weight_decay=0.1) for _ in range(2))
    before = values(model)
    get_optimizer_state_dict(model, opt)
    assert_same(values(model), before)
    assert opt.preconditioner.steps == 0
    # get_... leaves lr at 0, for a load to restore.
    opt.param_groups[0]["lr"] = lr
    assert_equal_runs(range(3), untouched, (model, opt))


EMPTYING: dict[str, Any] = {
    "one entry": lambda opt: opt.state[opt.param_groups[0]["params"][0]].clear(),
    "all": lambda opt: opt.state.clear(),
    "another dict": lambda opt: setattr(opt, "state", defaultdict(dict)),
}


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
@pytest.mark.parametrize("how", EMPTYING)
@pytest.mark.parametrize(("taken", "times"), [(1, 2), (3, 1)])
def test_emptied_entries_have_the_same_tensors_after_the_next_step(cls, how, taken, times):
    """Steps do not go through entries of which nothing has changed."""
    model, opt = pair(cls, lr=0.01)
    train(model, opt, range(taken))
    before = ours_in(opt)
    assert any(len(keys) > 2 for keys in before.values())
    for step in range(taken, taken + times):
        EMPTYING[how](opt)
        train(model, opt, [step])
    train(model, opt, [9])
    assert ours_in(opt) == before


def ours_in(opt: Any) -> dict[Any, set[str]]:
    """K-FAC's keys in each entry of a state."""
    state = opt.state.items()
    return {p: {key for key in entry if str(key).startswith("kfac")} for p, entry in state}


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_load_while_gradients_are_there_leaves_later_steps_their_entries(cls):
    model, opt = pair(cls, lr=0.01)
    backward(model, 0)
    opt.load_state_dict(opt.state_dict())
    for step in range(3):
        with opt.preconditioner.paused():
            loss = model(batch(step)[0]).square().mean()
        loss.backward()
        opt.step()
    counts = [entry["kfac_step"].item() for entry in opt.state.values()]
    assert counts == [3] * len(list(model.parameters()))


# ---- states of other optimizers, and of other ranks ----


@pytest.mark.parametrize(
    ("plain", "cls", "settings"),
    [
        (torch.optim.SGD, KFACSGD, {"lr": 0.05}),
        (torch.optim.SGD, KFACSGD, {"lr": 0.05, "momentum": 0.9}),
        (torch.optim.Adam, KFACAdam, {"lr": 0.01}),
        (torch.optim.Adam, KFACAdam, {"lr": 0.01, "foreach": True}),
    ],
)
def test_a_kfac_checkpoint_loads_into_the_plain_base(plain, cls, settings, tmp_path):
    """Of the papers' methods, whose entries are the base's own."""
    model, opt = pair(cls, **settings, **METHODS["eigen"])
    train(model, opt, range(3))
    saved = disk(opt.state_dict(), tmp_path / "state")
    base = plain(model.parameters(), **settings)
    base.load_state_dict(saved)
    expected = network()
    expected.load_state_dict(model.state_dict())
    by_hand = plain(expected.parameters(), **settings)
    for name, entry in entries(opt, model).items():
        if entry:
            by_hand.state[expected.get_parameter(name)].update(copy.deepcopy(entry))
    train(model, base, range(3, 6))
    train(expected, by_hand, range(3, 6))
    assert_same(model, expected)
    # And back again: the factors of then are still there.
    _, again = resumed(cls, model, base, **settings, **METHODS["eigen"])
    assert_same(factors(again), factors(opt))


@pytest.mark.parametrize("base", ["Adam", "LAMB"])
def test_an_exported_second_moment_is_the_mean_over_its_block(base):
    cls, settings = BASES[base]
    model, opt = pair(cls, **settings)
    train(model, opt, range(3))
    state = opt.base_state_dict()["state"]
    for index, p in enumerate(model.parameters()):
        layer = model[index // 2 * 2]
        mean = opt.state[layer.weight]["kfac_square_sum"] / (layer.weight.numel() + len(layer.bias))
        assert_same(state[index]["exp_avg_sq"], mean.expand(p.shape))
    # And a load takes the sums from it.
    _, again = pair(cls, **settings)
    with pytest.warns(UserWarning, match="no K-FAC factors of this kind"):
        again.load_state_dict(copy.deepcopy({**opt.base_state_dict()}))
    assert_same(again.state_dict()["state"], state)


def test_a_users_hook_may_make_a_state_of_what_is_none():
    model, opt = pair(KFACSGD, lr=0.01)
    train(model, opt, range(2))
    whole = {"optimizer": copy.deepcopy(opt.state_dict())}
    opt.register_load_state_dict_pre_hook(lambda _, loaded: loaded["optimizer"])
    opt.load_state_dict(whole)
    assert_same(opt.state_dict(), whole["optimizer"])


def test_its_own_state_loads_after_that_of_another_class():
    """Torch leaves "differentiable" in the defaults, and the other's groups bring it along."""
    model, opt = pair(with_kfac(Descent), lr=0.02)
    train(model, opt, range(2))
    own, weights = copy.deepcopy((opt.state_dict(), model.state_dict()))
    train(model, opt, [2])
    expected = copy.deepcopy(model)
    other = torch.optim.AdamW(model.parameters())
    train(model, other, [0])
    with warnings_as("ignore"):  # of what begins anew
        opt.load_state_dict(other.state_dict())
    opt.load_state_dict(own)
    model.load_state_dict(weights)
    train(model, opt, [2])
    assert_same(model, expected)


def going_on(name: str, own: bool, paused: bool, frozen: bool) -> tuple[list[float], list[str]]:
    """Load rank 0's share on all ranks, or each rank's own one, and train on; return parameters."""
    cls, settings = BASES[name]
    model = network()
    opt = cls(model, **settings, assignment="layer-wise" if own else "opt")
    with recorded_warnings() as texts:
        train(model, opt, range(3))
        share = [copy.deepcopy(opt.state_dict())]
        if not own:
            dist.broadcast_object_list(share)
        other = cls(model, **settings, assignment="layer-wise" if frozen else "opt")
        other.load_state_dict(share[0])
        for layer in (model[0], model[2]):
            layer.weight.requires_grad_(not frozen)
        with other.preconditioner.paused() if paused else contextlib.nullcontext():
            train(model, other, range(3, 6))
    train(model, other, range(6, 30))
    assert all(layer.has_state for layer in other.preconditioner.registry.states.values())
    return [x for p in model.parameters() for x in p.flatten().tolist()], texts


SHARES = [(own, paused, False) for own in (False, True) for paused in (False, True)]


@pytest.mark.parametrize("name", ["Adam", MOMENTUM, "LAMB", "NAdam", "RMSprop"])
@pytest.mark.parametrize(("own", "paused", "frozen"), [*SHARES, (True, True, True)])
def test_ranks_go_on_alike_from_shares(name, own, paused, frozen):
    """The base begins the layers anew whose factors a share lacks, or Adam's step would fail.

    With shares of their own, ranks would begin with different momenta. If the weights are frozen
    after the load, the base begins anew where it steps the bias next.
    """
    (one, texts), (other, _) = run(2, going_on, name, own, paused, frozen)
    assert one == other
    assert all(map(math.isfinite, one))
    told = "ranks have loaded different parts of the state of '"
    assert frozen or any(told in text for text in texts)


def test_a_base_may_keep_values_beside_entries():
    class Counts(torch.optim.RMSprop):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.state["calls"] = 0

    model = network()
    opt = with_kfac(Counts)(model, lr=0.01)
    train(model, opt, range(2))
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.state["calls"] == 0 and opt.preconditioner.steps == 2


RAdam = with_kfac(torch.optim.RAdam)
WITHOUT_SECOND = {
    "RAdam": (KFACAdam, {}, RAdam, {}),
    "amsgrad": (KFACAdam, {}, KFACAdam, {"amsgrad": True}),
    "RAdam, of another method": (RAdam, METHODS["eigen"], RAdam, {}),
}


@pytest.mark.filterwarnings("ignore:the checkpoint has no K-FAC factors")
@pytest.mark.parametrize("case", WITHOUT_SECOND)
def test_moments_that_the_base_can_not_read_begin_anew(case):
    """K-FAC keeps one number a block in the place of Adam's second moments."""
    cls, settings, target, changed = WITHOUT_SECOND[case]
    model, opt = pair(cls, lr=0.01, **settings)
    train(model, opt, range(3))
    other = target(model, lr=0.01, **changed)
    with pytest.warns(UserWarning, match="momenta of '0', '2', or has those of another"):
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
    twin = copy.deepcopy(model)
    fresh = torch.optim.RAdam(twin.parameters(), lr=0.01)
    train(model, other, [3])
    train(twin, fresh, [3])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same(other.state[p]["exp_avg_sq"], fresh.state[q]["exp_avg_sq"])
        assert other.state[p]["step"] == 1
    train(model, other, range(4, 20))
    assert all(p.isfinite().all() for p in model.parameters())
