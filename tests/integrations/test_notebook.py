"""The example notebook in a kernel of Jupyter, and cells in IPython's own shell."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def test_the_example_runs_in_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=200, resources=where).execute()
    printed = "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stdout"
    )
    (accuracy,) = re.findall(r"^accuracy (\S+)$", printed, re.M)
    assert float(accuracy) > 0.75
    assert re.findall(r"^worker (\d): (\d+) steps", printed, re.M) == [("0", "96"), ("1", "96")]
    assert "s of virtual time" in printed
    assert not list(tmp_path.iterdir())


CELLS = """
from dataclasses import dataclass
import torch
import paceline as pl

@dataclass
class Settings:
    lr: float = 0.1

def train(worker):
    net = torch.nn.Linear(2, 1)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=Settings().lr))
    net(torch.ones(3, 2)).sum().backward()
    sgd.step()
    return worker.rank

def magic(worker):
    %time train(worker)

print(pl.launch(train, workers=2).returned)
pl.launch(magic, workers=2)
"""


def test_ipython_launches_what_was_typed_and_names_a_magic(tmp_path):
    """Each block of lines is a cell."""
    shell = (
        "import sys\nfrom IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "for cell in sys.stdin.read().split('\\n\\n'):\n    shell.run_cell(cell)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", shell],
        input=CELLS,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "[0, 1]" in ended.stdout, ended.stdout + ended.stderr
    assert re.search(r"UsageError.*: magic uses get_ipython \(method\)", ended.stdout)
