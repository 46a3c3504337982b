"""What is refused, and what the error says: calls, groups that are added, and states."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from kaisa_optim import KFACLAMB, KFACSGD, LAMB, KFACAdam, with_kfac
from tests.optim.bases import REFUSED, FindsItsRate, assert_equal_runs
from tests.support.training import (
    EVERY_STEP,
    assert_same,
    backward,
    batch,
    descend,
    network,
    train,
)

STRANGER = nn.Parameter(torch.zeros(5, 7))


def of_groups(cls: type, *groups: dict[str, Any]) -> Any:
    model = network()
    first = {"params": model[0].parameters()}
    return cls([{**first, **groups[0]}, *groups[1:]], lr=0.1, model=model)


def with_capturable() -> None:
    """On the CPU the base refuses it, in its own words."""
    model = network()
    opt = KFACAdam(model, capturable=True, compute_method="eigen")
    backward(model, 0)
    opt.step()


# fmt: off
CALLS: list[tuple[type[Exception], str, Any]] = [
    (ValueError, "Invalid differentiable: True; .*leave it False",
     lambda: KFACSGD(network(), differentiable=True)),
    (ValueError, "Invalid differentiable: True; .*leave it False",
     lambda: of_groups(KFACSGD, {"differentiable": True})),
    (ValueError, "Invalid damping: -1.0", lambda: of_groups(KFACSGD, {"damping": -1.0})),
    (ValueError, "Invalid factor_decay: -0.5", lambda: of_groups(KFACSGD, {"factor_decay": -0.5})),
    (ValueError, "Invalid kl_clip: 1e-09 in a parameter group; it is one",
     lambda: of_groups(KFACSGD, {"kl_clip": 1e-9})),
    (ValueError, r"Invalid use_muon: False in a parameter group; .*KFACAdam",
     lambda: of_groups(KFACAdam, {"use_muon": False})),
    (ValueError, "Invalid lr: None with weight_decay=0.1; .*give lr",
     lambda: with_kfac(FindsItsRate)(network(), weight_decay=0.1)),
    (ValueError, "Invalid learning rate: -1", lambda: KFACSGD(network(), lr=-1)),
    (ValueError, "Invalid beta parameter", lambda: KFACAdam(network(), betas=(1.5, 0.9))),
    (AssertionError, "If capturable=True", with_capturable),
    (TypeError, "positional", lambda: KFACSGD(network(), 0.5, 0.9, 0.1, 1e-4, True, network())),
    (RuntimeError, r"KFACSGD does not work in Join.*drop_last=True",
     lambda: Join([KFACSGD(network())])),
    # Models and parameters
    (ValueError, r"Invalid model: .*no layer that K-FAC covers.*0\.weight.*scales.*register_layer",
     lambda: KFACSGD(nn.Sequential(nn.PReLU()))),
    (ValueError, r"Invalid model: .*covers \(skip_layers 'Lin' leaves out 4 parameters\); .*skip l",
     lambda: KFACSGD(network(), skip_layers=["Lin"])),
    (ValueError, r"Invalid params: .*shape \(5, 7\) does not belong .*model=",
     lambda: KFACSGD([STRANGER], model=network())),
    (ValueError, "Invalid params: .*does not belong",
     lambda: of_groups(KFACAdam, {}, {"params": [STRANGER]})),
    (ValueError, "does not belong to the model; pass the model whose",
     lambda: KFACSGD(network().parameters(), model=network())),
    *((ValueError, r"Invalid params: 0\.weight has no shape yet; run the la",
       partial(cls, nn.Sequential(nn.LazyLinear(3)))) for cls in (KFACSGD, KFACAdam)),
    # Bases
    *((ValueError, f"Invalid base: {name} can't take K-FAC: .*{remedy}",
       partial(with_kfac, getattr(torch.optim, name)))
      for name, remedy in REFUSED.items() if hasattr(torch.optim, name)),
    (ValueError, "KFACSGD has K-FAC inside already; use it as it is", partial(with_kfac, KFACSGD)),
    *((ValueError, "(?s)Invalid base: .*subclass of torch.optim.Optimi", partial(with_kfac, base))
      for base in ("SGD", nn.Linear, 3, torch.optim.SGD(network().parameters()))),
    # Names of the package
    *((ImportError, rf"use with_kfac\(torch.optim.{name}\)",
       partial(exec, f"from kaisa_optim import KFAC{name}")) for name in ("AdamW", "RMSprop")),
    *((ImportError, f"kaisa_optim has no {name}; use KFACAdam",
       partial(exec, f"from kaisa_optim import {name}")) for name in ("KFACMuon", "Muon")),
]
# fmt: on


@pytest.mark.parametrize(("error", "said", "call"), CALLS)
def test_a_call_is_refused(error, said, call):
    with pytest.raises(error, match=said):
        call()


def trained(cls: Any, frozen: bool = False, **options: Any) -> Any:
    """Return an optimizer after two steps."""
    model = network()
    model[0].requires_grad_(not frozen)
    opt = cls(model, **{"lr": 0.01, **options})
    train(model, opt, range(2))
    return opt


def assert_refused(opt: Any, error: type[Exception], said: str, change: Any) -> None:
    """The change is refused, and the optimizer goes on as if it had not been tried."""
    twin, untouched = copy.deepcopy((opt.preconditioner.model, opt))
    with pytest.raises(error, match=said):
        change(opt)
    assert_same(opt.state_dict(), untouched.state_dict())
    assert_equal_runs(range(2, 4), (opt.preconditioner.model, opt), (twin, untouched))
    copy.deepcopy(opt)


@pytest.mark.parametrize(
    ("error", "said", "lr", "group"),
    [
        (TypeError, "dict", 0.1, [1]),
        (ValueError, "does not belong", 0.1, {"params": [STRANGER]}),
        (ValueError, "Invalid damping: -1.0", 0.1, {"params": [], "damping": -1.0}),
        (ValueError, "Invalid factor_decay: -0.5", 0.1, {"params": [], "factor_decay": -0.5}),
        (ValueError, "Invalid lr: None with weight", None, {"params": [], "weight_decay": 0.1}),
    ],
)
def test_a_refused_group_leaves_no_trace(error, said, lr, group):
    opt = trained(with_kfac(FindsItsRate), lr=lr)
    assert_refused(opt, error, said, lambda opt: opt.add_param_group(group))


def state(cls: Any, **options: Any) -> dict[str, Any]:
    return copy.deepcopy(trained(cls, **options).state_dict())


def edited(cls: Any, index: int, key: str, change: Any, **options: Any) -> dict[str, Any]:
    """A state with another value in one entry: what ``change`` makes of the old one."""
    saved = state(cls, **options)
    saved["state"][index][key] = change(saved["state"][index].get(key))
    return saved


def of_a_wider_head() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    opt = KFACSGD(model, lr=0.1)
    descend(opt, model(batch(0)[0]).square().mean())
    return opt.state_dict()


def of_base(cls: Any, **options: Any) -> dict[str, Any]:
    model = network()
    opt = cls(model.parameters(), lr=0.01, **options)
    train(model, opt, [0])
    return opt.state_dict()


NO_STATE = r"Invalid state_dict: .*{}.*state_dict\(\) has"
FORM = "Invalid state_dict: {} of layer '2' is not what"
LACKS = "Invalid state_dict: its .* lack .?{}"
SGD, RMSprop = torch.optim.SGD, with_kfac(torch.optim.RMSprop)
# fmt: off
# What the error says, the optimizer that loads, and the state.
STATES: list[tuple[str, Any, dict[str, Any], Any]] = [
    (r"2: kfac_g_average is \(1, 5, 5\).*needs \(1, 3, 3\)", KFACSGD, {}, of_a_wider_head),
    (r"0: kfac_a_average is \(1, 2, 2\), the model needs", KFACSGD, {"frozen": True, **EVERY_STEP},
     partial(edited, KFACSGD, 0, "kfac_a_average", lambda t: t[:, :2, :2], **EVERY_STEP)),
    (r"2\.weight of shape \(3, 6\) has factors, but no layer", KFACSGD, {"skip_layers": "^2$"},
     partial(state, KFACSGD)),
    *((FORM.format(key), KFACAdam, {}, partial(edited, KFACAdam, 2, key, change))
      for key, change in (("kfac_g_average", str), ("kfac_status", str),
                          ("kfac_status", lambda t: t[:5]),
                          ("kfac_status", lambda t: torch.zeros(8).long()))),
    # Of other optimizers: refused in the load, not by a KeyError in it or in the next step
    (LACKS.format("betas, eps, which Adam reads"), KFACAdam, {}, partial(of_base, SGD)),
    (LACKS.format("betas, eps, which Adam reads"), KFACAdam, {},  # it would trip over the entries
     partial(of_base, SGD, momentum=0.9)),
    (LACKS.format("step', which Adam reads"), KFACAdam, {}, partial(of_base, LAMB)),
    (LACKS.format("momentum, dampening, which SGD reads"), KFACSGD, {}, partial(state, KFACAdam)),
    (LACKS.format(".*max_grad_norm.*, which LAMB reads"), KFACLAMB, {},
     partial(of_base, torch.optim.Adam)),
    (LACKS.format("alpha, eps, which RMSprop reads"), RMSprop, {},
     partial(of_base, SGD, momentum=0.9)),
    # Of no optimizer
    (NO_STATE.format("it is of type NoneType"), KFACAdam, {}, lambda: None),
    (NO_STATE.format("it is of type list"), KFACAdam, {}, lambda: [state(KFACAdam)]),
    (NO_STATE.format("it has no 'state' and no 'param_groups'"), KFACAdam, {}, dict),
    (NO_STATE.format("no 'state' and no 'param_groups'"), KFACAdam, {}, network().state_dict),
    (NO_STATE.format("it has no 'param_groups'"), KFACAdam, {},
     lambda: {"state": state(KFACAdam)["state"]}),
]
# fmt: on
BROKEN_NUMBERS = [
    ("polar", "kfac_a_root", torch.nan, "not finite"),
    ("polar", "kfac_g_root", 1e30, r"larger than 1e\+09"),
    ("inverse", "kfac_g_inverse", torch.nan, "not finite"),
    ("eigen", "kfac_a_vectors", torch.nan, "not finite"),
    ("eigen", "kfac_a_vectors", 2.0, "not orthonormal"),
    ("eigen", "kfac_a_vectors", 1e30, "not orthonormal"),
    ("eigen", "kfac_g_values", torch.inf, "not finite"),
]
for method, key, factor, fault in BROKEN_NUMBERS:
    options = {"compute_method": method}
    broken = partial(edited, KFACAdam, 0, key, partial(torch.mul, other=factor), **options)
    STATES.append((f"{key} is .*{fault}", KFACAdam, options, broken))


@pytest.mark.parametrize(("said", "cls", "options", "make"), STATES)
def test_a_refused_state_leaves_no_trace(said, cls, options, make):
    opt, loaded = trained(cls, **options), make()
    assert_refused(opt, ValueError, said, lambda opt: opt.load_state_dict(loaded))
