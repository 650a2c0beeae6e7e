"""The protocol between workers and servers: every request counts once, and gets its reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support.training import beat
from torch import nn
from torch.optim import SGD

import paceline as pl
from paceline.common.faults import freeze, join, kill
from paceline.sim.cluster import Cluster, Compute, Link
from paceline.strategies.served import ServerStrategy
from paceline.strategies.server import ShardServer
from paceline.strategies.service import INCARNATION

STEPS, WORKERS = 6, 3
SLOW_LINKS = Cluster(network=Link(latency_s=0.1), compute=Compute(step_s=1.0))


class SumServer(ShardServer):
    """Adds up what workers send, and notes the requests that it applies, and repeats."""

    def on_request(self, worker, request, vector):
        self.method.applied.append((self.comm.rank, worker, request.number))
        if request.batches:
            self.shard.add_(vector)
            self.updated(request)
        self.reply(worker)

    def on_repeat(self, worker):
        self.method.repeated.append((self.comm.rank, worker))
        super().on_repeat(worker)


@dataclass(kw_only=True)
class Sum(ServerStrategy):
    """Each worker sends ones, and takes the sum of all that came so far."""

    applied: ClassVar[list[tuple[int, int, int]]] = []
    repeated: ClassVar[list[tuple[int, int]]] = []

    def make_server(self):
        return SumServer(self)

    def step(self, x, g):
        self.steps += 1
        self.exchange(torch.ones_like(x), x)


def run(faults=(), shards=1, cluster=SLOW_LINKS, **how):
    """Count to workers * steps: what each worker ends with."""
    ends = {}

    def train(worker):
        net = nn.Linear(2, 2)
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=1.0))
        for _ in range(STEPS):
            net(torch.ones(1, 2)).sum().backward()
            sgd.step()
        worker.finish()
        ends[worker.rank] = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist()

    Sum.applied.clear()
    Sum.repeated.clear()
    method = Sum(shards=shards)
    result = pl.simulate(
        train, workers=WORKERS, strategy=method, cluster=cluster, faults=faults, **how
    )
    return ends, result


def test_requests_are_numbered_from_1():
    run()
    for worker in range(WORKERS):
        numbers = [number for _, src, number in Sum.applied if src == worker]
        assert numbers == [*range(1, STEPS + 1)]
    assert Sum.repeated == []


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("at_s", [0.5 + 0.1 * k for k in range(24)])
def test_a_request_counts_once_whenever_its_server_is_lost(at_s, shards):
    ends, result = run([kill(rank=WORKERS).at(seconds=at_s)], shards)
    assert [event["rank"] for event in result.events if event["event"] == "succeeded"] == [WORKERS]
    assert len(Sum.applied) >= shards * WORKERS * STEPS
    for end in ends.values():
        assert end == [WORKERS * STEPS] * len(end)


def test_a_successor_replies_to_what_its_predecessor_applied():
    """The server dies with the replies on their way: the ledger has the requests."""
    run([kill(rank=WORKERS).at(seconds=1.75)])
    assert len(Sum.repeated) == WORKERS
    assert len(Sum.applied) == WORKERS * STEPS


def test_a_server_that_is_stopped_for_too_long_is_followed():
    ends, _ = run([freeze(rank=WORKERS).at(seconds=2.5)])
    assert all(end == [WORKERS * STEPS] * len(end) for end in ends.values())


def test_a_late_worker_numbers_its_requests_by_its_incarnation():
    run([join(rank=2).at(seconds=2.0)])
    numbers = [number for _, src, number in Sum.applied if src == 2]
    assert numbers == [INCARNATION + 1 + k for k in range(STEPS + 1)]  # the first one joins


def test_without_a_successor_the_run_ends_and_names_the_server():
    with pytest.raises(pl.PeerLost) as caught:
        run([kill(rank=WORKERS).at(seconds=2.5)], on_loss="stop")
    assert caught.value.ranks == (WORKERS,)


def test_requests_and_replies_cost_what_is_said():
    _, result = run(cluster=beat())
    nbytes, method = 6 * 4, Sum()
    hyperparameters = 4  # lr, momentum, dampening and weight decay of SGD's only group
    numbers = 8 * (7 + hyperparameters + 7)
    start = nbytes * (WORKERS + method.shards)
    assert result.bytes_sent == WORKERS * STEPS * (2 * nbytes + numbers) + start
