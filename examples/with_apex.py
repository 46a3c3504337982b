"""Apex: its DistributedDataParallel, and FusedLAMB's kernels inside of KFACLAMB.

    torchrun --standalone --nproc-per-node 4 examples/with_apex.py

Not run: apex needs a GPU and a build of its own. ``KFACLAMB`` takes FusedLAMB's arguments, and its
kernels where apex is installed. Apex's wrapper averages gradients in the backward pass, as torch's
does; torch's own DistributedDataParallel is the better choice today.
"""

import os

import apex
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from kaisa_optim import KFACLAMB

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
ddp = apex.parallel.DistributedDataParallel(model)
optimizer = KFACLAMB(model, lr=0.01)  # was: apex.optimizers.FusedLAMB(model.parameters(), lr=0.01)
x = torch.randn(64, 8, device="cuda")
for _ in range(20):
    optimizer.zero_grad()
    loss = F.mse_loss(ddp(x), x.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
