"""The world of torch.distributed: its ports, and how a rank leaves it."""

from __future__ import annotations

import time
from contextlib import suppress

import torch.distributed as dist

from paceline.comm.fixed import FixedMembers
from paceline.comm.ports import Clock, Ports
from paceline.comm.torch_distributed.collectives import DistributedCollectives
from paceline.comm.torch_distributed.mail import DistributedMail
from paceline.comm.torch_distributed.peers import Peers
from paceline.comm.torch_distributed.queue import DistributedQueue
from paceline.errors import PeerLost

PREFIX = "paceline"
_POLL_S = 0.005


class DistributedPorts(Ports):
    """The ports of one rank of a process group.

    Args:
        store: where ranks find each other, and count.
        peers: looks after the others; has met them, unless torch.distributed was there before.
        started_s: the monotonic time that the run's clock begins at.
        rank_order: sum in rank order, bit for bit as the other worlds do; slower.
        owns_groups: whether torch.distributed was initialised for this run alone.
    """

    mail: DistributedMail

    def __init__(
        self,
        store: dist.Store,
        peers: Peers,
        started_s: float = 0.0,
        rank_order: bool = False,
        owns_groups: bool = True,
    ) -> None:
        self._store = dist.PrefixStore(PREFIX, store)
        self._peers, self._owns_groups = peers, owns_groups
        if not owns_groups:
            peers.wait_for_all(self._store)
        mail = DistributedMail(peers)
        super().__init__(
            peers.rank,
            peers.size,
            mail,
            DistributedCollectives(peers, mail, rank_order),
            FixedMembers(peers.size, mail.gone),
            DistributedQueue(self._store, peers, mail),
            Clock(started_s),
        )

    def first_loss(self, error: PeerLost) -> PeerLost:
        return self._peers.first_loss(error)

    def give_up(self) -> None:
        self._peers.close()

    def close(self) -> None:
        self.mail.close()
        self._meet_to_part()
        self._peers.close()
        if self._owns_groups and self.mail.closed and dist.is_initialized():
            dist.destroy_process_group()

    def _meet_to_part(self) -> None:
        """Wait until all know that all leave: a connection closed before then loses messages."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        with suppress(RuntimeError):  # the store went with rank 0, which had seen everyone part
            count = self._count_parting(1)
            while count < self.size and sum(map(self._peers.has_ended, others)) < self.size - count:
                time.sleep(_POLL_S)
                count = self._count_parting(0)

    def _count_parting(self, more: int) -> int:
        with self._peers.asking():
            return int(self._store.add("heard", more))
