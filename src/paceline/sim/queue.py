"""The data queue of a simulated run."""

from __future__ import annotations

from paceline.comm.ports import DataQueue
from paceline.sim.rank import SimulatedRank


class SimulatedQueue(DataQueue):
    """The data queue of one rank."""

    def __init__(self, own: SimulatedRank) -> None:
        self._own, self._world, self._rank = own, own.world, own.rank

    def draw(self, queue: int, epoch: int) -> int | None:
        self._own.check()
        world = self._world
        state = world.queues.setdefault(queue, [epoch, 0])
        if state[0] > epoch:
            return None
        if state[0] < epoch:
            state[:] = [epoch, 0]
        returned = next((b for b in world.returned if b[:2] == (queue, epoch)), None)
        if returned is not None:
            world.returned.remove(returned)
            number = returned[2]
        else:
            number = state[1]
            state[1] += 1
        world.in_hand[self._rank].add((queue, epoch, number))
        return number

    def mark_used(self, queue: int, epoch: int, number: int) -> None:
        self._world.in_hand[self._rank].discard((queue, epoch, number))

    def lost_batches(self) -> int:
        return len(self._world.returned)

    def close(self) -> None:
        self._own.pass_time()
        self._world.closed = True

    def closed(self) -> bool:
        return self._world.closed

    def mark_finished(self) -> None:
        self._own.pass_time()
        self._world.finished |= {self._rank}
        self._world.rendezvous_over = True
        self._world.wake_awaiting()

    def finished(self) -> frozenset[int]:
        self._own.pass_time()
        return self._world.finished
