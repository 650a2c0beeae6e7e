"""Meetings of the processes of one host: all ranks stand still at once, to save what they hold.

The words of a :class:`Meeting` are: the last call (number, step, stop), whether a worker has come
to its end, the last meeting that was given up, and for each rank the last one that it has come to,
then the life of each rank that was called last, then the life in which each has come to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.comm.base import Call
from paceline.comm.liveness import TICK_S, Watch

if TYPE_CHECKING:
    from paceline.comm.shared.transport import SharedMemoryTransport

Mail = tuple[int, int, Tensor]
"""A message that was restored: its sender, its tag, and what it holds."""


class Meeting:
    """What one rank does for the meetings of all."""

    def __init__(self, transport: SharedMemoryTransport) -> None:
        self._transport = transport
        self._start = transport.layout.meeting
        self.restored: list[Mail] = []

    @staticmethod
    def words(size: int) -> int:
        """How many words it takes."""
        return 5 + 3 * size

    def call(self, step: int, stop: bool, lives: Sequence[int]) -> None:
        """Call those ranks to a meeting; the number is written last."""
        words = self._transport.words
        words.write(self._start + 1, (step, int(stop)))
        words.write(self._place(self._transport.size), tuple(lives))
        words.announce(self._start, words[self._start] + 1)

    def called(self) -> Call:
        """The last call."""
        words, size = self._transport.words, self._transport.size
        while True:
            number, step, stop = words.read(self._start, 3)
            lives = words.read(self._place(size), size)
            if words[self._start] == number:
                return Call(number, step, bool(stop), tuple(lives))

    def retire(self) -> None:
        """Say that this worker has come to its end: there is no meeting any more."""
        transport, words = self._transport, self._transport.words
        words[self._place(2 * transport.size + transport.rank)] = transport.life(transport.rank)
        words.announce(self._start + 3, 1)

    def retired(self) -> frozenset[int]:
        """The workers that have come to their end, in the life that they have now."""
        transport, words = self._transport, self._transport.words
        if not words[self._start + 3]:
            return frozenset()
        lives = words.read(self._place(2 * transport.size), transport.size)
        return frozenset(r for r, life in enumerate(lives) if life and life == transport.life(r))

    def meet(self, number: int, members: Sequence[int], lives: Sequence[int], watch: Watch) -> bool:
        """Wait for all members; False, to all who wait, when a life that is needed is over."""
        transport, words = self._transport, self._transport.words
        words.announce(self._place(transport.rank), number)
        if self._is_given_up(number):
            return False
        for member in members:
            while not words.wait(self._place(member), number, TICK_S):
                transport.check()
                gone = any(self._is_over(rank, life) for rank, life in enumerate(lives) if life)
                if (gone or self._is_given_up(number)) and words[self._place(member)] < number:
                    self.give_up(number)
                    return False
                watch.keep_patience([member])
        return words[self._start + 4] < number  # a member may have come, and given it up

    def give_up(self, number: int) -> None:
        """Have nobody wait any longer for those who have not come to a meeting, or one before."""
        words = self._transport.words
        words.announce(self._start + 4, max(words[self._start + 4], number))

    def _is_over(self, rank: int, life: int) -> bool:
        transport = self._transport
        return transport.life(rank) != life or transport.why_gone(rank) is not None

    def _is_given_up(self, number: int) -> bool:
        retired, given_up = self._transport.words.read(self._start + 3, 2)
        return bool(retired) or given_up >= number

    def _place(self, rank: int) -> int:
        return self._start + 5 + rank

    # What a checkpoint holds ---------------------------------------------------------------------

    def snapshot(self, without: Sequence[int] | None) -> dict[str, Any]:
        """The messages for this rank, what it shows and keeps; and what all share."""
        transport = self._transport
        state: dict[str, Any] = {
            "mail": [*self.restored, *transport.mail()],
            "window": _vector(transport.window(kept=False)),
            "kept": _vector(transport.window(kept=True)),
            "in_hand": transport.batches_in_hand(transport.rank),
        }
        if without is not None:
            state |= {"queues": transport.queue_words(without), "call": tuple(self.called()[:2])}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Take them up again; only on a rank that has done nothing yet."""
        transport = self._transport
        self.restored = [*state["mail"]]
        if state["window"] is not None:
            transport.publish(state["window"])
        if state["kept"] is not None:
            transport.keep(state["kept"])
        transport.take_in_hand(state["in_hand"])
        if "queues" in state:
            transport.set_queue_words(state["queues"])
            transport.words.write(self._start, tuple(map(int, state["call"])))

    def take(self, sources: Sequence[int], tag: int) -> tuple[int, Tensor] | None:
        """Take a message that was restored."""
        for place, (src, its_tag, x) in enumerate(self.restored):
            if src in sources and its_tag == tag:
                del self.restored[place]
                return src, x
        return None


def _vector(seen: tuple[int, Tensor] | None) -> Tensor | None:
    return None if seen is None else seen[1]
