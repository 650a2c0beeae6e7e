"""Trainings that the battery of laws runs on every transport; they log what happened."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline as pl
from paceline.lab.faulttest.payload import Size, payload

BATCH, STEPS, WORKERS = 3, 7, 4
UNEVEN = (0, 1, 7, 100)


def net_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def optimizer_of(name: str, net: nn.Module) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(net.parameters(), lr=0.01)
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)


def digest(net: nn.Module) -> str:
    return hashlib.sha256(flat(net).numpy().tobytes()).hexdigest()[:16]


def flat(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()]).cpu()


def learn(net: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    net(x).square().sum(1).mean().backward()
    optimizer.step()


def train_equal(worker: pl.Worker) -> None:
    """Every worker has 7 batches of a fixed shard; momentum SGD; logs what the laws need."""
    net = net_of(100 + worker.rank)
    net, paced = worker.setup(net, optimizer_of("sgd", net))
    samples = torch.arange(BATCH * STEPS * WORKERS)
    x = torch.stack([(samples * k % 7 - 3).float() / 3 for k in (1, 2, 3, 5)], dim=1)
    loader = DataLoader(TensorDataset(samples, x), batch_size=BATCH, shuffle=True)
    worker.log(what="setup", digest=digest(net))
    taken: list[int] = []
    for numbers, inputs in worker.setup_dataloaders(loader, data="static"):
        taken += numbers.tolist()
        learn(net, paced, inputs)
    told = payload(worker.strategy, Size(STEPS, flat(net).nbytes, worker.size))
    worker.finish()
    worker.log(
        what="end",
        digest=digest(net),
        taken=",".join(map(str, taken)),
        payload=told,
        finite=bool(torch.isfinite(flat(net)).all()),
    )


class Stream(IterableDataset[Tensor]):
    """A stream of ``batches`` batches of one worker."""

    def __init__(self, rank: int, batches: int) -> None:
        self._rank, self._samples = rank, batches * BATCH

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self._rank)
        for number in range(self._samples):
            yield torch.cat([torch.randn(4, generator=generator), torch.tensor([float(number)])])


def train_uneven(worker: pl.Worker) -> None:
    """Workers with 0, 1, 7 and 100 batches of their own; Adam."""
    net = net_of(worker.rank)
    net, paced = worker.setup(net, optimizer_of("adam", net))
    stream = Stream(worker.rank, UNEVEN[worker.rank])
    taken: list[int] = []
    for batch in worker.setup_dataloaders(DataLoader(stream, batch_size=BATCH), data="static"):
        taken += batch[:, 4].int().tolist()
        learn(net, paced, batch[:, :4])
    worker.finish()
    worker.log(digest=digest(net), taken=len(taken), once=taken == list(range(len(taken))))


def train_alone(worker: pl.Worker) -> None:
    """Train as the only worker, and then with the plain loop, to compare both."""
    digests = []
    for paced in (True, False):
        net = net_of(3).to(worker.device)
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
        if paced:
            net, optimizer = worker.setup(net, optimizer)
        for step in range(STEPS):
            learn(net, optimizer, torch.full((BATCH, 4), 0.1 * step, device=worker.device))
        if paced:
            worker.finish()
        digests.append(digest(net))
    worker.log(digest=digests[0], plain=digests[1])
