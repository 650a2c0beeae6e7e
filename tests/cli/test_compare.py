"""``paceline compare`` with seeds, resuming and a report; ``paceline report``."""

import json
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def in_this_process(request, monkeypatch):
    """Run trials in this process, which is faster; marked tests start processes."""
    if not request.node.get_closest_marker("transport"):
        monkeypatch.setattr("paceline.lab.trials.cores", lambda: 1)


@pytest.fixture
def outcome(paceline):
    return lambda *arguments, **how: json.loads(
        paceline(*arguments, "--json", **how).out.splitlines()[-1]
    )


SCRIPT = """
import torch
def train(worker, lr=0.1):
    net = torch.nn.Linear(2, 1)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=lr))
    for step in range(4):
        sgd.zero_grad()
        net(torch.ones(3, 2)).sum().backward()
        sgd.step()
        worker.log(accuracy=0.25 * (step + 1))
"""


def compared(outcome, *more, out="c"):
    line = ["compare", "mine.py", "--strategies", "allreduce,sasgd(interval=2)", "-w", "2,3"]
    return outcome(*line, "-c", "wan", "--target", 0.5, "--out", out, *more)


@pytest.mark.transport("simulated")
def test_every_seed_is_a_row(outcome, tmp_path, warm_pool):
    (tmp_path / "mine.py").write_text(SCRIPT)
    output = compared(outcome, "--seeds", 2, "--seed", 7)
    keys = [(r["workers"], r["strategy"], r["seed"]) for r in output["rows"]]
    methods = ("allreduce", "sasgd(interval=2)")
    assert keys == [(w, s, seed) for w in (2, 3) for s in methods for seed in (7, 8)]
    for row in output["rows"]:
        assert (row["cluster"], row["target"], row["accuracy"]) == ("wan", 0.5, 1.0)
        assert 0 < row["seconds_to_target"] < row["virtual_seconds"]
        assert 0 < row["bytes_to_target"] < row["bytes_sent"]
        assert row["error"] is None
    page = Path(output["report"]).read_text()
    assert output["report"] == "c/report.html" and "Verdict" in page and "mine.py" in page


def test_a_target_that_is_not_reached_is_null(outcome, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT.replace("0.25", "0.1"))
    rows = compared(outcome)["rows"]
    assert {row["seconds_to_target"] for row in rows} == {None}
    assert {row["bytes_to_target"] for row in rows} == {None}


def test_finished_runs_are_not_repeated(outcome, paceline, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SCRIPT)
    first = compared(outcome, "--seeds", "0,1")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "c/trials").iterdir()}
    line = ["compare", "mine.py", "-s", "allreduce,sasgd(interval=2)", "-w", "2,3", "-c", "wan"]
    done = paceline(*line, "--target", 0.5, "--out", "c", "--seeds", "0,1,2")
    assert "12 simulations, 8 already in c" in done.out
    assert {p: p.stat().st_mtime_ns for p in files} == files
    again = compared(outcome, "--seeds", "0,1")
    assert again == first


def test_a_changed_script_is_run_again(outcome, paceline, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    compared(outcome)
    (tmp_path / "mine.py").write_text(SCRIPT.replace("range(4)", "range(4 - 1)"))
    assert {row["accuracy"] for row in compared(outcome)["rows"]} == {0.75}


def test_the_screen_shows_progress_means_and_a_verdict(paceline, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SCRIPT)
    line = ["compare", "mine.py", "-s", "allreduce,sasgd", "-w", 2, "-c", "wan", "--seeds", 3]
    done = paceline(*line, "--target", 0.5)
    lines = done.out.splitlines()
    assert lines[0].startswith("6 simulations, 0 already in runs/")
    assert sum(line.startswith(f"[{i}/6] ") for i, line in enumerate(lines[1:7], 1)) == 6
    assert "Means over 3 seeds" in done.out
    assert "2 workers on wan: sasgd reached accuracy 0.5 first" in done.out
    assert "Report: runs/" in lines[-1]


def test_a_method_that_fails_is_a_row_with_its_error(outcome, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "deadly.toml").write_text(
        '[compute]\nstep_s = 1.0\n[[faults]]\nkind = "kill"\nrank = 1\nat_s = 1.5\n'
    )
    line = ["compare", "mine.py", "-s", "allreduce,gossip", "-w", 3, "-c", "deadly.toml"]
    output = outcome(*line, "--target", 0.5)
    broken, fine = output["rows"]
    assert "rank 1" in broken["error"] and broken["accuracy"] is None
    assert set(broken) == set(fine) and fine["lost_workers"] == 1
    assert "allreduce failed: lost rank 1" in Path(output["report"]).read_text()


def test_where_every_run_fails_so_does_the_comparison(outcome, paceline, tmp_path):
    (tmp_path / "mine.py").write_text("def train(worker):\n    raise KeyError('lost my key')\n")
    output = outcome("compare", "mine.py", "-s", "allreduce", "-w", 2, code=1)
    assert output == {"error": "rank 0: KeyError: 'lost my key'", "exit_code": 1}
    (tmp_path / "mine.py").write_text("import nonesuch\ndef train(worker):\n    pass\n")
    assert "nonesuch" in outcome("compare", "mine.py", "-s", "allreduce", code=1)["error"]


@pytest.mark.transport("shared_memory")
def test_real_runs_are_compared_and_not_repeated(outcome, paceline, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    line = ["compare", "mine.py", "--real", "-s", "allreduce,sasgd", "-w", 2, "--target", 0.5]
    output = outcome(*line, "--out", "r")
    assert [row["cluster"] for row in output["rows"]] == [None, None]
    assert all(row["seconds_to_target"] > 0 for row in output["rows"])
    assert "real processes (shared_memory)" in Path(output["report"]).read_text()
    assert (tmp_path / "r/02/trace.jsonl").exists()
    done = paceline(*line, "--out", "r")
    assert "2 runs, 2 already in r" in done.out and "[1/2]" not in done.out


def test_a_report_is_written_again_with_another_target(outcome, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    first = Path(compared(outcome)["report"]).read_text()
    output = outcome("report", "c", "--target", 0.9, "--out", "again.html")
    again = (tmp_path / "again.html").read_text()
    assert output == {"report": "again.html", "bytes": len(again.encode())}
    assert "accuracy 0.5" in first and "accuracy 0.9" in again and "accuracy 0.5" not in again
    outcome("report", "c")
    assert (tmp_path / "c/report.html").read_text() == first


@pytest.mark.transport("shared_memory")
def test_real_and_simulated_runs_are_reported_together(outcome, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    outcome("run", "mine.py", "-s", "sasgd(interval=2)", "-w", 2, "--out", "real")
    outcome("sim", "mine.py", "-s", "sasgd(interval=2)", "-w", 2, "-c", "wan", "--out", "virtual")
    output = outcome("report", "real", "virtual", "--target", 0.5)
    page = Path(output["report"]).read_text()
    assert output["report"] == "real/report.html"
    assert "2 workers on wan" in page and "2 workers on real processes (shared_memory)" in page
    assert "sasgd(interval=2)" in page and "compare their shapes" in page


def test_a_folder_that_is_no_run_is_refused(outcome, tmp_path):
    (tmp_path / "empty").mkdir()
    output = outcome("report", "empty", code=2)
    assert "folder (empty) must be one that paceline compare, run or sim has completed" in str(
        output
    )
    outcome("sim", "--steps", 1, "-w", 2, "--model", "mlp", "--out", "s")
    output = outcome("report", "s", "--out", "nowhere/r.html", code=2)
    assert "out (nowhere/r.html) must be a writable file" in output["error"]
