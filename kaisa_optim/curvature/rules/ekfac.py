"""Second moments of gradients in the eigenbasis in place of the eigenvalues of G ⊗ A.

EKFAC (George et al., 2018): among all matrices with K-FAC's eigenvectors, the one with the
eigenvalues S = diag(Qᵀ F Q) is nearest to the Fisher F. S is a running average that starts at
K-FAC's own v_G v_Aᵀ. Its "mass" is what has gone into it since: none, as long as it is that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.ranks import Ranks
from ...layers import Layer
from ...linalg.kronecker import out_of_basis
from ...plan.routes import chunks
from ..stacks import Layout, Pair, Specs, by_place, joined, per_block, stack_key
from ..sums import Statistics, Tally, given, keep_and_take, weighed

DecayOf = Callable[[Layer], float]
State = dict[str, Tensor]
Slots = slice | Tensor


class Gradients(NamedTuple):
    """What the mean gradients of a step add to S, where they stand for those of examples."""

    terms: float  # of which they are the mean: K times their square is what S is the mean of
    decays: dict[Layer, float]  # of the layers whose gradients count


def specs(count: int, g: int, a: int, dtype: torch.dtype) -> Specs:
    """What is kept of ``count`` gradients of one shape."""
    return {"corrected": ((count, g, a), dtype), "corrected_mass": ((count,), dtype)}


def check(layer: Layer) -> None:
    """Refuse a kind that tells its moments but not the rows that they are made of."""
    kind = type(layer)
    if kind.input_rows is Layer.input_rows and kind.projected_moment is Layer.projected_moment:
        raise ValueError(
            f'Invalid eigenvalue_correction: "examples" needs the rows of layer {layer.name!r}, '
            f"but {kind.__name__} has no input_rows; add them or projected_moment, use "
            'eigenvalue_correction="gradients", or skip the layer with skip_layers'
        )


def check_workers(workers: int, world: int) -> None:
    """Refuse ranks that see examples of a layer but do not have its basis."""
    if workers < world:
        raise ValueError(
            'Invalid eigenvalue_correction: "examples" needs all bases on all ranks, but only '
            f"{workers} of {world} are gradient workers of a layer; use "
            'eigenvalue_correction="gradients", or, without fully_shard, assignment="opt"'
        )


def start_or_turn(
    state: State, slots: Slots, product: Tensor, turn_g: Tensor | None, turn_a: Tensor | None
) -> None:
    """Go over to a new basis, of which ``product`` is v_G v_Aᵀ.

    The turns are Q_newᵀ Q_old of both sides; None: no change. The squares of their entries make of
    S the diagonal of the turned matrix: it stays non-negative and keeps its sum.
    """
    squares = [None if t is None else t.square() for t in (turn_g, turn_a)]
    old = out_of_basis(state["corrected"][slots], *squares)
    moved = state["corrected_mass"][slots][:, None, None] > 0
    state["corrected"][slots] = torch.where(moved, old, product)


def reciprocal(state: State, slots: Slots, damping: Tensor | float) -> Tensor:
    """1 / (S + γ)."""
    return torch.reciprocal_(state["corrected"][slots] + damping)


def take_examples(
    ranks: Ranks,
    layout: Layout,
    statistics: Statistics,
    tally: Tally,
    layers: Sequence[Layer],
    decay_of: DecayOf,
) -> None:
    """Take what was captured of these layers into S, on all ranks alike."""
    sums = dict(_summed(ranks, statistics, tally, layers))
    for pair in layout.pairs:
        members = [layer for layer in pair.layers if layer in sums]
        if members:
            slots = joined([pair.slots[layer] for layer in members], pair.g.key.device)
            new = torch.cat([sums.pop(layer) for layer in members])
            decay = keep_and_take(members, decay_of, pair.g.key)
            mass = pair.tensors["corrected_mass"]
            taken = _finite(new) & given(members, tally, pair.g.key)
            grown, step = weighed(mass[slots], decay, taken)
            _approach(pair, slots, new, step)
            mass[slots] = grown


def _summed(
    ranks: Ranks, statistics: Statistics, tally: Tally, layers: Sequence[Layer]
) -> Iterator[tuple[Layer, Tensor]]:
    """Sums over all ranks, in buckets of one device and dtype."""
    for same in by_place(layers):
        limit = ranks.bucket_bytes // stack_key(same[0], "g").dtype.itemsize
        for chunk in chunks(same, _elements, limit):
            terms = statistics.projected(chunk, tally)
            if ranks.world > 1:
                flat = torch.cat([term.flatten() for term in terms])
                parts = ranks.sum_on_device(flat, "second_order").split(list(map(_elements, chunk)))
                terms = [part.view_as(term) for part, term in zip(parts, terms, strict=True)]
            yield from zip(chunk, terms, strict=True)


def _elements(layer: Layer) -> int:
    return layer.blocks * layer.g_dim * layer.a_dim


def take_gradients(
    pair: Pair, slots: Slots, projected: Tensor, members: Sequence[Layer], gradients: Gradients
) -> None:
    """Take the mean gradients of ``members``, in the basis, into S."""
    key = pair.g.key
    new = projected.square() * gradients.terms
    # From v_G v_Aᵀ on, at full weight: one gradient says too little of its own variance.
    share = per_block(members, lambda layer: 1 - gradients.decays.get(layer, 1.0), key)
    share = torch.where(_finite(new), share, 0)
    _approach(pair, slots, new, share)
    mass = pair.tensors["corrected_mass"]
    mass[slots] += (1 - mass[slots]) * share


def _finite(new: Tensor) -> Tensor:
    """Which blocks are; a sum that is not must not stay in an average for ever."""
    return new.sum((1, 2)).isfinite()


def _approach(pair: Pair, slots: Slots, new: Tensor, step: Tensor) -> None:
    new = new.masked_fill_((step == 0)[:, None, None], 0)
    corrected = pair.tensors["corrected"]
    if isinstance(slots, slice):
        corrected[slots].lerp_(new, step[:, None, None])
    else:
        corrected[slots] = corrected[slots].lerp(new, step[:, None, None])
