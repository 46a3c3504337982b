"""Where the moments of Adam and LAMB live: what leads into the eigenbasis, what rules it out."""

from __future__ import annotations

import warnings

import pytest
import torch

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, KFACMuon, with_kfac
from kaisa_optim.core.options import DAMPING, OPTIONS
from tests.optim.test_options import USED
from tests.support.training import network, train

TENSORS = (torch.tensor(0.9), torch.tensor(0.99))


def test_left_out_they_live_in_the_eigenbasis_with_both_switches():
    for cls in (KFACAdam, KFACLAMB, with_kfac(torch.optim.AdamW)):
        options = cls(network()).preconditioner.options
        assert (options.moments, options.nesterov, options.orthogonal) == ("eigenbasis", True, True)
    named = KFACAdam(network(), moments="eigenbasis").preconditioner.options
    assert (named.nesterov, named.orthogonal) == (False, False)
    one = KFACAdam(network(), orthogonal=False).preconditioner.options
    assert (one.moments, one.nesterov, one.orthogonal) == ("eigenbasis", True, False)
    for cls in (KFACSGD, with_kfac(torch.optim.RAdam)):
        assert cls(network(), lr=0.1).preconditioner.options.moments == "parameters"


def test_nesterov_is_the_bases_own_or_belongs_to_the_eigenbasis():
    own = KFACSGD(network(), lr=0.1, momentum=0.9, nesterov=True)
    assert own.param_groups[0]["nesterov"] is True
    model = network()
    group = {"params": model.parameters(), "nesterov": True}
    assert KFACSGD([group], lr=0.1, momentum=0.9, model=model).param_groups[0]["nesterov"] is True
    for other in ({"moments": "parameters"}, {"damping": 0.1}):
        with pytest.raises(ValueError, match=r"Invalid nesterov: True belongs to .*leave out one"):
            KFACAdam(network(), nesterov=True, **other)
    with pytest.raises(ValueError, match=r"Invalid nesterov: True .* needs Adam, AdamW or LAMB as"):
        with_kfac(torch.optim.RAdam)(network(), nesterov=True)

    class Passing(torch.optim.SGD):
        def __init__(self, params, lr, **rest):
            super().__init__(params, lr, **rest)

    passed = with_kfac(Passing)(network(), lr=0.1, momentum=0.9, nesterov=True)
    assert passed.param_groups[0]["nesterov"] is True
    with pytest.raises(ValueError, match="Invalid nesterov: 'yes'; it must be True or False"):
        KFACAdam(network(), nesterov="yes")
    with pytest.raises(ValueError, match="Invalid nesterov: True in a parameter group"):
        KFACAdam([group], model=model)


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ({"moments": "parameters"}, "moments='parameters'"),
        ({"moments": "parameters", "damping": 0.5}, "moments='parameters'"),
        ({"damping": 0.5}, "damping=0.5"),
        ({"kl_clip": None}, "kl_clip=None"),
        ({"grafting": True, "kl_clip": None}, "kl_clip=None"),
        ({"amsgrad": True}, "amsgrad=True"),
        ({"betas": TENSORS}, "betas=(tensor(0.9000), tensor(0.9900))"),
        ({"group": {"damping": 0.5}}, "damping=0.5 in a parameter group"),
        ({"group": {"kl_clip_lr": "current"}}, 'kl_clip_lr="current" in a parameter group'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_rules_out_the_eigenbasis_is_named(arguments, culprit):
    name, model, arguments = "nesterov", network(), dict(arguments)
    params = [{"params": model.parameters(), **arguments.pop("group", {})}]
    with pytest.raises(ValueError) as found:
        KFACAdam(params, model=model, **arguments, **{name: True})
    assert str(found.value) == (
        f'Invalid {name}: True belongs to moments="eigenbasis", which {culprit} rules out; leave '
        "out one of the two"
    )


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ({"damping": 0.5}, "damping=0.5"),
        ({"kl_clip": None}, "kl_clip=None"),
        ({"amsgrad": True}, "amsgrad=True"),
        ({"group": {"damping": 0.5}}, "damping=0.5 in a parameter group"),
        ({"damping": 0.5, "moments": "parameters"}, None),
        ({"damping": DAMPING}, None),
        ({}, None),
    ],
    ids=str,
)
def test_an_option_that_leaves_the_eigenbasis_says_so_unless_that_is_named(arguments, culprit):
    model, arguments = network(), dict(arguments)
    params = [{"params": model.parameters(), **arguments.pop("group", {})}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = KFACAdam(params, model=model, **arguments)
    if culprit is None:
        assert caught == []
        return
    (warning,) = caught
    assert str(warning.message) == (
        f'{culprit} leads to moments="parameters" in place of "eigenbasis", the default, where it '
        'has no meaning; name moments="parameters" if that is meant, or leave it out'
    )
    assert warning.filename == __file__
    assert optimizer.preconditioner.options.moments == "parameters"


def test_a_subclass_of_adam_has_the_eigenbasis_only_by_name():
    class Mine(torch.optim.Adam):
        pass

    with pytest.raises(ValueError, match=r"Invalid nesterov: True .* named over Mine, a subclass"):
        with_kfac(Mine)(network(), nesterov=True)
    assert with_kfac(Mine)(network(), moments="eigenbasis", nesterov=True)


def test_what_is_off_is_accepted_by_all():
    for cls in (KFACSGD, KFACAdam, with_kfac(torch.optim.RAdam)):
        cls(network(), lr=0.1, nesterov=False, orthogonal=False)


def test_orthogonal_belongs_to_the_eigenbasis():
    with pytest.raises(ValueError) as found:
        KFACSGD(network(), lr=0.1, orthogonal=True)
    assert str(found.value).startswith(
        'Invalid orthogonal: True belongs to moments="eigenbasis", which needs Adam, AdamW or LAMB '
        "as its base"
    )
    with pytest.raises(ValueError, match="Invalid orthogonal: 'yes'; it must be True or False"):
        KFACAdam(network(), orthogonal="yes")
    with pytest.raises(ValueError, match="Invalid orthogonal: True in a parameter group"):
        model = network()
        KFACAdam([{"params": model.parameters(), "orthogonal": True}], model=model)

    class Own(torch.optim.SGD):
        def __init__(self, params, lr, orthogonal=False):
            super().__init__(params, lr)
            self.orthogonal = orthogonal

    assert with_kfac(Own)(network(), lr=0.1, orthogonal=True).orthogonal is True


def test_other_bases_and_settings_have_no_such_moments():
    with pytest.raises(ValueError, match=r'Invalid moments: "eigenbasis" needs .*RAdam has none'):
        with_kfac(torch.optim.RAdam)(network(), moments="eigenbasis")
    with pytest.raises(ValueError, match='Invalid moments: "metric" is KFACMuon\'s own'):
        KFACAdam(network(), moments="metric")
    model = network()
    opt = KFACAdam(model[0].parameters(), model=model)
    for setting in ({"amsgrad": True}, {"betas": TENSORS}):
        said = f"Invalid {next(iter(setting))}: "
        with pytest.raises(ValueError, match=said):
            KFACAdam(network(), moments="eigenbasis", **setting)
        with pytest.raises(ValueError, match=said):
            opt.add_param_group({"params": model[2].parameters(), **setting})
        state = opt.state_dict()
        state["param_groups"] = [{**group, **setting} for group in state["param_groups"]]
        with pytest.raises(ValueError, match=said):
            opt.load_state_dict(state)


MUON_HAS_NOT = [name for name, option in OPTIONS.items() if "muon" in option.unused_by]


@pytest.mark.parametrize("name", MUON_HAS_NOT)
def test_muon_refuses_what_it_has_no_use_for(name):
    values = {"normalization": "kaisa", "kl_clip_lr": "current", "moments": "eigenbasis"}
    value = {**USED, **values, "orthogonal": True}[name]
    with pytest.raises(ValueError) as error:
        KFACMuon(network(), **{name: value})
    text = f"Invalid {name}: {value!r}; KFACMuon has no use for it, leave it out"
    assert str(error.value) == text
    KFACMuon(network(), **{name: OPTIONS[name].default})


@pytest.mark.parametrize("cls", [KFACAdam, KFACLAMB])
def test_the_bases_own_moments_stay_empty(cls):
    model = network()
    opt = cls(model, lr=0.01)
    train(model, opt, range(2))
    assert not any("exp_avg" in entry for entry in opt.state.values())
