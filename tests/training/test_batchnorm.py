"""Buffers and frozen parameters: in the answer, in mid-run, and for late joiners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import batchnorm
from support.batchnorm import images, statistics
from support.training import beat
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.comm.limits import Limits
from paceline.common.faults import freeze, join, kill
from paceline.sim.cluster import Cluster, Compute
from paceline.strategies import STRATEGIES
from paceline.training.rest import Rest

FORMS = [
    *STRATEGIES,
    "sasgd(interval=3)",
    "easgd(sync=true, momentum=0.5)",
    "gossip(mode=push)",
    "gossip(sync=true)",
    "downpour(push_interval=2, fetch_interval=3, shards=2)",
    "layered(group_size=2)",
]
TAKES_LATE = ["downpour", "easgd", "cyclic", "gossip", "ssp", "adpsgd"]
PLACE = Cluster(compute=Compute(step_s=1.0, spread=0.1))


def together(shares: list[tuple[int, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The mean and variance of all data, from samples and statistics of each worker."""
    weights = torch.tensor([float(samples) for samples, _ in shares]).double()
    weights /= weights.sum()
    means = torch.stack([values["mean"].double() for _, values in shares])
    variances = torch.stack([values["var"].double() for _, values in shares])
    mean = (weights[:, None] * means).sum(0)
    spread = (weights[:, None] * (means - mean).square()).sum(0)
    count = sum(values["count"] for _, values in shares)
    return {"mean": mean, "var": (weights[:, None] * variances).sum(0) + spread, "count": count}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert int(one["count"]) == int(other["count"])
    for name in ("mean", "var"):
        torch.testing.assert_close(one[name].double(), other[name], rtol=1e-6, atol=1e-6)


# At the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", FORMS)
def test_the_answer_has_the_statistics_of_all_workers_data(spec):
    """Weighted by samples, with batch counts added up; the same on every worker."""
    before: dict[int, tuple[int, dict[str, Tensor]]] = {}
    after: dict[int, dict[str, Tensor]] = {}

    def train(worker):
        net, sgd, batches = batchnorm.begin(worker)
        for x in batches:
            batchnorm.learn(net, sgd, x)
        before[worker.rank] = worker._session.stepper.samples, statistics(net)
        worker.finish()
        after[worker.rank] = statistics(net)
        with worker.answer():
            assert torch.equal(statistics(net)["mean"], after[worker.rank]["mean"])

    pl.simulate(train, workers=4, strategy=spec, cluster="mixed-lab")
    shares = [before[rank] for rank in range(4)]
    assert not torch.allclose(shares[0][1]["mean"], shares[1][1]["mean"], atol=1e-3)
    for rank in range(4):
        assert_close(after[rank], together(shares))
        assert torch.equal(after[rank]["mean"], after[0]["mean"])
        assert torch.equal(after[rank]["var"], after[0]["var"])


@pytest.mark.parametrize("spec", ["allreduce", "gossip", "easgd", "downpour"])
def test_a_worker_that_has_not_trained_counts_for_nothing(spec):
    """Neither a worker without a batch, nor one whose statistics are not finite."""
    seen = {}

    def train(worker):
        net = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), nn.Linear(1, 1))
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.0))
        for _ in range(0 if worker.rank == 1 else 3):
            sgd.zero_grad()
            net(torch.tensor([[4.0], [6.0]])).sum().backward()
            sgd.step()
        if worker.rank == 2:
            net[0].running_var.fill_(torch.inf)
        worker.finish()
        norm = net[0]
        seen[worker.rank] = (
            norm.running_mean.item(),
            norm.running_var.item(),
            int(norm.num_batches_tracked),
        )

    pl.simulate(train, workers=3, strategy=spec)
    assert seen == dict.fromkeys(range(3), (5.0, 2.0, 6))


class Buffered(nn.Module):
    """A model with buffers of all kinds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.norm.num_batches_tracked.fill_(100)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        nn.init.constant_(self.frozen.weight, rank + 0.1)
        self.register_buffer("average", torch.full((2,), float(rank)))
        self.register_buffer("constant", torch.linspace(0.1, 0.7, 5) + rank)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("places", torch.arange(3) + 10 * rank)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("grows", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.layer(self.norm(x)))


def test_each_kind_of_buffer_is_handled_by_its_rule():
    """A moving average is averaged; equal buffers stay equal to the bit."""
    first = Buffered(0)
    seen = {}

    def train(worker):
        net = Buffered(worker.rank)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
        assert torch.equal(net.constant, first.constant) and torch.equal(net.places, first.places)
        for _ in range(3):
            sgd.zero_grad()
            net(torch.randn(4, 2)).sum().backward()
            sgd.step()
            net.average = 0.5 * net.average + worker.rank  # many modules replace their buffers
            net.cache = torch.zeros(worker.rank + 1)  # and some let them grow
        if worker.rank == 1:
            net.grows = torch.ones(2)
        worker.finish()
        seen[worker.rank] = net

    pl.simulate(train, workers=3, strategy="gossip")
    for rank, net in seen.items():
        assert torch.allclose(net.average, torch.full((2,), 1.75))  # of 0, 1.75 and 3.5
        assert torch.equal(net.constant, first.constant)
        assert torch.equal(net.mask, first.mask)
        assert torch.equal(net.places, first.places)
        assert torch.equal(net.frozen.weight, first.frozen.weight)
        assert net.cache.shape == (rank + 1,)
        assert net.grows.tolist() == ([1.0, 1.0] if rank == 1 else [0.0])
        assert int(net.norm.num_batches_tracked) == 100 + 3 * 3


def test_bytes_of_buffers_are_not_counted_and_take_no_virtual_time():
    def run(norm: bool) -> pl.Result:
        def train(worker):
            torch.manual_seed(0)
            middle = nn.BatchNorm1d(4, affine=False) if norm else nn.Identity()
            net = nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 1))
            net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
            for _ in range(12):
                sgd.zero_grad()
                net(torch.randn(4, 3)).sum().backward()
                sgd.step()
            before_s = worker.comm.clock.now()
            with worker.answer():
                assert worker.comm.clock.now() == before_s

        return pl.simulate(train, workers=3, strategy="allreduce", cluster="ideal")

    plain, normal = run(False), run(True)
    assert normal.bytes_sent == plain.bytes_sent
    assert normal.virtual_seconds == plain.virtual_seconds


# In mid-run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["allreduce", "gossip", "easgd", "cyclic"])
def test_in_mid_run_the_answer_has_what_others_have_published(spec):
    """The other workers take no part; afterwards this one has its own statistics again."""
    shown: dict[int, tuple[int, dict[str, Tensor]]] = {}
    facts = {}

    def train(worker):
        net, sgd, batches = batchnorm.begin(worker, data="static")
        for step, x in enumerate(batches):
            batchnorm.learn(net, sgd, x)
            if step == 4:
                break
        shown[worker.rank] = worker._session.stepper.samples, statistics(net)
        worker._session.measuring().barrier()
        if worker.rank == 2:
            with worker.answer(net):
                facts["inside"] = statistics(net)
                net(images(3)[:8])  # in training mode, which changes statistics
            facts["after"] = statistics(net)
        worker._session.measuring().barrier()

    pl.simulate(train, workers=3, strategy=spec, cluster="mixed-lab")
    assert_close(facts["inside"], together([shown[rank] for rank in range(3)]))
    for name, value in shown[2][1].items():
        assert torch.equal(facts["after"][name], value)


@pytest.mark.parametrize("workers", [1, 3])
def test_recalibrated_statistics_are_those_of_the_batches(workers):
    """They are means over the batches, only in the answer, and nothing else changes."""
    facts: list[Any] = []

    def train(worker):
        torch.manual_seed(0)
        net = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
        loader = DataLoader(TensorDataset(images(0)), batch_size=8, shuffle=True)
        batches = worker.setup_dataloaders(loader)
        net[1].eval()
        taken = 0
        for (x,) in batches:
            batchnorm.learn(net, sgd, x)
            taken += 1
            if taken == 2:
                own, generator = statistics(net), torch.get_rng_state()
                fixed = images(1)[:30].split(10)
                with worker.answer(net):
                    worker.recalibrate([(part, None) for part in fixed], batches=2)
                    inside = statistics(net)
                    worker.recalibrate(batches)
                    whole = statistics(net)
                assert net.training and net[0].momentum == 0.1 and not net[1].training
                assert all(torch.equal(own[k], v) for k, v in statistics(net).items())
                assert torch.equal(generator, torch.get_rng_state())
                facts.append((inside, whole, fixed[:2]))
        worker.log(taken=taken)

    result = pl.simulate(train, workers=workers, strategy="gossip")
    for inside, whole, parts in facts:
        assert int(inside["count"]) == 2 and int(whole["count"]) == len(images(0)) // 8
        mean = torch.stack([part.mean(0) for part in parts]).mean(0)
        variance = torch.stack([part.var(0) for part in parts]).mean(0)
        torch.testing.assert_close(inside["mean"], mean)
        torch.testing.assert_close(inside["var"], variance)
        torch.testing.assert_close(whole["mean"], images(0).mean(0))
    assert (
        sum(m["taken"] for m in result.metrics) == len(images(0)) // 8
    )  # recalibration took no batch


def test_recalibration_without_a_batch_is_refused_and_changes_nothing():
    def train(worker):
        net, sgd, batches = batchnorm.begin(worker)
        for x in batches:
            batchnorm.learn(net, sgd, x)
        own = statistics(net)
        with pytest.raises(pl.UsageError, match=r"needs at least one batch"):
            worker.recalibrate([])
        with pytest.raises(pl.UsageError, match=r"batches \(0\) must be at least 1"):
            worker.recalibrate(batches, batches=0)
        with pytest.raises(RuntimeError):
            worker.recalibrate([images(0)[:4], torch.zeros(4, 1)])
        assert all(torch.equal(own[k], v) for k, v in statistics(net).items())

    pl.simulate(train, workers=2, strategy="allreduce")


def test_after_the_end_recalibrated_statistics_stay_and_are_the_same_on_all_workers():
    seen = {}
    own = torch.Generator().manual_seed(1)
    shuffled = DataLoader(TensorDataset(images(0)), batch_size=8, shuffle=True, generator=own)

    def train(worker):
        net, sgd, batches = batchnorm.begin(worker)
        for x in batches:
            batchnorm.learn(net, sgd, x)
        worker.finish()
        before = statistics(net)
        worker.recalibrate(shuffled, batches=3)
        seen[worker.rank] = statistics(net)
        assert not torch.equal(seen[worker.rank]["mean"], before["mean"])

    pl.simulate(train, workers=2, strategy="easgd")
    assert int(seen[0]["count"]) == 3
    assert all(torch.equal(seen[0][name], value) for name, value in seen[1].items())


# Who comes late ----------------------------------------------------------------------------------


def late(strategy: str, faults: list[Any], **how: Any) -> tuple[pl.Result, list[Any]]:
    """Train on data with known statistics; returns what each start and step of a worker saw."""
    seen: list[Any] = []

    def train(worker):
        net = Buffered(worker.rank)
        net.norm = nn.BatchNorm1d(2, momentum=1.0)
        net, sgd = worker.setup(net, SGD(net.layer.parameters(), lr=0.0))
        seen.append((worker.rank, 0, net.norm.running_mean[0].item(), snapshot(net)))
        for step in range(20):
            sgd.zero_grad()
            net(torch.tensor([[2.0, 0.0], [4.0, 1.0]]) + worker.rank).sum().backward()
            sgd.step()
            seen.append((worker.rank, step + 1, net.norm.running_mean[0].item(), snapshot(net)))
        worker.finish()

    how.setdefault("limits", Limits(dead_s=3.0))
    result = pl.simulate(train, workers=4, strategy=strategy, cluster=PLACE, faults=faults, **how)
    return result, seen


def snapshot(net: Buffered) -> dict[str, Tensor]:
    named = {**dict(net.named_buffers()), **dict(net.named_parameters())}
    return {name: value.detach().clone() for name, value in named.items()}


def assert_like_the_first(mine: dict[str, Tensor]) -> None:
    first = snapshot(Buffered(0))
    for name in ("frozen.weight", "constant", "places"):
        assert torch.equal(mine[name], first[name]), name


@pytest.mark.parametrize("strategy", TAKES_LATE)
def test_a_late_joiner_has_the_others_buffers_and_frozen_parameters(strategy):
    result, seen = late(strategy, [join(rank=2).at(seconds=9.0)])
    assert result.joined_workers == 1
    (mean, mine), *_ = [(mean, mine) for rank, step, mean, mine in seen if (rank, step) == (2, 0)]
    assert mean == pytest.approx(3 + (0 + 1 + 3) / 3, abs=0.5)  # weighted by the progress of each
    assert int(mine["norm.num_batches_tracked"]) >= 3 * 8
    assert_like_the_first(mine)


@pytest.mark.parametrize("strategy", ["gossip", "downpour"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_restarted_worker_has_the_others_buffers(strategy, rank):
    result, seen = late(strategy, [kill(rank=rank).at(step=5)], max_restarts=1)
    assert (result.lost_workers, result.joined_workers) == (1, 1)
    starts = [(mean, mine) for who, step, mean, mine in seen if (who, step) == (rank, 0)]
    mean, mine = starts[1]
    others = sum(range(4)) - rank
    assert mean == pytest.approx(3 + others / 3, abs=0.5)
    assert_like_the_first(mine)


@pytest.mark.parametrize("strategy", ["gossip", "downpour"])
def test_a_worker_that_was_left_behind_takes_the_others_buffers(strategy):
    _, seen = late(strategy, [freeze(rank=3, for_s=6.0).at(seconds=4.5)])
    means = [mean for rank, step, mean, _ in seen if rank == 3 and step]
    assert min(means) == pytest.approx(3 + (0 + 1 + 2) / 3, abs=0.5)
    assert means.count(3.0 + 3) == 19  # its own, except for one


def test_a_late_joiner_adds_only_what_it_has_counted_itself():
    counts = {}

    def train(worker):
        net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        net[0].num_batches_tracked.fill_(1000)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
        for _ in range(20):
            sgd.zero_grad()
            net(torch.randn(4, 2)).sum().backward()
            sgd.step()
        worker.finish()
        counts[worker.rank] = int(net[0].num_batches_tracked)

    faults = [join(rank=2).at(seconds=9.0)]
    pl.simulate(train, workers=3, strategy="gossip", cluster=PLACE, faults=faults)
    assert counts == {0: 1060, 1: 1060, 2: 1060}


# Losses at the end -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["gossip", "downpour", "easgd(sync=true)", "allreduce"])
def test_a_loss_at_the_end_leaves_the_others_with_one_answer(strategy):
    """A worker dies just before it contributes its buffers."""
    ends = {}

    def train(worker):
        net, sgd, batches = batchnorm.begin(worker, data="static")
        for x in batches:
            batchnorm.learn(net, sgd, x)
        if worker.rank == 1:
            inner = worker._session.ports.inner
            share = worker._session.buffers.rest.share

            def die(weight: int) -> Tensor:
                inner.world.inject(kill(rank=1).at(seconds=0.0))
                inner.own.pass_time()
                return share(weight)

            worker._session.buffers.rest.share = die
        worker.finish()
        ends[worker.rank] = statistics(net)

    result = pl.simulate(train, workers=4, strategy=strategy, cluster=beat(), on_loss="continue")
    assert result.lost_workers == 1 and sorted(ends) == [0, 2, 3]
    for end in ends.values():
        assert all(torch.equal(end[name], value) for name, value in ends[0].items())


# On real processes -------------------------------------------------------------------------------


def test_on_every_transport_workers_end_with_the_same_statistics(transport):
    if transport == "simulated":
        result = pl.simulate(batchnorm.train, workers=3, strategy="gossip", cluster="mixed-lab")
    else:
        result = pl.launch(batchnorm.train, workers=3, strategy="gossip", transport=transport)
    ends = [record for record in result.metrics if "digest" in record]
    assert len(ends) == 3 and len({end["digest"] for end in ends}) == 1
    assert {end["count"] for end in ends} == {sum(end["taken"] for end in ends)}
    assert {end["unlike"] for end in ends} == {True}
    assert len({end["inside"] for end in ends}) == 1  # all had the same parameters


def test_a_killed_process_at_the_end_leaves_the_others_with_one_answer():
    how = {"workers": 3, "strategy": "gossip", "on_loss": "continue"}
    result = pl.launch(batchnorm.train, arguments={"victim": 1}, **how)
    ends = [record for record in result.metrics if "digest" in record]
    assert [end["rank"] for end in sorted(ends, key=lambda end: end["rank"])] == [0, 2]
    assert len({end["digest"] for end in ends}) == 1


# By itself ---------------------------------------------------------------------------------------


def test_a_model_with_only_trained_parameters_has_no_rest():
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    rest = Rest(net, {id(parameter) for parameter in net.parameters()})
    assert rest.is_empty and not rest.averaged
