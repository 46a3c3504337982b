"""Parameters that several modules share: one layer takes the rows of all of their uses."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from torch import Tensor

from ..layers import SCALES, Conv1DLayer, EmbeddingLayer, Layer, LinearLayer, MatrixLayer

_MATRICES = Conv1DLayer, EmbeddingLayer, LinearLayer, MatrixLayer

Candidates = list[tuple[Layer, list[Tensor]]]  # a layer, and its module's trained parameters


def tie(
    layers: Candidates,
    names: Mapping[Tensor, list[str]],
    reasons: MutableMapping[Tensor | None, str],
) -> set[Tensor]:
    """Make one layer of each table or matrix that several modules share; return these weights.

    The base optimizer steps the biases of these modules.
    """
    tied: set[Tensor] = set()
    of_weight: dict[Tensor, Candidates] = {}
    for candidate in layers:
        weight = candidate[0].weight
        if weight is not None and len(names[weight]) > 1:
            of_weight.setdefault(weight, []).append(candidate)
    for table, users in of_weight.items():
        if len(users) != len(names[table]):
            continue  # some module has no layer
        if not all(type(layer) in _MATRICES and layer.blocks == 1 for layer, _ in users):
            continue
        # A table before a matrix: its factor is a diagonal on the side of the vocabulary.
        primary = next((layer for layer, _ in users if layer.diagonal_input), users[0][0])
        assert primary.weight is not None
        tied.add(primary.weight)
        primary.tied = len({layer.input_dim for layer, _ in users}) > 1
        primary.watched_in = tuple(dict.fromkeys(layer.module for layer, _ in users))
        for candidate in users:
            layer = candidate[0]
            if layer.bias is not None:
                reasons[layer.bias] = SCALES
                layer.bias = None
            if layer is not primary:
                layers.remove(candidate)
    return tied
