"""plans.py: models to plan for, without their memory.

    kaisa plan examples.plans:bert_large --ranks 64 --memory 32GB --device v100

A factory returns a model, or a model and one rank's input. It runs on the meta device.
"""

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)


def resnet_50(batch: int = 64, side: int = 224) -> tuple[nn.Module, torch.Tensor]:
    """ResNet-50 for a thousand classes."""
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    return model, torch.zeros(batch, 3, side, side)


def bert_large(batch: int = 8, length: int = 512) -> tuple[nn.Module, torch.Tensor]:
    """BERT-Large for masked words; tied embeddings count once."""
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return BertForMaskedLM(config), torch.zeros(batch, length, dtype=torch.long)


def llama_7b(batch: int = 1, length: int = 2048) -> tuple[nn.Module, torch.Tensor]:
    """A Llama of 6.7 billion parameters."""
    return LlamaForCausalLM(LlamaConfig()), torch.zeros(batch, length, dtype=torch.long)
