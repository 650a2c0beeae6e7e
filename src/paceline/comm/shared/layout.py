"""Which word of the shared control area means what."""

from __future__ import annotations

from paceline.comm.ports import MAILBOX_CAPACITY, PUBLISHED, SHELF, SHELVES

MAX_GROUPS, MAX_QUEUES = 4096, 64
MAX_IN_HAND, MAX_RETURNED = 64, 1024
AHEAD = 2
"""How many collectives of a group may have entries at once: the present one and the next."""
ENTRY_WORDS = 7
SENT_SLOT = MAILBOX_CAPACITY
SLOTS = MAILBOX_CAPACITY + 1
SLOT_WORDS = 8
BUFFERS = 3
WINDOW_WORDS = 4 + 3 * BUFFERS
SEGMENTS, HANDLE_WORDS = 68, 8
"""How many segments of a device's memory a rank may have, and the words of the handle of each."""
SEGMENT_WORDS = 2 + HANDLE_WORDS
GIVEN = 1
"""What a keeper sets when it has given a segment; if it cannot, the driver's code, below 0."""


class Layout:
    """The words of a run of ``size`` ranks.

    A rank's block holds, in this order:

    - its process, its bell, how many processes it has had;
    - its windows: version, numel, dtype, header bytes, then version, place and place of the header
      of three buffers;
    - its outgoing messages: for each receiver, slots of (sequence, tag, dtype, numel, place, place
      of the header, header bytes, the incarnations of both);
    - its receipts: for each sender, the sequence last taken from each slot;
    - the batches that it has in hand;
    - its groups: for each, how many collectives it has arrived at, finished and released, then
      entries of (operation, numel, dtype, weight, place, place of its part of the sum, flags);
    - its segments of a device's memory: for each, its size, whether it was given, and its handle.

    After the blocks come the member table, the final roster, the last rosters of
    two kinds, the directory of groups, the next
    batch of each queue, and the batches that were taken back from lost ranks; these are written
    under a lock. Then come the rendezvous, whether the data queue is closed, and the bell of the
    keeper.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._window = 3
        self._mail = self._window + (SHELF + SHELVES) * WINDOW_WORDS
        self._receipts = self._mail + size * SLOTS * SLOT_WORDS
        self._in_hand = self._receipts + size * SLOTS
        self._groups = self._in_hand + MAX_IN_HAND
        self._group_words = 3 + AHEAD * ENTRY_WORDS
        self._segments = self._groups + MAX_GROUPS * self._group_words
        self._block = self._segments + SEGMENTS * SEGMENT_WORDS
        self.members = size * self._block
        self.roster = self.members + 1 + size
        self._agreed = self.roster + 1 + size
        self.directory = self._agreed + 2 * (1 + size)
        self.queues = self.directory + MAX_GROUPS
        self.returned = self.queues + MAX_QUEUES
        self.rendezvous = self.returned + MAX_RETURNED
        self.any_finished = self.rendezvous + 3
        self.finished_in = self.rendezvous + 5 + 2 * size
        self.closed = self.finished_in + size
        self.keeper_bell = self.closed + 1
        self.words = self.keeper_bell + 1

    def agreed(self, take_in: bool) -> int:
        """The last roster of a kind: its number, then the incarnation of each member, doubled; odd
        if the member was taken in with it."""
        return self._agreed + take_in * (1 + self.size)

    def pid(self, rank: int) -> int:
        """The rank's process."""
        return rank * self._block

    def bell(self, rank: int) -> int:
        """What senders ring; any change means that there may be a message."""
        return rank * self._block + 1

    def starts(self, rank: int) -> int:
        """How many processes the rank has had."""
        return rank * self._block + 2

    def window(self, rank: int, window: int = PUBLISHED) -> int:
        """One of the rank's windows."""
        return rank * self._block + self._window + window * WINDOW_WORDS

    def slot(self, src: int, dst: int, slot: int) -> int:
        """A message of ``src`` to ``dst``."""
        return src * self._block + self._mail + (dst * SLOTS + slot) * SLOT_WORDS

    def receipt(self, src: int, dst: int, slot: int) -> int:
        """What ``dst`` has taken from that slot."""
        return dst * self._block + self._receipts + src * SLOTS + slot

    def in_hand(self, rank: int) -> int:
        """The batches that the rank has drawn and not used yet."""
        return rank * self._block + self._in_hand

    def group(self, rank: int, group: int) -> int:
        """The rank's progress in a group."""
        return rank * self._block + self._groups + group * self._group_words

    def entry(self, rank: int, group: int, number: int) -> int:
        """What the rank brings to the group's collective ``number``."""
        return self.group(rank, group) + 3 + number % AHEAD * ENTRY_WORDS

    def segment(self, rank: int, slot: int) -> int:
        """A segment of a device's memory."""
        return rank * self._block + self._segments + slot * SEGMENT_WORDS

    def segments(self) -> list[int]:
        """All segments of all ranks."""
        return [self.segment(rank, slot) for rank in range(self.size) for slot in range(SEGMENTS)]
