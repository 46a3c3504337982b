"""Hugging Face's Trainer: pass ``optimizers=(optimizer, schedule)``.

    python examples/with_trainer.py

With gradient accumulation the loss must be divided by the number of micro-batches, which most
models' own losses are not: give ``compute_loss_func``. On several ranks call
``consolidate_state_dict()`` on all ranks before a save.
"""

import tempfile

import torch
import transformers

from kaisa_optim import KFACAdam

torch.manual_seed(0)
model = transformers.BertForSequenceClassification(
    transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
    )
)
words = torch.randint(20, (64, 6))
data = [{"input_ids": row, "labels": (row[0] > 9).long()} for row in words]
optimizer = KFACAdam(model, lr=0.01)  # was: torch.optim.Adam(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=12)
with tempfile.TemporaryDirectory() as folder:
    arguments = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=12,
        per_device_train_batch_size=16,
        save_strategy="no",
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, optimizers=(optimizer, schedule)
    )
    loss = trainer.train().training_loss
print(f"loss {loss:.3f}")
