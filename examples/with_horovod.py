"""Horovod: average the gradients with ``synchronize()`` first, then let K-FAC step.

    horovodrun -np 4 python examples/with_horovod.py

Not run: Horovod has no release for today's torch. K-FAC speaks through torch.distributed, which is
started here beside Horovod. ``DistributedOptimizer`` only averages: it steps nothing. Its class is
built around a plain SGD over the same parameters, and K-FAC reads the gradients that it leaves.
"""

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from kaisa_optim import KFACSGD

hvd.init()
dist.init_process_group(
    "gloo", init_method="tcp://127.0.0.1:29500", rank=hvd.rank(), world_size=hvd.size()
)  # the first rank's host, where there are several
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
averager = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
optimizer = KFACSGD(model, lr=0.1, momentum=0.9)
x = torch.randn(64, 8)
for _ in range(20):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    averager.synchronize()  # K-FAC needs averaged gradients
    optimizer.step()
print(f"loss {loss.item():.3f}")
