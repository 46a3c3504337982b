"""What users are told of layers, factors and coverage."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from kaisa_optim.options import OPTIONS, SETTABLE
from kaisa_optim.preconditioner import Preconditioner
from kaisa_optim.reports import Answers
from tests.core.test_coverage import UNCOVERED, mixed, quiet
from tests.support.training import warnings_as
from tests.support.watch import exact, seeded


def test_one_notice_lists_what_is_not_covered():
    net = seeded(mixed)
    with pytest.warns(UserWarning) as caught:
        opt = exact(net)
    (notice,) = [str(w.message) for w in caught]
    assert sorted(opt.preconditioner.uncovered) == sorted(UNCOVERED)
    for name in UNCOVERED:
        assert f"  {name}: " in notice
    assert "other.weight: 27, no layer kind is registered for Other" in notice
    # The line that built the optimizer.
    assert caught[0].filename == str(Path(__file__).parents[1] / "support" / "watch.py")


def test_repr_always_lists_what_is_not_covered():
    net = seeded(mixed)
    with warnings_as("ignore"):
        opt = exact(net, skip_layers=["^out$"])
        rounding = exact(net, statistics_precision="medium")
    text = repr(opt.preconditioner)
    before, covered, raw, skipped = re.split("covered:|raw gradients:|skipped:", text)
    assert "eigen" in before and "0 steps taken" in before
    assert "statistics every 10, refreshes every 50 steps, all layers at once\n" in before
    told = "every 10 in medium precision, refreshes every 50 steps, up to 1 layer at a time\n"
    assert f"statistics {told}" in repr(rounding.preconditioner)
    assert "layer: A 4, G 3" in covered and "out" not in covered
    assert all(f"{name}: " in raw for name in UNCOVERED)
    assert "out.weight: matches '^out$'" in skipped and "out.bias: matches '^out$'" in skipped


@pytest.mark.parametrize(
    ("staggered", "interval", "told"),
    [
        (False, 50, "all layers at once"),
        (True, 50, "up to 4 layers at a time"),  # three of the other shape cost more
        (True, 2, "up to 4 layers at a time"),
        (True, 1, "all layers at once"),
    ],
)
def test_repr_tells_how_many_layers_are_refreshed_at_once(staggered, interval, told):
    net = seeded(lambda: nn.Sequential(*(nn.Linear(2, n) for n in 4 * [2] + 3 * [3])))
    opt = quiet(net, staggered=staggered, inv_update_steps=interval)
    assert f"refreshes every {interval} steps, {told}\n" in repr(opt.preconditioner)


def test_repr_tells_parts_of_a_module_and_what_is_frozen():
    net = seeded(lambda: nn.Sequential(nn.Conv1d(4, 6, 1, groups=2), nn.Linear(6, 2)))
    opt = quiet(net)
    text = repr(opt.preconditioner)
    assert "0: A 3, G 3, for each of 2 parts of its outputs\n" in text and "frozen" not in text
    net[1].weight.requires_grad_(False)
    assert "1: A 7, G 2 (weight frozen)" in repr(opt.preconditioner)
    assert opt.preconditioner.coverage().total == 12 + 6 + 2
    net[1].requires_grad_(False)
    assert "1: A 7, G 2 (weight and bias frozen)" in repr(opt.preconditioner)
    assert opt.preconditioner.coverage().total == 12 + 6


def test_a_forward_pass_before_the_optimizer_was_built_is_told():
    model = seeded(lambda: nn.Linear(3, 2))
    loss = model(torch.ones(4, 3, dtype=torch.float64)).sum()
    opt = quiet(model)
    loss.backward()
    with pytest.raises(
        RuntimeError, match="this very model once a step, after building the optimizer"
    ):
        opt.step()


def test_a_step_of_the_preconditioner_alone_is_told_where_it_belongs():
    opt = quiet(seeded(lambda: nn.Linear(3, 2)))
    with pytest.raises(
        TypeError,
        match=r"optimizer\.step\(\) calls preconditioner\.step\(\) itself; leave out the call",
    ):
        opt.preconditioner.step()


def test_coverage_as_data_and_in_one_line(caplog):
    net = seeded(mixed)
    with caplog.at_level("INFO", logger="kaisa_optim"), pytest.warns(UserWarning) as caught:
        opt = exact(net, skip_layers=["^out$"])
    report = opt.preconditioner.coverage()
    assert (report.covered, report.total) == (12, 49) and report.share == 12 / 49
    assert list(report.left) == ["other.weight", "scale", "prelu.weight"]  # the largest first
    assert report.left["other.weight"].size == 27
    assert report.skipped.keys() == {"out.weight", "out.bias"}
    line = (
        "K-FAC covers 24.5 % of 49 parameters; the base optimizer updates the rest "
        "(other.weight, scale, prelu.weight ...): print(optimizer.preconditioner)"
    )
    assert str(report) == line and caplog.messages == [line]
    assert str(caught[0].message).endswith("\nK-FAC covers 24.5 % of 49 parameters")
    whole = quiet(nn.Linear(3, 2)).preconditioner.coverage()
    assert str(whole) == "K-FAC covers 100 % of 8 parameters"
    assert "K-FAC covers 24.5 % of 49 parameters\n" in repr(opt.preconditioner)


def test_a_parameter_is_covered_if_calls_of_all_its_layers_are_found():
    opt = quiet(seeded(lambda: nn.MultiheadAttention(4, 2, kdim=5, vdim=6)))
    kfac = opt.preconditioner
    assert kfac.coverage().share == 1
    one = kfac.registry.states["q_proj"]
    one.unseen = 1
    report = kfac.coverage()
    assert {name: left.size for name, left in report.left.items()} == {
        "q_proj_weight": 16,
        "in_proj_bias": 12,  # the layers of k and v have a part of it, too
    }
    assert (report.covered, report.total) == (64, 92)
    one.has_average = True
    assert kfac.coverage().share == 1


def test_factors_of_an_unknown_layer_and_of_one_without_statistics():
    opt = quiet(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(KeyError, match="no covered layer 'nine'; there are 0"):
        opt.preconditioner.factors("nine")
    with pytest.raises(KeyError, match="layer '0' has no statistics yet"):
        opt.preconditioner.factors("0")


# ---- settings and answers ----

ANSWERS = [name for name in vars(Answers) if not name.startswith("_") and name not in SETTABLE]


def test_every_setting_and_every_answer_has_a_text() -> None:
    for name in SETTABLE:
        assert inspect.getdoc(getattr(Preconditioner, name)) == OPTIONS[name].help
    assert len(ANSWERS) > 10 and all(inspect.getdoc(getattr(Preconditioner, n)) for n in ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_never_set(name: str) -> None:
    kfac = exact(nn.Linear(3, 2)).preconditioner
    with pytest.raises(AttributeError, match=name):
        setattr(kfac, name, None)
    with pytest.raises(AttributeError, match=r"layrs = 1: .*factor_update_steps, .* can be set"):
        kfac.layrs = 1
