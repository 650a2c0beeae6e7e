"""What a member of a collective sends to other hosts: a little at a time.

What a host sends faster than its line carries it waits in queues on the way. What is needed next
waits behind it; and where several hosts send to one, some wait for nothing while others queue. So a
member sends a part only while few bytes are on their way: a little more than the line carries until
a part arrives. It learns how many that is from the parts themselves, as BBR does.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from paceline.comm.hosts.link import Receipt

if TYPE_CHECKING:
    from paceline.comm.hosts.collectives import Participant

LEAST_BYTES = 1 << 17
"""As many bytes may always be on their way to each member."""
GAIN = 1.5
"""How many times as much may be on its way as the line carries until a part arrives: with more than
once, a member finds out that the line carries more."""


class Allowance:
    """How many bytes of a rank may be on their way to other hosts.

    Attributes:
        nbytes: so many, if that is more than the least.
    """

    def __init__(self) -> None:
        self.nbytes = 0.0
        self._trips_s, self._rates = deque([float("inf")] * 2, maxlen=2), deque([0.0] * 2, maxlen=2)

    def begin(self) -> None:
        """A collective begins: what counts was measured in it, or in the last one."""
        self._trips_s.append(float("inf"))
        self._rates.append(0.0)

    def note(self, trip_s: float, bytes_per_s: float) -> None:
        """Hear how long a part took to arrive, and how fast parts arrived meanwhile."""
        self._trips_s[-1] = min(self._trips_s[-1], trip_s)
        self._rates[-1] = max(self._rates[-1], bytes_per_s)
        self.nbytes = GAIN * max(self._rates) * min(self._trips_s)


class _OnItsWay(NamedTuple):
    """A part that was sent.

    Attributes:
        receipt: tells when it has arrived.
        nbytes: how long it is.
        sent_s: when it was sent.
        arrived, arrived_s: how many bytes had arrived then, and since when.
    """

    receipt: Receipt
    nbytes: int
    sent_s: float
    arrived: int
    arrived_s: float


class Outbound:
    """What one member sends in one collective.

    Args:
        part: the member's part in it.
        allowance: of the member, for all of its collectives.
    """

    def __init__(self, part: Participant, allowance: Allowance) -> None:
        self._part, self._allowance = part, allowance
        self._queue: deque[tuple[int, int, Tensor, bool]] = deque()
        self._receivers: set[int] = set()
        self._sent: list[_OnItsWay] = []
        self._nbytes = self._arrived = 0
        self._arrived_s = 0.0
        allowance.begin()

    def put(self, rank: int, start: int, piece: Tensor, summed: bool = False) -> None:
        """Send a part, as :meth:`Participant.send` does; to other hosts in the order of calls."""
        if self._part.is_near(rank):
            self._part.send(rank, start, piece, summed)
        else:
            self._receivers.add(rank)
            self._queue.append((rank, start, piece, summed))

    def send(self) -> None:
        """Send what may go now."""
        self._forget_arrived()
        while self._queue and not self._is_full():
            now_s = self._part.now_s()
            if not self._sent:  # the line was idle: what arrived before says nothing of its rate
                self._arrived_s = now_s
            parcel = self._queue.popleft()
            receipt, nbytes = self._part.send(*parcel), parcel[2].nbytes
            self._sent.append(_OnItsWay(receipt, nbytes, now_s, self._arrived, self._arrived_s))
            self._nbytes += nbytes

    def _forget_arrived(self) -> None:
        now_s, sent, self._sent = self._part.now_s(), self._sent, []
        for each in sent:
            if not each.receipt.has_come:
                self._sent.append(each)
                continue
            self._nbytes -= each.nbytes
            self._arrived += each.nbytes
            self._arrived_s = now_s
            rate = (self._arrived - each.arrived) / max(now_s - each.arrived_s, 1e-9)
            self._allowance.note(now_s - each.sent_s, rate)

    def _is_full(self) -> bool:
        least = LEAST_BYTES * len(self._receivers)
        return self._nbytes >= max(least, self._allowance.nbytes)

    @property
    def is_empty(self) -> bool:
        """Whether all parts were sent."""
        return not self._queue

    @property
    def can_send(self) -> bool:
        """Whether :meth:`send` would send something, or find that something has arrived."""
        has_come = any(each.receipt.has_come for each in self._sent)
        return bool(self._queue) and (has_come or not self._is_full())

    @property
    def awaited(self) -> list[int]:
        """The members that something is on its way to, if more is to be sent."""
        return sorted({each.receipt.rank for each in self._sent}) if self._queue else []
