"""Scripts of users on the command line: their functions, their own arguments, and whole scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support import runs, warm
from support.worlds import on_distributed, on_shared_memory

from paceline.cli.script import UNREAD, read_script
from paceline.errors import UsageError

ARGUED = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("words", nargs="*")
options = parser.parse_args()

def learn(worker, epochs=1):
    net = torch.nn.Linear(2, 1)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=options.lr))
    for epoch in range(epochs):
        sgd.zero_grad()
        net(torch.ones(3, 2)).sum().backward()
        sgd.step()
        worker.log(lr=sgd.param_groups[0]["lr"], words=",".join(options.words), accuracy=options.lr)
"""
TYPED = ["--", "--lr", 0.25, "two words", "--", "-x"]
WORDS = {"lr": 0.25, "words": "two words,-x"}

WHOLE = """
import sys
import torch
import paceline as pl

steps = int(sys.argv[1])
{start}
net = torch.nn.Linear(2, 1)
net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))


def step():
    global steps  # each worker has its own
    worker.samples(3)
    sgd.zero_grad()
    net(torch.ones(3, 2)).sum().backward()
    sgd.step()
    steps -= 1


while steps:
    step()
    worker.log(name=__name__, steps=steps, accuracy=0.5, method=type(worker.strategy).__name__)
{end}
"""


def whole(start='worker = pl.init(strategy="gossip", seed=11)', end=""):
    return WHOLE.format(start=start, end=end)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Run trials in this process, which is faster; and forget what scripts have set."""
    monkeypatch.setattr("paceline.lab.trials.cores", lambda: 1)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def outcome(paceline):
    return lambda *arguments, **how: json.loads(paceline(*arguments, **how).out.splitlines()[-1])


def command(folder, *arguments):
    """Run a command in a process of its own, as some read what ranks print."""
    done = subprocess.run(
        [warm.python(), "-m", "paceline", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


# Its own arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", ["run", "sim"])
def test_a_script_has_its_own_arguments_on_every_rank(world, paceline, tmp_path):
    (tmp_path / "mine.py").write_text(ARGUED)
    line = [world, "mine.py", "--function", "learn", "-w", 2, "--epochs", 2, "--out", "o"]
    paceline(*line, *TYPED)
    assert len(logged(tmp_path / "o")) == 4
    for record in logged(tmp_path / "o"):
        assert record | WORDS == record
    assert config_of(tmp_path / "o")["train"] == {
        "script": str(tmp_path / "mine.py"),
        "name": "learn",
        "argv": ["--lr", "0.25", "two words", "--", "-x"],
    }


def test_a_resumed_run_must_have_the_same_arguments(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(ARGUED)
    line = ["sim", "mine.py", "--function", "learn", "--epochs", 4, "--out", "o"]
    line += ["--checkpoint-steps", 2]
    paceline(*line, "--", "--lr", 0.5)
    refused = paceline(*line, "--resume", "--", "--lr", 0.25, code=2)
    assert "'argv': ['--lr', '0.25']}) must be {" in refused.err
    assert "written to" in paceline(*line, "--resume", "--", "--lr", 0.5).out


@on_shared_memory
def test_a_replay_has_the_recorded_arguments(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(ARGUED)
    paceline("run", "mine.py", "--function", "learn", "-s", "gossip", "--out", "real", *TYPED)
    done = paceline("sim", "--replay", "real", "--out", "virtual")
    assert "same parameters as the recorded run" in done.out
    assert [r["words"] for r in logged(tmp_path / "virtual")] == ["two words,-x"] * 2


def test_a_comparison_and_a_plan_pass_them_on(outcome, tmp_path):
    (tmp_path / "mine.py").write_text(ARGUED)
    line = ["mine.py", "--function", "learn", "-s", "sasgd", "-w", 2, "--json", "--target", 0.25]
    assert [row["accuracy"] for row in outcome("compare", *line, *TYPED)["rows"]] == [0.25]
    assert outcome("plan", *line, "--seeds", 1, *TYPED)["take"]["workers"] == 2


@pytest.mark.parametrize("world", ["run", "sim"])
def test_what_a_script_refuses_is_bad_input(world, paceline, tmp_path):
    (tmp_path / "whole.py").write_text(ARGUED + whole())
    done = paceline(world, "whole.py", "-w", 2, "--", "--rate", 0.1, code=2)
    assert f"{tmp_path / 'whole.py'} has ended by sys.exit(2)" in done.err
    assert "Traceback" not in done.err


# Scripts that run as a whole ---------------------------------------------------------------------


@pytest.mark.parametrize("world", ["run", "sim"])
@pytest.mark.parametrize("end", ["", "worker.finish()", "sys.exit()"])
def test_a_whole_script_runs_on_every_rank(world, end, paceline, tmp_path):
    (tmp_path / "whole.py").write_text(whole(end=end))
    paceline(world, "whole.py", "-w", 2, "--out", "o", "--", 3)
    records = [(r["rank"], r["steps"], r["name"], r["method"]) for r in logged(tmp_path / "o")]
    assert sorted(records) == [(r, s, "__main__", "Gossip") for r in (0, 1) for s in (0, 1, 2)]
    config = config_of(tmp_path / "o")
    assert (config["seed"], config["spec"], config["train"]["name"]) == (11, "gossip", "__main__")
    assert (tmp_path / "o" / "model.safetensors").is_file()


START = """
with pl.init(strategy="downpour", out="asked", trace=False, on_metric=print) as worker:
    net = torch.nn.Linear(2, 1)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net(torch.ones(3, 2)).sum().backward()
    sgd.step()
print("the answer", worker.finished)
sys.exit(0)
"""


@on_shared_memory
def test_a_block_serves_and_finishes_there_too(tmp_path):
    """Of what the script asks for, options of the command count, and those that were typed."""
    (tmp_path / "whole.py").write_text(whole(START))
    done = command(tmp_path, "run", "whole.py", "-w", 2, "--", 3)
    assert "trace, on_metric of pl.init in whole.py: this command decides instead" in done.stdout
    assert config_of(tmp_path / "asked")["spec"] == "downpour"
    assert done.stdout.count("the answer True") == 2
    command(tmp_path, "run", "whole.py", "-w", 2, "-s", "sasgd", "--out", "typed", "--", 3)
    assert config_of(tmp_path / "typed")["spec"] == "sasgd"


def test_a_comparison_of_a_whole_script_chooses_the_methods(outcome, tmp_path):
    (tmp_path / "whole.py").write_text(whole('worker = pl.init(strategy=str("easgd"))'))
    line = ["compare", "whole.py", "-s", "sasgd,gossip", "-w", 2, "--json", "--", 3]
    rows = outcome(*line)["rows"]
    assert [(row["strategy"], row["steps"]) for row in rows] == [("sasgd", 6), ("gossip", 6)]


@on_shared_memory
def test_a_whole_script_resumes(paceline, tmp_path):
    stops = "if not worker.catching_up and steps == 4 and len(sys.argv) == 2: raise KeyError"
    (tmp_path / "whole.py").write_text(
        whole().replace("while steps:", f"while steps:\n    {stops}")
    )
    line = ["whole.py", "-w", 2, "-s", "allreduce", "--out", "o", "--checkpoint-steps", 2]
    failed = paceline("run", *line, "--", 9, code=1)
    assert "KeyError" in failed.err and "in <module>" in failed.err
    (tmp_path / "whole.py").write_text(whole())
    paceline("run", *line, "--resume", "--", 9)
    left = [r["steps"] for r in logged(tmp_path / "o") if r["rank"] == 0]
    assert left == [*range(8, -1, -1)]


PACED = """
net = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
with pl.paced(net, sgd, strategy="gossip") as worker:
    net(torch.ones(3, 2)).sum().backward()
    sgd.step()
sys.exit(0)
"""


def test_a_loop_that_stays_as_it_is_runs_as_a_whole(paceline, tmp_path):
    (tmp_path / "whole.py").write_text(whole(PACED))
    assert "whole.py: gossip, 3 workers" in paceline("sim", "whole.py", "-w", 3, "--", 3).out


@pytest.mark.parametrize("world", ["run", "sim"])
@pytest.mark.parametrize(
    ("start", "code", "message"),
    [
        ("sys.exit(0)\nworker = pl.init()", 2, "has ended without worker = pl.init()"),
        ("worker = pl.init()\nsys.exit(7)", 1, "the script has ended by sys.exit(7)"),
        ("worker = pl.init()\nworker = pl.init()", 2, "pl.init must be called once in a run"),
    ],
)
def test_a_whole_script_that_goes_wrong(world, start, code, message, paceline, tmp_path):
    (tmp_path / "whole.py").write_text(whole(start))
    assert message in paceline(world, "whole.py", "-w", 1, "--", 3, code=code).err


@on_distributed
def test_torchrun_runs_it_too(tmp_path):
    (tmp_path / "whole.py").write_text(whole())
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = ["-m", "paceline", "run", "whole.py", "--out", "o", "--json", "--", "3"]
    done = subprocess.run(
        [warm.python(), *launcher, *line],
        cwd=tmp_path,
        env=runs.environment(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert (facts["workers"], facts["steps"], facts["strategy"]) == (2, 6, "gossip")
    assert config_of(tmp_path / "o")["train"]["argv"] == ["3"]
    assert os.path.exists(tmp_path / "o" / "model.safetensors")


# What is read of a script ------------------------------------------------------------------------


def read(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return read_script(path)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("import paceline as pl\npl.init()", {}),
        ("import paceline\nworker = paceline.init(seed=3, out='o')", {"seed": 3, "out": "o"}),
        ("from paceline import init as begin\ndef main():\n  begin(seed=x)", {"seed": UNREAD}),
        ("import paceline as p\nwith p.paced(a, b, strategy='s'): pass", {"strategy": "s"}),
        ("import paceline as pl\npl.launch(train)", None),
        ("import torch\ntorch.nn.init()\ninit()\nself.pl.init()", None),
    ],
)
def test_the_call_that_gives_a_worker_is_found(text, asked, tmp_path):
    assert read(tmp_path, text).asked == asked


INIT = "import paceline as pl\n{}\nif __name__ == '__main__':\n    pl.init()\n"


@pytest.mark.parametrize(
    ("train", "entry"),
    [
        ("def train(worker): pass", "train"),
        ("def train(w: pl.Worker, lr=0.1): pass", "train"),
        ("def train(w: 'Worker'): pass", "train"),
        ("def train(epoch): pass", "__main__"),
        ("def train(args, model, device): pass", "__main__"),
        ("def train(): pass", "__main__"),
        ("def other(worker): pass", "__main__"),
    ],
)
def test_train_of_a_whole_script_is_its_own_unless_it_takes_the_worker(train, entry, tmp_path):
    assert read(tmp_path, INIT.format(train)).entry(None, {}) == entry


def test_a_script_without_a_function_says_what_to_do(tmp_path):
    with pytest.raises(UsageError, match=r"its functions: main\. Name another one with --function"):
        read(tmp_path, "def main(worker): pass").entry(None, {})
