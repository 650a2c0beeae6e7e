"""A Python of ``support.warm`` does what a Python that is started anew does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import warm

PROGRAMS = {
    "arguments": "import sys; print(sys.argv, sys.path, __name__, __file__)",
    "streams": "import sys; print(input()); print('two', file=sys.stderr)",
    "environment": "import os; print(os.environ['WORD'], os.getcwd(), sorted(os.environ))",
    "files": "import os; print(os.listdir('/proc/self/fd'))",
    "exit code": "import sys; sys.exit(7)",
    "text": "import sys; sys.exit('a reason')",
    "ended by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "at the end": "import atexit; atexit.register(print, 'bye')",
    "thread": "import threading; threading.Timer(0.1, print, ['late']).start()",
    "hash": "import os; print(os.environ['PYTHONHASHSEED'], hash('a'))",
}


def outcome(python, script):
    environment = {**os.environ, "WORD": "told"}
    if script.stem == "hash":  # only a Python that starts anew reads it
        environment["PYTHONHASHSEED"] = "3"
    how = {"input": "one\n", "capture_output": True, "text": True, "cwd": script.parent}
    ended = subprocess.run([python, script.name, "more"], env=environment, **how, check=False)
    return ended.returncode, ended.stdout, ended.stderr


def test_a_path_that_holds_what_every_python_has_is_the_same(tmp_path, monkeypatch):
    script = tmp_path / "path.py"
    script.write_text(PROGRAMS["arguments"] + "\n")
    for paths in (sys.path, [str(tmp_path), *reversed(sys.path)], ["relative", "relative"]):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        assert outcome(warm.python(), script) == outcome(sys.executable, script)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_warm_python_does_what_a_new_one_does(name, tmp_path):
    script = tmp_path / f"{name}.py"
    script.write_text(PROGRAMS[name] + "\n")
    assert outcome(warm.python(), script) == outcome(sys.executable, script)


def test_a_warm_python_has_loaded_torch_but_not_paceline(tmp_path):
    script = tmp_path / "loaded.py"
    script.write_text("import sys; print('torch' in sys.modules, 'paceline' in sys.modules)\n")
    assert outcome(warm.python(), script) == (0, "True False\n", "")
