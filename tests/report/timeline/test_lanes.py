"""How a rank spent its time: no moment is missing, none is counted twice, each has its kind."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import train
from support.worlds import on_shared_memory

import paceline as pl
from paceline.record.trace import is_duration, read
from paceline.report.timeline.items import (
    APPLY,
    COMPUTE,
    IO,
    RECEIVE,
    SEND,
    WAIT,
    Arrow,
    Step,
    Stretch,
)
from paceline.report.timeline.lanes import Lane
from paceline.report.timeline.traced import Tally, TracedRun
from paceline.sim.cluster import Cluster, Compute, Link, Loading
from paceline.strategies.allreduce import AllReduce

STRATEGIES = [
    "allreduce",
    "sasgd(interval=3)",
    "hierarchical(group_size=2)",
    "layered(group_size=2)",
    "downpour(shards=2)",
    "easgd(interval=2)",
    "gossip",
    "gossip(mode=push)",
    "gossip(sync=true)",
    "adpsgd",
]
NEVER_WAIT = ("gossip(mode=push)", "adpsgd")
LOADING = Cluster(
    name="loading",
    network=Link(latency_s=1e-3, bytes_per_s=1e5),
    compute=Compute(step_s=5e-3, spread=0.4),
    loading=Loading(batch_s=2e-3),
)


def simulated(folder, **how):
    run = pl.simulate(train, **{"workers": 4, "cluster": LOADING, "out": folder, **how})
    return run, TracedRun(folder)


def spans_of(traced, **window):
    """The spans of each rank."""
    spans = defaultdict(list)
    for item in traced.items(**window):
        if isinstance(item, Stretch):
            spans[item.rank].append(item)
    return spans


def seconds_of(traced):
    tally = Tally(traced)
    for item in traced.items():
        tally.add(item)
    return tally.seconds


def assert_follow_each_other(spans, within_s=1e-8):
    """Spans follow each other without gaps or overlaps."""
    for one, next_one in pairwise(spans):
        assert one.end_s >= one.start_s
        assert next_one.start_s == pytest.approx(one.end_s, abs=within_s)
        assert next_one.start_s >= one.end_s


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_virtual_time_every_moment_has_its_kind(strategy, tmp_path):
    run, traced = simulated(tmp_path, strategy=strategy)
    seconds, shares = seconds_of(traced), []
    for rank, spans in spans_of(traced).items():
        assert_follow_each_other(spans)
        times = traced.times[rank]
        if times.is_worker:
            whole_s = times.last_step_s - times.first_step_s
            assert sum(seconds[rank].values()) == pytest.approx(whole_s, rel=1e-6)
            shares.append(sum(seconds[rank][kind] for kind in (WAIT, SEND, RECEIVE)) / whole_s)
    assert len(shares) == 4
    assert sum(shares) / 4 == pytest.approx(run.wait_share, abs=1e-6)
    assert run.wait_share > 0 or strategy in NEVER_WAIT


def test_the_time_before_the_last_to_arrive_is_waiting_the_rest_is_receiving(tmp_path):
    compute = Compute(step_s=0.1, slow={1: 3.0})
    cluster = Cluster(name="c", network=Link(latency_s=0.01), compute=compute)
    run, traced = simulated(tmp_path, workers=2, cluster=cluster)
    steps, seconds = run.steps / 2, seconds_of(traced)
    assert seconds[0][COMPUTE] == pytest.approx(0.1 * steps)
    assert seconds[0][WAIT] == pytest.approx(0.2 * steps)
    assert seconds[1][COMPUTE] == pytest.approx(0.3 * steps)
    assert seconds[1][WAIT] == 0
    for mine in seconds.values():  # both ways, over two ranks; once to agree on weights
        assert mine[RECEIVE] == pytest.approx(2 * 0.01 * (steps + 1))
        assert mine[SEND] == mine[APPLY] == mine[IO] == 0


def test_a_message_is_waited_for_until_it_is_sent_then_received(tmp_path):
    def late(worker):
        net = pl_net(worker)
        x = net.weight.detach().flatten()
        if worker.rank == 0:
            worker.comm.clock.charge(0.5)
            worker.comm.board.post(x, 1)
        else:
            worker.comm.receive(x, 0)

    cluster = Cluster(name="c", network=Link(latency_s=0.25))
    pl.simulate(late, workers=2, cluster=cluster, out=tmp_path)
    traced = TracedRun(tmp_path)
    waits = [(s.kind, s.end_s - s.start_s) for s in spans_of(traced)[1] if s.facts.get("peer") == 0]
    (message,) = [item for item in traced.items() if isinstance(item, Arrow)]
    assert [kind for kind, _ in waits[-2:]] == [WAIT, RECEIVE]
    assert [took_s for _, took_s in waits[-2:]] == pytest.approx([0.5, 0.25])
    assert (message.src, message.dst) == (0, 1)
    assert message.taken_s == pytest.approx(message.sent_s)


def pl_net(worker):
    """Make a step with a small model, so that there is a timeline."""
    import torch

    net = torch.nn.Linear(3, 1)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net(torch.ones(1, 3)).sum().backward()
    sgd.step()
    return net


def test_loading_is_io_and_evaluation_is_computing(tmp_path):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def evaluate(worker):
        pl_net(worker)
        batches = worker.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 2)), 4))
        with torch.no_grad():
            list(batches)
        worker.comm.barrier()

    cluster = Cluster(
        name="c", compute=Compute(sample_s=0.3), loading=Loading(batch_s=0.1, sample_s=0.2)
    )
    pl.simulate(evaluate, workers=1, cluster=cluster, out=tmp_path)
    traced = TracedRun(tmp_path)
    facts = [(span.kind, span.end_s - span.start_s) for span in spans_of(traced)[0]]
    kinds, took_s = zip(*[one for one in facts if one[1]], strict=True)
    assert kinds[-4:] == (IO, COMPUTE, IO, COMPUTE)
    assert took_s[-4:] == pytest.approx((0.9, 0.4, 0.9, 0.4))


@dataclass(kw_only=True)
class Thoughtful(AllReduce):
    """All-reduce whose updates take time."""

    def step(self, x, g):
        super().step(x, g)
        self.comm.clock.charge(0.25)


def test_what_a_method_computes_after_the_gradient_is_applying(tmp_path):
    run, traced = simulated(tmp_path, strategy=Thoughtful(), workers=2)
    for rank, mine in seconds_of(traced).items():
        assert mine[APPLY] == pytest.approx(0.25 * run.steps / 2)
        kinds = [span.kind for span in spans_of(traced, from_s=0.0)[rank]]
        assert kinds[kinds.index(APPLY) - 1] == RECEIVE
        assert kinds[kinds.index(APPLY) + 1] == IO


def test_time_begins_where_the_first_gradient_is_ready(tmp_path):
    for cluster in ("ethernet-1g", "wan", LOADING):
        _, traced = simulated(tmp_path, cluster=cluster)
        first = [
            next(item for item in traced.items() if isinstance(item, Step) and item.rank == rank)
            for rank in range(4)
        ]
        ready = [
            max(s.end_s for s in spans if s.kind == COMPUTE and s.end_s <= step.end_s)
            for step, spans in zip(first, spans_of(traced).values(), strict=True)
        ]
        assert min(ready) == pytest.approx(0.0, abs=1e-9)
        assert traced.start_s < traced.begin_s < 0 < traced.end_s


def test_a_step_lasts_from_the_one_before_it(tmp_path):
    run, traced = simulated(tmp_path, strategy="gossip")
    steps = [item for item in traced.items() if isinstance(item, Step)]
    assert len(steps) == run.steps and sum(step.samples for step in steps) == run.samples
    for rank in range(4):
        mine = [step for step in steps if step.rank == rank]
        assert [step.number for step in mine] == list(range(len(mine)))
        assert all(a.end_s == b.start_s for a, b in pairwise(mine))


@pytest.mark.parametrize("strategy", ["gossip", "gossip(mode=push)", "easgd", "layered"])
def test_every_received_message_appears_once(strategy, tmp_path):
    _, traced = simulated(tmp_path, strategy=strategy)
    records = list(read(tmp_path / "trace.jsonl"))
    taken = [r for r in records if r["event"] == "recv" or (r["event"] == "peek" and r["version"])]
    messages = [item for item in traced.items() if isinstance(item, Arrow)]
    assert sorted((r["peer"], r["rank"]) for r in taken) == sorted(m[::2] for m in messages)
    assert messages and all(m.sent_s <= m.taken_s for m in messages)


def test_a_message_received_before_its_sender_recorded_it_still_appears(tmp_path):
    """In real runs the receiver's record may be older than the sender's."""
    _, traced = simulated(tmp_path, strategy="easgd", workers=2, cluster="one-server")
    before = sorted(item for item in traced.items() if isinstance(item, Arrow))
    records = list(read(tmp_path / "trace.jsonl"))
    for record in records:
        if record["event"] == "post" and record["rank"] == 2:
            record["t"] += 1e-4
            record["send_s"] += 1e-4
    records.sort(key=lambda record: record["t"])
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    after = sorted(item for item in TracedRun(tmp_path).items() if isinstance(item, Arrow))
    assert [message[::2] for message in after] == [message[::2] for message in before]
    assert all(message.sent_s <= message.taken_s for message in after)


# Real runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A run in real processes: its result, and its folder."""
    folder = tmp_path_factory.mktemp("real")
    return pl.launch(train, workers=2, strategy="easgd(interval=2)", out=folder), folder


@on_shared_memory
def test_a_real_run_has_every_kind_and_the_waiting_of_its_result(real):
    run, folder = real
    traced = TracedRun(folder)
    seconds, shares = seconds_of(traced), []
    for rank, spans in spans_of(traced).items():
        assert_follow_each_other(spans)
        assert all(span.kind != COMPUTE for span in spans) or traced.times[rank].is_worker
        if traced.times[rank].is_worker:
            whole_s = traced.times[rank].last_step_s - traced.times[rank].first_step_s
            assert sum(seconds[rank].values()) == pytest.approx(whole_s, rel=1e-3)
            shares.append((seconds[rank][WAIT] + seconds[rank][RECEIVE]) / whole_s)
            assert all(seconds[rank][kind] > 0 for kind in (COMPUTE, APPLY, IO, RECEIVE, SEND))
    assert len(shares) == 2
    assert sum(shares) / 2 == pytest.approx(run.wait_share, rel=1e-3)
    assert seconds[2][APPLY] > 0 and seconds[2][COMPUTE] == 0


@on_shared_memory
def test_a_trace_without_durations_is_replayed_but_has_no_timeline(real, tmp_path):
    """As earlier versions wrote it."""
    run, folder = real
    old = shutil.copytree(folder, tmp_path / "old")
    records = [
        {k: v for k, v in r.items() if not is_duration(k) and k != "first"}
        for r in read(folder / "trace.jsonl")
    ]
    (old / "trace.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    how = {"workers": 2, "strategy": "easgd(interval=2)", "cluster": "wan"}
    for recorded in (old, folder):
        again = pl.simulate(train, replay=recorded, **how)
        assert again.steps == run.steps
    with pytest.raises(pl.UsageError, match=r"its trace has no durations: an older"):
        TracedRun(old)


def test_the_traces_of_another_launchers_ranks_are_merged(tmp_path):
    """Each rank has its own clock and its own trace."""
    _, whole = simulated(tmp_path / "whole", workers=3)
    parts = tmp_path / "parts"
    parts.mkdir()
    for record in read(tmp_path / "whole/trace.jsonl"):
        record["t"] += 100.0 * record["rank"]
        with (parts / f"trace.{record['rank']}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    again = TracedRun(parts)
    assert (again.name, again.about) == ("real", "another launcher")
    for rank, spans in spans_of(whole).items():
        other = [span for span in spans_of(again)[rank] if span.end_s > span.start_s + 1e-8]
        mine = [span for span in spans if span.end_s > span.start_s + 1e-8]
        assert [span[:3] for span in other] == [span[:3] for span in mine]
        assert [s.end_s for s in other] == pytest.approx([s.end_s for s in mine], abs=1e-8)


# One rank ----------------------------------------------------------------------------------------

durations = st.floats(0, 1).map(lambda value: round(value, 4))


@given(st.lists(st.tuples(durations, durations), max_size=6), durations, durations, st.booleans())
def test_the_spans_of_a_step_fill_it_whatever_was_in_it(busy, before_s, apply_s, is_worker):
    lane, at_s = Lane(0, is_worker, 1.0), 1.0
    for gap_s, took_s in busy:
        lane.add(WAIT, "wait", at_s + gap_s, at_s + gap_s + took_s)
        at_s += gap_s + took_s
    end_s = at_s + 0.5
    step = {"t": end_s, "event": "step", "step": 0, "samples": 1, "apply_s": apply_s}
    step["step_s"] = min(before_s, end_s - 1.0)
    items = list(lane.closed(step) if is_worker else lane.rest(end_s))
    spans = [item for item in items if isinstance(item, Stretch)]
    assert_follow_each_other(spans)
    assert spans[0].start_s == 1.0 and spans[-1].end_s == pytest.approx(end_s)
    assert sum(span.kind == WAIT for span in spans) == len(busy)
    if is_worker:
        applied_s = sum(span.end_s - span.start_s for span in spans if span.kind == APPLY)
        assert applied_s <= min(apply_s, step["step_s"]) + 1e-6
    else:
        assert {span.kind for span in spans} <= {WAIT, APPLY}
