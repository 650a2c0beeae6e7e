"""A process on a host that is made of namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

_POLL_S = 0.005


class PopenOnHost(subprocess.Popen[Any]):
    """A process on a host. Signals go to the process itself, and its exit code comes back.

    ``pid`` is a process on this machine that waits for the one on the host: only a child can be in
    another namespace of processes. It stops when its child stops.
    """

    @cached_property
    def inner_pid(self) -> int:
        """The process on the host, as this machine sees it."""
        return only_child(self)

    def send_signal(self, sig: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.inner_pid, sig)

    def poll(self) -> int | None:
        """The exit code, if the process has ended."""
        waits = super().poll() is None
        with suppress(ProcessLookupError):
            if waits and _state(self.pid) == "T" and _state(self.inner_pid) != "T":
                os.kill(self.pid, signal.SIGCONT)
        return super().poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended; return its exit code."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until_s is not None and timeout is not None and time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(_POLL_S)
        return code


def only_child(process: subprocess.Popen[Any]) -> int:
    """The child of a process that has one, as soon as it has it."""
    while subprocess.Popen.poll(process) is None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _stat(int(entry.name))[1:2] == [str(process.pid)]:
                return int(entry.name)
        time.sleep(_POLL_S)
    raise ProcessLookupError(f"process {process.pid} has ended")


def _state(pid: int) -> str:
    """T: stopped; empty if there is no such process."""
    return "".join(_stat(pid)[:1])


def _stat(pid: int) -> list[str]:
    """The state of a process, its parent, and more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
