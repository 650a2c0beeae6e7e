"""A world of one: nobody to talk to."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from paceline.comm.base import Factor, Transport, Work
from paceline.errors import PeersGone, UsageError


class _Done(Work):
    def __init__(self, weight: int) -> None:
        self._weight = weight

    def done(self) -> bool:
        return True

    def wait(self) -> int:
        return self._weight


class SoloTransport(Transport):
    """The transport of a plain script that no launcher has started."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._tickets: dict[tuple[int, int], int] = {}
        self._window: tuple[int, Tensor] | None = None

    def alive(self) -> tuple[int, ...]:
        return (0,)

    def start_send(self, x: Tensor, dst: int, tag: int) -> Work:
        raise UsageError("a world of one has no peer to send to")

    def post(self, x: Tensor, dst: int, tag: int) -> bool:
        return False

    def take(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, watch: bool = False
    ) -> tuple[int, Tensor]:
        raise PeersGone

    def take_now(self, like: Tensor, sources: Sequence[int], tag: int) -> None:
        return None

    def publish(self, x: Tensor) -> int:
        self._window = (1 if self._window is None else self._window[0] + 1, x.clone())
        return self._window[0]

    def peek(self, src: int, like: Tensor | None) -> tuple[int, Tensor] | None:
        return self._window

    def start_all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None = None
    ) -> Work:
        if weight and factor is not None:
            x.mul_(factor(weight))
        return _Done(weight)

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        pass

    def ticket(self, queue: int, epoch: int) -> int | None:
        drawn = self._tickets.get((queue, epoch), 0)
        self._tickets[queue, epoch] = drawn + 1
        return drawn

    def now(self) -> float:
        return time.monotonic() - self._started_s

    def allocate(self, numel: int, like: Tensor) -> Tensor:
        return like.new_zeros(numel)

    def close(self) -> None:
        pass
