"""Tasks of the papers' size: ResNet-20 and ResNet-18 on CIFAR-10, a small GPT on characters.

:data:`paceline.lab.tasks.recipe.DEEP` has their recipes: a rate that rises at first, and falls in
steps or along a cosine as the run goes on.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.lab.tasks.characters import load_text
from paceline.lab.tasks.cifar import augment, load_cifar
from paceline.lab.tasks.fashion import Images, evaluate, log_test, make_loader
from paceline.lab.tasks.networks import make_network
from paceline.lab.tasks.recipe import DEEP, Recipe
from paceline.training.worker import Worker


def train(
    worker: Worker,
    model: str,
    data: str,
    epochs: int | None = None,
    steps: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
) -> None:
    """Train by the model's recipe; log the answer's loss and accuracy after each epoch.

    At the end it also logs the accuracy of one worker's own replica (``replica_accuracy``).

    Args:
        worker: this worker.
        model: ``resnet20``, ``resnet18`` or ``gpt``.
        data: the folder of the data set.
        epochs: passes over the data; by default those of the recipe.
        steps: end after this many steps of this worker, if that comes first.
        lr: the highest learning rate; by default that of the recipe.
        batch_size: samples in a worker's batch; by default that of the recipe.
    """
    recipe = DEEP[model]
    samples, epochs = load(recipe, data), epochs or recipe.epochs
    torch.manual_seed(worker.seed)
    net: nn.Module = make_network(model)
    net, optimizer = worker.setup(net, make_optimizer(recipe, net, worker, lr))
    loader = make_loader(samples, batch_size or recipe.batch_size)
    batches = worker.setup_dataloaders(loader, epochs=epochs)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda _: recipe.share_of_rate(worker.progress)
    )
    worker.track(schedule=schedule)
    for epoch in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            outputs = net(augment(x) if recipe.augments else x)
            cross_entropy(outputs.flatten(0, -2), y.flatten()).backward()
            optimizer.step()
            schedule.step()
            if worker.steps == steps:
                break
        if worker.steps == steps or epoch == epochs - 1:
            break
        log_test(worker, net, samples, epoch)
    _, own = evaluate(net, samples, worker.device) if worker.leads else (0.0, 0.0)
    worker.finish()
    log_test(worker, net, samples, epoch, replica_accuracy=own)


def load(recipe: Recipe, folder: str) -> Images:
    """The samples of a recipe's data set."""
    return load_cifar(folder) if recipe.data == "cifar10" else load_text(folder)


def make_optimizer(
    recipe: Recipe, net: nn.Module, worker: Worker, lr: float | None
) -> torch.optim.Optimizer:
    """The optimizer of a recipe, with its rate or a given one."""
    rate = recipe.lr * worker.strategy.lr_factor(worker.size) if lr is None else lr
    decay = recipe.weight_decay
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=decay)
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, weight_decay=decay)
