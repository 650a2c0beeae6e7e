"""The batches of a run over many hosts: the registrar gives them out."""

from __future__ import annotations

from paceline.comm.hosts.link import RankLink
from paceline.comm.ports import DataQueue


class HostsQueue(DataQueue):
    """The data queue of one rank."""

    def __init__(self, link: RankLink) -> None:
        self._link = link

    def draw(self, queue: int, epoch: int) -> int | None:
        self._link.check()
        number: int | None = self._link.order("draw", queue, epoch)
        return number

    def mark_used(self, queue: int, epoch: int, number: int) -> None:
        self._link.tell("mark_used", queue, epoch, number)

    def lost_batches(self) -> int:
        return int(self._link.order("lost_batches"))

    def close(self) -> None:
        self._link.order("close")

    def closed(self) -> bool:
        return self._link.roll is not None and self._link.roll.closed

    def mark_finished(self) -> None:
        self._link.order("mark_finished")

    def finished(self) -> frozenset[int]:
        return frozenset() if self._link.roll is None else self._link.roll.finished
