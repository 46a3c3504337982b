"""FSDP2: ``fully_shard`` the model, then build the optimizer.

    torchrun --standalone --nproc-per-node 2 examples/with_fsdp2.py

Works with ``MixedPrecisionPolicy`` and with torch.distributed.checkpoint. The parts of each
momentum are brought to one rank, which makes the direction and returns it in parts, so that the
assignment is layer-wise. This takes the place of ZeRO 1 to 3. FullyShardedDataParallel, its
predecessor, is refused.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from kaisa_optim import KFACAdam

started = not dist.is_initialized()
if started:
    dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" with one GPU a rank
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = KFACAdam(model, lr=0.03)  # was: torch.optim.Adam(model.parameters())
x = torch.randn(64, 8)
target = x.sum(1, keepdim=True)
for _ in range(20):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
loss = loss.item()
if dist.get_rank() == 0:
    print(f"loss {loss:.3f}")
if started:
    dist.destroy_process_group()
