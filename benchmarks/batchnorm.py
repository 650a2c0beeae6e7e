"""Print the table of docs/batchnorm.md: BatchNorm when workers see different classes.

    python benchmarks/batchnorm.py [--data auto] [--epochs 2]

For each method, on 4 simulated workers: the accuracy of the answer on each worker, with the
worker's own running statistics, with those of all workers together, and recalibrated.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline as pl
from paceline.lab.tasks.fashion import evaluate, load_images, make_loader
from paceline.strategies import STRATEGIES

WORKERS, BATCH, RATE = 4, 16, 0.1
Accuracies = list[list[float]]


def network() -> nn.Module:
    """The built-in network, with BatchNorm after each convolution."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def measure(strategy: str, data: str, epochs: int) -> Accuracies:
    """The accuracies of each worker."""
    images, accuracies = load_images(), {}

    def train(worker: pl.Worker) -> None:
        torch.manual_seed(worker.seed)
        net = network()
        rate = RATE * worker.strategy.lr_factor(worker.size)
        net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=rate))
        batches = worker.setup_dataloaders(make_loader(images, BATCH), data=data, epochs=epochs)
        for _ in range(epochs):
            for x, y in batches:
                sgd.zero_grad()
                cross_entropy(net(x), y).backward()
                sgd.step()
        own = [buffer.clone() for buffer in net.buffers()]
        worker.finish()
        together = evaluate(net, images, worker.device)[1]
        worker.recalibrate(make_loader(images, 100), batches=8)
        recalibrated = evaluate(net, images, worker.device)[1]
        for buffer, value in zip(net.buffers(), own, strict=True):
            buffer.copy_(value)
        accuracies[worker.rank] = [evaluate(net, images, worker.device)[1], together, recalibrated]

    pl.simulate(train, workers=WORKERS, strategy=strategy, cluster="mixed-lab")
    return [accuracies[rank] for rank in range(WORKERS)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="skewed", help="how data are shared")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| method | each worker's own | of all workers | recalibrated |\n|---|---|---|---|")
    for strategy in options.strategies.split(","):
        rows = measure(strategy, options.data, options.epochs)
        own, together, recalibrated = (
            sorted({f"{v:.3f}" for v in c}) for c in zip(*rows, strict=True)
        )
        span = f"{own[0]} to {own[-1]}" if len(own) > 1 else own[0]
        print(f"| `{strategy}` | {span} | {', '.join(together)} | {', '.join(recalibrated)} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
