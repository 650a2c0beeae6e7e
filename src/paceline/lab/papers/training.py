"""The training functions of the claims' runs."""

from __future__ import annotations

import math
from functools import cache
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.lab.papers.full.setup import MOST_WORKERS, SETTINGS
from paceline.lab.papers.tasks import load, make_network
from paceline.lab.tasks.cifar import augment
from paceline.lab.tasks.fashion import Images, evaluate, make_loader
from paceline.training.worker import Worker

EVALUATIONS = 2
"""How often an epoch the models are evaluated."""
RECORDS = 24
"""How often in a run of the full form."""


def train(worker: Worker, task: str, epochs: int, lr: float, batch_size: int) -> None:
    """Train with plain SGD; worker 0 logs the accuracy of the answer and of its own replica."""
    samples = load(task)
    torch.manual_seed(worker.seed)
    net = make_network("mlp")
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=lr))
    batches = worker.setup_dataloaders(make_loader(samples, batch_size), epochs=epochs)
    evaluated = 0
    for _ in range(epochs):
        for x, y in batches:
            sgd.zero_grad()
            cross_entropy(net(x), y).backward()
            sgd.step()
            due = math.floor(worker.progress * epochs * EVALUATIONS + 1e-9)
            if worker.rank == 0 and evaluated < due < epochs * EVALUATIONS:
                evaluated = due
                log_accuracy(worker, net, samples)
    replica = evaluate(net, samples, worker.device) if worker.rank == 0 else None
    worker.finish()
    if replica is not None:
        log_accuracy(worker, net, samples, replica)


def train_long(
    worker: Worker,
    task: str,
    epochs: int,
    lr: float,
    momentum: float,
    data: str | None = None,
) -> None:
    """Train as the full form of the claims does, with a rate that rises, and falls in steps.

    Worker 0 logs the accuracy of the answer and of its own replica, and how far they are apart.
    """
    setting, samples = SETTINGS[task], even(load(task, data), SETTINGS[task].batch_size)
    torch.manual_seed(worker.seed)
    net = make_network(setting.network)
    decay = setting.recipe.weight_decay
    sgd = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
    net, paced = worker.setup(net, sgd)
    batches = worker.setup_dataloaders(make_loader(samples, setting.batch_size), epochs=epochs)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        paced, lambda _: setting.recipe.share_of_rate(worker.progress)
    )
    evaluated = 0
    for _ in range(epochs):
        for x, y in batches:
            paced.zero_grad()
            cross_entropy(net(augment(x) if setting.recipe.augments else x), y).backward()
            paced.step()
            schedule.step()
            due = math.floor(worker.progress * RECORDS + 1e-9)
            if worker.rank == 0 and evaluated < due < RECORDS:
                evaluated = due
                log_accuracy(worker, net, samples, distance=distance_from_answer(worker, net))
    replica = evaluate(net, samples, worker.device) if worker.rank == 0 else None
    worker.finish()
    if replica is not None:
        log_accuracy(worker, net, samples, replica)


def even(samples: Images, batch_size: int) -> Images:
    """As many training samples as :data:`MOST_WORKERS` take in whole batches of one size."""
    share = MOST_WORKERS * batch_size
    count = len(samples.x_train) // share * share
    return samples._replace(x_train=samples.x_train[:count], y_train=samples.y_train[:count])


def distance_from_answer(worker: Worker, net: nn.Module) -> float:
    """The distance of this worker's model from the answer, as a share of the answer's length."""
    own = torch.cat([p.detach().flatten() for p in net.parameters()])
    with worker.answer():
        answer = torch.cat([p.detach().flatten() for p in net.parameters()])
    return float((own - answer).norm() / answer.norm())


def log_accuracy(
    worker: Worker,
    net: nn.Module,
    samples: Images,
    replica: tuple[float, float] | None = None,
    **more: float,
) -> None:
    """Log loss and accuracy of the answer, and of this worker's ``replica``."""
    replica = replica or evaluate(net, samples, worker.device)
    with worker.answer():
        loss, accuracy = evaluate(net, samples, worker.device)
    worker.log(
        loss=loss,
        accuracy=accuracy,
        replica_loss=replica[0],
        replica_accuracy=replica[1],
        progress=worker.progress,
        **more,
    )


def tick(worker: Worker, steps: int, parameters: int) -> None:
    """Make and log steps with zero gradients: for runs that measure only time."""
    net = nn.ParameterList([nn.Parameter(torch.zeros(parameters))])
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.0))
    rows = TensorDataset(torch.zeros(steps * worker.size))
    batches = worker.setup_dataloaders(DataLoader(rows, batch_size=1), epochs=1)
    for _ in batches:
        worker.settle()
        for part in net.parameters():
            part.grad = torch.zeros_like(part)
        sgd.step()
        worker.log()


def descend(worker: Worker, steps: int, lr: float, dimensions: int, noise: float) -> None:
    """Descend a quadratic; log the squared gradient whenever all workers have the same model.

    The curvatures lie evenly between 0.1 and 1, the start is 1 in every direction, and ``noise`` is
    the variance of a gradient, over all directions.
    """
    curvature = torch.linspace(0.1, 1.0, dimensions, dtype=torch.float64)
    x = nn.Parameter(torch.ones(dimensions, dtype=torch.float64))
    net = nn.ParameterList([x])
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=lr))
    random = np.random.default_rng([worker.seed, worker.rank])
    scale = math.sqrt(noise / dimensions)
    interval = int(getattr(worker.strategy, "interval", 1))
    for step in range(steps):
        noisy = torch.from_numpy(random.normal(size=dimensions) * scale)
        x.grad = curvature * x.detach() + noisy
        sgd.step()
        if worker.rank == 0 and (step + 1) % interval == 0:
            worker.log(square=squared_gradient(curvature, x), steps=step + 1)


def squared_gradient(curvature: Tensor, x: Tensor) -> float:
    """The squared gradient of the quadratic at ``x``."""
    return float((curvature * x.detach()).square().sum())


def trail(worker: Worker, steps: int, batch_size: int) -> None:
    """Log the parameters after each step, projected on eight random directions.

    A network in double precision, with momentum, weight decay and a learning rate that changes at
    each step.
    """
    torch.manual_seed(worker.seed)
    net: nn.Module = nn.Sequential(nn.Linear(49, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    size = sum(p.numel() for p in net.parameters())
    views = torch.randn(8, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net, paced = worker.setup(net, sgd)
    schedule = torch.optim.lr_scheduler.LambdaLR(paced, lambda step: (step + 1) / steps)
    loader = DataLoader(small_images(), batch_size=batch_size, shuffle=True)
    for x, y in islice(worker.setup_dataloaders(loader), steps):
        paced.zero_grad()
        cross_entropy(net(x), y).backward()
        paced.step()
        schedule.step()
        worker.settle()
        if worker.rank == 0:
            flat = torch.cat([p.detach().flatten() for p in net.parameters()])
            projections = {
                f"view_{number}": float(view @ flat) for number, view in enumerate(views)
            }
            worker.log(**projections, norm=float(flat.norm()))


@cache
def small_images() -> TensorDataset:
    """The first 2,000 bundled images, 7 by 7, in double precision."""
    samples = load("bundled")
    pooled = nn.functional.avg_pool2d(samples.x_train[:2000], 4).flatten(1)
    return TensorDataset(pooled.double(), samples.y_train[:2000])
