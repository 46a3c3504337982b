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


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions; the middle one has the stride, where there is one."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn1, self.bn2, self.bn3 = map(nn.BatchNorm2d, (width, width, outputs))
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        new = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return (self.shortcut(x) + self.bn3(self.conv3(new))).relu()


class ResNet(nn.Module):
    """He et al. (2016), table 1, with bottlenecks; (3, 4, 6, 3) of width 64 is ResNet-50."""

    def __init__(
        self, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000, width: int = 64
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.blocks, inputs = nn.Sequential(), width
        for stage, count in enumerate(blocks):
            wide = width * 2**stage
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                self.blocks.append(Bottleneck(inputs, wide, stride))
                inputs = 4 * wide
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.bn(self.conv(x)).relu(), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class Block(nn.Module):
    """Attention and a feed-forward part, each after a layer norm."""

    def __init__(self, width: int, heads: int, wide: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, wide), nn.Linear(wide, width)

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.feed(self.norm2(x))


class BertBlock(Block):
    """A layer norm after each part."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.feed(x))


class Transformer(nn.Module):
    """A language model over a small alphabet, as GPT-2 is built.

    Not ``causal``, every place sees the whole text, as in BERT. ``tied``, the last layer has the
    weights of the first.
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
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, wide, causal) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            nn.init.normal_(self.words.weight, std=0.02)
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Bert(nn.Module):
    """BERT-Large for masked words (Devlin et al., 2019), its decoder tied to the words.

    Every seventh token is predicted, about the 15 % that are masked.
    """

    EVERY = 7

    def __init__(
        self, vocabulary: int = 30522, length: int = 512, width: int = 1024, layers: int = 24
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places, self.kinds = nn.Embedding(length, width), nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        blocks = (BertBlock(width, width // 64, 4 * width, causal=False) for _ in range(layers))
        self.blocks = nn.Sequential(*blocks)
        self.transform, self.last_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.words(tokens) + self.places(places) + self.kinds(torch.zeros_like(tokens))
        x = self.blocks(self.norm(x))[:, :: self.EVERY]
        return self.head(self.last_norm(F.gelu(self.transform(x))))


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
