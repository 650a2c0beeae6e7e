"""Networks of the papers' size: residual networks for CIFAR-10, and a small transformer.

ResNet-20 is that of He et al. for CIFAR-10 (0.27 million parameters, shortcuts without parameters);
ResNet-18 has four stages of 64 to 512 channels, a first layer for 32 x 32 pixels (11.2 million).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, relu, scaled_dot_product_attention

from paceline.lab.tasks.characters import CHARACTERS, CONTEXT

CLASSES = 10


def make_network(name: str) -> nn.Module:
    """The network ``resnet20``, ``resnet18`` or ``gpt``."""
    if name == "resnet20":
        return ResNet(channels=(16, 32, 64), blocks=3, projected=False)
    if name == "resnet18":
        return ResNet(channels=(64, 128, 256, 512), blocks=2, projected=True)
    return GPT()


class ResidualBlock(nn.Module):
    """Two convolutions, whose output is added to the input.

    Args:
        inputs, outputs: channels; if there are more outputs, the image shrinks to half its size.
        projected: whether a convolution makes the input fit then, rather than channels of zeros.
    """

    def __init__(self, inputs: int, outputs: int, projected: bool) -> None:
        super().__init__()
        self._stride = 1 if inputs == outputs else 2
        self._more = (outputs - inputs) // 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self._stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module | None = None
        if projected and inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, self._stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self._fit(x))

    def _fit(self, x: Tensor) -> Tensor:
        """The input in the shape of the output."""
        if self.shortcut is not None:
            fitted: Tensor = self.shortcut(x)
            return fitted
        if self._stride == 1:
            return x
        return pad(x[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, self._more, self._more))


class ResNet(nn.Module):
    """A residual network for images of 32 x 32 pixels.

    Args:
        channels: of each stage.
        blocks: of each stage.
        projected: see :class:`ResidualBlock`.
    """

    def __init__(self, channels: tuple[int, ...], blocks: int, projected: bool) -> None:
        super().__init__()
        first = channels[0]
        self.conv, self.norm = nn.Conv2d(3, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first)
        widths = [first] + [width for width in channels for _ in range(blocks)]
        self.blocks = nn.Sequential(
            *(ResidualBlock(inputs, outputs, projected) for inputs, outputs in pairwise(widths))
        )
        self.head = nn.Linear(channels[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


class Attention(nn.Module):
    """Each position looks at those up to itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.inputs(x).view(batch, length, 3, self._heads, width // self._heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.output(seen.transpose(1, 2).reshape(batch, length, width))
        return mixed


class TransformerBlock(nn.Module):
    """Attention and a small network, each added to its normalized input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.narrow(gelu(self.wide(self.norm2(x))))
        return y


class GPT(nn.Module):
    """A transformer that predicts the next character: 4.9 million parameters."""

    def __init__(self, width: int = 256, layers: int = 6, heads: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(CHARACTERS, width),
            nn.Embedding(CONTEXT, width),
        )
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        x = self.blocks(self.tokens(text) + self.positions(places))
        logits: Tensor = self.head(self.norm(x))
        return logits
