"""Parameters that ``fully_shard`` spreads over the ranks: which rank has which rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Replicate, Shard

    _SHARDED: tuple[type, ...] = (DTensor,)
else:
    _SHARDED = ()
from ..errors import invalid_because
from ..plan.facts import ShardPlaces


def is_sharded(tensor: Tensor | None) -> bool:
    return isinstance(tensor, _SHARDED)


def cut_otherwise(model: nn.Module) -> list[Tensor]:
    """Return sharded parameters that no ``fully_shard`` over one mesh dimension gathers."""
    # Tensor parallelism cuts them: a call sees a part of the rows, or of their features.
    sharded: list[Any] = [p for p in model.parameters() if is_sharded(p)]
    wrapped = [m for m in model.modules() if isinstance(m, FSDPModule)] if sharded else []
    gathered = {p for module in wrapped for p in module.parameters()}
    cut = []
    for p in sharded:
        kinds = [type(x) for x in p.placements]
        if p not in gathered or not {*kinds} <= {Shard, Replicate} or kinds.count(Shard) > 1:
            cut.append(p)
    return cut


def shards_of(name: str, parameter: Tensor, ranks: list[int]) -> ShardPlaces:
    """Return how a parameter is sharded over ``ranks``, which must be its mesh's global ranks."""
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    if sorted(mesh.mesh.flatten().tolist()) != sorted(ranks):
        why = f"{name} is sharded over ranks {mesh.mesh.flatten().tolist()}, K-FAC's group has "
        why += f"{ranks}; pass the group of all ranks of that mesh"
        raise invalid_because("process_group", why)
    # The mesh dimension that splits the parameter; HSDP's other one has copies.
    split = [i for i, x in enumerate(placements) if type(x) is Shard]
    dim: int = getattr(placements[split[0]], "dim", 0) if split else 0
    size, ways = parameter.shape[dim], mesh.shape[split[0]] if split else 1
    # As torch.chunk cuts: the last parts may be shorter, or empty.
    chunk = -(-size // ways)
    extents, replicas = [], []
    for rank in ranks:
        at = (mesh.mesh == rank).nonzero()[0].tolist()
        index = at.pop(split[0]) if split else 0
        start = min(size, index * chunk)
        extents.append((start, min(size, start + chunk) - start))
        # Of a parameter that is not split, every rank has a whole copy of its own.
        replicas.append(tuple(at))
    return ShardPlaces(dim, tuple(extents), tuple(replicas), tuple(parameter.shape))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part; it shares the tensor's memory."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def parts_here(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's parts of sharded tensors, and other tensors as they are."""
    # Not every foreach operation takes sharded tensors. The parts share memory with them.
    tensors = list(tensors)
    if set(map(type, tensors)).isdisjoint(_SHARDED):
        return tensors
    return [local(tensor) if is_sharded(tensor) else tensor for tensor in tensors]


def sharded_like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a sharded tensor like the parameter, of which this rank has ``part``."""
    assert isinstance(parameter, DTensor)
    sizes: Any = {"shape": parameter.shape, "stride": parameter.stride()}  # parts may be uneven
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, **sizes)


def gathered_in(module: nn.Module, name: str, parameter: Tensor) -> Tensor | None:
    """Return the whole parameter while ``fully_shard`` has it in its module, else ``None``."""
    current = module._parameters.get(name)
    if current is None or is_sharded(current) or current.shape != parameter.shape:
        return None
    return current


def waiting_gradients(model: nn.Module) -> dict[Tensor, Any]:
    """Return ``fully_shard``'s records of its parameters, in which gradients may wait."""
    # Torch has no public view of these records. If torch moves them, only accumulation with a
    # reduce_dtype and without gradient synchronization is affected.
    records: dict[Tensor, Any] = {}
    for module in model.modules():
        get = getattr(module, "_get_fsdp_state", None)
        state = get() if callable(get) else None
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.10
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for record in getattr(group, "fsdp_params", ()):
                records[record.sharded_param] = record
    return records
