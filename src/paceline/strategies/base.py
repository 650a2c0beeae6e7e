"""The base of every method: what it says of itself, and what it does, each with a default.

A strategy is one file that reads like its paper: hyper-parameters are fields, checked in
``__post_init__``; state is attributes named in ``state``; the verbs work on flat vectors and a
:class:`~paceline.comm.comm.Comm`. ``docs/writing-a-strategy.md`` walks through one.

Most methods override verbs alone. Methods with servers build on
:class:`~paceline.strategies.served.RoleStrategy`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from paceline.errors import UsageError
from paceline.strategies.about import About
from paceline.strategies.place import Place

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.gradient import Gradient


class Role(NamedTuple):
    """What a rank is.

    Attributes:
        name: of the role.
        home: the worker beside which it belongs, on the same host; None if it may be anywhere.
    """

    name: str
    home: int | None = None


WORKER, SERVER = Role("worker"), Role("server")


class Traits(Place):
    """What a method says of itself.

    Class attributes, or properties where it depends (but not ``state``):
        paper: the reference, in one line.
        about: what users read beside the docstring.
        synchronous: whether workers wait for each other. If so, loaders shard each global batch;
            otherwise workers draw batches from one queue.
        uses_gradient: whether ``step`` reads ``g.vector``; otherwise it is not gathered.
        by_part: whether it reads and writes only ``g.own`` of that. Where there are several
            optimizers, the rest of the vector is not cleared then.
        defers: whether a step may leave work to ``settle``.
        adds_up: whether the update of each worker counts in full; then the learning rate of one
            large batch is to be divided by the number of workers.
        equal_rates: whether replicas are equal only while all workers step with the same learning
            rates. Then rates that differ are an error. Workers of such a method publish nothing:
            what they show each other are their rates.
        divides_anew: whether workers of a synchronous method learn of losses by collectives of all
            ranks; then they divide the data anew.
        fixed_groups: why the user's optimizer cannot get more parameter groups in mid-run; empty
            where it can.
        resumable: whether workers hold all there is of a run, so that :meth:`Worker.save` can.
        state: the attributes of a worker that a checkpoint holds, beside those of base classes.
    """

    paper: ClassVar[str] = ""
    about: ClassVar[About] = About()
    synchronous: ClassVar[bool] = True
    uses_gradient: ClassVar[bool] = True
    by_part: ClassVar[bool] = False
    defers: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False
    equal_rates: ClassVar[bool] = False
    divides_anew: ClassVar[bool] = True
    fixed_groups: ClassVar[str] = ""
    resumable: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ()

    @property
    def drift(self) -> int | None:
        """How many steps workers can be apart; None where one may stand still after any step.

        With a number, workers stand still for a checkpoint after the same step, so that nobody
        waits for another.
        """
        return int(getattr(self, "interval", 1)) if self.synchronous else None

    @property
    def takes_workers_in(self) -> bool:
        """Whether a worker can join in mid-run."""
        return type(self).join is not Strategy.join  # type: ignore[attr-defined]  # a subclass

    def lr_factor(self, workers: int) -> float:
        """The factor for the learning rate of one large batch."""
        return 1 / workers if self.adds_up else 1.0

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint holds."""
        return {name: getattr(self, name) for name in self._state_names()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state that :meth:`state_dict` gave."""
        if set(state) != self._state_names():
            raise UsageError(f"state {sorted(state)} must hold {sorted(self._state_names())}")
        device = self.replica.flat.x.device
        for name, value in state.items():
            setattr(self, name, _moved(value, device))

    def _state_names(self) -> set[str]:
        return {name for cls in type(self).__mro__ for name in vars(cls).get("state", ())}


class Roles(Place):
    """What a method overrides that has ranks beside workers, or whose workers wait in a step."""

    def roles(self, workers: int) -> tuple[Role, ...]:
        """The role of each rank when there are so many workers; workers come first."""
        return (WORKER,) * workers

    def serve(self, x: Tensor) -> None:
        """The whole life of a rank that is not a worker."""
        raise UsageError(f"{type(self).__name__} has roles beside workers, but no serve()")

    def can_stand_still(self, ranks: Collection[int]) -> bool:
        """Whether a synchronous method can make a checkpoint of these ranks, which are all."""
        return len(self.roles(self.workers)) - self.workers == sum(r >= self.workers for r in ranks)

    def before_checkpoint(self, number: int) -> None:
        """Before this worker stands still: let those go who wait for it inside of a step."""

    def after_checkpoint(self, x: Tensor) -> None:
        """After all have stood still, or the run was resumed: do what was put off."""


@dataclass(kw_only=True)
class Strategy(Traits, Roles, ABC):
    """How workers pace each other: the verbs of a worker."""

    def __post_init__(self) -> None:
        """Check the options, and begin with fresh state."""

    def setup(self, x: Tensor) -> None:
        """Before step 0: everyone who is here takes the parameters of rank 0."""
        self.starters().broadcast(x)

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
        """Instead of :meth:`setup`, on a worker that comes later: take what the others have.

        In a synchronous method it has the state of a member by then, and ``x`` of that one.
        """
        raise UsageError(f"{type(self).__name__} takes no worker in mid-run")

    def to_take_in(self) -> int | None:
        """After a step of a synchronous method: whether those who wait are to be taken in now.

        Returns the number of the synchronization, the same on all members; None if nobody waits.
        """
        return self.comm.collectives_done if self.comm.someone_waits else None

    def regrouped(self) -> None:
        """After the user's optimizer has got another parameter group, in mid-run."""

    def grown(self) -> None:
        """After workers were taken in, on each member of a synchronous method."""

    def rejoin(self, x: Tensor) -> None:
        """After the others have gone on without this worker: begin anew, as one that comes late."""
        self.__post_init__()
        self.join(x)

    @abstractmethod
    def step(self, x: Tensor, g: Gradient) -> None:
        """After a gradient is ready."""

    def settle(self, x: Tensor) -> None:
        """Before the parameters are read: finish what :meth:`step` left pending."""

    def answer(self, x: Tensor) -> Tensor:
        """The model that the method answers with; no other rank has to act for it."""
        return x

    def finish(self, x: Tensor) -> None:
        """At the end of this worker's data: flush, and leave the answer in ``x``."""
        x.copy_(self.answer(x))


def _moved(value: Any, device: Any) -> Any:
    """A value of a state with its tensors on ``device``."""
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(each, device) for each in value)
    return value.to(device) if hasattr(value, "to") else value


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


def homes_of(strategy: Strategy, workers: int) -> list[int]:
    """The rank on whose host each rank belongs; its own number where it may be anywhere."""
    roles = strategy.roles(workers)
    return [rank if role.home is None else role.home for rank, role in enumerate(roles)]


def warn_of_long_interval(strategy: Strategy, steps: int) -> None:
    """Warn, once in a run, of an interval that is longer than the steps of a worker."""
    interval = getattr(strategy, "interval", 1)
    if interval > steps > 0 and strategy.workers > 1 and strategy.comm.rank == 0:
        warnings.warn(
            f"interval ({interval}) exceeds the {steps} steps of this run:"
            " workers never exchange before its end",
            stacklevel=2,
        )
