"""Meetings of the processes of one host: all ranks stand still at once, to save what they hold.

The words of a :class:`Meeting` are: the last call (number, step, stop), whether a worker has come
to its end, the last meeting that was given up, and for each rank the last one that it has come to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.comm.base import Call
from paceline.comm.liveness import TICK_S, Watch

if TYPE_CHECKING:
    from paceline.comm.shared_memory import SharedMemoryTransport

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
        return 5 + size

    def call(self, step: int, stop: bool) -> None:
        """Call all to a meeting; the number is written last."""
        words = self._transport.words
        words.write(self._start + 1, (step, int(stop)))
        words.announce(self._start, words[self._start] + 1)

    def called(self) -> Call:
        """The last call."""
        number, step, stop = self._transport.words.read(self._start, 3)
        return Call(number, step, bool(stop))

    def retire(self) -> None:
        """Say that a worker has come to its end: there is no meeting any more."""
        self._transport.words.announce(self._start + 3, 1)

    def meet(self, number: int, members: Sequence[int], watch: Watch) -> bool:
        """Wait for all members; False, to all who wait, when a rank is or was lost."""
        transport, words = self._transport, self._transport.words
        words.announce(self._place(transport.rank), number)
        if self._is_given_up(number):
            return False
        for member in members:
            while not words.wait(self._place(member), number, TICK_S):
                transport.check()
                gone = any(map(self._was_lost, range(transport.size)))
                if (gone or self._is_given_up(number)) and words[self._place(member)] < number:
                    words.announce(self._start + 4, number)
                    return False
                watch.keep_patience([member])
        return words[self._start + 4] < number  # a member may have come, and given it up

    def _was_lost(self, rank: int) -> bool:
        """Whether a rank is gone, or was and has come again; the others may know it by now."""
        return self._transport.life(rank) > 1 or self._transport.why_gone(rank) is not None

    def is_over(self, number: int) -> bool:
        """Whether the first rank has gone on from a meeting to the next, or it was given up."""
        return self._is_given_up(number) or self._transport.words[self._place(0)] > number

    def _is_given_up(self, number: int) -> bool:
        retired, given_up = self._transport.words.read(self._start + 3, 2)
        return bool(retired) or given_up >= number

    def _place(self, rank: int) -> int:
        return self._start + 5 + rank

    # What a checkpoint holds ---------------------------------------------------------------------

    def snapshot(self, shared: bool) -> dict[str, Any]:
        """The messages for this rank, what it shows and keeps; with what all have ``shared``."""
        transport = self._transport
        state: dict[str, Any] = {
            "mail": [*self.restored, *transport.mail()],
            "window": _vector(transport.window(kept=False)),
            "kept": _vector(transport.window(kept=True)),
            "in_hand": transport.batches_in_hand(),
        }
        if shared:
            state |= {"queues": transport.queue_words(), "call": tuple(self.called())}
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
