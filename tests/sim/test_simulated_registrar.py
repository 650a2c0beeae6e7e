"""Clusters that have a registrar: runs over many hosts, some of which are cut off from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

import paceline as pl
from paceline.comm.limits import Limits
from paceline.sim.cluster import Cluster, Compute, Link
from tests.support.growing import BATCH, EPOCHS, SAMPLES, finals, seen, train

HOSTS = Cluster(
    ranks_per_node=2,
    registrar=0,
    network=Link(latency_s=1e-3, bytes_per_s=1e6),
    inside=Link(latency_s=1e-6),
    compute=Compute(step_s=1.0),
)
"""Workers 0 and 1 are with the registrar, and the servers come after worker 5."""
ONCE = Counter(range(SAMPLES))


def simulate(strategy="gossip", faults=(), cluster=HOSTS, epochs=2 * EPOCHS, **how):
    how = {"limits": Limits(dead_s=5.0), "on_loss": "continue", **how}
    arguments = {"epochs": epochs}
    return pl.simulate(
        train, workers=6, strategy=strategy, cluster=cluster, faults=faults, arguments=arguments,
        **how,
    )  # fmt: skip


def events(run, kind):
    return [(e["rank"], round(e["t"], 1)) for e in run.events if e["event"] == kind]


def accounted(run):
    """Whether each sample was trained on in each epoch, or is in a batch that counts as lost."""
    unseen = sum((ONCE - counts).total() for counts in seen(run).values())
    return unseen <= BATCH * run.lost_batches


ASYNCHRONOUS = ["gossip", "easgd", "downpour(shards=2)", "ssp", "cyclic", "adpsgd"]


@pytest.mark.parametrize("strategy", ASYNCHRONOUS)
def test_who_is_cut_off_for_too_long_is_lost_and_comes_back(strategy):
    run = simulate(strategy, [pl.cut(node=1, for_s=12.0).at(seconds=4.5)])
    assert [rank for rank, _ in events(run, "lost")] == [2, 3]
    assert {t for _, t in events(run, "lost")} == {9.5}
    assert sorted(rank for rank, _ in events(run, "rejoined")) == [2, 3]
    assert all(t >= 16.5 for _, t in events(run, "rejoined"))
    assert sorted(finals(run)) == [*range(6)] and accounted(run)


@pytest.mark.parametrize("strategy", [*ASYNCHRONOUS, "allreduce"])
def test_who_is_cut_off_for_less_is_not_lost(strategy):
    run = simulate(strategy, [pl.cut(node=1, for_s=4.9).at(seconds=4.5)])
    assert run.lost_workers == 0 and accounted(run)
    assert sorted(finals(run)) == [*range(6)]


def test_without_a_registrar_nobody_is_lost_behind_a_cut():
    faults = [pl.cut(node=1, for_s=12.0).at(seconds=4.5)]
    assert simulate(faults=faults, cluster=replace(HOSTS, registrar=None)).lost_workers == 0


def test_a_worker_that_is_cut_off_does_nothing_that_counts_meanwhile():
    run = simulate(faults=[pl.cut(node=1, for_s=12.0).at(seconds=4.5)])
    logged = [m["t"] for m in run.metrics if m["rank"] in (2, 3) and "samples_of_step" in m]
    assert not [t for t in logged if 10.5 < t < 16.5]
    assert [t for t in logged if t > 16.5]


@pytest.mark.parametrize("strategy", ["gossip", "downpour(shards=2)", "adpsgd"])
def test_the_others_do_not_wait_for_who_is_cut_off(strategy):
    """But for a second, after which it counts as stopped."""
    run = simulate(strategy, [pl.cut(node=1, for_s=12.0).at(seconds=4.5)])
    for rank in (0, 1, 4, 5):
        times = [m["t"] for m in run.metrics if m["rank"] == rank and "samples_of_step" in m]
        assert max(after - before for before, after in pairwise(times)) < 3.0


def test_a_host_that_is_cut_off_for_good_is_not_waited_for():
    run = simulate(faults=[pl.cut(node=1).at(seconds=4.5)])
    assert run.lost_workers == 2 and sorted(finals(run)) == [0, 1, 4, 5]
    assert accounted(run)


def test_the_host_of_the_registrar_goes_on_alone():
    run = simulate(faults=[pl.cut(node=0).at(seconds=4.5)])
    assert run.lost_workers == 4 and sorted(finals(run)) == [0, 1]
    assert accounted(run)


def test_nobody_is_lost_while_the_registrar_hears_of_no_one():
    faults = [pl.cut(node=3, for_s=12.0).at(seconds=4.5)]
    run = simulate(faults=faults, cluster=replace(HOSTS, registrar=3))
    assert run.lost_workers == 0 and accounted(run)


def test_a_partition_of_nodes_leaves_the_side_of_the_registrar():
    """Node 2 still reaches node 1, but not the registrar."""
    faults = [pl.cut(node=0, peer=node, for_s=12.0).at(seconds=4.5) for node in (1, 2)]
    run = simulate(faults=faults)
    assert [rank for rank, _ in events(run, "lost")] == [2, 3, 4, 5]
    assert sorted(finals(run)) == [*range(6)]
    alone = simulate(faults=faults[:1])
    assert [rank for rank, _ in events(alone, "lost")] == [2, 3]


def test_a_server_that_is_cut_off_has_a_successor_where_the_registrar_is():
    """Node 3 has both servers; the successors answer before the link works again."""
    run = simulate("downpour(shards=2)", [pl.cut(node=3, for_s=30.0).at(seconds=4.5)])
    assert sorted(rank for rank, _ in events(run, "succeeded")) == [6, 7]
    assert run.lost_workers == 0 and accounted(run)
    steps = [m["t"] for m in run.metrics if "samples_of_step" in m]
    assert [t for t in steps if 11.0 < t < 34.5]


def test_a_synchronous_run_goes_on_without_who_is_cut_off():
    run = simulate("allreduce", [pl.cut(node=1, for_s=12.0).at(seconds=4.5)])
    assert run.lost_workers == 2 and sorted(finals(run)) == [0, 1, 4, 5]
    with pytest.raises(pl.PeerLost, match=r"nothing was heard of it for 5 s"):
        simulate("allreduce", [pl.cut(node=1, for_s=12.0).at(seconds=4.5)], on_loss="stop")


def test_a_restarted_worker_begins_where_the_registrar_is():
    faults = [pl.cut(node=1).at(seconds=4.5)]
    run = simulate("allreduce", faults, max_restarts=2)
    assert run.lost_workers == 2 and sorted(finals(run)) == [*range(6)]


def test_drawing_a_batch_takes_a_round_trip():
    def seconds(registrar):
        cluster = replace(HOSTS, network=Link(latency_s=0.25), registrar=registrar)
        run = pl.simulate(train, workers=3, strategy="adpsgd(interval=20)", cluster=cluster)
        times = {m["rank"]: m["t"] for m in run.metrics if "samples_of_step" in m}
        count = Counter(m["rank"] for m in run.metrics if "samples_of_step" in m)
        return {rank: times[rank] / count[rank] for rank in times}

    free, asked = seconds(None), seconds(0)
    assert asked[0] == pytest.approx(free[0], rel=0.02)
    assert asked[2] == pytest.approx(free[2] + 0.5, rel=0.1)


def test_a_registrar_that_cannot_be_is_refused():
    with pytest.raises(pl.UsageError, match=r"registrar \(-1\) must be at least 0"):
        Cluster(registrar=-1)


def test_the_same_run_repeats():
    faults = [pl.cut(node=1, for_s=12.0).at(seconds=4.5), pl.freeze(rank=4, for_s=7).at(seconds=6)]
    hashes = {simulate("downpour", faults).trace_hash for _ in range(2)}
    assert len(hashes) == 1
