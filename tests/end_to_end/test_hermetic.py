"""The hermetic guard: a test that reads what not every machine has is detected."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import hermetic, runs
from support.hermetic import outside

import paceline as pl

ELSEWHERE = "/usr/share/datasets/fashion-mnist/none"
PROGRAM = """
import os, subprocess, sys
from contextlib import suppress
from pathlib import Path

FILE, ELSEWHERE = {file!r}, {elsewhere!r}
READ = "import sys; print(open(sys.argv[1]).read())"

def test_good_what_it_wrote_itself(tmp_path):
    (tmp_path / "own").write_text("")
    assert list(tmp_path.iterdir()) and (tmp_path / ".." / tmp_path.name / "own").exists()
    subprocess.run([sys.executable, "-c", READ, str(tmp_path / "own")], check=True)

def test_good_the_machine():
    assert Path("/proc/self/stat").read_text() and Path("/etc").is_dir()
    assert Path(os.__file__).read_text() and not os.access("/dev/nothing", os.R_OK)

def test_bad_open():
    assert open(FILE).read() == "data"

def test_bad_open_bytes():
    os.close(os.open(os.fsencode(FILE), os.O_RDONLY))

def test_bad_relative(monkeypatch):
    monkeypatch.chdir("/proc/self")
    assert Path("../.." + FILE).read_text() == "data"

def test_bad_list():
    assert os.listdir(os.path.dirname(FILE))

def test_bad_question_whether_it_is_there():
    assert not Path(ELSEWHERE).is_file()

def test_bad_and_caught():
    with suppress(Exception):
        open(ELSEWHERE)

def test_bad_in_another_python():
    subprocess.run([sys.executable, "-c", READ, FILE], check=True)

def test_bad_in_a_python_of_a_shell():
    subprocess.run(f"{{sys.executable}} -c '{{READ}}' {{FILE}}", shell=True, check=True)

def test_bad_in_a_fork():
    if not (child := os.fork()):
        os.close(os.open(FILE, os.O_RDONLY))
        os._exit(0)
    os.waitpid(child, 0)

def test_bad_bare_environment():
    subprocess.run([sys.executable, "-c", ""], env={{}}, check=True)

def test_good_again():
    pass
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of each test of the program above."""
    folder, file = tmp_path_factory.mktemp("watched"), tmp_path_factory.mktemp("data") / "file"
    file.write_text("data")
    text = PROGRAM.format(file=str(file), elsewhere=ELSEWHERE)
    (folder / "test_program.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "support.hermetic", "--basetemp=own"]
    how = {"cwd": folder, "env": runs.environment(), "capture_output": True, "text": True}
    done = subprocess.run(command, **how, check=False)
    line = text[: text.index("open(FILE)")].count("\n") + 1
    assert f"{file}, by {folder}/test_program.py:{line} in" in done.stdout, done.stdout
    return re.findall(r"^(PASSED|FAILED|ERROR) .*::(test_\w+)", done.stdout, re.MULTILINE)


def test_a_test_that_looks_elsewhere_fails_and_others_do_not(outcomes):
    assert len({name for _, name in outcomes}) == len(outcomes) == PROGRAM.count("def test_")
    for said, name in outcomes:
        assert said == ("PASSED" if "good" in name else "FAILED"), name


@pytest.mark.transport("shared_memory")
def test_ranks_are_watched_too(monkeypatch, tmp_path):
    (tmp_path / "notes").touch()
    monkeypatch.setenv(outside.NOTES, str(tmp_path / "notes"))
    pl.launch(runs.look_at, arguments={"path": ELSEWHERE})
    assert ELSEWHERE in (tmp_path / "notes").read_text()


def test_homes_and_caches_are_in_the_folder_of_the_session(tmp_path_factory):
    own = tmp_path_factory.getbasetemp()
    print_them = "import os, tempfile; print(os.path.expanduser('~'), tempfile.gettempdir())"
    ended = subprocess.run([sys.executable, "-c", print_them], capture_output=True, text=True)
    folders = [*ended.stdout.split(), tempfile.gettempdir(), Path.home()]
    folders += [os.environ[name] for name in hermetic.CACHES]
    assert len(folders) == 4 + len(hermetic.CACHES)
    assert all(Path(folder).is_relative_to(own) for folder in folders), folders
