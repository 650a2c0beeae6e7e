"""The laws of methods without a center: averages are right, and moves between two cancel out."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from paceline.comm.ports import Published
from paceline.lab.faulttest.watched import Observer, around, close
from paceline.model.gradient import Gradient
from paceline.strategies.adpsgd import ADPSGD, MOVE
from paceline.strategies.gossip import MODEL, Gossip
from paceline.strategies.pairs import PairStrategy
from paceline.training.session import Session


class Averages(Observer):
    """Gossip: after a step a worker is at the mean of its own model and those that it received.

    AD-PSGD: a worker moves by its own step, plus the moves that it received, minus the moves that
    it sent: what one loses the other gains.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._received: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._sent: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._local: dict[int, tuple[Tensor, Tensor]] = {}

    def watches(self) -> bool:
        return isinstance(self.schedule.method, PairStrategy) and self.schedule.workers > 1

    def attach(self, session: Session) -> None:
        around(session.strategy, "step", lambda inner, x, g: self._step(session, inner, x, g))
        around(session.strategy, "local_update", lambda inner, g: self._update(session, inner, g))

    def took(self, rank: int, src: int, tag: int, x: Tensor) -> None:
        if tag == (MODEL if isinstance(self.schedule.method, Gossip) else MOVE):
            self._received[rank].append(x.clone())

    def peeked(self, rank: int, src: int, seen: Published) -> None:
        self._received[rank].append(seen.x.clone())

    def posted(self, src: int, dst: int, tag: int, x: Tensor) -> None:
        if isinstance(self.schedule.method, ADPSGD) and tag == MOVE:
            self._sent[src].append(x.clone())

    def _update(self, session: Session, inner: Any, g: Gradient) -> None:
        assert session.stepper is not None
        x = session.stepper.replica.flat.x
        before = x.clone()
        inner(g)
        self._local[session.rank] = (before, x.clone())

    def _step(self, session: Session, inner: Any, x: Tensor, g: Gradient) -> None:
        rank, before = session.rank, x.clone()
        self._received[rank].clear()
        self._sent[rank].clear()
        inner(x, g)
        expected = self._expected(session, before)
        self.scene.check(
            close(x, expected),
            "an average is over all that took part",
            lambda: (
                f"rank {rank} is at {x.tolist()} and not {expected.tolist()}, after"
                f" {[v.tolist() for v in self._received[rank]]} received"
            ),
        )

    def _expected(self, session: Session, before: Tensor) -> Tensor:
        received, sent = self._received[session.rank], self._sent[session.rank]
        start, end = self._local[session.rank]
        if isinstance(session.strategy, ADPSGD):
            moved = end - start
            return before + moved + sum(received, torch.zeros_like(before)) - sum(sent, 0 * before)
        assert isinstance(session.strategy, Gossip)
        if session.strategy.order == "parallel":
            return end + (torch.stack([before, *received]).mean(0) - before)
        return torch.stack([end, *received]).mean(0)
