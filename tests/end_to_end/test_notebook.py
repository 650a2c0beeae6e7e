"""``pl.launch`` from a notebook: its cells are run as IPython does, in a process of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.notebook import run_cells
from support.worlds import on_shared_memory

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
START = "import torch\nimport paceline as pl\nSTEPS = 3\n"
TRAIN = """
def train(worker, lr):
    net = torch.nn.Linear(2, 1)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=lr))
    for _ in range(STEPS):
        net(torch.ones(3, 2)).sum().backward()
        sgd.step()
    return worker.rank
"""
LAUNCH = "print(pl.launch(train, workers=2, arguments={'lr': 0.1}, seed=4).returned)\n"


def run(folder, *cells):
    ended = run_cells(json.dumps(cells), folder)
    return ended.returncode, ended.stdout, ended.stderr


def cells_of(path):
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@on_shared_memory
def test_the_example_trains_in_real_processes_and_simulated(tmp_path):
    code, out, err = run(tmp_path, *cells_of(NOTEBOOK))
    assert code == 0, err
    (accuracy,) = re.findall(r"^accuracy (\S+)$", out, re.M)
    assert float(accuracy) > 0.75
    assert re.findall(r"^worker (\d): (\d+) steps", out, re.M) == [("0", "96"), ("1", "96")]
    assert re.search(r"^\d+\.\d s of virtual time, waiting \d+%$", out, re.M)
    assert not list(tmp_path.glob("paceline-*")), "the module is gone with the run"


def test_the_example_is_saved_without_output():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@on_shared_memory
def test_the_module_stays_in_the_folder_of_the_run_for_its_replay(tmp_path, paceline):
    launch = LAUNCH.replace("seed=4", "out='o'")
    code, out, err = run(tmp_path, START, TRAIN, launch, "STEPS = 5", launch)
    assert (code, out) == (0, "[0, 1]\n[0, 1]\n"), err
    files = sorted(path.name for path in (tmp_path / "o").iterdir())
    assert "from_notebook.py" in files and "__pycache__" not in files
    assert (tmp_path / "o" / "from_notebook.py").stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / "o" / "result.json").read_text())["steps"] == 10
    assert "same parameters as the recorded run" in paceline("sim", "--replay", "o").out


def test_a_global_that_processes_do_not_have_is_named(tmp_path):
    made = "model = torch.nn.Linear(2, 1)\n"
    uses = TRAIN.replace("net = torch.nn.Linear(2, 1)", "net = model")
    code, out, err = run(tmp_path, START, made, uses, LAUNCH)
    assert code == 1 and out == ""
    assert "UsageError: train uses model (Linear) of the notebook, which other processes" in err


def test_other_hosts_do_not_have_the_notebook(tmp_path):
    launch = "pl.launch(train, workers=2, hosts=2, listen='127.0.0.1:7001', transport='hosts')\n"
    code, _, err = run(tmp_path, START, TRAIN, launch)
    assert code == 1
    assert "train must be in a file that all hosts have, not in a notebook of one" in err


def test_a_closure_of_a_notebook_is_refused_as_any_other(tmp_path):
    made = f"def make():\n{TRAIN.replace(chr(10), chr(10) + '    ')}\n    return train\n"
    code, _, err = run(tmp_path, START, made, "train = make()", LAUNCH)
    assert code == 1 and "must be defined at the top level of a module or script" in err
