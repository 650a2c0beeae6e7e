"""The drill: its cases load, find what is right and what is not, and see what a run left behind."""

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

import paceline as pl
from paceline.cli.drill import choose
from paceline.lab.drill.conduct import conduct
from paceline.lab.drill.leftovers import Leftovers
from paceline.lab.drill.look import Look, look_at, worst
from paceline.lab.drill.scenario import Expect, find_scenario, load_scenarios
from paceline.strategies import make_strategy

SHORT = {"epochs": 2, "faults": (pl.kill(rank=1).at(step=20),)}


def test_every_case_loads_and_names_methods_that_there_are():
    scenarios = load_scenarios()
    assert len(scenarios) >= 17 and {"kill", "freeze", "server", "save"} <= set(scenarios)
    for scenario in scenarios.values():
        assert scenario.about and scenario.ids
        assert all(make_strategy(method) for method in scenario.methods)


def test_a_case_that_is_not_for_virtual_time_is_left_out_or_refused():
    assert {name for name, _, _ in choose([], [], False, True)} < set(load_scenarios())
    with pytest.raises(pl.UsageError, match="case interrupt cannot be simulated: leave out --sim"):
        choose(["interrupt"], [], False, True)


def test_a_disk_that_cannot_be_had_is_not_said_to_be_full(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    finding = conduct("disk", find_scenario("disk"), "allreduce")
    assert not finding.passed and not finding.failures
    assert finding.outcome == "not tried: a small disk needs root and unshare"


def test_a_case_that_is_none_is_refused_with_the_next_best():
    with pytest.raises(pl.UsageError, match='no case "kil"; did you mean "kill"'):
        find_scenario("kil")


@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_a_scenario_runs_in_virtual_time(method):
    scenario = replace(find_scenario("kill"), **SHORT)
    finding = conduct("kill", scenario, method, virtual=True)
    assert finding.passed, finding.failures
    assert finding.look.gap_s is not None and finding.look.gap_s < 1
    assert "rank 1 lost" in finding.happened
    row, look = json.loads(json.dumps(finding.to_json())), finding.look
    assert row["passed"] and row["world"] == "simulated"
    assert (row["noticed_s"], row["gap_s"]) == (look.notice_s, look.gap_s)
    assert (row["throughput"], row["accuracy"]) == (look.throughput, finding.accuracy)


def test_what_is_not_as_it_has_to_be_is_told():
    scenario = replace(find_scenario("kill"), **SHORT, expect=Expect(lost=0, gap_s=1e-9))
    finding = conduct("kill", scenario, "gossip", virtual=True)
    assert not finding.passed
    assert any("1 lost workers, not 0" in failure for failure in finding.failures)
    assert any("seconds without a step" in failure for failure in finding.failures)


def test_a_figure_that_is_known_not_to_be_reached_is_told_with_its_reason():
    scenario = replace(find_scenario("kill"), **SHORT, expect=Expect(lost=1, throughput=1e9))
    assert not conduct("kill", scenario, "gossip", virtual=True).passed
    known = replace(scenario, unreached={"gossip throughput": "nobody is that fast"})
    finding = conduct("kill", known, "gossip", virtual=True)
    assert finding.passed and finding.outcome.endswith("nobody is that fast")


def trace(folder, *records):
    lines = [
        json.dumps({"t": t, "rank": rank, "event": event, **more}) + "\n"
        for t, rank, event, more in records
    ]
    (folder / "trace.jsonl").write_text("".join(lines))


def test_gaps_notice_and_throughput_are_those_of_the_trace(tmp_path):
    """Two workers of 10 samples a second; one dies at 2 s, the other stands still until 5 s."""
    both = [(t / 2, rank, "step", {"samples": 5}) for t in range(1, 5) for rank in (0, 1)]
    noticed = (2.5, 0, "alive", {"missing": [1]})
    after = [(t / 2, 0, "step", {"samples": 5}) for t in range(10, 21)]
    trace(tmp_path, *both, noticed, *after)
    look = look_at(tmp_path, [{"t": 2.0, "event": "lost", "rank": 1}], [1])
    assert (look.fault_s, look.notice_s, look.gap_s) == (2.0, 0.5, 3.0)
    assert look.throughput == pytest.approx((55 / 7) / (30 / 1.5))


def test_of_several_runs_the_worst_figures_count():
    looks = [Look(1.0, 0.1, 2.0, 0.9), Look(2.0, None, 3.0, 0.7)]
    assert worst(looks) == Look(1.0, 0.1, 3.0, 0.7)


HOLDER = """
import sys, time
with open(sys.argv[2], "w"):
    print("there", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(memory, environment):
    """A process that looks like a rank, and has shared memory."""
    words = [sys.executable, "-c", HOLDER, "paceline.launcher.fork_server", str(memory)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)
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


def test_what_is_left_behind_is_found_and_told_once(memory):
    with Leftovers() as left:
        file = Path(tempfile.gettempdir(), "of-any-name")
        file.touch()
        Path(tempfile.gettempdir(), "torchinductor_somebody").mkdir()  # a cache, which may stay
        with holder(memory, dict(os.environ)) as process:
            wanted = [f"process {process.pid}", str(file), str(memory)]
            assert sorted(left.found()) == sorted(wanted)
            assert left.found() == []
    assert not file.exists()


def test_what_another_run_has_beside_is_not_taken_for_left_behind(memory):
    """Another drill, say: it looks the same, but for its mark and its folder."""
    environment, tempdir = dict(os.environ), tempfile.gettempdir()
    with (
        Leftovers() as left,
        holder(memory, environment),
        tempfile.TemporaryDirectory(prefix="paceline-drill-", dir=tempdir),
    ):
        assert left.found() == []
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
def test_the_command_ends_with_rows_as_every_other_table(paceline, world):
    line = ["drill", "exception", "-s", "gossip", "--json", *["--sim"][: world == "simulated"]]
    told = json.loads(paceline(*line).out.splitlines()[-1])
    (row,) = told["rows"]
    assert told["passed"] == 1
    assert row.items() >= {**ROW, "world": world}.items()
