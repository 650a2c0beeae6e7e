"""Gossiping SGD in lockstep: all workers gossip at the same step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.strategies.gossip import MODEL, Gossip
from paceline.strategies.pairs import all_picks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class GossipSync(Gossip):
    """Gossip all at once, each worker with the models as they are at the same step.

    All workers make the same draws, so that each knows who has picked it. Before each gossip they
    agree who is there: a worker at the end of its data still answers.
    """

    synchronous = True

    sync: bool = True

    def finish(self, x: Tensor) -> None:
        """Stay with the others until all have come to their end; then take the mean."""
        trained = self.steps > 0
        while self._agree_on_peers(False):
            self.steps += 1
        self.take_mean(x, trained)

    def gossip(self, x: Tensor) -> list[Tensor]:
        peers = self._agree_on_peers(True)
        if not self.is_due():
            return []
        picks = all_picks(self.topology, peers, self.seed, self.steps)
        mine = picks.of.get(self.comm.rank, [])
        by_others = picks.who_picked.get(self.comm.rank, [])
        sources, targets = (mine, by_others) if self.mode == "pull" else (by_others, mine)
        for target in targets:
            self.comm.board.post(x, target, MODEL, self.note())
        return [model for source in sources for model in self._receive_model(source, x)]

    def _receive_model(self, source: int, x: Tensor) -> list[Tensor]:
        model = self.receive(source, x, MODEL)
        trusted = model is not None and self.trusts(source, None, model, x)
        return [model] if model is not None and trusted else []

    def _agree_on_peers(self, trains: bool) -> tuple[int, ...]:
        """The workers that are there; nobody, when all have come to their end."""
        flags = self.replica.flat.x.new_zeros(self.workers).double()
        flags[self.comm.rank] = 1
        anyone = self.comm.all_reduce(flags, int(trains)).weight
        return tuple(rank for rank, flag in enumerate(flags.tolist()) if flag and anyone)
