"""The world of one host: processes that talk through memory they share, without a port.

Each rank has a block of words (see :class:`~.layout.Layout`): who it is, what it has sent, what it
has taken, how far it is in each group's collectives. It alone writes them, except for its bell.
Vectors lie in the arena; those that :meth:`SharedCollectives.allocate` made are read by peers where
they are. Vectors of ranks that share a GPU lie in its memory (see :mod:`.segments`).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.limits import Limits
from paceline.comm.ports import Clock, Ports
from paceline.comm.shared.collectives import SharedCollectives
from paceline.comm.shared.mail import SharedMail
from paceline.comm.shared.members import SharedMembers
from paceline.comm.shared.queue import BatchTable, SharedQueue
from paceline.comm.shared.rank import SharedRank
from paceline.comm.shared.regions import Regions
from paceline.comm.shared.rendezvous import SharedRendezvous


class SharedPorts(Ports):
    """The ports of one rank of a run on one host.

    Args:
        fd: the arena's memfd.
        rank: this rank.
        size: how many there are.
        limits: how long to wait.
        started_s: the monotonic time that the run's clock begins at.
        late: the ranks that come after the beginning.
        elastic: whether the others go on when one is lost, and so need their vectors intact.
        workers: how many of the ranks, the first ones, are workers; the others wait for them.
        device: whose memory a keeper holds for the ranks, if one does.
    """

    mail: SharedMail
    members: SharedMembers

    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        limits: Limits,
        started_s: float = 0.0,
        late: Sequence[int] = (),
        elastic: bool = True,
        workers: int | None = None,
        device: str | None = None,
    ) -> None:
        workers = size if workers is None else workers
        shared = SharedRank(fd, rank, size, limits, elastic, workers, device)
        batches = BatchTable(shared)
        members = SharedMembers(shared, batches, late)
        regions = Regions(shared)
        mail = SharedMail(members, regions)
        self.shared, self.batches = shared, batches
        super().__init__(
            rank,
            size,
            mail,
            SharedCollectives(members, regions),
            members,
            SharedQueue(batches, members),
            Clock(started_s),
            SharedRendezvous(members, mail, batches),
        )

    def close(self) -> None:
        self.members.leave()
