"""The data queue over torch.distributed: counters in its store."""

from __future__ import annotations

import torch.distributed as dist

from paceline.comm.ports import DataQueue
from paceline.comm.torch_distributed.mail import DistributedMail, Kind
from paceline.comm.torch_distributed.peers import Peers


class DistributedQueue(DataQueue):
    """The data queue of one rank. A loss ends the run, so no batch is ever taken back."""

    def __init__(self, store: dist.Store, peers: Peers, mail: DistributedMail) -> None:
        self._store, self._peers, self._mail = store, peers, mail

    def draw(self, queue: int, epoch: int) -> int | None:
        self._peers.check()
        with self._peers.explaining("the drawing of a batch", 0), self._peers.asking():
            return int(self._store.add(f"queue/{queue}/{epoch}", 1)) - 1

    def mark_used(self, queue: int, epoch: int, number: int) -> None:
        pass

    def lost_batches(self) -> int:
        return 0

    def close(self) -> None:
        self._mail.tell_all(Kind.STOP)

    def mark_finished(self) -> None:
        self._mail.tell_all(Kind.FINISHED)

    def closed(self) -> bool:
        return self._mail.stopping

    def finished(self) -> frozenset[int]:
        return self._mail.finished
