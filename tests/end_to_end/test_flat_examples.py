"""Scripts that were not written for Paceline: what changes in them, and that they learn."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
from pathlib import Path

import pytest
from support import runs, warm
from support.worlds import on_distributed, on_shared_memory

FLAT = Path(__file__).parents[2] / "examples" / "flat"
NAMES = ("mnist", "gpt")
MOST_CHANGED = 20
SHORT = ["--eval_interval=20", "--eval_iters=4", "--batch_size=4"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "


@pytest.fixture
def here(tmp_path):
    """A folder with the data of the GPT."""
    (tmp_path / "input.txt").write_text(TEXT * 60)
    python(tmp_path, FLAT / "prepare.py", "input.txt", "data")
    return tmp_path


def python(folder, *command, program="python"):
    """Run Python, or a command, in a folder; returns what it printed."""
    ended = subprocess.run(
        [str(warm.programs() / program), *map(str, command)],
        cwd=folder,
        env=runs.environment(OMP_NUM_THREADS="1", TMPDIR=str(folder)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def accuracies(printed):
    return [float(found) for found in re.findall(r"^test set: .*accuracy (\S+)$", printed, re.M)]


def losses(printed):
    """The losses on both parts of the text, at the first evaluation and the last."""
    found = re.findall(r"^step \d+: train loss (\S+), val loss (\S+)$", printed, re.M)
    return [[float(loss) for loss in pair] for pair in (found[0], found[-1])]


# What changes ------------------------------------------------------------------------------------


def code_lines(name):
    return [line for line in (FLAT / name).read_text().splitlines() if line.strip()]


@pytest.mark.parametrize("name", NAMES)
def test_at_most_twenty_lines_change(name):
    before, after = code_lines(f"{name}_before.py"), code_lines(f"{name}_after.py")
    changed = [line for line in difflib.ndiff(before, after) if line.startswith(("+ ", "- "))]
    assert 0 < len(changed) <= MOST_CHANGED
    assert not any("paceline as pl" in line or "worker" in line for line in before[1:])


# A classifier ------------------------------------------------------------------------------------


def test_the_classifier_learns_alone_and_saves_a_plain_model(tmp_path):
    line = ["--epochs", 3, "--save-model"]
    before = accuracies(python(tmp_path, FLAT / "mnist_before.py", *line, "before.pt"))
    after = accuracies(python(tmp_path, FLAT / "mnist_after.py", *line, "after.pt"))
    assert len(before) == len(after) == 3 and min(before[-1], after[-1]) > 0.72
    saved = [os.path.getsize(tmp_path / name) for name in ("before.pt", "after.pt")]
    assert max(saved) < 1.01 * min(saved)


@on_distributed
def test_the_classifier_learns_under_torchrun(tmp_path):
    printed = python(tmp_path, *TORCHRUN, FLAT / "mnist_after.py", "--epochs", 4)
    assert len(accuracies(printed)) == 4 and accuracies(printed)[-1] > 0.68


def test_the_classifier_learns_in_the_simulator(tmp_path):
    line = ["sim", FLAT / "mnist_after.py", "-w", 3, "-c", "mixed-lab", "--seed", 1]
    printed = python(tmp_path, *line, "--", "--epochs", 4, program="paceline")
    assert len(accuracies(printed)) == 4 and accuracies(printed)[-1] > 0.65


# A GPT -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_gpt_is_the_same_alone(dtype, here):
    """To rounding: the norm of its gradient is summed in another order."""
    line = [*SHORT, "--max_iters=40", f"--dtype={dtype}"]
    before, after = (
        losses(python(here, FLAT / f"gpt_{name}.py", *line)) for name in ("before", "after")
    )
    for one, other in zip(before, after, strict=True):
        assert other == pytest.approx(one, abs=2e-3)
    assert before[1][1] < before[0][1] - 0.5


@on_distributed
def test_the_gpt_learns_under_torchrun_and_goes_on_from_its_own_checkpoint(here):
    line = [*TORCHRUN, FLAT / "gpt_after.py", *SHORT]
    first, last = losses(python(here, *line, "--max_iters=40"))
    assert max(last) < min(first) - 0.5
    again, end = losses(python(here, *line, "--max_iters=80", "--init_from=resume"))
    assert max(again) < min(first) - 0.5 and max(end) < max(again)


@on_shared_memory
def test_the_gpt_learns_without_the_worker_that_led(here):
    line = ["run", FLAT / "gpt_after.py", "-w", 2, "--fault", "kill(rank=0).at(step=30)"]
    printed = python(here, *line, "--", *SHORT, "--max_iters=60", program="paceline")
    first, last = losses(printed)
    assert max(last) < min(first) - 0.5
    assert re.search(r"lost workers +1$", printed, re.M)
    assert (here / "out" / "ckpt.pt").is_file()


@pytest.mark.parametrize("strategy", ["allreduce", "downpour"])
def test_the_gpt_learns_in_the_simulator(strategy, here):
    line = ["sim", FLAT / "gpt_after.py", "-w", 3, "-c", "wan", "-s", strategy]
    printed = python(here, *line, "--", *SHORT, "--max_iters=40", program="paceline")
    first, last = losses(printed)
    assert max(last) < min(first) - 0.3
    assert re.search(r"steps +123 on 984 samples$", printed, re.M)
