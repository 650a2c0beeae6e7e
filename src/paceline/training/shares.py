"""Shares of each global batch that follow the speeds of the workers.

In a synchronous method all wait for the slowest. With ``batch="by-speed"`` each worker measures how
many samples it computes in a second. Now and then, in a step in which all have met, they tell each
other, and so come to the same shares. The global batch stays as large as it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from paceline.comm.comm import Comm

if TYPE_CHECKING:
    from paceline.training.division import Member
    from paceline.training.session import Session

FIRST, EVERY = 4, 16
"""After how many steps workers first tell their speeds, and how many steps pass until they do so
again."""
GAIN = 1.05
"""The shares stay as they are, unless other ones make a step this many times as fast."""
WHOLE = 1 << 20
"""What the shares add up to."""


class Shares:
    """What one worker knows of the speeds of all.

    Args:
        session: of the worker.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._speeds: dict[int, float] = {}
        self._measured: list[float] = []
        self._busy_s: float | None = None
        self._steps, self._wait, self._met = 0, FIRST, 0
        self._members: tuple[Member, ...] = ()
        self._known: tuple[tuple[Member, ...], tuple[int, ...]] | None = None

    @cached_property
    def _workers(self) -> Comm:
        return self._session.all_ranks.group(range(self._session.size))

    def of(self, members: tuple[Member, ...]) -> tuple[int, ...]:
        """The members' shares; empty while they are equal."""
        if not self._speeds:
            return ()
        if self._known is None or self._known[0] is not members:
            self._known = members, tuple(shares_of([*self._of_each(members).values()]))
        return self._known[1]

    def _of_each(self, members: tuple[Member, ...]) -> dict[int, float]:
        """The speeds of the members; that of one that has just come is taken for the usual one."""
        usual = statistics.median(self._speeds.values())
        return {rank: self._speeds.get(rank, usual) for rank, _ in members}

    def await_device(self) -> None:
        """Wait until the device has computed the gradient, so that its time is this worker's."""
        if self._session.device.type == "cuda":
            torch.cuda.current_stream(self._session.device).synchronize()

    def note(self, samples: int, busy_s: float) -> None:
        """Hear of a step of this worker: its samples, and how long it has not waited by its end."""
        before, self._busy_s = self._busy_s, busy_s
        if samples and before is not None and busy_s > before:
            self._measured.append(samples / (busy_s - before))

    def after_step(self) -> None:
        """If it is time, and all workers have met in this step: tell each other the speeds."""
        comm, members = self._session.all_ranks, self._session.who_divides()
        if members != self._members:  # all find that in the same step
            self._members, self._steps, self._wait = members, 0, FIRST
        self._steps += 1
        met, self._met = comm.collectives_done > self._met, comm.collectives_done
        if self._steps < self._wait or not met or comm.someone_ends:
            return
        self._steps, self._wait = 0, EVERY
        told = torch.zeros(self._session.size, dtype=torch.float64)
        if self._measured:  # the median: a step in which a worker did something else is not usual
            told[self._session.rank] = statistics.median(self._measured)
        self._measured = []
        self._workers.all_reduce(told)
        self._take({rank: speed for rank, speed in enumerate(told.tolist()) if speed > 0})

    def _take(self, speeds: dict[int, float]) -> None:
        """Have new shares, if they are worth it."""
        if not speeds:
            return
        before, members = self._speeds, self._session.who_divides()
        old = self.of(members) or shares_of([1.0] * len(members))
        self._speeds = speeds
        now = [*self._of_each(members).values()]
        slowest_s = max(share / speed for share, speed in zip(old, now, strict=True)) / sum(old)
        if slowest_s * sum(now) < GAIN:
            self._speeds = before
            return
        self._known = None
        if self._session.leads:
            here, shares = [rank for rank, _ in members], [s / WHOLE for s in self.of(members)]
            self._session.tell("shares", workers=here, shares=shares)

    # For checkpoints, and for those who join -----------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What all workers know alike, and what this one has measured."""
        return {
            "speeds": self._speeds,
            "steps": self._steps,
            "wait": self._wait,
            "measured": (self._session.rank, self._busy_s, [*self._measured]),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Know what :meth:`state` says."""
        self._speeds, self._known = dict(state["speeds"]), None
        self._steps, self._wait = state["steps"], state["wait"]
        self._met = self._session.all_ranks.collectives_done
        rank, busy_s, measured = state["measured"]
        if rank == self._session.rank:
            self._members, self._busy_s = self._session.who_divides(), busy_s
            self._measured = [*measured]


def shares_of(speeds: list[float]) -> list[int]:
    """Shares in proportion to speeds, as whole numbers: all workers divide alike.

    >>> [share / WHOLE for share in shares_of([1.0, 3.0])]
    [0.25, 0.75]
    """
    return [max(1, round(WHOLE * speed / sum(speeds))) for speed in speeds]
