"""The history of each rank's progress, from which reports draw curves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.lab.tasks.fashion import train
from paceline.record.history import MOST_ROWS, History, totals_at
from paceline.sim.cluster import Compute, Loading


def filled(steps):
    history = History()
    for step in range(1, steps + 1):
        history.note(float(step), 4 * step, 100 * step)
    return history


@given(st.integers(0, 5000), st.floats(0.0, 6000.0))
def test_a_history_is_right_except_for_dropped_rows(steps, time_s):
    history = filled(steps)
    assert len(history.rows) < MOST_ROWS
    samples, nbytes = totals_at(time_s, [history.rows])
    done = min(int(time_s), steps)
    left_out = 1 if steps < MOST_ROWS else 2 * steps / MOST_ROWS
    assert 4 * (done - left_out) - 4 <= samples <= 4 * done
    assert nbytes == 25 * samples


@given(st.integers(1, 5000))
def test_the_last_row_is_kept(steps):
    history = filled(steps)
    history.note(steps + 1.0, 7, 8, last=True)
    assert history.rows[-1] == (steps + 1.0, 7, 8)


def test_ranks_are_summed_and_those_without_rows_count_as_zero():
    rows = [(1.0, 4, 10), (2.0, 8, 20)]
    assert totals_at(1.5, [rows, [], [(1.0, 1, 1)]]) == (5, 11)
    assert totals_at(0.5, [rows]) == (0, 0)


# In a run ----------------------------------------------------------------------------------------

SHORT = {"model": "mlp", "epochs": 2, "steps": 12}


@pytest.mark.transport("simulated")
@pytest.mark.parametrize("strategy", ["allreduce", "sasgd", "easgd", "gossip", "layered"])
def test_the_last_record_has_everything(strategy):
    run = pl.simulate(train, workers=3, strategy=strategy, cluster="mixed-lab", arguments=SHORT)
    last = run.metrics[-1]
    assert last["all_samples"] == run.samples
    assert 0 < last["all_bytes"] <= run.bytes_sent
    later = [rank for rank in run.metrics if rank["t"] > last["t"]]
    assert not later


def logs_often(worker):
    """Every rank logs after each of its steps."""
    import torch

    net = torch.nn.Linear(2, 1)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(8):
        sgd.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        sgd.step()
        worker.log(loss=1.0)


@pytest.mark.transport("simulated")
@pytest.mark.parametrize("strategy", ["allreduce", "sasgd(interval=4)", "gossip"])
def test_the_history_uses_virtual_time(strategy):
    """Although a rank that only computes is simulated ahead of the others."""
    cluster = pl.Cluster(compute=Compute(step_s=1.0, factors=(1.0, 3.0)))
    run = pl.simulate(logs_often, workers=2, strategy=strategy, cluster=cluster)
    for record in run.metrics:
        ended = [m for m in run.metrics if m["t"] <= record["t"]]
        if strategy == "gossip":
            assert record["all_bytes"] >= 12 * len(ended)
        else:  # 3 numbers of 4 bytes: a broadcast, and what each rank sends in its exchanges
            every = 4 if "sasgd" in strategy else 1
            assert record["all_bytes"] == 24 + 12 * sum(m["step"] % every == 0 for m in ended)


@pytest.mark.transport("simulated")
def test_time_is_divided_into_compute_waiting_and_data():
    """4 steps of 1 and 2 s with 1 s of loading before each; the first load is before step 0."""
    cluster = pl.Cluster(
        compute=Compute(step_s=1.0, factors=(1.0, 2.0)), loading=Loading(batch_s=1.0)
    )

    def four_steps(worker):
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        net = torch.nn.Linear(2, 1)
        net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=1)
        for (x,) in worker.setup_dataloaders(loader):
            sgd.zero_grad()
            net(x).sum().backward()
            sgd.step()

    run = pl.simulate(four_steps, workers=2, cluster=cluster)
    fast, slow = run.worker_seconds
    assert fast == pytest.approx({"compute": 4.0, "wait": 4.0, "io": 3.0})
    assert slow == pytest.approx({"compute": 8.0, "wait": 0.0, "io": 3.0})
    assert (run.epoch_samples, run.batch_size, run.lr) == (8, 1, 0.1)


@pytest.mark.transport("simulated")
@pytest.mark.parametrize("strategy", ["downpour", "gossip", "cyclic", "adpsgd"])
def test_staleness_counts_match_the_mean_and_the_maximum(strategy):
    run = pl.simulate(train, workers=4, strategy=strategy, cluster="mixed-lab", arguments=SHORT)
    ages = dict(run.staleness_counts)
    assert sum(ages.values()) > 10
    assert max(ages) == run.staleness_max
    mean = sum(age * count for age, count in ages.items()) / sum(ages.values())
    assert mean == pytest.approx(run.staleness_mean)


@pytest.mark.transport("shared_memory")
@pytest.mark.parametrize("strategy", ["sasgd(interval=4)", "downpour"])
def test_a_real_run_keeps_the_same_history(strategy):
    run = pl.launch(train, workers=2, strategy=strategy, arguments=SHORT)
    last = run.metrics[-1]
    assert last["all_samples"] == run.samples == 12 * 2 * 64
    assert 0.5 * run.bytes_sent < last["all_bytes"] <= run.bytes_sent
    assert len(run.worker_seconds) == 2
    for worker in run.worker_seconds:
        assert worker["compute"] > 0 and worker["io"] > 0 and worker["wait"] >= 0
    assert bool(run.staleness_counts) == (strategy == "downpour")
    assert run.epoch_samples == 4000 and run.lr
