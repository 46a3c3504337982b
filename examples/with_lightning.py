"""Lightning: return the optimizer from ``configure_optimizers``, built on the part that is called.

    python examples/with_lightning.py

Tested with precision "bf16-mixed", accumulation, clipping, schedules, and an exact resume. On
several ranks Lightning's checkpoint calls ``consolidate_state_dict()`` by itself.
"""

import lightning
import torch
from torch import nn
from torch.nn import functional as F

from kaisa_optim import KFACAdam


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return KFACAdam(self.net, lr=0.03)  # was: torch.optim.Adam(self.parameters())


torch.manual_seed(0)
x = torch.randn(64, 8)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16
)
trainer = lightning.Trainer(
    max_epochs=5,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Regression()
trainer.fit(module, loader)
loss = F.mse_loss(module.net(x), x.sum(1, keepdim=True)).item()
print(f"loss {loss:.3f}")
