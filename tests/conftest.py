"""Count the passed tests of each transport; a skip on Linux fails the run, unless it is allowed.

A test that reads files which not every machine has fails too: see ``support.hermetic``.
"""

from __future__ import annotations

import os

# On some processors the bits of a matrix product depend on the addresses of its inputs, but tests
# compare models at different addresses. With more threads than cores, as several processes of
# pytest have, small operations wait for each other most of the time. torch reads these variables
# when it is first imported.
os.environ |= {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}
os.environ.pop("COLUMNS", None)  # tables are as wide as in a pipe, whoever runs the tests

import signal
import sys
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import settings
from support import hermetic, warm
from support.worlds import KEPT, TRANSPORTS, WORLDS

from paceline.cli import main
from paceline.launcher.spec import LaunchSpec

settings.register_profile("paceline", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("paceline")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(hermetic)


@pytest.fixture
def paceline(tmp_path, monkeypatch, capsys):
    """Run a command in its own folder; returns what it wrote to both streams."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        wrote = capsys.readouterr()
        assert (end.value.code or 0) == code, wrote.err
        return wrote

    return run


@pytest.fixture(scope="session")
def warm_pool():
    """From now on, pools of processes, which run the trials of a comparison, start fast."""
    with pytest.MonkeyPatch.context() as patch:
        names = SimpleNamespace(executable=warm.python(), path=sys.path)
        patch.setattr("paceline.lab.pool.sys", names)
        yield


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Launch ranks on the device that PACELINE_TEST_DEVICE names."""
    if KEPT != "host":
        monkeypatch.setitem(LaunchSpec.__init__.__kwdefaults__, "device", KEPT)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "transport" in metafunc.fixturenames:
        worlds = getattr(metafunc.module, "WORLDS", TRANSPORTS)
        marked = [pytest.param(t, marks=pytest.mark.transport(t)) for t in worlds]
        metafunc.parametrize("transport", marked)


class _Counts:
    def __init__(self) -> None:
        self.transports: Counter[str] = Counter()
        self.skipped: list[str] = []


_counts = _Counts()


LONGEST = (
    "test_faulttest.py",
    "test_every_strategy.py",
    "test_commands.py",
    "test_docs.py",
    "test_losses.py",
    "test_resume_real.py",
    "test_faults.py",
    "test_real_runs.py",
    "test_resume.py",
    "test_method_faults.py",
    "test_method_equalities.py",
    "test_examples.py",
    "test_safety.py",
)
"""The files that take longest; they come first, so that no process is left with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turns = {name: turn for turn, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turns.get(item.path.name, len(LONGEST)))
    for item in items:  # user properties reach the main process in reports
        item.user_properties += [("transport", m.args[0]) for m in item.iter_markers("transport")]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _counts.transports.update(t for name, t in report.user_properties if name == "transport")
    if report.skipped and "may_skip" not in report.keywords:
        _counts.skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _counts.skipped and sys.platform == "linux" and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    line = ", ".join(f"{name} {_counts.transports[name]}" for name in WORLDS)
    terminalreporter.write_line(f"passed by transport: {line}")
    if _counts.skipped and sys.platform == "linux":
        terminalreporter.write_line(f"skipped on Linux, which fails the run: {_counts.skipped}")
