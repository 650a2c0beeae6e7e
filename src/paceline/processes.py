"""Real ranks: started from a nursery, supervised to their end.

Each rank has a pipe to the launcher, on which it says what it logs, how it failed and what it
returns, a line of JSON each. Nothing is pickled.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.comm.base import Limits
from paceline.comm.liveness import Processes
from paceline.errors import (
    CommTimeout,
    PacelineError,
    PeerLost,
    UsageError,
    WorkerFailed,
    summary_of,
    user_traceback,
)
from paceline.nursery import receive_message, send_message
from paceline.reference import Reference, find

if TYPE_CHECKING:
    from paceline.comm.base import Transport

TRANSPORTS = ("shared_memory", "distributed")
GRACE_S = 1.5
"""How long ranks have to end by themselves after one has failed, and again to obey SIGTERM."""
HEAR_S = 0.5
"""How long the others have to see for themselves that a rank is stopped, once one has said so."""

Message = dict[str, Any]
OnMessage = Callable[[int, Message], None]


# The launcher's side -----------------------------------------------------------------------------


class Nursery:
    """The launcher's end of :mod:`paceline.nursery`; it serves one run at a time."""

    _idle: ClassVar[list[Nursery]] = []
    _choosing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.ended: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        started = threading.Event()
        threading.Thread(target=self._keep, args=(theirs, started), daemon=True).start()
        started.wait()

    def _keep(self, theirs: socket.socket, started: threading.Event) -> None:
        """Start the process and wait for its end: it dies with the thread that started it.

        It ignores Ctrl-C, which is the launcher's to handle, from its first moment on.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        command = [sys.executable, "-m", "paceline.nursery", str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
                )
        finally:
            started.set()
        self._process.wait()

    @classmethod
    @contextmanager
    def borrow(cls) -> Iterator[Nursery]:
        """A nursery that nobody else uses now: an idle one, or a new one."""
        cls.warm_up()
        with cls._choosing:
            nursery = cls._idle.pop() if cls._idle else cls()
        try:
            yield nursery
        finally:
            cls._idle.append(nursery)

    @classmethod
    def warm_up(cls) -> None:
        """Start a nursery for a run that comes soon, unless there is an idle one."""
        with cls._choosing:
            for nursery in [nursery for nursery in cls._idle if nursery.has_ended()]:
                cls._idle.remove(nursery)
                nursery.socket.close()
            if not cls._idle:
                cls._idle.append(cls())

    @classmethod
    def stop_idle(cls) -> None:
        """End the nurseries of this process, and wait for their end."""
        while cls._idle:
            nursery = cls._idle.pop()
            nursery.socket.close()
            if nursery._process is not None:
                nursery._process.wait()

    def has_ended(self) -> bool:
        """Whether the process is gone, or never came."""
        return self._process is None or self._process.poll() is not None

    def start(self, config: Message, fds: Sequence[int]) -> int:
        """Start a rank with file descriptors of its own; return its pid."""
        send_message(self.socket, config, [1, 2, *fds])
        while (pid := self.hear()) is None:
            pass
        return pid

    def hear(self) -> int | None:
        """Hear one message: the pid of a rank that started, or that one has ended."""
        heard = receive_message(self.socket)
        if heard is None:
            raise PacelineError("the process that ranks are started from has ended")
        message, _ = heard
        if "started" in message:
            return int(message["started"])
        self.ended[message["ended"]] = message["code"]
        return None


@dataclass
class Rank:
    """What the launcher knows of one rank."""

    number: int
    pid: int
    pipe: int
    unread: bytes = b""
    code: int | None = None
    value: Any = None
    returned: bool = False
    error: Message | None = None
    reason: str | None = None
    signalled: bool = False

    def signal(self, number: int) -> None:
        """Send a signal to a rank that still runs."""
        if self.code is None:
            self.signalled = True
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
) -> list[Any]:
    """Run ``program(transport, channel, argument)`` in a process for each argument.

    Returns what each of them returned, in rank order. When one raises, or is lost, all are ended
    and its error is raised here.
    """
    size = len(arguments)
    if in_rank:
        raise UsageError(
            "a rank must not launch: ranks read the script anew, so what starts the run has to"
            ' stand under if __name__ == "__main__":'
        )
    with Nursery.borrow() as nursery, _meeting_place(transport, size) as (place, fds):
        common = {
            **place,
            "size": size,
            "program": program,
            "limits": asdict(limits or Limits()),
            "started_s": time.monotonic(),
            "threads": threads_per_rank(size),
            "environment": dict(os.environ),
            "cwd": os.getcwd(),
            "path": sys.path,
        }
        ranks: list[Rank] = []
        try:
            for number, argument in enumerate(arguments):
                reader, writer = os.pipe()
                config = {**common, "rank": number, "argument": dict(argument)}
                pid = nursery.start(config, [writer, *fds])
                os.close(writer)
                os.set_blocking(reader, False)
                ranks.append(Rank(number, pid, reader))
            _supervise(ranks, nursery, limits or Limits(), on_message)
        finally:
            _end(ranks, nursery)
    _raise_failure(ranks)
    return [rank.value for rank in ranks]


@contextmanager
def _meeting_place(transport: str, size: int) -> Iterator[tuple[Message, list[int]]]:
    """What ranks find each other by: memory without a name, or a socket on the loopback."""
    if transport == "shared_memory":
        from paceline.comm.arena import Arena

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


def _supervise(
    ranks: list[Rank], nursery: Nursery, limits: Limits, on_message: OnMessage | None
) -> None:
    """Listen until every rank has ended; end the others soon after one has failed."""
    patience = replace(limits, dead_s=limits.dead_s + GRACE_S)  # peers, who know more, go first
    processes = Processes(lambda number: ranks[number].pid, patience)
    by_pipe = {rank.pipe: rank for rank in ranks}
    failed_s: float | None = None
    while any(rank.code is None for rank in ranks):
        ready = _readable([nursery.socket.fileno(), *by_pipe])
        if nursery.socket.fileno() in ready:
            nursery.hear()
        for rank in ranks:
            if rank.pipe in ready:
                _listen(rank, by_pipe, on_message)
            if rank.code is None and rank.pid in nursery.ended:
                _listen(rank, by_pipe, on_message)
                rank.code = nursery.ended.pop(rank.pid)
            elif rank.code is None and (reason := processes.why_stopped(rank.number)):
                rank.reason = reason
                rank.signal(signal.SIGKILL)
        now_s = time.monotonic()
        if failed_s is None and any(rank.failed for rank in ranks):
            failed_s = now_s
        if failed_s is not None:
            _hasten(ranks, processes, now_s - failed_s)


def _hasten(ranks: list[Rank], processes: Processes, since_s: float) -> None:
    """After a failure: end who is stopped and cannot end by itself, the others after a while."""
    for rank in ranks:
        if since_s > HEAR_S and rank.code is None and processes.is_stopped(rank.number):
            rank.signal(signal.SIGKILL)
        elif since_s > GRACE_S:
            rank.signal(signal.SIGTERM if since_s < 2 * GRACE_S else signal.SIGKILL)


def _readable(fds: Sequence[int]) -> set[int]:
    """Which of ``fds`` can be read, now or a little later."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(200)}


def _listen(rank: Rank, by_pipe: dict[int, Rank], on_message: OnMessage | None) -> None:
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


def _hear(rank: Rank, message: Message, on_message: OnMessage | None) -> None:
    if message["kind"] == "value":
        rank.value, rank.returned = message["value"], True
    elif message["kind"] == "error":
        rank.error = message
    elif on_message is not None:
        on_message(rank.number, message)


def _end(ranks: list[Rank], nursery: Nursery) -> None:
    """Leave no process behind, whatever happened."""
    for rank in ranks:
        rank.signal(signal.SIGKILL)
    try:
        while any(rank.code is None for rank in ranks):
            for rank in ranks:
                if rank.code is None and rank.pid in nursery.ended:
                    rank.code = nursery.ended.pop(rank.pid)
            if any(rank.code is None for rank in ranks):
                nursery.hear()
    finally:
        for rank in ranks:
            os.close(rank.pipe)


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
        raise PeerLost(
            [rank.number for rank in dead], op, dead[0].reason or _how_ended(dead[0].code), waited_s
        )
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


# The rank's side ---------------------------------------------------------------------------------


in_rank = False
"""Whether this process is a rank; one cannot launch."""


class Channel:
    """A rank's way to tell its launcher something."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "wb", buffering=0)

    def send(self, message: Message) -> None:
        """Send one message; a launcher that is gone does not mind."""
        with suppress(BrokenPipeError):
            self._file.write(json.dumps(message).encode() + b"\n")


def rank_main(config: Message, fds: list[int]) -> int:
    """The life of a rank, from its fork to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(config["environment"])
    os.chdir(config["cwd"])
    sys.path[:] = config["path"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whole lines, so that ranks do not mix theirs
            stream.reconfigure(line_buffering=True, write_through=False)
    channel = Channel(fds[0])
    global in_rank
    in_rank = True
    try:
        import torch

        torch.set_num_threads(config["threads"])
        transport = _connect(config, fds[1])
        value = find(config["program"])(transport, channel, config["argument"])
        transport.close()
        channel.send({"kind": "value", "value": value})
        return 0
    except BaseException as error:
        channel.send(_describe(error))
        return getattr(error, "exit_code", 1)


def _connect(config: Message, fd: int) -> Transport:
    rank, size, limits = config["rank"], config["size"], Limits(**config["limits"])
    if config["transport"] == "shared_memory":
        from paceline.comm.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(fd, rank, size, limits, config["started_s"])
    from paceline.comm.distributed import connect_on_loopback

    return connect_on_loopback(fd, config["port"], rank, size, limits, config["started_s"])


def _describe(error: BaseException) -> Message:
    message: Message = {
        "kind": "error",
        "type": type(error).__name__,
        "message": str(error),
        "usage": isinstance(error, UsageError),
        "summary": summary_of(error),
        "traceback": user_traceback(error),
        "time_s": time.monotonic(),
    }
    if isinstance(error, (PeerLost, CommTimeout)):
        message |= {"ranks": error.ranks, "op": error.op, "waited_s": error.waited_s}
        message |= {"reason": getattr(error, "reason", "")}
    return message
