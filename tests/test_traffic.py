"""What docs/traffic.md says of bytes is what the account says today."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import traffic

PAGE = Path(__file__).parent.parent / "docs" / "traffic.md"


def test_the_page_is_current():
    page = PAGE.read_text()
    assert traffic.rewritten(page, "\n\n".join(traffic.report())) == page, (
        "run: python -m benchmarks.traffic --write docs/traffic.md"
    )


def test_layer_wise_memory_is_spread_evenly():
    ours = traffic.plan("BERT-Large", "layer-wise", 64).memory()
    total = sum(one["total"] for one in ours)
    assert max(one["total"] for one in ours) <= 1.15 * total / 64


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("strategy", list(traffic.STRATEGIES))
@pytest.mark.parametrize("model", list(traffic.MODELS))
def test_factors_take_half_of_the_papers_traffic_at_most(model, strategy, every):
    found = traffic.schemes(model, strategy, 64, every, 10 * every)
    ours, papers = (traffic.mean(found[name], "factors") for name in ("ours", "papers"))
    assert 0 < ours <= papers / 2


def test_parameters_are_those_of_the_models():
    # torchvision's ResNet-50; BERT-Large with a decoder that is not tied to its words.
    assert traffic.parameters(traffic.resnet50()) == 25_557_032
    assert traffic.parameters(traffic.bert_large()) == 336_226_108 + 30522 * 1024
