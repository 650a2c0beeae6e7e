"""The result of a run: the keys that other tools read, and how they are computed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from support.results import RESULT_KEYS
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.record.result import RunRecorder, Summary
from paceline.sim.cluster import Compute
from paceline.strategies import strategy_name
from paceline.strategies.allreduce import AllReduce

SUMMARY = Summary(
    rank=0,
    steps=10,
    samples=320,
    bytes_sent=1000,
    first_step_s=2.0,
    last_step_s=6.0,
    first_wall_s=102.0,
    last_wall_s=106.0,
    wait_s=1.0,
    consensus=None,
)


@dataclass(kw_only=True)
class Alone(pl.Strategy):
    """A method whose workers never wait."""

    synchronous = False

    def step(self, x, g):
        self.local_update(g)


SAVED = {"checkpoint", "checkpoint_error", "resumed_at", "model_error"}


def result_of(*summaries, workers=None, strategy=None, logged=(), lost=(), **facts):
    recorder = RunRecorder(None, None)
    for rank in lost:
        recorder.event({"t": 1.0, "event": "lost", "rank": rank})
    for record in logged:
        recorder.metric(record)
    facts = {"workers": len(summaries) if workers is None else workers, "seed": 0, **facts}
    strategy = strategy or AllReduce()
    how = {"synchronous": strategy.synchronous, **facts}
    return recorder.result(strategy_name(strategy), summaries, began_s=100.0, **how)


def train(worker):
    net = nn.Linear(2, 1)
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
    loader = DataLoader(TensorDataset(torch.ones(24, 2)), batch_size=3)
    for (x,) in worker.setup_dataloaders(loader):
        sgd.zero_grad()
        net(x).sum().backward()
        sgd.step()
    worker.log(loss=1.0 + worker.rank, accuracy=0.5)


# Keys --------------------------------------------------------------------------------------------


def test_json_has_the_keys_that_other_tools_read():
    facts = result_of(SUMMARY).to_json()
    assert set(facts) == {*RESULT_KEYS, "out"}


def test_a_simulated_run_fills_every_key(tmp_path):
    run = pl.simulate(train, workers=2, cluster="ethernet-1g", seed=3, out=tmp_path)
    facts = json.loads(json.dumps(run.to_json()))
    assert {key for key, value in facts.items() if value is None} == {"as_model", "batched", *SAVED}
    assert (facts["strategy"], facts["workers"], facts["seed"]) == ("allreduce", 2, 3)
    assert (facts["steps"], facts["samples"]) == (8, 24)
    assert facts["staleness_mean"] == facts["staleness_max"] == 0
    assert facts["lost_workers"] == facts["joined_workers"] == 0
    assert facts["consensus_distance"] == 0 and facts["out"] == str(tmp_path)
    assert len(bytes.fromhex(facts["trace_hash"])) == 32


def test_throughput_is_that_of_all_workers_after_their_first_step():
    cluster = pl.Cluster(compute=Compute(step_s=1.0, factors=(1.0, 2.0)))
    run = pl.simulate(train, workers=2, cluster=cluster, strategy="gossip")
    assert (run.steps, run.samples) == (8, 24)
    assert run.samples_per_s == pytest.approx(3 / 1.0 + 3 / 2.0)
    assert result_of(SUMMARY).samples_per_s is None, "of a single step there is none"


@pytest.mark.transport("shared_memory")
def test_a_real_run_has_no_virtual_time_and_no_fingerprint():
    run = pl.launch(train, workers=2, strategy="sasgd(interval=2)")
    facts = json.loads(json.dumps(run.to_json()))
    empty = {key for key, value in facts.items() if value is None}
    simulated = {"virtual_seconds", "wire_bytes", "trace_hash", "as_model", "batched"}
    assert empty == {*simulated, "out", *SAVED}
    assert (facts["strategy"], facts["steps"], facts["samples"]) == ("sasgd", 8, 24)
    assert facts["seconds"] > 0 and facts["startup_seconds"] > 0
    assert 0 <= facts["wait_share"] <= 1


def test_the_users_own_strategy_is_named_by_its_class():
    assert result_of(SUMMARY, strategy=Alone()).strategy == "Alone"


def test_staleness_is_0_for_a_synchronous_method_and_null_without_any():
    assert result_of(SUMMARY).staleness_mean == result_of(SUMMARY).staleness_max == 0
    other = result_of(SUMMARY, strategy=Alone())
    assert other.staleness_mean is other.staleness_max is None


# Arithmetic --------------------------------------------------------------------------------------


def test_waiting_is_a_share_of_the_time_from_the_first_step_to_the_last():
    assert SUMMARY.wait_share == 1.0 / (6.0 - 2.0)
    assert replace(SUMMARY, wait_s=0.0).wait_share == 0
    assert replace(SUMMARY, wait_s=4.0).wait_share == 1


def test_seconds_are_wall_time_from_the_first_step_on():
    longer = replace(SUMMARY, rank=1, first_wall_s=103.0, last_wall_s=108.0)
    run = result_of(longer, SUMMARY)
    assert (run.startup_seconds, run.seconds) == (2.0, 5.0)


def test_a_worker_whose_steps_took_no_time_has_not_waited():
    assert replace(SUMMARY, first_step_s=6.0, wait_s=0.0).wait_share == 0


def test_workers_are_summed_and_servers_count_for_their_bytes_only():
    one = replace(SUMMARY, rank=1, steps=5, samples=100, bytes_sent=10, wait_s=3.0)
    server = replace(SUMMARY, rank=2, steps=99, samples=99, bytes_sent=7, wait_s=4.0)
    run = result_of(server, one, SUMMARY, workers=2)
    assert (run.steps, run.samples, run.bytes_sent) == (15, 420, 1017)
    assert run.wait_share == pytest.approx((0.25 + 0.75) / 2)


def test_a_run_that_lost_all_workers_has_no_waiting_time():
    run = result_of(workers=2, lost=[0, 1])
    assert (run.steps, run.samples, run.wait_share, run.lost_workers) == (0, 0, 0.0, 2)


def test_the_faster_of_two_workers_waits_for_the_other():
    """Steps of 1 s and 2 s on free links: the first worker waits half its time, the other none."""
    compute = pl.sim.cluster.Compute(step_s=1.0, factors=(1.0, 2.0))
    run = pl.simulate(train, workers=2, cluster=pl.Cluster(compute=compute))
    assert run.wait_share == pytest.approx((0.5 + 0.0) / 2)
    assert run.virtual_seconds == pytest.approx(4 * 2.0)


def test_loading_is_not_waiting():
    """4 steps: load 1 s, compute 1 s, wait 1 s for the other; the first load is before step 0."""
    cluster = pl.Cluster(
        compute=pl.sim.cluster.Compute(step_s=1.0, factors=(1.0, 2.0)),
        loading=pl.sim.cluster.Loading(batch_s=1.0),
    )
    run = pl.simulate(train, workers=2, cluster=cluster)
    assert run.wait_share == pytest.approx((4 / (4 * 3 - 1) + 0.0) / 2)


def test_bytes_are_what_the_strategy_sent():
    """Three numbers of 4 bytes: a broadcast, 4 steps, on 2 workers."""
    run = pl.simulate(train, workers=2, cluster="ideal")
    assert run.bytes_sent == 12 * 2 * (1 + 4)


@pytest.mark.parametrize("values", [(None, 0.5), (0.5, None), (0.5, 0.25)])
def test_the_workers_agree_on_the_consensus_distance(values):
    summaries = [replace(SUMMARY, rank=rank, consensus=c) for rank, c in enumerate(values)]
    assert result_of(*summaries).consensus_distance == 0.5


def test_the_consensus_distance_may_be_unknown():
    assert result_of(SUMMARY).consensus_distance is None


@pytest.mark.parametrize("consensus", [None, 0.125])
def test_a_summary_can_travel_as_a_vector(consensus):
    summary = replace(SUMMARY, rank=3, consensus=consensus)
    numbers = torch.tensor(summary.numbers(), dtype=torch.float64)
    assert Summary.from_numbers(numbers.tolist()) == summary


# Metrics -----------------------------------------------------------------------------------------


def test_loss_and_accuracy_are_the_last_ones_logged():
    run = result_of(SUMMARY, logged=[{"loss": 3.0}, {"loss": 2.0, "accuracy": 0.5}, {"other": 1}])
    assert (run.loss, run.accuracy) == (2.0, 0.5)


def test_loss_and_accuracy_are_null_if_none_was_logged():
    run = result_of(SUMMARY, logged=[{"other": 1}])
    assert run.loss is run.accuracy is None
    assert run.to_json()["loss"] is None


def test_the_time_to_a_target_runs_from_the_first_step():
    logged = [{"t": 3.0, "accuracy": 0.5}, {"t": 4.0, "loss": 1.0}, {"t": 5.0, "accuracy": 0.75}]
    later = replace(SUMMARY, rank=1, first_step_s=2.5)
    run = result_of(later, SUMMARY, logged=[*logged, {"t": 6.0, "accuracy": 0.6}])
    assert run.seconds_to(0.5) == 1.0
    assert run.seconds_to(0.6) == run.seconds_to(0.75) == 3.0
    assert run.seconds_to(0.8) is None


def test_metrics_are_kept_in_order_written_and_passed_on(tmp_path):
    passed_on = []
    recorder = RunRecorder(tmp_path, passed_on.append)
    logged = [{"loss": 2.0, "rank": 1}, {"loss": 1.0, "rank": 0}]
    for record in logged:
        recorder.metric(record)
    recorder.close()
    assert recorder.metrics == passed_on == logged
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == logged


def test_metrics_are_not_in_the_json():
    assert "metrics" not in result_of(SUMMARY, logged=[{"loss": 1.0}]).to_json()


def test_a_worker_that_never_set_up_has_done_nothing():
    run = pl.simulate(lambda worker: worker.log(loss=1.0), workers=2, cluster="ideal")
    assert (run.steps, run.samples, run.bytes_sent, run.wait_share) == (0, 0, 0, 0.0)
    assert run.consensus_distance is None and run.loss == 1.0
