"""What the ports of one rank share: words of the control area, the arena, and locks on words."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.comm.limits import Limits
from paceline.comm.liveness import TICK_S, Processes, Watch, goes_on
from paceline.comm.shared.deferred import DeferredWords
from paceline.comm.shared.drivers import DriverError, driver_of
from paceline.comm.shared.layout import Layout
from paceline.comm.shared.members import MemberTable
from paceline.comm.shared.memory import Arena, SharedWords, map_control
from paceline.comm.shared.places import Places
from paceline.comm.shared.segments import Segments
from paceline.comm.standing import Standing

_FLOCK = "hhqqi"


class SharedRank:
    """One rank's hold on the memory that the ranks of a host share.

    Args:
        fd: the arena's memfd.
        rank: this rank.
        size: how many there are.
        limits: how long to wait.
        elastic: whether the others go on when one is lost, and so need their vectors intact.
        workers: how many of the ranks, the first ones, are workers; the others wait for them.
        device: whose memory a keeper holds for the ranks, if one does.
    """

    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        limits: Limits,
        elastic: bool,
        workers: int,
        device: str | None = None,
    ) -> None:
        self.fd, self.rank, self.size = fd, rank, size
        self.limits, self.elastic, self._workers = limits, elastic, workers
        self.layout = Layout(size)
        self.words = SharedWords(map_control(fd, self.layout.words * 8), size)
        self.table = MemberTable(self)
        self.processes = Processes(self.pid_of, limits, self._some_go_on)
        self._device = device
        self.deferred = DeferredWords(self.words)
        self.places = Places(Arena(fd, owner=rank + 1))
        self.sequence = 0

    def begin(self, start: int) -> None:
        """Allocate memory for process number ``start`` of this rank.

        If the ranks of a device cannot share its memory, they use that of the host.
        """
        self.places.arena.begin(start)
        if self._device is None:
            return
        try:
            driver = driver_of(self._device)
            self.places.segments = Segments(
                self.words, self.layout, self.rank, driver, self.limits, start
            )
        except DriverError as error:
            if self.rank == 0:
                text = f"ranks communicate through the host's memory: {error}"
                print(f"paceline: {text}", file=sys.stderr, flush=True)

    def pid_of(self, rank: int) -> int:
        """The process of a rank; 0 while it is not known."""
        return self.words[self.layout.pid(rank)]

    def _some_go_on(self) -> bool:
        """Whether a worker runs, or has come to its end; without one nobody misses another."""
        return self.rank < self._workers or any(
            self.table[worker].standing is Standing.LEFT or goes_on(self.pid_of(worker))
            for worker in range(self._workers)
        )

    def ring(self, dst: int) -> None:
        """Wake ``dst``: there may be a message for it, or a change of members."""
        self.sequence += 1
        self.words.announce(self.layout.bell(dst), self.sequence * self.size + self.rank)

    @contextmanager
    def locked(self, index: int) -> Iterator[None]:
        """A lock on a word that the kernel takes back when its holder dies.

        A holder that is stopped for too long is killed, since the others cannot go on without it.
        """
        watch = None
        while not self._try_lock(index):
            watch = watch or Watch("the wait for a lock", self.limits)
            if watch.waited_s > TICK_S:
                self._end_stopped_holder(index)
            os.sched_yield()
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 8, index * 8)

    def _try_lock(self, index: int) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 8, index * 8)
        except BlockingIOError:
            return False
        return True

    def _end_stopped_holder(self, index: int) -> None:
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, index * 8, 8, 0)
        pid = struct.unpack(_FLOCK, fcntl.fcntl(self.fd, fcntl.F_GETLK, request))[-1]
        for rank in range(self.size):
            if self.pid_of(rank) == pid and self.processes.why_stopped(rank):
                self.processes.end(rank)
