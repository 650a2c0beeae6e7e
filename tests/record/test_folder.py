"""The folder of a run: who may read and write it, and what happens when the disk is full."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support import runs
from support.worlds import on_shared_memory

import paceline as pl
from paceline.checkpoint.disk import Disk
from paceline.cli.task import choose_out
from paceline.comm.launchers import Launched
from paceline.common.files import Lines
from paceline.launcher.fork_client import ForkServer
from paceline.record.folder import LOCK, TRACE, RunFolder, claim
from paceline.record.trace import Trace

# Private -----------------------------------------------------------------------------------------


@pytest.fixture
def open_umask():
    """A umask that allows everything; fork servers are restarted to inherit it."""
    before = os.umask(0)
    ForkServer.stop_idle()
    yield
    os.umask(before)
    ForkServer.stop_idle()


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
    modes_found = modes(out, False)
    assert modes_found.pop("report.html") == 0o666
    assert set(modes_found.values()) == {0o600} and "comparison.json" in modes_found
    assert set(modes(out, True).values()) == {0o700}


# One run at a time -------------------------------------------------------------------------------


def test_a_second_run_is_refused_while_the_first_is_running(tmp_path):
    def start_another(worker):
        runs.train(worker)
        if worker.rank == 0:
            with pytest.raises(pl.UsageError, match=rf"must not be in use: process {os.getpid()}"):
                pl.simulate(runs.train, workers=3, seed=9, out=tmp_path)

    result = pl.simulate(start_another, workers=2, out=tmp_path)
    assert result.samples == 2 * 77 and (tmp_path / "result.json").is_file()
    assert not (tmp_path / LOCK).exists()
    assert pl.simulate(runs.train, workers=3, seed=9, out=tmp_path).workers == 3


def test_every_way_to_start_a_run_respects_the_lock(paceline, tmp_path):
    pl.simulate(runs.train, workers=2, out=tmp_path / "out", checkpoint_steps=4)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    message = r"out \(.*out\) must not be in use: process \d+ on \S+ is still writing a run there"
    with claim(tmp_path / "out"):
        with pytest.raises(pl.UsageError, match=message):
            pl.launch(runs.train, out=tmp_path / "out", checkpoint_steps=4, resume=True)
        with pytest.raises(pl.UsageError, match=message), pl.init(out=tmp_path / "out"):
            pass
        for command in ("run", "sim", "compare"):
            refused = paceline(command, "--steps", 1, "--out", "out", code=2)
            assert "out (out) must not be in use" in refused.err
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_other_ranks_of_a_launcher_share_the_folder_with_rank_0(monkeypatch, tmp_path):
    monkeypatch.setattr("paceline.launcher.init.launched", lambda: Launched(rank=1))
    with claim(tmp_path), pl.init(out=tmp_path) as worker:
        runs.train(worker)
    assert (tmp_path / "trace.0.jsonl").is_file()


HOLDER = """
import signal, sys
from paceline.record.folder import claim
with claim(sys.argv[1]):
    print("held", flush=True)
    signal.pause()
"""


def test_a_killed_run_does_not_block_its_folder(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            message = f"process {holder.pid} on "
            with pytest.raises(pl.UsageError, match=message), claim(tmp_path):
                pass
        finally:
            holder.kill()
    assert (tmp_path / LOCK).exists()
    with claim(tmp_path):
        pass


def test_a_lock_file_that_its_owner_has_just_removed_is_made_again(monkeypatch, tmp_path):
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


def test_two_runs_that_start_in_the_same_second_have_separate_folders(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.cli.task.time.strftime", lambda form: "now")
    assert [str(choose_out(None, "x")) for _ in range(3)] == [
        "runs/now-x",
        "runs/now-x-2",
        "runs/now-x-3",
    ]


# A disk that is full -----------------------------------------------------------------------------

FULL = "No space left on device"


def test_a_simulated_run_on_a_full_disk_continues_without_its_trace(tmp_path):
    whole = pl.simulate(runs.train, workers=2)
    with pytest.warns(UserWarning) as caught:
        run = pl.simulate(
            runs.train_on_full_disk, workers=2, out=tmp_path, arguments={"out": str(tmp_path)}
        )
    assert [str(one.message) for one in caught] == [
        f"the trace of the run in {tmp_path} was abandoned: {FULL}; training continues without it"
    ]
    assert run.trace_hash == whole.trace_hash
    names = {"config.json", "metrics.jsonl", "model.safetensors", "result.json"}
    names |= {"events.jsonl", "progress.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names


@on_shared_memory
def test_real_ranks_on_a_full_disk_continue_without_traces_after_one_warning(tmp_path):
    with pytest.warns(UserWarning) as caught:
        run = pl.launch(
            runs.train_on_full_disk, workers=2, out=tmp_path, arguments={"out": str(tmp_path)}
        )
    assert len(caught) == 1 and f"was abandoned: {FULL}" in str(caught[0].message)
    assert run.samples == 2 * 77 and run.model_error is None
    names = {"config.json", "metrics.jsonl", "model.safetensors", "result.json"}
    names |= {"events.jsonl", "progress.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_an_abandoned_trace_is_hashed_to_its_end(tmp_path):
    whole, trace = Trace(), Trace(tmp_path / "trace.jsonl")
    for number in range(9000):
        if number == 5000:
            runs.fill_disk_under(tmp_path / "trace.jsonl")
        for one in (whole, trace):
            one.record(number * 1e-6, 0, "send", 1, 8)
        if number == 5000:
            with pytest.warns(UserWarning, match=f"abandoned: {FULL}"):
                trace.flush()
    assert trace.close() == whole.close() and not list(tmp_path.iterdir())


def test_traces_that_cannot_be_merged_are_removed(tmp_path):
    (tmp_path / "trace.0.jsonl").write_text('{"t": 1.0, "rank": 0, "event": "send"}\n')
    folder = RunFolder.__new__(RunFolder)
    folder.path, folder._traced = tmp_path, True
    (folder.path / TRACE).symlink_to("/dev/full")
    with pytest.warns(UserWarning, match=f"abandoned: {FULL}"):
        folder.merge_traces(1)
    assert not list(tmp_path.iterdir())


def test_metrics_on_a_full_disk_are_written_at_the_end_if_there_is_room_then(tmp_path):
    def fill(record):
        runs.fill_disk_under(tmp_path / "metrics.jsonl")

    with pytest.warns(UserWarning, match=rf"metrics.jsonl could not be written: {FULL}") as caught:
        run = pl.simulate(runs.train, workers=2, out=tmp_path, on_metric=fill)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(caught) == 1 and [json.loads(line) for line in lines] == run.metrics


def test_an_abandoned_file_ends_with_a_complete_line(tmp_path):
    why = []
    lines = Lines(tmp_path / "notes", why.append)
    lines.add("one\n")
    runs.fill_disk_under(tmp_path / "notes")
    lines.add("two\n")
    lines.add("three\n")
    lines.close()
    assert (tmp_path / "notes").read_text() == "one\n" and why == [FULL]


def test_a_trace_makes_room_for_the_model(monkeypatch, tmp_path):
    write = Disk.write

    def have_room_without_trace(self, path, content, on_half):
        if (tmp_path / "trace.jsonl").exists():
            raise OSError(errno.ENOSPC, FULL)
        write(self, path, content, on_half)

    monkeypatch.setattr(Disk, "write", have_room_without_trace)
    with pytest.warns(UserWarning, match=f"the trace of the run in .* was abandoned: {FULL}"):
        run = pl.simulate(runs.train, workers=2, out=tmp_path)
    assert run.model_error is None and (tmp_path / "model.safetensors").is_file()


@on_shared_memory
def test_a_model_that_cannot_be_written_is_reported_with_the_result(tmp_path):
    for start in (pl.simulate, pl.launch):
        out = tmp_path / start.__name__
        with pytest.warns(UserWarning, match=rf"the model could not be saved in {out}: ") as caught:
            run = start(
                runs.train_where_model_cannot_be,
                workers=2,
                out=out,
                arguments={"out": str(out)},
                trace=False,
            )
        assert len(caught) == 1 and run.model_error == "Is a directory"
        assert json.loads((out / "result.json").read_text())["model_error"] == "Is a directory"
        assert not list(out.glob(".*.part"))


def test_init_raises_when_the_model_cannot_be_written(tmp_path):
    with (
        pytest.raises(pl.PacelineError, match=r"model could not be saved in .*Is a directory"),
        pl.init(out=tmp_path, trace=False) as worker,
    ):
        runs.train_where_model_cannot_be(worker, str(tmp_path))


SCRIPT = """
from support import runs

def train(worker):
    runs.train_where_model_cannot_be(worker, "here")
"""


@pytest.mark.filterwarnings("default")  # as users have it: the command shows its warnings
def test_the_command_ends_with_1_when_the_model_is_not_saved(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = paceline("sim", "mine.py", "-w", 2, "--out", "here", "--no-trace", "--json", code=1)
    assert "the model could not be saved in here: Is a directory" in done.err
    assert '"model_error": "Is a directory"' in done.out


def test_a_disk_that_is_full_before_the_run_is_refused(monkeypatch, tmp_path):
    def fail(path, text):
        raise OSError(errno.ENOSPC, FULL)

    monkeypatch.setattr("paceline.record.folder.write_private", fail)
    with pytest.raises(pl.UsageError, match=rf"must be a writable folder: {FULL}"):
        pl.simulate(runs.train, workers=2, out=tmp_path)


# Without a trace ---------------------------------------------------------------------------------


@on_shared_memory
def test_a_run_without_a_trace_writes_none(paceline, tmp_path):
    for command in ("run", "sim"):
        how = ["-w", 2, "--model", "mlp", "--steps", 2, "--out", command, "--quiet"]
        paceline(command, *how)
        assert (tmp_path / command / "trace.jsonl").is_file()
        paceline(command, *how, "--no-trace")
        assert not list((tmp_path / command).glob("trace*"))
        assert (tmp_path / command / "model.safetensors").is_file()
        refused = paceline("timeline", command, code=2)
        assert "it has no trace.jsonl" in refused.err
    with pl.init(out=tmp_path, trace=False) as worker:
        runs.train(worker)
    assert not list(tmp_path.glob("trace*"))
