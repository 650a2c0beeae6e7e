"""Real runs that are killed, or ended by a signal, and then resumed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import support
from support import runs, warm
from support.resuming import HOW, SAMPLES, UNTIL, launch, train, train_until
from support.worlds import on_shared_memory

import paceline as pl
from paceline.checkpoint.store import Store

PATIENCE_S = 90.0
BATCHES = SAMPLES // 3
pytestmark = pytest.mark.timeout(300)


@contextmanager
def launched(strategy: str, out: Path, resume: bool = False, **environment: str):
    """A launcher in its own process, after it has made a checkpoint or ended."""
    program = (
        f"import sys; sys.executable = {sys.executable!r}  # so that the fork server is its child\n"
        "import os; print(os.getpid(), flush=True)\n"
        f"from support.resuming import launch; launch({strategy!r}, {str(out)!r}, {resume})"
    )
    tests = str(Path(support.__file__).parent.parent)
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [warm.python(), "-c", program],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.launcher = int(process.stdout.readline())
    before, end_s = latest(out), time.monotonic() + PATIENCE_S
    try:
        while latest(out) == before and process.poll() is None:
            assert time.monotonic() < end_s
            time.sleep(0.005)
        ranks = ranks_of(process)
        yield process
    finally:
        process.kill()
        process.communicate()
    while any(runs.state_of(rank) for rank in ranks):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    if launcher.poll() is not None:
        return []
    fork_servers = runs.children_of(launcher.launcher)
    return [rank for fork_server in fork_servers for rank in runs.children_of(fork_server)]


def latest(out: Path) -> str:
    path = out / "checkpoints" / "latest"
    return path.read_text() if path.exists() else ""


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@on_shared_memory
def test_allreduce_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path):
    whole = launch("allreduce", str(tmp_path / "whole"), False)
    draw = random.Random(7)
    for kill in range(2):
        with launched("allreduce", tmp_path / "killed", kill > 0):
            time.sleep(draw.random() * 0.3)
    again = launch("allreduce", str(tmp_path / "killed"), True)
    assert again.resumed_at is not None and again.resumed_at >= 3
    assert model(tmp_path / "killed") == model(tmp_path / "whole")
    assert (again.steps, again.samples) == (whole.steps, whole.samples)
    logged = [[(m["rank"], m.get("epoch")) for m in run.metrics] for run in (again, whole)]
    assert sorted(map(str, logged[0])) == sorted(map(str, logged[1]))


@on_shared_memory
@pytest.mark.parametrize("strategy", ["gossip", "cyclic"])
def test_an_asynchronous_run_that_is_killed_takes_every_batch_once(strategy, tmp_path):
    with launched(strategy, tmp_path):
        pass
    again = launch(strategy, str(tmp_path), True)
    assert again.resumed_at is not None
    assert (again.steps, again.samples) == (4 * BATCHES, 4 * SAMPLES)
    assert again.lost_workers == 0


@on_shared_memory
@pytest.mark.parametrize(
    ("number", "strategy"),
    [(signal.SIGTERM, "sasgd(interval=4)"), (signal.SIGUSR1, "downpour"), (signal.SIGINT, "ssp")],
)
def test_a_signal_ends_a_run_after_a_final_checkpoint(number, strategy, tmp_path):
    with launched(strategy, tmp_path) as process:
        before = latest(tmp_path)
        process.send_signal(number)
        _, output = process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (1, -signal.SIGINT)
    assert latest(tmp_path) > before
    step = int(latest(tmp_path).strip().removeprefix("step-"))
    assert f"checkpoint of step {step} is saved: resume with --out {tmp_path}" in output
    if number != signal.SIGINT:
        assert f"ended by {number.name}" in output
    assert not list(tmp_path.rglob("*.part"))
    again = launch(strategy, str(tmp_path), True)
    assert again.resumed_at == step and again.samples == 4 * SAMPLES


def test_an_interrupted_run_ends_with_the_code_of_its_signal():
    from paceline.errors import Interrupted

    assert Interrupted(signal.SIGTERM, "").exit_code == 143
    assert Interrupted(signal.SIGUSR1, "").exit_code == 138


@on_shared_memory
def test_a_second_signal_ends_a_run_that_makes_no_checkpoint(tmp_path):
    with launched("allreduce", tmp_path) as process:
        ranks = ranks_of(process)
        assert len(ranks) == 3
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)  # or both signals would be one
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=PATIENCE_S)
        assert "a second signal came" in output


@on_shared_memory
def test_a_launcher_that_is_killed_before_it_updates_latest_is_resumed(tmp_path):
    with launched("allreduce", tmp_path, PACELINE_FAILPOINT="latest.rename") as process:
        assert process.wait() == -signal.SIGKILL
    assert latest(tmp_path) == ""
    with pytest.warns(UserWarning, match="latest is missing; step-000000003 is the newest"):
        assert launch("allreduce", str(tmp_path), True).resumed_at == 3


@on_shared_memory
def test_a_checkpoint_that_cannot_be_written_ends_no_run(tmp_path):
    last = 27  # of 4 epochs of 7 batches, a checkpoint after every third
    in_the_way = tmp_path / "checkpoints" / f"step-{last:09d}"
    in_the_way.parent.mkdir()
    in_the_way.write_text("a file in place of a folder")
    with pytest.warns(UserWarning, match=rf"step {last} could not be saved .*: File exists"):
        run = launch("allreduce", str(tmp_path), False)
    assert run.checkpoint == last - 3 and run.checkpoint_error == "File exists"
    assert run.samples == 4 * SAMPLES


@pytest.mark.filterwarnings("default")  # as users have it: the command shows its warnings
def test_the_command_line_resumes_and_reports_a_failed_save(paceline, tmp_path):
    how = ["--model", "mlp", "--steps", 10, "--json", "--checkpoint-steps", 4, "--out", "here"]
    paceline("run", *how)
    assert "here) holds checkpoints" in paceline("run", *how, code=2).err
    assert '"resumed_at": 8' in paceline("run", *how, "--resume").out
    done = paceline("run", *how, "--resume", "--seed", 7, code=2)
    assert "seed (7) must be 0, as in the checkpoint" in done.err
    done = paceline("run", "--resume", code=2)
    assert "--resume needs --out" in done.err
    (tmp_path / "there" / "checkpoints").mkdir(parents=True)
    (tmp_path / "there" / "checkpoints" / "step-000000008").write_text("")
    done = paceline("run", *how[:-1], "there", code=1)
    assert "warning: the checkpoint of step 8 could not be saved" in done.err
    assert '"checkpoint": 4, "checkpoint_error": "File exists"' in done.out


def test_checkpoints_need_shared_memory(tmp_path):
    with pytest.raises(pl.UsageError, match="must be shared_memory for checkpoints"):
        pl.launch(train, transport="distributed", out=tmp_path, checkpoint_steps=1)


@on_shared_memory
@pytest.mark.parametrize("strategy", ["gossip", "downpour", "cyclic"])
def test_a_run_that_lost_a_worker_continues_to_make_checkpoints(strategy, tmp_path, monkeypatch):
    how = {"strategy": strategy, "out": tmp_path, **HOW}
    monkeypatch.setenv(UNTIL, str(tmp_path / "checkpoints"))
    first = pl.launch(train_until, faults=[pl.kill(rank=0).at(step=5)], **how)
    saved = Store(tmp_path / "checkpoints").newest()
    assert first.lost_workers == 1 and first.checkpoint == saved.step
    assert 0 not in saved.ranks and {1, 2} <= set(saved.ranks)
    monkeypatch.setenv(UNTIL, "all are here")
    again = pl.launch(train_until, resume=True, **how)
    assert again.resumed_at == saved.step and again.joined_workers == 1
