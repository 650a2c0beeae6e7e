"""The data queue of a simulated run."""

from __future__ import annotations

from paceline.comm.ports import DataQueue
from paceline.sim.rank import SimulatedRank


class SimulatedQueue(DataQueue):
    """The data queue of one rank."""

    def __init__(self, own: SimulatedRank) -> None:
        self._own, self._world, self._rank = own, own.world, own.rank

    def draw(self, queue: int, epoch: int) -> int | None:
        self._own.check_in_order()
        if self._world.registrar is not None:
            self._world.registrar.answer(self._own)
        return self._world.batches.draw(self._rank, queue, epoch)

    def mark_used(self, queue: int, epoch: int, number: int) -> None:
        self._world.batches.mark_used(self._rank, queue, epoch, number)

    def lost_batches(self) -> int:
        return len(self._world.batches.returned)

    def close(self) -> None:
        self._own.pass_time()
        self._own.baton.refuse_late(self._rank)
        self._own.baton.await_parked(self._rank)
        self._world.closed = True

    def closed(self) -> bool:
        return self._world.closed

    def mark_finished(self) -> None:
        self._own.pass_time()
        self._own.baton.await_parked(self._rank)
        self._world.finished |= {self._rank}
        self._world.rendezvous_over = True
        self._world.wake_awaiting()

    def finished(self) -> frozenset[int]:
        self._own.pass_time()
        return self._world.finished
