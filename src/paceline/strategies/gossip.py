"""Gossiping SGD: workers average with random peers, two at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from paceline.common.options import at_least
from paceline.common.seeds import stream
from paceline.errors import PeerLost, UsageError
from paceline.strategies.decentralised import (
    Decentralised,
    all_picks,
    average,
    candidates,
    draw,
)

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.gradient import Gradient

MODEL = 1
_REMEMBERED = 1024
"""How many of its own last steps a worker remembers the time of, to tell how old a model is."""


@dataclass(kw_only=True)
class Gossip(Decentralised):
    r"""Gossiping SGD: each worker averages its model with that of a peer picked at random.

    No server, no barrier, no lockstep: to pull, a worker reads what its peer last published; to
    push, it leaves its model with the peer. The peer never waits for it.

    =======  ==========================================================
    symbol   here
    =======  ==========================================================
    tau      ``interval``; or 1 / ``probability`` per step
    theta    the model of a worker
    j        the peer, from ``topology``; never the worker itself
    M        the models pushed to a worker since it last looked
    =======  ==========================================================

    .. math::
        \text{pull: } \theta_i \leftarrow \tfrac{1}{2} (\theta_i + \theta_j), \qquad
        \text{push: } \theta_j \leftarrow \frac{\theta_j + \sum_{m \in M} \theta_m}{1 + |M|}, \qquad
        \theta_i \leftarrow \mathrm{optimizer}(\theta_i, g_i)

    Args:
        mode: ``pull`` the peer's model, or ``push`` one's own.
        sync: all at once, each with the models as they are at the same step.
        interval: steps between gossips.
        probability: of a gossip at each step, instead of every ``interval`` steps.
        order: ``mix_first`` takes the next gradient at the mixed model; ``parallel`` takes gradient
            and mixing from the same model and adds both; ``step_first`` mixes the model after its
            step with the peer's from before.
        topology: who may be picked: ``complete``, ``ring`` or ``exponential``.

    Example:
        >>> import paceline as pl, torch
        >>> def train(worker):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     model, sgd = worker.setup(model, sgd)
        ...     x = torch.tensor([1.0 + worker.rank])
        ...     model(x).backward()  # gradients 1 and 2
        ...     sgd.step()
        ...     worker.log(weight=model.weight.item())
        >>> run = pl.simulate(train, workers=2, strategy="gossip(sync=true)")
        >>> [m["weight"] for m in run.metrics]
        [-1.5, -1.5]

    Faults: a slow worker delays nobody; its peers read an older model. One that is dead or stopped,
    or has come to the end of its data, is not picked, and a ring closes over its place. A worker
    that comes late takes the model of a live peer and takes part. With ``sync``, a slow worker
    slows all, a lost one ends the run, naming it, or is left out with ``on_loss="continue"``.

    Bytes: one model and 16 bytes for each gossip, whatever the number of workers; with ``sync``
    also 8 bytes per worker and step; and one model each at the end, for the mean.

    When to use: machines that differ or die, links with no center. The learning rate is that of a
    worker's own batch (factor 1 or less). The answer is the mean of all workers; a single one is
    several points worse when they are many.

    Reference: Jin, Yuan, Iandola, Keutzer, "How to scale distributed deep learning?", 2016.
    ``parallel`` and ``step_first`` are the orders of public implementations.
    """

    paper: ClassVar[str] = "Jin, Yuan, Iandola, Keutzer, 2016"
    state: ClassVar[tuple[str, ...]] = ("steps", "step_times")

    mode: Literal["pull", "push"] = "pull"
    sync: bool = False
    interval: int = 1
    probability: float | None = None
    order: Literal["mix_first", "parallel", "step_first"] = "mix_first"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("interval", self.interval, 1)
        if self.probability is not None and not 0 < self.probability <= 1:
            raise UsageError(f"probability ({self.probability}) must be above 0 and at most 1")
        if self.probability is not None and self.interval != 1:
            raise UsageError("probability must not be given together with interval")
        self.step_times: list[float] = []

    @property
    def synchronous(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        return self.sync

    @property
    def _is_read(self) -> bool:
        """Whether peers read this worker's model at moments of their own."""
        return self.mode == "pull" and not self.sync

    def payload(self, steps: int, nbytes: int, workers: int) -> int | None:
        if self.probability is not None or not self.sync:
            return None
        first = int(self.order == "mix_first")
        gossips = sum(step % self.interval == 0 for step in range(first, steps + first))
        flags = 8 * workers * steps
        return workers * (2 * nbytes + flags + gossips * self.exchange_bytes(nbytes))

    def step(self, x: Tensor, g: Gradient) -> None:
        if self.order == "mix_first":  # the next gradient is taken at the mixed model
            self._local_step(g)
            if self._is_read:  # while this worker waits for the model of its peer
                self.show(x)
            average(x, self._gossip(x))
        elif self.order == "parallel":
            theirs = self._gossip(x)
            mixed = x.clone()
            average(mixed, theirs)
            mixed.sub_(x)
            self._local_step(g)
            x.add_(mixed)
        else:
            theirs = self._gossip(x)
            self._local_step(g)
            average(x, theirs)
        self.show(x)  # what peers read is the model after its last mixing

    def finish(self, x: Tensor) -> None:
        trained = self.steps > 0
        if self.sync:
            while self._meet(False):  # keep the others company until all have come to their end
                self.steps += 1
        self.take_mean(x, trained)

    def _local_step(self, g: Gradient) -> None:
        self.local_update(g)
        self.steps += 1
        self.step_times = [*self.step_times[-_REMEMBERED:], self.comm.now()]

    # What is due, and with whom ------------------------------------------------------------------

    def _gossip(self, x: Tensor) -> list[Tensor]:
        """The models to average with now, if any."""
        if self.sync:
            return self._swap(x, self._meet(True))
        peer = self._pick(self.partners()) if self._is_due() else None
        if self.mode == "pull":
            return [] if peer is None else self._look_at(peer, x)
        if peer is not None:
            self.comm.post(self.wrap(x), peer, MODEL)
        arrived = self.comm.poll(self.like(x), MODEL)
        return [model for src, message in arrived for model in self._open(src, message, x)]

    def _is_due(self) -> bool:
        if self.probability is None:
            return self.steps % self.interval == 0
        whose = () if self.sync else (self.comm.rank,)  # with sync, all draw alike
        draw = stream(self.seed, "gossip now", *whose, self.steps).random()
        return bool(draw < self.probability)

    def _pick(self, peers: Sequence[int]) -> int | None:
        rank = self.comm.rank
        return draw(candidates(self.topology, peers, rank), self.seed, rank, self.steps)

    # All at once ---------------------------------------------------------------------------------

    def _meet(self, active: bool) -> list[int]:
        """Those that are still training; nobody, when all have come to their end."""
        flags = self.replica.flat.x.new_zeros(self.workers).double()
        flags[self.comm.rank] = 1
        anyone = self.comm.all_reduce(flags, int(active))
        return [rank for rank, flag in enumerate(flags.tolist()) if flag] if anyone else []

    def _swap(self, x: Tensor, peers: list[int]) -> list[Tensor]:
        """Exchange models as this step's draws of all ``peers`` say."""
        if not self._is_due():
            return []
        picks = all_picks(self.topology, tuple(peers), self.seed, self.steps)
        mine = picks.of.get(self.comm.rank, [])
        by_others = picks.who_picked.get(self.comm.rank, [])
        sources, targets = (mine, by_others) if self.mode == "pull" else (by_others, mine)
        for target in targets:
            self.comm.post(self.wrap(x), target, MODEL)
        models = []
        for source in sources:
            try:
                model = self.unwrap(self.comm.recv(self.like(x), source, MODEL), x)[1]
            except PeerLost:
                if not self.comm.elastic:
                    raise
                continue
            if self.trusts(source, model - x, model, x):
                models.append(model)
        return models

    # Models that arrive --------------------------------------------------------------------------

    def _look_at(self, peer: int, x: Tensor) -> list[Tensor]:
        seen = self.comm.peek(peer, self.like(x))
        return [] if seen is None else self._open(peer, seen[1], x)

    def _open(self, peer: int, message: Tensor, x: Tensor) -> list[Tensor]:
        """The model in a message, if it can be trusted; note how old it is."""
        note, model = self.unwrap(message, x)
        if not self.trusts(peer, model - x, model, x):
            return []
        self.stale.note(len(self.step_times) - bisect_right(self.step_times, note.time_s))
        return [model]
