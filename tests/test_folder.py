"""The folder of a run: whose it is, and what it is worth when the disk is full."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support import runs
from support.worlds import on_shared_memory

import paceline as pl
from paceline.cli.task import choose_out
from paceline.folder import LOCK, claim
from paceline.launched import Launched
from paceline.processes import Nursery

# Private -----------------------------------------------------------------------------------------


@pytest.fixture
def open_umask():
    """Whatever may be read by all is; ranks are started anew for it."""
    before = os.umask(0)
    Nursery.stop_idle()
    yield
    os.umask(before)
    Nursery.stop_idle()


def modes(folder: Path, folders: bool) -> dict[str, int]:
    found = [path for path in [folder, *folder.rglob("*")] if path.is_dir() == folders]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in found}


def assert_private(out: Path, *names: str) -> None:
    assert set(names) <= {Path(name).name for name in modes(out, False)}
    assert set(modes(out, False).values()) == {0o600}, modes(out, False)
    assert set(modes(out, True).values()) == {0o700}, modes(out, True)


RUN_FILES = ("config.json", "metrics.jsonl", "trace.jsonl", "model.safetensors", "result.json")
SAVED_FILES = ("manifest.json", "latest", "rank1.safetensors", "metrics.json")


@on_shared_memory
def test_what_a_real_run_writes_is_for_its_user_alone(open_umask, tmp_path):
    out = tmp_path / "above" / "run"
    pl.launch(runs.train, workers=2, out=out, checkpoint_steps=4)
    assert_private(out, *RUN_FILES, *SAVED_FILES)


def test_what_a_simulated_run_writes_is_for_its_user_alone(open_umask, tmp_path):
    pl.simulate(runs.train, workers=2, out=tmp_path / "run", checkpoint_steps=4)
    assert_private(tmp_path / "run", *RUN_FILES, *SAVED_FILES)


def test_what_init_and_a_worker_write_is_for_their_user_alone(open_umask, tmp_path):
    with pl.init(out=tmp_path / "run") as worker:
        runs.train(worker)
        worker.save(tmp_path / "run" / "saved")
    assert_private(tmp_path / "run", "trace.0.jsonl", "metrics.0.jsonl", "rank0.safetensors")


def test_a_folder_that_was_there_keeps_its_mode(open_umask, tmp_path):
    out = tmp_path / "mine"
    out.mkdir(mode=0o755)
    pl.simulate(runs.train, workers=2, out=out)
    assert set(modes(out, True).values()) == {0o755}
    assert set(modes(out, False).values()) == {0o600}


def test_a_comparison_is_for_its_user_alone_but_for_the_report(open_umask, paceline, tmp_path):
    paceline("compare", "-s", "allreduce,sasgd", "-w", 2, "--model", "mlp", "--steps", 2)
    (out,) = (tmp_path / "runs").iterdir()
    told = modes(out, False)
    assert told.pop("report.html") == 0o666
    assert set(told.values()) == {0o600} and "comparison.json" in told
    assert set(modes(out, True).values()) == {0o700}


# One run at a time -------------------------------------------------------------------------------


def test_a_second_run_is_refused_while_the_first_goes_on(tmp_path):
    def start_another(worker):
        runs.train(worker)
        if worker.rank == 0:
            with pytest.raises(pl.UsageError, match=rf"must not be in use: process {os.getpid()}"):
                pl.simulate(runs.train, workers=3, seed=9, out=tmp_path)

    result = pl.simulate(start_another, workers=2, out=tmp_path)
    assert result.samples == 2 * 77 and (tmp_path / "result.json").is_file()
    assert not (tmp_path / LOCK).exists()
    assert pl.simulate(runs.train, workers=3, seed=9, out=tmp_path).workers == 3


def test_every_way_to_start_a_run_asks_whose_the_folder_is(paceline, tmp_path):
    pl.simulate(runs.train, workers=2, out=tmp_path / "out", checkpoint_steps=4)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    told = r"out \(.*out\) must not be in use: process \d+ still writes a run there"
    with claim(tmp_path / "out"):
        with pytest.raises(pl.UsageError, match=told):
            pl.launch(runs.train, out=tmp_path / "out", checkpoint_steps=4, resume=True)
        with pytest.raises(pl.UsageError, match=told), pl.init(out=tmp_path / "out"):
            pass
        for command in ("run", "sim", "compare"):
            refused = paceline(command, "--steps", 1, "--out", "out", code=2)
            assert "out (out) must not be in use" in refused.err
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_a_rank_of_a_launcher_beside_rank_0_shares_the_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("paceline.run.launched", lambda: Launched(rank=1))
    with claim(tmp_path), pl.init(out=tmp_path) as worker:
        runs.train(worker)
    assert (tmp_path / "trace.0.jsonl").is_file()


HOLDER = """
import signal, sys
from paceline.folder import claim
with claim(sys.argv[1]):
    print("held", flush=True)
    signal.pause()
"""


def test_a_run_that_was_killed_is_in_nobodys_way(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(pl.UsageError, match=f"process {holder.pid} still"), claim(tmp_path):
                pass
        finally:
            holder.kill()
    assert (tmp_path / LOCK).exists()
    with claim(tmp_path):
        pass


def test_a_lock_that_its_owner_has_just_removed_is_taken_anew(monkeypatch, tmp_path):
    import fcntl

    taken, flock = [], fcntl.flock

    def remove_first(fd, how):
        flock(fd, how)
        taken.append(fd)
        if len(taken) == 1:
            (tmp_path / LOCK).unlink()

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with claim(tmp_path):
        assert len(taken) == 2 and (tmp_path / LOCK).exists()


def test_two_runs_that_begin_in_the_same_second_have_folders_of_their_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.cli.task.time.strftime", lambda form: "now")
    assert [str(choose_out(None, "x")) for _ in range(3)] == [
        "runs/now-x",
        "runs/now-x-2",
        "runs/now-x-3",
    ]
