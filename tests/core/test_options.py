"""The options: refused values, contradictions, and values that change from step to step."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.options import EARLY, FIXED, OPTIONS, SETTABLE, Options, check
from tests.support.training import METHODS, assert_same, network, train

NAN, INF = math.nan, math.inf
HALVES = torch.float16, torch.bfloat16
COUNT = "a whole number of steps"
TERMS = '"examples", "positions" or the number of terms'

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


@pytest.mark.parametrize("option", BAD)
def test_a_bad_value_is_named_with_what_it_must_be(option):
    values, must = BAD[option]
    for value in values:
        with pytest.raises(
            ValueError, match=rf"(?s)^Invalid {option}: {re.escape(repr(value))}.*{must}"
        ):
            Options(
                **{option: value, **({"compute_method": "inverse"} if "split" in option else {})}
            )


def test_every_option_that_is_checked_has_bad_values():
    assert BAD.keys() == OPTIONS.keys() - {"process_group"}


def test_a_pattern_that_is_no_regular_expression():
    for value in ("[", ["0", "(2"]):
        with pytest.raises(ValueError, match=r"Invalid skip_layers: '[\[(]2?' is no regular expr"):
            Options(skip_layers=value)


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


@pytest.mark.parametrize(("name", "other", "value", "reason"), CONFLICTS)
def test_options_that_contradict_each_other_are_both_named(name, other, value, reason):
    given = {"compute_method": "eigen", "kl_clip": None} | {name: USED[name], other: value}
    text = (
        f"Invalid {name}: {USED[name]!r} with {other}={value!r}: {reason}; "
        f"leave {name} out, or give {other} another value"
    )
    with pytest.raises(ValueError) as error:
        Options(**given)
    assert str(error.value) == text
    Options(**(given | {name: OPTIONS[name].default}))


def test_a_conflict_may_also_come_by_a_setting():
    eigen = {"compute_method": "eigen"}
    kfac = KFACSGD(network(), lr=0.1, normalization="kaisa", **eigen).preconditioner
    with pytest.raises(ValueError, match=r"Invalid loss_terms: 4.0 with normalization='kaisa'"):
        kfac.loss_terms = 4


# ---- options of the papers ----


OF_PAPERS = [name for name, option in OPTIONS.items() if option.of_papers]


@pytest.mark.parametrize("name", OF_PAPERS)
def test_directions_have_no_use_for_options_of_the_papers(name):
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


def test_no_option_of_the_papers_is_forgotten():
    names = "kl_clip kl_clip_lr damping_split compute_eigenvalue_outer_product loss_terms"
    assert {*names.split(), "loss_reduction", "grad_scaler", "normalization"} == set(OF_PAPERS)


# ---- what follows from other options ----


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        (
            {},
            {
                "compute_method": "polar",
                "damping": 0.01,
                "inv_update_steps": 100,
                "staggered": True,
                "early": EARLY,
                "damping_split": None,
            },
        ),
        (
            {"compute_method": "eigen"},
            {
                "damping": 5e-3,
                "inv_update_steps": 50,
                "staggered": True,
                "early": EARLY[:-2] + EARLY[-1:],
                "damping_split": None,
                "kl_clip_lr": "initial",
            },
        ),
        (
            {"compute_method": "eigen", "normalization": "kaisa"},
            {"staggered": False, "kl_clip_lr": "current", "early": ()},
        ),
        ({"inv_update_steps": 5}, {"early": ()}),
        ({"inv_update_steps": 20}, {"early": (5, 10, 20, 30, 40)}),
        ({"compute_method": "eigen", "inv_update_steps": lambda step: 100}, {"early": EARLY}),
        ({"compute_method": "inverse"}, {"damping_split": "pi", "damping": 5e-3}),
        ({"compute_method": "inverse", "normalization": "kaisa"}, {"damping_split": "full"}),
        ({"skip_layers": "head"}, {"skip_layers": ("head",)}),
    ],
    ids=lambda values: ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in values.items()),
)
def test_what_is_left_out_follows_from_the_rest(given, settled):
    options = Options(**given)
    assert {name: getattr(options, name) for name in settled} == settled


def test_a_record_is_frozen_and_copies_with_new_values():
    options = Options(damping=0.1, compute_method="eigen")
    for name in ("damping", "new"):
        with pytest.raises(AttributeError, match=f"cannot assign to field '{name}'"):
            setattr(options, name, 1)
    other = pickle.loads(pickle.dumps(copy.deepcopy(options.having({"kl_clip": None}))))
    assert (other.kl_clip, other.damping, options.kl_clip) == (None, 0.1, 1.5e-4)
    again = Options(damping=0.1, compute_method="eigen")
    assert other != options == again and "damping=0.1," in repr(options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dampin'"):
        Options(dampin=0.1)


def test_ranks_compare_what_they_must_have_alike():
    given = {"kl_clip": lambda step: 0.1, "grad_scaler": 2.0, "loss_terms": 4}
    options = Options(compute_method="eigen", **given)
    described = options.described()
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
    for name in FIXED:
        with pytest.raises(AttributeError, match=f"{name} = 1: .* are given at construction"):
            setattr(kfac, name, 1)
    for name in ("damping", "factor_decay"):
        with pytest.raises(AttributeError, match=f"{name} = 1: it belongs to the parameter groups"):
            setattr(kfac, name, 1)
    with pytest.raises(AttributeError, match=f"heat = 1: {', '.join(SETTABLE)} can be set"):
        kfac.heat = 1


SCHEDULABLE = [name for name, option in OPTIONS.items() if option.schedulable]


@pytest.mark.parametrize("option", SCHEDULABLE)
def test_a_callable_is_checked_with_its_arguments_and_at_each_step(option):
    good = {"factor_decay": 0.9, "kl_clip": 1e-3}.get(option, 1)
    bad = BAD[option][0][0]
    method = {"compute_method": "eigen" if OPTIONS[option].of_papers else "polar"}

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


def test_a_loss_scale_that_is_no_number():
    model = network()
    with pytest.raises(ValueError, match=r"Invalid grad_scaler: <function .*callable of nothing"):
        KFACSGD(model, lr=0.1, grad_scaler=lambda step: 2.0)
    opt = KFACSGD(model, lr=0.1, grad_scaler=lambda: torch.tensor(2.0), compute_method="eigen")
    train(model, opt, [0])


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


@pytest.mark.parametrize("method", METHODS)
def test_numbers_or_callables_of_the_step(method):
    seen: dict[str, list[int]] = {}
    papers: dict[str, Any] = {}  # options that directions have no use for
    if method == "eigen":
        papers = {"kl_clip": (1e-3, None, 1e-4), "loss_terms": (8, 4, 2)}

    def schedule(name: str, *sequence: Any):
        def of(step: int):
            seen.setdefault(name, []).append(step)
            return sequence[min(step, len(sequence) - 1)]

        return of

    model, expected = network(), network()
    opt = KFACSGD(
        model,
        lr=0.1,
        damping=schedule("damping", 0.1, 0.2, 0.4),
        factor_decay=schedule("factor_decay", 0.9, 0.5, 0.7),
        factor_update_steps=schedule("factor_update_steps", 1, 1, 2),
        inv_update_steps=schedule("inv_update_steps", 1, 2),
        **{name: schedule(name, *sequence) for name, sequence in papers.items()},
        compute_method=method,
    )
    by_hand = KFACSGD(expected, lr=0.1, inv_update_steps=1, compute_method=method)
    for i in range(6):
        at = min(i, 2)
        group, kfac = by_hand.param_groups[0], by_hand.preconditioner
        group["damping"] = (0.1, 0.2, 0.4)[at]
        group["factor_decay"] = (0.9, 0.5, 0.7)[at]
        for name, sequence in papers.items():
            setattr(kfac, name, sequence[at])
        kfac.factor_update_steps = (1, 1, 2)[at]
        kfac.inv_update_steps = (1, 2, 2)[at]
        train(model, opt, [i])
        train(expected, by_hand, [i])
        assert opt.param_groups[0]["damping"] == group["damping"]
        for name in papers:
            assert getattr(opt.preconditioner, name) == getattr(kfac, name)
        assert opt.preconditioner.inv_update_steps == kfac.inv_update_steps
        assert_same(model, expected)
    assert all(set(steps) >= set(range(6)) for steps in seen.values())


def test_a_callable_in_a_group():
    model = network()
    opt = KFACSGD(
        [
            {"params": model[0].parameters(), "damping": lambda step: 0.1 * (step + 1)},
            {"params": model[2].parameters()},
        ],
        lr=0.1,
        model=model,
        damping=0.7,
    )
    for i in range(3):
        train(model, opt, [i])
        assert [g["damping"] for g in opt.param_groups] == [pytest.approx(0.1 * (i + 1)), 0.7]


@pytest.mark.parametrize("by_schedule", [False, True])
def test_a_damping_that_rounding_drowns_is_refused_in_later_steps_too(by_schedule):
    model = network(dtype=torch.float32)
    schedule = lambda step: 1e-3 if step < 2 else 1e-13  # noqa: E731
    opt = KFACSGD(model, lr=0.1, damping=schedule if by_schedule else 1e-3)
    train(model, opt, range(2))
    if not by_schedule:
        opt.param_groups[0]["damping"] = 1e-13
    with pytest.raises(ValueError, match=r"Invalid damping: 1e-13; with torch.float32 arithmetic"):
        train(model, opt, range(2, 3))
