"""Which ranks are dead or stopped: the kernel says it of this host's, a heartbeat of others.

A process that ended is seen through its pidfd, at once. One that was stopped (SIGSTOP, a
debugger) is seen by its state; it is lost when it stayed so for ``dead_s``. One that is merely
busy is neither, for however long it is.

Nobody is lost while everybody is stopped (Ctrl-Z, a paused job). Time in which no worker goes on
does not count, nor does time in which the process that judges was stopped itself.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.comm.limits import Limits
from paceline.errors import CommTimeout, PeerLost, RunLost, name_ranks

TICK_S = 0.1
"""How often a wait looks after those that it waits for."""


HEARTBEAT_S = 0.5
"""How often a rank shows those on other hosts that it lives."""
SLACK_S = 1.0
"""How late a heartbeat or an answer of the store may be, beyond ``dead_s``."""
STAY_S, CALL_S, END_S = 0.7, 1.0, 2.5
"""Seconds after a loss until a wait for the lost rank raises, any other call does, and the process
is ended."""
_MEET_S = 0.01


@dataclass
class _Pause:
    """A time for which a process is stopped: since when it counts, and when that was last seen."""

    since_s: float
    seen_s: float
    forgiven: bool = False


class Processes:
    """The processes of the ranks on this host.

    Args:
        pid_of: the process of a rank; 0 while it is not known.
        limits: when a stopped process counts as lost.
        some_go_on: whether any worker runs, or has come to its end. While none does, nobody goes
            on without those that are stopped.
    """

    def __init__(
        self,
        pid_of: Callable[[int], int],
        limits: Limits,
        some_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._pid_of, self._limits, self._some_go_on = pid_of, limits, some_go_on
        self._pidfds: dict[int, int | None] = {}
        self._pids: dict[int, int] = {}
        self._poll, self._watched = select.poll(), dict[int, int]()
        self._pauses: dict[int, _Pause] = {}
        self._lost: dict[int, str] = {}

    def why_lost(self, rank: int) -> str | None:
        """Why ``rank`` is lost, or None while it is not; who was lost once stays so."""
        if rank not in self._lost and self._pid_of(rank):
            reason = "it died" if self.has_died(rank) else self.why_stopped(rank)
            if reason is not None:
                self._lost[rank] = reason
        return self._lost.get(rank)

    def why_stopped(self, rank: int) -> str | None:
        """Why ``rank`` counts as lost although it has not died; None while it does not."""
        if not self.is_stopped(rank):
            self._pauses.pop(rank, None)
            return None
        now_s, dead_s = time.monotonic(), self._limits.dead_s
        pause = self._pauses.setdefault(rank, _Pause(now_s, now_s))
        # Between two looks so far apart this process may have been stopped, too. Once: one that is
        # merely busy in between finds the same again.
        was_away = now_s - pause.seen_s > dead_s / 2 and not pause.forgiven
        if was_away or not self._some_go_on():
            pause.since_s, pause.forgiven = now_s, pause.forgiven or was_away
        pause.seen_s = now_s
        stopped_s = now_s - pause.since_s
        return None if stopped_s < dead_s else f"it has been stopped for {stopped_s:.1f} s"

    def forgive(self, seconds: float) -> None:
        """Do not count so much of the last time: this process was stopped itself."""
        for pause in self._pauses.values():
            pause.since_s += seconds

    def stopped(self) -> frozenset[int]:
        """The ranks that were found to be stopped when they were last looked at."""
        return frozenset(self._pauses)

    def is_stopped(self, rank: int) -> bool:
        """Whether the process of ``rank`` is stopped now, for however short a time."""
        return is_stopped(self._pid_of(rank))

    def has_died(self, rank: int) -> bool:
        """Whether the process of ``rank`` has ended."""
        return self._await_end(rank, 0)

    def newly_dead(self) -> list[int]:
        """The ranks that have died since this was asked last, of those that were looked at before.

        One system call for all of them.
        """
        dead = [self._watched[fd] for fd, _ in self._poll.poll(0)]
        for rank in dead:
            self._unwatch(rank)
        return dead

    def _unwatch(self, rank: int) -> None:
        pidfd = self._pidfds.get(rank)
        if pidfd is not None and self._watched.pop(pidfd, None) is not None:
            self._poll.unregister(pidfd)

    def end(self, rank: int) -> None:
        """Kill the process of ``rank``, and wait until it is gone."""
        self.has_died(rank)
        if (pidfd := self._pidfds.get(rank)) is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._await_end(rank, None)

    def _await_end(self, rank: int, milliseconds: int | None) -> bool:
        pid = self._pid_of(rank)
        if pid and self._pids.get(rank) != pid:
            self._open(rank, pid)
        pidfd = self._pidfds.get(rank, -1)
        if pidfd is None or pidfd < 0:
            return pidfd is None
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(milliseconds))

    def _open(self, rank: int, pid: int) -> None:
        """Keep hold of the process that a rank has now."""
        self._unwatch(rank)
        if (old := self._pidfds.get(rank)) is not None:
            os.close(old)
        self._pids[rank] = pid
        try:
            pidfd = self._pidfds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfds[rank] = None
            return
        self._watched[pidfd] = rank
        self._poll.register(pidfd, select.POLLIN)


class Peers:
    """The liveness of ranks that may be on other hosts. The first loss ends the run, on every rank.

    A thread looks after all others. Those on this host are looked at directly. The others show a
    heartbeat in the store. Whoever finds a rank lost says so in the store, for those on other
    hosts. From the moment of a loss on

    - a wait for the lost rank raises ``PeerLost`` after ``STAY_S``, so that all can see the loss
      before the first of them is gone, too;
    - every call raises ``RunLost`` after ``CALL_S``, whoever it is for;
    - the thread ends the process after ``END_S``: it may be inside of the backend, for good.

    Args:
        rank: this rank.
        size: how many there are.
        limits: how long to wait.
        tell: called with the loss before the thread ends the process.
    """

    def __init__(
        self, rank: int, size: int, limits: Limits, tell: Callable[[PeerLost], None]
    ) -> None:
        self._rank, self._size, self._limits, self._tell = rank, size, limits, tell
        self._pids: dict[int, int] = {}
        self._processes = Processes(lambda peer: self._pids[peer], limits)
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._left: set[int] = set()
        self._gone: dict[int, str] = {}
        self._lost: dict[int, str] = {}
        self._lost_s: float | None = None
        self._began_s = time.monotonic()
        self._answered_s = self._began_s
        self._asked_s: float | None = None
        self._awaited: tuple[list[int], str] | None = None
        self._noticed = False
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="paceline-peers", daemon=True).start()

    # The start -----------------------------------------------------------------------------------

    def awaits(self, ranks: Sequence[int], whom: str) -> None:
        """Say for whom this rank waits at the start; raises when it has done so for too long."""
        self._awaited = (list(ranks), whom)
        self.check()

    def meet(self, store: Any) -> None:
        """Wait until all are there."""
        with self.explaining("the start", 0), self.asking():
            self._meet(store)

    def _meet(self, store: Any) -> None:
        here, missing = _host(), [peer for peer in range(self._size) if peer != self._rank]
        beats: dict[int, tuple[bytes, float]] = {}
        store.set(f"beat/{self._rank}", "0")
        store.set(f"host/{self._rank}", f"{here} {os.getpid()}")
        while missing:
            self._share_loss(store)
            for peer in list(missing):
                self._asked_s = time.monotonic()
                told = store.get(f"host/{peer}") if store.check([f"host/{peer}"]) else b""
                if told:
                    missing.remove(peer)
                    host, pid = told.decode().split()
                    if host == here:
                        self._pids[peer] = int(pid)
                    else:
                        beats[peer] = (b"", time.monotonic())
            if missing:
                self.awaits(missing, name_ranks(missing))
                time.sleep(_MEET_S * (1 + len(missing)))
        self._awaited = None
        if beats:
            self._answered_s, self._beats = time.monotonic(), beats
            threading.Thread(target=self._beat, args=(store,), daemon=True).start()

    # Questions -----------------------------------------------------------------------------------

    def why_lost(self, rank: int) -> str | None:
        """Why ``rank`` is lost, or None while it is not."""
        return self._gone.get(rank)

    def has_ended(self, rank: int) -> bool:
        """Whether ``rank`` is there no more, in good order or not."""
        if rank in self._pids:
            return self._processes.has_died(rank)
        return self._why_silent(rank) is not None

    @property
    def lost_one(self) -> bool:
        """Whether a rank was lost: the run is over."""
        return self._lost_s is not None

    def check(self) -> None:
        """Raise when the run is over."""
        if self._lost_s is not None and time.monotonic() > self._lost_s + CALL_S:
            raise RunLost(self._loss("the run"))

    def lost(self, watch: Watch, gone: Mapping[int, str]) -> PeerLost:
        """The error of a wait for ranks that are ``gone``: lost, or merely at their end."""
        if self._lost_s is None:
            return watch.lost(list(gone), next(iter(gone.values())))
        time.sleep(max(0.0, self._lost_s + STAY_S - time.monotonic()))
        return watch.lost(list(self._lost), next(iter(self._lost.values())))

    def first_loss(self, error: PeerLost) -> PeerLost:
        """The error; or the first loss, where it names those that gave up because of that."""
        given_up = self.lost_one and self._lost.keys().isdisjoint(error.ranks)
        return self._loss("the run") if given_up else error

    def find_lost(self, watch: Watch, others: Sequence[int]) -> PeerLost:
        """The error of a wait in which a connection broke: the reason has a moment to show."""
        until_s = time.monotonic() + self._limits.dead_s + 2 * SLACK_S
        while self._lost_s is None and time.monotonic() < until_s:
            time.sleep(_MEET_S)
        return self.lost(watch, dict.fromkeys(others, "the connection to it broke"))

    @contextmanager
    def explaining(self, op: str, suspect: int | None = None) -> Iterator[None]:
        """Inside, an error of the backend is a loss: of whom was lost by then, or the suspect."""
        watch = Watch(op, self._limits)
        try:
            yield
        except RuntimeError as error:
            known = suspect is not None and suspect != self._rank
            loss = self.find_lost(watch, [suspect or 0])
            raise (loss if known or self.lost_one else error) from None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Inside, the store is asked something that it answers at once, while its host lives."""
        self._asked_s = time.monotonic()
        try:
            yield
        finally:
            self._asked_s = None

    def leaves(self, rank: int) -> None:
        """Hear that ``rank`` has come to its end, so that its process may end, too."""
        self._left.add(rank)

    def close(self) -> None:
        """Look after nobody any more; after a loss, see to it that the process ends."""
        if not self.lost_one:
            self._over.set()
        elif not self._over.is_set():
            self._tell = lambda loss: None
            atexit.register(_end_after_others)

    # The thread ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        last_s = time.monotonic()
        while not self._over.wait(TICK_S):
            now_s = time.monotonic()
            if now_s - last_s > SLACK_S:
                self._forgive(now_s - last_s - TICK_S)
            last_s = now_s
            self._look(now_s)
            if self._awaited is not None and self._lost_s is None:
                self._await_start(now_s - self._began_s, *self._awaited)
            if self._lost_s is not None and now_s > self._lost_s + END_S:
                self._tell(self._loss("the run"))
                end_process(PeerLost.exit_code)

    def _forgive(self, seconds: float) -> None:
        """This process was stopped itself: nobody can be blamed for that time."""
        self._processes.forgive(seconds)
        self._beats = {peer: (beat, at_s + seconds) for peer, (beat, at_s) in self._beats.items()}
        self._answered_s += seconds
        if self._asked_s is not None:
            self._asked_s += seconds

    def _look(self, now_s: float) -> None:
        gone = {peer: why for peer in range(self._size) if (why := self._why_gone(peer))}
        if not gone and (silent_s := self._store_silent_s(now_s)) > self._limits.dead_s + SLACK_S:
            gone = {0: f"its store has not answered for {silent_s:.1f} s"}
        if gone and self._lost_s is None:  # who has ended while others are stopped has given up
            stopped = [peer for peer in self._pids if self._processes.is_stopped(peer)]
            self._lose({peer: gone.get(peer, "it has been stopped") for peer in stopped} or gone)
        self._gone = {**self._gone, **gone}

    def _why_gone(self, peer: int) -> str | None:
        if peer in self._pids:
            left = peer in self._left
            return self._processes.why_stopped(peer) if left else self._processes.why_lost(peer)
        return None if peer in self._left else self._why_silent(peer)

    def _why_silent(self, peer: int) -> str | None:
        """Why a rank of another host is lost, as of the last time that the store has answered."""
        _, since_s = self._beats.get(peer, (b"", self._answered_s))
        silent_s = self._answered_s - since_s
        if silent_s > self._limits.dead_s + SLACK_S:
            return f"its heartbeat has stopped for {silent_s:.1f} s"
        return None

    def _store_silent_s(self, now_s: float) -> float:
        """For how long rank 0's store has not answered; 0 where the kernel can tell of rank 0."""
        if self._rank == 0 or 0 in self._pids:
            return 0.0
        asked_s = now_s if self._asked_s is None else self._asked_s
        return now_s - min(asked_s, self._answered_s if self._beats else now_s)

    def _lose(self, lost: dict[int, str]) -> None:
        self._lost, self._lost_s = lost, self._lost_s or time.monotonic()

    def _loss(self, op: str) -> PeerLost:
        waited_s = time.monotonic() - (self._lost_s or 0.0)
        return PeerLost(list(self._lost), op, next(iter(self._lost.values())), waited_s)

    def _await_start(self, waited_s: float, ranks: list[int], whom: str) -> None:
        limit = f"pl.Limits(start_s={self._limits.start_s:g})"
        if waited_s > self._limits.start_s:
            why = f"not there {waited_s:.0f} s after the start ({limit})"
            self._lose(dict.fromkeys(ranks, why))
        elif waited_s > self._limits.notice_s and not self._noticed:
            self._noticed = True
            text = f"rank {self._rank} still waits at the start for {whom} after {waited_s:.0f} s"
            print(f"paceline: {text}; the limit is {limit}", file=sys.stderr, flush=True)

    # Heartbeats ----------------------------------------------------------------------------------

    def _beat(self, store: Any) -> None:
        """Show a heartbeat, look at those of other hosts, and tell of losses and hear of them."""
        store, others = store.clone(), list(self._beats)
        while not self._over.wait(HEARTBEAT_S):
            try:
                store.add(f"beat/{self._rank}", 1)
                beats = store.multi_get([f"beat/{peer}" for peer in others])
                self._share_loss(store)
            except RuntimeError:
                if self._rank and 0 not in self._left and self._lost_s is None:
                    self._lose({0: "the connection to its store broke"})
                return
            now_s = self._answered_s = time.monotonic()
            for peer, beat in zip(others, beats, strict=True):
                if beat != self._beats[peer][0]:
                    self._beats[peer] = (beat, now_s)

    def _share_loss(self, store: Any) -> None:
        """Take for lost whom another has lost before this one has; if that is this one, all others.

        Otherwise tell the others of a loss.
        """
        lost = self._lost
        mine = f"{','.join(map(str, lost))} {next(iter(lost.values()))}" if lost else ""
        first = store.compare_set("lost", "", mine).decode()
        if first in ("", mine):
            return
        names, why = first.split(" ", 1)
        ranks = [int(name) for name in names.split(",")]
        if self._rank in ranks:
            ranks = [peer for peer in range(self._size) if peer != self._rank]
            why = "they have given this rank up"
        self._lose(dict.fromkeys(ranks, why))


def _end_after_others() -> None:
    """As the last of what is done at the exit: the backend may wait for a lost rank for good."""
    atexit.unregister(_end_after_others)
    atexit._run_exitfuncs()
    end_process(PeerLost.exit_code)


def end_process(code: int) -> None:
    """End this process at once, whatever its other threads and the backend are in."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class Watch:
    """One wait: gives up when a peer is lost, says whom it waits for, and ends at its limit."""

    def __init__(self, op: str, limits: Limits, patient: bool = False) -> None:
        self.op, self._limits, self._patient = op, limits, patient
        self._start_s = self._looked_s = time.monotonic()
        self._noticed = False

    @property
    def waited_s(self) -> float:
        """Since when this wait lasts."""
        return time.monotonic() - self._start_s

    def look(self) -> None:
        """Say, many times a second, that this waits; else it was stopped, and that is no wait."""
        now_s = time.monotonic()
        if now_s - self._looked_s > SLACK_S:
            self._start_s += now_s - self._looked_s
        self._looked_s = now_s

    def lost(self, ranks: Sequence[int], reason: str) -> PeerLost:
        """The error of this wait when ``ranks`` are lost."""
        return PeerLost(ranks, self.op, reason, self.waited_s)

    def keep_patience(self, missing: Sequence[int]) -> None:
        """Say after a while whom this waits for, and end after a long one."""
        self.look()
        waited_s = self.waited_s
        if waited_s > self._limits.progress_limit_s and not self._patient:
            raise CommTimeout(missing, self.op, waited_s)
        if waited_s > self._limits.notice_s and not self._noticed and not self._patient:
            self._noticed = True
            text = f"still waiting in {self.op} for {name_ranks(missing)}"
            print(f"paceline: {text} after {waited_s:.0f} s", file=sys.stderr, flush=True)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped now."""
    return _stat(pid)[:1] in ([b"T"], [b"t"])


def goes_on(pid: int) -> bool:
    """Whether a process is there, and neither stopped nor at its end."""
    return _stat(pid)[:1] not in ([], [b"T"], [b"t"], [b"Z"], [b"X"])


def is_gone(pid: int) -> bool:
    """Whether a process has ended, and its parent knows how."""
    return not _stat(pid)


def exit_code(pid: int) -> int | None:
    """How a process has ended that nobody has waited for yet; None when that cannot be told."""
    stat = _stat(pid)
    return os.waitstatus_to_exitcode(int(stat[49])) if stat[:1] == [b"Z"] else None


def _stat(pid: int) -> list[bytes]:
    """What the kernel says of a process, from its state on; nothing of one that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].split()
    except OSError:
        return []


def _host() -> str:
    """What processes have in common that see each other's pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}-no-proc-{os.getpid()}"
