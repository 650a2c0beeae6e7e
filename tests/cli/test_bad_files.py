"""Bad files are refused with one message: nothing hangs or crashes."""

import json
import os
import shutil

import pytest

from paceline.lab.tasks.fashion import train
from paceline.launcher.simulate import simulate
from paceline.strategies import make_strategy
from paceline.strategies.packing import pack_strategy

LONG = "9" * 400
CONTENTS = {
    "nothing": "",
    "no JSON": "{not json\n",
    "a list": "[1, 2]\n",
    "a number": "5\n",
    "null": "null\n",
    "no text": b"\xff\xfe{}\n",
    "too deep": '{"a":' * 100_000 + "1" + "}" * 100_000 + "\n",
    "a long number": f'{{"t": {LONG}, "rank": {LONG}, "event": "step", "seed": {LONG}}}\n',
    "a longer number": f'{{"t": 0.0, "rank": {LONG * 20}, "event": "step", "seed": {LONG * 20}}}\n',
    "something else": '{"t": 0.0, "rank": 0, "event": "step", "world": [], "runs": [{}]}\n',
}
READERS = {
    "report run": ["config.json", "result.json"],
    "report comparison": ["comparison.json", "trials/one.json"],
    "timeline run --out timeline.json": ["config.json", "trace.jsonl", "metrics.jsonl"],
    "sim --replay run --out replay": ["config.json", "trace.jsonl", "model.safetensors"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folders of a run and of a comparison, as commands leave them."""
    folder = tmp_path_factory.mktemp("made")
    arguments = {"steps": 1, "model": "mlp"}
    simulate(train, workers=2, cluster="ideal", arguments=arguments, out=folder / "run")
    config = json.loads((folder / "run" / "config.json").read_text())
    method = pack_strategy(make_strategy("allreduce"))
    real = {**config, "world": "shared_memory", "threads": 1, "method": method}
    (folder / "run" / "config.json").write_text(json.dumps(real))  # as if real
    (folder / "comparison" / "trials").mkdir(parents=True)
    outcome = {"result": json.loads((folder / "run" / "result.json").read_text()), "error": None}
    trial = {"config": config, "made": config, "outcome": outcome}
    (folder / "comparison" / "trials" / "one.json").write_text(json.dumps(trial))
    run = {"strategy": "allreduce", "workers": 2, "seed": 0, "file": "trials/one.json"}
    plan = {"runs": [run], "task": "a task", "target": 0.8, "command": None, "made_at": None}
    (folder / "comparison" / "comparison.json").write_text(json.dumps(plan))
    return folder


FITS = {
    ("metrics.jsonl", "nothing"): 0,  # nothing was logged
    ("metrics.jsonl", "something else"): 0,  # no loss and no accuracy
    ("trace.jsonl", "something else"): 1,  # of another run: a replay finds out
}


@pytest.mark.parametrize("line", READERS)
def test_a_file_with_something_else_in_it_is_refused(line, made, paceline, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for name in READERS[line]:
        file = tmp_path / line.split()[1 + line.startswith("sim")] / name
        whole = file.read_bytes()
        for what, content in CONTENTS.items():
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
            code = FITS.get((name, what), 2) if "report" not in line else 2
            code = 2 if (line.split()[0], name) == ("timeline", "trace.jsonl") else code
            err = paceline(*line.split(), code=code).err
            assert "Traceback" not in err, (name, what)
            if code == 2:
                assert err.startswith("paceline: ") and err.count("\n") == 1, (name, what, err)
        file.write_bytes(whole)


SPECIAL = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
}
COMMANDS = [
    "run {file}",
    "sim {file}",
    "compare {file}",
    "calibrate {file}",
    "sim --cluster {file}.toml",
    "sim --faults {file}.toml",
    "papers --rates {file}",
    "faulttest --corpus {file}",
    "report {file}",
    "timeline {file}",
    "sim --replay {file}",
    "run --join {file}",
    "run --data {file}",
]


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(kind, paceline, tmp_path):
    for line in COMMANDS:
        words = line.format(file=kind).split()
        for name in (kind, f"{kind}.toml"):
            if not (tmp_path / name).is_symlink() and not (tmp_path / name).exists():
                SPECIAL[kind](tmp_path / name)
        err = paceline(*words, code=2).err
        assert err.startswith("paceline: ") and err.count("\n") == 1, (line, err)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("line", READERS)
def test_a_run_whose_files_are_no_regular_ones_is_refused(line, kind, made, paceline, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for name in READERS[line]:
        file = tmp_path / line.split()[1 + line.startswith("sim")] / name
        kept = file.rename(tmp_path / "kept")
        SPECIAL[kind](file)
        err = paceline(*line.split(), code=2).err
        assert err.startswith("paceline: ") and err.count("\n") == 1, (name, err)
        file.rmdir() if kind == "folder" else file.unlink()
        kept.rename(file)


def test_a_script_needs_no_py_at_its_end(paceline, tmp_path):
    (tmp_path / "script").write_text("def train(worker):\n    worker.log(done=1)\n")
    paceline("sim", "script", "-w", "2", "--out", "here")
    assert (tmp_path / "here" / "metrics.jsonl").read_text().count('"done": 1') == 2


def test_a_damaged_outcome_of_a_comparison_is_computed_again(paceline, tmp_path):
    how = ["-s", "allreduce", "-w", "1", "--steps", "1", "--model", "mlp"]
    line = ["compare", *how, "--out", "here", "--json"]
    rows = json.loads(paceline(*line).out.splitlines()[-1])["rows"]
    (trial,) = (tmp_path / "here" / "trials").glob("*.json")
    for content in ("", "[]", "{}"):
        trial.write_text(content)
        again = json.loads(paceline(*line).out.splitlines()[-1])["rows"]
        assert [row["accuracy"] for row in again] == [row["accuracy"] for row in rows]
