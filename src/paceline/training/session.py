"""One rank in a run, from start to end: it agrees, starts or joins, trains or serves, finishes."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.comm import Comm, Seats
from paceline.comm.metered import MeteredPorts
from paceline.common.generators import read_generators, write_generators
from paceline.errors import (
    CommTimeout,
    LeftBehind,
    PeerLost,
    PeersGone,
    ServingDone,
    Untrained,
    UsageError,
)
from paceline.model.checks import check_sync_batchnorm, check_unwrapped
from paceline.model.flat import Flat
from paceline.model.joined import Joined
from paceline.model.replica import Replica
from paceline.record.result import Metric, OnMetric
from paceline.sim.batching.enrollment import Enrollment
from paceline.strategies.base import Strategy
from paceline.strategies.place import RankListener
from paceline.strategies.served import RoleStrategy
from paceline.training.agreement import check_agreement, facts_of
from paceline.training.buffers import SharedBuffers
from paceline.training.catching_up import CatchingUp
from paceline.training.checkpointing import CheckpointParticipant
from paceline.training.division import renumbered
from paceline.training.growth import Growth
from paceline.training.hooks import Hook, Loads
from paceline.training.loader import PacedLoader, Position
from paceline.training.optimizer import PacedOptimizer
from paceline.training.pending import DrawnBatch, Pass, PendingBatches
from paceline.training.progress import ProgressReport
from paceline.training.shares import Shares
from paceline.training.stepper import Stepper

if TYPE_CHECKING:
    from paceline.sim.compute import Costs
    from paceline.sim.resident import Resident

T = TypeVar("T")
PIECE = 1 << 22
"""How many numbers of the model are compared at a time, at the end."""
PROGRESS_S = 0.25
"""The shortest time between two progress reports of a worker."""


def _ignore(record: Metric) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Who is called with what a rank reports; by default nobody.

    Args:
        metric: a record of ``worker.log``.
        progress: the progress of a worker, a few times a second.
        event: something happened to a rank.
        ready: this rank has completed its setup.
    """

    metric: OnMetric = _ignore
    progress: OnMetric = _ignore
    event: OnMetric = _ignore
    ready: Callable[[], None] = lambda: None


class Session(RankListener):
    """One rank of a run, from its start to its end.

    Args:
        ports: the rank's place in the world.
        strategy: the method, as an object.
        workers: how many there are; ranks from there on serve.
        seed: the run's.
        device: where the model and the batches go.
        resident: of many workers in one process, what they read on their device; None elsewhere.
        costs: what computing takes in virtual time; None where time is real.
        listener: receives the rank's metrics and events.
        elastic: whether the run goes on among those that are left when a rank is lost.
        checkpointing: makes the rank's part of checkpoints, if there are any.
        global_batch: the samples of all workers in a step; None: what their loaders say.
        by_speed: whether the workers' shares of a global batch follow their speeds.
        enroll: has the gradients of this worker computed with those of others.

    Attributes:
        all_ranks: a Comm of workers, servers and communicators.
        catching: how this worker comes to a state that it did not reach by training.
        growth: how a synchronous method takes workers in; None where it does not.
        shares: of a global batch, where they follow the speeds of the workers; None elsewhere.
        model: the user's; of several models, a list of them.
        models: the user's, each by itself.
        may_return: whether this rank may rejoin after it was left behind.
        pending: the batches that were drawn and not used yet.
        epochs, epochs_done: planned, and taken.
        planned_steps: of this worker, where those are planned and not epochs.
        consensus: how far the workers were apart just before the end.
        unseen_batches: how many were lost with their workers.
        epoch_samples: how many samples all workers take in an epoch; None where that is not known.
        told_norm: tells the norm of the gradient as it is now, if who computed it knows that.
    """

    def __init__(
        self,
        ports: MeteredPorts,
        strategy: Strategy,
        *,
        workers: int,
        seed: int,
        device: str = "cpu",
        resident: Resident | None = None,
        costs: Costs | None = None,
        listener: Listener = Listener(),  # noqa: B008 - it is frozen
        elastic: bool = False,
        checkpointing: CheckpointParticipant | None = None,
        global_batch: int | None = None,
        by_speed: bool = False,
        enroll: Callable[[Enrollment], Callable[[], float | None]] | None = None,
    ) -> None:
        self.global_batch = global_batch
        self.rank, self.size, self.seed = ports.rank, workers, seed
        self.ports, self.recorder, self.clock = ports, ports.recorder, ports.clock
        self.strategy = strategy
        self.may_return = self.rank < workers and not strategy.synchronous
        self.device, self.resident = torch.device(device), resident
        starters = ports.members.starters
        some_may_miss = elastic or by_speed or len(starters) < ports.size
        agreed = strategy.synchronous and some_may_miss
        first = [] if ports.members.late else [(rank, 1) for rank in starters]
        self.all_ranks = Comm(ports, elastic=elastic, seats=Seats(first) if agreed else None)
        self.listener, self.checkpointing = listener, checkpointing
        self.consensus: float | None = None
        self.unseen_batches = 0
        self.epoch_samples: int | None = None
        self.epochs: int | None = None
        self.epochs_done = 0.0
        self.planned_steps: int | None = None
        self._own_batches = 0
        self.stepper: Stepper | None = None
        self.model: nn.Module | None = None
        self.models: Sequence[nn.Module] = ()
        self.loaders: dict[int, PacedLoader] = {}
        self.pending = PendingBatches(ports.queue.mark_used, self._forget)
        self.positions: dict[int, Position] = {}
        self.tracked: dict[str, Any] = {}
        self._divides: tuple[Sequence[int], int, tuple[tuple[int, int], ...]] | None = None
        self.catching = CatchingUp(self)
        grows = agreed and elastic and self.rank < workers and strategy.takes_workers_in
        self.growth = Growth(self) if grows else None
        self.shares = Shares(self) if by_speed and self.rank < workers else None
        self.finished = False
        self._enroll = enroll
        self.told_norm: Callable[[], float | None] = lambda: None
        self.costs, self._reported_s, self._stepped = costs, 0.0, False
        self._progress_report = ProgressReport(self)

    # Beginning -----------------------------------------------------------------------------------

    def begin(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], with_frozen: bool
    ) -> list[PacedOptimizer]:
        """Tie models and optimizers to the run; a rank that is no worker serves, and ends."""
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        optimizer = optimizers[0] if len(optimizers) == 1 else Joined(optimizers)
        check_unwrapped(model)
        model.to(self.device)
        alone = self.ports.size == 1  # then this is the plain optimizer, bit for bit
        if not alone:
            check_sync_batchnorm(model, self.strategy.synchronous and self.size == self.ports.size)
        allocate = self.ports.collectives.allocate
        replica = Replica(model, optimizer, allocate, aligned=alone, with_frozen=with_frozen)
        flat = replica.flat
        self.recorder.scale = self.clock.set_model_size(flat.x.nbytes, len(flat.spans))
        stepper = Stepper(self, replica, alone)
        self.stepper, self.model, self.models = stepper, model, models
        self.buffers = SharedBuffers(model, replica, self)
        self.loads = Loads(model, models, stepper, self.settle)
        self.strategy.bind(self.all_ranks, replica, self.size, self.seed, self)
        if self.checkpointing is not None:
            self.checkpointing.bind(self)
        try:
            if not alone:
                self._agree(model, replica)
            if self._resuming is not None and not self.late:
                self._resume(self._resuming, replica.flat.x)
            elif not alone:
                self._start(replica.flat.x)
        except LeftBehind:
            stepper.come_back()
        self.listener.ready()
        stepper.account_first()
        if self.rank >= self.size:
            self._serve(stepper)
        if self._enroll is not None:
            self.told_norm = self._enroll(self._enrollment(model, stepper, with_frozen))
        self.clock.switch_in()
        if not alone and self._enroll is None and self.strategy.uses_gradient:
            replica.gather_early(lambda: stepper.strategy.uses_gradient)
        pairs = zip(optimizers, replica.parts, strict=True)
        return [PacedOptimizer(each, stepper, part) for each, part in pairs]

    def _enrollment(self, model: nn.Module, stepper: Stepper, with_frozen: bool) -> Enrollment:
        """What this worker tells of itself, to have its gradients computed with those of others."""
        flat = stepper.replica.flat
        why_not = "worker.setup was given several models" if len(self.models) > 1 else None
        why_not = "worker.setup was given with_frozen" if with_frozen else why_not
        why_not = "the parameters have several dtypes" if flat.apart else why_not
        return Enrollment(
            model,
            flat.x,
            [(span.parameter, span.start) for span in flat.spans],
            stepper.foresee_s,
            Hook,
            lambda: (flat.g, flat.gradient_parts),
            lambda: stepper.steps,
            why_not,
        )

    @property
    def _resuming(self) -> CheckpointParticipant | None:
        """The participant that resumes a checkpoint, if the run resumes one."""
        checkpointing = self.checkpointing
        return checkpointing if checkpointing is not None and checkpointing.resumes else None

    def _agree(self, model: nn.Module, replica: Replica) -> None:
        """Check that all ranks of the start have the same model, method, seed and version."""
        if not self.late:
            starters = self.all_ranks.group(self.all_ranks.members.starters(), metered=False)
            check_agreement(starters, facts_of(model, replica, self.strategy, self.seed))

    def _resume(self, checkpointing: CheckpointParticipant, x: Tensor) -> None:
        """Resume from a checkpoint, in place of a start."""
        if self.ports.size > 1:
            with self.recorder.paused(), self.ports.uncharged():
                self._set_up()
        checkpointing.resume()

    def _set_up(self) -> None:
        with self._flat.lent() as x:
            self.strategy.setup(x)

    def _start(self, x: Tensor) -> None:
        if not self.late:
            self.buffers.show_first()
            self._set_up()
            if self.rank < self.size:
                self.buffers.take_first()
        elif self.rank < self.size:
            if self._resuming is not None:
                self._resuming.await_starters()
            if self.growth is not None:
                return self.growth.put_off()
            self.join(self.strategy.join, x)
            self.buffers.take_fixed()
            self.buffers.adopt()
            self.ports.members.announce_ready()
            self.tell("joined")
        else:
            facts = self.served.succeed()
            self.ports.members.announce_ready()
            self.tell("succeeded", **facts)

    def join(self, join: Callable[[Tensor], T], x: Tensor) -> T:
        """Join the others, for the first time or again; end, if they have come to their end."""
        others, members = {*range(self.size)} - {self.rank}, self.all_ranks.members
        while True:
            try:
                with self._flat.lent():
                    return join(x)
            except (PeersGone, PeerLost) as error:
                if not others.isdisjoint(members.alive()):
                    raise error from None
                if not others.isdisjoint(members.view().departed):
                    raise ServingDone from None
                members.wait_for_change(error)  # a worker that was only stopped may come back

    @property
    def served(self) -> RoleStrategy:
        """The method, which can have its servers called and followed."""
        if not isinstance(self.strategy, RoleStrategy):
            name = type(self.strategy).__name__
            raise UsageError(f"{name} must be a RoleStrategy to survive the loss of a server")
        return self.strategy

    def _serve(self, stepper: Stepper) -> NoReturn:
        """Serve until no worker is left, and end this rank."""
        self.recorder.account_sends(stepper.history)
        with suppress(PeersGone):
            stepper.keep_up(partial(self.strategy.serve, stepper.replica.flat.x))
        stepper.account(last=True)
        raise ServingDone

    # Batches -------------------------------------------------------------------------------------

    def batch_arrived(self, loop: Pass, batch: DrawnBatch, asked_s: float) -> None:
        """Charge the loading of a batch that a loader returns, and count its samples."""
        training = self.trains
        self.pending.draw(loop, training)
        loop.held.append(batch)
        if self.catching_up:
            return
        place = {"epoch": batch.epoch, "index": batch.number}
        self._take(batch.samples, batch.full, asked_s, place)
        if training and self.stepper is not None:
            loop.samples += batch.samples
            self.epochs_done = max(self.epochs_done, batch.epochs_done)
            self._report_progress()
        self.clock.switch_in()

    def own_batch(self, samples: int) -> None:
        """Charge and count a batch that the script has drawn by itself."""
        if self.global_batch is not None or self.shares is not None:
            option = f"global_batch ({self.global_batch})" if self.global_batch else "batch"
            raise UsageError(f"{option} needs data that worker.setup_dataloaders divides")
        if self.catching_up:
            return
        if self.trains:
            self.pending.own_samples += samples
        self._take(samples, samples, self.clock.now(), {"epoch": 0, "index": self._own_batches})
        self._own_batches += 1
        self.clock.switch_in()

    def _take(self, samples: int, full: int, asked_s: float, place: Metric) -> None:
        """Charge a batch, note it, and count its samples for the next step if one may follow."""
        clock, costs, stepper = self.clock, self.costs, self.stepper
        if costs is not None:
            clock.charge(costs.loading_s(samples, clock.now()))
        load_s = clock.now() - asked_s
        facts: Metric = {**place, "samples": samples, "load_s": load_s}
        if costs is not None and not self.trains:
            facts["forward_s"] = costs.forward_s(samples)
            clock.charge(facts["forward_s"])
        self.recorder.note("batch", **facts)
        if stepper is not None:
            stepper.io_s += load_s
            if self.trains:
                stepper.drew(samples, full)

    @property
    def trains(self) -> bool:
        """Whether a step may be made of a batch that comes now."""
        return torch.is_grad_enabled() and not (self.stepper and self.stepper.paused)

    def _forget(self, samples: int) -> None:
        """Take back samples of a batch that the loop did not train on."""
        if self.stepper is not None:
            self.stepper.forget(samples)

    def between_batches(self) -> None:
        """Between two batches, after a step: make a checkpoint, if one is due; take workers in."""
        if not self._stepped:
            return
        self._stepped = False
        if self.checkpointing is not None:
            self.running.keep_up(self.checkpointing.after_step)
        if self.growth is not None:
            self.growth.after_step()

    def draw(self, queue: int, epoch: int) -> int | None:
        """Draw the number of the next batch; see :class:`~paceline.comm.ports.DataQueue`."""
        while True:
            try:
                return self.ports.queue.draw(queue, epoch)
            except LeftBehind:
                self.running.keep_up(self.ports.members.alive)

    @property
    def progress(self) -> float:
        """The share of the plan that is done, as this worker knows it."""
        if self.epochs is not None:
            return min(1.0, self.epochs_done / self.epochs)
        if self.planned_steps is not None:
            return min(1.0, self.running.steps / self.planned_steps)
        raise UsageError(
            "progress needs a plan: worker.setup_dataloaders(loader, epochs=...), or"
            " worker.plan(steps=...)"
        )

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan, so that :attr:`progress` is known."""
        return (self.epochs or self.planned_steps) is not None

    def _report_progress(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._reported_s + PROGRESS_S:
            self._reported_s = now_s
            self.listener.progress(self._progress_report.make())

    # Around a step -------------------------------------------------------------------------------

    def step_skipped(self) -> None:
        """Count a step that lies before the state that this worker catches up with."""
        self.take_part()
        self.catching.step_skipped()

    def take_part(self) -> None:
        """Of a late joiner of a synchronous method: be taken in, before its first batch or step."""
        if self.growth is not None:
            self.growth.enter()

    def after_step(self) -> None:
        """Mark the batches of the step as used; share buffers; make a checkpoint, if due."""
        self.pending.after_step()
        self.buffers.after_step()
        self._report_progress()
        if self.shares is not None:
            self.shares.after_step()
        if self.checkpointing is not None or self.growth is not None:
            self._stepped = True
            if not any(loader.under_way for loader in self.loaders.values()):
                self.between_batches()

    def rejoin(self, x: Tensor) -> None:
        """Take the state of the others, in a new incarnation."""
        try:
            self.join(self.strategy.rejoin, x)
        except ServingDone:
            self.tell("outlived")
            raise
        self.buffers.adopt()

    def has_returned(self) -> None:
        """Drop what an earlier incarnation left: other workers have its batches by now."""
        self.loads.forget()
        self.pending.drop()
        for loader in self.loaders.values():
            loader.give_up_tickets()
        for span in self.running.replica.flat.spans:
            span.parameter.grad = None
        self.tell("rejoined")

    def settle(self) -> None:
        """Finish what the last step left pending."""
        self.running.settle()
        self.clock.switch_in()

    # Ending --------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Flush what is pending and leave the method's answer in the model. Idempotent."""
        if self.stepper is None or self.finished:
            return
        self.finished = True
        self.pending.close_all()
        self.loads.end(partial(self._come_to_the_end, self.stepper))

    def _come_to_the_end(self, stepper: Stepper) -> None:
        self.take_part()
        self.catch_up()
        if self.all_ranks.seats is not None:
            self.all_ranks.seats.closing = True
        self.ports.queue.mark_finished()
        stepper.settle()
        trained = stepper.steps > 0 if stepper.alone else self._finish_together(stepper)
        stepper.account(last=True)
        stepper.paused = "after worker.finish"
        stepper.replica.release()
        self.recorder.note("finish")
        self.clock.switch_in()
        if stepper.drew_in_vain and not trained:
            raise Untrained(
                "batches were drawn to train with, and no worker made a step: call step() of the"
                " optimizer that worker.setup returned; only to evaluate, use torch.no_grad()"
            )

    def _finish_together(self, stepper: Stepper) -> bool:
        """End with the other workers; return whether any of them made a step, or may have."""
        with self._flat.lent() as x:
            before = x.clone()
        stepper.keep_up(self._finish_strategy, again=True)
        self.unseen_batches = sum(loader.unseen() for loader in self.loaders.values())
        if self.buffers.rest.averaged:
            stepper.keep_up(self.buffers.average, again=True)
        measured = stepper.keep_up(lambda: self._measure(before, stepper.steps), again=True)
        if self.strategy.synchronous:
            with suppress(CommTimeout):
                stepper.keep_up(stepper.rates.at_end, again=True)
        return measured is not False

    def _finish_strategy(self) -> None:
        with self._flat.lent() as x:
            self.strategy.finish(x)

    def _measure(self, x: Tensor, steps: int) -> bool | None:
        """Measure how far the workers are apart, and whether any of them made a step.

        Returns None where that is not known. The distance is the root of the workers' mean square
        distance to their mean, over the norm of the mean.
        """
        try:
            measured = self.strategy.among_live(partial(_spread, x, steps), measuring=True)
        except CommTimeout:
            return None
        norm, square, all_steps, count = measured
        distance = math.sqrt(square / count) / norm if norm else 0.0
        self.consensus = distance if math.isfinite(distance) else None
        return None if count == 1 else all_steps > 0

    # Checkpoints ---------------------------------------------------------------------------------

    @property
    def catching_up(self) -> bool:
        """Whether ``train`` has not reached the checkpoint yet that the run resumes from."""
        return self.stepper is not None and self.stepper.skipping

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the user's objects on this worker."""
        assert self.model is not None
        return {
            "model": self.model.state_dict(),
            "optimizer": self.running.replica.optimizer.state_dict(),
            "rest": self.buffers.state(),
            "tracked": {name: thing.state_dict() for name, thing in self.tracked.items()},
            "loaders": [tuple(loader.position) for loader in self.loaders.values()],
            "epochs_done": self.epochs_done,
            "collectives_done": self.all_ranks.collectives_done,
            "incarnations": dict(self.who_divides()),
            **({} if self.shares is None else {"shares": self.shares.state()}),
            **self._unused_gradients(),
            **({"trained": self._flat.trained()} if self._flat.with_frozen else {}),
        }

    def _unused_gradients(self) -> dict[str, Any]:
        """Between the steps of several optimizers: what one backward has left for the next one."""
        freshness = self.running.freshness
        if freshness is None or any(loader.under_way for loader in self.loaders.values()):
            return {}
        return {"gradients": freshness.unused()}

    def who_divides(self) -> tuple[tuple[int, int], ...]:
        """The workers that divide the data of loaders, as far as all know, and their incarnations.

        Those are the members after the last collective of all workers.
        """
        comm, seats = self.all_ranks, self.all_ranks.seats
        seen = comm.present, 0 if seats is None else seats.version
        if self._divides is None or self._divides[0] is not seen[0] or self._divides[1] != seen[1]:
            taken = {} if seats is None else seats.taken
            members = ((rank, taken.get(rank, 1)) for rank in comm.present if rank < self.size)
            everyone = ((rank, 1) for rank in range(self.size))
            among = tuple(members if self.strategy.divides_anew else everyone)
            self._divides = (*seen, among)
        return self._divides[2]

    def fitted(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state that another run has saved, with the incarnations and collectives of this one."""
        if "incarnations" not in state:  # of an earlier version
            return state
        self.all_ranks.collectives_done = state["collectives_done"]
        then, now = state["incarnations"], dict(self.who_divides())
        places = [Position(*place) for place in state["loaders"]]
        fitted = [
            place
            if place.division is None
            else place._replace(division=renumbered(place.division, then, now))
            for place in places
        ]
        return {**state, "loaders": [tuple(place) for place in fitted]}

    def check_positions(self) -> None:
        """Refuse a position in the data from which no run can resume."""
        loaders = self.loaders.values()
        if any(loader.under_way for loader in loaders):
            return
        if any(loader.sharing == "queue" and loader.epoch for loader in loaders):
            raise UsageError(
                "a checkpoint needs steps to be made inside the loop over a loader whose batches"
                ' come from a queue; or share them out: setup_dataloaders(loader, data="static")'
            )

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restore the user's objects to what :meth:`own_state` returned."""
        replica = self.running.replica
        self._check_trained(state)
        self._load_model(state)
        replica.optimizer.load_state_dict(state["optimizer"])
        replica.optimizer.zero_grad()
        if self.running.freshness is not None:
            self.running.freshness.restore(state.get("gradients", {}))
        for name, thing in self.tracked.items():
            if name not in state["tracked"]:
                raise UsageError(f"the checkpoint has no {name} that worker.track was given")
            thing.load_state_dict(state["tracked"][name])

    @property
    def _flat(self) -> Flat:
        return self.running.replica.flat

    def _check_trained(self, state: dict[str, Any]) -> None:
        """Refuse a state in which other parameters were trained than here."""
        if not self._flat.with_frozen:
            return
        names = [span.name for span in self._flat.spans]
        pairs = zip(names, self._flat.trained(), state.get("trained", ()), strict=False)
        differs = [(name, here) for name, here, there in pairs if here != there]
        groups = len(self.running.replica.optimizer.param_groups)
        if not differs and groups == len(state["optimizer"].get("param_groups", range(groups))):
            return
        found = "the number of parameter groups differs"
        if differs:
            name, here = differs[0]
            found = f"parameter {name} is {'trained' if here else 'frozen'} here, and not there"
        raise UsageError(
            f"the loop has come to another state than was saved: {found}. What it unfreezes must"
            " follow from the epoch, or from worker.steps, and from no counter of its own"
        )

    def _load_model(self, state: dict[str, Any]) -> None:
        assert self.model is not None
        with self.loads.ignored():
            self.model.load_state_dict(state["model"])
        if "rest" in state:  # a checkpoint of an earlier version has none
            self.buffers.load_state(state["rest"])

    def show_again(self, state: dict[str, Any]) -> None:
        """Share the buffers again that others could read when the state was saved."""
        if not (self.running.alone or self.buffers.rest.is_empty):
            self._load_model(state)
            self.buffers.show_again()

    def go_on_from(self, positions: list[Position], epochs_done: float) -> None:
        """Resume all loaders at these positions, also those that are made later."""
        self.positions, self.epochs_done = dict(enumerate(positions)), epochs_done
        for number, loader in enumerate(self.loaders.values()):
            if number in self.positions:
                loader.resume(self.positions[number], self.catching_up)

    def catch_up(self) -> None:
        """Restore the state that this worker catches up with, if there is one."""
        self.catching.arrive()

    @contextmanager
    def for_nothing(self) -> Iterator[None]:
        """Inside, steps are skipped and nothing is recorded; afterwards the state is restored."""
        stepper, state = self.running, copy.deepcopy(self.own_state())
        generators = read_generators(self.device)
        stepper.skipping = True
        try:
            yield
        finally:
            stepper.skipping = False
            self.load_own_state(state)
            write_generators(generators, self.device)

    def summoned(self, number: int, stop: bool) -> None:
        """Save this rank, which is no worker, together with all others."""
        if self.checkpointing is not None:
            self.checkpointing.summoned(number, stop)

    # What others read ------------------------------------------------------------------------

    @property
    def running(self) -> Stepper:
        """The stepper of this rank; an error before ``worker.setup``."""
        if self.stepper is None:
            raise UsageError("call worker.setup(model, optimizer) first")
        return self.stepper

    @property
    def late(self) -> bool:
        """Whether this rank has come, or come again, after the beginning."""
        return self.ports.members.late

    @property
    def leads(self) -> bool:
        """Whether this is the first worker that is not lost: the one that logs and saves."""
        view, seats = self.all_ranks.members.view(), self.all_ranks.seats
        if seats is None:
            return self.rank == 0 or view.lost.issuperset(range(self.rank))
        members = {r for r, number in seats.taken.items() if view.incarnations[r] == number}
        return self.rank in members and (members - view.lost).isdisjoint(range(self.rank))

    @property
    def stopping(self) -> bool:
        """Whether a worker has called ``worker.stop_all``."""
        return self.ports.queue.closed()

    @property
    def set_aside(self) -> bool:
        """Whether this worker's updates count for nothing any more: its loaders have ended."""
        return self.stepper is not None and self.rank in self.strategy.guard.aside

    def measuring(self) -> Comm:
        """A Comm of all workers for what only measures the run: nothing is counted or charged."""
        return self.all_ranks.group(range(self.size), strict=True, metered=False)

    def tell(self, event: str, **facts: Any) -> None:
        """Report an event of this rank for the run's record."""
        self.listener.event({"t": self.clock.now(), "event": event, "rank": self.rank, **facts})


def _spread(x: Tensor, steps: int, workers: Comm) -> tuple[float, float, float, int]:
    """The norm of the mean of all ``x``; the sums of squared distances to it and of steps; the
    number of workers. A large ``x`` is looked at piece by piece."""
    norms, square = [], 0.0
    for part in x.split(PIECE):
        mean = part.clone()
        mean /= workers.all_reduce(mean).weight
        norms.append(float(mean.double().norm()))
        square += float((part - mean).double().square().sum())
    sums = torch.tensor([square, steps], dtype=torch.float64)
    count = workers.all_reduce(sums).weight
    squares, all_steps = sums.tolist()
    return math.hypot(*norms), squares, all_steps, count
