"""States of other optimizers: what loads from them and into them, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import warnings

import pytest
import torch
import torch.distributed as dist

from kaisa_optim import KFACLAMB, KFACSGD, LAMB, KFACAdam, with_kfac
from tests.core.test_checkpoint import BASES, METHODS, disk, pair, quietly_load
from tests.optim.bases import Descent
from tests.support.ranks import run
from tests.support.training import assert_same, factors, network, train


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
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        own = {k: v.clone() for k, v in opt.state[p].items() if not k.startswith("kfac")}
        if own:
            by_hand.state[q].update(own)
    train(model, base, range(3, 6))
    train(expected, by_hand, range(3, 6))
    assert_same(model, expected)
    # And back again: the factors of then are still there.
    _, again = pair(cls, **settings, **METHODS["eigen"])
    quietly_load(again, disk(base.state_dict(), tmp_path / "back"))
    assert_same(factors(again), factors(opt))


@pytest.mark.parametrize("base", ["Adam", "LAMB"])
def test_an_exported_second_moment_is_the_mean_over_its_block(base):
    cls, settings = BASES[base]
    model, opt = pair(cls, **settings)
    train(model, opt, range(3))
    state = opt.base_state_dict()["state"]
    for weight, bias, entries in ((0, 1, 4 * 6 + 6), (2, 3, 6 * 3 + 3)):
        mean = opt.state[list(model.parameters())[weight]]["kfac_square_sum"] / entries
        for index, p in zip((weight, bias), list(model.parameters())[weight:], strict=False):
            second = state[index]["exp_avg_sq"]
            assert second.shape == p.shape and second.dtype == p.dtype
            assert_same(second, mean.expand(p.shape))
    # And a load takes the sums from it.
    _, again = pair(cls, **settings)
    with pytest.warns(UserWarning, match="no K-FAC factors of this kind"):
        again.load_state_dict(copy.deepcopy({**opt.base_state_dict()}))
    assert_same(again.state_dict()["state"], state)


HeavySGD = functools.partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    ("saved", "loads", "lacking"),
    [
        (torch.optim.SGD, KFACAdam, "betas, eps, which Adam reads"),
        (KFACAdam, KFACSGD, "momentum, dampening, which SGD reads"),
        (torch.optim.Adam, KFACLAMB, ".*max_grad_norm.*, which LAMB reads"),
        (HeavySGD, KFACAdam, "betas, eps, which Adam reads"),  # whose entries Adam trips over
        (LAMB, KFACAdam, "step', which Adam reads"),  # it is in LAMB's groups
        (HeavySGD, with_kfac(torch.optim.RMSprop), "alpha, eps, which RMSprop reads"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(saved, loads, lacking):
    """In the load, and not by a KeyError in it or in the next step."""
    model = network()
    other = saved(model if saved is KFACAdam else model.parameters(), lr=0.01)
    train(model, other, [0])
    model, target = pair(loads, lr=0.01)
    train(model, target, range(2))
    twin, untouched = copy.deepcopy((model, target))
    with pytest.raises(ValueError, match=f"Invalid state_dict: its .* lack .?{lacking}"):
        target.load_state_dict(other.state_dict())
    train(model, target, range(2, 4))
    train(twin, untouched, range(2, 4))
    assert_same(twin, model)


NO_STATES = {
    "nothing": (lambda model, opt: None, "it is of type NoneType"),
    "a list": (lambda model, opt: [opt.state_dict()], "it is of type list"),
    "empty": (lambda model, opt: {}, "it has no 'state' and no 'param_groups'"),
    "a model's": (lambda model, opt: model.state_dict(), "no 'state' and no 'param_groups'"),
    "a checkpoint": (lambda model, opt: {"state": opt.state_dict()}, "it has no 'param_groups'"),
}


@pytest.mark.parametrize("name", NO_STATES)
def test_what_is_no_optimizers_state_is_refused(name):
    make, what = NO_STATES[name]
    model = network()
    opt = KFACAdam(model, lr=0.01)
    train(model, opt, range(2))
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=rf"Invalid state_dict: .*{what}.*state_dict\(\) has"):
        opt.load_state_dict(make(model, opt))
    assert_same(opt.state_dict(), before)


def test_a_users_hook_may_make_a_state_of_what_is_none():
    model = network()
    opt = KFACSGD(model, lr=0.01)
    train(model, opt, range(2))
    whole = {"optimizer": copy.deepcopy(opt.state_dict())}
    opt.register_load_state_dict_pre_hook(lambda _, loaded: loaded["optimizer"])
    opt.load_state_dict(whole)
    assert_same(opt.state_dict(), whole["optimizer"])


def test_its_own_state_loads_after_that_of_another_class():
    """Torch leaves "differentiable" in the defaults, and the other's groups bring it along."""
    model = network()
    opt = with_kfac(Descent)(model, lr=0.02)
    train(model, opt, range(2))
    own, weights = copy.deepcopy((opt.state_dict(), model.state_dict()))
    train(model, opt, [2])
    expected = copy.deepcopy(model)
    other = torch.optim.AdamW(model.parameters())
    train(model, other, [0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what begins anew
        opt.load_state_dict(other.state_dict())
    opt.load_state_dict(own)
    model.load_state_dict(weights)
    train(model, opt, [2])
    assert_same(model, expected)


def going_on(name: str, own: bool, paused: bool) -> tuple[list[float], list[str]]:
    """Load rank 0's share on all ranks, or each rank's own one, and train on; return parameters."""
    base = {"Adam": KFACAdam, "SGD": KFACSGD, "LAMB": KFACLAMB}.get(name)
    cls = base or with_kfac(getattr(torch.optim, name))
    settings = {"lr": 0.01, **({"momentum": 0.9} if name == "SGD" else {})}
    model = network()
    opt = cls(model, **settings, assignment="layer-wise" if own else "opt")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, opt, range(3))
        share = [copy.deepcopy(opt.state_dict())]
        if not own:
            dist.broadcast_object_list(share)
        other = cls(model, **settings, assignment="opt")
        other.load_state_dict(share[0])
        with other.preconditioner.paused() if paused else contextlib.nullcontext():
            train(model, other, range(3, 6))
    train(model, other, range(6, 30))
    assert all(layer.has_state for layer in other.preconditioner.registry.states.values())
    texts = [str(one.message) for one in said]
    return [x for p in model.parameters() for x in p.flatten().tolist()], texts


@pytest.mark.parametrize("name", ["Adam", "SGD", "LAMB", "NAdam", "RMSprop"])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("paused", [False, True])
def test_ranks_go_on_alike_from_shares(name, own, paused):
    """The base begins the layers anew whose factors a share lacks, or Adam's step would fail.

    With shares of their own, ranks would begin with different momenta.
    """
    (one, texts), (other, _) = run(2, going_on, name, own, paused)
    assert one == other
    assert all(map(math.isfinite, one))
    uneven = any("only some ranks have loaded the momenta of '" in text for text in texts)
    # NAdam keeps its moments on all ranks.
    assert uneven == (own and name != "NAdam")


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


def frozen_since(name: str, again: bool) -> tuple[list[float], list[str]]:
    """Load this rank's share and freeze both weights; or freeze a bias and load ``again``."""
    cls, settings = BASES[name]
    settings = {**settings, "assignment": "layer-wise"}
    model = network()
    opt = cls(model, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a share
        train(model, opt, range(3))
        saved = copy.deepcopy(opt.state_dict())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        opt = cls(model, **settings)
        opt.load_state_dict(copy.deepcopy(saved))
        if again:
            model[2].bias.requires_grad_(False)
            train(model, opt, range(3, 6))  # to a step that exchanges
            opt.load_state_dict(copy.deepcopy(saved))
            train(model, opt, range(4, 6))
        else:
            model[0].weight.requires_grad_(False)
            model[2].weight.requires_grad_(False)
            with opt.preconditioner.paused():
                train(model, opt, range(3, 6))
    return [x for p in model.parameters() for x in p.flatten().tolist()], [
        str(one.message) for one in said
    ]


@pytest.mark.parametrize("name", ["momentum", "Adam"])
def test_a_load_does_not_blame_a_save_for_a_frozen_bias(name):
    """All ranks load the same save; what has no factors was frozen since."""
    for texts in [texts for _, texts in run(2, frozen_since, name, True)]:
        (text,) = texts
        assert "no K-FAC factors of this kind for '2'; K-FAC estimates them again" in text
        assert "other parts of these layers were frozen when they were saved" in text
        assert "consolidate_state_dict" not in text


@pytest.mark.parametrize("name", ["momentum", "Adam"])
def test_ranks_stay_alike_if_layers_are_frozen_after_a_load(name):
    """Only one rank has a loaded momentum: the base begins anew where it steps the bias next."""
    (one, _), (other, _) = run(2, frozen_since, name, False)
    assert one == other
