"""The ranks that torchrun starts: their devices and their process group."""

from __future__ import annotations

import gc
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """This process's rank, the number of ranks, and the rank's device."""

    rank: int
    world: int
    device: torch.device
    why: str = ""  # the reason for a CPU where there are GPUs

    @classmethod
    def find(cls, *, on_cpu: bool = False) -> Place:
        """Take one GPU a rank where there are enough GPUs; else all ranks are on the CPU."""
        rank, world, local, ranks_here = (
            int(os.environ.get(name, default))
            for name, default in (
                ("RANK", 0),
                ("WORLD_SIZE", 1),
                ("LOCAL_RANK", 0),
                ("LOCAL_WORLD_SIZE", 1),
            )
        )
        gpus = torch.cuda.device_count()
        if on_cpu or gpus < ranks_here:
            few = gpus > 0 and not on_cpu
            why = f"{gpus} GPU for {ranks_here} ranks; make demo RANKS={gpus} uses it"
            return cls(rank, world, torch.device("cpu"), why if few else "")
        return cls(rank, world, torch.device("cuda", local))

    def __str__(self) -> str:
        ranks = f"{self.world} ranks" if self.world > 1 else "one process"
        backend = f", {dist.get_backend()}" if self.world > 1 else ""
        return f"{ranks} on {self.device.type}{backend}" + (f" ({self.why})" if self.why else "")

    def join(self) -> None:
        """Initialise the process group."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world == 1:
            return
        if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
            # Otherwise gloo looks up the host's name, which may resolve to another network.
            loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=2))

    def leave(self) -> None:
        """Destroy the process group."""
        if self.world > 1:
            # torch's gloo may abort at exit where DistributedDataParallel outlives the group.
            gc.collect()
            dist.destroy_process_group()

    def share(self, batch: Tensor) -> Tensor:
        """Return this rank's part of a batch."""
        return batch.chunk(self.world)[self.rank]

    def gather(self, own: Any) -> list[Any]:
        """Return every rank's object, by rank. A collective."""
        objects = [own] * self.world
        if self.world > 1:
            dist.all_gather_object(objects, own)
        return objects
