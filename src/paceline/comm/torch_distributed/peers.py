"""The liveness of ranks that may be on other hosts: a heartbeat in the store shows it.

The processes of this host are watched directly (see :mod:`paceline.comm.liveness`).
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.comm.limits import Limits
from paceline.comm.liveness import SLACK_S, TICK_S, Processes, Watch
from paceline.errors import PeerLost, RunLost, name_ranks

HEARTBEAT_S = 0.5
"""How often a rank sends a heartbeat to the ranks on other hosts."""
STAY_S, CALL_S, END_S = 0.7, 1.0, 2.5
"""Seconds after a loss until a wait for the lost rank raises, any other call does, and the process
is ended."""
_POLL_S = 0.01


class Peers:
    """The liveness of ranks that may be on other hosts. The first loss ends the run, on every rank.

    A thread watches all other ranks. It checks the processes of this host directly; ranks on other
    hosts write a heartbeat to the store. A rank that finds another one lost writes the loss to the
    store, for the other hosts. After a loss

    - a wait for the lost rank raises ``PeerLost`` after ``STAY_S``, so that every rank sees the
      loss before the first of them exits;
    - every call raises ``RunLost`` after ``CALL_S``, whichever rank it waits for;
    - the thread ends the process after ``END_S``: it may hang in the backend.

    Args:
        rank: this rank.
        size: the number of ranks.
        limits: how long to wait.
        report: called with the loss before the thread ends the process.
    """

    def __init__(
        self, rank: int, size: int, limits: Limits, report: Callable[[PeerLost], None]
    ) -> None:
        self.rank, self.size, self.limits, self._report = rank, size, limits, report
        self._pids: dict[int, int] = {}
        self._processes = Processes(lambda peer: self._pids[peer], limits)
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._departed: set[int] = set()
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

    def set_awaited(self, ranks: Sequence[int], names: str) -> None:
        """Set the ranks that this rank waits for at the start; raise if it waited for too long."""
        self._awaited = (list(ranks), names)
        self.check()

    def wait_for_all(self, store: Any) -> None:
        """Wait until all ranks have registered in the store."""
        with self.explaining("the start", 0), self.asking():
            self._wait_for_all(store)

    def _wait_for_all(self, store: Any) -> None:
        own_host, missing = _host(), [peer for peer in range(self.size) if peer != self.rank]
        beats: dict[int, tuple[bytes, float]] = {}
        store.set(f"beat/{self.rank}", "0")
        store.set(f"host/{self.rank}", f"{own_host} {os.getpid()}")
        while missing:
            self._share_loss(store)
            for peer in list(missing):
                self._asked_s = time.monotonic()
                entry = store.get(f"host/{peer}") if store.check([f"host/{peer}"]) else b""
                if entry:
                    missing.remove(peer)
                    host, pid = entry.decode().split()
                    if host == own_host:
                        self._pids[peer] = int(pid)
                    else:
                        beats[peer] = (b"", time.monotonic())
            if missing:
                self.set_awaited(missing, name_ranks(missing))
                time.sleep(_POLL_S * (1 + len(missing)))
        self._awaited = None
        if beats:
            self._answered_s, self._beats = time.monotonic(), beats
            threading.Thread(target=self._beat, args=(store,), daemon=True).start()

    # Questions -----------------------------------------------------------------------------------

    def why_lost(self, rank: int) -> str | None:
        """Why ``rank`` is lost; None if it is not."""
        return self._gone.get(rank)

    def has_ended(self, rank: int) -> bool:
        """Whether ``rank`` has ended, finished or lost."""
        if rank in self._pids:
            return self._processes.has_died(rank)
        return self._why_silent(rank) is not None

    @property
    def has_loss(self) -> bool:
        """Whether a rank was lost, so that the run is over."""
        return self._lost_s is not None

    def check(self) -> None:
        """Raise ``RunLost`` if a rank was lost more than ``CALL_S`` ago."""
        if self._lost_s is not None and time.monotonic() > self._lost_s + CALL_S:
            raise RunLost(self._loss("the run"))

    def lost(self, watch: Watch, gone: Mapping[int, str]) -> PeerLost:
        """The error of a wait for ranks that are ``gone``: lost, or finished."""
        if self._lost_s is None:
            return watch.lost(list(gone), next(iter(gone.values())))
        time.sleep(max(0.0, self._lost_s + STAY_S - time.monotonic()))
        return watch.lost(list(self._lost), next(iter(self._lost.values())))

    def first_loss(self, error: PeerLost) -> PeerLost:
        """The first loss, if ``error`` names ranks that ended because of it; else ``error``."""
        given_up = self.has_loss and self._lost.keys().isdisjoint(error.ranks)
        return self._loss("the run") if given_up else error

    def find_lost(self, watch: Watch, others: Sequence[int]) -> PeerLost:
        """The error of a wait in which a connection broke; waits a while for the reason."""
        until_s = time.monotonic() + self.limits.dead_s + 2 * SLACK_S
        while self._lost_s is None and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return self.lost(watch, dict.fromkeys(others, "the connection to it broke"))

    @contextmanager
    def explaining(self, op: str, suspect: int | None = None) -> Iterator[None]:
        """Turn an error of the backend into the loss that caused it, or a loss of ``suspect``."""
        watch = Watch(op, self.limits)
        try:
            yield
        except RuntimeError as error:
            known = suspect is not None and suspect != self.rank
            loss = self.find_lost(watch, [suspect or 0])
            raise (loss if known or self.has_loss else error) from None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """For a query that the store answers at once if its host is alive."""
        self._asked_s = time.monotonic()
        try:
            yield
        finally:
            self._asked_s = None

    def mark_departed(self, rank: int) -> None:
        """Record that ``rank`` has finished: the end of its process is no loss."""
        self._departed.add(rank)

    def close(self) -> None:
        """Stop watching; after a loss, make sure that this process ends."""
        if not self.has_loss:
            self._over.set()
        elif not self._over.is_set():
            self._report = lambda loss: None
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
                self._report(self._loss("the run"))
                _end_process()

    def _forgive(self, seconds: float) -> None:
        """Do not count the last ``seconds``: this process was stopped itself."""
        self._processes.forgive(seconds)
        self._beats = {peer: (beat, at_s + seconds) for peer, (beat, at_s) in self._beats.items()}
        self._answered_s += seconds
        if self._asked_s is not None:
            self._asked_s += seconds

    def _look(self, now_s: float) -> None:
        gone = {peer: why for peer in range(self.size) if (why := self._why_gone(peer))}
        if not gone and (silent_s := self._store_silent_s(now_s)) > self.limits.dead_s + SLACK_S:
            gone = {0: f"its store has not answered for {silent_s:.1f} s"}
        if gone and self._lost_s is None:
            # If ranks are stopped, the ended ones gave up because of them: blame the stopped ones.
            stopped = [peer for peer in self._pids if self._processes.is_stopped(peer)]
            self._lose({peer: gone.get(peer, "it has been stopped") for peer in stopped} or gone)
        self._gone = {**self._gone, **gone}

    def _why_gone(self, peer: int) -> str | None:
        if peer in self._pids:
            died = peer not in self._departed and self._processes.has_died(peer)
            return "it died" if died else self._processes.why_stopped(peer)
        return None if peer in self._departed else self._why_silent(peer)

    def _why_silent(self, peer: int) -> str | None:
        """Why a rank of another host is lost, as of the last reply of the store."""
        _, since_s = self._beats.get(peer, (b"", self._answered_s))
        silent_s = self._answered_s - since_s
        if silent_s > self.limits.dead_s + SLACK_S:
            return f"its heartbeat has stopped for {silent_s:.1f} s"
        return None

    def _store_silent_s(self, now_s: float) -> float:
        """How long rank 0's store has not replied; 0 if rank 0 is on this host."""
        if self.rank == 0 or 0 in self._pids:
            return 0.0
        asked_s = now_s if self._asked_s is None else self._asked_s
        return now_s - min(asked_s, self._answered_s if self._beats else now_s)

    def _lose(self, lost: dict[int, str]) -> None:
        self._lost, self._lost_s = lost, self._lost_s or time.monotonic()

    def _loss(self, op: str) -> PeerLost:
        waited_s = time.monotonic() - (self._lost_s or 0.0)
        return PeerLost(list(self._lost), op, next(iter(self._lost.values())), waited_s)

    def _await_start(self, waited_s: float, ranks: list[int], names: str) -> None:
        limit = f"pl.Limits(start_s={self.limits.start_s:g})"
        if waited_s > self.limits.start_s:
            why = f"it has not joined {waited_s:.0f} s after the start ({limit})"
            self._lose(dict.fromkeys(ranks, why))
        elif waited_s > self.limits.notice_s and not self._noticed:
            self._noticed = True
            text = f"rank {self.rank} still waits at the start for {names} after {waited_s:.0f} s"
            print(f"paceline: {text}; the limit is {limit}", file=sys.stderr, flush=True)

    # Heartbeats ----------------------------------------------------------------------------------

    def _beat(self, store: Any) -> None:
        """Periodically write this rank's heartbeat, read those of other hosts, and share losses."""
        store, others = store.clone(), list(self._beats)
        while not self._over.wait(HEARTBEAT_S):
            try:
                store.add(f"beat/{self.rank}", 1)
                beats = store.multi_get([f"beat/{peer}" for peer in others])
                self._share_loss(store)
            except RuntimeError:
                if self.rank and 0 not in self._departed and self._lost_s is None:
                    self._lose({0: "the connection to its store broke"})
                return
            now_s = self._answered_s = time.monotonic()
            for peer, beat in zip(others, beats, strict=True):
                if beat != self._beats[peer][0]:
                    self._beats[peer] = (beat, now_s)

    def _share_loss(self, store: Any) -> None:
        """Write this rank's loss to the store, or adopt the one that another rank wrote first.

        If that one names this rank, the others have given it up: it has lost all of them.
        """
        lost = self._lost
        own_loss = f"{','.join(map(str, lost))} {next(iter(lost.values()))}" if lost else ""
        first = store.compare_set("lost", "", own_loss).decode()
        if first in ("", own_loss):
            return
        names, why = first.split(" ", 1)
        ranks = [int(name) for name in names.split(",")]
        if self.rank in ranks:
            ranks = [peer for peer in range(self.size) if peer != self.rank]
            why = "they have given this rank up"
        self._lose(dict.fromkeys(ranks, why))


def _end_after_others() -> None:
    """Run the other exit functions, then end: the backend's own exit may wait for ever."""
    atexit.unregister(_end_after_others)
    atexit._run_exitfuncs()
    _end_process()


def _end_process() -> None:
    """End this process at once, whatever its other threads and the backend do."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(PeerLost.exit_code)


def _host() -> str:
    """An identifier that is equal for processes that see each other's pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}-no-proc-{os.getpid()}"
