"""Which ranks own the factors, before and after a model changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from kaisa_optim.core.options import Options
from kaisa_optim.core.placements import Placements
from kaisa_optim.layers import Layer, LinearLayer


def layers(**sizes: int) -> dict[str, Layer]:
    """Return trained layers with sides of these sizes."""
    made = {}
    for name, size in sizes.items():
        layer = LinearLayer(name, nn.Linear(size, size, bias=False))
        layer.trained = (True, False)
        layer.cover((True, False))
        made[name] = layer
    return made


def two_ranks(**options: Any) -> Placements:
    # No collective is called: placements need the number of ranks alone.
    return Placements(Options(**options), SimpleNamespace(world=2), sharded=False)  # type: ignore


def owners(placements: Placements, model: dict[str, Layer]) -> dict[str, int]:
    return {name: placements.owner(layer, "g") for name, layer in model.items()}


def test_layers_with_a_place_stay_and_new_ones_go_to_the_emptier_rank():
    placements, model = two_ranks(assignment="layer-wise"), layers(large=9, small=3, middle=5)
    placements.place(model)
    assert owners(placements, model) == {"large": 0, "small": 1, "middle": 1}
    del placements.of["small"]  # its module was replaced by a larger one
    model |= layers(small=20)
    placements.place(model)
    assert owners(placements, model) == {"large": 0, "small": 1, "middle": 1}
    # Anew, the largest would come first.
    placements.of.clear()
    placements.place(model)
    assert owners(placements, model) == {"small": 0, "large": 1, "middle": 1}


def test_owners_part_only_where_workers_share_a_layer():
    model = layers(one=8)
    parted, together = two_ranks(assignment="opt"), two_ranks(assignment="layer-wise")
    for placements in (parted, together):
        placements.place(model)
    assert parted.splits_owners and parted.of["one"] == (0, 1)
    assert not together.splits_owners and together.of["one"] == (0, 0)


def test_facts_follow_what_is_frozen():
    placements, model = two_ranks(), layers(one=4)
    placements.place(model)
    placements.find_facts(model.values())
    fact = placements.facts[model["one"]]
    assert not fact.frozen and [f.size for f in fact.factors] == [10, 10]
    model["one"].cover((False, False))
    placements.find_facts(model.values())
    assert placements.facts[model["one"]].frozen
