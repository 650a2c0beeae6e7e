"""The laws of runs without gradients: what is at rest stays so, and averages do not leave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.lab.faulttest.watched import Observer, around, close
from paceline.strategies.adpsgd import ADPSGD
from paceline.strategies.cyclic import Cyclic
from paceline.strategies.diloco import DiLoCo
from paceline.strategies.served import GradientServed
from paceline.training.session import Session

_SLACK = 1e-9


class AtRest(Observer):
    """Without gradients servers stand still, AD-PSGD keeps the mean, others stay where they were.

    Workers begin apart from each other. An average lies between the least and the greatest of what
    they began with, in each number; so does all that is made of averages. What the moves of cyclic
    come to, which hold how far apart their workers began, is told by :class:`~.served.Pushes`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._began: dict[int, Tensor] = {}
        self._idle: dict[int, Tensor] = {}
        self._common: Tensor | None = None

    def watches(self) -> bool:
        schedule = self.schedule
        rests = schedule.objective == "still" and schedule.optimizer != "decay"
        method = schedule.method
        moves = isinstance(method, DiLoCo) or (isinstance(method, Cyclic) and method.moves)
        return rests and schedule.workers > 1 and not moves

    def attach(self, session: Session) -> None:
        if session.rank < session.size:
            around(session.strategy, "step", lambda inner, x, g: self._step(session, inner, x, g))
            around(session.strategy, "finish", lambda inner, x: self._finish(session, inner, x))

    def _step(self, session: Session, inner: Any, x: Tensor, g: Tensor | None) -> None:
        if session.rank not in self._began:
            self._began[session.rank] = x.clone()
            if self.scene.life(session.rank) == 1 and not session.transport.late:
                self._common = x - self.schedule.place_of(session.rank)
        inner(x, g)

    def _finish(self, session: Session, inner: Any, x: Tensor) -> None:
        if session.rank not in self._began:
            self._idle[session.rank] = x.clone()
        inner(x)

    def ended(self) -> None:
        if not self._began or self._common is None:
            return
        if isinstance(self.schedule.method, GradientServed):
            self._compare(self._common, "a server without gradients stands still")
        elif isinstance(self.schedule.method, ADPSGD):
            calm = not self.schedule.faults and self.schedule.bad_rank is None
            if calm and len(self._began) == self.schedule.workers:
                mean = torch.stack(list(self._began.values())).mean(0)
                self._compare(mean, "pairs keep the mean of all")
        else:
            self._compare_range()

    def _compare(self, expected: Tensor, law: str) -> None:
        for rank, x in self.scene.finished.items():
            self.scene.check(
                close(x, expected),
                law,
                f"rank {rank} ends with {x.tolist()}, not {expected.tolist()}",
            )

    def _compare_range(self) -> None:
        assert self._common is not None, "the workers have begun"
        for rank, x in self.scene.finished.items():
            own = [self._idle[rank]] if rank in self._idle else []  # if nobody else is left
            began = torch.stack([*self._began.values(), self._common, *own])
            low, high = began.amin(0) - _SLACK, began.amax(0) + _SLACK
            self.scene.check(
                bool(((x >= low) & (x <= high)).all()),
                "averages stay between what they are of",
                f"rank {rank} ends with {x.tolist()}",
            )
