"""Who of this host's ranks is dead or stopped: the kernel says so, no heartbeat has to.

A process that ended is seen through its pidfd, at once. One that was stopped (SIGSTOP, a
debugger) is seen by its state; it is lost when it stayed so for ``dead_s``. One that is merely
busy is neither, for however long it is.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.comm.base import Limits
from paceline.errors import CommTimeout, PeerLost, name_ranks

TICK_S = 0.1
"""How often a wait looks after those that it waits for."""


HEARTBEAT_S = 1.0


class Processes:
    """The processes of the ranks on this host.

    Args:
        pid_of: the process of a rank; 0 while it is not known.
        limits: when a stopped process counts as lost.
    """

    def __init__(self, pid_of: Callable[[int], int], limits: Limits) -> None:
        self._pid_of, self._limits = pid_of, limits
        self._pidfds: dict[int, int | None] = {}
        self._pids: dict[int, int] = {}
        self._poll, self._watched = select.poll(), dict[int, int]()
        self._stopped_since_s: dict[int, float] = {}
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
            self._stopped_since_s.pop(rank, None)
            return None
        now_s = time.monotonic()
        stopped_s = now_s - self._stopped_since_s.setdefault(rank, now_s)
        if stopped_s < self._limits.dead_s:
            return None
        return f"it has been stopped for {stopped_s:.1f} s"

    def stopped(self) -> frozenset[int]:
        """The ranks that were found to be stopped when they were last looked at."""
        return frozenset(self._stopped_since_s)

    def is_stopped(self, rank: int) -> bool:
        """Whether the process of ``rank`` is stopped now, for however short a time."""
        return _is_stopped(self._pid_of(rank))

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
    """The liveness of ranks that may be on other hosts.

    Those on this host are looked at directly. The others show a heartbeat in the store, once a
    second; it is given twice ``dead_s``, since a thread may be kept from beating for a while.
    """

    def __init__(self, store: Any, rank: int, size: int, limits: Limits) -> None:
        self._store, self._limits = store, limits
        here = _host()
        store.set(f"host/{rank}", f"{here} {os.getpid()}")
        told = [store.get(f"host/{peer}").decode().split() for peer in range(size)]
        self._pids = {peer: int(pid) for peer, (host, pid) in enumerate(told) if host == here}
        self._processes = Processes(lambda peer: self._pids[peer], limits)
        self._seen: dict[int, tuple[int, float]] = {}
        self._over = threading.Event()
        if len(self._pids) < size:
            threading.Thread(target=self._beat, args=(rank,), daemon=True).start()

    def why_lost(self, rank: int) -> str | None:
        """Why ``rank`` is lost, or None while it is not."""
        if rank in self._pids:
            return self._processes.why_lost(rank)
        now_s = time.monotonic()
        beat = int(self._store.add(f"beat/{rank}", 0))
        last, since_s = self._seen.get(rank, (-1, now_s))
        if beat != last:
            self._seen[rank] = (beat, now_s)
        elif now_s - since_s > 2 * self._limits.dead_s:
            return f"its heartbeat has stopped for {now_s - since_s:.1f} s"
        return None

    def is_stopped(self, rank: int) -> bool:
        """Whether ``rank`` is stopped now, for however short a time; of this host's ranks only."""
        return rank in self._pids and self._processes.is_stopped(rank)

    def close(self) -> None:
        """End the heartbeat."""
        self._over.set()

    def _beat(self, rank: int) -> None:
        while not self._over.wait(HEARTBEAT_S):
            self._store.add(f"beat/{rank}", 1)


class Watch:
    """One wait: gives up when a peer is lost, says whom it waits for, and ends at its limit."""

    def __init__(self, op: str, limits: Limits, patient: bool = False) -> None:
        self.op, self._limits, self._patient = op, limits, patient
        self._start_s = time.monotonic()
        self._noticed = False

    @property
    def waited_s(self) -> float:
        """Since when this wait lasts."""
        return time.monotonic() - self._start_s

    def lost(self, ranks: Sequence[int], reason: str) -> PeerLost:
        """The error of this wait when ``ranks`` are lost."""
        return PeerLost(ranks, self.op, reason, self.waited_s)

    def keep_patience(self, missing: Sequence[int]) -> None:
        """Say after a while whom this waits for, and end after a long one."""
        waited_s = self.waited_s
        if waited_s > self._limits.progress_limit_s and not self._patient:
            raise CommTimeout(missing, self.op, waited_s)
        if waited_s > self._limits.notice_s and not self._noticed and not self._patient:
            self._noticed = True
            text = f"still waiting in {self.op} for {name_ranks(missing)}"
            print(f"paceline: {text} after {waited_s:.0f} s", file=sys.stderr, flush=True)


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state in (b"T", b"t")


def _host() -> str:
    """What processes have in common that see each other's pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}-no-proc-{os.getpid()}"
