"""The laws of synchronous methods: replicas are equal, and what they step with is the mean."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from paceline.lab.faulttest.training import EPOCHS, samples_of
from paceline.lab.faulttest.watched import Observer, around, close
from paceline.model.gradient import Gradient
from paceline.strategies.diloco import DiLoCo
from paceline.strategies.easgd_sync import EASGDSync
from paceline.strategies.hierarchical import Hierarchical
from paceline.strategies.sasgd import SASGD
from paceline.training.division import part_of
from paceline.training.session import Session


@dataclass
class Contribution:
    """What a worker put into a step or a synchronization: its model before, its contribution."""

    x: Tensor
    contribution: Tensor
    weight: float
    session: Session


class Replicas(Observer):
    """Workers that made the same number of steps have bit-equal replicas."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seen: dict[int, tuple[int, Tensor]] = {}

    def watches(self) -> bool:
        method = self.schedule.method
        synchronizes = isinstance(method, (SASGD, DiLoCo, EASGDSync, Hierarchical))
        synchronizes = synchronizes or self.schedule.name in ("allreduce", "layered")
        return synchronizes and self.schedule.workers > 1 and self.schedule.objective != "still"

    def attach(self, session: Session) -> None:
        if session.rank < session.size:
            around(session.strategy, "step", lambda inner, x, g: self._step(session, inner, x, g))

    def _step(self, session: Session, inner: Any, x: Tensor, g: Gradient) -> None:
        strategy: Any = session.strategy
        shared = self._shared(strategy, x)
        if shared is not None:
            self._compare(session.rank, strategy.steps, shared)
        inner(x, g)

    def _shared(self, strategy: Any, x: Tensor) -> Tensor | None:
        """The vector that all workers must share before this step; None if they may differ."""
        if isinstance(strategy, EASGDSync):
            return strategy.center
        if isinstance(strategy, (SASGD, DiLoCo)):
            return x if strategy.pending == 0 else None
        if isinstance(strategy, Hierarchical):
            return x if strategy.steps % strategy.interval == 0 else None
        return x

    def _compare(self, rank: int, step: int, x: Tensor) -> None:
        if step not in self._seen:
            self._seen[step] = (rank, x.clone())
            return
        first, theirs = self._seen[step]
        self.scene.check(
            torch.equal(x, theirs),
            "replicas are equal",
            lambda: (
                f"before step {step} rank {rank} holds {x.tolist()}, rank {first} {theirs.tolist()}"
            ),
        )

    def ended(self) -> None:
        """All workers finish with the same model."""
        ends = list(self.scene.finished.items())
        for rank, x in ends[1:]:
            self.scene.check(
                torch.equal(x, ends[0][1]),
                "replicas are equal",
                f"rank {rank} ends with {x.tolist()}, rank {ends[0][0]} with {ends[0][1].tolist()}",
            )


class Means(Observer):
    """A step, or a synchronization, takes the weighted mean over the workers that take part."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._parts: defaultdict[int, dict[int, Contribution]] = defaultdict(dict)
        self._after: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)

    def watches(self) -> bool:
        method, schedule = self.schedule.method, self.schedule
        plain = schedule.optimizer in ("sgd", "decay")
        steps = schedule.name in ("allreduce", "layered") and plain
        synchronizes = isinstance(method, Hierarchical) or (isinstance(method, SASGD) and plain)
        return (steps or synchronizes) and schedule.workers > 1 and schedule.objective != "still"

    def attach(self, session: Session) -> None:
        if session.rank >= session.size:
            return
        strategy: Any = session.strategy
        if self.schedule.name in ("allreduce", "layered"):
            around(strategy, "step", lambda inner, x, g: self._step(session, inner, x, g))
        else:
            around(strategy, "synchronize", lambda inner, *a: self._synchronize(session, inner, *a))

    def _step(self, session: Session, inner: Any, x: Tensor, g: Gradient) -> None:
        assert session.stepper is not None
        replica, number = session.stepper.replica, session.stepper.steps
        decay = 0.1 if self.schedule.optimizer == "decay" else 0.0
        after = x - replica.lrs()[0] * (g.vector + decay * x)
        weight = g.samples if g.usable else 0.0
        self._parts[number][session.rank] = Contribution(x.clone(), after, weight, session)
        before = self._parts[number - 1].get(session.rank) if number else None
        if before is not None and before.session is session:
            self._after[number - 1][session.rank] = x.clone()
        inner(x, g)

    def _synchronize(self, session: Session, inner: Any, x: Tensor, weight: int) -> bool:
        number = session.all_ranks.collectives_done
        counted = 0 if session.rank in session.strategy.guard.aside else weight
        self._parts[number][session.rank] = Contribution(x.clone(), x.clone(), counted, session)
        goes_on: bool = inner(x, weight)
        if goes_on and not getattr(session.strategy, "_behind", False):
            self._after[number][session.rank] = x.clone()
        return goes_on

    def ended(self) -> None:
        """The mean contains all who went on after an exchange, and any subset of the others."""
        for number, models in self._after.items():
            parts = self._parts[number]
            after = {rank: x for rank, x in models.items() if parts[rank].weight} or models
            rank, x = next(iter(after.items()))
            self.scene.check(
                any(close(x, mean) for mean in _means(parts, after)),
                "the mean is over the members",
                f"after exchange {number} rank {rank} is at {x.tolist()}; of"
                f" {[(r, p.contribution.tolist(), p.weight) for r, p in parts.items()]}",
            )


class SharedData(Observer):
    """Each sample is trained on once an epoch by those who take part, and never twice for sure.

    What a lost worker did since its last synchronization may count or not.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sure: Counter[int] = Counter()
        self._open: dict[Session, list[int]] = {}

    def watches(self) -> bool:
        schedule = self.schedule
        divided = schedule.data == "auto" and schedule.bad_rank is None and schedule.workers > 1
        return divided and schedule.name in ("allreduce", "sasgd", "diloco", "hierarchical")

    def attach(self, session: Session) -> None:
        self._open[session] = []
        around(session, "batch_arrived", lambda inner, *a: self._arrived(session, inner, *a))
        around(session.strategy, "step", lambda inner, *a: self._acted(session, inner, *a))
        around(session.strategy, "finish", lambda inner, *a: self._acted(session, inner, *a))

    def _arrived(self, session: Session, inner: Any, loop: Any, *more: Any) -> None:
        inner(loop, *more)
        division = loop.loader.division
        if session.catching_up:
            return
        members, used = division._last.members, division.used
        whole = next(batch for batch in division._given if batch.end == used)
        index = [rank for rank, _ in members].index(session.rank)
        self._open[session] += part_of(whole.samples, len(members), index).tolist()

    def _acted(self, session: Session, inner: Any, *x: Any) -> None:
        """A step, or the end: with a collective of all, what came before it counts."""
        before = session.all_ranks.collectives_done
        inner(*x)
        if session.all_ranks.collectives_done > before:
            self._sure.update(self._open[session])
            self._open[session] = []

    def ended(self) -> None:
        maybe = Counter(sample for samples in self._open.values() for sample in samples)
        reported = any(session.unseen_batches for session in self.scene.workers.values())
        for sample in {*self._sure, *maybe, *range(samples_of(self.schedule))}:
            sure, most = self._sure[sample], self._sure[sample] + maybe[sample]
            self.scene.check(
                sure <= EPOCHS and (most >= EPOCHS or reported),
                "samples are seen once",
                f"sample {sample} was seen {sure} to {most} times in {EPOCHS} epochs",
            )


def _means(parts: dict[int, Contribution], after: dict[int, Tensor]) -> Iterator[Tensor]:
    """The means that are allowed: over all, and over all but some of those who did not go on."""
    uncertain = [rank for rank in parts if rank not in after]
    for count in range(len(uncertain) + 1):
        for absent in combinations(uncertain, count):
            present = [part for rank, part in parts.items() if rank not in absent]
            weighted = [(part.contribution, part.weight) for part in present if part.weight]
            total = sum(weight for _, weight in weighted)
            if total:
                yield sum((weight * x for x, weight in weighted), start=0 * weighted[0][0]) / total
            elif present:  # nobody contributes: all stay where they are
                yield present[0].x
