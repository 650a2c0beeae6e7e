"""Time a training step of the models that ``--as-model`` knows, for ``paceline/sim/models.py``.

    python benchmarks/model_steps.py [--device cuda] [--models resnet50,gpt2-small]

Each model is built as in its paper, with the parameters of the usual implementations (torchvision,
transformers). A step is forward, backward and SGD in float32 (TF32 if the device has it) on random
samples: images of 224 x 224, sequences of 128 tokens (BERT) or 1024 (GPT-2). Prints one line for
each model: seconds per sample, the median of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    linear,
    relu,
    scaled_dot_product_attention,
)

ROUNDS, STEPS = 5, 10


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3, 1x1 and a shortcut; 3x3, 3x3 if it is not ``deep``."""

    def __init__(self, inner: int, width: int, stride: int, deep: bool) -> None:
        super().__init__()
        outer = width * 4 if deep else width
        shapes = [(inner, width, 1, 1), (width, width, 3, stride), (width, outer, 1, 1)]
        if not deep:
            shapes = [(inner, width, 3, stride), (width, width, 3, 1)]
        layers: list[nn.Module] = []
        for i, o, size, step in shapes:
            layers += [*convolution_with_norm(i, o, size, step), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        same = stride == 1 and inner == outer
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(*convolution_with_norm(inner, outer, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.body(x) + self.shortcut(x))


def convolution_with_norm(inner: int, outer: int, size: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inner, outer, size, stride, size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outer)]


def resnet(blocks: tuple[int, ...], deep: bool) -> nn.Module:
    layers = [*convolution_with_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inner, out = 64, 4 if deep else 1
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(inner, width, stride, deep))
            inner = width * out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 1000))


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    inner = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inner, width, 3, padding=1), nn.ReLU()]
            inner = width
        layers.append(nn.MaxPool2d(2))
    top = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *top, nn.Dropout(), nn.Linear(4096, 1000))


class Attention(nn.Module):
    def __init__(self, width: int, fused: bool, causal: bool) -> None:
        super().__init__()
        count = 1 if fused else 3
        self.into = nn.ModuleList(nn.Linear(width, 3 * width // count) for _ in range(count))
        self.out, self.causal = nn.Linear(width, width), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.cat([layer(x) for layer in self.into], -1).chunk(3, -1)
        heads = [part.unflatten(-1, (12, -1)).transpose(1, 2) for part in (q, k, v)]
        mixed = scaled_dot_product_attention(*heads, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """A layer of GPT-2 if ``causal`` (norms first, one matrix for q, k and v); else of BERT."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.attention = Attention(width, causal, causal)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        if self.causal:
            x = x + self.attention(first(x))
            return x + self.wide(second(x))
        x = first(x + self.attention(x))
        return second(x + self.wide(x))


class Transformer(nn.Module):
    def __init__(self, words: int, positions: int, causal: bool) -> None:
        super().__init__()
        width = 768
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.kinds = None if causal else nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Layer(width, causal) for _ in range(12)))
        self.pooler = None if causal else nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        if self.pooler is None or self.kinds is None:
            return linear(self.norm(self.layers(x)), self.words.weight).flatten(0, 1)
        return self.pooler(self.layers(self.norm(x + self.kinds.weight[0]))[:, 0]).tanh()


class Model(NamedTuple):
    """A model's constructor, the shape of its samples, and its batch size."""

    make: Callable[[], nn.Module]
    words: int
    length: int
    batch: int


MODELS = {
    "resnet18": Model(lambda: resnet((2, 2, 2, 2), deep=False), 0, 224, 64),
    "resnet50": Model(lambda: resnet((3, 4, 6, 3), deep=True), 0, 224, 64),
    "vgg16": Model(vgg16, 0, 224, 64),
    "bert-base": Model(lambda: Transformer(30522, 512, causal=False), 30522, 128, 32),
    "gpt2-small": Model(lambda: Transformer(50257, 1024, causal=True), 50257, 1024, 8),
}


def sample_of(model: Model, device: str) -> tuple[Tensor, Tensor]:
    """A random batch and its targets."""
    if not model.words:
        x = torch.randn(model.batch, 3, model.length, model.length, device=device)
        return x, torch.randint(1000, (model.batch,), device=device)
    tokens = torch.randint(model.words, (model.batch, model.length), device=device)
    causal = model.length == 1024
    return tokens, tokens.flatten() if causal else tokens[:, 0] % 768


def seconds_per_sample(model: Model, device: str) -> float:
    net = model.make().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x, y = sample_of(model, device)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()

    def timed() -> float:
        start_s = time.perf_counter()
        for _ in range(STEPS):
            step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return (time.perf_counter() - start_s) / STEPS / model.batch

    timed()
    return statistics.median(timed() for _ in range(ROUNDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    on_gpu = options.device.startswith("cuda")
    print(torch.cuda.get_device_name() if on_gpu else "cpu", "torch", torch.__version__)
    for name in options.models.split(","):
        model = MODELS[name]
        print(
            f"{name:<12} batch {model.batch:<3} {seconds_per_sample(model, options.device):.3e} s"
        )


if __name__ == "__main__":
    main()
