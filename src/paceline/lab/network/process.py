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


class HostProcess(subprocess.Popen[Any]):
    """A process on a host. Signals go to the process itself, as does what it returns.

    ``pid`` is a process on this machine that waits for the one on the host: only a child can be in
    another namespace of processes.
    """

    @cached_property
    def inner_pid(self) -> int:
        """The process on the host, as this machine sees it."""
        return only_child(self)

    def send_signal(self, sig: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.inner_pid, sig)
        if sig in (signal.SIGCONT, signal.SIGKILL):
            self.go_on()

    def go_on(self) -> None:
        """Continue the process that waits: it stops when the process on the host stops."""
        super().send_signal(signal.SIGCONT)


def only_child(process: subprocess.Popen[Any]) -> int:
    """The child of a process that has one, as soon as it has it."""
    while process.poll() is None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _parent(entry) == process.pid:
                return int(entry.name)
        time.sleep(0.001)
    raise ProcessLookupError(f"process {process.pid} has ended")


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None
