"""Arguments of a public class: its docstring, what it refuses, and what brings a warning."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re

import pytest
import torch
from torch import nn

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from kaisa_optim.options import OPTIONS, SECTIONS
from tests.support.training import backward, network, train


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam], ids=lambda c: c.__name__)
def test_the_docstring_tells_each_argument_once(cls):
    text = inspect.getdoc(cls)
    said = re.findall(r"^    (\w+): \S", text, flags=re.M)
    taken = inspect.signature(cls).parameters.keys() & OPTIONS.keys()
    assert set(said) == taken and len(said) == len(set(said))
    assert all(f"\n{section}:\n" in text for section in SECTIONS)
    shown = pydoc.plain(pydoc.render_doc(cls))
    assert all(line.strip() in shown for line in text.splitlines())


def test_help_is_plain_and_ends_with_a_point():
    for option in OPTIONS.values():
        assert option.help.endswith(".") and "|" not in option.help, option.name
        assert dataclasses.asdict(option)["annotation"], option.name


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
    with pytest.raises(ValueError, match=text):
        KFACSGD(first, lr=0.1)
    with pytest.raises(ValueError, match=text):
        KFACSGD(network().parameters(), lr=0.1, model=first)


def test_a_model_is_needed_once_and_with_parameters():
    for arguments in ({}, {"lr": 0.1}, {"model": network()}):
        with pytest.raises(TypeError, match=r"KFACAdam\(\) needs the model first: KFACAdam\(model"):
            KFACAdam(**arguments)
    with pytest.raises(ValueError, match="Invalid model: an object of type generator"):
        KFACSGD(network().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Invalid model: the first argument .*leave out model="):
        KFACSGD(network(), lr=0.1, model=network())
    with pytest.raises(ValueError, match="empty parameter list"):
        KFACSGD(nn.Sequential(nn.Tanh()), lr=0.1)
    with pytest.raises(ValueError, match="empty parameter list"):
        KFACSGD([], lr=0.1, model=network())


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


def test_callables_that_keep_their_arguments_to_themselves():
    model = network()
    callables = {"damping": {0: 0.5}.get, "statistics_fraction": lambda *steps: 0.5}
    opt = KFACSGD(model, lr=0.1, **callables)
    train(model, opt, [0])
    assert opt.param_groups[0]["damping"] == 0.5


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


@pytest.mark.parametrize("lr", ["0.1", lambda step: 0.1, iter([nn.Parameter(torch.zeros(2))])])
def test_what_is_no_rate(lr):
    with pytest.raises(ValueError, match=r"Invalid lr: .* must be a number or a tensor; param"):
        KFACSGD(nn.Linear(2, 2), lr)


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
