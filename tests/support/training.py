"""Small trainings in float64 with known gradients, and oracles to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import paceline as pl
from paceline.sim.cluster import Cluster, Compute


@dataclass
class Problem:
    """A random network, and random batches by rank and step."""

    seed: int
    sizes: tuple[int, ...] = (5, 4, 3)
    batch: int = 3
    steps: int = 7
    dtype: torch.dtype = torch.float64
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        default=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    ragged: bool = False
    """Whether batches have from 1 to ``batch`` samples, by rank and step."""
    replicas: dict[int, Tensor] = field(default_factory=dict)
    """The parameters of each worker just before it finished, of the last run."""

    def model(self) -> nn.Module:
        generator = torch.Generator().manual_seed(self.seed)
        layers: list[nn.Module] = []
        for width, height in zip(self.sizes, self.sizes[1:], strict=False):
            layers += [nn.Linear(width, height, dtype=self.dtype), nn.Tanh()]
        net = nn.Sequential(*layers)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        return net

    def batch_of(self, rank: int, step: int, samples: int | None = None) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + rank * 1009 + step)
        shape = (samples or self.batch, self.sizes[0])
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
        target = (shape[0], self.sizes[-1])
        y = torch.randn(target, generator=generator, dtype=torch.float64).to(self.dtype)
        return x, y

    def samples(self, rank: int, step: int) -> int:
        """The number of samples in a batch."""
        return 1 + (7 * rank + 3 * step + self.seed) % self.batch if self.ragged else self.batch

    def mean(self, values: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
        """The mean, weighted by samples."""
        weighted = [n * v for n, v in zip(samples, values, strict=True)]
        return sum(weighted[1:], start=weighted[0]) / sum(samples)

    def loss(self, net: nn.Module, rank: int, step: int) -> Tensor:
        x, y = self.batch_of(rank, step, self.samples(rank, step))
        return nn.functional.mse_loss(net(x), y)

    def run(
        self, strategy: Any, workers: int, steps: Callable[[int], int] | None = None, **options: Any
    ):
        """Train with a strategy on simulated workers; return the final models and the result."""
        ends: dict[int, Tensor] = {}

        def train(worker: pl.Worker) -> None:
            net = self.model()
            optimizer = self.optimizer(net.parameters())
            net, paced = worker.setup(net, optimizer)
            scheduler = self.schedule(paced) if self.schedule else None
            for step in range(steps(worker.rank) if steps else self.steps):
                paced.zero_grad()
                if self.ragged:
                    worker.samples(self.samples(worker.rank, step))
                self.loss(net, worker.rank, step).backward()
                paced.step()
                if scheduler is not None:
                    scheduler.step()
            self.replicas[worker.rank] = flat(net)
            worker.finish()
            ends[worker.rank] = flat(net)

        options.setdefault("cluster", "ideal")
        result = pl.simulate(train, workers=workers, strategy=strategy, **options)
        return [ends[rank] for rank in sorted(ends)], result

    def run_alone(self) -> Tensor:
        """Train with the plain optimizer, without Paceline."""
        net = self.model()
        optimizer = self.optimizer(net.parameters())
        scheduler = self.schedule(optimizer) if self.schedule else None
        for step in range(self.steps):
            optimizer.zero_grad()
            self.loss(net, 0, step).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return flat(net)


def beat(*slowness: float) -> Cluster:
    """A cluster on which only steps take time: as many seconds as each rank's slowness.

    By default a step takes a second and a little more with each rank: in each round the ranks
    finish in order.
    """
    factors = slowness or tuple(1 + 1e-6 * rank for rank in range(64))
    return Cluster(compute=Compute(step_s=1.0, factors=factors))


def flat(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()]).clone()


def load_flat(net: nn.Module, vector: Tensor) -> None:
    start = 0
    with torch.no_grad():
        for parameter in net.parameters():
            end = start + parameter.numel()
            parameter.copy_(vector[start:end].view_as(parameter))
            start = end


def gradient_at(problem: Problem, x: Tensor, rank: int, step: int) -> Tensor:
    net = problem.model()
    load_flat(net, x)
    problem.loss(net, rank, step).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in net.parameters()])
