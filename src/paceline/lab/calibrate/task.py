"""The built-in task as the calibration trains it: steps without evaluation."""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.lab.tasks.fashion import load_images, make_loader, make_model
from paceline.lab.tasks.recipe import MOMENTUM, batch_of
from paceline.training.worker import Worker

RATE = 1e-3
"""So small that no method diverges: only the time matters."""


def train(
    worker: Worker, model: str = "cnn", batch_size: int | None = None, steps: int = 100
) -> None:
    """Train for ``steps`` steps.

    Args:
        worker: this worker.
        model: ``cnn``, ``mlp``, or ``wide`` for an MLP of 1.9 million parameters.
        batch_size: samples in a worker's batch; by default 128 / workers.
        steps: the number of steps of this worker.
    """
    torch.manual_seed(worker.seed)
    net: nn.Module = make_wide() if model == "wide" else make_model(model)
    sgd: Any = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    net, sgd = worker.setup(net, sgd)
    loader = make_loader(load_images(), batch_size or batch_of(worker.size))
    batches = chain.from_iterable(repeat(worker.setup_dataloaders(loader)))
    for _ in range(steps):
        x, y = next(batches)
        sgd.zero_grad()
        cross_entropy(net(x), y).backward()
        sgd.step()


def make_wide() -> nn.Module:
    """An MLP of 1.86 million parameters."""
    layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(1024, 10))
