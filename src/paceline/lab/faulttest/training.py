"""The training of a fault test: a few parameters in double precision."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.lab.faulttest.schedule import BAD, Schedule
from paceline.training.worker import Worker

NUMEL = 6
BATCH = 2
EPOCHS = 2


class Quadratic(nn.Module):
    """The loss ``curvature * |x - target|^2 / 2``; calling it with a target sets the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(NUMEL - 4, dtype=torch.float64))

    def forward(self, target: Tensor) -> None:
        """Set the gradients without autograd, which would take most of the time of a small run."""
        self.first.grad = self.first.detach() - target[:4]
        self.second.grad = 0.5 * (self.second.detach() - target[4:])


class ZeroGradients(Quadratic):
    """A quadratic whose gradients are zero: only exchanges between workers move it."""

    def forward(self, target: Tensor) -> None:
        self.first.grad = torch.zeros_like(self.first)
        self.second.grad = torch.zeros_like(self.second)


class TinyNetwork(nn.Module):
    """One hidden neuron, trained by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 1)).double()

    def forward(self, target: Tensor) -> None:
        (self.layers(target[:3]) - target[3]).square().sum().backward()


MODELS: dict[str, type[nn.Module]] = {
    "quadratic": Quadratic,
    "network": TinyNetwork,
    "still": ZeroGradients,
}


def model_of(schedule: Schedule, rank: int) -> nn.Module:
    """A model that differs on each rank: the method must make them equal."""
    model = MODELS[schedule.objective]()
    random = torch.Generator().manual_seed(rank)
    for parameter in model.parameters():
        parameter.detach().uniform_(-1, 1, generator=random)
    return model


def optimizer_of(schedule: Schedule, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the schedule names."""
    parameters, lr = model.parameters(), schedule.lr
    if schedule.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr)
    momentum = 0.9 if schedule.optimizer == "momentum" else 0.0
    decay = 0.1 if schedule.optimizer == "decay" else 0.0
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=decay)


def targets(count: int) -> Tensor:
    """The target of each sample; the same in every run."""
    random = torch.Generator().manual_seed(7)
    return torch.randn(count, NUMEL, generator=random, dtype=torch.float64)


_TARGETS = targets(512)


def train(worker: Worker, schedule: Schedule) -> None:
    """Run the training of ``schedule`` on one worker."""
    model = model_of(schedule, worker.rank)
    model, optimizer = worker.setup(model, optimizer_of(schedule, model))
    if schedule.objective == "still" and worker.comm.members.incarnation(worker.rank) == 1:
        for parameter in model.parameters():
            parameter.detach().add_(schedule.data_index(worker.rank))
    bad = schedule.bad_steps if worker.rank == schedule.bad_rank else ()
    learn(schedule, model, optimizer, batches(worker, schedule), bad)
    worker.finish()


def learn(
    schedule: Schedule,
    model: nn.Module,
    optimizer: Any,
    data: Iterable[tuple[int, Tensor]],
    bad: Container[int] = (),
) -> None:
    """The plain training loop; the gradients of the steps in ``bad`` are spoiled."""
    for step, target in data:
        if schedule.falling:
            optimizer.param_groups[0]["lr"] = schedule.lr / (1 + step / schedule.steps)
        optimizer.zero_grad()
        model(target)
        if step in bad:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, BAD[schedule.bad_kind])
        optimizer.step()


def samples_of(schedule: Schedule) -> int:
    """How many samples the loader of a schedule has."""
    return max(1, schedule.steps * schedule.workers * BATCH // EPOCHS - schedule.uneven)


def own_batches(schedule: Schedule, rank: int) -> Iterator[tuple[int, Tensor]]:
    """The numbered batches of a worker in a run without a loader."""
    for step in range(schedule.steps_of(rank)):
        yield step, _TARGETS[(31 * schedule.data_index(rank) + step) % len(_TARGETS)]


def batches(worker: Worker, schedule: Schedule) -> Iterator[tuple[int, Tensor]]:
    """The numbered batches of this worker, in order."""
    if schedule.data == "steps":
        yield from own_batches(schedule, worker.rank)
        return
    dataset = TensorDataset(_TARGETS[: samples_of(schedule)])
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    shared = worker.setup_dataloaders(loader, data=schedule.data)
    for _ in range(EPOCHS):
        for (batch,) in shared:
            yield worker.steps, batch.mean(0)
