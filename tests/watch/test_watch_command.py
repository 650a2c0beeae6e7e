"""The commands ``paceline watch`` and ``paceline run --live``."""

from __future__ import annotations

import json
import sys

import pytest
from support import runs

import paceline as pl


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run that has ended."""
    out = tmp_path_factory.mktemp("ended")
    pl.simulate(runs.train, workers=2, strategy="gossip", out=out)
    return out


def test_a_run_that_has_ended_is_shown_once(ended, paceline):
    shown = paceline("watch", ended).out
    assert "gossip  ended" in shown and "loss" in shown


def test_programs_get_one_object(ended, paceline):
    seen = json.loads(paceline("watch", ended, "--json").out)
    result = json.loads((ended / "result.json").read_text())
    assert seen["state"] == "ended" and seen["totals"]["loss"] == result["loss"]
    assert [worker["rank"] for worker in seen["workers"]] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["watch", "."], "run (.) must be the folder that a run writes to"),
        (["watch", ".", "--listen", "127.0.0.1:80"], "must be given with --page"),
        (["run", "--log", "excel"], "log (excel) must be one of csv, mlflow, tensorboard, wandb"),
        (["sim", "--replay", ".", "--log", "csv"], "--log must not be given with --replay"),
    ],
)
def test_what_cannot_be_is_refused(arguments, told, paceline):
    assert told in paceline(*arguments, code=2).err


@pytest.mark.parametrize("arguments", [["run", "--live"], ["watch", "--page"]])
def test_a_page_without_its_extra_says_what_to_install(arguments, ended, paceline, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "paceline.watch.server", raising=False)
    more = [ended] if arguments[0] == "watch" else ["--out", "run"]
    told = 'the page needs starlette: pip install "paceline[live]"'
    assert told in paceline(*arguments, *more, code=2).err
