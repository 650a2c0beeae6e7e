"""The commands, run as users run them."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import warm
from support.results import RESULT_KEYS

from paceline.strategies import STRATEGIES, make_strategy

SCRIPT = """
import os, signal, torch
def train(worker, epochs=1, how="well"):
    model = torch.nn.Linear(2, 1)
    model, sgd = worker.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in range(epochs):
        sgd.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        sgd.step()
        worker.log(epoch=epoch, loss=model.weight.sum(), note=how)
"""


@pytest.fixture
def outcome(paceline):
    """Run a command with --json; the object on its last line."""
    return lambda *arguments, **how: json.loads(
        paceline(*arguments, "--json", **how).out.splitlines()[-1]
    )


EPOCHS = {"easgd": 12}
"""This method needs all of the recipe's epochs; the others need half of them, or a third."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_real_run_learns(strategy, outcome, tmp_path):
    epochs = 4 if make_strategy(strategy).synchronous else EPOCHS.get(strategy, 6)
    line = ["run", "-s", strategy, "-w", 4, "--model", "mlp", "--epochs", epochs, "--seed", 3]
    output = outcome(*line)
    assert set(output) >= set(RESULT_KEYS)
    assert output["accuracy"] > 0.75
    assert (output["strategy"], output["workers"], output["seed"]) == (strategy, 4, 3)
    assert output["samples"] == epochs * 4000
    assert output["virtual_seconds"] is None and output["trace_hash"] is None
    written = sorted(p.name for p in (tmp_path / output["out"]).iterdir())
    assert written == [
        "config.json",
        "events.jsonl",
        "metrics.jsonl",
        "model.safetensors",
        "progress.jsonl",
        "result.json",
        "trace.jsonl",
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_simulated_run_learns(strategy, outcome):
    epochs = 4 if strategy == "diloco" else 3
    output = outcome(
        "sim", "-s", strategy, "-w", 4, "--model", "mlp", "--epochs", epochs, "--seed", 5
    )
    assert set(output) >= set(RESULT_KEYS)
    assert output["accuracy"] > 0.75
    assert output["virtual_seconds"] > 0


def test_a_simulated_run_is_the_same_if_gradients_are_computed_together(outcome):
    command = ("sim", "-s", "gossip", "-w", 6, "--model", "mlp", "--steps", 8)
    one, many = outcome(*command), outcome(*command, "--batched", "on")
    assert many["trace_hash"] == one["trace_hash"]
    assert many["batched"]["mean"] > 2 and one["batched"] is None


def test_a_simulated_run_repeats_in_another_process(outcome, tmp_path):
    line = ["sim", "-s", "sasgd(interval=2)", "--steps", "5", "--seed", "7"]
    here, other = outcome(*line), outcome(*line[:-1], "8")
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *line, "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "12"},
    )
    there = json.loads(done.stdout)
    for key in ("trace_hash", "accuracy", "loss", "virtual_seconds", "bytes_sent", "steps"):
        assert here[key] == there[key] is not None, key
    assert other["trace_hash"] != here["trace_hash"]


def test_a_fault_script_may_be_typed_or_read(outcome, tmp_path):
    (tmp_path / "script.toml").write_text('[[faults]]\nkind = "cut"\nrank = 1\nfor_s = 0.5\n')
    line = ["sim", "-s", "gossip", "-w", 3, "--steps", 4, "--model", "mlp"]
    kill, cut = ["--fault", "kill(rank=2).at(step=2)"], ["--fault", "cut(rank=1, for_s=0.5)"]
    plain, typed, again = outcome(*line), outcome(*line, *kill, *cut), outcome(*line, *kill, *cut)
    read = outcome(*line, *kill, "--faults", "script.toml")
    assert typed["trace_hash"] == again["trace_hash"] == read["trace_hash"] != plain["trace_hash"]
    assert (plain["lost_workers"], typed["lost_workers"]) == (0, 1)


@pytest.mark.parametrize("command", ["sim", "compare"])
def test_standing_for_another_model_is_said_in_every_output(command, outcome, paceline):
    line = [command, "-s", "allreduce", "-w", 2, "--steps", 2, "--model", "mlp"]
    line += ["--as-model", "resnet50", "--out", "o"]
    note = "times and bytes as of resnet50; gradients of the network that was trained"
    assert note in paceline(*line, "--quiet").out
    output = outcome(*line)
    assert [row["as_model"] for row in output.get("rows", [output])] == ["resnet50"]


@pytest.mark.parametrize(
    ("option", "why"),
    [
        (["--on-loss", "continue"], "a lost rank ends the run there"),
        (["--max-restarts", "1"], "a lost rank ends the run there"),
        (["--fault", "kill(rank=1).at(step=3)"], "a lost rank ends the run there"),
        (["--checkpoint-steps", "5"], "train can call worker.save there"),
        (["--on", "ray"], "the launcher has chosen the hosts"),
        (["--listen", "10.0.0.1:7000"], "the launcher has chosen the hosts"),
        (["--live"], "nobody there receives what all workers log"),
        (["--log", "csv"], "nobody there receives what all workers log"),
    ],
)
def test_options_that_a_launcher_decides_are_refused(option, why, paceline, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "29500")
    done = paceline("run", "-s", "gossip", *option, code=2)
    assert f"{option[0]} must not be given under a launcher: {why}" in done.err


def test_a_transport_that_a_launcher_does_not_offer_is_refused(paceline, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    done = paceline("run", "-s", "gossip", "--transport", "hosts", code=2)
    assert "transport (hosts) must be distributed under a launcher" in done.err


@pytest.mark.parametrize("port", ["70000", "web"])
def test_a_bad_port_of_a_launcher_is_reported_in_one_line(port, paceline, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    done = paceline("run", code=2)
    assert f"MASTER_PORT ({port}) must be a whole number from 1 to 65535" in done.err


def test_torchrun_starts_a_run_too(tmp_path):
    """One of its processes is a server, which does not count in the result."""
    launcher = ["torch.distributed.run", "--nproc-per-node", "3", "--rdzv-backend", "c10d"]
    done = subprocess.run(
        [
            warm.python(),
            "-m",
            *launcher,
            "--rdzv-endpoint",
            "127.0.0.1:0",
            "-m",
            "paceline",
            "run",
            "--strategy",
            "downpour",
            "--steps",
            "5",
            "--json",
            "--out",
            "there",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # in which torchrun leaves a folder
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    facts = json.loads(line)
    assert set(facts) >= set(RESULT_KEYS)
    assert (facts["workers"], facts["steps"], facts["samples"]) == (2, 10, 640)
    assert (tmp_path / "there" / "model.safetensors").exists()


@pytest.mark.parametrize("world", ["run", "sim"])
def test_a_script_is_run_with_its_arguments(world, paceline, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = paceline(world, "mine.py", "-w", 2, "--epochs", 2, "--out", "o", "-v")
    assert "rank 1" in done.out and "note well" in done.out
    records = [json.loads(line) for line in (tmp_path / "o/metrics.jsonl").read_text().splitlines()]
    assert sorted((r["rank"], r["epoch"]) for r in records) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    quiet = paceline(world, "mine.py", "-w", 2, "--quiet")
    assert "note well" not in quiet.out and "loss" in quiet.out


@pytest.mark.parametrize("world", ["run", "sim"])
def test_a_script_that_raises_shows_its_traceback_once(world, paceline, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def train(worker):\n    if worker.rank == 1:\n        raise KeyError('lost my key')\n"
        "    worker.comm.barrier()\n"
    )
    done = paceline(world, "mine.py", "-w", 3, "--json", code=1)
    assert done.err.count("Traceback") == 1
    assert done.err.count("raise KeyError('lost my key')") == 1
    assert "processes.py" not in done.err and "run.py" not in done.err
    output = json.loads(done.out)
    assert output == {"error": "rank 1: KeyError: 'lost my key'", "exit_code": 1}


@pytest.mark.parametrize("world", ["run", "sim"])
def test_a_script_that_cannot_be_loaded_shows_why(world, paceline, tmp_path):
    (tmp_path / "mine.py").write_text("def train(worker):\n    pass\nimport nonesuch\n")
    done = paceline(world, "mine.py", code=1)
    assert "line 3" in done.err
    assert "No module named 'nonesuch'" in done.err


@pytest.mark.parametrize("world", ["run", "sim"])
def test_a_run_that_diverges_says_so(world, paceline):
    done = paceline(world, "-s", "gossip", "-w", 2, "--epochs", 1, "--lr", 1e9, "-q", code=1)
    assert "training ended early" in done.err and "a smaller learning rate may help" in done.err


def test_a_lost_worker_ends_with_exit_code_3(outcome, tmp_path):
    (tmp_path / "mine.py").write_text(
        SCRIPT.replace("sgd.step()", "os.kill(os.getpid(), 9) if worker.rank else sgd.step()")
    )
    output = outcome("run", "mine.py", "-w", 3, code=3)
    assert output["error"].startswith("lost ranks 1, 2 in ")  # perhaps before the all-reduce
    assert output["exit_code"] == 3


@pytest.mark.parametrize("world", ["run", "sim"])
def test_ctrl_c_ends_with_exit_code_130(world, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", world, "mine.py", "--epochs", "100000000"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        process.stdout.readline()  # it runs
        drain = threading.Thread(target=process.stdout.read)
        drain.start()
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(60)
        finally:
            process.kill()
        drain.join()
        assert code == 130
        assert process.stderr.read() == "paceline: interrupted\n"


def test_compare_makes_a_row_for_each_run(outcome, warm_pool):
    line = ["compare", "-w", "2,4", "--steps", 4, "-c", "wan", "--target", 0.1]
    output = outcome(*line, "--model", "mlp")
    setups = [(row["strategy"], row["workers"], row["cluster"]) for row in output["rows"]]
    assert setups == [(s, w, "wan") for w in (2, 4) for s in STRATEGIES]
    for row in output["rows"]:
        assert row["target"] == 0.1
        reached = row["accuracy"] >= 0.1
        assert (row["seconds_to_target"] is not None) == reached
        assert row["bytes_sent"] > 0
    seconds = {row["strategy"]: row["virtual_seconds"] for row in output["rows"][len(STRATEGIES) :]}
    assert seconds["allreduce"] > 1.5 * seconds["sasgd"]
    assert Path(output["report"]).stat().st_size < 2_000_000


@pytest.mark.parametrize("terminal", [True, False])
def test_compare_fits_a_narrow_terminal_and_a_pipe(paceline, monkeypatch, terminal):
    monkeypatch.setenv("COLUMNS", "60")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    done = paceline("compare", "-s", "allreduce", "-w", 2, "--steps", 1, "--quiet")
    lines = [re.sub(r"\x1b\[[\d;?]*\w", "", line) for line in done.out.splitlines()]
    assert max(map(len, lines)) < 60
    assert lines[0] == "allreduce"
    assert ["workers", "2"] in [line.split() for line in lines]


def test_a_terminal_shows_a_bar_with_rate_loss_and_time_left(tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [warm.python(), "-m", "paceline", "sim", "--epochs", "4", "-w", "4", "--model", "mlp"],
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:  # how a pty says that the other side is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    for piece in (b"steps/s", b"loss", b"%", b"0:0"):
        assert piece in shown, piece
    assert b"written to" in shown


def test_help_and_lists_load_no_torch():
    code = (
        "import sys; from paceline.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'numpy', 'rich'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    for line in (["--help"], ["run", "--help"], ["strategies"], ["strategies", "sasgd"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *line], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "interval (int, default 16)" in done.stdout


def test_strategies_are_listed_as_json(outcome):
    output = outcome("strategies")["strategies"]
    assert [s["name"] for s in output] == list(STRATEGIES)
    assert {"name", "paper", "options", "synchronous", "servers"} <= set(output[0])
    interval = next(o for o in output[1]["options"] if o["name"] == "interval")
    assert interval == {
        "name": "interval",
        "type": "int",
        "default": 16,
        "help": "steps between aggregations.",
    }


def test_the_doctor_finds_nothing_wrong(outcome, monkeypatch):
    monkeypatch.setattr("paceline.lab.tasks.recipe.FOLDERS", ("nowhere",))
    output = outcome("doctor")
    assert output["ok"] and all(check["ok"] is not False for check in output["checks"])
    assert {"shared memory", "gloo", "simulator", "torch"} <= {c["name"] for c in output["checks"]}
