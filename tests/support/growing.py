"""A training whose every batch is recorded, for runs in which workers come and go."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

SAMPLES = 96
EPOCHS = 3
BATCH = 4
LR = 0.05


def pairs() -> TensorDataset:
    """Inputs, targets, and the number of each sample."""
    random = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 3, generator=random, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    return TensorDataset(x, y, torch.arange(SAMPLES))


def network() -> nn.Linear:
    net = nn.Linear(3, 1, dtype=torch.float64)
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)


def falling(sgd: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(sgd, 1, 0.8)


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).square().mean()


def train(worker: pl.Worker, epochs: int = EPOCHS, processes: int = 0, until: int = 0) -> None:
    """Train, and log the samples of each step; with ``until``, a newcomer ends it after its steps.

    A worker that was started later, or again, has ``until`` steps of its own then.
    """
    net = network()
    net, sgd = worker.setup(net, optimizer_of(net))
    came = worker.comm.members.incarnation(worker.rank) > 1
    schedule = falling(sgd)
    worker.track(schedule=schedule)
    plain = DataLoader(pairs(), batch_size=BATCH, shuffle=True, num_workers=processes)
    loader, own = worker.setup_dataloaders(plain, epochs=epochs), 0
    for epoch in range(epochs):
        for x, y, numbers in loader:
            sgd.zero_grad()
            loss_of(net, x, y).backward()
            sgd.step()
            if worker.catching_up:
                continue
            own += 1
            samples = " ".join(str(number) for number in numbers.tolist())
            worker.log(epoch=epoch, samples_of_step=samples, lr=schedule.get_last_lr()[0])
            if came and own == until:
                worker.stop_all()
        schedule.step()
        if worker.stopping:
            break
    worker.finish()
    worker.log(final=" ".join(map(repr, flat(net).tolist())))


def flat(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def finals(run: pl.Result) -> dict[int, Tensor]:
    """The model that each worker ended with."""
    texts = {m["rank"]: str(m["final"]) for m in run.metrics if "final" in m}
    return {
        rank: torch.tensor([float(part) for part in text.split()], dtype=torch.float64)
        for rank, text in texts.items()
    }


def steps(run: pl.Result) -> dict[int, dict[int, list[int]]]:
    """The samples that each worker had in each step, by step and rank."""
    found: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
    for record in counted(run):
        found[record["step"]][record["rank"]] = samples_of(record)
    return found


def seen(run: pl.Result) -> dict[int, Counter[int]]:
    """How often each sample was trained on in each epoch."""
    found: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for record in counted(run):
        found[int(record["epoch"])].update(samples_of(record))
    return found


def counted(run: pl.Result) -> list[dict[str, Any]]:
    """The records of the steps that count.

    A worker that is killed between two steps may have made the first one without the others: what
    they needed for it was still on its way. Then they make that step without the worker, and its
    samples come again.
    """
    records = [m for m in run.metrics if "samples_of_step" in m]
    lost = {event["rank"] for event in run.events if event["event"] == "lost"}
    return [r for r in records if not (r["rank"] in lost and _came_again(r, records))]


def _came_again(record: dict[str, Any], records: list[dict[str, Any]]) -> bool:
    later = [r for r in records if r["epoch"] == record["epoch"] and r["step"] > record["step"]]
    return {*samples_of(record)} <= {sample for r in later for sample in samples_of(r)}


def samples_of(record: dict[str, Any]) -> list[int]:
    return [int(text) for text in str(record["samples_of_step"]).split()]


def plain_training(run: pl.Result) -> Tensor:
    """What one plain optimizer makes of the samples that all workers had together in each step."""
    net, data = network(), pairs()
    sgd = optimizer_of(net)
    schedule = falling(sgd)
    epoch_of = {m["step"]: int(m["epoch"]) for m in run.metrics if "samples_of_step" in m}
    epoch = 0
    for step, parts in sorted(steps(run).items()):
        while epoch < epoch_of[step]:
            schedule.step()
            epoch += 1
        numbers = [number for rank in sorted(parts) for number in parts[rank]]
        x, y, _ = data[numbers]
        sgd.zero_grad()
        loss_of(net, x, y).backward()
        sgd.step()
    return flat(net)
