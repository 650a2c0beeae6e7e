"""The base of every method: six verbs, each with a default.

A strategy is one file that reads like its paper: hyper-parameters are fields, checked in
``__post_init__``; state is attributes named in ``state``; the verbs work on flat vectors and a
:class:`~paceline.comm.comm.Comm`. ``docs/writing-a-strategy.md`` walks through one.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from paceline.errors import PeerLost, UsageError
from paceline.strategies.toolbox.guard import Guard

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.comm import Comm
    from paceline.model.gradient import Gradient
    from paceline.model.replica import Replica

WORKER, SERVER, COMMUNICATOR = "worker", "server", "communicator"

T = TypeVar("T")


@dataclass
class Staleness:
    """How old what was applied was: in updates of a server, or in steps of the reader."""

    count: int = 0
    total: int = 0
    maximum: int = 0
    ages: dict[int, int] = field(default_factory=dict, kw_only=True)

    def note(self, age: int) -> None:
        """Count one more."""
        self.count += 1
        self.total += age
        self.maximum = max(self.maximum, age)
        self.ages[age] = self.ages.get(age, 0) + 1


class RankListener:
    """Hears what a strategy has to tell of its rank; here, nobody does."""

    def tell(self, event: str, **facts: Any) -> None:
        """Hear of something that goes into the run's record."""

    def summoned(self, number: int, stop: bool) -> None:
        """Save this rank, which is no worker, together with all others."""


@dataclass(kw_only=True)
class Strategy(ABC):
    """How workers pace each other.

    Class attributes:
        paper: the reference, in one line.
        synchronous: whether workers wait for each other; shards the data, and not a queue, then.
        defers: whether a step may leave work to :meth:`settle`.
        resumable: whether workers hold all there is of a run, so that :meth:`Worker.save` can.
        state: the attributes that a checkpoint holds.

    Attributes:
        comm: the whole world; ranks below ``workers`` are the workers.
        replica: this rank's model and optimizer.
        workers: how many there are, or will be.
        seed: of the run, for what a method draws.
        stale: how old what this worker applied was.
        guard: judges updates before they are handed on, or taken in.
        listener: hears what goes into the run's record, and of calls to a checkpoint.
    """

    paper: ClassVar[str] = ""
    synchronous: ClassVar[bool] = True
    defers: ClassVar[bool] = False
    resumable: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ()

    # What a method says of itself ----------------------------------------------------------------

    @property
    def uses_gradient(self) -> bool:
        """Whether :meth:`step` reads ``g.vector``; otherwise it is not gathered."""
        return True

    @property
    def equal_rates(self) -> bool:
        """Whether replicas are equal only while all workers step with the same learning rates.

        Then rates that differ are an error. Workers of such a method publish nothing: what they
        show each other are their rates.
        """
        return False

    def roles(self, workers: int) -> tuple[str, ...]:
        """The role of each rank when there are so many workers; workers come first."""
        return (WORKER,) * workers

    def home(self, rank: int, workers: int) -> int:
        """The rank beside which a rank lives in a simulated cluster: in order, after the others."""
        return rank

    def lr_factor(self, workers: int) -> float:
        """What the learning rate of one large batch wants to be multiplied by."""
        return 1.0

    def payload(self, steps: int, nbytes: int, workers: int) -> int | None:
        """The bytes that all ranks together hand to Comm in a run of ``steps`` steps a worker.

        ``nbytes`` is the size of ``x``; None where it depends on chance or timing.
        """
        return None

    # The six verbs -------------------------------------------------------------------------------

    def setup(self, x: Tensor) -> None:
        """Before step 0: everyone who is here takes the parameters of rank 0."""
        self.comm.group(self.comm.starters()).broadcast(x)

    def adopt(self, x: Tensor) -> None:
        """Between :meth:`setup` and step 0, on every worker: begin with other parameters of rank 0.

        A method with roles beside workers, which serve by then, says how.
        """
        if len(self.roles(self.workers)) > self.workers:
            raise UsageError(
                f"{type(self).__name__} has roles beside workers, and cannot load weights after"
                " worker.setup without adopt()"
            )
        self.setup(x)

    def join(self, x: Tensor) -> None:
        """Instead of :meth:`setup`, of a worker that comes later: take what the others have."""
        raise UsageError(f"{type(self).__name__} takes no worker in mid-run")

    def rejoin(self, x: Tensor) -> None:
        """After the others have gone on without this worker: begin anew, as one that comes late."""
        self.__post_init__()
        self.join(x)

    def __post_init__(self) -> None:  # noqa: B027 - a method may have neither
        """Check the options, and begin with fresh state."""

    @abstractmethod
    def step(self, x: Tensor, g: Gradient) -> None:
        """After a gradient is ready."""

    def settle(self, x: Tensor) -> None:  # noqa: B027 - most methods leave nothing pending
        """Before the parameters are read: finish what :meth:`step` left pending."""

    def succeed(self, x: Tensor) -> dict[str, Any]:
        """Instead of :meth:`setup`, of a rank that is no worker and follows one that was lost.

        What it returns, in particular how much was lost, goes into the run's record.
        """
        raise UsageError(f"{type(self).__name__}: nobody can follow a rank that is no worker")

    def serve(self, x: Tensor) -> None:
        """The whole life of a rank that is not a worker."""
        raise UsageError(f"{type(self).__name__} has roles beside workers, but no serve()")

    def answer(self, x: Tensor) -> Tensor:
        """The model that the method answers with; no other rank has to act for it."""
        return x

    def finish(self, x: Tensor) -> None:
        """At the end of this worker's data: flush, and leave the answer in ``x``."""
        x.copy_(self.answer(x))

    def plan(self, steps: int) -> None:
        """Hear how many steps this worker is going to make."""
        interval = getattr(self, "interval", 1)
        if interval > steps > 0 and self.workers > 1 and self.comm.rank == 0:
            warnings.warn(
                f"interval ({interval}) exceeds the {steps} steps of this run:"
                " workers never exchange before its end",
                stacklevel=2,
            )

    # Checkpoints ---------------------------------------------------------------------------------

    @property
    def drift(self) -> int | None:
        """How many steps workers can be apart; None where one may stand still after any step.

        With a number, workers stand still after the same step, so that nobody waits for another.
        """
        return int(getattr(self, "interval", 1)) if self.synchronous else None

    def before_meeting(self, number: int) -> None:  # noqa: B027 - few workers wait for one another
        """Before this worker stands still: let those go who wait for it inside of a step."""

    def go_on(self, x: Tensor) -> None:  # noqa: B027 - likewise
        """After all have stood still: do what was put off for it."""

    def resumed(self) -> None:  # noqa: B027 - few keep a ledger of others
        """Hear that the state of a checkpoint is there again; some workers may not be."""

    def summon(self, rank: int, number: int, stop: bool) -> None:
        """Have a rank that is no worker call ``listener.summoned`` in :meth:`serve`."""
        raise UsageError(
            f"{type(self).__name__} has roles beside workers, and cannot be checkpointed without"
            " summon()"
        )

    # What a method works with --------------------------------------------------------------------

    def bind(
        self,
        comm: Comm,
        replica: Replica,
        workers: int,
        seed: int = 0,
        listener: RankListener | None = None,
    ) -> None:
        """Tie the strategy to its place in a run; called once, before :meth:`setup`."""
        self.comm, self.replica, self.workers, self.seed = comm, replica, workers, seed
        self.stale = Staleness()
        self.listener = listener or RankListener()
        self.guard = Guard(comm.rank, self.listener.tell)
        self._missed: set[int] = set()

    def live_workers(self) -> Sequence[int]:
        """The workers that are here now, this one included, in order."""
        alive = self.comm.alive()
        return alive[: bisect_left(alive, self.workers)]

    def first_workers(self) -> list[int]:
        """The workers that are here from the beginning."""
        return [rank for rank in self.comm.starters() if rank < self.workers]

    def among_live(self, act: Callable[[Comm], T], measuring: bool = False) -> T:
        """Let all workers that are left ``act`` together; again, if one is lost on the way.

        Those who are members when the first worker comes to this are the ones that meet. Who comes
        later, or again, acts alone: some of the others may have passed by without it, and those who
        have not cannot know. What is only ``measuring`` the run counts nowhere, and takes no
        virtual time.
        """
        comm, own = self.comm.off_meter() if measuring else self.comm, self.comm.rank
        workers = [(r, life) for r, life in self.comm.final_roster() if r < self.workers]
        while True:  # only who is missed shrinks the group, so that all come to the same one
            here = [rank for rank, life in workers if self.comm.incarnation(rank) == life]
            left = [rank for rank in here if rank not in self._missed]
            try:
                return act(comm.group(left if own in left else [own], strict=True))
            except PeerLost as error:
                self._missed.update(error.ranks)

    def local_update(self, g: Gradient) -> None:
        """Run the user's own optimizer on the parameters and their gradients, if usable."""
        self.replica.local_update(g)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint holds."""
        return {name: getattr(self, name) for name in self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state that :meth:`state_dict` gave."""
        if set(state) != set(self.state):
            raise UsageError(f"state {sorted(state)} must hold {sorted(self.state)}")
        device = self.replica.flat.x.device
        for name, value in state.items():
            setattr(self, name, value.to(device) if hasattr(value, "to") else value)


def workers_in(strategy: Strategy, size: int) -> int:
    """How many of ``size`` processes are workers under ``strategy``."""
    name = type(strategy).__name__.lower()
    fitting = [n for n in range(1, size + 1) if len(strategy.roles(n)) <= size]
    if not fitting:
        raise UsageError(
            f"{name} with 1 worker needs {len(strategy.roles(1))} processes, got {size}"
        )
    workers = fitting[-1]
    if len(strategy.roles(workers)) != size:
        needs = " or ".join(
            f"{len(strategy.roles(n))} (for {n} workers)" for n in (workers, workers + 1)
        )
        raise UsageError(f"{name} needs {needs} processes, got {size}")
    return workers
