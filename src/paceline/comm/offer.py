"""A message on its way, and the loss of a peer as a result: the same in every world."""

from __future__ import annotations

from collections.abc import Callable

from paceline.comm.ports import Lost, Sending
from paceline.errors import PeerLost


class Offer(Sending):
    """A message that stays with its sender until its receiver has taken it.

    Args:
        outcome: waits for the receiver; returns its loss, if that comes first.
    """

    def __init__(self, outcome: Callable[[], Lost | None]) -> None:
        self._outcome = outcome

    def wait(self) -> Lost | None:
        return self._outcome()


def as_value(lost: PeerLost) -> Lost:
    """A loss as the result of an operation."""
    return Lost(tuple(lost.ranks), lost.op, lost.reason, lost.waited_s)
