"""Ray Train: build the optimizer in the training function, after ``prepare_model``.

    python examples/with_ray.py

Ray makes the process group before it calls the function, so that K-FAC finds its ranks.
"""

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.nn import functional as F

from kaisa_optim import KFACAdam


def train():
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = KFACAdam(model, lr=0.03)  # was: torch.optim.Adam(model.parameters())
    x = torch.randn(64, 8)
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
    ray.train.report({"loss": loss.item()})


trainer = TorchTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=2))
print(f"loss {trainer.fit().metrics['loss']:.3f}")
