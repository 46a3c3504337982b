"""Networks that people train, from the libraries that they come from, with random weights.

Each trains for six steps without a warning; its coverage is what a user may count on.
"""

from __future__ import annotations

import importlib
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam

Loss = Callable[[nn.Module], Tensor]


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # torchvision of another torch raises the latter
        pytest.skip(f"{name} is not installed: {error}")


def losses_of(net: nn.Module, loss: Loss, opt: Any, steps: int) -> list[float]:
    """Train; return the loss of each step."""
    values = []
    for step in range(steps):
        torch.manual_seed(step % 2)
        opt.zero_grad()
        value = loss(net)
        value.backward()
        opt.step()
        values.append(value.item())
    return values


def train(
    model: nn.Module, loss: Loss, least: float, cls: Any, steps: int = 6, **options: Any
) -> None:
    model.train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="kaisa_optim")
        opt = cls(model, lr=1e-3, **options)
        values = losses_of(model, loss, opt, steps)
    report = opt.preconditioner.coverage()
    # Scales and shifts are the base's in every network.
    left = sum(x.size for x in report.left.values() if not x.reason.startswith("only scales"))
    assert left <= (1 - least) * report.total, report.left
    assert all(map(math.isfinite, values)), values


# ---------------------------------------------------------------- transformers

WORDS, WIDTH = 96, 32
BLOCKS = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
BLOCKS |= {"intermediate_size": 64}
DECODER = {"vocab_size": WORDS, **BLOCKS, "max_position_embeddings": 64}
GROUPED = {**DECODER, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
GPT = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
SEQ2SEQ = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
}
IMAGES = {**BLOCKS, "image_size": 16, "patch_size": 4, "num_labels": 5}


def on_words(model: nn.Module) -> Tensor:
    words = torch.randint(3, WORDS, (4, 12))
    return model(input_ids=words, labels=words).loss


def on_images(model: nn.Module) -> Tensor:
    return model(pixel_values=torch.randn(4, 3, 16, 16), labels=torch.randint(0, 5, (4,))).loss


def on_spectra(model: nn.Module) -> Tensor:
    words = torch.randint(3, WORDS, (2, 12))
    return model(input_features=torch.randn(2, 8, 40), labels=words).loss


Entry = tuple[str, str, dict[str, Any], Loss, float]


def words(
    kind: str,
    task: str,
    sizes: dict[str, Any],
    loss: Loss = on_words,
    least: float = 1,
    **more: Any,
) -> Entry:
    """Return model and configuration classes, the configuration, the loss, the least coverage."""
    return kind + task, f"{kind}Config", {"vocab_size": WORDS, **sizes, **more}, loss, least


LM, MASKED, SEQUENCES = "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
OF_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0}
OF_WHISPER = {
    **{"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
OF_OPT = {k: v for k, v in DECODER.items() if k != "intermediate_size"}
VISION_TRANSFORMERS = {"ViT": "ViT", "BEiT": "Beit", "DINO v2": "Dinov2"}
# One of each way to build a block; the zoo trains the others.
TRANSFORMERS: dict[str, Entry] = {
    "GPT-2": words("GPT2", "LMHeadModel", GPT),
    "GPT-J": words("GPTJ", LM, GPT, rotary_dim=4),
    "Llama": words("Llama", LM, GROUPED),
    "Qwen 3": words("Qwen3", LM, HEADS),
    "Gemma 2": words("Gemma2", LM, HEADS),
    "Phi 3": words("Phi3", LM, GROUPED, pad_token_id=0),
    "OPT": words("OPT", LM, OF_OPT, ffn_dim=64, word_embed_proj_dim=WIDTH),
    "BLOOM": words("Bloom", LM, {"hidden_size": WIDTH, "n_layer": 2, "n_head": 4}),
    "Falcon": words("Falcon", LM, DECODER),
    "Mixtral": words("Mixtral", LM, GROUPED, num_local_experts=4),
    "Qwen 3 MoE": words("Qwen3Moe", LM, HEADS, **EXPERTS, moe_intermediate_size=32),
    "OLMoE": words("Olmoe", LM, DECODER, **EXPERTS),
    # Its logarithms of decays stay raw.
    "Mamba": words(
        *("Mamba", LM, {"hidden_size": WIDTH, "num_hidden_layers": 2}), least=0.97, state_size=4
    ),
    "BERT": words("Bert", MASKED, DECODER),
    "ALBERT": words("Albert", MASKED, DECODER, embedding_size=16),
    "DeBERTa v2": words("DebertaV2", MASKED, DECODER),
    "T5": words("T5", SEQUENCES, OF_T5, num_layers=2, num_heads=4),
    "BART": words("Bart", SEQUENCES, SEQ2SEQ),
    "Whisper": words("Whisper", SEQUENCES, {**SEQ2SEQ, **OF_WHISPER}, on_spectra),
    **{
        name: (f"{kind}ForImageClassification", f"{kind}Config", IMAGES, on_images, 0.95)
        for name, kind in VISION_TRANSFORMERS.items()
    },
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name):
    transformers = library("transformers")
    model, config, options, loss, least = TRANSFORMERS[name]
    if not hasattr(transformers, model):
        pytest.skip(f"this version has no {model}")
    torch.manual_seed(0)
    net = getattr(transformers, model)(getattr(transformers, config)(**options))
    train(net, loss, least, (KFACSGD, KFACAdam)[len(name) % 2])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gpt2_under_a_checkpoint():
    transformers = library("transformers")
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT))
    net.gradient_checkpointing_enable()
    train(net, on_words, 1, KFACAdam)


# ---------------------------------------------------------------- a detector
# A small one of one stage: shared heads, a prior of 1 %, losses divided by positives. Each
# contestant has a rate at which its base optimizer trains. Preconditioned gradients without a
# length of their own raised the loss to twice and three times its first value here; so did steps
# of the heads that were a third of their weights' size.

CLASSES, CHANNELS, SIDE, SAMPLES, BATCH = 3, 32, 64, 8, 2


class Detector(nn.Module):
    """A pyramid of three levels under a class head and a box head, which all levels share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = self._body(3, 4)
        self.levels = nn.ModuleList(self._body(CHANNELS, 2) for _ in range(3))
        self.classes, self.boxes = self._head(CLASSES), self._head(4)
        nn.init.constant_(self.classes[-1].bias, -math.log(99))

    @staticmethod
    def _body(inputs: int, stride: int) -> nn.Sequential:
        conv = nn.Conv2d(inputs, CHANNELS, 3, stride, 1, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        return nn.Sequential(conv, nn.BatchNorm2d(CHANNELS), nn.ReLU())

    @staticmethod
    def _head(outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()]
        head = nn.Sequential(*layers, nn.Conv2d(CHANNELS, outputs, 3, padding=1))
        for layer in head:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)
        return head

    def forward(self, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        x, found = self.stem(images), []
        for level in self.levels:
            x = level(x)
            found.append((self.classes(x), self.boxes(x)))
        return found


def samples() -> tuple[Tensor, Tensor, Tensor]:
    """Return images with one coloured square each, the squares, and their classes."""
    draws = torch.Generator().manual_seed(0)
    images = 0.3 * torch.rand(SAMPLES, 3, SIDE, SIDE, generator=draws)
    sides = torch.randint(12, 32, (SAMPLES,), generator=draws)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=draws)
    squares = []
    for image, side, label in zip(images, sides.tolist(), labels.tolist(), strict=True):
        x, y = torch.randint(SIDE - side, (2,), generator=draws).tolist()
        image[label, y : y + side, x : x + side] += 0.6
        squares.append([x, y, x + side, y + side])
    return images, torch.tensor(squares, dtype=torch.float32), labels


def detection_loss(found: list[tuple[Tensor, Tensor]], squares: Tensor, labels: Tensor) -> Tensor:
    """Return the focal loss and the box loss, divided by the number of positive places."""
    total, positives = torch.zeros(()), 0
    for scores, boxes in found:
        stride = SIDE // scores.shape[-1]
        centres = stride * (torch.arange(scores.shape[-1]) + 0.5)
        across, down = centres[None, None, :], centres[None, :, None]
        left, top, right, bottom = squares[:, :, None, None].unbind(1)
        to_sides = across - left, down - top, right - across, bottom - down
        distances = torch.stack(torch.broadcast_tensors(*to_sides), 1)
        inside = distances.amin(1) > 0
        wanted = F.one_hot(labels, CLASSES)[:, :, None, None] * inside[:, None]
        chance = torch.where(wanted > 0, scores, -scores)
        weight = torch.where(wanted > 0, 0.25, 0.75) * (1 - chance.sigmoid()) ** 2
        total = total - (weight * F.logsigmoid(chance)).sum()
        total = total + ((boxes - distances / SIDE).abs() * inside[:, None]).sum()
        positives += int(inside.sum())
    return total / max(1, positives)


# And how far losses may jump above the first.
CONTESTANTS: dict[str, tuple[Callable[[nn.Module], Any], float]] = {
    "KFACAdam": (lambda model: KFACAdam(model, lr=1e-3), 1.3),
    "KFACSGD": (lambda model: KFACSGD(model, lr=0.02, momentum=0.9), 1.3),
    "KFACSGD, fast": (lambda model: KFACSGD(model, lr=0.05, momentum=0.9), 1.6),
}


@pytest.mark.maintainer
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CONTESTANTS)
def test_loss_divided_by_positives_jumps_little(name, seed):
    make, most = CONTESTANTS[name]
    torch.manual_seed(seed)
    model = Detector()
    data = zip(*(tensor.split(BATCH) for tensor in samples()), strict=True)
    batches = itertools.cycle(data)

    def loss(model: nn.Module) -> Tensor:
        images, squares, labels = next(batches)
        return detection_loss(model(images), squares, labels)

    losses = losses_of(model, loss, make(model), steps=40)
    assert max(losses) < most * losses[0]
    assert sum(losses[-4:]) < sum(losses[:4])
