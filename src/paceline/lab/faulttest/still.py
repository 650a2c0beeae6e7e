"""The laws of runs without gradients: servers do not move, and averages stay in range."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.lab.faulttest.watched import Observer, around, close
from paceline.model.gradient import Gradient
from paceline.strategies.adpsgd import ADPSGD
from paceline.strategies.cyclic import Cyclic
from paceline.strategies.diloco import DiLoCo
from paceline.strategies.served import PushStrategy
from paceline.training.session import Session

_SLACK = 1e-9


class AtRest(Observer):
    """Without gradients servers do not move, AD-PSGD keeps the mean, and averages stay in range.

    Workers start with different models. Each number of an average lies between the smallest and
    the largest that they started with; so does everything computed from averages. The moves of
    cyclic contain the differences at the start: :class:`~.served.Pushes` checks them.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._starts: dict[int, Tensor] = {}
        self._idle: dict[int, Tensor] = {}
        self._common: Tensor | None = None

    def watches(self) -> bool:
        schedule = self.schedule
        no_updates = schedule.objective == "still" and schedule.optimizer != "decay"
        method = schedule.method
        moves = isinstance(method, DiLoCo) or (isinstance(method, Cyclic) and method.moves)
        return no_updates and schedule.workers > 1 and not moves

    def attach(self, session: Session) -> None:
        if session.rank < session.size:
            around(session.strategy, "step", lambda inner, x, g: self._step(session, inner, x, g))
            around(session.strategy, "finish", lambda inner, x: self._finish(session, inner, x))

    def _step(self, session: Session, inner: Any, x: Tensor, g: Gradient) -> None:
        if session.rank not in self._starts:
            self._starts[session.rank] = x.clone()
            if self.scene.incarnation(session.rank) == 1 and not session.late:
                self._common = x - self.schedule.data_index(session.rank)
        inner(x, g)

    def _finish(self, session: Session, inner: Any, x: Tensor) -> None:
        if session.rank not in self._starts:
            self._idle[session.rank] = x.clone()
        inner(x)

    def ended(self) -> None:
        if not self._starts or self._common is None:
            return
        if isinstance(self.schedule.method, PushStrategy):
            self._compare(self._common, "a server without gradients stands still")
        elif isinstance(self.schedule.method, ADPSGD):
            calm = not self.schedule.faults and self.schedule.bad_rank is None
            if calm and len(self._starts) == self.schedule.workers:
                mean = torch.stack(list(self._starts.values())).mean(0)
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
        assert self._common is not None, "the workers have started"
        for rank, x in self.scene.finished.items():
            idle = [self._idle[rank]] if rank in self._idle else []  # it may be the only one left
            starts = torch.stack([*self._starts.values(), self._common, *idle])
            low, high = starts.amin(0) - _SLACK, starts.amax(0) + _SLACK
            self.scene.check(
                bool(((x >= low) & (x <= high)).all()),
                "averages stay between what they are of",
                f"rank {rank} ends with {x.tolist()}",
            )
