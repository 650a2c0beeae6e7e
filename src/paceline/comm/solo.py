"""A world of one rank: nobody to talk to."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count

from torch import Tensor

from paceline.comm.fixed import FixedMembers
from paceline.comm.ports import (
    PUBLISHED,
    Clock,
    Collectives,
    DataQueue,
    Factor,
    Lost,
    Mail,
    Ports,
    Published,
    Sending,
    Total,
)
from paceline.errors import UsageError


def solo_ports() -> Ports:
    """The ports of a plain script that no launcher has started."""
    clock = Clock(time.monotonic())
    return Ports(0, 1, SoloMail(), SoloCollectives(), FixedMembers(1), SoloQueue(), clock)


class SoloMail(Mail):
    """Windows that only this rank reads; there is no peer to send to."""

    def __init__(self) -> None:
        self._windows: dict[int, Published] = {}

    def start_send(self, x: Tensor, dst: int, tag: int, header: bytes) -> Sending:
        raise UsageError("a world of one has no peer to send to")

    def post(self, x: Tensor, dst: int, tag: int, header: bytes) -> bool:
        return False

    def receive(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, any_loss: bool = False
    ) -> Lost:
        return Lost(tuple(sources), op, "nobody else is here")

    def try_receive(self, like: Tensor, sources: Sequence[int], tag: int) -> None:
        return None

    def publish(self, x: Tensor, header: bytes = b"", window: int = PUBLISHED) -> int:
        version = self._windows[window].version + 1 if window in self._windows else 1
        self._windows[window] = Published(version, x.clone(), header)
        return version

    def peek(
        self, src: int, like: Tensor | None, window: int = PUBLISHED, gone: bool = False
    ) -> Published | None:
        return self._windows.get(window)


class SoloCollectives(Collectives):
    """The sum over one rank is its own vector."""

    def all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None, flags: int
    ) -> Total:
        if weight and factor is not None:
            x.mul_(factor(weight))
        return Total(weight, flags)

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        pass

    def allocate(self, numel: int, like: Tensor) -> Tensor:
        return like.new_zeros(numel)


class SoloQueue(DataQueue):
    """Batches in their order."""

    def __init__(self) -> None:
        self._numbers: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(count)
        self._closed = False

    def draw(self, queue: int, epoch: int) -> int | None:
        return next(self._numbers[queue, epoch])

    def mark_used(self, queue: int, epoch: int, number: int) -> None:
        pass

    def lost_batches(self) -> int:
        return 0

    def close(self) -> None:
        self._closed = True

    def closed(self) -> bool:
        return self._closed

    def mark_finished(self) -> None:
        pass

    def finished(self) -> frozenset[int]:
        return frozenset()
