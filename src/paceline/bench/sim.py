"""``paceline bench sim``: what the simulator costs, beside the gradients that it computes.

Kernel: events a second when ranks do nothing but compute, post and poll. Gradients: the built-in
networks under ``allreduce``, against a plain loop that makes the same steps (draw a batch, forward,
backward, update) with as many replicas and no simulator, in turns.
"""

from __future__ import annotations

import statistics
import time
from itertools import chain, repeat
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from paceline.comm.base import Comm, Limits
from paceline.comm.simulated import SimulatedTransport, World
from paceline.run import simulate
from paceline.sim.cluster import load_cluster
from paceline.tasks.fashion import load_images, make_loader, make_model
from paceline.tasks.recipe import MOMENTUM, batch_of
from paceline.worker import Worker

CLUSTER = "ethernet-10g"
EVENTS_A_RANK = 600
WARM_UP = 3
"""Steps that are not counted: torch prepares its kernels anew in each thread."""


def bench_sim(workers: int, repeats: int, steps: int) -> list[dict[str, Any]]:
    """Time the kernel alone, then with the gradients of each network; one row each."""
    events = statistics.median(_events_per_s(workers) for _ in range(repeats))
    rows = [_row(workers, None, events, None, None)]
    for model in ("cnn", "mlp"):
        rows.append(_with_gradients(workers, model, repeats, steps))
    return rows


def _row(
    workers: int, model: str | None, events: float, overhead: float | None, gradient: float | None
) -> dict[str, Any]:
    return {
        "workers": workers,
        "model": model,
        "events_per_s": events,
        "overhead_share": overhead,
        "overhead_us_per_step": gradient,
    }


def _events_per_s(workers: int) -> float:
    world = World(load_cluster(CLUSTER), workers, seed=0, limits=Limits(), faults=[])

    def body(transport: SimulatedTransport) -> None:
        comm, x = Comm(transport), torch.zeros(16)
        for _ in range(EVENTS_A_RANK // 2):
            comm.compute(0.001 * (1 + comm.rank % 3))
            comm.post(x, (comm.rank + 1) % comm.size)
            comm.poll(x)

    start = time.perf_counter()
    world.run(body)
    return world.calendar.events / (time.perf_counter() - start)


def _with_gradients(workers: int, model: str, repeats: int, steps: int) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plain, simulated = [], []
    for _ in range(repeats + 1):
        plain.append(_plain_s(workers, model, steps))
        simulated.append(_simulated_s(workers, model, steps))
    torch.set_num_threads(threads)
    ratios = [sim / base for sim, base in zip(simulated[1:], plain[1:], strict=True)]
    share = statistics.median(ratios) - 1
    step_us = 1e6 * statistics.median(plain[1:]) / (steps * workers)
    events = 2 * workers * steps / statistics.median(simulated[1:])
    return _row(workers, model, events, share, share * step_us)


def _plain_s(workers: int, model: str, steps: int) -> float:
    """Seconds of the same steps in a plain loop over as many replicas."""
    images = load_images()
    replicas = []
    for _ in range(workers):
        net = make_model(model)
        sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=MOMENTUM)
        replicas.append((net, sgd, iter(make_loader(images, batch_of(workers)))))
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            start = time.perf_counter()
        for net, sgd, batches in replicas:
            _step(net, sgd, *next(batches))
    return time.perf_counter() - start


def _simulated_s(workers: int, model: str, steps: int) -> float:
    """Seconds of the same steps in the simulator, from the first to the last."""
    moments: list[float] = []

    def train(worker: Worker) -> None:
        net: torch.nn.Module = make_model(model)
        sgd: Any = torch.optim.SGD(net.parameters(), lr=0.01, momentum=MOMENTUM)
        net, sgd = worker.setup(net, sgd)
        loader = worker.setup_dataloaders(make_loader(load_images(), batch_of(worker.size)))
        batches = chain.from_iterable(repeat(loader))
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                worker.comm.barrier()
                moments.append(time.perf_counter())
            _step(net, sgd, *next(batches))
        moments.append(time.perf_counter())

    simulate(train, workers=workers, cluster=CLUSTER)
    return max(moments) - min(moments)


def _step(net: torch.nn.Module, sgd: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    sgd.zero_grad()
    cross_entropy(net(x), y).backward()
    sgd.step()
