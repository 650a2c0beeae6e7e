"""The training of the drill: the built-in task, until the ranks that it waits for are back."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from paceline.common.files import write_private
from paceline.lab.tasks.fashion import load_images, log_test, make_loader, make_model
from paceline.lab.tasks.recipe import MOMENTUM, batch_of, learning_rate
from paceline.training.worker import Worker

MODEL = "mlp"
POISONED_FROM = 100
PATIENCE_S = 120.0
"""How long the training waits for a rank, on the run's clock."""


def train(
    worker: Worker,
    epochs: int,
    incarnations: dict[str, int] | None = None,
    poisoned: int | None = None,
    least_s: float = 0.0,
    began: str | None = None,
) -> None:
    """Train for some epochs, and then until the ranks in ``incarnations`` have reached them.

    All train for at least ``least_s``. Where they wait for that or for ranks, the worker that leads
    ends the training for all: others may have begun later. The gradients of a ``poisoned`` worker
    are not finite from its step 100 on. After its first step, rank 0 writes the monotonic time at
    which the run's clock was 0 to the file ``began``.
    """
    images = load_images()
    torch.manual_seed(worker.seed)
    net: torch.nn.Module = make_model(MODEL)
    rate = learning_rate(worker.strategy, MODEL, worker.size)
    sgd: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=MOMENTUM)
    net, sgd = worker.setup(net, sgd)
    batches = worker.setup_dataloaders(make_loader(images, batch_of(worker.size)))
    epoch, until_s, ends_all = 0, _now_s(worker) + least_s, bool(least_s or incarnations)
    while not worker.stopping:
        for x, y in batches:
            sgd.zero_grad()
            cross_entropy(net(x), y).backward()
            if worker.rank == poisoned and worker.steps >= POISONED_FROM:
                for parameter in net.parameters():
                    parameter.grad = torch.full_like(parameter, math.nan)
            sgd.step()
            if began is not None and worker.rank == 0 and not worker.catching_up:
                write_private(Path(began), str(time.monotonic() - _now_s(worker)))
                began = None
        epoch += 1
        if epoch < epochs or _now_s(worker) < until_s or _waits_for(worker, incarnations or {}):
            continue
        if not ends_all:
            break
        if worker.leads:
            worker.stop_all()
    worker.finish()
    log_test(worker, net, images, epoch - 1)


def _now_s(worker: Worker) -> float:
    return worker._session.all_ranks.clock.now()


def _waits_for(worker: Worker, incarnations: dict[str, int]) -> bool:
    comm = worker._session.all_ranks  # it includes servers
    alive = comm.members.alive()
    reached = all(
        int(rank) in alive and comm.members.incarnation(int(rank)) >= number
        for rank, number in incarnations.items()
    )
    return not reached and _now_s(worker) < PATIENCE_S
