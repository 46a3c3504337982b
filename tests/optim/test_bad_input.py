"""Bad input: every error names the argument, the value and the remedy."""

from __future__ import annotations

import copy
import math
import re
import warnings

import pytest
import torch
from torch import nn

from kaisa_optim import (
    KFACLAMB,
    KFACSGD,
    KFACAdam,
    KFACMuon,
    KFACParamScheduler,
    Layer,
    register_layer,
    with_kfac,
)
from kaisa_optim.core.options import DAMPING
from kaisa_optim.layers import base


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


def train(model: nn.Module) -> None:
    model(torch.randn(4, 3)).square().mean().backward()


NAN, INF = math.nan, math.inf

# Option, bad values, what the error must say beside the option and the value.
OPTIONS = [
    ("damping", [0, 0.0, -1e-3, NAN, INF, "0.1", True], "a number above 0, such as 1e-3"),
    ("factor_decay", [-0.5, 1.01, NAN, INF, "0.9", None, True], r"\[0, 1\]"),
    ("kl_clip", [0, -1e-3, NAN, INF, "1e-3", False], "above 0, or None for no clip"),
    ("factor_update_steps", [0, -2, 1.5, NAN, INF, "10", None, True], "whole number of steps"),
    ("inv_update_steps", [0, -2, 1.5, NAN, INF, "10", True], "whole number of steps"),
    ("compute_method", ["cholesky", "", None], "choose from 'eigen', 'inverse'"),
    ("weight_sharing", ["share", None], "choose from 'expand', 'reduce'"),
    ("loss_reduction", ["none", None], "choose from 'mean', 'sum'"),
    ("normalization", ["papers", None], "choose from 'fisher', 'kaisa'"),
    ("kl_clip_lr", ["group"], "choose from 'initial', 'current'"),
    ("loss_terms", ["tokens", "0.1"], "'examples', 'positions', or give the number of terms"),
    ("loss_terms", [0, -3, NAN, INF, None, True], '"examples", "positions" or the number of terms'),
    (
        "statistics_fraction",
        [0, -0.5, 1.01, NAN, INF, "0.25", None, True],
        r"\(0, 1\], such as 0.25",
    ),
    ("statistics_precision", ["tf32", "", None, 1], "choose from 'highest', 'high', 'medium'"),
    ("max_factor_size", [0, -1, NAN, "16", None], "1 or more"),
    ("max_failures", [-1, 0.5, NAN, INF, "3", None], "a count, 0 or more"),
    (
        "truncation",
        [-0.1, 1, 2.0, NAN, INF, "0.1", True, None],
        r"share of the damping in \[0, 1\)",
    ),
    ("basis_tolerance", [-0.1, 1, 2.0, NAN, INF, "0.1", True], r"share in \[0, 1\)"),
    ("grafting", ["yes", None, 2], "True or False"),
    ("compute_eigenvalue_outer_product", ["no", None, 0], "True or False"),
    ("staggered", ["no", 0, -1, 1.5, torch.tensor(True)], "1 or more, True for as many as there"),
    ("colocate_factors", ["no", 1], "True or False, or None"),
    ("warmup_steps", [-1, 0.5, NAN, INF, "3", None, True], "whole number of steps, 0 for none"),
    ("early_refreshes", [5, "5", (0, 5), (2.5,), ("5",), [-1]], r"such as \(5, 10\)"),
    ("factor_dtype", [torch.int32, "float32", torch.complex64], "a floating torch.dtype, or None"),
    ("inv_dtype", [torch.int8, "bf16", 16], "a floating torch.dtype, or None"),
    ("grad_scaler", ["dynamic", True, [1.0]], "a torch.amp.GradScaler, a number or a callable"),
]


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [(option, value, remedy) for option, values, remedy in OPTIONS for value in values],
    ids=[f"{option}={value!r}" for option, values, _ in OPTIONS for value in values],
)
def test_option(option, value, remedy):
    with pytest.raises(ValueError, match=rf"Invalid {option}: {re.escape(repr(value))}.*{remedy}"):
        KFACSGD(net(), lr=0.1, **{option: value})


@pytest.mark.parametrize("other", [{"compute_method": "inverse"}, {"normalization": "kaisa"}])
def test_a_basis_that_is_not_there(other):
    with pytest.raises(
        ValueError, match=r"Invalid basis_tolerance: 0.1 with .*leave one of the two out"
    ):
        KFACSGD(net(), lr=0.1, basis_tolerance=0.1, **other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bases_that_follow_are_not_kept_in_half_precision(dtype):
    said = r"Invalid basis_tolerance: 0.1 with inv_dtype=torch.*leave one of the two out"
    with pytest.raises(ValueError, match=said):
        KFACSGD(net(), lr=0.1, basis_tolerance=0.1, inv_dtype=dtype)
    KFACSGD(net(), lr=0.1, basis_tolerance=0.1, inv_dtype=torch.float32)


@pytest.mark.parametrize(
    "other",
    [
        {"compute_method": "inverse"},
        {"compute_eigenvalue_outer_product": True},
        {"eigenvalue_correction": "gradients"},
        {"eigenvalue_correction": True},
        {"normalization": "kaisa"},
        {"inv_dtype": torch.bfloat16},
        {"inv_dtype": torch.float16},
    ],
)
def test_eigenvectors_that_can_not_be_left_out(other):
    name = next(iter(other))
    said = rf"Invalid truncation: 0.1 with {name}=.*: .*; leave one of the two out"
    with pytest.raises(ValueError, match=said):
        KFACSGD(net(), lr=0.1, truncation=0.1, **other)
    KFACSGD(net(), lr=0.1, truncation=0, **other)
    with pytest.raises(
        ValueError, match=r"Invalid truncation: 0.1 with moments=.eigenbasis.: .*leave one"
    ):
        KFACAdam(net(), lr=0.1, truncation=0.1, moments="eigenbasis")


@pytest.mark.parametrize("value", ["none", "full "])
def test_damping_split(value):
    with pytest.raises(ValueError, match=f"Invalid damping_split: '{value}'.*'pi', 'full'"):
        KFACSGD(net(), lr=0.1, compute_method="inverse", damping_split=value)


def test_options_that_contradict_each_other():
    with pytest.raises(
        ValueError, match=r"Invalid damping_split: 'pi' with compute_method='eigen'.*leave one"
    ):
        KFACSGD(net(), lr=0.1, damping_split="pi")
    with pytest.raises(
        ValueError, match=r"compute_eigenvalue_outer_product: True with compute_method=.inverse"
    ):
        KFACSGD(net(), lr=0.1, compute_method="inverse", compute_eigenvalue_outer_product=True)
    for option, value in (
        ("weight_sharing", "reduce"),
        ("loss_terms", 4.0),
        ("loss_reduction", "sum"),
    ):
        with pytest.raises(ValueError, match=f'"kaisa".*{option}.*normalization="fisher"'):
            KFACSGD(net(), lr=0.1, normalization="kaisa", **{option: value})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"assignment": "layer-wise", "grad_worker_fraction": 1.0},
            r"grad_worker_fraction: 1.0 means 2 of 2 .*LayerWise\(\) means 1, .*leave out one of",
        ),
        (
            {"assignment": "opt", "grad_worker_fraction": 0.5},
            r"grad_worker_fraction: 0.5 means 1 of 2 .*Opt\(\) means 2, .*leave out one of",
        ),
        (
            {"assignment": "layer-wise", "colocate_factors": False},
            "colocate_factors: False needs two gradient workers .*leave it out",
        ),
        (
            {"grad_worker_fraction": 0.5, "eigenvalue_correction": True},
            'eigenvalue_correction: "examples" needs all bases .*as 1 of 2; use .*"gradients"',
        ),
    ],
)
def test_what_no_number_of_ranks_can_do_is_refused_on_one(options, said):
    with pytest.raises(ValueError, match=f"Invalid {said}"):
        KFACSGD(net(), lr=0.1, **options)


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        ("damping", 0.1, -1.0),
        ("factor_decay", 0.9, 2.0),
        ("kl_clip", 0.1, 0.0),
        ("factor_update_steps", 1, 0),
        ("inv_update_steps", 1, 0.5),
        ("loss_terms", 4.0, "tokens"),
        ("statistics_fraction", 0.5, 2.0),
    ],
)
def test_callable_that_returns_a_bad_value(option, good, bad):
    with pytest.raises(ValueError, match=f"Invalid {option}: {bad!r}"):
        KFACSGD(net(), lr=0.1, **{option: lambda step: bad})
    model = net()
    opt = KFACSGD(model, lr=0.1, **{option: lambda step: bad if step == 1 else good})
    with pytest.raises(ValueError, match=f"Invalid {option}: {bad!r}"):
        for _ in range(2):
            opt.zero_grad()
            train(model)
            opt.step()


@pytest.mark.parametrize(
    "option",
    ["damping", "factor_decay", "kl_clip", "factor_update_steps", "loss_terms", "grad_scaler"],
)
def test_callable_of_other_arguments(option):
    def wrong(one, two):
        return 1

    text = f"Invalid {option}: <function .*wrong.*; it must be a callable of (step|nothing), such"
    with pytest.raises(ValueError, match=text):
        KFACSGD(net(), lr=0.1, **{option: wrong})
    model = net()
    if option in ("damping", "factor_decay"):
        with pytest.raises(ValueError, match=text):
            KFACSGD([{"params": model.parameters(), option: wrong}], lr=0.1, model=model)


def test_callables_that_keep_their_arguments_to_themselves():
    model = net()
    opt = KFACSGD(model, lr=0.1, damping={0: 0.5}.get, loss_terms=lambda *steps: 4.0)
    train(model)
    opt.step()
    assert opt.param_groups[0]["damping"] == 0.5


def test_a_loss_scale_that_is_no_number():
    model = net()
    opt = KFACSGD(model, lr=0.1, grad_scaler=lambda: "2")
    with pytest.raises(ValueError, match="Invalid grad_scaler: '2' from its callable; a scale"):
        train(model)
    opt.preconditioner.grad_scaler = lambda: torch.tensor(2.0)
    train(model)
    opt.step()


@pytest.mark.parametrize("compound", [False, True])
@pytest.mark.parametrize("value", ["2", None, True])
def test_a_factor_of_a_schedule_that_is_no_number(value, compound):
    opt = KFACSGD(net(), lr=0.1)
    for schedule in (lambda epoch: value if epoch else 1.0, {1: value}):
        scheduler = KFACParamScheduler(opt, kl_clip=schedule, compound=compound)
        with pytest.raises(ValueError, match=f"Invalid kl_clip: its schedule gives {value!r} for"):
            scheduler.step()
    with pytest.raises(ValueError, match=r"Invalid kl_clip: .* must be a callable of epoch, such"):
        KFACParamScheduler(opt, kl_clip=lambda: 1.0)


@pytest.mark.parametrize("value", ["world", 3, ["a"]])
def test_what_is_no_process_group(value):
    text = rf"Invalid process_group: {re.escape(repr(value))}; .*new_group\(\).*or None"
    with pytest.raises(ValueError, match=text):
        KFACSGD(net(), lr=0.1, process_group=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("warmup_steps", 10), ("assignment", "opt"), ("moments", "parameters"), ("process_group", 1)],
)
def test_what_can_only_be_given_at_construction(name, value):
    kfac = KFACSGD(net(), lr=0.1).preconditioner
    text = rf"{name} = {value!r}: it can only be given at construction; .* with {name}={value!r}$"
    with pytest.raises(AttributeError, match=text):
        setattr(kfac, name, value)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (nn.Linear, "the class Linear"),
        ("resnet50", "'resnet50'"),
        (net().state_dict(), "of type OrderedDict"),
        (net, "<function net at .*>"),
        (3, "3"),
    ],
    ids=["class", "name", "state_dict", "function", "number"],
)
def test_what_is_no_model(first, said):
    text = rf"^Invalid model: {said}; .*KFACSGD\(model, \.\.\.\), or as model="
    with pytest.raises(ValueError, match=text):
        KFACSGD(first, lr=0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kl_clip", -1.0),
        ("factor_update_steps", 0),
        ("inv_update_steps", 2.5),
        ("loss_terms", "tokens"),
        ("statistics_fraction", 0.0),
        ("grad_scaler", "dynamic"),
    ],
)
def test_property_set_to_a_bad_value(name, value):
    kfac = KFACSGD(net(), lr=0.1).preconditioner
    before = getattr(kfac, name)
    with pytest.raises(ValueError, match=f"Invalid {name}: {value!r}"):
        setattr(kfac, name, value)
    assert getattr(kfac, name) == before


# ---------------------------------------------------------------- model and parameters


def test_model_with_no_supported_layer():
    with pytest.raises(
        ValueError,
        match=r"Invalid model: .*no layer that K-FAC covers.*0\.weight.*PReLU.*register_layer",
    ):
        KFACSGD(nn.Sequential(nn.PReLU()), lr=0.1)


def test_model_whose_layers_are_all_skipped():
    text = r"no layer that K-FAC covers \(skip_layers 'Lin' leaves out 4 parameters\); .*less"
    with pytest.raises(ValueError, match=rf"Invalid model: .*{text}"):
        KFACSGD(net(), lr=0.1, skip_layers=["Lin"])


def test_parameters_that_are_not_the_models():
    stranger = nn.Parameter(torch.zeros(5, 7))
    with pytest.raises(
        ValueError, match=r"Invalid params: .*shape \(5, 7\) does not belong .*model="
    ):
        KFACSGD([stranger], lr=0.1, model=net())
    model = net()
    opt = KFACSGD(model, lr=0.1)
    with pytest.raises(ValueError, match=r"Invalid params: .*shape \(5, 7\) does not belong"):
        opt.add_param_group({"params": [stranger]})


def test_what_adamw_is_to_take_beside_muon_must_be_the_models_too():
    model, stranger = net(), nn.Parameter(torch.zeros(5, 7))
    groups = [{"params": model.parameters()}, {"params": [stranger], "use_muon": False}]
    with pytest.raises(ValueError, match=r"Invalid params: .*shape \(5, 7\) does not belong"):
        KFACMuon(groups, lr=0.1, model=model)


def test_group_that_was_refused_leaves_the_optimizer_as_it_was():
    model = net()
    opt = KFACSGD(model, lr=0.1)
    stranger = nn.Parameter(torch.zeros(5, 7))
    with pytest.raises(ValueError, match="does not belong"):
        opt.add_param_group({"params": [stranger]})
    assert len(opt.param_groups) == 1
    train(model)
    opt.step()
    assert opt.preconditioner.steps == 1


def test_parameters_of_a_deepcopied_model():
    model = net()
    with pytest.raises(ValueError, match="does not belong to the model; pass the model whose"):
        KFACSGD(copy.deepcopy(model).parameters(), lr=0.1, model=model)


@pytest.mark.parametrize("model", [None, "resnet50", 3])
def test_no_model(model):
    with pytest.raises(
        ValueError, match=r"Invalid model: .*KFACSGD\(model, \.\.\.\), or as model="
    ):
        KFACSGD(net().parameters(), lr=0.1, model=model)


def test_two_models():
    with pytest.raises(ValueError, match=r"Invalid model: .*leave out model="):
        KFACSGD(net(), lr=0.1, model=net())


def test_model_without_parameters():
    with pytest.raises(ValueError, match="Invalid model: this Sequential has no parameters; pass"):
        KFACSGD(nn.Sequential(nn.Tanh()), lr=0.1)


def test_lazy_model_that_has_not_run():
    with pytest.raises(
        ValueError, match=r"Invalid params: 0\.weight has no shape yet; run the lazy"
    ):
        KFACSGD(nn.Sequential(nn.LazyLinear(3)), lr=0.1)


@pytest.mark.parametrize("frozen", [False, True])
def test_model_that_was_on_the_meta_device(frozen):
    """Sizes can be asked of it; its parameters are others afterwards."""
    with torch.device("meta"):
        model = net()
    if frozen:
        model[0].requires_grad_(False)
    opt = KFACSGD([p for p in model.parameters() if p.requires_grad], lr=0.1, model=model)
    assert opt.preconditioner.memory_usage()["total"] > 0
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.uniform_(p)
    train(model)
    with pytest.raises(
        RuntimeError, match=rf"Invalid params: {2 * frozen}\.weight was .*to_empty, "
    ):
        opt.step()
    opt = KFACSGD(model, lr=0.1)
    train(model)
    opt.step()


@pytest.mark.parametrize(
    ("name", "values"), [("damping", (0.1, 0.2)), ("factor_decay", (0.9, 0.8))]
)
def test_weight_and_bias_in_groups_that_differ(name, values):
    def groups(model: nn.Module, one: float, other: float) -> list:
        rest = list(model[2].parameters())
        return [
            {"params": [model[0].weight, *rest], name: one},
            {"params": [model[0].bias], name: other},
        ]

    wanted = rf"Invalid {name}: layer '0' .*\[{min(values)}, {max(values)}\].*the same {name}"
    model = net()
    with pytest.raises(ValueError, match=wanted):
        KFACSGD(groups(model, *values), lr=0.1, model=model)
    # Set later, it is an error of the step.
    opt = KFACSGD(groups(model, values[0], values[0]), lr=0.1, model=model)
    opt.param_groups[1][name] = values[1]
    train(model)
    with pytest.raises(ValueError, match=wanted):
        opt.step()
    # Other options of the two groups may differ.
    opt = KFACSGD(groups(model, values[0], values[0]), lr=0.1, model=model)
    opt.param_groups[1]["lr"] = 0.3
    opt.param_groups[1]["weight_decay"] = 0.1
    opt.zero_grad()
    train(model)
    opt.step()


@pytest.mark.parametrize(
    ("key", "meant"),
    [("dampning", "damping"), ("factor_decy", "factor_decay"), ("weight_dacay", "weight_decay")],
)
def test_a_misspelt_key_of_a_group_is_noticed_once(key, meant):
    model = net()
    text = f"a parameter group has a key that nobody reads, '{key}': did you mean '{meant}'?"
    groups = [{"params": [p], key: 0.1} for p in model[0].parameters()]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "the base optimizer updates these")
        opt = KFACSGD(groups, lr=0.1, model=model)
    assert [(str(w.message), w.filename) for w in found] == [(text, __file__)]
    with pytest.warns(UserWarning, match=re.escape(text)) as found:
        opt.add_param_group({"params": model[2].parameters(), key: 0.1})
    assert [w.filename for w in found] == [__file__]


def test_keys_of_others_in_a_group_are_nobodys_business():
    model = net()
    opt = KFACSGD(model, lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=9)  # max_momentum and others
    group = {**opt.param_groups[0], "name": "all", "lr_scale": 0.5, "param_names": [], 3: 4}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFACSGD([group], lr=0.1, model=model)
        KFACAdam([{"params": model.parameters(), "initial_lr": 0.1, "swa_lr": 1}], model=model)


def test_group_added_with_another_damping_for_a_layers_bias():
    model = net()
    opt = KFACSGD([model[0].weight, *model[2].parameters()], lr=0.1, model=model)
    with pytest.raises(ValueError, match=r"Invalid damping: layer '0' .*the same damping"):
        opt.add_param_group({"params": [model[0].bias], "damping": 0.5})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize(("name", "value"), [("damping", -1.0), ("factor_decay", -0.1)])
def test_group_with_a_bad_value(name, value):
    model = net()
    with pytest.raises(ValueError, match=f"Invalid {name}: {value!r}"):
        KFACSGD([{"params": model.parameters(), name: value}], lr=0.1, model=model)
    opt = KFACSGD(model[0].parameters(), lr=0.1, model=model)
    with pytest.raises(ValueError, match=f"Invalid {name}: {value!r}"):
        opt.add_param_group({"params": model[2].parameters(), name: value})


# ---------------------------------------------------------------- skip_layers


def test_skip_layers_pattern_that_matches_nothing():
    matches = "skip_layers: 'heda' matches no module.*named_modules"
    with pytest.warns(UserWarning, match=matches) as caught:
        opt = KFACSGD(net(), lr=0.1, skip_layers=["heda", "^0$"])
    assert caught[0].filename == __file__
    assert list(opt.preconditioner.layers) == ["2"]


@pytest.mark.parametrize("value", ["[", ["0", "(2"]])
def test_skip_layers_pattern_that_is_no_regular_expression(value):
    with pytest.raises(ValueError, match=r"Invalid skip_layers: '[\[(]2?'.*regular expression"):
        KFACSGD(net(), lr=0.1, skip_layers=value)


@pytest.mark.parametrize("value", [[nn.Linear], [0], 0, None])
def test_skip_layers_that_are_no_patterns(value):
    with pytest.raises(ValueError, match=r"Invalid skip_layers: .*pattern"):
        KFACSGD(net(), lr=0.1, skip_layers=value)


# ---------------------------------------------------------------- bases


def test_bases_that_are_refused_by_name():
    with pytest.raises(ValueError, match=r"LBFGS can't take K-FAC: .*closure several times"):
        with_kfac(torch.optim.LBFGS)
    with pytest.raises(ValueError, match=r"SparseAdam can't take K-FAC: .*sparse"):
        with_kfac(torch.optim.SparseAdam)
    with pytest.raises(ValueError, match="KFACSGD has K-FAC inside already"):
        with_kfac(KFACSGD)
    for value in ("SGD", nn.Linear, torch.optim.SGD(net().parameters())):
        with pytest.raises(ValueError, match=r"(?s)Invalid base: .*subclass of torch.optim.Optimi"):
            with_kfac(value)


def test_the_bases_own_errors_come_through():
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        KFACSGD(net(), lr=-1)
    with pytest.raises(ValueError, match="Invalid beta parameter"):
        KFACAdam(net(), betas=(1.5, 0.9))


@pytest.mark.parametrize(
    ("cls", "name", "said"),
    [
        (KFACSGD, "dampning", r"; did you mean damping\?"),  # SGD's dampening is as near
        (KFACLAMB, "dampnig", r"; did you mean damping\?"),
        (KFACSGD, "momentm", r"; did you mean momentum\?"),
        (KFACAdam, "inv_update_freq", r"; did you mean inv_update_steps\?"),
        (with_kfac(torch.optim.RAdam), "orthogonl", r"; did you mean orthogonal\?"),
        (KFACSGD, "temperature", r"; help\(KFACSGD\) lists what there is"),
        (KFACMuon, "kl_klip", r"; help\(KFACMuon\) lists"),  # it has no kl_clip
        (KFACMuon, "nesterow", r"; did you mean nesterov\?"),
        (KFACAdam, "kl_klip", r"; did you mean kl_clip\?"),
        (KFACAdam, "momentum", "; here it is the first of betas"),
        (KFACSGD, "allreduce_bucket_cap_mb", "; it is called bucket_cap_mb here"),
        (KFACSGD, "accumulation_steps", "; leave it out: any number of backward passes"),
        (KFACSGD, "symmetry_aware", "; leave it out: factors always travel as triangles"),
        (KFACSGD, "assignment_strategy", r"; leave it out: the cost\(\) of a WorkAssignment"),
        (KFACSGD, "update_factors_in_hook", "; leave it out: sums are taken in the backward"),
        (KFACSGD, "loglevel", r'; leave it out: .*getLogger\("kaisa_optim"\)'),
    ],
)
def test_an_argument_that_there_is_not(cls, name, said):
    text = rf"^{cls.__name__}\(\) got an unexpected keyword argument '{name}'{said}"
    with pytest.raises(TypeError, match=text):
        cls(net(), lr=0.1, **{name: 1})


def test_an_argument_of_a_subclass_is_named_with_it():
    class Mine(KFACSGD):
        pass

    with pytest.raises(TypeError, match=r"Mine\(\) got an unexpected .* did you mean damping\?"):
        Mine(net(), lr=0.1, dampin=0.1)


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

    opt = with_kfac(Open)(net(), lr=0.1, dampning=0.5, momentum=0.9)
    assert opt.dampning == 0.5 and opt.param_groups[0]["momentum"] == 0.9
    assert Diamond(net(), lr=0.1, special=3).special == 3


@pytest.mark.parametrize("arguments", [{}, {"lr": 0.1}, {"model": nn.Linear(3, 2)}])
def test_nothing_to_optimize(arguments):
    with pytest.raises(TypeError, match=r"KFACAdam\(\) needs the model first: KFACAdam\(model, "):
        KFACAdam(**arguments)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dampning", r"did you mean damping\?"),
        ("damping_lambda", r"did you mean damping\?"),
        ("temperature", r"help\(KFACParamScheduler\) lists"),
    ],
)
def test_a_schedule_of_what_there_is_not(name, said):
    text = rf"KFACParamScheduler\(\) got an unexpected keyword argument '{name}'; {said}"
    with pytest.raises(TypeError, match=text):
        KFACParamScheduler(KFACSGD(net(), lr=0.1), **{name: lambda epoch: 1.0})


def test_differentiable_is_refused():
    with pytest.raises(ValueError, match=r"Invalid differentiable: True; .*leave it False"):
        KFACSGD(net(), lr=0.1, differentiable=True)


def test_scheduler_over_an_optimizer_without_kfac():
    with pytest.raises(
        TypeError, match="Invalid optimizer: SGD has no K-FAC inside; pass a KFACSGD"
    ):
        KFACParamScheduler(torch.optim.SGD(net().parameters()), damping=lambda epoch: 1.0)


def test_optimizer_that_could_not_be_built_leaves_the_model_alone():
    model = net()
    for bad in ({"damping": -1}, {"skip_layers": ["Linear"]}, {"grad_scaler": "x"}):
        with pytest.raises(ValueError):
            KFACSGD(model, lr=0.1, **bad)
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    assert not hooks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = KFACSGD(model, lr=0.1)
        train(model)
        opt.step()


def test_values_put_in_the_wrong_place_are_named():
    net = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="Invalid kl_clip: 1e-09 in a parameter group; it is one"):
        KFACSGD([{"params": net.parameters(), "kl_clip": 1e-9}], lr=0.1, model=net)
    opt = KFACSGD(net, lr=0.1)
    for name in ("damping", "factor_decay"):
        with pytest.raises(AttributeError, match=f"{name} = 0.5: it belongs to the parameter gro"):
            setattr(opt.preconditioner, name, 0.5)
    with pytest.raises(ValueError, match="Invalid grad_scaler: 0; a scale must be above 0"):
        KFACSGD(net, lr=0.1, grad_scaler=0)
    with pytest.warns(UserWarning, match="lr 0 at construction leaves the KL clip off; build"):
        KFACSGD(net, lr=0.0)


@pytest.mark.parametrize("params", [torch.zeros(()), torch.zeros(3), 5])
def test_what_is_no_iterable_of_parameters_is_refused_as_by_the_base(params):
    said = []
    for make in (torch.optim.Adam, lambda params: KFACAdam(params, model=net())):
        with pytest.raises(TypeError) as found:
            make(params)
        said.append(str(found.value))
    assert said[0] == said[1]


def test_a_misspelled_setting_of_the_preconditioner_is_refused():
    kfac = KFACSGD(net(), lr=0.1).preconditioner
    with pytest.raises(AttributeError, match=r"loss_term = 5: .* did you mean loss_terms\?"):
        kfac.loss_term = 5
    with pytest.raises(
        AttributeError, match=r"temperature = 1.0: .*loss_terms, .*grad_scaler, .*kl_clip can be"
    ):
        kfac.temperature = 1.0
    kfac.loss_terms = 5
    assert kfac.loss_terms == 5


def stepped(opt: KFACSGD, model: nn.Module) -> list[str]:
    """What two steps say."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            opt.zero_grad()
            train(model)
            opt.step()
    assert {w.filename for w in found} <= {__file__}
    return [str(w.message) for w in found]


@pytest.mark.parametrize(
    ("options", "lr", "said"),
    [
        ({}, 0.3, True),
        ({}, 0.1, False),
        ({}, 0.05, False),
        ({"kl_clip_lr": "current"}, 0.3, False),
        ({"kl_clip": None}, 0.3, False),
    ],
)
def test_an_lr_beyond_what_the_clip_goes_by_is_noticed_once(options, lr, said):
    """As OneCycleLR raises it, whatever the constructor was given."""
    model = net()
    first, last = model[0].parameters(), model[2].parameters()
    opt = KFACSGD([{"params": first}, {"params": last}], lr=0.1, model=model, **options)
    assert not stepped(opt, model)
    opt.param_groups[1]["lr"] = lr
    text = (
        "lr 0.3 is above kl_clip_lr 0.1 in parameter group 1: the KL clip goes by the latter, "
        "which is the lr at construction, so that clipped steps are 3 times as long as kl_clip "
        'allows; build the optimizer with the peak lr, set param_groups[i]["kl_clip_lr"], or use '
        'kl_clip_lr="current"'
    )
    assert stepped(opt, model) == [text] * said


def test_a_schedule_that_goes_beyond_it_is_noticed_at_the_users_line():
    model = net()
    opt = KFACSGD(model, lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.5, total_steps=20)
    with pytest.warns(UserWarning, match="in parameter group 0: .* peak lr") as found:
        for _ in range(10):
            opt.zero_grad()
            train(model)
            opt.step()
            schedule.step()
    assert [w.filename for w in found] == [__file__]


def test_groups_without_covered_layers_have_no_clip_to_go_beyond():
    model = net()
    rest = nn.Parameter(torch.zeros(2))
    model.register_parameter("rest", rest)
    groups = [{"params": [*model[0].parameters(), *model[2].parameters()]}, {"params": [rest]}]
    with pytest.warns(UserWarning, match="rest"):
        opt = KFACSGD(groups, lr=0.1, model=model)
    opt.param_groups[1]["lr"] = 0.5
    assert not stepped(opt, model)


@pytest.mark.parametrize(
    "where", ["argument", "group", "later", "new group", "clip", "no clip", "nowhere"]
)
def test_what_has_no_part_in_the_eigenbasis_is_said_once(where):
    model = net()
    groups = [{"params": model[0].parameters()}]
    if where == "group":
        groups[0]["damping"] = 0.5
    damping = {"damping": 0.5} if where == "argument" else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the base optimizer updates these")
        opt = KFACAdam(groups, model=model, moments="eigenbasis", **damping)
    if where == "later":
        opt.param_groups[0]["damping"] = 0.5
    rest = {"params": model[2].parameters()}
    opt.add_param_group(rest | {"damping": 0.5} if where == "new group" else rest)
    if "clip" in where:
        opt.preconditioner.kl_clip = 0.5 if where == "clip" else None
    what = "kl_clip" if where == "clip" else "damping"
    text = (
        f'{what} 0.5: of no use to moments="eigenbasis"; leave it out, or build the optimizer with '
        'moments="parameters"'
    )
    assert stepped(opt, model) == [text] * ("no" not in where.split() and where != "nowhere")


def test_nesterov_is_the_bases_own_or_belongs_to_the_eigenbasis():
    own = KFACSGD(net(), lr=0.1, momentum=0.9, nesterov=True)
    assert own.param_groups[0]["nesterov"] is True
    model = net()
    group = {"params": model.parameters(), "nesterov": True}
    assert KFACSGD([group], lr=0.1, momentum=0.9, model=model).param_groups[0]["nesterov"] is True
    for other in ({"moments": "parameters"}, {"damping": 0.1}):
        with pytest.raises(ValueError, match=r"Invalid nesterov: True belongs to .*leave out one"):
            KFACAdam(net(), nesterov=True, **other)
    with pytest.raises(ValueError, match=r"Invalid nesterov: True .* needs Adam, AdamW or LAMB as"):
        with_kfac(torch.optim.RAdam)(net(), nesterov=True)

    class Passing(torch.optim.SGD):
        def __init__(self, params, lr, **rest):
            super().__init__(params, lr, **rest)

    passed = with_kfac(Passing)(net(), lr=0.1, momentum=0.9, nesterov=True)
    assert passed.param_groups[0]["nesterov"] is True
    with pytest.raises(ValueError, match="Invalid nesterov: 'yes'; it must be True or False"):
        KFACAdam(net(), nesterov="yes")
    with pytest.raises(ValueError, match="Invalid nesterov: True in a parameter group"):
        KFACAdam([group], model=model)


TENSORS = (torch.tensor(0.9), torch.tensor(0.99))


@pytest.mark.parametrize("name", ["nesterov", "orthogonal"])
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
def test_what_rules_out_the_eigenbasis_is_named(name, arguments, culprit):
    model, arguments = net(), dict(arguments)
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
    model, arguments = net(), dict(arguments)
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


@pytest.mark.parametrize("name", ["nesterov", "orthogonal"])
def test_a_subclass_of_adam_has_the_eigenbasis_only_by_name(name):
    class Mine(torch.optim.Adam):
        pass

    with pytest.raises(ValueError, match=f"Invalid {name}: True .* must be named over Mine, a su"):
        with_kfac(Mine)(net(), **{name: True})
    assert with_kfac(Mine)(net(), moments="eigenbasis", **{name: True})


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam, with_kfac(torch.optim.RAdam)])
def test_what_is_off_is_accepted_by_all(cls):
    cls(net(), lr=0.1, nesterov=False, orthogonal=False)


def test_orthogonal_belongs_to_the_eigenbasis():
    with pytest.raises(ValueError) as found:
        KFACSGD(net(), lr=0.1, orthogonal=True)
    assert str(found.value).startswith(
        'Invalid orthogonal: True belongs to moments="eigenbasis", which needs Adam, AdamW or LAMB '
        "as its base"
    )
    with pytest.raises(ValueError, match="Invalid orthogonal: 'yes'; it must be True or False"):
        KFACAdam(net(), orthogonal="yes")
    with pytest.raises(ValueError, match="Invalid orthogonal: True in a parameter group"):
        model = net()
        KFACAdam([{"params": model.parameters(), "orthogonal": True}], model=model)

    class Own(torch.optim.SGD):
        def __init__(self, params, lr, orthogonal=False):
            super().__init__(params, lr)
            self.orthogonal = orthogonal

    assert with_kfac(Own)(net(), lr=0.1, orthogonal=True).orthogonal is True


def test_a_layer_kind_registered_without_its_module_class():
    with pytest.raises(TypeError, match=r"needs the module classes: @register_layer\(ModuleClass"):

        @register_layer
        class Kind(Layer):
            pass


@pytest.mark.parametrize("module", [3, "Linear", nn.Linear(2, 2), int])
def test_a_layer_kind_of_what_is_no_module_class(module):
    with pytest.raises(TypeError, match=r"register_layer needs module classes, not .*ModuleClass"):
        register_layer(nn.Linear, module)


@pytest.mark.parametrize("kind", [nn.Linear, 3, lambda name, module: None])
def test_a_layer_kind_that_is_no_layer(kind):
    with pytest.raises(TypeError, match="register_layer takes a subclass of Layer, not "):
        register_layer(Own)(kind)


def test_a_layer_kind_without_rows():
    class Kind(Layer):
        def input_rows(self, x, grad):
            return x

    with pytest.raises(TypeError, match=r"Kind lacks output_rows, which must return rows \[blocks"):
        register_layer(Own)(Kind)
    with pytest.raises(TypeError, match="Other lacks input_rows and output_rows, which"):
        register_layer(Own)(type("Other", (Layer,), {}))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return x @ self.weight.T


class OwnLayer(Layer):
    def __init__(self, name, module):
        super().__init__(name, module)
        self.in_shape, self.outputs = (3,), 2

    def input_rows(self, x, grad):
        return x[None, :, None]

    def output_rows(self, x, grad):
        return grad[None, :, None]


@pytest.fixture
def kinds():
    """The register as it was, afterwards."""
    former = dict(base._KINDS)
    yield
    base._KINDS.clear()
    base._KINDS.update(former)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"outputs": 2}, "it has no in_shape; set it in __init__"),
        ({"in_shape": (3,)}, "it has no outputs; set it in __init__"),
        ({"in_shape": (2,), "outputs": 3}, r"say \(3, 2\), the weight is \(2, 3\); .*weight_view"),
    ],
)
def test_a_layer_kind_of_another_size(kinds, sizes, said):
    class Kind(OwnLayer):
        def __init__(self, name, module):
            Layer.__init__(self, name, module)
            self.__dict__.update(sizes)

    register_layer(Own)(Kind)
    with pytest.raises(ValueError, match=f"Invalid Kind of '0': .*{said}"):
        KFACSGD(nn.Sequential(Own()), lr=0.1)


def test_a_layer_that_is_not_trained_may_be_of_any_size(kinds):
    """A kind may not know it, as of one whose weight was packed; nobody asks."""

    class Kind(OwnLayer):
        def __init__(self, name, module):
            super().__init__(name, module)
            self.outputs = 5

    register_layer(Own)(Kind)
    model = nn.Sequential(Own(), nn.Linear(2, 2))
    opt = KFACSGD(model[1].parameters(), lr=0.1, model=model)
    model(torch.ones(4, 3)).square().mean().backward()
    opt.step()
    assert list(opt.preconditioner.layers) == ["1"]


@pytest.mark.parametrize("method", ["input_rows", "output_rows"])
@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (lambda rows: rows[0], r"\(4, 1, \d\)"),
        (lambda rows: rows.expand(2, -1, -1, -1), r"\(2, 4, 1, \d\)"),
        (lambda rows: rows[..., :1], r"\(1, 4, 1, 1\)"),
    ],
)
def test_rows_of_another_shape(kinds, method, change, shape):
    def changed(self, x, grad):
        return change(getattr(OwnLayer, method)(self, x, grad))

    register_layer(Own)(type("Kind", (OwnLayer,), {method: changed}))
    model = nn.Sequential(Own())
    opt = KFACSGD(model, lr=0.1)
    features = 3 if method == "input_rows" else 2
    text = rf"Invalid Kind\.{method}: {shape} in layer '0'; .* here \[1, batch, .*, {features}\]"
    with pytest.raises(ValueError, match=text):
        model(torch.randn(4, 3)).sum().backward()
    assert list(opt.preconditioner.layers) == ["0"]


class Attending(nn.Module):
    """Takes sequences first, unless it is told to turn them itself."""

    def __init__(self, turned=False, **options):
        super().__init__()
        self.turned = turned
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, **options)

    def forward(self, x):
        return self.encoder(x.transpose(0, 1) if self.turned else x)


def said_of(model, shape, cls=KFACSGD, **options):
    opt = cls(model, lr=0.1, kl_clip_lr="current", factor_update_steps=1, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            opt.zero_grad()
            model(torch.randn(*shape)).square().mean().backward()
            opt.step()
    assert {w.filename for w in found} <= {__file__}
    return [str(w.message) for w in found]


def test_a_sequence_that_comes_first_is_noticed_once():
    assert said_of(Attending(), (5, 3, 4)) == [
        "layer 'encoder.self_attn.in_proj' has batch_first=False and sees 3 examples of 5 "
        "positions, but K goes by the first dimension of the model's input, 5; build it with "
        "batch_first=True and give the model examples first, or set loss_terms to the number of "
        "terms that the loss averages"
    ]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Attending(batch_first=True), {}),
        (Attending(turned=True), {}),  # K is right
        (Attending(), {"loss_terms": "positions"}),  # the same in either order
        (Attending(), {"loss_terms": 3.0}),
        (Attending(), {"loss_terms": lambda step: 3.0}),
        (Attending(), {"loss_reduction": "sum"}),
        (Attending(), {"normalization": "kaisa"}),
        (Attending(), {"cls": KFACAdam, "moments": "eigenbasis"}),  # G's scale has no part in it
    ],
)
@pytest.mark.filterwarnings("ignore:the base optimizer updates these")
def test_where_k_is_right_or_has_no_part_nothing_is_said(model, options):
    assert said_of(model, (5, 3, 4), **options) == []


def test_a_launcher_without_a_process_group_is_noticed(monkeypatch):
    model = nn.Linear(3, 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="WORLD_SIZE is 4") as found:
        KFACSGD(model, lr=0.1)
    assert [w.filename for w in found] == [__file__]
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFACSGD(model, lr=0.1)
