"""Jobs on all cores: processes that take a line and answer with a line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue

from paceline.errors import PacelineError


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def answers(
    jobs: Sequence[str], program: str, make: Callable[[str], str], processes: int
) -> Iterator[tuple[str, str]]:
    """Each job with its answer, as they are done.

    Args:
        jobs: one line each.
        program: the module that the processes run; it calls :func:`serve`.
        make: the same, in this process: for a single one.
        processes: how many.
    """
    if min(processes, len(jobs)) <= 1:
        for job in jobs:
            yield job, make(job)
        return
    todo: SimpleQueue[str | None] = SimpleQueue()
    done: SimpleQueue[tuple[str, str]] = SimpleQueue()
    for item in [*jobs, *[None] * processes]:
        todo.put(item)
    helpers = [_Helper(program, todo, done) for _ in range(min(processes, len(jobs)))]
    try:
        for _ in jobs:
            job, told = done.get()
            if not told:
                raise PacelineError("a process that simulates has ended before its time")
            yield job, told
    finally:
        for helper in helpers:
            helper.end()


class _Helper:
    """A process that answers, and the thread that feeds it."""

    def __init__(
        self, program: str, todo: SimpleQueue[str | None], done: SimpleQueue[tuple[str, str]]
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._thread = threading.Thread(target=self._feed, args=(todo, done))
        self._thread.start()

    def _feed(self, todo: SimpleQueue[str | None], done: SimpleQueue[tuple[str, str]]) -> None:
        """Hand on what is to do, until None comes; an empty answer means that it ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        while (job := todo.get()) is not None:
            with suppress(OSError):
                self._process.stdin.write(job + "\n")
                self._process.stdin.flush()
            done.put((job, self._process.stdout.readline()))

    def end(self) -> None:
        """End the process, whatever it is doing."""
        with suppress(OSError), self._process:
            self._process.kill()
            self._thread.join()


def serve(make: Callable[[str], str]) -> None:
    """The program of such a process; what is printed meanwhile goes to standard error."""
    with open(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        for job in sys.stdin:
            out.write(make(job) + "\n")
            out.flush()
