"""Whole runs in virtual time: a function of their seed, with faults that are named."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training import Problem
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.comm.base import Comm, Limits
from paceline.trace import read


def train(worker, steps=6, seconds=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    x, y = torch.randn(48, 4), torch.randint(0, 2, (48,))
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1, momentum=0.9))
    loader = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True)
    for _ in range(2):
        for xs, ys in worker.setup_dataloaders(loader):
            sgd.zero_grad()
            loss = nn.functional.cross_entropy(net(xs), ys)
            loss.backward()
            sgd.step()
        worker.log(loss=loss, draw=random.random() + np.random.rand() + torch.rand(1))


STRATEGIES = ["allreduce", "sasgd(interval=3)"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_is_a_function_of_its_seed(strategy):
    runs = [
        pl.simulate(train, workers=4, strategy=strategy, cluster="mixed-lab", seed=seed)
        for seed in (5, 5, 6)
    ]
    first, again, other = runs
    assert first.trace_hash == again.trace_hash != other.trace_hash
    assert first.metrics == again.metrics != other.metrics
    assert first.virtual_seconds == again.virtual_seconds > 0


def test_the_calling_programs_generators_are_left_alone():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = (torch.rand(1), np.random.rand(), random.random())
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    pl.simulate(train, workers=3)
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


def test_ranks_draw_from_generators_of_their_own():
    result = pl.simulate(train, workers=3, cluster="ideal")
    draws = [record["draw"] for record in result.metrics]
    assert len(set(draws)) == len(draws)


_PROGRAM = """
import sys; sys.path[:0] = {path!r}
from test_simulate import train
import paceline as pl
run = pl.simulate(train, workers=4, strategy="sasgd(interval=3)", cluster="mixed-lab", seed=5)
print(run.trace_hash, [record["loss"] for record in run.metrics])
"""


def test_another_process_with_another_hash_seed_gives_the_same():
    from pathlib import Path

    here = Path(__file__).parent
    program = _PROGRAM.format(path=[str(here), str(here.parent)])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@settings(max_examples=10)
@given(seed=st.integers(0, 99), workers=st.integers(2, 5), strategy=st.sampled_from(STRATEGIES))
def test_twice_all_times_is_twice_the_time_and_the_same_model(seed, workers, strategy):
    """G15: scaling every time constant by 2 doubles the duration and changes nothing else."""
    from dataclasses import replace

    problem = Problem(seed=seed)
    slow = pl.sim.cluster.load_cluster("mixed-lab")
    link, compute = slow.network, slow.compute
    twice = replace(
        slow,
        network=replace(link, latency_s=2 * link.latency_s, bytes_per_s=link.bytes_per_s / 2),
        compute=replace(compute, step_s=2 * compute.step_s, sample_s=2 * compute.sample_s),
    )
    one, first = problem.run(strategy, workers, cluster=slow)
    other, second = problem.run(strategy, workers, cluster=twice)
    assert second.virtual_seconds == 2 * first.virtual_seconds
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_synchronous_run_goes_at_the_pace_of_its_slowest():
    fast = pl.simulate(train, workers=2, cluster="ethernet-1g")  # both of factor 1
    slow = pl.simulate(train, workers=4, cluster="mixed-lab")  # the last of factor 3
    assert slow.virtual_seconds > fast.virtual_seconds
    assert slow.wait_share > 0.4 > fast.wait_share


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("when", [{"step": 3}, {"seconds": 0.012}])
def test_a_killed_worker_ends_the_run_by_its_name(strategy, when):
    before = threading.active_count()
    with pytest.raises(pl.PeerLost) as caught:
        pl.simulate(train, workers=4, strategy=strategy, faults=[pl.kill(rank=2).at(**when)])
    assert caught.value.ranks == (2,)
    assert caught.value.op == "all_reduce"
    assert "it died" in str(caught.value)
    assert threading.active_count() == before


def test_a_frozen_worker_is_lost_after_dead_s():
    faults = [pl.freeze(rank=1).at(seconds=0.01)]
    with pytest.raises(
        pl.PeerLost, match=r"lost rank 1 in all_reduce .* stopped for 5 s"
    ) as caught:
        pl.simulate(train, workers=3, faults=faults)
    assert 4.9 < caught.value.waited_s <= 5.0


@pytest.mark.parametrize("when", [{"step": 3}, {"seconds": 0.011}])
def test_a_worker_that_thaws_in_time_is_waited_for(when):
    plain = pl.simulate(train, workers=3)
    frozen = pl.simulate(train, workers=3, faults=[pl.freeze(rank=1, for_s=2.0).at(**when)])
    assert frozen.virtual_seconds == pytest.approx(plain.virtual_seconds + 2.0, abs=0.01)
    assert [m["loss"] for m in frozen.metrics] == [m["loss"] for m in plain.metrics]


def test_a_slow_down_lasts_as_long_as_it_says():
    def seconds(*faults):
        return pl.simulate(train, workers=2, cluster="ethernet-100g", faults=faults).virtual_seconds

    plain = seconds()
    for_good = seconds(pl.slow(rank=1, factor=3).at(step=0))
    half = seconds(pl.slow(rank=1, factor=3, for_s=1.5 * plain).at(seconds=0))
    assert for_good == pytest.approx(3 * plain, rel=0.15)
    assert plain < half < for_good


def test_faults_leave_the_order_of_the_data_alone(tmp_path):
    def order(*faults):
        pl.simulate(train, workers=3, faults=faults, out=tmp_path)
        records = read(tmp_path / "trace.jsonl")
        keys = ("rank", "epoch", "index")
        return sorted(tuple(r[k] for k in keys) for r in records if r["event"] == "batch")

    assert order() == order(pl.slow(rank=1, factor=5).at(seconds=0))


def test_a_worker_joins_when_it_is_told():
    """At the level of the contract: others see it from then on."""
    from support.worlds import run_program

    def program(transport, channel, argument):
        comm = Comm(transport)
        if comm.rank == 2:
            joined_s = comm.now()
            comm.compute(2.0)
            return joined_s
        seen = []
        while not seen or 2 not in seen[-1]:
            seen.append(comm.alive())
            comm.compute(0.5)
        return seen

    outcome = run_program("simulated", program, 3, faults=[pl.join(rank=2).at(seconds=1.2)])
    assert outcome.values[2] == 1.2
    assert outcome.values[0] == [(0, 1)] * 3 + [(0, 1, 2)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (pl.kill(rank=4).at(step=1), r"kill: rank \(4\) must be below 4"),
        (pl.join(rank=1).at(seconds=1), "allreduce is synchronous and takes no worker"),
    ],
)
def test_faults_that_cannot_happen_are_refused(fault, message):
    with pytest.raises(pl.UsageError, match=message):
        pl.simulate(train, workers=4, faults=[fault])


def test_a_program_that_would_hang_on_gloo_is_refused_with_every_rank_named():
    """Both send before they receive: that works only where messages are buffered."""

    def hang(worker):
        comm, other = worker.comm, 1 - worker.rank
        comm.send(torch.ones(1), other)
        comm.recv(torch.ones(1), other)

    with pytest.raises(pl.Deadlock) as caught:
        pl.simulate(hang, workers=2)
    assert "rank 0: send to rank 1" in str(caught.value)
    assert "rank 1: send to rank 0" in str(caught.value)


def test_a_rank_that_raises_is_named_with_the_virtual_time():
    def broken(worker):
        worker.comm.compute(1.5)
        if worker.rank == 1:
            raise KeyError("oops")
        worker.comm.barrier()

    with pytest.raises(pl.WorkerFailed, match="rank 1: KeyError: 'oops'") as told:
        pl.simulate(broken, workers=3)
    assert told.value.details.count('raise KeyError("oops")') == 1
    assert "at 1.500000 s of virtual time" in told.value.details
    assert "kernel.py" not in told.value.details


def test_evaluation_through_a_loader_is_charged_as_forward_alone():
    def evaluate(worker, grad):
        loader = worker.setup_dataloaders(DataLoader(TensorDataset(torch.zeros(30, 4))))
        with torch.set_grad_enabled(grad):
            for _ in loader:
                pass

    charged = pl.simulate(evaluate, workers=1, arguments={"grad": False}).virtual_seconds
    free = pl.simulate(evaluate, workers=1, arguments={"grad": True}).virtual_seconds
    assert charged == pytest.approx(30 * 3e-4 / 3)
    assert free == 0.0


def test_accumulation_and_short_batches_are_charged_for_what_they_are():
    from paceline.sim.cluster import Cluster, Compute

    cluster = Cluster(compute=Compute(step_s=0.0, sample_s=1.0))

    def accumulate(worker, every):
        net = nn.Linear(4, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
        data = DataLoader(TensorDataset(torch.zeros(10, 4)), batch_size=4)
        for index, (x,) in enumerate(worker.setup_dataloaders(data)):
            net(x).sum().backward()
            if (index + 1) % every == 0 or index == 2:
                sgd.step()

    for every in (1, 2):
        run = pl.simulate(accumulate, workers=1, cluster=cluster, arguments={"every": every})
        assert run.virtual_seconds == pytest.approx(10.0)


def test_the_limits_hold_in_virtual_time():
    def uneven(worker):
        if worker.rank == 0:
            worker.comm.compute(100.0)
        worker.comm.barrier()

    with pytest.raises(pl.CommTimeout, match=r"waited 20 s in all_reduce for rank 0, alive"):
        pl.simulate(uneven, workers=2, limits=Limits(progress_limit_s=20.0))


def test_a_freeze_in_the_middle_of_computing_delays_the_arrival():
    def compute(worker):
        worker.comm.compute(1.0 + worker.rank)
        worker.comm.barrier()
        worker.log(done=True)

    frozen = [pl.freeze(rank=1, for_s=3.0).at(seconds=0.5)]
    run = pl.simulate(compute, workers=3, cluster="ideal", faults=frozen)
    assert [record["t"] for record in run.metrics] == [5.0] * 3


def test_who_is_killed_while_computing_has_not_arrived():
    def compute(worker):
        worker.comm.compute(1.0 + worker.rank)
        worker.comm.barrier()

    with pytest.raises(pl.PeerLost, match=r"lost rank 2 in all_reduce after 1\.00 s"):
        pl.simulate(compute, workers=3, cluster="ideal", faults=[pl.kill(rank=2).at(seconds=2.0)])
