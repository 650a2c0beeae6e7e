"""Trainers of other packages on workers: their examples, beside DDP, and through a kill."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trained

import paceline as pl

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "trainers"
NAMES = ("lightning", "fabric", "paced", "huggingface", "accelerate")
ACCURACY = r"accuracy (\d\.\d+)"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Trainers write where they run; examples and this folder's modules can be imported."""
    monkeypatch.chdir(tmp_path)
    for path in (HERE, EXAMPLES):
        monkeypatch.syspath_prepend(path)
    return tmp_path


def python(*command):
    """Run Python; returns what it printed."""
    ended = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def train_of(name):
    """What an example runs on each worker."""
    module = importlib.import_module(f"{name}_after")
    return module.train if name != "paced" else on_worker


def on_worker(worker):
    importlib.import_module("paced_after").train()


def lines_of(name):
    return [line for line in (EXAMPLES / name).read_text().splitlines() if line.strip()]


# The examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_example_changes_five_lines_at_most(name):
    changes = list(difflib.ndiff(lines_of(f"{name}_before.py"), lines_of(f"{name}_after.py")))
    added = [line for line in changes if line.startswith("+ ")]
    removed = [line for line in changes if line.startswith("- ")]
    assert 0 < len(added) <= 5 and len(removed) <= len(added)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_learns_alone(name):
    (accuracy,) = re.findall(ACCURACY, python(EXAMPLES / f"{name}_before.py"))
    assert float(accuracy) > 0.7


@pytest.mark.parametrize("name", NAMES)
def test_the_example_learns_on_two_processes(name):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = launcher if name == "paced" else []
    found = re.findall(ACCURACY, python(*command, EXAMPLES / f"{name}_after.py"))
    assert len(found) == (1 if name in ("lightning", "fabric", "accelerate") else 2)
    assert all(float(accuracy) > 0.7 for accuracy in found)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_survives_a_kill(name, capfd):
    """The worker that leads dies by SIGKILL; the other trains on what is left, and leads."""
    faults = [pl.kill(rank=0).at(step=4)]
    result = pl.launch(train_of(name), workers=2, strategy="gossip", faults=faults, out="run")
    assert result.lost_workers == 1
    (accuracy,) = re.findall(ACCURACY, capfd.readouterr().out)
    assert float(accuracy) > 0.65


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs_in_the_simulator(name, capfd):
    results = [
        pl.simulate(train_of(name), workers=3, strategy="gossip", cluster="mixed-lab")
        for _ in range(2)
    ]
    assert results[0].trace_hash == results[1].trace_hash
    assert float(re.findall(ACCURACY, capfd.readouterr().out)[0]) > 0.65


# Beside DDP --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The losses of DDP over gloo, by rank."""
    out = tmp_path_factory.mktemp("ddp")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    python(*launcher, HERE / "ddp_reference.py", out)
    return {rank: json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)}


@pytest.mark.parametrize("name", NAMES)
def test_allreduce_has_the_losses_of_ddp(name, reference, folder):
    losses = {}
    arguments = {"folder": str(folder)} if name == "huggingface" else {}

    def train(worker, **arguments):
        losses[worker.rank] = getattr(trained, f"train_{name}")(worker, **arguments)

    pl.simulate(train, workers=2, strategy="allreduce", arguments=arguments)
    which = "bert" if name == "huggingface" else "clothes"
    for rank in (0, 1):
        wanted = reference[rank][which]
        assert len(wanted) == 20 and wanted[-1] < wanted[0]
        assert losses[rank] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
