"""What a run's folder tells those who watch it: in progress, broken off, ended, begun anew."""

from __future__ import annotations

import json
import os
import socket

import pytest
from support import runs
from support.worlds import on_shared_memory

import paceline as pl
from paceline.launcher.control_socket import ask
from paceline.record.progress import ROW
from paceline.watch.band import Band
from paceline.watch.run import WatchedRun, check_is_run
from paceline.watch.tail import Tail
from paceline.watch.terminal import view


class Folder:
    """The folder of a run, written line by line."""

    def __init__(self, path, **config):
        self.path = path
        self.write("config.json", json.dumps({"workers": 2, "spec": "gossip", **config}))
        self.claim(os.getpid())

    def claim(self, pid, machine=None):
        self.write(".lock", f"{pid} on {machine or socket.gethostname()}")

    def write(self, name, text):
        (self.path / name).write_text(text)

    def add(self, name, *records):
        with (self.path / name).open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def progress(self, t, *rows, real_s=None, share=None, spread=None):
        """A line; of each row, only the first few entries need to be given."""
        full = [[*row, *[0] * (len(ROW) - len(row))] for row in rows]
        real_s = t if real_s is None else real_s
        line = {"t": t, "real_s": real_s, "progress": share, "spread": spread, "workers": full}
        self.add("progress.jsonl", line)

    def event(self, t, event, rank, **facts):
        self.add("events.jsonl", {"t": t, "event": event, "rank": rank, **facts})

    def seen(self):
        """A new look at all of it."""
        run = WatchedRun(self.path)
        run.look_at_all()
        return run.summary()


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def states(summary):
    return [worker["state"] for worker in summary["workers"]]


# Numbers -----------------------------------------------------------------------------------------


def test_rates_waiting_and_staleness_are_those_of_the_last_reports(folder):
    #                     rank   t  steps samples wait bytes count total
    folder.progress(10.0, [0, 10.0, 100, 1000, 1.0, 5000, 10, 20], [1, 10.0, 50, 500])
    folder.progress(12.0, [0, 12.0, 120, 1200, 1.5, 6000, 20, 50], [1, 12.0, 60, 600])
    seen = folder.seen()
    first, second = seen["workers"]
    assert (first["rate"], first["wait"], first["staleness"]) == (100.0, 0.25, 3.0)
    assert (second["rate"], second["wait"], second["staleness"]) == (50.0, 0.0, None)
    assert seen["totals"]["rate"] == 150.0 and seen["totals"]["steps"] == 180
    assert seen["totals"]["bytes"] == 6000 and seen["t"] == 12.0


def test_the_end_is_reckoned_from_the_pace_of_the_last_minutes(folder):
    for real_s, share in [(0.0, 0.01), (990.0, 0.2), (1000.0, 0.25), (1010.0, 0.3)]:
        folder.progress(5.0, [0, 5.0], real_s=real_s, share=share)
    seen = folder.seen()
    assert seen["progress"] == 0.3 and seen["left_s"] == pytest.approx(140.0, abs=20.0)


def test_without_a_plan_steps_tell_how_far_it_is(tmp_path):
    folder = Folder(tmp_path, arguments={"steps": 200})
    folder.progress(1.0, [0, 1.0, 50], [1, 1.0, 20])
    assert folder.seen()["progress"] == 0.25


def test_what_was_logged_is_charted_with_loss_and_accuracy_first(folder):
    at = {"step": 1, "samples": 8}
    for t, rank in [(1.0, 0), (1.0, 1), (2.0, 0)]:
        record = {"t": t, "rank": rank, **at, "lr": 0.1, "accuracy": 0.5, "loss": t + rank}
        folder.add("metrics.jsonl", record)
    charts = {chart["name"]: chart["rows"] for chart in folder.seen()["charts"]}
    assert [*charts] == ["loss", "accuracy", "lr"]
    assert charts["loss"] == [[1.0, 1.5, 1.0, 2.0], [2.0, 2.0, 2.0, 2.0]]
    assert [worker["loss"] for worker in folder.seen()["workers"]] == [2.0, 2.0]


def test_a_long_run_takes_little_memory():
    band = Band()
    for second in range(100_000):
        band.add(second, second)
    rows = band.rows()
    assert 80 <= len(rows) <= 160 and band.last == 99_999
    assert min(low for _, _, low, _ in rows) == 0
    assert all(low <= mean <= high for _, mean, low, high in rows)


# Workers -----------------------------------------------------------------------------------------


def test_a_worker_is_lost_started_again_and_back(folder):
    run = WatchedRun(folder.path)
    expected = ["starting", "training", "lost", "starting again", "back", "back"]
    happens = [
        lambda: None,
        lambda: folder.progress(1.0, [1, 1.0, 10, 80]),
        lambda: folder.event(2.0, "lost", 1, reason="SIGKILL"),
        lambda: folder.event(2.1, "restarted", 1),
        lambda: folder.event(3.0, "joined", 1),
        lambda: folder.progress(4.0, [1, 4.0, 2, 16]),
    ]
    for happen, state in zip(happens, expected, strict=True):
        happen()
        run.look()
        assert states(run.summary())[1] == state
    worker = run.summary()["workers"][1]
    assert (worker["steps"], worker["samples"]) == (12, 96), "with those of its first process"
    assert "rank 1 lost (reason: SIGKILL)" in run.summary()["events"][0]["text"]
    assert states(folder.seen()) == states(run.summary()), "one who comes later sees the same"


def test_a_lost_worker_has_no_rate(folder):
    folder.progress(1.0, [0, 1.0, 1, 10], [1, 1.0, 1, 10])
    folder.progress(2.0, [0, 2.0, 2, 20], [1, 2.0, 2, 20])
    folder.event(2.5, "lost", 1)
    seen = folder.seen()
    assert [w["rate"] for w in seen["workers"]] == [10.0, None]
    assert seen["totals"]["rate"] == 10.0


def test_a_bad_update_is_that_of_its_sender(folder):
    folder.event(1.0, "set_aside", 0, sender=1, why="not finite")
    assert states(folder.seen()) == ["starting", "set aside"]


# Its end -----------------------------------------------------------------------------------------


def test_a_run_whose_process_is_gone_has_broken_off(folder):
    folder.progress(1.0, [0, 1.0])
    assert folder.seen()["state"] == "running"
    folder.claim(999999999)
    assert folder.seen()["state"] == "broken off"


def test_a_run_of_another_machine_goes_on_while_lines_come(folder):
    folder.claim(999999999, "elsewhere")
    folder.progress(1.0, [0, 1.0])
    assert folder.seen()["state"] == "running"
    os.utime(folder.path / "progress.jsonl", (1e9, 1e9))
    assert folder.seen()["state"] == "broken off"


def test_a_run_that_begins_anew_in_the_folder_is_seen_from_its_start(folder):
    folder.add("metrics.jsonl", {"t": 9.0, "rank": 0, "step": 9, "samples": 9, "loss": 9.0})
    folder.progress(9.0, [0, 9.0, 900])
    folder.event(9.0, "lost", 1)
    folder.write("result.json", json.dumps({"loss": 9.0}))
    run = WatchedRun(folder.path)
    run.look_at_all()
    assert run.summary()["state"] == "ended"
    for name in ("metrics.jsonl", "progress.jsonl", "events.jsonl", "result.json"):
        (folder.path / name).unlink()
    folder.write("metrics.jsonl", "")
    folder.progress(1.0, [0, 1.0, 5])
    folder.write("events.jsonl", "")
    run.look_at_all()
    seen = run.summary()
    assert seen["state"] == "running" and seen["events"] == [] and seen["t"] == 1.0
    assert seen["totals"]["steps"] == 5 and seen["totals"]["loss"] is None


def test_half_a_line_waits_for_its_other_half_and_garbage_is_skipped(tmp_path):
    path, tail = tmp_path / "lines", Tail(tmp_path / "lines")
    assert tail.look() == (False, [])
    path.write_text('{"a": 1}\nnonsense\n[1]\n{"b"')
    assert tail.look() == (True, [{"a": 1}])
    with path.open("a") as file:
        file.write(": 2}\n")
    assert tail.look() == (False, [{"b": 2}])


def test_lines_of_another_kind_are_skipped(folder):
    folder.add("metrics.jsonl", {}, {"t": "x", "rank": 0}, {"t": 1, "rank": []})
    folder.add(
        "progress.jsonl",
        {},
        {"t": 1, "workers": [[]]},
        {"t": 1, "workers": ["x" * 8]},
        {"t": 1, "workers": 5},
    )
    folder.add("events.jsonl", {}, {"t": 1}, {"t": 1, "event": "lost", "rank": "x"})
    assert states(folder.seen()) == ["starting", "starting"]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(pl.UsageError, match=r"run \(.*\) must be the folder that a run writes to"):
        check_is_run(tmp_path)
    with pytest.raises(pl.UsageError, match="must be the folder"):
        check_is_run(tmp_path / "nowhere")


# Real and simulated runs -------------------------------------------------------------------------


@on_shared_memory
def test_a_real_run_writes_what_those_who_watch_need(tmp_path):
    looks, look = looking_at(tmp_path)
    how = {"strategy": "gossip", "out": tmp_path, "arguments": {"epochs": 20}}
    result = pl.launch(runs.train, workers=2, on_metric=look, checkpoint_minutes=60, **how)
    assert looks[-1]["state"] == "running" and looks[-1]["stop"] == {"possible": True, "why": None}
    assert looks[-1]["totals"]["loss"] is not None
    seen = folder_seen(tmp_path)
    assert seen["state"] == "ended" and not seen["stop"]["possible"]
    assert seen["totals"]["steps"] == result.steps
    assert seen["totals"]["spread"] == result.consensus_distance
    lines = (tmp_path / "progress.jsonl").read_text().splitlines()
    last = {row[0]: dict(zip(ROW, row, strict=True)) for row in json.loads(lines[-1])["workers"]}
    assert all(0 < row["steps"] <= result.steps and row["bytes"] > 0 for row in last.values())


def looking_at(path):
    """What a run's folder shows at some of its records, and the function to call with each."""
    looks, records = [], []

    def look(record):
        records.append(record)
        if len(records) % 20 == 0:
            looks.append(folder_seen(path))

    return looks, look


def folder_seen(path):
    run = WatchedRun(path)
    run.look_at_all()
    return run.summary()


def test_a_simulated_run_can_be_watched_and_not_be_stopped(tmp_path):
    looks, look = looking_at(tmp_path)
    result = pl.simulate(runs.train, workers=3, strategy="gossip", out=tmp_path, on_metric=look)
    assert looks[-1]["state"] == "running" and "real processes" in looks[-1]["stop"]["why"]
    assert folder_seen(tmp_path)["totals"]["loss"] == result.loss


@on_shared_memory
def test_it_is_stopped_through_the_folder_with_a_checkpoint(tmp_path):
    replies = []

    def stop(record):
        replies.append(ask("run", tmp_path, {"ask": "stop"}))

    how = {"strategy": "allreduce", "out": tmp_path, "arguments": {"epochs": 4000}}
    with pytest.raises(pl.PacelineError, match=r"its checkpoint of step \d+ is saved"):
        stop_once = on_a_thread_once(stop)
        pl.launch(runs.train, workers=2, on_metric=stop_once, checkpoint_minutes=60, **how)
    assert replies == [{"stopping": True}]
    assert folder_seen(tmp_path)["state"] == "broken off"


@on_shared_memory
def test_a_run_without_checkpoints_cannot_be_stopped(tmp_path):
    replies = []
    ask_once = on_a_thread_once(lambda r: replies.append(ask("run", tmp_path, {"ask": "stop"})))
    how = {"strategy": "allreduce", "out": tmp_path, "arguments": {"epochs": 10}}
    pl.launch(runs.train, workers=2, on_metric=ask_once, **how)
    assert replies == [{"error": "the run makes no checkpoints"}]


def on_a_thread_once(act):
    """Call ``act`` with the first record, while the launcher goes on."""
    import threading

    begun = []

    def call(record):
        if not begun:
            begun.append(threading.Thread(target=act, args=(record,)))
            begun[0].start()

    return call


# In a terminal -----------------------------------------------------------------------------------


def test_a_terminal_shows_the_workers_charts_and_events(folder):
    from rich.console import Console

    folder.add("metrics.jsonl", {"t": 1.0, "rank": 0, "step": 1, "samples": 8, "loss": 0.25})
    folder.progress(1.0, [0, 1.0, 1, 10], [1, 1.0, 1, 10], share=0.5, spread=0.0125)
    folder.progress(2.0, [0, 2.0, 2, 20], [1, 2.0, 2, 20], share=0.75, spread=0.0125)
    folder.event(2.5, "lost", 1, reason="[red]SIGKILL")
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(folder.seen()))
    console.file.close()
    text = console.export_text()
    assert "gossip  running" in text and "75%" in text and "0.013" in text
    assert "rank 1 lost (reason: [red]SIGKILL)" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "training", "2", "10.0", "0%", "-", "0", "B", "0.2500"] in rows
    assert ["1", "lost", "2", "-", "-", "-", "0", "B", "-"] in rows
