"""Shares of a global batch that follow the speeds of the workers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.sim.cluster import Cluster, Compute, Link
from paceline.training.division import sizes_of
from tests.support import growing
from tests.support.growing import EPOCHS, finals, plain_training, seen, steps
from tests.training.test_growth import COMING_AND_GOING, ONCE

BY_SPEED = {"batch": "by-speed"}


def cluster(*factors):
    compute = Compute(sample_s=0.25, spread=0.05, factors=factors)
    return Cluster(network=Link(latency_s=1e-3), compute=compute)


def simulate(strategy="allreduce", workers=3, factors=(1.0, 2.0, 4.0), **how):
    how = {"cluster": cluster(*factors), "on_loss": "continue", **BY_SPEED, **how}
    return pl.simulate(growing.train, workers=workers, strategy=strategy, **how)


def shares(run):
    """What shares the workers were told, in their order."""
    return [event["shares"] for event in run.events if event["event"] == "shares"]


def longer(worker, samples=25600):
    """Train on more data, for throughput."""
    net = torch.nn.Linear(2, 1)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    data = TensorDataset(torch.ones(samples, 2))
    for (x,) in worker.setup_dataloaders(DataLoader(data, batch_size=32), epochs=1):
        sgd.zero_grad()
        net(x).mean().backward()
        sgd.step()
    worker.log(done=True)


# Speed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "sasgd(interval=4)"])
@pytest.mark.parametrize("speeds", [(1, 4), (1, 1, 2, 10)], ids=str)
def test_workers_of_unequal_speeds_train_nearly_as_fast_as_the_sum_of_their_speeds(
    speeds, strategy
):
    how = {"workers": len(speeds), "strategy": strategy}
    how["cluster"] = cluster(*(1 / speed for speed in speeds))
    equal = pl.simulate(longer, **how)
    by_speed = pl.simulate(longer, **how, **BY_SPEED)
    ideal_s = 25600 * 0.25 / sum(speeds)
    assert ideal_s / equal.virtual_seconds < 0.42
    assert ideal_s / by_speed.virtual_seconds > 0.9


def test_shares_follow_a_speed_that_changes():
    faults = [pl.slow(rank=0, factor=4).at(seconds=100)]
    run = pl.simulate(longer, workers=2, cluster=cluster(1.0), faults=faults, **BY_SPEED)
    assert shares(run)[-1] == pytest.approx([0.2, 0.8], abs=0.02)


def test_workers_of_equal_speeds_keep_equal_shares():
    run = simulate(factors=(1.0,))
    assert shares(run) == []
    assert all(len({*map(len, parts.values())}) == 1 for parts in steps(run).values())


def test_in_processes_a_slow_worker_gets_less():
    faults = [pl.slow(rank=1, factor=8)]
    run = pl.launch(growing.train, workers=2, faults=faults, arguments={"epochs": 8}, **BY_SPEED)
    assert seen(run) == dict.fromkeys(range(8), ONCE)
    assert {len(parts) for parts in steps(run).values()} == {2}
    last = [steps(run)[step] for step in sorted(steps(run))[-8:]]
    assert all(len(parts[1]) < len(parts[0]) for parts in last)


# The method stays what it is ---------------------------------------------------------------------


@pytest.mark.parametrize("faults", COMING_AND_GOING.values(), ids=COMING_AND_GOING)
def test_every_step_is_that_of_one_optimizer_on_the_samples_of_all_members(faults):
    run = simulate(faults=faults, global_batch=16)
    assert seen(run) == dict.fromkeys(range(EPOCHS), ONCE)
    assert shares(run)
    ends = finals(run)
    assert all(torch.equal(end, next(iter(ends.values()))) for end in ends.values())
    torch.testing.assert_close(next(iter(ends.values())), plain_training(run), rtol=0, atol=1e-13)


def test_a_run_goes_on_with_the_shares_of_its_checkpoint(tmp_path):
    how = {"out": tmp_path / "run", "checkpoint_steps": 7, "on_loss": "stop"}
    whole = simulate(**how | {"out": tmp_path / "whole"})
    with pytest.raises(pl.PeerLost):
        simulate(**how, faults=[pl.kill(rank=1).at(step=12)])
    resumed = simulate(**how, resume=True)
    assert shares(whole)
    for rank, end in finals(whole).items():
        assert torch.equal(end, finals(resumed)[rank])


@given(
    samples=st.integers(1, 12),
    given_shares=st.lists(st.integers(1, 50), min_size=1, max_size=4).map(tuple),
)
def test_no_division_ends_sooner(samples, given_shares):
    workers = len(given_shares)
    if samples < workers:
        return
    sizes = sizes_of(samples, given_shares)
    assert sum(sizes) == samples
    assert min(sizes) >= 1

    def last(parts):
        return max(part / share for part, share in zip(parts, given_shares, strict=True))

    every = itertools.product(range(1, samples + 1), repeat=workers)
    best = min(last(parts) for parts in every if sum(parts) == samples)
    assert last(sizes) == pytest.approx(best)


# What cannot be ----------------------------------------------------------------------------------


def test_what_cannot_be_divided_by_speed_is_refused(tmp_path):
    with pytest.raises(pl.UsageError, match=r"batch \(speed\) must be by-speed"):
        simulate(batch="speed")
    with pytest.raises(pl.UsageError, match=r"batch \(by-speed\) must not be used with gossip: it"):
        pl.simulate(growing.train, strategy="gossip", **BY_SPEED)
    with pytest.raises(pl.UsageError, match=r"replay must not be used with batch \(by-speed\)"):
        pl.simulate(growing.train, replay=tmp_path, **BY_SPEED)

    def fixed(worker):
        net = growing.network()
        worker.setup(net, growing.optimizer_of(net))
        worker.setup_dataloaders(DataLoader(TensorDataset(torch.arange(9))), data="static")

    with pytest.raises(pl.UsageError, match=r"batch \(by-speed\) needs data that workers divide"):
        pl.simulate(fixed, workers=2, **BY_SPEED)
