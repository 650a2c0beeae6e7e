"""Memory that a rank lends to messages and collectives, and takes back when they are done."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.comm.shared.rank import SharedRank


@dataclass
class Region:
    """Where a vector lies in the arena; ``nbytes`` of it are borrowed and go back later."""

    offset: int
    nbytes: int = 0
    receipt: int = 0
    sequence: int = 0


class Regions:
    """The regions of one rank: free ones, and those that a receiver has not read yet."""

    def __init__(self, shared: SharedRank) -> None:
        self._words, self._arena = shared.words, shared.arena
        self._free: list[Region] = []
        self._lent: list[Region] = []

    def place(self, x: Tensor) -> Region:
        """Where peers can read ``x``: where it lies, or a borrowed copy."""
        offset = self._arena.find(x) if x.device.type == "cpu" else None
        return self.copy(x) if offset is None else Region(offset)

    def borrow(self, nbytes: int) -> Region:
        """Memory that peers can read."""
        self._reclaim()
        fitting = [region for region in self._free if region.nbytes >= nbytes]
        if fitting:
            region = min(fitting, key=lambda region: region.nbytes)
            self._free.remove(region)
            return region
        return Region(self._arena.take(nbytes), max(nbytes, 1))

    def copy(self, x: Tensor, header: bytes = b"") -> Region:
        """A borrowed copy of a message."""
        region = self.borrow(x.nbytes + len(header))
        self._arena.write(region.offset, x, header)
        return region

    def give_back(self, region: Region) -> None:
        """Let the next message or collective borrow ``region``."""
        if region.nbytes:
            self._free.append(region)

    def lend(self, region: Region) -> None:
        """Give a region back as soon as its receipt has come."""
        if region.nbytes:
            self._lent.append(region)

    def _reclaim(self) -> None:
        read = [r for r in self._lent if self._words[r.receipt] >= r.sequence]
        for region in read:
            self._lent.remove(region)
            self.give_back(region)
