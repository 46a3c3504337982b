"""Models from the command line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kaisa_optim.tools.factories import built, values

HERE = "tests.tools.test_factories"


def network(width=4, name="x"):
    assert name == "x" or isinstance(name, str)
    return nn.Linear(width, 3)


def with_batch():
    return nn.Linear(4, 3), torch.zeros(8, 4)


def nothing():
    return "a model"


class Models:
    @staticmethod
    def small():
        return nn.Linear(2, 2)


def test_a_factory_is_called_on_the_meta_device():
    model, batch = built(f"{HERE}:network", ["width=6", "name=wide"])
    assert isinstance(model, nn.Linear) and model.in_features == 6
    assert model.weight.is_meta and batch is None
    _, batch = built(f"{HERE}:with_batch")
    assert batch.is_meta and batch.shape == (8, 4)
    assert built(f"{HERE}:Models.small")[0].in_features == 2


@pytest.mark.parametrize(
    ("target", "given", "said"),
    [
        ("network", [], r"'network'; it must be package.module:factory"),
        ("no_such_module:x", [], "No module named 'no_such_module'; run kaisa where Python finds"),
        ("no.such:x", [], "No module named 'no'; run kaisa where Python finds it"),
        (f"{HERE}:missing", [], f"has no attribute 'missing'; see python -c 'import {HERE}'"),
        (f"{HERE}:network", ["depth=3"], "unexpected keyword argument 'depth'; give its arguments"),
        (f"{HERE}:nothing", [], "returned str; it must return a module"),
    ],
)
def test_a_factory_with_a_fault_is_named(target, given, said):
    with pytest.raises(ValueError, match=f"Invalid factory: .*{said}"):
        built(target, given)


def test_an_import_that_fails_inside_of_a_module_is_told(tmp_path, monkeypatch):
    (tmp_path / "of_mine.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    said = "No module named 'no_such_library'; see python -c 'import of_mine'"
    with pytest.raises(ValueError, match=said):
        built("of_mine:factory")


def test_values_of_options():
    texts = ["inv_update_steps=100", "damping=1e-2", "assignment=opt", "skip_layers=['a', 'b']"]
    found = {"inv_update_steps": 100, "damping": 0.01, "assignment": "opt"}
    assert values(texts) == found | {"skip_layers": ["a", "b"]}
    dtypes = ["factor_dtype=torch.bfloat16", "name=torch.nn", "mode=float"]
    assert values(dtypes) == {"factor_dtype": torch.bfloat16, "name": "torch.nn", "mode": "float"}
    for bad in ("damping", "=3", "a b=1"):
        with pytest.raises(ValueError, match=r"Invalid argument: .*; it must be name=value"):
            values([bad])
