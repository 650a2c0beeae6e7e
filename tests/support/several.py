"""Trainings by several optimizers: of the matrices of a network, and of its other parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import paceline as pl
from support.training import Problem, beat, flat


class Normed(Optimizer):
    """Like Muon, steps a matrix as a whole: its gradient, with momentum, has the norm 1."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() != 2:
                    raise ValueError(f"{p.dim()} dimensions must be 2")
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(group["momentum"]).add_(p.grad)
                p.sub_(m / (m.norm() + 1e-9), alpha=group["lr"])


def split(net: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = [*net.parameters()]
    return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]


def normed_and_adamw(net: nn.Module) -> tuple[Optimizer, Optimizer]:
    matrices, others = split(net)
    return Normed(matrices), AdamW(others, lr=0.02, weight_decay=0.1)


def two_sgds(net: nn.Module) -> tuple[Optimizer, Optimizer]:
    matrices, others = split(net)
    return SGD(matrices, lr=0.1, nesterov=True, momentum=0.8), SGD(others, lr=0.03, momentum=0.5)


def two_plain_sgds(net: nn.Module) -> tuple[Optimizer, Optimizer]:
    matrices, others = split(net)
    return SGD(matrices, lr=0.1), SGD(others, lr=0.03)


@dataclass
class Pair:
    """A small training of one network by two optimizers, on workers or by a plain script."""

    problem: Problem = field(default_factory=lambda: Problem(seed=5))
    optimizers: Callable[[nn.Module], tuple[Optimizer, ...]] = normed_and_adamw
    set_to_none: bool = True

    def learn(self, net: nn.Module, optimizers: Any, loss: Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(self.set_to_none)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    def alone(self, workers: int) -> Tensor:
        """What a plain script ends with, on the batches of so many workers."""
        net = self.problem.model()
        optimizers = self.optimizers(net)
        for step in range(self.problem.steps):
            samples = [self.problem.samples(rank, step) for rank in range(workers)]
            losses = [self.problem.loss(net, rank, step) for rank in range(workers)]
            self.learn(net, optimizers, self.problem.mean(losses, samples))
        return flat(net)

    def run(self, strategy: str, workers: int, **how: Any) -> tuple[list[Tensor], pl.Result]:
        ends: dict[int, Tensor] = {}

        def train(worker: pl.Worker) -> None:
            net = self.problem.model()
            net, optimizers = worker.setup(net, self.optimizers(net))
            for step in range(self.problem.steps):
                loss = self.problem.loss(net, worker.rank, step)
                if self.problem.ragged:
                    samples = self.problem.samples(worker.rank, step)
                    worker._session.stepper.drew(samples, self.problem.batch)
                self.learn(net, optimizers, loss)
            worker.finish()
            ends[worker.rank] = flat(net)

        how.setdefault("cluster", beat())
        result = pl.simulate(train, workers=workers, strategy=strategy, **how)
        return [ends[rank] for rank in sorted(ends)], result


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
