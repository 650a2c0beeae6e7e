"""The world of many hosts: processes that talk over a network, and a registrar that knows them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.comm.hosts.collectives import HostsCollectives
from paceline.comm.hosts.link import RankLink
from paceline.comm.hosts.mail import HostsMail
from paceline.comm.hosts.members import HostsMembers
from paceline.comm.hosts.queue import HostsQueue
from paceline.comm.hosts.rendezvous import HostsRendezvous
from paceline.comm.hosts.windows import HostsWindows
from paceline.comm.hosts.wire import Wire
from paceline.comm.limits import Limits
from paceline.comm.ports import Clock, Ports


class HostsPorts(Ports):
    """The ports of one rank of a run over many hosts.

    Args:
        registrar: the address of the registrar.
        host: the address of this host, at which the rank listens.
        wire: what connects it.
        rank: this rank.
        size: how many there are.
        limits: how long to wait.
        started_s: the monotonic time that the run's clock begins at.
        late: the ranks that come after the beginning.
        elastic: whether the others go on when one is lost.
        workers: how many of the ranks, the first ones, are workers.
        start: how many processes the launcher started for this rank before.
    """

    mail: HostsMail
    members: HostsMembers
    rendezvous: HostsRendezvous

    def __init__(
        self,
        registrar: str,
        host: str,
        wire: Wire,
        rank: int,
        size: int,
        limits: Limits,
        started_s: float | None = None,
        late: Sequence[int] = (),
        elastic: bool = True,
        workers: int | None = None,
        start: int = 0,
    ) -> None:
        self.link = RankLink(registrar, host, rank, wire, limits, late)
        self._windows = HostsWindows(self.link, size if workers is None else workers, elastic)
        self.mail = mail = HostsMail(self.link, self._windows)
        self._collectives = HostsCollectives(self.link)
        # From here on messages are heard: all who take them are there.
        members = HostsMembers(self.link, size, late, (*wire.place, start), self._begin)
        super().__init__(
            rank,
            size,
            mail,
            self._collectives,
            members,
            HostsQueue(self.link),
            Clock(time.monotonic() if started_s is None else started_s),
            HostsRendezvous(self.link, mail),
        )

    def _begin(self) -> None:
        """Begin an incarnation: drop what an earlier one left."""
        self.mail.begin()
        self._windows.begin()

    def close(self) -> None:
        if not self.link.is_closed:
            self._collectives.settle()
            self._windows.hand_over()
            self.link.flush()
            self.link.order("leave")
            self.link.close()

    def give_up(self) -> None:
        self.link.close()
