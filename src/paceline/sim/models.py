"""Models whose bytes and times a simulation can charge while it trains a smaller network.

Parameters and tensors are those of torchvision (``resnet18``, ``resnet50``, ``vgg16``) and
transformers (``bert-base-uncased``, ``gpt2``), in float32. Times were measured with
``benchmarks/model_steps.py``: forward, backward and SGD step, median of 5 rounds of 10 steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.common.options import at_least, positive
from paceline.errors import unknown

if TYPE_CHECKING:
    from paceline.sim.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class StandsFor:
    """The model whose bytes and times a run charges; it trains another, smaller network.

    Args:
        model: its name.
        bytes: of its parameters; the bytes of each message are scaled in proportion.
        sample_s: forward and backward of one sample, in place of the cluster's.
        tensors: its number of tensors, for collectives with one call for each.
        source: where the numbers come from.
    """

    model: str
    bytes: int
    sample_s: float
    tensors: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        at_least("bytes", self.bytes, 1)
        positive("sample_s", self.sample_s)
        at_least("tensors", self.tensors, 1)


def _measured(model: str, parameters: int, tensors: int, sample_s: float, what: str) -> StandsFor:
    source = f"{what}, float32 with TF32, on one NVIDIA H200 with torch 2.11"
    return StandsFor(
        model=model, bytes=4 * parameters, tensors=tensors, sample_s=sample_s, source=source
    )


MODELS = {
    known.model: known
    for known in (
        _measured("resnet18", 11_689_512, 62, 2.08e-4, "64 images of 224 x 224"),
        _measured("resnet50", 25_557_032, 161, 5.00e-4, "64 images of 224 x 224"),
        _measured("vgg16", 138_357_544, 32, 7.18e-4, "64 images of 224 x 224"),
        _measured("bert-base", 109_482_240, 199, 7.21e-4, "32 sequences of 128 tokens"),
        _measured("gpt2-small", 124_439_808, 148, 7.89e-3, "8 sequences of 1024 tokens"),
    )
}


def as_model(cluster: Cluster, name: str | None) -> Cluster:
    """The same cluster, charging the bytes and times of a named model."""
    if name is None:
        return cluster
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return dataclasses.replace(cluster, stands_for=MODELS[name])


def stands_for_note(model: str) -> str:
    """The note that every output of such a run shows.

    >>> stands_for_note("resnet50")
    'times and bytes as of resnet50; gradients of the network that was trained'
    """
    return f"times and bytes as of {model}; gradients of the network that was trained"
