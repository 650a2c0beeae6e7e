"""Runs that survive losses: ranks that are killed, stopped and restarted, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from support import runs
from support.worlds import on_shared_memory
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.launcher.control_socket import SOCKET, ask
from paceline.launcher.supervisor import Supervisor

WORKERS, SAMPLES = 4, 240
ASYNCHRONOUS = ["gossip", "easgd(interval=2)", "downpour", "cyclic", "adpsgd", "ssp"]
SYNCHRONOUS = ["allreduce", "sasgd(interval=2)", "layered", "gossip(sync=true)"]

pytestmark = on_shared_memory


def launch(strategy, *faults, **how):
    how.setdefault("arguments", {})
    how["arguments"].setdefault("samples", SAMPLES)
    return pl.launch(
        runs.train_through_losses, workers=WORKERS, strategy=strategy, faults=faults, **how
    )


def times_taken(result, epoch):
    """How often each sample was part of a completed step."""
    taken = [m["taken"].split() for m in result.metrics if m.get("epoch") == epoch]
    return Counter(int(number) for numbers in taken for number in numbers)


@pytest.mark.parametrize("strategy", ASYNCHRONOUS)
def test_the_others_continue_when_a_worker_dies(strategy):
    result = launch(strategy, pl.kill(rank=1).at(step=3), arguments={"until_lost": True})
    assert (result.lost_workers, runs.happened(result, "lost")) == (1, [1])
    assert set(runs.answers(result)) == {0, 2, 3}
    assert len(set(runs.answers(result).values())) == 1
    assert result.lost_batches == 0
    for epoch in range(2):
        taken = times_taken(result, epoch)
        assert set(taken) == set(range(SAMPLES)), (
            "the batch of the dead worker was not given out again"
        )
        assert taken.total() == SAMPLES


def die_at_the_end(worker, folder):
    """Of two workers, the second dies with a drawn batch after the first has finished."""
    net = runs.new_net()
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
    loader = DataLoader(TensorDataset(torch.randn(40, 6)), batch_size=4)
    in_hand, at_its_end = Path(folder, "in hand"), Path(folder, "at its end")
    for (inputs,) in worker.setup_dataloaders(loader):
        if worker.rank == 1:
            in_hand.touch()
            wait_for(at_its_end)
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(in_hand)
        net(inputs).square().mean().backward()
        sgd.step()
    at_its_end.touch()


def wait_for(file):
    while not file.exists():
        time.sleep(0.001)


@pytest.mark.parametrize("strategy", ["gossip", "downpour"])
def test_a_batch_that_nobody_can_take_again_is_counted(strategy, tmp_path):
    how = {"workers": 2, "strategy": strategy, "arguments": {"folder": str(tmp_path)}}
    result = pl.launch(die_at_the_end, **how)
    assert (result.lost_workers, result.lost_batches, result.samples) == (1, 1, 36)


@pytest.mark.parametrize("strategy", ["gossip", "downpour"])
def test_the_first_worker_may_die_like_any_other(strategy, tmp_path):
    how = {"until_lost": True, "victim": 0}
    result = launch(strategy, pl.kill(rank=0).at(step=3), arguments=how, out=tmp_path)
    assert set(runs.answers(result)) == {1, 2, 3}
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "strategy", ["downpour(shards=2)", "easgd(interval=2)", "cyclic", "ssp", "layered"]
)
def test_a_server_or_communicator_that_dies_has_a_successor(strategy, tmp_path):
    how = {"victim": WORKERS, "until_incarnation": 2, "pids": str(tmp_path)}
    result = launch(strategy, arguments=how, on_loss="continue")
    assert runs.happened(result, "succeeded") == [4] and result.lost_workers == 0
    assert set(runs.answers(result)) == {0, 1, 2, 3}
    assert len(set(runs.answers(result).values())) == 1


@pytest.mark.parametrize("strategy", ["gossip", "downpour", "cyclic"])
def test_a_worker_that_was_left_behind_rejoins(strategy, tmp_path):
    how = {"until_incarnation": 2, "pids": str(tmp_path), "thaws": True}
    fault = pl.freeze(rank=1).at(step=3)
    result = launch(strategy, fault, limits=pl.Limits(dead_s=0.3), arguments=how)
    assert runs.happened(result, "rejoined") == [1]
    assert (result.lost_workers, result.joined_workers) == (1, 1)
    assert set(runs.answers(result)) == {0, 1, 2, 3}
    assert len(set(runs.answers(result).values())) == 1


@pytest.mark.parametrize("strategy", ["gossip", "easgd(interval=2)"])
def test_a_lost_worker_is_restarted_if_that_is_allowed(strategy):
    result = launch(
        strategy,
        pl.kill(rank=2).at(step=3),
        max_restarts=1,
        arguments={"victim": 2, "until_incarnation": 2},
    )
    assert runs.happened(result, "lost") == runs.happened(result, "restarted") == [2]
    assert runs.happened(result, "joined") == [2]
    assert set(runs.answers(result)) == {0, 1, 2, 3}


def die_first(worker, folder, victim):
    """A rank is killed before its setup, and is restarted."""
    died = Path(folder, "died")
    if worker.rank == victim and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    runs.train_through_losses(worker, until_incarnation=2, victim=victim)


@pytest.mark.parametrize("strategy", ["gossip", "downpour", "easgd(interval=2)"])
def test_a_worker_that_dies_during_the_start_is_restarted(strategy, tmp_path):
    how = {"arguments": {"folder": str(tmp_path), "victim": 1}, "max_restarts": 1}
    result = pl.launch(die_first, workers=WORKERS, strategy=strategy, **how)
    assert runs.happened(result, "lost") == runs.happened(result, "restarted") == [1]
    assert runs.happened(result, "joined") == [1]
    assert set(runs.answers(result)) == {0, 1, 2, 3}


def start_where_nothing_is(monkeypatch, rank, times):
    """Make the first processes of a rank end before they join the others."""
    start = Supervisor._start

    def start_there(supervisor, its):
        with monkeypatch.context() as patch:
            if its.number == rank and its.starts < times:
                patch.setitem(supervisor._common, "cwd", "/nowhere")
            start(supervisor, its)

    monkeypatch.setattr(Supervisor, "_start", start_there)


def test_a_worker_that_ends_before_it_joins_is_started_as_if_for_the_first_time(monkeypatch):
    start_where_nothing_is(monkeypatch, rank=1, times=2)
    result = launch("gossip")
    assert result.lost_workers == 0 and set(runs.answers(result)) == {0, 1, 2, 3}


def test_a_worker_that_never_joins_ends_the_run(monkeypatch):
    start_where_nothing_is(monkeypatch, rank=1, times=100)
    with pytest.raises(pl.PeerLost, match="rank 1"):
        launch("gossip")


# While all are stopped ---------------------------------------------------------------------------

DEAD_S = 2.0


def pause(folder, signal_to):
    """Stop processes for much longer than ``dead_s``; then let the run end."""
    signal_to(signal.SIGSTOP)
    time.sleep(2 * DEAD_S)
    signal_to(signal.SIGCONT)
    (folder / "over").touch()


@pytest.mark.parametrize("strategy", ["downpour", "cyclic", "easgd(interval=2)", "gossip", "sasgd"])
def test_nobody_is_lost_while_all_workers_are_stopped(strategy, tmp_path):
    def signal_to_workers(number):
        for pid in runs.await_pids(tmp_path, workers=3):
            os.kill(pid, number)
            if number == signal.SIGCONT:
                time.sleep(0.2)  # some check while others are still stopped

    stopper = threading.Thread(target=pause, args=(tmp_path, signal_to_workers))
    stopper.start()
    result = pl.launch(
        runs.train_until_told,
        workers=3,
        strategy=strategy,
        limits=pl.Limits(dead_s=DEAD_S),
        arguments={"folder": str(tmp_path)},
    )
    stopper.join()
    assert {e["event"] for e in result.events} <= {"large"} and result.lost_workers == 0


def test_workers_that_stay_stopped_are_told_of_and_end_the_run_after_the_longest_wait(
    tmp_path, capfd
):
    def stop_workers():
        for pid in runs.await_pids(tmp_path, workers=2):
            os.kill(pid, signal.SIGSTOP)

    stopper = threading.Thread(target=stop_workers)
    stopper.start()
    with pytest.raises(pl.CommTimeout) as caught:
        pl.launch(
            runs.train_until_told,
            workers=2,
            strategy="downpour",
            limits=pl.Limits(dead_s=0.1, notice_s=0.3, progress_limit_s=1.0),
            arguments={"folder": str(tmp_path)},
        )
    stopper.join()
    assert caught.value.ranks == (0, 1)
    assert "still waiting in a run whose workers are all stopped for" in capfd.readouterr().err


PAUSED = """
import sys

import paceline as pl
from support import runs

if __name__ == "__main__":
    dead_s, *folders = sys.argv[1:]
    for strategy in ("downpour", "gossip"):
        limits, how = pl.Limits(dead_s=float(dead_s)), {"folder": folders.pop(0)}
        result = pl.launch(
            runs.train_until_told, workers=2, strategy=strategy, limits=limits, arguments=how
        )
        print({e["event"] for e in result.events} - {"large"}, result.lost_workers)
"""


def test_nobody_is_lost_while_all_processes_of_a_run_are_stopped(tmp_path):
    """Two runs of one launcher, one after the other."""
    (tmp_path / "script.py").write_text(PAUSED)
    folders = [tmp_path / "downpour", tmp_path / "gossip"]
    command = [sys.executable, str(tmp_path / "script.py"), str(DEAD_S), *map(str, folders)]
    how = {"env": runs.environment(), "stdout": subprocess.PIPE, "text": True}
    for folder in folders:
        folder.mkdir()
    with subprocess.Popen(command, start_new_session=True, **how) as launcher:
        for folder in folders:
            runs.await_pids(folder, workers=2)
            pause(folder, lambda number: os.killpg(launcher.pid, number))  # as Ctrl-Z and fg do
        output, _ = launcher.communicate()
    assert (launcher.returncode, output) == (0, "set() 0\n" * 2)


def test_a_server_that_was_stopped_for_too_long_has_a_successor(tmp_path):
    how = {
        "victim": WORKERS,
        "until_incarnation": 2,
        "pids": str(tmp_path),
        "stop_until_lost": True,
    }
    result = launch("downpour", limits=pl.Limits(dead_s=0.3), arguments=how)
    assert runs.happened(result, "succeeded") == [4] and result.lost_workers == 0
    assert set(runs.answers(result)) == {0, 1, 2, 3}


def test_a_server_that_is_lost_too_often_ends_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr("paceline.comm.membership.MOST_SUCCESSORS", 0)
    how = {"victim": WORKERS, "until_incarnation": 2, "pids": str(tmp_path)}
    with pytest.raises(pl.PeerLost, match="rank 4"):
        launch("downpour", arguments=how)


def test_a_worker_can_be_added_from_outside(tmp_path):
    found = []
    how = {"arguments": {"until_incarnation": 2}, "out": tmp_path}
    fault = pl.kill(rank=1).at(step=3)
    run = threading.Thread(target=lambda: found.append(launch("gossip", fault, **how)))
    run.start()
    answer = {}
    while "rank" not in answer:  # there is no free rank until the worker is lost
        try:
            answer = ask("join", tmp_path, {"ask": "join"})
        except pl.UsageError:
            assert run.is_alive()  # the run has not begun yet
    run.join()
    assert answer == {"rank": 1}
    assert runs.happened(found[0], "joined") == [1]
    assert set(runs.answers(found[0])) == {0, 1, 2, 3}
    assert not (tmp_path / SOCKET).exists()
    with pytest.raises(pl.UsageError, match="must be the folder of a run in progress"):
        ask("join", tmp_path, {"ask": "join"})


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
@pytest.mark.parametrize("fault", [pl.kill(rank=1).at(step=3), pl.freeze(rank=1).at(step=3)])
def test_synchronous_methods_can_continue_with_the_remaining_workers(strategy, fault):
    result = launch(strategy, fault, on_loss="continue", limits=pl.Limits(dead_s=0.3))
    assert result.lost_workers == 1
    assert set(runs.answers(result)) == {0, 2, 3}
    assert len(set(runs.answers(result).values())) == 1
    if strategy == "allreduce":
        assert set(times_taken(result, 0)) == set(times_taken(result, 1)) == set(range(SAMPLES))


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_a_fault_after_the_end_of_the_run_is_not_waited_for(strategy):
    result = launch(strategy, pl.kill(rank=1).at(seconds=1e6))
    assert result.lost_workers == 0 and len(runs.answers(result)) == WORKERS


def test_the_run_ends_and_names_the_lost_rank_if_losses_end_it():
    with pytest.raises(pl.PeerLost) as caught:
        how = {"until_lost": True}
        launch("gossip", pl.kill(rank=1).at(step=3), arguments=how, on_loss="stop")
    assert caught.value.ranks == (1,)


def test_a_run_that_loses_all_workers_ends_and_names_them():
    faults = [pl.kill(rank=rank).at(step=3) for rank in range(WORKERS)]
    with pytest.raises(pl.PeerLost):
        launch("gossip", *faults)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"on_loss": "go on"}, r"on_loss \(go on\) must be one of continue, stop"),
        ({"strategy": "allreduce", "max_restarts": 1}, r"max_restarts \(1\) must be 0"),
        ({"max_restarts": -1}, r"max_restarts \(-1\) must be at least 0"),
        ({"transport": "distributed", "on_loss": "continue"}, "must be shared_memory to continue"),
        ({"faults": [pl.cut(rank=0)]}, "there are no links"),
        ({"faults": [pl.kill(rank=4).at(step=0)]}, r"kill: rank \(4\) must be below 4"),
    ],
)
def test_what_cannot_be_is_refused_before_a_process_starts(how, message):
    with pytest.raises(pl.UsageError, match=message):
        pl.launch(runs.train, workers=WORKERS, **{"strategy": "gossip", **how})


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_a_preview_on_one_rank_leaves_every_batch_to_be_taken_once(strategy):
    result = pl.launch(runs.train_with_looks, workers=2, strategy=strategy)
    for epoch in range(2):
        assert times_taken(result, epoch) == Counter(range(44))


@pytest.mark.parametrize(("interval", "lost"), [(20, 0), (500, 30)])
def test_what_a_worker_had_since_the_last_collective_comes_again_in_the_next_epoch(interval, lost):
    """15 steps an epoch; if no collective follows before the end, the loss is counted."""
    kill = pl.kill(rank=1).at(step=3)
    result = launch(f"sasgd(interval={interval})", kill, on_loss="continue")
    survivors = [m for m in result.metrics if m["rank"] != 1 and "taken" in m]
    taken = Counter(number for m in survivors for number in m["taken"].split())
    assert (result.lost_workers, result.lost_batches) == (1, lost)
    assert taken.total() == 2 * SAMPLES - 4 * lost
    assert lost or set(taken.values()) == {2}
