"""For methods whose workers make offers to peers, and wait for no answer.

An offer is open until its peer answers it. A peer that is lost never does, and its next incarnation
never saw the offer: such offers are forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.strategies.pairs import PairStrategy

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.comm import Comm


@dataclass(kw_only=True)
class OfferStrategy(PairStrategy):
    """A method of pairs with open offers."""

    synchronous = False
    state = ("open",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._open: dict[int, int] = {}

    @property
    def open(self) -> dict[int, int]:
        """The peers that have still to answer, each with its incarnation."""
        self._forget_lost(self.comm.members.alive())
        return self._open

    @open.setter
    def open(self, saved: dict[int, int]) -> None:
        """Take up saved offers; of workers that were not saved, none. All are in incarnation 1."""
        self._open = {peer: 1 for peer in saved if peer in self.comm.members.starters()}

    def free_partners(self) -> Sequence[int] | None:
        """The workers to pick a peer from; None while one of them has still to answer.

        A peer that has come to its end since it got an offer answers at the very end. Such an offer
        does not keep this worker from making another.
        """
        self._forget_lost(self.live_workers())
        partners = self.partners()
        return partners if self._open.keys().isdisjoint(partners) else None

    def offer(self, x: Tensor, peer: int, tag: int) -> None:
        """Make an offer; nothing happens when the peer's mailbox is full."""
        incarnation = self.comm.members.incarnation(peer)
        if self.comm.board.post(x, peer, tag, self.note()):
            self._open[peer] = incarnation

    def answered(self, peer: int) -> None:
        """Close the offer to a peer."""
        self._open.pop(peer, None)

    def count_open(self, workers: Comm) -> int:
        """How many offers among these workers are open; one that joined too late answers nobody."""
        if workers.size == 1:  # nobody waits with it until its offers are answered
            return 0
        self._forget_lost(set(workers.ranks).intersection(self.comm.members.alive()))
        waited_for = self.replica.flat.x.new_zeros(1)  # summed to let time pass; the weight counts
        return workers.all_reduce(waited_for, len(self._open)).weight

    def _forget_lost(self, live: Collection[int]) -> None:
        for peer, incarnation in [*self._open.items()]:
            if peer not in live or self.comm.members.incarnation(peer) != incarnation:
                del self._open[peer]
