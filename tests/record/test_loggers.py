"""Loggers: what they are given, what they write, and that a dead one hurts nobody."""

from __future__ import annotations

import csv
import json
import threading
from importlib.util import find_spec

import pytest
from support import runs
from support.worlds import on_shared_memory

import paceline as pl
from paceline.record.loggers import NEEDS, check_loggers
from paceline.record.loggers.base import Logger
from paceline.record.loggers.feed import Feed


def rows(path):
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def train(worker):
    runs.train(worker)
    worker.log(last="a text", **{f"only_{worker.rank}": worker.rank})


def simulate(out, **more):
    faults = [pl.kill(rank=1).at(step=3)]
    more.setdefault("faults", faults)
    return pl.simulate(train, workers=3, strategy="gossip", out=out, log="csv", **more)


# CSV ---------------------------------------------------------------------------------------------


def test_csv_has_every_metric_event_and_setting(tmp_path):
    result = simulate(tmp_path, seed=5, arguments={})
    written = rows(tmp_path / "metrics.csv")
    assert len(written) == len(result.metrics) > 4
    for row, record in zip(written, result.metrics, strict=True):
        logged = {k: v for k, v in record.items() if not k.startswith("all_")}
        assert {k: v for k, v in row.items() if v} == {k: str(v) for k, v in logged.items()}
    (lost,) = rows(tmp_path / "events.csv")
    assert (lost["event"], lost["rank"]) == ("lost", "1")
    settings = {row["name"]: row["value"] for row in rows(tmp_path / "settings.csv")}
    assert settings["workers"] == "3" and settings["seed"] == "5" and settings["spec"] == "gossip"


@on_shared_memory
def test_a_real_run_is_logged_with_its_losses(tmp_path):
    result = pl.launch(
        runs.train,
        workers=2,
        strategy="gossip(interval=2)",
        out=tmp_path,
        log=["csv"],
        faults=[pl.kill(rank=1).at(step=3)],
    )
    assert len(rows(tmp_path / "metrics.csv")) == len(result.metrics) > 0
    assert [row["event"] for row in rows(tmp_path / "events.csv")] == ["lost"]
    settings = {row["name"]: row["value"] for row in rows(tmp_path / "settings.csv")}
    assert settings["world"] == "shared_memory" and settings["strategy.interval"] == "2"


def test_a_resumed_run_has_the_records_of_its_checkpoint(tmp_path):
    how = {"faults": [], "checkpoint_steps": 4}
    first = simulate(tmp_path, **how)
    again = simulate(tmp_path, **how, resume=True)
    assert again.resumed_at is not None and len(again.metrics) == len(first.metrics)
    assert len(rows(tmp_path / "metrics.csv")) == len(again.metrics)


def test_the_files_of_an_earlier_run_are_removed(tmp_path):
    simulate(tmp_path)
    pl.simulate(runs.train, workers=2, out=tmp_path)
    assert not [*tmp_path.glob("*.csv")]


# Refusals ----------------------------------------------------------------------------------------


def test_an_unknown_logger_is_refused():
    rule = r"log \(tensorbord\) must be one of csv, mlflow, tensorboard, wandb"
    with pytest.raises(pl.UsageError, match=rule):
        pl.simulate(runs.train, log="tensorbord")


def test_a_logger_that_writes_files_needs_a_folder():
    with pytest.raises(pl.UsageError, match=r"log \(csv\) needs out"):
        pl.simulate(runs.train, log=["csv"])


@pytest.mark.parametrize("name", [name for name, needs in NEEDS.items() if needs])
def test_a_logger_without_its_package_says_what_to_install(name, tmp_path):
    if find_spec(NEEDS[name]) is not None:
        assert check_loggers(name, tmp_path) == [name]
        return
    with pytest.raises(pl.UsageError, match=rf'pip install "paceline\[{name}\]"'):
        check_loggers(name, tmp_path)


# A back-end that fails ---------------------------------------------------------------------------


def test_a_run_goes_on_when_its_file_is_gone(tmp_path):
    """The file becomes a folder; the next record with a new column has nowhere to go."""

    def spoil(record):
        path = tmp_path / "metrics.csv"
        if not path.is_dir():
            path.unlink(missing_ok=True)
            path.mkdir()

    with pytest.warns(UserWarning, match=r"log \(csv\) loses records: IsADirectoryError") as seen:
        result = simulate(tmp_path, on_metric=spoil)
    assert len(seen) == 1 and result.metrics and result.loss is not None


class Broken(Logger):
    """Fails at every record, and counts them."""

    def __init__(self):
        self.asked = 0

    def metric(self, record):
        self.asked += 1
        raise ConnectionError("500")

    def event(self, record):
        self.asked += 1
        raise ConnectionError("500")

    def close(self):
        raise ConnectionError("500")


def test_a_broken_back_end_gets_all_records_and_causes_one_warning():
    logger = Broken()
    with pytest.warns(
        UserWarning, match=r"log \(broken\) loses records: ConnectionError: 500"
    ) as w:
        feed = Feed("broken", lambda: logger)
        for _ in range(100):
            feed.put("metric", {})
        feed.put("event", {})
        feed.close()
    assert logger.asked == 101 and len(w) == 1


def test_a_back_end_that_cannot_be_opened_is_not_asked_again_within_a_minute():
    tries = []

    def refuse():
        tries.append(1)
        raise ConnectionError("refused")

    with pytest.warns(UserWarning, match="refused"):
        feed = Feed("dead", refuse)
        for _ in range(10):
            feed.put("metric", {})
        feed.close()
    assert len(tries) == 1


def test_a_back_end_that_hangs_does_not_hold_up_the_end():
    hangs = threading.Event()
    with pytest.warns(UserWarning, match=r"not taken all records 0.1 s after the end"):
        feed = Feed("hung", hangs.wait, patience_s=0.1)
        feed.put("metric", {})
        feed.close()
    hangs.set()


# What a run's folder has while it goes on --------------------------------------------------------


def test_events_are_in_the_folder_as_they_happen(tmp_path):
    seen = []

    def look(record):
        seen.append((tmp_path / "events.jsonl").read_text())

    result = simulate(tmp_path, on_metric=look)
    assert seen[-1] and [json.loads(line) for line in seen[-1].splitlines()] == result.events


# A frame -----------------------------------------------------------------------------------------


def test_a_frame_needs_pandas_or_polars():
    result = pl.simulate(runs.train, workers=2)
    if find_spec("pandas") or find_spec("polars"):
        assert len(result.frame()) == len(result.metrics)
        return
    with pytest.raises(pl.UsageError, match=r"result\.frame\(\) needs pandas or polars: pip insta"):
        result.frame()


def test_no_logger_means_no_thread():
    names = []
    pl.simulate(
        runs.train,
        workers=2,
        on_metric=lambda record: names.extend(t.name for t in threading.enumerate()),
    )
    assert names and not [name for name in names if name.startswith("log-")]
