"""Rendezvous of the processes of one host: all ranks stand still at once, to save what they hold.

Their words are: the last call (number, step, stop), whether a worker has come to the end of its
data, the last rendezvous that was given up; for each rank the last one that it has come to; the
incarnation of each rank that was called last; and the incarnation in which each rank came to the
end of its data (see :mod:`.queue`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.comm.liveness import TICK_S, Watch
from paceline.comm.ports import PUBLISHED, SAVED, Call, Rendezvous
from paceline.comm.shared.mail import SharedMail
from paceline.comm.shared.members import SharedMembers
from paceline.comm.shared.queue import BatchTable, parts


class SharedRendezvous(Rendezvous):
    """One rank's part in them."""

    def __init__(self, members: SharedMembers, mail: SharedMail, batches: BatchTable) -> None:
        self._members, self._mail, self._batches = members, mail, batches
        self._shared, self._words = members.shared, members.shared.words
        self._start = members.shared.layout.rendezvous

    def call(self, known: int, step: int, stop: bool, over: int) -> None:
        shared, called = self._shared, self._members.who_is_here()
        with shared.locked(self._start):
            if self.last_call().number == known:
                self._words.write(self._start + 1, (step, int(stop)))
                self._words.write(self._word(shared.size), called)
                self._words.announce(self._start, known + 1)
                self._give_up(over)

    def last_call(self) -> Call:
        words, size = self._words, self._shared.size
        while True:
            number, step, stop = words.read(self._start, 3)
            called = words.read(self._word(size), size)
            if words[self._start] == number:
                return Call(number, step, bool(stop), tuple(called))

    def meet(self, number: int, members: Sequence[int], incarnations: Sequence[int]) -> bool:
        words, watch = self._words, Watch("a rendezvous", self._shared.limits)
        words.announce(self._word(self._shared.rank), number)
        if self._is_given_up(number):
            return False
        needed = [(rank, inc) for rank, inc in enumerate(incarnations) if inc]
        for member in members:
            while not words.wait(self._word(member), number, TICK_S):
                self._members.check()
                gone = any(self._has_ended(*each) for each in needed)
                if (gone or self._is_given_up(number)) and words[self._word(member)] < number:
                    self._give_up(number)
                    return False
                watch.check_limits([member])
        return words[self._start + 4] < number  # a member may have come, and given it up

    def _give_up(self, number: int) -> None:
        """Have nobody wait any longer for those who have not come to this one, or one before."""
        words = self._words
        words.announce(self._start + 4, max(words[self._start + 4], number))

    def _has_ended(self, rank: int, incarnation: int) -> bool:
        members = self._members
        return members.incarnation(rank) != incarnation or members.why_gone(rank) is not None

    def _is_given_up(self, number: int) -> bool:
        finished, given_up = self._words.read(self._start + 3, 2)
        return bool(finished) or given_up >= number

    def _word(self, rank: int) -> int:
        return self._start + 5 + rank

    # What a checkpoint holds ---------------------------------------------------------------------

    def snapshot(self, without: Sequence[int] | None) -> dict[str, Any]:
        state: dict[str, Any] = {
            "mail": self._mail.waiting(),
            "window": self._window(PUBLISHED),
            "kept": self._window(SAVED),
            "in_hand": [parts(batch) for batch in self._batches.in_hand(self._shared.rank)],
        }
        if without is not None:
            call = tuple(self.last_call()[:2])
            state |= {"queues": self._batches.state(without), "call": call}
        return state

    def _window(self, window: int) -> tuple[Tensor, str, bool] | None:
        seen = self._mail.peek(self._shared.rank, None, window, gone=True)
        if seen is None:
            return None
        on_device = self._shared.places.device_for(seen.x) is not None
        return seen.x, seen.header.hex(), on_device

    def restore(self, state: dict[str, Any]) -> None:
        """Only on a rank that has done nothing yet."""
        self._mail.restored = [*state["mail"]]
        for name, window in (("window", PUBLISHED), ("kept", SAVED)):
            if state[name] is not None:
                x, header, on_device = state[name]
                x = self._shared.places.on_device(x) if on_device else x
                self._mail.publish(x, bytes.fromhex(header), window)
        self._batches.put_in_hand(state["in_hand"])
        if "queues" in state:
            self._batches.load_state(state["queues"])
            self._words.write(self._start, tuple(map(int, state["call"])))
