"""Runs that are interrupted and resumed, to compare with runs that are not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

SAMPLES, WIDTH = 60, 5


class Interrupted(Exception):
    """Ends a run before its end."""


def pairs() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.ReLU(), nn.Linear(6, 2)
    )


def train(worker: pl.Worker, epochs: int = 4, pause_s: float = 0.0) -> None:
    """A loop with every kind of state: momentum, a scheduler, statistics and random numbers."""
    net = network()
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5))
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 7, gamma=0.8)
    worker.track(schedule=schedule)
    loader = worker.setup_dataloaders(DataLoader(pairs(), batch_size=3, shuffle=True))
    loss = None
    for epoch in range(epochs):
        for x, y in loader:
            sgd.zero_grad()
            loss = F.cross_entropy(net(x + 0.1 * torch.randn_like(x)), y)
            loss.backward()
            sgd.step()
            schedule.step()
            time.sleep(pause_s)
        worker.log(epoch=epoch, lr=schedule.get_last_lr()[0])
    worker.finish()
    worker.log(loss=loss)


class Interruptible:
    """A training function that raises at the step ``at`` of worker 0, if that is set."""

    def __init__(self, body: Any = train) -> None:
        self._body, self.at, self.ends = body, None, {}

    def __call__(self, worker: pl.Worker, **arguments: Any) -> None:
        worker.setup_dataloaders = self._watched(worker, worker.setup_dataloaders)
        self._body(worker, **arguments)
        assert worker._session.model is not None
        self.ends[worker.rank] = {
            k: v.clone() for k, v in worker._session.model.state_dict().items()
        }

    def _watched(self, worker, setup):
        def watch(loader):
            for batch in loader:
                if worker.rank == 0 and not worker.catching_up and worker.steps == self.at:
                    raise Interrupted
                yield batch

        class Watched:
            def __init__(self, loader):
                self.loader = loader

            def __iter__(self):
                return watch(self.loader)

        return lambda loader, **options: Watched(setup(loader, **options))

    def run(self, out: Any, at: int | None = None, **options: Any) -> pl.Result | None:
        """Simulate; return None if the run was interrupted."""
        self.at, self.ends = at, {}
        try:
            return pl.simulate(self, out=out, **options)
        except pl.WorkerFailed as error:
            assert Interrupted.__name__ in error.summary, error
            return None


def same_models(one: dict[int, dict[str, Tensor]], other: dict[int, dict[str, Tensor]]) -> bool:
    """Whether each worker has bit-equal models in both."""
    if one.keys() != other.keys():
        return False
    return all(
        torch.equal(one[rank][name], other[rank][name]) for rank in one for name in one[rank]
    )


PAUSE_S = 0.01
HOW: dict[str, Any] = {"workers": 3, "seed": 2, "checkpoint_steps": 3}
"""The options of real runs that are killed."""


def train_until(worker: pl.Worker) -> None:
    """Train for some epochs, and until what the environment asks for has happened."""
    net = network()
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    loader = worker.setup_dataloaders(DataLoader(pairs(), batch_size=3, shuffle=True))
    epoch = 0
    while epoch < 4 or not _has_happened(worker, os.environ[UNTIL]):
        for x, y in loader:
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            sgd.step()
        epoch += 1
    worker.finish()


UNTIL = "PACELINE_TEST_UNTIL"


def _has_happened(worker: pl.Worker, what: str) -> bool:
    """Whether all workers are here, or the newest checkpoint in a folder is one without rank 0."""
    if what == "all are here":
        return worker.size == len(worker.strategy.live_workers())
    latest = Path(what, "latest")
    newest = Path(what, latest.read_text().strip()) if latest.exists() else None
    return newest is not None and newest.is_dir() and not list(newest.glob("rank0.*"))


def launch(strategy: str, out: str, resume: bool) -> pl.Result:
    """Launch a run that takes a while; also called by ``python -c``."""
    arguments = {"pause_s": PAUSE_S}
    return pl.launch(train, strategy=strategy, out=out, resume=resume, arguments=arguments, **HOW)
