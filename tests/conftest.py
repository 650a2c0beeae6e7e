"""One count of tests for each transport; a skip on Linux fails the run."""

from __future__ import annotations

import signal
import sys
from collections import Counter

import pytest
from hypothesis import settings
from support.worlds import TRANSPORTS

settings.register_profile("paceline", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("paceline")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "transport" in metafunc.fixturenames:
        marked = [pytest.param(t, marks=pytest.mark.transport(t)) for t in TRANSPORTS]
        metafunc.parametrize("transport", marked)


class _Counts:
    def __init__(self) -> None:
        self.transports: Counter[str] = Counter()
        self.skipped: list[str] = []


_counts = _Counts()


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "call" and call.excinfo is None:
        for mark in item.iter_markers("transport"):
            _counts.transports[mark.args[0]] += 1


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _counts.skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _counts.skipped and sys.platform == "linux" and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    line = ", ".join(f"{name} {_counts.transports[name]}" for name in TRANSPORTS)
    terminalreporter.write_line(f"passed by transport: {line}")
    if _counts.skipped and sys.platform == "linux":
        terminalreporter.write_line(f"skipped on Linux, which fails the run: {_counts.skipped}")
