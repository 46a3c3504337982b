"""DeepSpeed at stage 0 in float32: pass K-FAC as the client optimizer; autocast may round.

    deepspeed --num_gpus 4 examples/with_deepspeed.py

ZeRO 1 to 3, and DeepSpeed's own "bf16" and "fp16" at any stage, put flattened float32 copies into
the parameter groups. These belong to no layer, so that K-FAC could do nothing: ``step()`` raises
and says so. ``assignment="layer-wise"`` spreads K-FAC's state and its moments over ranks, as ZeRO 1
does. To shard weights too, take ``fully_shard`` (with_fsdp2.py).
"""

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

from kaisa_optim import KFACAdam

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = KFACAdam(model, lr=0.03)  # in place of the "optimizer" of DeepSpeed's configuration
settings = {
    "train_micro_batch_size_per_gpu": 64,
    "zero_optimization": {"stage": 0},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
x = torch.randn(64, 8, device=engine.device)
for _ in range(20):
    loss = F.mse_loss(engine(x), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
loss = loss.item()
print(f"loss {loss:.3f}")
