"""Gossiping SGD: workers average with random peers, two at a time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.comm.ports import Message
from paceline.common.options import at_least, one_of
from paceline.common.seeds import stream
from paceline.errors import UsageError
from paceline.strategies.about import About
from paceline.strategies.pairs import Note, PairStrategy, average, pick

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.gradient import Gradient

MODEL = 1
_REMEMBERED = 1024
"""How many of its own last steps a worker remembers the time of, to tell how old a model is."""


@dataclass(kw_only=True)
class Gossip(PairStrategy):
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
    """

    paper = "Jin, Yuan, Iandola, Keutzer, 2016"
    about = About(
        faults="""A slow worker delays nobody; its peers read an older model. One that is dead
        or stopped, or has come to the end of its data, is not picked, and a ring closes over
        its place. A worker that comes late takes the model of a live peer and takes part. With
        sync, a slow worker slows all, a lost one ends the run, naming it, or is left out with
        on_loss="continue".""",
        bytes="""One model and 16 bytes for each gossip, whatever the number of workers; with
        sync also 8 bytes per worker and step; and one model each at the end, for the mean.""",
        when_to_use="""Machines that differ or die, links with no center. The learning rate is
        that of a worker's own batch (factor 1 or less). The answer is the mean of all workers;
        a single one is several points worse when they are many.""",
        reference="""Jin, Yuan, Iandola, Keutzer, "How to scale distributed deep learning?",
        2016. parallel and step_first are the orders of public implementations.""",
    )
    synchronous = False
    state = ("step_times",)

    mode: Literal["pull", "push"] = "pull"
    sync: bool = False
    interval: int = 1
    probability: float | None = None
    order: Literal["mix_first", "parallel", "step_first"] = "mix_first"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("sync", self.sync, [self.synchronous])  # its other value is another class
        at_least("interval", self.interval, 1)
        if self.probability is not None and not 0 < self.probability <= 1:
            raise UsageError(f"probability ({self.probability}) must be above 0 and at most 1")
        if self.probability is not None and self.interval != 1:
            raise UsageError("probability must not be given together with interval")
        self.step_times: list[float] = []

    def step(self, x: Tensor, g: Gradient) -> None:
        if self.order == "mix_first":  # the next gradient is taken at the mixed model
            self._local_step(g)
            if self.mode == "pull" and not self.sync:  # peers read at moments of their own
                self.show(x)
            average(x, self.gossip(x))  # theta_i <- (theta_i + theta_j) / 2
        elif self.order == "parallel":
            theirs = self.gossip(x)
            mixed = x.clone()
            average(mixed, theirs)
            mixed.sub_(x)
            self._local_step(g)
            x.add_(mixed)
        else:
            theirs = self.gossip(x)
            self._local_step(g)
            average(x, theirs)
        self.show(x)  # what peers read is the model after its last mixing

    def finish(self, x: Tensor) -> None:
        self.take_mean(x, self.steps > 0)

    def _local_step(self, g: Gradient) -> None:
        self.local_update(g)  # theta_i <- optimizer(theta_i, g_i)
        self.steps += 1
        self.step_times = [*self.step_times[-_REMEMBERED:], self.comm.clock.now()]

    def is_due(self, *drawers: int) -> bool:
        """Whether to gossip after this step; one draw decides for all ``drawers``."""
        if self.probability is None:
            return self.steps % self.interval == 0
        draw = stream(self.seed, "gossip now", *drawers, self.steps).random()
        return bool(draw < self.probability)

    def gossip(self, x: Tensor) -> list[Tensor]:
        """Exchange models, if that is due now; return those to average with."""
        peer = self._pick_peer() if self.is_due(self.comm.rank) else None
        if self.mode == "pull":
            seen = None if peer is None else self.comm.board.peek(peer, x)
            arrived = [] if peer is None or seen is None else [Message(peer, seen.x, seen.header)]
        else:
            if peer is not None:
                self.comm.board.post(x, peer, MODEL, self.note())
            arrived = self.comm.board.poll(x, MODEL)
        return [message.x for message in arrived if self._admits(message, x)]

    def _pick_peer(self) -> int | None:
        return pick(self.topology, self.partners(), self.seed, self.comm.rank, self.steps)

    def _admits(self, message: Message, x: Tensor) -> bool:
        """Whether the model in a message can be trusted; if so, count how old it is."""
        if not self.trusts(message.src, None, message.x, x):
            return False
        written_s = Note.of(message.header).time_s
        self.stale.note(len(self.step_times) - bisect_right(self.step_times, written_s))
        return True
