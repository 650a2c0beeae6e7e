"""Run jobs on all cores, in processes that read a line and answer with a line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue

from paceline.errors import PacelineError

CORES = "PACELINE_POOL_CORES"
"""Tells a process of a pool which cores it may use; empty: all."""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def cores_of(number: int, processes: int) -> set[int]:
    """The cores of one of so many processes: its own, unless there are fewer than processes."""
    known = sorted(os.sched_getaffinity(0))
    count = min(processes, len(known))
    return set(known[number % count :: count])


def run_jobs(
    jobs: Sequence[str], program: str, run: Callable[[str], str], processes: int
) -> Iterator[tuple[str, str]]:
    """Yield each job with its result, in the order in which they finish.

    Args:
        jobs: one line each.
        program: the module that the processes run; it calls :func:`serve_jobs`.
        run: runs one job in this process; used if there is only one job or one process.
        processes: the number of processes.
    """
    todo = iter(jobs)
    yield from run_next(lambda: next(todo, None), program, run, min(processes, len(jobs)))


def run_next(
    next_job: Callable[[], str | None],
    program: str,
    run: Callable[[str], str],
    processes: int,
    apart: bool = False,
) -> Iterator[tuple[str, str]]:
    """The same where results decide what comes next.

    Args:
        next_job: asked whenever a process is idle; None: nothing before the next result.
        program, run, processes: as for :func:`run_jobs`.
        apart: whether each process has cores of its own.
    """
    if processes <= 1:
        while (job := next_job()) is not None:
            yield job, run(job)
        return
    todo: SimpleQueue[str | None] = SimpleQueue()
    done: SimpleQueue[tuple[str, str]] = SimpleQueue()
    workers: list[_JobProcess] = []
    busy = 0
    try:
        while True:
            while busy < processes and (job := next_job()) is not None:
                if busy == len(workers):
                    own = cores_of(busy, processes) if apart else set[int]()
                    workers.append(_JobProcess(program, own, todo, done))
                todo.put(job)
                busy += 1
            if not busy:
                return
            job, result = done.get()
            busy -= 1
            if not result:
                raise PacelineError("a process of the pool ended before it answered")
            yield job, result
    finally:
        for worker in workers:
            worker.kill()
            todo.put(None)
        for worker in workers:
            worker.join()


class _JobProcess:
    """A process that runs jobs, on its own cores if there are any, and the thread that feeds it."""

    def __init__(
        self,
        program: str,
        own: set[int],
        todo: SimpleQueue[str | None],
        done: SimpleQueue[tuple[str, str]],
    ) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path, CORES: ",".join(map(str, own))},
        )
        self._thread = threading.Thread(target=self._feed, args=(todo, done))
        self._thread.start()

    def _feed(self, todo: SimpleQueue[str | None], done: SimpleQueue[tuple[str, str]]) -> None:
        """Pass jobs on until None comes; an empty result means that the process ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        while (job := todo.get()) is not None:
            with suppress(OSError):
                self._process.stdin.write(job + "\n")
                self._process.stdin.flush()
            done.put((job, self._process.stdout.readline()))

    def kill(self) -> None:
        """Kill the process, whatever it is doing."""
        self._process.kill()

    def join(self) -> None:
        """Wait until nothing of it is left; it was killed, and None came for its thread."""
        with suppress(OSError), self._process:
            self._thread.join()


def serve_jobs(run: Callable[[str], str]) -> None:
    """The main loop of such a process; what a job prints goes to standard error."""
    if (own := os.environ.pop(CORES, "")) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, map(int, own.split(",")))
    with open(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        for job in sys.stdin:
            out.write(run(job) + "\n")
            out.flush()
