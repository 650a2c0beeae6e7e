"""Real ranks: started from a fork server, and supervised to their end."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.comm.base import Limits
from paceline.comm.liveness import Processes, Watch, exit_code, goes_on, is_gone
from paceline.comm.membership import MOST_SUCCESSORS, MembershipPolicy
from paceline.common.faults import Fault, rank_of
from paceline.common.reference import Reference
from paceline.errors import (
    CommTimeout,
    PacelineError,
    PeerLost,
    UsageError,
    WorkerFailed,
)
from paceline.launcher.fork_client import ForkServer, readable
from paceline.launcher.join_socket import JoinSocket
from paceline.launcher.rank_process import Message, refuse_in_rank
from paceline.launcher.signals import Stop

if TYPE_CHECKING:
    pass

TRANSPORTS = ("shared_memory", "distributed")
GRACE_S = 1.5
"""How long ranks have to end by themselves after one has failed, and again to obey SIGTERM."""
HEAR_S = 0.5
"""How long the others have to see for themselves that a rank is stopped, once one has said so."""

OnMessage = Callable[[int, Message], None]


@dataclass
class Rank:
    """What the launcher knows of one rank.

    Attributes:
        number: which one it is.
        pid, pipe, unread, code: of its present process.
        value, returned, error: what came of it.
        reason, signalled: why, and whether, it was ended.
        entered: whether its process has a place among the others; ``seen``: whether one ever had.
        starts: how many processes it has had.
    """

    number: int
    pid: int = 0
    pipe: int = -1
    unread: bytes = b""
    code: int | None = None
    value: Any = None
    returned: bool = False
    error: Message | None = None
    reason: str | None = None
    signalled: bool = False
    entered: bool = False
    seen: bool = False
    starts: int = 0

    def begin(self, pid: int, pipe: int) -> None:
        """Begin with a process, the first one or another."""
        self.pid, self.pipe, self.unread, self.code = pid, pipe, b"", None
        self.entered, self.starts = False, self.starts + 1

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self.pid > 0 and self.code is None

    def signal(self, number: int) -> None:
        """End a rank that still runs, for the run is over."""
        self.signalled = self.signalled or self.running
        self.strike(number)

    def strike(self, number: int) -> None:
        """Send a signal to a rank that still runs."""
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def failed(self) -> bool:
        """Whether this rank has raised, or ended without a word."""
        return self.error is not None or (self.code is not None and not self.returned)


def run_ranks(
    program: Reference,
    arguments: Sequence[Mapping[str, Any]],
    *,
    transport: str = "shared_memory",
    limits: Limits | None = None,
    on_message: OnMessage | None = None,
    losses: MembershipPolicy | None = None,
    faults: Sequence[Fault] = (),
    folder: Path | None = None,
    stop: Stop | None = None,
    start_s: float = 0.0,
) -> list[Any]:
    """Run ``program(transport, channel, argument)`` in a process for each argument.

    Returns what each of them returned, in rank order. When one raises, all are ended and its error
    is raised here; and when one is lost, unless ``losses`` say otherwise: then its place holds
    None. ``faults`` are done to the processes. In ``folder`` is the door at which a run that goes
    on after losses can be asked to take a worker in. The run's clock begins at ``start_s``.
    """
    size = len(arguments)
    refuse_in_rank()
    with ForkServer.borrow() as fork_server, _meeting_place(transport, size) as (place, fds):
        late = [rank_of(fault) for fault in faults if fault.kind == "join"]
        common = {
            **place,
            "size": size,
            "program": program,
            "limits": asdict(limits or Limits()),
            "started_s": time.monotonic() - start_s,
            "threads": threads_per_rank(size),
            "environment": dict(os.environ),
            "cwd": os.getcwd(),
            "argv": sys.argv,
            "path": sys.path,
            "late": late,
            "elastic": losses is not None and losses.goes_on,
            "workers": size if losses is None else losses.workers,
        }
        supervisor = Supervisor(
            fork_server, common, arguments, fds, limits or Limits(), on_message, losses, stop
        )
        try:
            supervisor.start_all(faults)
            if folder is not None and losses is not None and losses.goes_on:
                supervisor.open_door(folder)
            supervisor.supervise()
        finally:
            supervisor.end()
    supervisor.raise_failure()
    return [rank.value for rank in supervisor.ranks]


@contextmanager
def _meeting_place(transport: str, size: int) -> Iterator[tuple[Message, list[int]]]:
    """What ranks find each other by: memory without a name, or a socket on the loopback."""
    if transport == "shared_memory":
        from paceline.comm.shared.memory import Arena

        if sys.platform != "linux":
            raise UsageError('transport (shared_memory) needs Linux; use transport="distributed"')
        fd = Arena.create(size)
        try:
            yield {"transport": transport}, [fd]
        finally:
            os.close(fd)
    elif transport == "distributed":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield {"transport": transport, "port": listener.getsockname()[1]}, [listener.fileno()]
    else:
        raise UsageError(f"transport ({transport}) must be one of {', '.join(TRANSPORTS)}")


def threads_per_rank(size: int) -> int:
    """This machine's cores, shared out; ``OMP_NUM_THREADS`` overrides."""
    if told := os.environ.get("OMP_NUM_THREADS"):
        return max(1, int(told)) if told.isdigit() else 1
    return max(1, len(os.sched_getaffinity(0)) // size) if hasattr(os, "sched_getaffinity") else 1


class Supervisor:
    """The ranks of one run: started, watched over, and ended."""

    def __init__(
        self,
        fork_server: ForkServer,
        common: Message,
        arguments: Sequence[Mapping[str, Any]],
        fds: Sequence[int],
        limits: Limits,
        on_message: OnMessage | None,
        losses: MembershipPolicy | None,
        stop: Stop | None = None,
    ) -> None:
        self._stop = stop
        self.ranks = [Rank(number) for number in range(len(arguments))]
        self._fork_server, self._common, self._arguments, self._fds = (
            fork_server,
            common,
            arguments,
            fds,
        )
        self._on_message, self._losses, self._limits = on_message, losses, limits
        patience = replace(limits, dead_s=limits.dead_s + GRACE_S)  # peers, who know more, go first
        self._processes = Processes(
            lambda number: self.ranks[number].pid, patience, self._some_go_on
        )
        self._pause: Watch | None = None
        self._by_pipe: dict[int, Rank] = {}
        self._door: JoinSocket | None = None
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._unready: set[int] = set()
        self._waiting: list[Rank] = []

    # Starting ------------------------------------------------------------------------------------

    def start_all(self, faults: Sequence[Fault] = ()) -> None:
        """Start those that are there from the beginning, and plan what is to happen to them."""
        for fault in faults:
            if fault.at_step is None:
                self._later(fault.at_s or 0.0, partial(self._inject, fault))
        for rank in self.ranks:
            if rank.number not in self._common["late"]:
                self._unready.add(rank.number)
                self._start(rank)

    def open_door(self, folder: Path) -> None:
        """Let workers in that come to the door in ``folder``."""
        self._door = JoinSocket(folder)

    def _let_in(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start a worker in the place of one that is lost."""
        if question.get("ask") != "join" or self._losses is None:
            return {"error": "a run is asked to join, and nothing else"}
        if not self._losses.takes_in:
            return {"error": "a synchronous method takes no worker in mid-run"}
        gone = [w for w in self._workers() if not w.running and not w.returned and not w.error]
        free = [worker for worker in gone if worker not in self._waiting]
        if not free:
            return {"error": f"all {self._losses.workers} places are taken"}
        self._start_again(free[0])
        return {"rank": free[0].number}

    def _start_again(self, rank: Rank) -> None:
        """Start a rank that was lost, once those who begin together have done so.

        They wait for each other in what a rank that comes late has no part in.
        """
        if self._some_begin():
            self._waiting.append(rank)
            return
        self._start(rank)
        if rank.starts > 1:
            self._tell("restarted", rank)

    def _some_begin(self) -> bool:
        """Whether ranks that are there from the beginning are not through their setup yet."""
        return any(not self._processes.is_stopped(number) for number in self._unready)

    def _start_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for rank in waiting:
            self._start_again(rank)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        """Have something done so many seconds after the start of the run."""
        self._due.append((self._common["started_s"] + seconds, act))

    def _start(self, rank: Rank) -> None:
        if rank.pipe >= 0:
            os.close(rank.pipe)
        reader, writer = os.pipe()
        argument = dict(self._arguments[rank.number])
        config = {**self._common, "rank": rank.number, "argument": argument, "seen": rank.seen}
        pid = self._fork_server.start(config, [writer, *self._fds], self._limits)
        os.close(writer)
        os.set_blocking(reader, False)
        rank.begin(pid, reader)
        self._by_pipe[reader] = rank

    def _inject(self, fault: Fault) -> None:
        rank = self.ranks[rank_of(fault)]
        if fault.kind == "join":
            self._waiting.append(rank)
        elif fault.kind == "kill":
            rank.strike(signal.SIGKILL)
        elif fault.kind == "freeze":
            self._tell("stopped", rank)
            rank.strike(signal.SIGSTOP)
            if fault.for_s is not None:
                self._later((fault.at_s or 0.0) + fault.for_s, partial(rank.strike, signal.SIGCONT))

    # Watching ------------------------------------------------------------------------------------

    def supervise(self) -> None:
        """Listen until every rank has ended; end the others soon after one has failed."""
        failed_s: float | None = None
        while any(rank.running for rank in self.ranks):
            self._hear_all()
            if self._stop is not None:
                self._stop.act(self.ranks)
            now_s = time.monotonic()
            for due_s, act in [due for due in self._due if due[0] <= now_s]:
                self._due.remove((due_s, act))
                act()
            if failed_s is None and self._waiting:
                self._start_waiting()
            if failed_s is None and any(self._is_failure(rank) for rank in self.ranks):
                failed_s = now_s
            if failed_s is not None:
                self._due.clear()
                self._hasten(now_s - failed_s)
            elif self._goes_on and any(worker.returned for worker in self._workers()):
                self._end_rest()
            else:
                self._wait_for_stopped()

    def _hear_all(self) -> None:
        fork_server = self._fork_server
        door = [] if self._door is None else [self._door.fileno()]
        ready = readable([fork_server.socket.fileno(), *door, *self._by_pipe])
        if fork_server.socket.fileno() in ready:
            fork_server.hear()
        if self._door is not None and self._door.fileno() in ready:
            self._door.answer(self._let_in)
        for rank in self.ranks:
            if rank.pipe in ready:
                _listen(rank, self._by_pipe, self._hear)
            if rank.running and (code := self._code_of(rank)) is not None:
                _listen(rank, self._by_pipe, self._hear)
                rank.code = code
                self._has_ended(rank)
            elif rank.running and not (rank.entered and self._comes_back(rank)):
                self._end_if_stopped(rank)

    def _code_of(self, rank: Rank) -> int | None:
        """How the process of ``rank`` has ended; None while it runs.

        The fork server says so. While that is stopped the kernel does, which keeps how a process
        has ended until its parent asks.
        """
        fork_server = self._fork_server
        if rank.pid in fork_server.ended:
            return fork_server.ended.pop(rank.pid)
        if not fork_server.is_stopped():
            return None
        if is_gone(rank.pid) and not readable([fork_server.socket.fileno()]):
            return 1  # the fork server has asked, and was stopped before it could say
        return exit_code(rank.pid)

    def _hear(self, rank: int, message: Message) -> None:
        if message["kind"] == "thaw":  # it stopped itself, and asks to be woken
            seconds = time.monotonic() - self._common["started_s"] + message["for_s"]
            self._later(seconds, partial(self.ranks[rank].strike, signal.SIGCONT))
        elif message["kind"] == "entered":
            self.ranks[rank].entered = self.ranks[rank].seen = True
        elif message["kind"] == "ready":
            self._unready.discard(rank)
        elif self._on_message is not None:
            self._on_message(rank, message)

    @property
    def _goes_on(self) -> bool:
        return self._losses is not None and self._losses.goes_on

    def _comes_back(self, rank: Rank) -> bool:
        """Whether ``rank`` may go on after it was stopped for too long."""
        return self._goes_on and self._losses is not None and self._losses.comes_back(rank.number)

    def _end_if_stopped(self, rank: Rank) -> None:
        if reason := self._processes.why_stopped(rank.number):
            rank.reason = reason
            if self._goes_on:  # the others outlive it, and it may have a successor
                rank.strike(signal.SIGKILL)
            else:
                rank.signal(signal.SIGKILL)

    def _has_ended(self, rank: Rank) -> None:
        """Note a loss that the run goes on after, and start the rank again if that is allowed."""
        if rank.returned or rank.error is not None or not self._goes_on or rank.signalled:
            self._unready.discard(rank.number)
            return
        if not rank.entered and rank.starts <= MOST_SUCCESSORS:  # nobody has seen it yet
            self._start(rank)
            return
        self._unready.discard(rank.number)
        self._tell("lost", rank, reason=_how_ended(rank.code))
        others = any(other.returned or other.running for other in self._workers())
        if others and self._losses is not None and self._losses.restarts(rank.number):
            self._start_again(rank)

    def _tell(self, event: str, rank: Rank, **facts: Any) -> None:
        if self._on_message is not None:
            t = time.monotonic() - self._common["started_s"]
            record = {"t": t, "event": event, "rank": rank.number, **facts}
            self._on_message(rank.number, {"kind": "event", "record": record})

    def _workers(self) -> list[Rank]:
        return self.ranks if self._losses is None else self.ranks[: self._losses.workers]

    def _is_failure(self, rank: Rank) -> bool:
        """Whether the end of ``rank`` is the end of the run."""
        if not self._goes_on or rank.error is not None:
            return rank.failed
        workers = self._workers()
        if rank not in workers:  # without one that serves, workers wait
            needed = any(worker.running for worker in workers) and rank not in self._waiting
        else:
            needed = not rank.seen and rank.number not in self._common["late"]
        return rank.failed and (needed or not any(w.returned or w.running for w in workers))

    def _some_go_on(self) -> bool:
        """Whether a worker runs, or has come to its end."""
        return any(worker.returned or goes_on(worker.pid) for worker in self._workers())

    def _wait_for_stopped(self) -> None:
        """While all workers are stopped, wait as for one that is busy: nobody is lost yet."""
        if self._some_go_on():
            self._pause = None
            return
        stopped = [worker.number for worker in self._workers() if worker.running]
        if stopped:
            op = "a run whose workers are all stopped"
            self._pause = self._pause or Watch(op, self._limits)
            self._pause.keep_patience(stopped)

    def _end_rest(self) -> None:
        """When all have ended but who is stopped, end those: there is nobody to come back to."""
        left = [rank for rank in self.ranks if rank.running]
        if all(self._processes.why_stopped(rank.number) for rank in left):
            self._due.clear()
            for rank in left:
                self._tell("lost", rank, reason=self._processes.why_stopped(rank.number))
                rank.signal(signal.SIGKILL)

    def _hasten(self, since_s: float) -> None:
        """After a failure: end who is stopped and cannot end by itself, others after a while."""
        for rank in self.ranks:
            if since_s > HEAR_S and rank.running and self._processes.is_stopped(rank.number):
                rank.signal(signal.SIGKILL)
            elif since_s > GRACE_S:
                rank.signal(signal.SIGTERM if since_s < 2 * GRACE_S else signal.SIGKILL)

    # Ending --------------------------------------------------------------------------------------

    def end(self) -> None:
        """Leave no process behind, whatever happened."""
        if self._door is not None:
            self._door.close()
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)
        try:
            while any(rank.running for rank in self.ranks):
                if readable([self._fork_server.socket.fileno()]):
                    self._fork_server.hear()
                for rank in self.ranks:
                    if rank.running:
                        rank.code = self._code_of(rank)
        finally:
            for rank in self.ranks:
                if rank.pipe >= 0:
                    os.close(rank.pipe)

    def raise_failure(self) -> None:
        """Raise the error that ended the run, if one did."""
        if any(self._is_failure(rank) for rank in self.ranks):
            _raise_failure(self.ranks)


def _listen(rank: Rank, by_pipe: dict[int, Rank], on_message: OnMessage) -> None:
    """Read what a rank has said, as far as it goes without waiting."""
    while rank.pipe in by_pipe:
        try:
            data = os.read(rank.pipe, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            del by_pipe[rank.pipe]
        *lines, rank.unread = (rank.unread + data).split(b"\n")
        for line in lines:
            _hear(rank, json.loads(line), on_message)


def _hear(rank: Rank, message: Message, on_message: OnMessage) -> None:
    if message["kind"] == "value":
        rank.value, rank.returned = message["value"], True
    elif message["kind"] == "error":
        rank.error = message
    else:
        on_message(rank.number, message)


def _raise_failure(ranks: list[Rank]) -> None:
    """Raise the error that began it: a rank's own first, then a rank that died, then a wait."""
    told = [(rank.number, rank.error) for rank in ranks if rank.error is not None]
    told.sort(key=lambda failed: failed[1]["time_s"])
    for number, error in told:
        if "ranks" not in error:
            raise _own_error(number, error)
    witnesses = [error for _, error in told]
    dead = [rank for rank in ranks if rank.failed and rank.error is None]
    dead = [rank for rank in dead if rank.reason or not rank.signalled]
    if dead:
        seen = next((w for w in witnesses if w["ranks"] and w["type"] == "PeerLost"), None)
        op, waited_s = (seen["op"], seen["waited_s"]) if seen else ("the run", 0.0)
        stopped = seen["reason"] if seen and seen["reason"] != "it died" else ""
        reason = dead[0].reason or stopped or _how_ended(dead[0].code)
        raise PeerLost([rank.number for rank in dead], op, reason, waited_s)
    for error in witnesses:
        if error["type"] == "PeerLost":
            raise PeerLost(error["ranks"], error["op"], error["reason"], error["waited_s"])
        raise CommTimeout(error["ranks"], error["op"], error["waited_s"])


def _own_error(number: int, error: Message) -> PacelineError:
    if error["usage"]:
        return UsageError(error["message"])
    return WorkerFailed(number, error["summary"], error["traceback"])


def _how_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}"
