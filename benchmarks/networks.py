"""The networks that benchmarks train, in plain PyTorch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two 3×3 convolutions; where the shape changes, the shortcut takes every other pixel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        new = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if self.stride > 1:
            missing = new.shape[1] - x.shape[1]
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, missing))
        return (x + new).relu()


class CifarResNet(nn.Module):
    """He et al. (2016), section 4.2: 6n + 2 layers, shortcuts without parameters."""

    def __init__(self, depth: int = 32, classes: int = 10) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        widths = [16] * blocks + [32] * blocks + [64] * blocks
        before = [16, *widths[:-1]]
        self.blocks = nn.Sequential(*map(Residual, before, widths))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.bn(self.conv(x)).relu())
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """Attention and a feed-forward part, each after a layer norm."""

    def __init__(self, width: int, heads: int, wide: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Transformer(nn.Module):
    """A language model over a small alphabet, as GPT-2 is built.

    Not ``causal``, every place sees the whole text, as in BERT.
    """

    def __init__(
        self,
        vocabulary: int = 96,
        length: int = 128,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
        wide: int = 1024,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, wide, causal) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Autoencoder(nn.Sequential):
    """Fully connected, mirrored, tanh between the layers, linear code and output."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        sizes = [*widths, *widths[-2::-1]]
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes), 1):
            layers.append(nn.Linear(inputs, outputs))
            if i not in (len(widths) - 1, len(sizes) - 1):
                layers.append(nn.Tanh())
        super().__init__(*layers)


class Convolutions(nn.Sequential):
    """Two 3×3 convolutions, each with a batch norm and a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers.append(nn.Conv2d(channels, outputs, 3, 1, 1, bias=False))
            layers += nn.BatchNorm2d(outputs), nn.ReLU()
        super().__init__(*layers)


class UNet(nn.Module):
    """Ronneberger et al. (2015), small: images in, one logit a pixel out, of the same size."""

    def __init__(self, channels: int = 3, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(Convolutions, (channels, *widths), widths))
        narrower, wider = widths[-2::-1], widths[:0:-1]
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(w, n, 2, 2) for w, n in zip(wider, narrower, strict=True)
        )
        self.up = nn.ModuleList(Convolutions(2 * n, n) for n in narrower)
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed = []
        for down in self.down[:-1]:
            passed.append(down(x))
            x = F.max_pool2d(passed[-1], 2)
        x = self.down[-1](x)
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([passed.pop(), widen(x)], 1))
        return self.head(x)
