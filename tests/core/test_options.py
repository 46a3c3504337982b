"""The options and arguments: what documents them, what is refused, what follows and changes."""

from __future__ import annotations

import copy
import inspect
import math
import pydoc
import re
from typing import Any

import pytest
import torch
from torch import nn

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from kaisa_optim.options import EARLY, FIXED, OPTIONS, SECTIONS, SETTABLE, Options, check
from tests.support.training import (
    EVERY_STEP,
    METHODS,
    Probe,
    assert_near,
    assert_same,
    backward,
    difference,
    network,
    train,
    values,
)

NAN, INF = math.nan, math.inf
HALVES = torch.float16, torch.bfloat16
COUNT = "a whole number of steps"
TERMS = '"examples", "positions" or the number of terms'
EIGEN = {"compute_method": "eigen"}

# ---- what documents them ----


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam], ids=lambda c: c.__name__)
def test_the_docstring_tells_each_argument_once(cls):
    text = inspect.getdoc(cls)
    said = re.findall(r"^    (\w+): \S", text, flags=re.M)
    taken = inspect.signature(cls).parameters.keys() & OPTIONS.keys()
    assert set(said) == taken and len(said) == len(set(said))
    assert all(f"\n{section}:\n" in text for section in SECTIONS)
    shown = pydoc.plain(pydoc.render_doc(cls))
    assert all(line.strip() in shown for line in text.splitlines())


def test_every_option_setting_and_answer_has_a_plain_text():
    for option in OPTIONS.values():
        assert option.help.endswith(".") and "|" not in option.help, option.name
        assert option.annotation, option.name
    kind = type(KFACSGD(network(), lr=0.1).preconditioner)
    for name in SETTABLE:
        assert inspect.getdoc(getattr(kind, name)) == OPTIONS[name].help
    answers = [name for name in vars(kind.__base__) if name[0] != "_" and name not in SETTABLE]
    assert len(answers) > 10 and all(inspect.getdoc(getattr(kind, name)) for name in answers)


# ---- arguments that there are not, and models that are none ----


@pytest.mark.parametrize(
    ("cls", "name", "said"),
    [
        (KFACSGD, "dampning", r"; did you mean damping\?"),  # SGD's dampening is as near
        (KFACLAMB, "dampnig", r"; did you mean damping\?"),
        (type("Mine", (KFACSGD,), {}), "dampin", r"; did you mean damping\?"),
        (KFACSGD, "momentm", r"; did you mean momentum\?"),
        (KFACAdam, "inv_update_freq", r"; did you mean inv_update_steps\?"),
        (with_kfac(torch.optim.RAdam), "stagered", r"; did you mean staggered\?"),
        (KFACSGD, "temperature", r"; help\(KFACSGD\) lists what there is"),
        (KFACAdam, "use_muon", "; leave it out: KFACAdam steps all parameters"),
        (KFACSGD, "grafting", '; leave it out: compute_method="polar" has the base'),
        (KFACSGD, "warmup_steps", "; leave it out: a scheduler of lr warms up"),
        (KFACAdam, "momentum", "; in Adam and LAMB it is the first of betas"),
        (KFACSGD, "allreduce_bucket_cap_mb", "; it is called bucket_cap_mb here"),
        (KFACSGD, "loglevel", r'; leave it out: .*getLogger\("kaisa_optim"\)'),
    ],
)
def test_an_argument_that_there_is_not(cls, name, said):
    text = rf"^{cls.__name__}\(\) got an unexpected keyword argument '{name}'{said}"
    with pytest.raises(TypeError, match=text):
        cls(network(), lr=0.1, **{name: 1})


@pytest.mark.parametrize(
    "first", [nn.Linear, "resnet50", network().state_dict(), network, 3], ids=lambda x: str(type(x))
)
def test_what_is_no_model(first):
    said = f"an object of type {type(first).__name__}"
    text = rf"^Invalid model: {said}; .*KFACSGD\(model, \.\.\.\), or as model="
    for call in (lambda: KFACSGD(first), lambda: KFACSGD(network().parameters(), model=first)):
        with pytest.raises(ValueError, match=text):
            call()


A_NUMBER = r"Invalid lr: .* must be a number or a tensor; param"
NEEDED = r"KFACAdam\(\) needs the model first: KFACAdam\(model"
# fmt: off
CALLS = [
    *((lambda given=given: KFACAdam(**given), TypeError, NEEDED)
      for given in ({}, {"lr": 0.1}, {"model": network()})),
    (lambda: KFACSGD(network().parameters()), ValueError,
     "Invalid model: an object of type generator"),
    (lambda: KFACSGD(network(), model=network()), ValueError,
     r"Invalid model: the first argument .*leave out model="),
    (lambda: KFACSGD(nn.Sequential(nn.Tanh())), ValueError, "empty parameter list"),
    (lambda: KFACSGD([], model=network()), ValueError, "empty parameter list"),
    *((lambda rate=rate: KFACSGD(nn.Linear(2, 2), rate), ValueError, A_NUMBER)
      for rate in ("0.1", lambda step: 0.1, iter([nn.Parameter(torch.zeros(2))]))),
    (lambda: KFACSGD(network(), grad_scaler=lambda step: 2.0), ValueError,
     r"Invalid grad_scaler: <function .*callable of nothing"),
]
# fmt: on


@pytest.mark.parametrize(("call", "error", "said"), CALLS)
def test_calls_that_are_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize("params", [torch.zeros(()), torch.zeros(3), 5])
def test_what_is_no_iterable_of_parameters_is_refused_as_by_the_base(params):
    said = []
    for make in (torch.optim.Adam, lambda params: KFACAdam(params, model=network())):
        with pytest.raises(TypeError) as found:
            make(params)
        said.append(str(found.value))
    assert said[0] == said[1]


def test_a_base_that_may_know_more_names_receives_them():
    class Open(torch.optim.SGD):
        def __init__(self, params, lr, **rest):
            self.dampning = rest.pop("dampning")
            super().__init__(params, lr, **rest)

    class Between(torch.optim.SGD):
        def __init__(self, params, lr, special):
            super().__init__(params, lr)
            self.special = special

    class Diamond(KFACSGD, Between):
        pass

    opt = with_kfac(Open)(network(), lr=0.1, dampning=0.5, momentum=0.9)
    assert opt.dampning == 0.5 and opt.param_groups[0]["momentum"] == 0.9
    assert Diamond(network(), lr=0.1, special=3).special == 3


# ---- values that are refused ----

# Values of each option that are refused, and what the error says beside the option and the value.
BAD: dict[str, tuple[list[Any], str]] = {
    "damping": ([0, -1e-3, NAN, INF, "0.1", True], "a number above 0, such as 1e-2"),
    "factor_decay": ([-0.5, 1.01, NAN, INF, "0.9", None, True], r"in \[0, 1\], such as 0.95"),
    "kl_clip": ([0, -1e-3, NAN, INF, "1e-3", False], "above 0, or None for no clip"),
    "factor_update_steps": ([0, -2, 1.5, NAN, INF, "10", None, True], COUNT),
    "inv_update_steps": ([0, 1.5, NAN, INF, "10", True], COUNT),
    "compute_method": (["cholesky", "", None], "choose from 'polar', 'eigen', 'inverse'"),
    "damping_split": (["none", "full "], "choose from 'pi', 'full'"),
    "weight_sharing": (["share", None], "choose from 'expand', 'reduce'"),
    "loss_reduction": (["none", None], "choose from 'mean', 'sum'"),
    "normalization": (["papers", None], "choose from 'fisher', 'kaisa'"),
    "kl_clip_lr": (["group", 0.1], "choose from 'initial', 'current'"),
    "loss_terms": (["tokens", "0.1", 0, -3, NAN, INF, None, True], TERMS),
    "statistics_fraction": ([0, 1.01, NAN, INF, "1", True], r"\(0, 1\], such as 0.25"),
    "statistics_precision": (["tf32", None, 1], "choose from 'highest', 'high', 'medium'"),
    "max_factor_size": ([0, NAN, "16"], "1 or more"),
    "max_failures": ([-1, 0.5, NAN, INF, "3"], "a count, 0 or more, or None"),
    "compute_eigenvalue_outer_product": (["no", None, 0], "True or False$"),
    "staggered": (["no", 0, 2, 1.5, torch.tensor(True)], "it must be True or False, or None"),
    "colocate_factors": (["no", 1], "True or False, or None"),
    "factor_dtype": ([*HALVES, torch.int32, "float32"], "inv_dtype takes torch.bfloat16"),
    "inv_dtype": ([torch.int8, "bf16", 16], "a floating torch.dtype, or None"),
    "comm_dtype": ([torch.float16, "bfloat16"], "torch.bfloat16, or None"),
    "bucket_cap_mb": ([0, -1.0, NAN, INF, "25", None], "a number of MiB above 0"),
    "memory_budget": (
        [0, -1, NAN, INF, True, [], *("", "4 apples", "GB", "-1GB", "0.5")],
        'a number of bytes, a text such as "80GB" or "4GiB"',
    ),
    "grad_worker_fraction": ([-0.1, 1.5, "half", True], "between 0 and 1"),
    "assignment": (["layerwise"], "layer-wise"),
    "grad_scaler": (["dynamic", True, [1.0], 0], "a torch.amp.GradScaler, a number above 0"),
    "verify_every": ([0, -1, 1.5, NAN, "100", True], "a whole number of steps, or None"),
    "skip_layers": ([[nn.Linear], [0], 0, None], "it must be a pattern or a list of patterns"),
}


@pytest.mark.parametrize("option", sorted(OPTIONS.keys() - {"process_group"}))
def test_a_bad_value_is_named_with_what_it_must_be(option):
    values, must = BAD[option]
    method = {"compute_method": "inverse"} if "split" in option else {}
    for value in values:
        text = rf"(?s)^Invalid {option}: {re.escape(repr(value))}.*{must}"
        with pytest.raises(ValueError, match=text):
            Options(**{**method, option: value})


@pytest.mark.parametrize("value", ["[", ["0", "(2"]])
def test_a_pattern_that_is_no_regular_expression(value):
    with pytest.raises(ValueError, match=r"Invalid skip_layers: '[\[(]2?' is no regular expr"):
        Options(skip_layers=value)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        *(("80GB", 80 * 10**9), ("4GiB", 4 * 2**30), ("1.5 MiB", 3 * 2**19), ("12k", 12_000)),
        *(("100", 100), (4096, 4096), (1e9, 10**9), (0.25, 0.25), (None, None), ("2 TB", 2e12)),
    ],
)
def test_amounts_of_memory(given, size):
    budget = check("memory_budget", given)
    assert budget == size and isinstance(budget, float) == (size == 0.25)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [(torch.bfloat16, 1.2e-11), (torch.float32, 1.2e-11), (torch.float64, 2.3e-20)],
)
def test_a_damping_that_rounding_drowns_is_refused(dtype, least):
    """Steps of 1e-12 in float32 were thousands of times too long in their first use."""
    model = network(dtype=dtype)
    KFACSGD(model, lr=0.1, damping=least)
    text = rf"Invalid damping: {least / 2!r}; with torch.float\d\d arithmetic it must be at least"
    with pytest.raises(ValueError, match=text):
        KFACSGD(model, lr=0.1, damping=least / 2)
    opt = KFACSGD(model[0].parameters(), lr=0.1, model=model)
    with pytest.raises(ValueError, match=text):
        opt.add_param_group({"params": model[2].parameters(), "damping": least / 2})
    assert len(opt.param_groups) == 1
    # In later steps too, by a schedule or by hand.
    opt = KFACSGD(model, lr=0.1, damping=lambda step: 1e-3 if step < 2 else least / 2)
    train(model, opt, range(2))
    with pytest.raises(ValueError, match=text):
        train(model, opt, [2])
    opt = KFACSGD(model, lr=0.1, damping=1e-3)
    train(model, opt, range(2))
    opt.param_groups[0]["damping"] = least / 2
    with pytest.raises(ValueError, match=text):
        train(model, opt, [2])


# ---- options that do not go together ----

# A value of each option that is in use.
USED: dict[str, Any] = {
    "normalization": "kaisa",
    "kl_clip_lr": "current",
    "grad_scaler": 2.0,
    "loss_terms": 4.0,
    "loss_reduction": "sum",
    "weight_sharing": "reduce",
    "compute_method": "inverse",
    "damping_split": "pi",
    "compute_eigenvalue_outer_product": True,
    "kl_clip": 0.01,
    "assignment": "opt",
}
CONFLICTS = [(name, *x.conflict) for name, x in OPTIONS.items() if x.conflict is not None]
OF_PAPERS = ["kl_clip", "kl_clip_lr", "damping_split", "compute_eigenvalue_outer_product"]
OF_PAPERS += ["loss_terms", "loss_reduction", "grad_scaler", "normalization"]


@pytest.mark.parametrize(("name", "other", "value", "reason"), CONFLICTS)
def test_options_that_contradict_each_other_are_both_named(name, other, value, reason):
    given = {**EIGEN, "kl_clip": None, name: USED[name], other: value}
    text = (
        f"Invalid {name}: {USED[name]!r} with {other}={value!r}: {reason}; "
        f"leave {name} out, or give {other} another value"
    )
    with pytest.raises(ValueError) as error:
        Options(**given)
    assert str(error.value) == text
    Options(**(given | {name: OPTIONS[name].default}))


@pytest.mark.parametrize("name", OF_PAPERS)
def test_directions_have_no_use_for_options_of_the_papers(name):
    assert OPTIONS[name].of_papers
    value = USED[name]
    text = (
        f"Invalid {name}: {value!r} with compute_method='polar', which has no use for it; leave it "
        'out, or name compute_method="eigen" or "inverse" for the papers\' gradients'
    )
    for method in ({}, {"compute_method": "polar"}):
        with pytest.raises(ValueError) as error:
            KFACAdam(network(), **{name: value}, **method)
        assert str(error.value) == text
    opt = KFACAdam(network(), **{name: OPTIONS[name].default})
    if name in SETTABLE:
        with pytest.raises(ValueError) as error:
            setattr(opt.preconditioner, name, check(name, value))
        assert text.split(" with ")[1] in str(error.value)


KAISA = {"normalization": "kaisa"}


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ({}, {"compute_method": "polar", "damping": 0.01, "inv_update_steps": 100}),
        ({}, {"staggered": True, "early": EARLY, "damping_split": None}),
        (EIGEN, {"damping": 5e-3, "inv_update_steps": 50, "early": EARLY[:-2] + EARLY[-1:]}),
        (EIGEN, {"staggered": True, "damping_split": None, "kl_clip_lr": "initial"}),
        (EIGEN | KAISA, {"staggered": False, "kl_clip_lr": "current", "early": ()}),
        ({"inv_update_steps": 5}, {"early": ()}),
        ({"inv_update_steps": 20}, {"early": (5, 10, 20, 30, 40)}),
        (EIGEN | {"inv_update_steps": lambda step: 100}, {"early": EARLY}),
        ({"compute_method": "inverse"}, {"damping_split": "pi", "damping": 5e-3}),
        ({"compute_method": "inverse"} | KAISA, {"damping_split": "full"}),
        ({"skip_layers": "head"}, {"skip_layers": ("head",)}),
    ],
    ids=lambda values: ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in values.items()),
)
def test_what_is_left_out_follows_from_the_rest(given, settled):
    options = Options(**given)
    assert {name: getattr(options, name) for name in settled} == settled


def test_ranks_compare_what_they_must_have_alike():
    """But no addresses, which are each rank's own."""
    given = {"kl_clip": lambda step: 0.1, "grad_scaler": 2.0, "loss_terms": 4}
    described = Options(**EIGEN, **given).described()
    assert described["kl_clip"] == "a callable" and described["grad_scaler"] == "given"
    assert described["loss_terms"] == 4.0
    assert OPTIONS.keys() - described.keys() == {"damping", "factor_decay", "process_group"}
    assert Options().described()["grad_scaler"] is None


# ---- values that may change from step to step ----


@pytest.mark.parametrize("name", SETTABLE)
def test_an_option_set_to_a_bad_value_stays_as_it_was(name):
    kfac = KFACSGD(network(), lr=0.1).preconditioner
    before, bad = getattr(kfac, name), BAD[name][0][0]
    with pytest.raises(ValueError, match=f"Invalid {name}: {bad!r}"):
        setattr(kfac, name, bad)
    assert getattr(kfac, name) == before


def test_other_names_can_not_be_set_on_the_preconditioner():
    kfac = KFACSGD(network(), lr=0.1).preconditioner
    of_groups = ("damping", "factor_decay")
    answers = [x for x in vars(type(kfac).__base__) if x[0] != "_" and x not in SETTABLE]
    texts = {
        **dict.fromkeys(answers, ""),
        **{name: f"{name} = 1: .* are given at construction" for name in FIXED},
        **{name: f"{name} = 1: it belongs to the parameter groups" for name in of_groups},
        "heat": f"heat = 1: {', '.join(SETTABLE)} can be set",
    }
    for name, text in texts.items():
        with pytest.raises(AttributeError, match=text or name):
            setattr(kfac, name, 1)


SCHEDULABLE = [name for name, option in OPTIONS.items() if option.schedulable]


@pytest.mark.parametrize("option", SCHEDULABLE)
def test_a_callable_is_checked_with_its_arguments_and_at_each_step(option):
    good = {"factor_decay": 0.9, "kl_clip": 1e-3}.get(option, 1)
    bad = BAD[option][0][0]
    method = EIGEN if OPTIONS[option].of_papers else {}

    def wrong(one, two):
        return good

    with pytest.raises(ValueError, match=f"Invalid {option}: <function .*a callable of step, such"):
        KFACSGD(network(), lr=0.1, **method, **{option: wrong})
    with pytest.raises(ValueError, match=f"Invalid {option}: {bad!r}"):
        KFACSGD(network(), lr=0.1, **method, **{option: lambda step: bad})
    model = network()
    opt = KFACSGD(model, lr=0.1, **method, **{option: lambda step: good if step < 2 else bad})
    with pytest.raises(ValueError, match=f"Invalid {option}: {bad!r}"):
        train(model, opt, range(3))


def test_callables_that_keep_their_arguments_to_themselves():
    model = network()
    callables = {"damping": {0: 0.5}.get, "statistics_fraction": lambda *steps: 0.5}
    opt = KFACSGD(model, lr=0.1, **callables)
    train(model, opt, [0])
    assert opt.param_groups[0]["damping"] == 0.5


@pytest.mark.parametrize("method", METHODS)
def test_numbers_or_callables_of_the_step(method):
    of_groups = {"damping": (0.1, 0.2, 0.4), "factor_decay": (0.9, 0.5, 0.7)}
    settings: dict[str, Any] = {"factor_update_steps": (1, 1, 2), "inv_update_steps": (1, 2, 2)}
    if method == "eigen":  # options that directions have no use for
        settings |= {"kl_clip": (1e-3, None, 1e-4), "loss_terms": (8, 4, 2)}
    seen: dict[str, set[int]] = {name: set() for name in of_groups | settings}

    def schedule(name: str, sequence: Any):
        def of(step: int):
            seen[name].add(step)
            return sequence[min(step, 2)]

        return of

    schedules = {name: schedule(name, x) for name, x in (of_groups | settings).items()}
    model, expected = network(), network()
    opt = KFACSGD(model, lr=0.1, compute_method=method, **schedules)
    by_hand = KFACSGD(expected, lr=0.1, inv_update_steps=1, compute_method=method)
    for i in range(6):
        for name, sequence in of_groups.items():
            by_hand.param_groups[0][name] = sequence[min(i, 2)]
        for name, sequence in settings.items():
            setattr(by_hand.preconditioner, name, sequence[min(i, 2)])
        train(model, opt, [i])
        train(expected, by_hand, [i])
        assert opt.param_groups[0]["damping"] == of_groups["damping"][min(i, 2)]
        for name in settings.keys() - {"factor_update_steps"}:
            assert getattr(opt.preconditioner, name) == getattr(by_hand.preconditioner, name)
        assert_same(model, expected)
    assert all(steps >= set(range(6)) for steps in seen.values())


def test_a_callable_in_a_group():
    model = network()
    scheduled = {"params": model[0].parameters(), "damping": lambda step: 0.1 * (step + 1)}
    groups = [scheduled, {"params": model[2].parameters()}]
    opt = KFACSGD(groups, lr=0.1, model=model, damping=0.7)
    for i in range(3):
        train(model, opt, [i])
        assert [g["damping"] for g in opt.param_groups] == [pytest.approx(0.1 * (i + 1)), 0.7]


# ---- groups, and layers that are replaced ----


@pytest.mark.parametrize(
    ("name", "values"), [("damping", (0.1, 0.2)), ("factor_decay", (0.9, 0.8))]
)
def test_weight_and_bias_in_groups_that_differ(name, values):
    model, (one, other) = network(), values
    weights, biases = [model[0].weight, *model[2].parameters()], [model[0].bias]
    wanted = rf"Invalid {name}: layer '0' .*\[{min(values)}, {max(values)}\].*the same {name}"
    groups = [{"params": weights, name: one}, {"params": biases}]
    with pytest.raises(ValueError, match=wanted):
        KFACSGD([groups[0], {"params": biases, name: other}], lr=0.1, model=model)
    # Set later, it is an error of the step.
    opt = KFACSGD(groups, lr=0.1, model=model, **{name: one})
    opt.param_groups[1][name] = other
    backward(model, 0)
    with pytest.raises(ValueError, match=wanted):
        opt.step()
    # Other options of the two groups may differ.
    opt.param_groups[1].update({name: one, "lr": 0.05, "weight_decay": 0.1})
    train(model, opt, [0])


def test_an_added_bias_has_the_scheduled_values_of_its_step():
    model = network()
    opt = KFACSGD(
        [model[0].weight, *model[2].parameters()],
        lr=0.1,
        model=model,
        damping=lambda step: 0.1 * 0.9**step,
        factor_decay=lambda step: 0.9 + 0.01 * step,
    )
    train(model, opt, range(3))
    with pytest.raises(ValueError, match="Invalid damping"):
        opt.add_param_group({"params": [model[0].bias], "damping": 0.5})
    opt.add_param_group({"params": [model[0].bias]})
    for now in range(2, 5):
        for group in copy.deepcopy(opt).param_groups + opt.param_groups:
            assert group["damping"] == pytest.approx(0.1 * 0.9**now)
            assert group["factor_decay"] == pytest.approx(0.9 + 0.01 * now)
        train(model, opt, [now + 1])
    assert opt.preconditioner.factors("0")[0].shape == (1, 5, 5)


def test_a_replaced_head():
    model = network()
    opt = KFACSGD(model, lr=1.0, momentum=0.0, **EVERY_STEP)
    probe = Probe(model)
    for i in range(2):
        probe.step(model, i)
        train(model, opt, [i])
    old = model[2]
    model[2] = nn.Linear(6, 3, dtype=torch.float64)
    opt.add_param_group({"params": model[2].parameters()})
    assert list(opt.preconditioner.layers) == ["0", "2"]
    old_values = values(old)
    expected, before = Probe(model).step(model, 2), values(model)
    train(model, opt, [2])
    moved = difference(before, model)
    for name in ("2.weight", "2.bias"):  # the body goes on with its running averages
        assert_near(moved[name], expected[name])
    assert not torch.allclose(moved["0.weight"], expected["0.weight"])
    assert_same(values(old), old_values)
    twin_model, twin = copy.deepcopy((model, opt))
    train(model, opt, [3])
    train(twin_model, twin, [3])
    assert_same(twin_model, model)
    assert not any(str(k).startswith("kfac") for k in opt.state.get(old.weight, {}))


@pytest.mark.parametrize("method", METHODS)
def test_a_head_replaced_without_a_word_is_not_trained(method):
    """As with any torch optimizer; the body trains on."""
    model = network()
    opt = KFACSGD(model, lr=0.1, **METHODS[method])
    train(model, opt, [0])
    model[2] = nn.Linear(6, 3, dtype=torch.float64)
    before = values(model)
    train(model, opt, range(1, 3))
    moved = difference(before, model)
    assert moved["0.weight"].abs().max() > 0
    assert not moved["2.weight"].any()


# ---- warnings, and steps that are refused ----


def test_a_notice_comes_also_in_code_without_a_name():
    """As some embedded interpreters run it."""
    code = """
import torch
from kaisa_optim import KFACAdam
model = torch.nn.Linear(4, 3)
model.scale = torch.nn.Parameter(torch.ones(100))
KFACAdam(model, lr=0.1)
"""
    with pytest.warns(UserWarning, match="the base optimizer updates these"):
        exec(code, {})


def test_a_launcher_without_a_process_group_is_noticed(monkeypatch):
    model = nn.Linear(3, 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="WORLD_SIZE is 4") as found:
        KFACSGD(model, lr=0.1)
    assert [w.filename for w in found] == [__file__]
    monkeypatch.setenv("WORLD_SIZE", "1")
    KFACSGD(model, lr=0.1)


def test_cuda_graph_capture_is_refused(monkeypatch):
    model = network()
    opt = KFACSGD(model)
    backward(model, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph"):
        opt.step()
