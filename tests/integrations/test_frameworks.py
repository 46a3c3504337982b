"""Trainers of other libraries drive the optimizers as they are, to the numbers of a plain loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam, with_kfac
from tests.support.ranks import run
from tests.support.training import assert_near, assert_same, backward, batch, factors, network

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


def by_hand(kind: str, loop: Loop) -> tuple[Any, nn.Module]:
    """Train in a plain loop."""
    model = network(dtype=torch.float32)
    opt = OPTIMIZERS[kind](model)
    scheduler = scheduler_of(opt, loop)
    for i in range(STEPS):
        opt.zero_grad()
        parts = (tensor.chunk(loop.micro) for tensor in batch(i, torch.float32))
        for x, y in zip(*parts, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=loop.autocast):
                loss = F.mse_loss(model(x), y) / loop.micro
            loss.backward()
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        opt.step()
        scheduler.step()
    return opt, model


def rows(first: int = 0) -> Any:
    data = [batch((first + i) % STEPS, torch.float32) for i in range(STEPS)]
    return torch.utils.data.TensorDataset(*map(torch.cat, zip(*data, strict=True)))


def loader(loop: Loop, first: int = 0) -> Any:
    """The rows of the batches, beginning with batch ``first``."""
    return torch.utils.data.DataLoader(rows(first), batch_size=8 // loop.micro)


# ---- Lightning ----


def with_lightning(kind: str, path: Path, loop: Loop) -> tuple[Any, nn.Module]:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
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

    module = Module()
    if not loop.resumed:
        trainer().fit(module, loader(loop), loader(Loop()))  # with a validation
        return module.opt, module.net
    trainer(callbacks=[Save()], limit_val_batches=0).fit(Module(), loader(loop))
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


class Regression(nn.Module):
    """A model as the Trainer knows them, which tells its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(dtype=torch.float32)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.net(x), labels)}


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Examples in their order: the Trainer has no sampler for it."""

    def __iter__(self) -> Any:
        return ({"x": x, "labels": y} for x, y in rows())


def with_transformers(kind: str, path: Path, loop: Loop) -> tuple[Any, nn.Module]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def trainer(save_strategy: str) -> Any:
        how = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "bf16": loop.autocast}
        how |= {"max_steps": STEPS, "save_strategy": save_strategy, "save_steps": SAVED}
        how |= {"per_device_train_batch_size": 8 // loop.micro, "max_grad_norm": loop.clip}
        how |= {"gradient_accumulation_steps": loop.micro}
        model = Regression()
        opt = OPTIMIZERS[kind](model.net)
        optimizers = opt, scheduler_of(opt, loop)
        arguments = transformers.TrainingArguments(str(path), **how)
        return transformers.Trainer(model, arguments, optimizers=optimizers, train_dataset=Stream())

    driven, saved = trainer("no"), None
    if loop.resumed:
        trainer("steps").train()
        saved = str(path / f"checkpoint-{SAVED}")
    driven.train(resume_from_checkpoint=saved)
    return driven.optimizer.optimizer, driven.model.net


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
    reference, expected = by_hand(kind, loop)
    assert opt.preconditioner.steps == reference.preconditioner.steps == STEPS
    assert_near(model, expected, rtol=1e-5, atol=1e-7)
    assert_near(factors(opt), factors(reference), rtol=1e-5, atol=1e-7)
    if name == "accelerate, resumed":
        assert_same(model, expected)


# ---- ZeRO, which spreads a base optimizer's state over ranks, is refused ----

INSTEAD = 'assignment="layer-wise"'


def inside(model_given: bool) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    more = {"model": model} if model_given else {}
    try:
        ZeroRedundancyOptimizer(model.parameters(), KFACAdam, lr=0.1, **more)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", [1, 2])
def test_zero_redundancy_around_k_fac_is_refused(world):
    """Two ranks had different layers, and one rank got no word."""
    for given in (True, False):
        for text in run(world, inside, given):
            assert "ZeroRedundancyOptimizer gives each rank a part" in text and INSTEAD in text


def test_zero_redundancy_is_no_base():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for base in (ZeroRedundancyOptimizer, type("OfMyOwn", (ZeroRedundancyOptimizer,), {})):
        with pytest.raises(ValueError, match=f"Invalid base: {base.__name__} .*layer-wise"):
            with_kfac(base)


def test_copies_of_the_weights_in_the_groups_are_refused():
    """As DeepSpeed puts them there, whether it is installed or not."""
    model = network()
    opt = KFACSGD(model, lr=0.1)
    opt.param_groups[0]["params"] = [p.detach().clone() for p in model.parameters()]
    backward(model, 0)
    with pytest.raises(RuntimeError, match=f"Invalid param_groups: .* under ZeRO .*{INSTEAD}"):
        opt.step()
