"""Memory that a rank lends to messages and collectives, and takes back when they are done."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.comm.shared.places import Spot
from paceline.comm.shared.rank import SharedRank


@dataclass
class Region:
    """Where a vector lies; ``nbytes`` of it are borrowed and go back later.

    Attributes:
        header: the region of its header, if that is not behind the vector.
        receipts, sequence: it was read when these words have reached this number.
    """

    place: int
    nbytes: int = 0
    header: Region | None = None
    receipts: tuple[int, ...] = ()
    sequence: int = 0

    @property
    def spot(self) -> Spot:
        """Where the vector and the header lie."""
        return Spot(self.place, 0 if self.header is None else self.header.place)


class Regions:
    """The regions of one rank: free ones, and those that a receiver has not read yet."""

    def __init__(self, shared: SharedRank) -> None:
        self._words, self._places = shared.words, shared.places
        self._free: dict[bool, list[Region]] = {False: [], True: []}
        self._lent: list[Region] = []

    def place(self, x: Tensor) -> Region:
        """Where peers can read ``x``: where it lies, or a borrowed copy."""
        offset = self._places.arena.find(x) if x.device.type == "cpu" else None
        return self.copy(x) if offset is None else Region(offset)

    def borrow(self, nbytes: int, like: Tensor | None = None) -> Region:
        """Memory that peers can read: of the host, or of the device where ``like`` lies."""
        self._reclaim()
        device = None if like is None else self._places.device_for(like)
        free = self._free[device is not None]
        fitting = [region for region in free if region.nbytes >= nbytes]
        if fitting:
            region = min(fitting, key=lambda region: region.nbytes)
            free.remove(region)
            return region
        take = self._places.arena.take if device is None else device.take
        return Region(take(nbytes), max(nbytes, 1))

    def copy(self, x: Tensor, header: bytes = b"") -> Region:
        """A borrowed copy of a message."""
        if self._places.device_for(x) is None:
            region = self.borrow(x.nbytes + len(header))
        else:
            region = self.borrow(x.nbytes, x)
            region.header = self.borrow(len(header)) if header else None
        self._places.write(region.spot, x, header)
        return region

    def give_back(self, region: Region) -> None:
        """Let the next message or collective borrow ``region``."""
        if region.header is not None:
            self.give_back(region.header)
            region.header = None
        if region.nbytes:
            self._free[region.spot.on_device].append(region)

    def lend(self, region: Region) -> None:
        """Give a region back as soon as its receipts have come."""
        if region.nbytes:
            self._lent.append(region)

    def _reclaim(self) -> None:
        words = self._words
        read = [r for r in self._lent if all(words[i] >= r.sequence for i in r.receipts)]
        for region in read:
            self._lent.remove(region)
            self.give_back(region)
