"""Trainers of other libraries drive the optimizers as they are, to the numbers of a plain loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from tests.support.training import assert_near, assert_same, batch, network

STEPS, SAVED = 6, 4  # a resumed run goes on in the middle of both intervals
INTERVALS = {"factor_update_steps": 2, "inv_update_steps": 3}
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda model: KFACSGD(model, lr=0.05, momentum=0.9, **INTERVALS),
    "Adam": lambda model: KFACAdam(model, lr=0.01, **INTERVALS),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*bottleneck.*", "ignore:.*torch.jit", "ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*val_dataloader", "ignore:You're resuming"),
    pytest.mark.filterwarnings("ignore:the base optimizer updates these"),
]


class Loop(NamedTuple):
    micro: int = 1  # micro-batches of a step, of equal size
    autocast: bool = False
    scheduled: bool = False
    clip: float | None = None
    resumed: bool = False  # from a checkpoint


def scheduler_of(opt: Any, loop: Loop) -> Any:
    decay = (lambda epoch: 1 / (1 + epoch)) if loop.scheduled else (lambda epoch: 1.0)
    return torch.optim.lr_scheduler.LambdaLR(opt, decay)


Loss = Callable[[Any], Tensor]


def regression(i: int, micro: int) -> Iterator[Loss]:
    x, y = batch(i, torch.float32)
    for part, target in zip(x.chunk(micro), y.chunk(micro), strict=True):
        yield lambda model, part=part, target=target: F.mse_loss(model(part), target)


def by_hand(kind: str, model: nn.Module, loop: Loop, losses: Any) -> Any:
    """Train in a plain loop; ``losses`` gives those of a step's micro-batches."""
    opt = OPTIMIZERS[kind](model)
    scheduler = scheduler_of(opt, loop)
    for i in range(STEPS):
        opt.zero_grad()
        for loss_of in losses(i, loop.micro):
            with torch.autocast("cpu", torch.bfloat16, enabled=loop.autocast):
                loss = loss_of(model) / loop.micro
            loss.backward()
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        opt.step()
        scheduler.step()
    return opt


def loader(loop: Loop, first: int = 0) -> Any:
    """The rows of the batches, beginning with batch ``first``."""
    data = [batch((first + i) % STEPS, torch.float32) for i in range(STEPS)]
    rows = torch.utils.data.TensorDataset(*map(torch.cat, zip(*data, strict=True)))
    return torch.utils.data.DataLoader(rows, batch_size=8 // loop.micro)


# ---- Lightning ----


def with_lightning(kind: str, path: Path, loop: Loop) -> tuple[Any, nn.Module]:
    lightning = pytest.importorskip("lightning")

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(dtype=torch.float32)

        def training_step(self, rows: Any, index: int) -> Tensor:
            x, y = rows
            return F.mse_loss(self.net(x), y)

        def validation_step(self, rows: Any, index: int) -> None:
            x, y = rows
            self.log("loss", F.mse_loss(self.net(x), y))

        def configure_optimizers(self) -> Any:
            # The optimizer gets the part that is called; the hooks are the same either way.
            self.opt = OPTIMIZERS[kind](self.net)
            if not loop.scheduled:
                return self.opt
            return [self.opt], [{"scheduler": scheduler_of(self.opt, loop), "interval": "step"}]

    class Save(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == SAVED:
                trainer.save_checkpoint(path / "part.ckpt")

    def trainer(**options: Any) -> Any:
        off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
        options |= {"accelerator": "cpu", "max_epochs": 1, "default_root_dir": path}
        options |= {"accumulate_grad_batches": loop.micro, "gradient_clip_val": loop.clip}
        precision = "bf16-mixed" if loop.autocast else "32-true"
        return lightning.Trainer(precision=precision, **options, **dict.fromkeys(off, False))

    module = Regression()
    if not loop.resumed:
        trainer().fit(module, loader(loop), loader(Loop()))  # with a validation
        return module.opt, module.net
    trainer(callbacks=[Save()], limit_val_batches=0).fit(Regression(), loader(loop))
    # Within an epoch it counts on, but takes batches from the loader's beginning.
    rest, saved = loader(loop, first=SAVED), str(path / "part.ckpt")
    trainer(limit_val_batches=0).fit(module, rest, ckpt_path=saved)
    return module.opt, module.net


# ---- Accelerate ----


def with_accelerate(kind: str, path: Path, loop: Loop) -> tuple[Any, nn.Module]:
    accelerate = pytest.importorskip("accelerate")

    def run(first: int, stop: int) -> tuple[Any, nn.Module]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        precision = "bf16" if loop.autocast else "no"
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=loop.micro, mixed_precision=precision
        )
        model = network(dtype=torch.float32)
        opt = OPTIMIZERS[kind](model)
        prepared = accelerator.prepare(model, opt, loader(loop, first), scheduler_of(opt, loop))
        wrapped_model, wrapped, data, wrapped_scheduler = prepared
        if first > 0:
            accelerator.load_state(str(path))
        for x, y in itertools.islice(data, (stop - first) * loop.micro):
            with accelerator.accumulate(wrapped_model):
                accelerator.backward(F.mse_loss(wrapped_model(x), y))
                wrapped.step()
                wrapped_scheduler.step()
                wrapped.zero_grad()
        if stop < STEPS:
            accelerator.save_state(str(path))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return opt, model

    if not loop.resumed:
        return run(0, STEPS)
    run(0, SAVED)
    return run(SAVED, STEPS)


# ---- the Trainer of transformers ----


def tiny_bert() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 12, "max_position_embeddings": 8, "num_labels": 3}
    sizes |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)).train()


def sentences() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(20, (8 * STEPS, 6), generator=generator)
    return [{"input_ids": w, "labels": w.sum() % 3} for w in words]


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Examples in their order: the Trainer has no sampler for it."""

    def __iter__(self) -> Any:
        return iter(sentences())


def classification(i: int, micro: int) -> Iterator[Loss]:
    rows, size = sentences(), 8 // micro
    for first in range(8 * i, 8 * i + 8, size):
        part = rows[first : first + size]
        x = {key: torch.stack([row[key] for row in part]) for key in part[0]}
        yield lambda model, x=x: model(**x).loss


def mean_over_all(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The mean over an accumulated batch, which most models' own losses leave undivided."""
    count = len(labels) if num_items_in_batch is None else num_items_in_batch
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / count


def with_transformers(kind: str, path: Path, loop: Loop) -> tuple[Any, nn.Module]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def trainer(save_strategy: str) -> Any:
        how = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "bf16": loop.autocast}
        how |= {"max_steps": STEPS, "save_strategy": save_strategy, "save_steps": SAVED}
        how |= {"per_device_train_batch_size": 8 // loop.micro, "max_grad_norm": loop.clip}
        how |= {"gradient_accumulation_steps": loop.micro}
        model = tiny_bert()
        opt = OPTIMIZERS[kind](model)
        optimizers = opt, scheduler_of(opt, loop)
        data = {"train_dataset": Stream(), "compute_loss_func": mean_over_all}
        arguments = transformers.TrainingArguments(str(path), **how)
        return transformers.Trainer(model, arguments, optimizers=optimizers, **data)

    driven, saved = trainer("no"), None
    if loop.resumed:
        trainer("steps").train()
        saved = str(path / f"checkpoint-{SAVED}")
    driven.train(resume_from_checkpoint=saved)
    return driven.optimizer.optimizer, driven.model


# ---- the numbers of a plain loop ----

LOOPS: dict[str, tuple[Callable[[str, Path, Loop], tuple[Any, nn.Module]], Loop]] = {
    "lightning": (with_lightning, Loop()),
    "lightning, bf16-mixed": (with_lightning, Loop(autocast=True)),
    "lightning, accumulated": (with_lightning, Loop(micro=2)),
    "lightning, scheduled": (with_lightning, Loop(scheduled=True)),
    "lightning, clipped": (with_lightning, Loop(clip=0.05)),
    "lightning, resumed": (with_lightning, Loop(resumed=True)),
    "accelerate": (with_accelerate, Loop(scheduled=True)),
    "accelerate, accumulated": (with_accelerate, Loop(scheduled=True, micro=2)),
    "accelerate, bf16": (with_accelerate, Loop(scheduled=True, autocast=True)),
    "accelerate, both": (with_accelerate, Loop(scheduled=True, autocast=True, micro=2)),
    "accelerate, resumed": (with_accelerate, Loop(resumed=True)),
    "transformers": (with_transformers, Loop(clip=1.0)),  # its own
    "transformers, accumulated": (with_transformers, Loop(clip=1.0, micro=2)),
    "transformers, bf16": (with_transformers, Loop(clip=1.0, autocast=True)),
    "transformers, resumed": (with_transformers, Loop(clip=1.0, resumed=True)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", LOOPS)
def test_a_trainer_takes_the_steps_of_a_plain_loop(name, kind, tmp_path):
    trained_with, loop = LOOPS[name]
    opt, model = trained_with(kind, tmp_path, loop)
    expected, losses = network(dtype=torch.float32), regression
    if name.startswith("transformers"):
        expected, losses = tiny_bert(), classification
    reference = by_hand(kind, expected, loop, losses)
    assert opt.preconditioner.steps == reference.preconditioner.steps == STEPS
    assert_near(model, expected, rtol=1e-5, atol=1e-7)
    for layer in reference.preconditioner.layers:
        found, wanted = (list(o.preconditioner.factors(layer)) for o in (opt, reference))
        assert_near(found, wanted, rtol=1e-5, atol=1e-7)
    if name == "accelerate, resumed":
        assert_same(model, expected)
