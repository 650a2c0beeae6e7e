"""Trainings with BatchNorm whose workers see different data."""

from __future__ import annotations

import hashlib
import os
import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

import paceline as pl


def images(seed: int) -> Tensor:
    """Samples that drift from first to last; each column has its own mean and variance."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(96, 6, generator=generator)
    drift = torch.linspace(-2, 2, 96)[:, None]
    return x * torch.arange(1, 7) + drift * torch.arange(6)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))


def statistics(net: nn.Module) -> dict[str, Tensor]:
    """Copies of the running statistics of the first layer."""
    norm: Any = net.get_submodule("0")
    named = {"mean": norm.running_mean, "var": norm.running_var, "count": norm.num_batches_tracked}
    return {name: value.clone() for name, value in named.items()}


def begin(worker: pl.Worker, data: Any = "auto") -> tuple[nn.Module, Any, Any]:
    """A model, its optimizer, and the batches of this worker."""
    net = network()
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
    loader: DataLoader[Any] = DataLoader(images(0), batch_size=4)
    return net, sgd, worker.setup_dataloaders(loader, data=data)


def learn(net: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def train(worker: pl.Worker, victim: int = -1) -> None:
    """Train, and log the answer's statistics; the victim is killed when it shares its buffers."""
    net, sgd, batches = begin(worker, data="static")
    taken = 0
    for x in batches:
        learn(net, sgd, x)
        taken += 1
    own = statistics(net)
    worker._session.measuring().barrier()
    with worker.answer(net):
        inside = statistics(net)["mean"].sum().item()
    worker._session.measuring().barrier()
    if worker.rank == victim:
        worker._session.buffers.rest.share = lambda weight: os.kill(os.getpid(), signal.SIGKILL)
    worker.finish()
    content = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
    worker.log(
        digest=hashlib.sha256(content).hexdigest()[:16],
        count=int(statistics(net)["count"]),
        taken=taken,
        inside=round(inside, 4),
        unlike=not torch.equal(own["mean"], statistics(net)["mean"]),
    )
