"""Accelerate: hand the optimizer to ``prepare``.

    accelerate launch --num_processes 2 --cpu examples/with_accelerate.py

Accelerate divides the losses of accumulated batches itself. On several ranks call
``optimizer.optimizer.consolidate_state_dict()`` on all ranks before ``save_state``. Accelerate
wraps the optimizer: coverage and settings are in ``optimizer.optimizer.preconditioner``.
"""

import accelerate
import torch
from torch import nn
from torch.nn import functional as F

from kaisa_optim import KFACAdam

torch.manual_seed(0)
accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = KFACAdam(model, lr=0.03)  # was: torch.optim.Adam(model.parameters())
x = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model, optimizer, loader = accelerator.prepare(
    model, optimizer, torch.utils.data.DataLoader(data, batch_size=8)
)
for _ in range(5):
    for rows, target in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(rows), target))
            optimizer.step()
            optimizer.zero_grad()
loss = F.mse_loss(model(x), x.sum(1, keepdim=True)).item()
accelerator.print(f"loss {loss:.3f}")
