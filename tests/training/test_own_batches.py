"""``worker.samples``: batches that a script draws by itself count as those of a loader."""

from __future__ import annotations

import json

import pytest
import torch
from support.resuming import Interrupted, same_models
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.sim.cluster import Compute, Loading

BATCH, STEPS = 4, 6
DATA = torch.randn(2 * BATCH * STEPS, 3, generator=torch.Generator().manual_seed(0))
CLUSTER = pl.Cluster(
    compute=Compute(step_s=0.5, sample_s=0.01), loading=Loading(batch_s=0.1, sample_s=0.02)
)
COUNTED = ("steps", "samples", "batch_size", "virtual_seconds", "wait_share", "worker_seconds")


def new_model():
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def step(net, sgd, x):
    sgd.zero_grad()
    mse_loss(net(x), x.sum(1, keepdim=True)).backward()
    sgd.step()


def with_loader(worker):
    net = new_model()
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
    loader = worker.setup_dataloaders(DataLoader(TensorDataset(DATA), batch_size=BATCH))
    for (x,) in loader:
        step(net, sgd, x)
    with torch.no_grad():
        for (x,) in DataLoader(TensorDataset(DATA), batch_size=BATCH):
            net(x)


def by_itself(worker):
    """The same batches: the two workers take turns."""
    net = new_model()
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
    for x in DATA.split(BATCH)[worker.rank :: 2]:
        worker.samples(len(x))
        step(net, sgd, x)


def run(train, strategy="allreduce", **how):
    ends = {}

    def kept(worker):
        train(worker)
        worker.finish()
        ends[worker.rank] = worker._session.model.state_dict()

    return ends, pl.simulate(kept, **{"workers": 2, "strategy": strategy, **how})


@pytest.mark.parametrize("batched", ["off", "on"])
@pytest.mark.parametrize("strategy", ["allreduce", "sasgd(interval=2)"])
def test_they_count_and_cost_what_batches_of_a_loader_do(strategy, batched):
    wanted, one = run(with_loader, strategy, cluster=CLUSTER, batched=batched)
    found, other = run(by_itself, strategy, cluster=CLUSTER, batched=batched)
    assert {k: getattr(other, k) for k in COUNTED} == {k: getattr(one, k) for k in COUNTED}
    assert same_models(wanted, found)
    assert one.samples == len(DATA) and one.worker_seconds[0]["io"] > 0


def weighted(worker, counts=True):
    """Worker 0 has a batch of 6 ones, in two parts; worker 1 one of 2 threes."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=1.0))
    for x in torch.ones(6, 1).split(3) if worker.rank == 0 else [torch.full((2, 1), 3.0)]:
        if counts:
            worker.samples(len(x))
        net(x).sum().div(6 if worker.rank == 0 else 2).backward()
    sgd.step()
    worker.log(weight=net.weight)


@pytest.mark.parametrize(("counts", "mean"), [(True, (6 * 1 + 2 * 3) / 8), (False, 2.0)])
def test_gradients_are_weighted_by_them(counts, mean):
    result = pl.simulate(weighted, workers=2, arguments={"counts": counts})
    assert [m["weight"] for m in result.metrics] == [-mean] * 2
    assert result.samples == (8 if counts else 0)


def test_without_gradients_a_batch_counts_for_no_step():
    def train(worker):
        net = new_model()
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
        worker.samples(BATCH)
        step(net, sgd, DATA[:BATCH])
        before_s = worker.comm.clock.now()
        with torch.no_grad():
            worker.samples(300)
        worker.log(evaluated_s=worker.comm.clock.now() - before_s)

    _, result = run(train, cluster=CLUSTER)
    assert result.samples == 2 * BATCH
    assert result.metrics[0]["evaluated_s"] == pytest.approx(0.1 + 300 * (0.02 + 0.01 / 3))


def test_batches_without_a_step_are_an_error():
    def train(worker):
        net = new_model()
        worker.setup(net, SGD(net.parameters(), lr=0.1))
        worker.samples(BATCH)

    with pytest.raises(pl.PacelineError, match="no worker made a step"):
        run(train)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"global_batch": 8}, r"global_batch \(8\) needs data that worker.setup_dataloaders"),
        ({"batch": "by-speed"}, "batch needs data that worker.setup_dataloaders divides"),
    ],
)
def test_shares_of_a_global_batch_need_a_loader(how, message):
    with pytest.raises(pl.UsageError, match=message):
        run(by_itself, **how)


def test_a_count_of_nothing_is_refused():
    def train(worker):
        net = new_model()
        worker.setup(net, SGD(net.parameters(), lr=0.1))
        worker.samples(0)

    with pytest.raises(pl.UsageError, match=r"number \(0\) must be at least 1"):
        run(train)


# A plan ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_planned_steps_are_the_progress(strategy, tmp_path):
    def train(worker):
        worker.plan(steps=STEPS)
        net = new_model()
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
        for x in DATA.split(BATCH)[:STEPS]:
            worker.log(progress=worker.progress)
            worker.samples(len(x))
            step(net, sgd, x)

    _, result = run(train, strategy, out=tmp_path / "run")
    for rank in (0, 1):
        shares = [m["progress"] for m in result.metrics if m["rank"] == rank]
        assert shares == pytest.approx([number / STEPS for number in range(STEPS)])
    lines = (tmp_path / "run" / "progress.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["progress"] is not None


def test_progress_without_a_plan_says_how_to_make_one():
    def train(worker):
        net = new_model()
        worker.setup(net, SGD(net.parameters(), lr=0.1))
        _ = worker.progress

    with pytest.raises(pl.UsageError, match=r"or worker.plan\(steps=...\)"):
        run(train)


def test_an_interval_that_is_longer_than_the_plan_is_a_warning():
    def train(worker):
        by_itself(worker)
        worker.plan(steps=STEPS)

    with pytest.warns(UserWarning, match=r"interval \(50\) exceeds the 6 steps of this run"):
        run(train, "sasgd(interval=50)")


# Checkpoints -------------------------------------------------------------------------------------


def windows(worker, at=None, computes=True):
    """Draw random windows and noise until a number of steps; skip the computing if told so."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.05, momentum=0.5))
    worker.plan(steps=24)
    for number in range(24):
        if worker.rank == 0 and number == at:
            raise Interrupted
        if computes or not worker.catching_up:
            x = DATA[torch.randint(len(DATA), (BATCH,))]
            worker.samples(len(x))
            sgd.zero_grad()
            mse_loss(net(x), x.sum(1, keepdim=True)).backward()
            drawn.append((worker.rank, worker.catching_up))
        sgd.step()
        if not worker.catching_up:
            worker.log(progress=worker.progress)


drawn = []


@pytest.mark.parametrize("computes", [True, False])
@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "downpour", "cyclic", "easgd"])
def test_a_run_resumes_bit_for_bit(strategy, computes, tmp_path):
    """Also where the loop does not compute what lies before the checkpoint."""
    how = {"cluster": "mixed-lab", "seed": 4, "checkpoint_steps": 5, "workers": 3}
    wanted, one = run(windows, strategy, out=tmp_path / "whole", **how)
    with pytest.raises(pl.WorkerFailed, match="Interrupted"):
        run(lambda worker: windows(worker, at=14), strategy, out=tmp_path / "broken", **how)
    drawn.clear()
    found, other = run(
        lambda worker: windows(worker, computes=computes),
        strategy,
        out=tmp_path / "broken",
        resume=True,
        **how,
    )
    assert other.resumed_at >= 10
    assert any(before for _, before in drawn) == computes
    assert same_models(wanted, found)
    same = ("steps", "samples", "virtual_seconds", "bytes_sent", "metrics")
    assert {k: getattr(other, k) for k in same} == {k: getattr(one, k) for k in same}
