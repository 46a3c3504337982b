"""Trains architectures of torchvision, timm, transformers and peft for some steps each.

``make zoo`` runs it in an environment of its own. All networks are small or cut down, with random
weights and data. A network fails if K-FAC raises, a loss is not finite where the base's is, or the
gradient of a layer has other sources than its rows.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import resource
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.applications.vision import torchvision  # before what looks for its operators
from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.layers import SCALES
from tests.integrations.test_models import DECODER, TRANSFORMERS, Loss, losses_of, on_words
from tests.support.ranks import run

import peft  # isort: skip
import timm  # isort: skip
import transformers  # isort: skip
from transformers.models.auto import modeling_auto  # isort: skip

SECONDS = 60  # of one network, on one core
STEPS = 5
RANKS = "two ranks"  # under fully_shard
OPTIONS: dict[str, Any] = {
    "factor_update_steps": 1,
    "inv_update_steps": 4,
    "max_factor_size": 64,  # diagonal from there on: coverage is asked for, not speed
}


class Network(NamedTuple):
    make: Callable[[], nn.Module]
    loss: Loss


# ---- torchvision

# One of each family.
IMAGES = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 "
    "maxvit_t "
    "mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnet50 "
    "resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11 vgg11_bn vit_b_16 "
    "wide_resnet50_2"
)
DETECTORS = (
    "fasterrcnn_mobilenet_v3_large_320_fpn fcos_resnet50_fpn keypointrcnn_resnet50_fpn "
    "maskrcnn_resnet50_fpn retinanet_resnet50_fpn ssdlite320_mobilenet_v3_large"
)
PIXELS = "deeplabv3_mobilenet_v3_large fcn_resnet50 lraspp_mobilenet_v3_large"
VIDEOS = "mc3_18 mvit_v2_s r2plus1d_18 r3d_18 s3d swin3d_t"
SIZES = {"maxvit_t": 224, "inception_v3": 96, "vit_b_16": 32}


def on_classes(*shape: int) -> Loss:
    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(torch.randn(shape)), torch.arange(shape[0]))

    return loss


def on_boxes(model: nn.Module) -> Tensor:
    box = torch.tensor([[4.0, 4.0, 40.0, 40.0]])
    points = torch.tensor([[[20.0, 20.0, 1.0]]]).expand(1, 17, 3)
    seen = {"boxes": box, "labels": torch.ones(1, dtype=torch.long), "keypoints": points}
    seen["masks"] = torch.ones(1, 64, 64, dtype=torch.uint8)
    return sum(model([torch.rand(3, 64, 64)] * 2, [seen] * 2).values())


def on_pixels(model: nn.Module) -> Tensor:
    out = model(torch.randn(2, 3, 64, 64))["out"]
    return F.cross_entropy(out, torch.randint(5, (2, 64, 64)))


def on_flow(model: nn.Module) -> Tensor:
    frames = torch.randn(2, 1, 3, 128, 128)
    return sum(flow.square().mean() for flow in model(*frames, num_flow_updates=3))


def from_torchvision() -> Iterator[tuple[str, Network]]:
    def made(name: str, **options: Any) -> Callable[[], nn.Module]:
        return lambda: torchvision.models.get_model(name, weights=None, **options)

    for name in IMAGES.split():
        size = SIZES.get(name, 64)
        options: dict[str, Any] = {"num_classes": 5}
        options |= {"image_size": 32} if name.startswith("vit") else {}
        if name in ("googlenet", "inception_v3"):
            options |= {"init_weights": False, "aux_logits": False}
        yield name, Network(made(name, **options), on_classes(4, 3, size, size))
    small = {"min_size": 64, "max_size": 64}
    for name in DETECTORS.split():
        options = {} if name.startswith("ssd") else small
        yield name, Network(made(name, weights_backbone=None, num_classes=2, **options), on_boxes)
    for name in PIXELS.split():
        yield name, Network(made(name, weights_backbone=None, num_classes=5), on_pixels)
    for name in VIDEOS.split():
        size = 224 if name == "mvit_v2_s" else 64
        yield name, Network(made(name, num_classes=5), on_classes(2, 3, 16, size, size))
    yield "raft_small", Network(made("raft_small"), on_flow)


# ---- timm

# Parts of names of small networks, the smallest first.
SMALL = (
    "test_ _atto _femto _pico _nano _zepto xxs xx_small _xxt xtiny _tiny _xs _micro _mini _t0 _s0 "
    "_b0 _s small _t 18 26 50"
)


def from_timm() -> Iterator[tuple[str, Network]]:
    """Yield one small network of each of timm's modules, and its own small ones for tests."""
    names = set(timm.list_models("test_*"))
    for module in timm.list_modules():
        own = timm.list_models(module=module)
        fit = [name for word in SMALL.split() for name in own if word in name]
        names.update((fit or own)[:1])
    for name in sorted(names):
        yield name, timm_network(name)


def timm_network(name: str) -> Network:
    config = timm.models.get_pretrained_cfg(name)
    size = 64 if config.fixed_input_size is False else config.input_size[-1]
    loss = on_classes(4, 3, size, size)
    return Network(lambda: timm.create_model(name, num_classes=5), loss)


# ---- transformers and peft

# Names that configurations have for the same sizes.
NAMES: dict[str, Any] = {
    **{**DECODER, "num_key_value_heads": 4},
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64},
    **{"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "n_layers": 2},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "n_heads": 4, "dim": 32},
    **{"hidden_dim": 64, "ffn_dim": 64, "word_embed_proj_dim": 32, "embedding_size": 32},
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1},
    **{"topk_group": 1, "state_size": 4, "head_dim": 8, "rotary_dim": 4, "attention_window": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"type_vocab_size": 2, "emb_dim": 32, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1},
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "attn_layer_indices": [1]},
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_expand": 2},
}


def from_transformers() -> Iterator[tuple[str, Network]]:
    """Yield the models that are tested everywhere, and all further language models."""
    for name, (model, config, options, loss, _) in TRANSFORMERS.items():
        yield name, Network(hugging(model, config, options), loss)
    known = {model for model, *_ in TRANSFORMERS.values()}
    for mapping in ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        found = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for kind, model in sorted(found.items()):
            model = model if isinstance(model, str) else model[0]
            if model in known:
                continue
            known.add(model)
            yield model, Network(by_kind(kind, model), on_words)


def hugging(model: str, config: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options))


def by_kind(kind: str, model: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = transformers.CONFIG_MAPPING[kind]
        attributes = getattr(config, "attribute_map", {})
        # A size has one name in each configuration.
        own = {name: size for name, size in NAMES.items() if attributes.get(name) not in NAMES}
        cls = getattr(transformers, model)
        with torch.device("meta"):
            size = sum(p.numel() for p in cls(config(**own)).parameters())
        if size > 1e7:
            raise NotImplementedError(f"{size} parameters, whatever the sizes asked for")
        return cls(config(**own))

    return make


ADAPTERS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4},
    "LoraConfig, DoRA": {"r": 4, "use_dora": True},
    "LoraConfig, embeddings": {"r": 4, "target_modules": ["embed_tokens", "q_proj", "lm_head"]},
    "AdaLoraConfig": {"init_r": 4, "target_r": 2, "total_step": 100},
    "LoHaConfig": {"r": 4},
    "LoKrConfig": {"r": 4},
    "OFTConfig": {"r": 0, "oft_block_size": 4},
    "BOFTConfig": {"boft_block_size": 4},
    "HRAConfig": {"r": 4},
    "VeraConfig": {"r": 4},
    "RandLoraConfig": {"r": 4},
    "MissConfig": {"r": 4},
    "FourierFTConfig": {"n_frequency": 20},
    "IA3Config": {"feedforward_modules": []},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "PromptTuningConfig": {"num_virtual_tokens": 4},
    "PrefixTuningConfig": {"num_virtual_tokens": 4},
    "PromptEncoderConfig": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
}


def from_peft() -> Iterator[tuple[str, Network]]:
    for name, options in ADAPTERS.items():
        cls, targets = name.partition(",")[0], {"target_modules": ["q_proj", "v_proj"]}
        targets = {} if "num_virtual_tokens" in options else targets
        yield name, Network(adapted(cls, {**targets, **options}), on_words)


def adapted(cls: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))
        return peft.get_peft_model(net, getattr(peft, cls)(task_type="CAUSAL_LM", **options))

    return make


# Networks some of whose gradients have other sources, indeed.
ELSEWHERE = {
    "AdaLoraConfig": "the loss has a penalty",
    "MobileBertForMaskedLM": "the head multiplies by a tied weight that is joined with another",
}

SOURCES: dict[str, Callable[[], Iterator[tuple[str, Network]]]] = {
    "torchvision": from_torchvision,
    "timm": from_timm,
    "transformers": from_transformers,
    "peft": from_peft,
}


# ---- training


def tried(network: Network, name: str, shard: bool = False) -> dict[str, Any]:
    """Train one network; return what it showed, with ``failed`` or ``not_run`` where it did not."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    start, cls = time.process_time(), (KFACSGD, KFACAdam)[len(name) % 2]
    try:
        net = network.make().train()
        plain = losses_of(net, network.loss, cls.__mro__[2](net.parameters(), lr=1e-4), 1)
    except Exception as error:
        return {"not_run": f"{type(error).__name__}: {str(error)[:100]}"}
    if shard:
        sharded(net)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt = cls(net, lr=1e-4, **OPTIONS)
            values = losses_of(net, network.loss, opt, STEPS)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    report = opt.preconditioner.coverage()
    raw: Counter[str] = Counter()
    for left in report.left.values():
        if left.size:
            raw["scales and shifts" if left.reason == SCALES else left.reason] += left.size
    found: dict[str, Any] = {"parameters": report.total, "covered": round(report.share, 4)}
    found |= {"raw": dict(raw)} if raw else {}
    found |= {"loss": [round(values[0], 3), round(values[-1], 3)]}
    found["seconds"] = round(time.process_time() - start, 1)
    own = {str(w.message)[:150] for w in caught if "kaisa_optim" in w.filename + str(w.message)}
    found |= {"warnings": sorted(own)} if own else {}
    if report.elsewhere:
        largest = max(report.elsewhere, key=lambda layer: report.elsewhere[layer])
        told = f"{len(report.elsewhere)} layers, {largest} by {report.elsewhere[largest]:.3g}"
        known = ELSEWHERE.get(name)
        found["elsewhere" if known else "failed"] = f"{known or 'other sources'}: {told}"
    if not all(map(math.isfinite, values)) and math.isfinite(plain[0]):
        found["failed"] = f"losses {values}"
    return found


def sharded(net: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    parts: list[str] = []
    for name, module in net.named_modules():
        if isinstance(module, nn.ModuleList) and not any(map(name.startswith, parts)):
            parts += [f"{name}.{i}." for i in range(len(module))]
            for block in module:
                fully_shard(block)
    fully_shard(net)


def in_a_process(network: Network, name: str) -> dict[str, Any]:
    """Train a network in a process that ends after a minute of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work(pipe: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        pipe.send(tried(network, name))

    process = context.Process(target=work, args=(there,))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        process.join()
        slow = process.exitcode == -signal.SIGKILL
        return {"not_run": f"more than {SECONDS} s"} if slow else {"failed": "its process ended"}
    finally:
        process.join()


SHARDED = {
    "transformers": ["GPT-2", "Llama", "Mixtral", "Qwen 3", "BERT", "T5", "ViT", "Whisper"],
    "timm": ["test_vit"],
    "torchvision": ["resnet18"],
    "peft": ["LoraConfig"],
}


def on_ranks(source: str, name: str) -> dict[str, Any]:
    return tried(dict(SOURCES[source]())[name], name, shard=True)


def networks(sources: list[str], only: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for source in sources:
        for name, network in SOURCES[source]() if source in SOURCES else ():
            if re.search(only, name):
                yield source, name, in_a_process(network, name)
    for source, names in SHARDED.items() if RANKS in sources else ():
        for name in names:
            if re.search(only, name):
                yield RANKS, name, run(2, on_ranks, source, name, timeout=10 * SECONDS)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", nargs="*", default=[*SOURCES, RANKS])
    parser.add_argument("--only", default="", help="an expression that is searched in names")
    parser.add_argument("--out", type=Path, help="a file; other sources keep their results in it")
    asked = parser.parse_args()
    out = asked.out
    known = json.loads(out.read_text()) if out is not None and out.exists() else {}
    libraries = "torchvision", "timm", "transformers", "peft"
    known["versions"] = {name: metadata.version(name) for name in libraries}
    known.pop("machine", None)
    known |= {source: {} for source in asked.sources}
    for source, name, told in networks(asked.sources, asked.only):
        known[source][name] = told
        print(source, name, told, flush=True)
        if out is not None:
            machine.keep(out, threads=1, **known)
    every = [one for source in asked.sources for one in known[source].values()]
    counts = {kind: sum(kind in one for one in every) for kind in ("failed", "not_run")}
    print(f"{len(every)} networks, {counts}")
    raise SystemExit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
