"""The drill: its cases load, pass or fail as they should, and find leftovers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.namespaces import need_hosts
from support.worlds import on_hosts

import paceline as pl
from paceline.cli.drill import choose
from paceline.lab.drill.conduct import conduct
from paceline.lab.drill.impact import FaultImpact, measure_impact, worst
from paceline.lab.drill.leftovers import Leftovers
from paceline.lab.drill.over_hosts import HostsRun
from paceline.lab.drill.scenario import Expect, Scenario, Strike, find_scenario, load_scenarios
from paceline.lab.network.hosts import HostNetwork
from paceline.strategies import make_strategy

SHORT = {"epochs": 2, "faults": (pl.kill(rank=1).at(step=20),)}


def test_every_case_loads_and_names_methods_that_exist():
    scenarios = load_scenarios()
    assert len(scenarios) >= 17 and {"kill", "freeze", "server", "save"} <= set(scenarios)
    for scenario in scenarios.values():
        assert scenario.about and scenario.ids
        assert all(make_strategy(method) for method in scenario.methods)


def test_a_case_that_cannot_be_simulated_is_left_out_or_refused():
    assert {name for name, _, _ in choose([], [], False, True)} < set(load_scenarios())
    with pytest.raises(pl.UsageError, match="case interrupt cannot be simulated: leave out --sim"):
        choose(["interrupt"], [], False, True)


def test_a_case_that_this_machine_cannot_run_is_reported_as_not_tried(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    report = conduct("disk", find_scenario("disk"), "allreduce")
    assert not report.passed and not report.failures
    assert report.outcome == "not tried: a small disk needs root and unshare"


def test_an_unknown_case_is_refused_with_the_nearest_name():
    with pytest.raises(pl.UsageError, match='no case "kil"; did you mean "kill"'):
        find_scenario("kil")


@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_a_scenario_runs_in_virtual_time(method):
    scenario = replace(find_scenario("kill"), **SHORT)
    report = conduct("kill", scenario, method, virtual=True)
    assert report.passed, report.failures
    assert report.impact.gap_s is not None and report.impact.gap_s < 1
    assert "rank 1 lost" in report.happened
    row, impact = json.loads(json.dumps(report.to_json())), report.impact
    assert row["passed"] and row["world"] == "simulated"
    assert (row["noticed_s"], row["gap_s"]) == (impact.notice_s, impact.gap_s)
    assert (row["throughput"], row["accuracy"]) == (impact.throughput, report.accuracy)


def test_what_differs_from_the_expectations_is_a_failure():
    scenario = replace(find_scenario("kill"), **SHORT, expect=Expect(lost=0, gap_s=1e-9))
    report = conduct("kill", scenario, "gossip", virtual=True)
    assert not report.passed
    assert any("1 lost workers, not 0" in failure for failure in report.failures)
    assert any("seconds without a step" in failure for failure in report.failures)


def test_a_figure_that_is_known_to_be_missed_is_reported_with_its_reason():
    scenario = replace(find_scenario("kill"), **SHORT, expect=Expect(lost=1, throughput=1e9))
    assert not conduct("kill", scenario, "gossip", virtual=True).passed
    known = replace(scenario, unreached={"gossip throughput": "nobody is that fast"})
    report = conduct("kill", known, "gossip", virtual=True)
    assert report.passed and report.outcome.endswith("nobody is that fast")


def trace(folder, *records):
    lines = [
        json.dumps({"t": t, "rank": rank, "event": event, **more}) + "\n"
        for t, rank, event, more in records
    ]
    (folder / "trace.jsonl").write_text("".join(lines))


def test_notice_gap_and_throughput_come_from_the_trace(tmp_path):
    """Two workers with 10 samples/s each; one dies at 2 s, the other makes no step until 5 s."""
    both = [(t / 2, rank, "step", {"samples": 5}) for t in range(1, 5) for rank in (0, 1)]
    noticed = (2.5, 0, "alive", {"missing": [1]})
    after = [(t / 2, 0, "step", {"samples": 5}) for t in range(10, 21)]
    trace(tmp_path, *both, noticed, *after)
    impact = measure_impact(tmp_path, [{"t": 2.0, "event": "lost", "rank": 1}], [1])
    assert (impact.fault_s, impact.notice_s, impact.gap_s) == (2.0, 0.5, 3.0)
    assert impact.throughput == pytest.approx((55 / 7) / (30 / 1.5))


def test_of_several_runs_the_worst_figures_count():
    impacts = [FaultImpact(1.0, 0.1, 2.0, 0.9), FaultImpact(2.0, None, 3.0, 0.7)]
    assert worst(impacts) == FaultImpact(1.0, 0.1, 3.0, 0.7)


HOLDER = """
import sys, time
with open(sys.argv[2], "w"):
    print("there", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(memory, environment):
    """A process that looks like a rank and holds shared memory."""
    line = [sys.executable, "-c", HOLDER, "paceline.launcher.fork_server", str(memory)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, env=environment)
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()
        memory.unlink()


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr("paceline.lab.drill.leftovers.PATIENCE_S", 0.0)
    return Path(f"/dev/shm/paceline-test-{os.getpid()}")


def test_leftovers_are_found_and_reported_once(memory):
    with Leftovers() as leftovers:
        file = Path(tempfile.gettempdir(), "of-any-name")
        file.touch()
        Path(tempfile.gettempdir(), "torchinductor_somebody").mkdir()  # a cache may stay
        with holder(memory, dict(os.environ)) as process:
            expected = [f"process {process.pid}", str(file), str(memory)]
            assert sorted(leftovers.remaining()) == sorted(expected)
            assert leftovers.remaining() == []
    assert not file.exists()


def test_what_another_run_holds_is_no_leftover(memory):
    """A process of another drill differs only by its id and its folder."""
    environment, tempdir = dict(os.environ), tempfile.gettempdir()
    with (
        Leftovers() as leftovers,
        holder(memory, environment),
        tempfile.TemporaryDirectory(prefix="paceline-drill-", dir=tempdir),
    ):
        assert leftovers.remaining() == []
    assert (dict(os.environ), tempfile.gettempdir()) == (environment, tempdir)


ROW = {
    "case": "exception",
    "method": "gossip",
    "passed": True,
    "noticed_s": None,
    "gap_s": None,
    "throughput": None,
    "accuracy": None,
    "outcome": "passed",
}


@pytest.mark.parametrize("world", ["real", "simulated"])
def test_the_command_prints_rows_like_every_other_table(paceline, world):
    line = ["drill", "exception", "-s", "gossip", "--json", *["--sim"][: world == "simulated"]]
    printed = json.loads(paceline(*line).out.splitlines()[-1])
    (row,) = printed["rows"]
    assert printed["passed"] == 1
    assert row.items() >= {**ROW, "world": world}.items()


@pytest.mark.may_skip
@on_hosts
def test_workers_of_a_synchronous_method_come_back_with_their_host(tmp_path):
    """They end when they find that they were left behind; the launcher starts them again there."""
    need_hosts()
    cut = Strike(what="cut", after_s=0.5, for_s=4.0)
    scenario = Scenario(about="", ids=(), kind="hosts", epochs=1, dead_s=2.0, strikes=(cut,))
    scenario = replace(scenario, expect=Expect(lost=2, joined=2))
    with HostNetwork(2) as network:
        run = HostsRun(network, scenario, "allreduce", 0, tmp_path)
        run.run()
    assert run.failures() == []
    result = run.result()
    assert (result.lost_workers, result.joined_workers) == (2, 2)
