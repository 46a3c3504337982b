"""Trainers of other libraries drive the optimizers as they are, to the numbers of a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from tests.support.training import assert_near, assert_same, batch, network

STEPS = 6
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda model: KFACSGD(model, lr=0.05, momentum=0.9, **INTERVALS),
    "Adam": lambda model: KFACAdam(model, lr=0.01, **INTERVALS),
}
INTERVALS = {"factor_update_steps": 2, "inv_update_steps": 3}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.parametrize("kind", OPTIMIZERS),
]


def loader(batch_size: int = 8, first: int = 0) -> Any:
    """The rows of the batches, beginning with batch ``first``."""
    data = [batch((first + i) % STEPS, torch.float32) for i in range(STEPS)]
    rows = torch.utils.data.TensorDataset(*map(torch.cat, zip(*data, strict=True)))
    return torch.utils.data.DataLoader(rows, batch_size=batch_size)


Losses = Callable[[int, int], Iterator[Callable[[Any], Tensor]]]  # of a step's micro-batches


def regression(i: int, micro: int) -> Iterator[Callable[[Any], Tensor]]:
    x, y = batch(i, torch.float32)
    for part, target in zip(x.chunk(micro), y.chunk(micro), strict=True):
        yield lambda model, part=part, target=target: F.mse_loss(model(part), target)


def by_hand(
    kind: str,
    model: nn.Module,
    *,
    micro: int = 1,
    autocast: bool = False,
    scheduled: bool = False,
    clip: float | None = None,
    losses: Losses = regression,
) -> Any:
    """A plain loop, over micro-batches of equal size where ``micro`` is above 1."""
    opt = OPTIMIZERS[kind](model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, decay) if scheduled else None
    for i in range(STEPS):
        opt.zero_grad()
        for loss_of in losses(i, micro):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model) / micro
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        if scheduler is not None:
            scheduler.step()
    return opt


def decay(epoch: int) -> float:
    return 1 / (1 + epoch)


def check(kind: str, opt: Any, model: nn.Module, **loop: Any) -> nn.Module:
    """Compare with a plain loop; return the model that it has trained."""
    expected = network(dtype=torch.float32)
    check_against(by_hand(kind, expected, **loop), opt, model, expected)
    return expected


def check_against(reference: Any, opt: Any, model: nn.Module, expected: nn.Module) -> None:
    assert opt.preconditioner.steps == reference.preconditioner.steps == STEPS
    assert_near(model, expected, rtol=1e-5, atol=1e-7)
    for name in reference.preconditioner.layers:
        ours, theirs = (o.preconditioner.factors(name) for o in (opt, reference))
        assert_near(list(ours), list(theirs), rtol=1e-5, atol=1e-7)


# ---- Lightning ----


def lightning_module(kind: str, scheduled: bool = False) -> Any:
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
            if not scheduled:
                return self.opt
            scheduler = torch.optim.lr_scheduler.LambdaLR(self.opt, decay)
            return [self.opt], [{"scheduler": scheduler, "interval": "step"}]

    return Regression()


def lightning_trainer(path: Path, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=path, **{**quiet, **options}
    )


LIGHTNING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bf16-mixed": ({"precision": "bf16-mixed"}, {"autocast": True}),
    "accumulated": ({"accumulate_grad_batches": 2}, {"micro": 2}),
    "scheduled": ({}, {"scheduled": True}),
    "clipped": ({"gradient_clip_val": 0.05}, {"clip": 0.05}),
}


@pytest.mark.filterwarnings("ignore:.*bottleneck.*", "ignore:.*torch.jit", "ignore:.*LeafSpec")
@pytest.mark.parametrize("setting", LIGHTNING)
def test_lightning(kind, setting, tmp_path):
    trained, loop = LIGHTNING[setting]
    module = lightning_module(kind, loop.get("scheduled", False))
    trainer = lightning_trainer(tmp_path, enable_checkpointing=False, **trained)
    trainer.fit(module, loader(8 // loop.get("micro", 1)), loader())  # with a validation
    check(kind, module.opt, module.net, **loop)


@pytest.mark.filterwarnings("ignore:.*val_dataloader", "ignore:You're resuming")
def test_lightnings_checkpoint_resumes(kind, tmp_path):
    """In the middle of both intervals."""
    lightning = pytest.importorskip("lightning")

    class Save(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "part.ckpt")

    options = {"enable_checkpointing": False, "limit_val_batches": 0}
    first = lightning_trainer(tmp_path, callbacks=[Save()], **options)
    first.fit(lightning_module(kind), loader())
    resumed = lightning_module(kind)
    second = lightning_trainer(tmp_path, **options)
    # Within an epoch it counts on, but takes batches from the loader's beginning.
    second.fit(resumed, loader(first=4), ckpt_path=str(tmp_path / "part.ckpt"))
    check(kind, resumed.opt, resumed.net)


# ---- Accelerate ----


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(kind, micro, precision):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=micro, mixed_precision=precision
    )
    model = network(dtype=torch.float32)
    opt = OPTIMIZERS[kind](model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, decay)
    prepared = accelerator.prepare(model, opt, loader(8 // micro), scheduler)
    wrapped_model, wrapped, data, wrapped_scheduler = prepared
    for x, y in data:
        with accelerator.accumulate(wrapped_model):
            accelerator.backward(F.mse_loss(wrapped_model(x), y))
            wrapped.step()
            wrapped_scheduler.step()
            wrapped.zero_grad()
    check(kind, opt, model, micro=micro, autocast=precision == "bf16", scheduled=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerates_checkpoint_resumes(kind, tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def half(data: Any, load: bool) -> Any:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True)
        model = network(dtype=torch.float32)
        opt = OPTIMIZERS[kind](model)
        wrapped_model, wrapped = accelerator.prepare(model, opt)
        if load:
            accelerator.load_state(str(tmp_path))
        for x, y in data:
            wrapped.zero_grad()
            accelerator.backward(F.mse_loss(wrapped_model(x), y))
            wrapped.step()
        if not load:
            accelerator.save_state(str(tmp_path))
        return model, opt

    data = [batch(i, torch.float32) for i in range(STEPS)]
    half(data[:4], load=False)
    model, opt = half(data[4:], load=True)
    assert_same(model, check(kind, opt, model))


# ---- the Trainer of transformers ----


def tiny_bert() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 12, "max_position_embeddings": 8, "num_labels": 3}
    sizes |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))


def sentences(rows: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(20, (rows, 6), generator=generator)
    return [{"input_ids": w, "labels": w.sum() % 3} for w in words]


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Examples in their order: the Trainer has no sampler for it."""

    def __iter__(self) -> Any:
        return iter(sentences(8 * STEPS))


def classification(i: int, micro: int) -> Iterator[Callable[[Any], Tensor]]:
    rows, size = sentences(8 * STEPS), 8 // micro
    for first in range(8 * i, 8 * i + 8, size):
        part = rows[first : first + size]
        x = {key: torch.stack([row[key] for row in part]) for key in part[0]}
        yield lambda model, x=x: model(**x).loss


def trained_as_by_hand(kind: str, driven: Any, start: nn.Module, **loop: Any) -> None:
    """Compare what a Trainer has trained with a plain loop from the ``start``."""
    expected = start.train()
    reference = by_hand(kind, expected, **loop, clip=1.0, losses=classification)
    check_against(reference, driven.optimizer.optimizer, driven.model, expected)


def trainer(kind: str, model: Any, path: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    sizes = {"max_steps": STEPS, "per_device_train_batch_size": 8}
    arguments = transformers.TrainingArguments(str(path), **{**quiet, **sizes, **options})
    opt = OPTIMIZERS[kind](model)
    optimizers = opt, torch.optim.lr_scheduler.ConstantLR(opt, 1.0)
    how = {"train_dataset": Stream(), "compute_loss_func": mean_over_all}
    return transformers.Trainer(model, arguments, optimizers=optimizers, **how)


def mean_over_all(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The mean over an accumulated batch, which most models' own losses leave undivided."""
    count = len(labels) if num_items_in_batch is None else num_items_in_batch
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / count


HALVED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
TRAINER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated": (HALVED, {"micro": 2}),
    "bf16": ({"bf16": True}, {"autocast": True}),
}


@pytest.mark.filterwarnings("ignore:the base optimizer updates these")
@pytest.mark.parametrize("setting", TRAINER)
def test_transformers_trainer(kind, setting, tmp_path):
    pytest.importorskip("accelerate")
    options, loop = TRAINER[setting]
    driven = trainer(kind, tiny_bert(), tmp_path, **options)
    driven.train()
    trained_as_by_hand(kind, driven, tiny_bert(), **loop)


@pytest.mark.filterwarnings("ignore:the base optimizer updates these")
def test_transformers_checkpoint_resumes(kind, tmp_path):
    pytest.importorskip("accelerate")
    trainer(kind, tiny_bert(), tmp_path, save_strategy="steps", save_steps=4).train()
    resumed = trainer(kind, tiny_bert(), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    trained_as_by_hand(kind, resumed, tiny_bert())
