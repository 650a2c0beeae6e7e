"""The mailbox of a simulated rank."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class Letter:
    """A message in a mailbox, or on its way to it. A posted one holds a copy of the vector."""

    src: int
    tag: int
    x: Tensor
    header: bytes
    posted: bool
    arrived_s: float
    taken: bool = False
    awaited: bool = False
    number: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes that it puts on a link."""
        return self.x.nbytes + len(self.header)


class Inbox:
    """The messages to one rank, arrived or on their way.

    A queue for each tag and sender holds them in the order in which they were sent: a message that
    overtakes another of its sender waits for it. A heap holds the first message of each queue by
    its time of arrival, so that :meth:`find` need not search all queues.
    """

    def __init__(self) -> None:
        self._queues: dict[int, dict[int, deque[Letter]]] = defaultdict(lambda: defaultdict(deque))
        self._firsts: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
        self._posted: Counter[int] = Counter()
        self._count = 0

    def add(self, message: Letter) -> None:
        """Add a message; its time of arrival may be unknown yet (infinite)."""
        self._count += 1
        message.number = self._count
        self._queues[message.tag][message.src].append(message)
        if message.posted:
            self._posted[message.src] += 1
        if message.arrived_s < math.inf:
            self.note_arrival(message)

    def note_arrival(self, message: Letter) -> None:
        """Record that the time at which a message arrives is known now."""
        if self._first(message.tag, message.src) is message and message.arrived_s < math.inf:
            entry = (message.arrived_s, message.number, message.src)
            heapq.heappush(self._firsts[message.tag], entry)

    def posted_by(self, src: int) -> int:
        """The number of messages that ``src`` has posted and this rank has not received."""
        return self._posted[src]

    def senders(self, tag: int) -> Collection[int]:
        """The ranks with a message of this tag, arrived or on its way."""
        return self._queues.get(tag, {})

    def find(self, sources: Sequence[int], tag: int, now_s: float) -> Letter | None:
        """The message from ``sources`` that arrived first; None if there is none yet."""
        firsts = self._firsts.get(tag)
        if not firsts:
            return None
        if len(sources) == 1:
            first = self._first(tag, sources[0])
            return first if first is not None and first.arrived_s <= now_s else None
        found, of_others = None, []
        while found is None and firsts and firsts[0][0] <= now_s:
            _, number, src = firsts[0]
            first = self._first(tag, src)
            if first is None or first.number != number:
                heapq.heappop(firsts)  # a receive from this sender alone has removed it
            elif src in sources:
                found = first
            else:
                of_others.append(heapq.heappop(firsts))
        for entry in of_others:
            heapq.heappush(firsts, entry)
        return found

    def remove(self, message: Letter) -> None:
        """Remove a message that :meth:`find` returned: the first of its sender."""
        senders, firsts = self._queues[message.tag], self._firsts[message.tag]
        queue = senders[message.src]
        queue.popleft()
        self._posted[message.src] -= message.posted
        if firsts and firsts[0][1] == message.number:
            heapq.heappop(firsts)
        if queue:
            self.note_arrival(queue[0])
        else:
            del senders[message.src]

    def all(self) -> list[Letter]:
        """All messages, in the order in which they were sent."""
        every = (queue for senders in self._queues.values() for queue in senders.values())
        return sorted((m for queue in every for m in queue), key=lambda message: message.number)

    def withdraw(self, src: int, posted: bool = False) -> None:
        """Remove the messages of ``src`` that nobody received; posted ones only if ``posted``."""
        remaining = [m for m in self.all() if m.src != src or (m.posted and not posted)]
        self.clear()
        for message in remaining:
            self.add(message)

    def clear(self) -> None:
        """Remove all messages."""
        self._queues.clear()
        self._firsts.clear()
        self._posted.clear()

    def _first(self, tag: int, src: int) -> Letter | None:
        queue = self._queues.get(tag, {}).get(src)
        return queue[0] if queue else None
