"""Bad input is refused before anything starts: exit code 2, with name, value and rule."""

import json
import subprocess
import sys

import pytest

CASES = {
    "run -s sagd": 'no strategy "sagd"; did you mean "sasgd"?',
    "sim -s sasgd --set intervl=3": 'sasgd: no option "intervl"; did you mean "interval"?',
    "run -s sasgd --set interval=0": "sasgd: interval (0) must be at least 1",
    "run -s sasgd(interval=2.5)": "sasgd: interval (2.5) must be of type int",
    "run -s sasgd(": "strategy (sasgd() must look like",
    "run --set interval": "setting (interval) must look like name=value",
    "compare --set intervl=3": 'no option "intervl"; did you mean "interval"?',
    "run --workers 0": "workers (0) must be at least 1",
    "run --workers 100000": "they would need 15,729 GB",
    "sim --workers 100000": "each virtual worker needs a thread and a model of its own",
    "compare --workers 4,many": "workers (many) must be a whole number",
    "compare --seeds many": "seeds (many) must be a whole number",
    "compare --seeds 0": "seeds (0) must be at least 1",
    "compare --seeds 0,-1": "seed (-1) must be from 0 to",
    "compare --seeds 0,1 --seed 4": "seed (4) must not be given together with a list of seeds",
    "report nothere": "folder (nothere) must be one that paceline compare, run or sim",
    "run --lr -0.1": "lr (-0.1) must be above 0",
    "run --lr nan": "lr (nan) must be above 0",
    "run --lr inf": "lr (inf) must be finite",
    "run --epochs 0": "epochs (0) must be at least 1",
    "run --batch-size 0": "batch_size (0) must be at least 1",
    "run --steps -3": "steps (-3) must be at least 1",
    "run --seed -1": "seed (-1) must be from 0 to",
    "run --model cn": 'no model "cn"; did you mean "cnn"?',
    "run --data here": "data (here) must hold the IDX files of Fashion-MNIST",
    "run nothere.py": "script (nothere.py) cannot be read: No such file",
    "run .": "script (.) cannot be read: Is a directory",
    "run broken.py": "script (broken.py) is not Python: line 2:",
    "run binary.py": "script (binary.py) is not Python:",
    "run misnamed.py": "script (misnamed.py) must define train(worker); its functions: trian",
    "run misnamed.py --function train": 'no function of misnamed.py "train"; did you mean "trian"?',
    "run --function train": "--function (train) must be given with a script",
    "calibrate --function train": "--function (train) must be given with a script",
    "sim fine.py --function other": 'no function of fine.py "other"; available: train',
    "run -- --lr 0.3": "-- must be given with a script: paceline run SCRIPT -- --lr 0.3",
    "calibrate -- --lr 0.3": "-- must be given with a script",
    "strategies -- --lr 0.3": "-- must be given with a script",
    "run fine.py --join runs/a -- x": "script must not be given with --join: the run in that",
    "run --join runs/a -- x": "-- must not be given with --join: the run in that folder",
    "sim --replay runs/a -- x": "-- must not be given with --replay: the recorded run",
    "plan -- x": "-- must be given with a script",
    "sim whole.py --epochs 3": "arguments of its own come after -- (... whole.py -- --epochs 3)",
    "run whole.py": "--strategy is missing: whole.py gives pl.init a strategy that is known only",
    "run whole.py -s gossip": "--seed is missing: whole.py gives pl.init a seed that is known only",
    "compare whole.py --function mian": 'no function of whole.py "mian"; did you mean "main"?',
    "run unready.py": "train() must take the worker: def train(worker)",
    "sim fine.py --lr 0.1": "train in fine.py has no parameter lr; it takes epochs",
    "sim fine.py --full": "--full must be used with the built-in task",
    "sim --cluster typo.toml": "typo.toml, [network]: no option",
    "sim --cluster kind.toml": "kind.toml, [compute]: sample_s (fast) must be of type float",
    "sim --cluster untoml.toml": "untoml.toml: not a TOML file",
    "sim --cluster none.toml": "none.toml: No such file",
    "sim --cluster ehternet-1g": 'no cluster "ehternet-1g"; did you mean "ethernet-1g"?',
    "sim --fault kil(rank=2)": 'fault (kil(rank=2)): no fault "kil"; did you mean "kill"?',
    "sim --fault kill(rank=8)": "kill: rank (8) must be below 8: there are ranks 0 to 7",
    "sim --fault kill(2)": "options have names, as in kill(rank=1).at(step=40)",
    "sim -s downpour -w 2 --fault cut(rank=0,peer=3)": "cut: peer (3) must be below 3",
    "sim --faults typo.toml": 'typo.toml: no option "network"; available: faults',
    "sim --faults faults.toml": "faults.toml, [faults 1]: freeze: rank is missing",
    "sim --as-model resnet5": 'no model "resnet5"; did you mean "resnet50"?',
    "compare --as-model bert": 'no model "bert"; did you mean "bert-base"?',
    "compare --real --as-model vgg16": "--as-model (vgg16) must not be used with --real",
    "run --out file/below": "out (file/below) must be a writable folder",
    "run --transport tcp": "transport (tcp) must be one of shared_memory, distributed",
    "run --device tpu": "device (tpu) must be cpu, cuda",
    "run --join runs/a --workers 3": "--workers must not be given with --join: the run in that",
    "run --stratgy sasgd": "No such option: --stratgy",
    "rnu": "No such command 'rnu'. Did you mean 'run'?",
    "strategies sagd": 'no strategy "sagd"; did you mean "sasgd"?',
    "run --workers @400": "workers (a number of about 400 digits) must be at most 92",
    "sim --workers @400": "workers (a number of about 400 digits) must be at most 92",
    "compare -w 2,@400": "workers (a number of about 400 digits) must be at most 92",
    "compare --seeds @400": "seeds (a number of about 400 digits) must be at most 92",
    "compare --seeds 1000000000": "seeds (1000000000) must be at most 10000",
    "compare --seeds 2 --seed 9223372036854775807": "seed (9223372036854775808) must be from 0",
    "compare --seeds 0,@400": "seed (a number of about 400 digits) must be from 0 to",
    "run --seed @400": "seed (a number of about 400 digits) must be from 0 to",
    "sim --seed @5000": "Invalid value for '--seed'",
    "sim --steps @400": "steps (a number of about 400 digits) must be at most",
    "run -s sasgd(interval=@400)": "sasgd: interval (a number of about 400 digits) must be from",
    "sim -s sasgd --set interval=@400": "sasgd: interval (a number of about 400 digits) must be",
    "sim -s sasgd --set interval=@5000": "sasgd: interval (inf) must be of type int",
    "sim -s easgd --set alpha=@400": "easgd: alpha (a number of about 400 digits) must be from",
    "sim --fault kill(rank=@400)": "rank (a number of about 400 digits) must be from",
    "sim --cluster long.toml": "[network]: latency_s (a number of about 400 digits) must be from",
    "sim --cluster longer.toml": "longer.toml: not a TOML file: Exceeds the limit (4300 digits)",
    "sim --faults long-fault.toml": "[faults 1]: rank (a number of about 400 digits) must be from",
    "bench sim --steps @400": "steps (a number of about 400 digits) must be at most",
    "run -s downpour(shards=2000)": "workers and servers (2002) must be at most",
    "sim -s easgd(shards=10000) -w 9000": "workers and servers (19000) must be at most",
    "sim -s downpour(shards=1000000000)": "downpour: shards (1000000000) must be at most 10000",
    "compare -s gossip,ssp(shards=9999) -w 2,9000": "workers and servers (18999) must be at most",
    "bench comm --workers 1": "workers (1) must be at least 2",
    "bench hosts --repeats 0": "repeats (0) must be at least 1",
    "bench hosts --link 10": "link (10) must be one of 100 Mbit, 1 Gbit, 100 Mbit 50 ms",
    "bench sim --steps 0": "steps (0) must be at least 1",
}
FILES = {
    "broken.py": "def train(worker):\nnot indented\n",
    "binary.py": "\0\1\2",
    "misnamed.py": "def trian(worker):\n    pass\n",
    "unready.py": "def train():\n    pass\n",
    "whole.py": "import paceline as pl\nhow = {}\ndef main():\n"
    "    worker = pl.init(strategy=how['strategy'], seed=how['seed'])\nmain()\n",
    "fine.py": "def train(worker, epochs=1):\n    pass\n",
    "typo.toml": "[network]\nlatncy_s = 1.0\n",
    "kind.toml": '[compute]\nsample_s = "fast"\n',
    "untoml.toml": "network = [",
    "faults.toml": '[[faults]]\nkind = "freeze"\n',
    "long.toml": "[network]\nlatency_s = " + "9" * 400,
    "longer.toml": "[network]\nlatency_s = " + "9" * 5000,
    "long-fault.toml": '[[faults]]\nkind = "kill"\nrank = ' + "9" * 400,
    "file": "",
}
ALL_IN_ONE = """
import contextlib, io, json, re, sys
from paceline.cli import main
outcomes = {}
for line in json.load(sys.stdin):
    words = [re.sub("@([0-9]+)", lambda digits: "9" * int(digits[1]), w) for w in line.split()]
    if not line.startswith("rnu"):
        words.insert(words.index("--") if "--" in words else len(words), "--json")
    sys.argv = ["paceline", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    outcomes[line] = [code, out.getvalue(), err.getvalue()]
from paceline.launcher.fork_client import ForkServer
assert not ForkServer._idle, "a process was started"
assert "torch" not in sys.modules, "torch was loaded"
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE],
        input=json.dumps(list(CASES)),
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES), "something was written"
    return json.loads(done.stdout)


@pytest.mark.parametrize("line", CASES)
def test_bad_input_is_refused_with_name_value_and_rule(outcomes, line):
    code, out, err = outcomes[line]
    assert code == 2
    assert CASES[line] in err
    assert "Traceback" not in err
    if err.startswith("paceline: "):
        facts = json.loads(out)
        assert facts == {"error": err.removeprefix("paceline: ").strip(), "exit_code": 2}


def test_windows_users_are_referred_to_wsl():
    code = "import sys; sys.platform = 'win32'; from paceline.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "use WSL" in done.stderr
