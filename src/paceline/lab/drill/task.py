"""What the drill trains: the built-in task, for as long as it takes until a rank is back."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import cross_entropy

from paceline.lab.tasks.fashion import load_images, log_test, make_loader, make_model
from paceline.lab.tasks.recipe import MOMENTUM, batch_of, learning_rate
from paceline.training.worker import Worker

MODEL = "mlp"
POISONED_FROM = 100
MOST_S = 120.0
"""For how long a rank is waited for, on the run's clock."""


def train(
    worker: Worker, epochs: int, lives: dict[str, int] | None = None, poisoned: int | None = None
) -> None:
    """Train for some epochs, and go on until the ranks in ``lives`` are here in that life.

    The gradients of a ``poisoned`` worker are not finite from its step 100 on.
    """
    images = load_images()
    torch.manual_seed(worker.seed)
    net: torch.nn.Module = make_model(MODEL)
    rate = learning_rate(worker.strategy, MODEL, worker.size)
    sgd: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=MOMENTUM)
    net, sgd = worker.setup(net, sgd)
    batches = worker.setup_dataloaders(make_loader(images, batch_of(worker.size)))
    epoch = 0
    while epoch < epochs or _misses(worker, lives or {}):
        for x, y in batches:
            sgd.zero_grad()
            cross_entropy(net(x), y).backward()
            if worker.rank == poisoned and worker.steps >= POISONED_FROM:
                for parameter in net.parameters():
                    parameter.grad = torch.full_like(parameter, math.nan)
            sgd.step()
        epoch += 1
    worker.finish()
    log_test(worker, net, images, epoch - 1)


def _misses(worker: Worker, lives: dict[str, int]) -> bool:
    comm = worker._session.world  # of servers, too
    alive = comm.alive()
    back = all(int(rank) in alive and comm.life(int(rank)) >= life for rank, life in lives.items())
    return not back and comm.now() < MOST_S
