"""``paceline plan``: what it tries, what it says, and how it compares with real runs."""

from __future__ import annotations

import json

import pytest

import paceline as pl
from paceline.cli.plan import _how_sure, goal_of
from paceline.errors import UsageError
from paceline.lab.plan.estimate import Candidate, Estimate, Goal
from paceline.lab.plan.search import default_specs, failures, lead, near_best, order
from paceline.lab.trials import TrialOutcome
from paceline.sim.cluster import Cluster, Compute
from paceline.strategies import STRATEGIES, make_strategy

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def train(worker, steps=12):
    net = torch.nn.Linear(2, 1)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    data = DataLoader(TensorDataset(torch.ones(3 * steps * worker.size, 2)), batch_size=3)
    for x, in worker.setup_dataloaders(data):
        sgd.zero_grad()
        net(x).sum().backward()
        sgd.step()
        worker.log(accuracy=0.1 * worker.steps)
"""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Run trials in this process, which is faster."""
    monkeypatch.setattr("paceline.lab.trials.cores", lambda: 1)


@pytest.fixture
def plan(paceline, tmp_path):
    """Plan for a script that reaches accuracy 0.5 at its fifth step."""
    (tmp_path / "mine.py").write_text(SCRIPT)

    def run(*more, code=0, script="mine.py"):
        line = ["plan", script, "-s", "allreduce,sasgd", "-w", "2,4", "-c", "wan"]
        wrote = paceline(*line, "--target", 0.5, *more, "--json", code=code)
        return json.loads(wrote.out.splitlines()[-1]) if code == 0 else wrote.err

    return run


def outcome(seconds, accuracy=0.9, **facts):
    """A simulation that reached its accuracy after some seconds."""
    known = dict.fromkeys(("loss", "accuracy", "staleness_mean", "staleness_max"))
    known |= dict.fromkeys(("consensus_distance", "out"))
    counts = dict.fromkeys(("seed", "bytes_sent", "lost_workers"), 0) | {"steps": 5, "samples": 20}
    result = pl.Result(
        strategy="gossip",
        workers=2,
        seconds=1.0,
        startup_seconds=0.0,
        wait_share=0.0,
        joined_workers=0,
        first_step_s=1.0,
        metrics=[{"t": 1.0 + seconds, "accuracy": accuracy}],
        **known,
        **counts,
        **facts,
    )
    return TrialOutcome(result=result)


def estimate(*seconds, workers=2, price=None, spec="gossip", **facts):
    candidate = Candidate(spec, make_strategy(spec), workers)
    cluster = Cluster(compute=Compute(sample_s=1e-3, factors=(1.0, 3.0)))
    outcomes = {seed: outcome(at_s, **facts) for seed, at_s in enumerate(seconds)}
    return Estimate(candidate, Goal(target=0.8, price=price), cluster, outcomes)


def test_methods_with_an_interval_are_tried_with_several():
    specs = list(default_specs())
    assert {make_strategy(spec).__class__ for spec in specs} == {
        make_strategy(name).__class__ for name in STRATEGIES
    }
    intervals = {vars(make_strategy(s))["interval"] for s in specs if s.startswith("sasgd")}
    assert {4, 16} <= intervals and len(specs) == len(set(specs))


def test_time_cost_and_goodput_are_those_of_the_runs():
    two = estimate(10.0, 20.0, price=3.0, samples_per_s=500.0)
    assert two.seconds.mean == 15.0 and two.seconds.low < 10.0
    assert two.cost.mean == pytest.approx(15.0 * 2 * 3.0 / 3600)
    alone = 1 / 1e-3 + 1 / 3e-3  # samples per second of a fast worker and of a slow one
    assert two.goodput == pytest.approx(500.0 / alone)
    served = estimate(10.0, price=3.0, spec="downpour")
    assert served.cost.mean == pytest.approx(10.0 * 3 * 3.0 / 3600), "the server costs as much"


def test_a_candidate_that_missed_the_target_once_is_not_taken():
    missed = estimate(1.0, 1.0)
    missed.outcomes[2] = outcome(1.0, accuracy=0.7)
    sure = estimate(50.0)
    assert missed.seconds is None and sorted([missed, sure], key=order)[0] is sure
    assert near_best([missed, sure]) == [sure]


def test_what_is_far_from_the_best_in_time_and_in_cost_is_ruled_out():
    fast = estimate(10.0, workers=8, price=1.0)
    cheap = estimate(30.0, workers=2, price=1.0)
    neither = estimate(31.0, workers=8, price=1.0)
    assert near_best([fast, cheap, neither]) == [fast, cheap]


def test_the_lead_is_that_of_the_seeds_that_both_have():
    assert lead(estimate(2.0, 4.0), estimate(3.0, 6.0, 1.0)).mean == pytest.approx(1.5)


def test_what_is_closer_than_two_evaluations_is_not_told_apart():
    first, close, far = estimate(1.0, 1.0, 1.0), estimate(*[1.2] * 3), estimate(*[1.4] * 3)
    for result in first.results:
        result.metrics.append({"t": 2.3, "accuracy": 0.95})
    assert "Not sure: over 3 seeds it was 1.20 to 1.20 times" in _how_sure(first, close)
    assert "accuracy was measured every 300.0 ms" in _how_sure(first, close)
    assert _how_sure(first, far).startswith("Sure: over 3 seeds it was 1.40 to 1.40 times")


def test_failures_come_as_often_as_the_mean_time_says():
    candidate = Candidate("downpour", make_strategy("downpour"), 40)
    drawn = list(failures(candidate, 100.0, seed=1))
    assert drawn == list(failures(candidate, 100.0, seed=1))
    assert drawn != list(failures(candidate, 100.0, seed=2))
    assert {fault.rank for fault in drawn} == set(range(41))
    early = [fault for fault in drawn if fault.at_s <= 500.0 and fault.rank < 40]
    assert 150 < len(early) < 250, "40 workers, 500 s, one failure in 100 s"


def test_the_advice_is_the_fastest_way(plan):
    found = plan("--price", 2.0)
    rows = found["rows"]
    assert found["take"] == {"strategy": "sasgd", "workers": rows[0]["workers"]}
    times = [row["seconds_to_target"][0] for row in rows]
    assert times == sorted(times) and len(rows) == 4
    lockstep = next(r for r in rows if r["strategy"] == "allreduce" and r["workers"] == 2)
    assert lockstep["seeds"] == 1, "over 50 ms it is ruled out by one seed"
    assert rows[0]["seeds"] == rows[0]["reached"] == 3
    hourly = rows[0]["processes"] * 2.0
    assert rows[0]["cost"][0] == pytest.approx(hourly * times[0] / 3600)
    assert 0 < rows[0]["goodput"] <= 1


def test_failures_cost_workers_and_time(plan):
    undisturbed, found = plan("--seeds", 1), plan("--seeds", 1, "--mtbf", "2s")
    assert found["mtbf_seconds"] == 2.0
    assert sum(row["lost_workers"] or 0 for row in found["rows"]) > 0
    assert sum(row["lost_workers"] for row in undisturbed["rows"]) == 0


@pytest.mark.transport("shared_memory")
def test_real_runs_stand_beside_the_best_predictions(plan):
    checks = plan("--seeds", "0,1", "--check")["checks"]
    assert len(checks) >= 3
    for row in checks:
        assert len(row["runs"]) == 2 and row["predicted"] > 0
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--mtbf", "12"], "mtbf (12) must be a time such as 30s, 45m, 12h or 7d"),
        (["--mtbf", "0h"], "mtbf (0h) must be a time"),
        (["--price", 0], "price (0.0) must be above 0"),
        (["--check", "--mtbf", "1h"], "--check must not be used with --mtbf"),
        (["--set", "interval=2"], "write its options as in sasgd(interval=8)"),
        (["--out", "x"], "a plan writes nothing"),
    ],
)
def test_wrong_options_are_refused(plan, more, message):
    assert message in plan(*more, code=2)


def test_a_script_needs_a_target_and_an_accuracy(paceline, tmp_path, plan):
    (tmp_path / "silent.py").write_text(SCRIPT.replace("worker.log", "dict"))
    assert "--target is missing" in paceline("plan", "silent.py", code=2).err
    assert "the script logs no accuracy" in plan(script="silent.py", code=1)


def test_a_target_out_of_reach_is_told_with_what_was_reached(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT.replace("steps=12", "steps=3"))
    line = ["plan", "mine.py", "-s", "sasgd", "-w", 2, "--target", 0.5, "--seeds", 1]
    said = paceline(*line, code=1).err
    assert "no way reached accuracy 0.5 in every run: the best was 0.300" in said


def test_a_target_is_an_accuracy():
    with pytest.raises(UsageError, match="target"):
        goal_of(1.5, None, None)
