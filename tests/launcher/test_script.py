"""``worker = pl.init()`` as a plain call: a script's end is the end of its run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from support import runs, warm
from support.worlds import on_distributed, on_hosts

import paceline as pl
from paceline.training.worker import current_worker

SCRIPT = """
import json, os, signal, sys
sys.path[:0] = {path!r}
import paceline as pl
from support import runs

how, options = sys.argv[1], json.loads(sys.argv[2])


def leave(code):
    raise SystemExit(code)


worker = pl.init(out="out", seed=7, **options)
if how == "in the way":
    os.makedirs("out/model.safetensors/in the way", exist_ok=True)
if how == "hook":
    sys.excepthook = lambda *_: print("caught by another", file=sys.stderr)
if how == "child" and os.fork() == 0:
    sys.exit(0)
runs.train(worker)
if how == "error" or how == "hook":
    raise KeyError("no such key")
if how == "exit":
    sys.exit(int(sys.argv[3]))
if how == "inside":
    leave(5)
if how == "top":
    raise SystemExit(0)
if how == "caught":
    try:
        sys.exit(4)
    except SystemExit:
        pass
if how in ("kill", "gone") and worker.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "kill":
    worker.reduce(1.0)
if how == "finish":
    worker.finish()
    worker.log(after=1.0)
print("end of", worker.rank)
"""
ROOT = runs.__file__.rpartition("/support/")[0]


def write(folder):
    path = folder / "script.py"
    path.write_text(SCRIPT.format(path=[ROOT]))
    return path


def start(folder, *arguments, python=None, options=None, **variables):
    """Start the script; ``how`` is the first of the arguments."""
    how, *more = map(str, arguments)
    command = [python or warm.python(), write(folder), how, json.dumps(options or {}), *more]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=runs.environment(TMPDIR=str(folder), **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process):
    """The exit code, and what was printed on both streams."""
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def model_of(folder):
    path = folder / "out" / "model.safetensors"
    return path.read_bytes() if path.is_file() else None


@pytest.fixture
def block(tmp_path, monkeypatch):
    """The model of a script whose run is a ``with`` statement."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with torch.random.fork_rng(), pl.init(seed=7, out=tmp_path / "block" / "out") as worker:
        runs.train(worker)
    return model_of(tmp_path / "block")


# Alone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["end", "finish", "caught", "child", "top"])
def test_a_script_that_comes_to_its_end_has_finished_its_run(how, tmp_path, block):
    python = sys.executable if how == "end" else None
    code, out, err = end(start(tmp_path, how, python=python))
    assert (code, err) == (0, "")
    assert out.endswith("end of 0\n") or how == "top"
    assert model_of(tmp_path) == block
    logged = (tmp_path / "out" / "metrics.0.jsonl").read_text().splitlines()
    assert len(logged) == 40 + (how == "finish")
    assert not (tmp_path / "out" / ".lock").exists()


@pytest.mark.parametrize("code", [0, 5])
def test_only_an_exit_with_0_is_the_end_of_a_run(code, tmp_path):
    assert end(start(tmp_path, "exit", code))[0] == code
    assert (model_of(tmp_path) is None) == (code == 5)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("error", "KeyError: 'no such key'"),
        ("hook", "caught by another"),
        ("inside", "the script has raised SystemExit, whose code is not known here, and its run"),
    ],
)
def test_a_script_that_ends_by_an_error_gives_its_run_up(how, said, tmp_path):
    python = sys.executable if how == "error" else None
    code, _, err = end(start(tmp_path, how, python=python))
    assert code == (2 if how == "inside" else 1) and said in err
    assert ("Traceback" in err) == (how == "error")
    assert model_of(tmp_path) is None and not (tmp_path / "out" / ".lock").exists()


def test_a_model_that_is_not_saved_is_an_error_at_the_end(tmp_path):
    code, _, err = end(start(tmp_path, "in the way", options={"trace": False}))
    assert code == 1
    assert "NotSaved: the model could not be saved in out: Is a directory" in err


# With others -------------------------------------------------------------------------------------


def start_two(folder, how, options, **more):
    port = str(runs.free_port())
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **more}
    both = [start(folder, how, options=options, RANK=str(rank), **common) for rank in (0, 1)]
    return [end(process) for process in both]


@on_distributed
def test_the_others_end_with_3_and_name_the_lost_rank(tmp_path):
    (code, _, err), (killed, _, _) = start_two(tmp_path, "kill", {"strategy": "allreduce"})
    assert (code, killed) == (3, -9)
    assert "paceline: lost rank 1 in all_reduce" in err and "Traceback" not in err
    assert model_of(tmp_path) is None


@on_distributed
def test_a_rank_that_is_no_worker_ends_in_setup(tmp_path):
    (code, out, err), (served, nothing, other) = start_two(tmp_path, "end", {"strategy": "ssp"})
    assert (code, served) == (0, 0), err + other
    assert (out, nothing) == ("end of 0\n", "")
    assert model_of(tmp_path) is not None


@on_hosts
def test_over_hosts_the_others_go_on_without_a_lost_rank(tmp_path):
    options = {"strategy": "gossip", "transport": "hosts"}
    (code, out, err), (killed, _, _) = start_two(
        tmp_path, "gone", options, PACELINE_TOKEN="ab" * 32
    )
    assert (code, killed) == (0, -9), err
    assert out == "end of 0\n" and "paceline: the run went on without rank 1" in err
    assert model_of(tmp_path) is not None


@on_distributed
def test_torchrun_starts_such_a_script(tmp_path):
    """On three ranks: two workers and their server."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [warm.python(), *launcher, write(tmp_path), "end", '{"strategy": "downpour"}'],
        cwd=tmp_path,
        env=runs.environment(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["end of 0", "end of 1"]
    assert model_of(tmp_path) is not None


# In this process ---------------------------------------------------------------------------------


def test_there_is_one_run_at_a_time_and_it_leaves_nothing_behind():
    before = sys.excepthook, sys.exit
    with torch.random.fork_rng():
        worker = pl.init()
        assert (sys.excepthook, sys.exit) != before and current_worker() is worker
        with pytest.raises(pl.UsageError, match="must be called once in a run"):
            pl.init()
        runs.train(worker)
        assert worker.reduce(2.0) == 2.0
        worker.finish()
        worker.finish()
        with pytest.raises(pl.UsageError, match=r"reduce must be called before worker\.finish"):
            worker.reduce(2.0)
        assert (sys.excepthook, sys.exit) == before and current_worker() is None
        with pytest.raises(KeyError), pl.init() as other:
            assert other is not worker and (sys.excepthook, sys.exit) == before
            raise KeyError("no such key")
        assert current_worker() is None


def test_a_run_that_has_a_worker_refuses_another():
    def train(worker):
        pl.init()

    with pytest.raises(pl.UsageError, match="there is a worker already; use that"):
        pl.simulate(train, workers=2)
