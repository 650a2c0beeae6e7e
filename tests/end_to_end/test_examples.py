"""The examples: each runs as readers run it, and does what it says."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import warm
from torch import nn
from torch.optim import SGD

import paceline as pl

EXAMPLES = Path(__file__).parents[2] / "examples"
OURS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID", "PYTHONUNBUFFERED"}


def run(folder, *command):
    """Run Python as from a terminal, in a folder that must stay empty; returns its lines."""
    here, temporary = folder / "here", folder / "temporary"
    here.mkdir(), temporary.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    ended = subprocess.run(
        [warm.python(), *map(str, command)],
        cwd=here,
        env={**environment, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert not list(here.iterdir())
    return ended.stdout.splitlines()


def accuracies(lines, pattern):
    """The accuracies in the lines that match ``pattern``."""
    found = [re.fullmatch(rf"{pattern}: accuracy (\d\.\d+)", line) for line in lines]
    return [float(match[1]) for match in found if match]


@pytest.fixture
def own_imports(monkeypatch):
    """Import examples by name, and forget them afterwards."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)


# All of them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_fits_on_a_page_and_says_what_it_is(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 100
    assert lines[0].startswith('"""')


# before.py and after.py --------------------------------------------------------------------------


def code_lines(name):
    return [line for line in (EXAMPLES / name).read_text().splitlines() if line.strip()]


def test_five_lines_make_a_loop_a_distributed_one():
    changes = list(difflib.ndiff(code_lines("before.py"), code_lines("after.py")))
    added = [line for line in changes if line.startswith("+ ")]
    removed = [line for line in changes if line.startswith("- ")]
    assert 0 < len(added) <= 5
    assert len(removed) <= len(added)
    assert not any("paceline as pl" in line for line in code_lines("before.py"))


def test_the_plain_loop_learns(tmp_path):
    found = accuracies(run(tmp_path, EXAMPLES / "before.py"), r"epoch \d")
    assert len(found) == 3 and found[-1] > 0.75


@pytest.mark.transport("shared_memory")
def test_the_same_loop_learns_on_two_workers(tmp_path):
    lines = run(tmp_path, EXAMPLES / "after.py")
    for epoch in (1, 2, 3):
        found = accuracies(lines, f"epoch {epoch}")
        assert len(found) == 2 and found[0] == found[1], "an epoch ends with an aggregation"
    assert found[0] > 0.75
    assert len(lines) == 6


# gan.py ------------------------------------------------------------------------------------------


@pytest.mark.transport("shared_memory")
def test_a_gan_learns_on_two_workers(tmp_path):
    lines = run(tmp_path, EXAMPLES / "gan.py")
    told = [re.fullmatch(r"epoch \d+: (\S+) from the circle, (\d) of 8 parts", x) for x in lines]
    distances = [float(match[1]) for match in told]
    assert len(distances) == 4 and distances[-1] < 0.15 < distances[0]
    assert told[-1][2] == "8"


# torchrun.py -------------------------------------------------------------------------------------


def test_the_plain_script_runs_alone(tmp_path):
    (accuracy,) = accuracies(run(tmp_path, EXAMPLES / "torchrun.py"), "workers 1")
    assert accuracy > 0.7


@pytest.mark.transport("distributed")
def test_the_plain_script_runs_under_torchrun(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    lines = run(tmp_path, *launcher, EXAMPLES / "torchrun.py")
    (accuracy,) = accuracies(lines, "workers 2")
    assert accuracy > 0.7 and len(lines) == 1


# own_strategy.py ---------------------------------------------------------------------------------


def test_an_own_method_takes_less_than_60_lines():
    assert len((EXAMPLES / "own_strategy.py").read_text().splitlines()) < 60


def test_the_own_method_is_compared_with_others(tmp_path):
    header, *rows = run(tmp_path, EXAMPLES / "own_strategy.py")
    assert header.split()[:2] == ["strategy", "accuracy"]
    table = {row.split("(")[0].split()[0]: [float(n) for n in row.split()[-4:]] for row in rows}
    assert list(table) == ["allreduce", "sasgd", "Ring"]
    accuracy, virtual_s, mbytes, distance = zip(*table.values(), strict=True)
    assert min(accuracy) > 0.7
    assert virtual_s[2] < virtual_s[0] and mbytes[2] < mbytes[0]
    assert distance[0] == 0 < distance[2], "neighbors agree slowly, an all-reduce at once"


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("interval", [1, 2, 9])
def test_the_ring_keeps_the_mean_of_all_models(own_imports, workers, interval):
    """With gradients that do not depend on the model, the mean moves as without exchanges."""
    from own_strategy import Ring

    ends = {}

    def train(worker):
        net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(net.weight)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.5))
        for step in range(5):
            sgd.zero_grad()
            net(torch.full((1, 1), 2.0 * worker.rank + step, dtype=torch.float64)).backward()
            sgd.step()
        before = net.weight.item()
        worker.finish()
        ends[worker.rank] = (before, net.weight.item())

    pl.simulate(train, workers=workers, strategy=Ring(interval=interval), cluster="ideal")
    mean = (
        1 - 0.5 * sum(2.0 * rank + step for rank in range(workers) for step in range(5)) / workers
    )
    before, after = zip(*ends.values(), strict=True)
    assert sum(before) / workers == pytest.approx(mean)
    assert after == pytest.approx([mean] * workers)
    assert len(set(after)) == 1
    alone = sorted(1 - 0.5 * (10.0 * rank + 10) for rank in range(workers))
    assert (sorted(before) == alone) == (interval > 5)


def test_the_ring_refuses_an_interval_of_0(own_imports):
    from own_strategy import Ring

    with pytest.raises(pl.UsageError, match=r"interval \(0\) must be at least 1"):
        Ring(interval=0)


# evaluate_and_save.py ----------------------------------------------------------------------------


@pytest.mark.transport("shared_memory")
def test_a_run_stops_resumes_and_leaves_a_plain_model(tmp_path):
    lines = run(tmp_path, EXAMPLES / "evaluate_and_save.py")
    epochs = [accuracies([line], rf"epoch {n + 1}") for n, line in enumerate(lines[:2])]
    epochs += [accuracies([line], rf"epoch {n + 3}") for n, line in enumerate(lines[3:5])]
    assert "resuming" in lines[2] and all(len(found) == 1 for found in epochs)
    assert epochs[-1][0] > 0.75
    assert accuracies(lines[5:], "plain model") == epochs[-1]


def test_a_stop_changes_nothing_in_the_model(own_imports, tmp_path):
    from evaluate_and_save import train

    def trained(name, *stops):
        for epochs in stops:
            how = {"checkpoint": str(tmp_path / name / "checkpoint"), "epochs": epochs}
            out = tmp_path / name
            pl.simulate(train, workers=2, strategy="sasgd(interval=7)", arguments=how, out=out)
        return load_file(tmp_path / name / "model.safetensors")

    whole, stopped = trained("whole", 2), trained("stopped", 1, 2)
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
