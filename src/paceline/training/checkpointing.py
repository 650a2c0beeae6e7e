"""What one rank does for checkpoints: it saves its state together with all others, and resumes it.

All ranks stand still at a rendezvous while a checkpoint is made. The first worker decides when
(:class:`CallAgreement`); in methods whose workers keep step, each worker also counts the steps by
itself (:class:`CountAgreement`). A worker comes between two batches, after the body of its loop.
The first worker then calls the servers and communicators. Nobody is in the middle of anything, so
what each rank holds, with the messages that wait for it, is the whole state of the run. Each rank
comes in the incarnation in which it was called; if one of these has ended, the rendezvous is given
up. A rank that was not called, because it was lost or comes late, is not in the checkpoint: it
joins the run that resumes from it.

A resumed run calls ``train`` from its top, and catches up (:mod:`.catching_up`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.disk import DISK, Disk
from paceline.checkpoint.states import load_state, pack_state
from paceline.checkpoint.store import Saved, Store
from paceline.comm.ports import Call
from paceline.common.format import size as in_words
from paceline.common.generators import read_generators, write_generators
from paceline.errors import PeerLost, UsageError
from paceline.strategies.place import Staleness

if TYPE_CHECKING:
    from paceline.training.session import Session

_PHASES = 4


class Stopped(BaseException):
    """Ends a rank after the last checkpoint of a run that was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When a run makes checkpoints, and which one it resumes; numbers and texts only.

    Args:
        folder: where the checkpoints are.
        steps: after so many steps of the first worker.
        minutes: after so many minutes of the run's clock.
        resume: the folder of the checkpoint to resume.
    """

    folder: str
    steps: int | None = None
    minutes: float | None = None
    resume: str | None = None


class CallAgreement:
    """Agrees on checkpoints where workers do not keep step: each comes as soon as it is called.

    Attributes:
        rendezvous: where all ranks meet.
        answered: the number of the last call that this rank has answered.
        looked_at: the steps after which it last looked whether a checkpoint is due. There may be
            several steps to a batch, and none is due between them.
    """

    def __init__(self, plan: Plan, session: Session) -> None:
        assert session.ports.rendezvous is not None  # the launcher refuses checkpoints elsewhere
        self._plan, self._session, self._roll = plan, session, session.ports.members
        self.looked_at = session.running.steps
        self._everyone = range(session.ports.size)
        self.rendezvous = session.ports.rendezvous
        self.answered = self.rendezvous.last_call().number  # a late joiner was not called

    def is_regular(self, steps: int) -> bool:
        """Whether one is due after each so many steps, and now, or since it was last looked at."""
        every = self._plan.steps
        return every is not None and steps // every > self.looked_at // every

    def call(self, steps: int, due: bool, stop: bool) -> bool:
        """Of the first worker: call the others, unless a server or communicator is missing."""
        last, others = self.rendezvous.last_call(), self._everyone[self._session.size :]
        due = due or self.is_regular(steps)
        if not due or last.number > self.answered or not {*others} <= {*self._roll.alive()}:
            return False
        over = _PHASES * last.number + _PHASES - 1
        self.rendezvous.call(last.number, max(steps, last.step + 1), stop, over)
        return True

    def after_step(self, steps: int) -> Call | None:
        """The call that this worker has to answer now, after so many of its steps."""
        call, rank = self.rendezvous.last_call(), self._session.rank
        if call.number <= self.answered:
            return None
        self.answered = call.number
        if call.incarnations[rank] == self._roll.incarnation(rank):
            return call
        if call.stop:  # this incarnation came too late to be saved
            raise Stopped
        return None

    def summoned(self, number: int, stop: bool) -> Call | None:
        """The call of this number, on a rank that is no worker; None if a later one replaced it."""
        call = self.rendezvous.last_call()
        return call if call.number == number else None


class CountAgreement(CallAgreement):
    """Agrees on checkpoints where workers keep step: each counts its steps by itself.

    The first worker calls for a step that no worker can have made yet. A rendezvous has the number
    of its step. A worker that a synchronous method has taken in counts the steps of the others. One
    that came later, or again, to another method counts its own: then there are no checkpoints.

    Args:
        drift: how many steps workers can be apart.
    """

    def __init__(self, plan: Plan, session: Session, drift: int) -> None:
        super().__init__(plan, session)
        self._drift = drift

    def call(self, steps: int, due: bool, stop: bool) -> bool:
        last = self.rendezvous.last_call()
        if not due or last.number > self.answered or self._counts_differ():
            return False
        self.rendezvous.call(last.number, steps + self._drift + 1, stop, 0)
        return True

    def after_step(self, steps: int) -> Call | None:
        call = self.rendezvous.last_call()
        called = call.number > self.answered and steps >= call.step
        if self._counts_differ():
            return None
        if called:
            self.answered = call.number
        return (
            self.summoned(steps, called and call.stop) if called or self.is_regular(steps) else None
        )

    def _counts_differ(self) -> bool:
        """Whether workers may count different steps: one was lost, came again, or comes late."""
        if self._session.strategy.synchronous:
            return False
        view, everyone = self._roll.view(), self._everyone
        again = any(view.incarnations[rank] > 1 for rank in everyone)
        return bool(view.lost) or again or len(self._roll.starters) < len(everyone)

    def summoned(self, number: int, stop: bool) -> Call | None:
        """The call of this step; None if others are at a later one, or the method cannot."""
        roster = self._roll.roster(number)
        incarnations = {} if roster is None else dict(roster.members)
        if roster is None or not self._session.strategy.can_stand_still(incarnations):
            return None
        if not self._session.all_ranks.elastic and not {*self._roll.starters} <= {*incarnations}:
            return None  # the loss ends the run, and no checkpoint must lack that rank
        called = tuple(incarnations.get(rank, 0) for rank in self._everyone)
        return Call(number, number, stop, called)


class CheckpointParticipant:
    """What one rank does for checkpoints.

    Args:
        plan: when they are made.
        tell: called with the report on each file of this rank, written or failed.
        disk: where files are written.

    Attributes:
        resumes: whether the run resumes from a checkpoint.
        agreement: with the other ranks, on when to make one.
    """

    def __init__(self, plan: Plan, tell: Callable[[Saved], None], disk: Disk = DISK) -> None:
        self._plan, self._tell, self.resumes = plan, tell, plan.resume is not None
        self._store = Store(Path(plan.folder), disk=disk)
        self._made_s = 0.0
        self._stop_asked = False

    def bind(self, session: Session) -> None:
        """Take part for this rank, a worker or not."""
        self._session, self._clock, self._stepper = session, session.clock, session.running
        self._everyone = range(session.ports.size)
        drift = None if self._stepper.alone else session.strategy.drift
        self.agreement = (
            CallAgreement(self._plan, session)
            if drift is None
            else CountAgreement(self._plan, session, drift)
        )
        self._rendezvous = self.agreement.rendezvous
        if session.rank == 0:
            self._check_room()

    def ask_to_stop(self) -> None:
        """Have a last checkpoint made, after which the run ends."""
        self._stop_asked = True

    # Making one ----------------------------------------------------------------------------------

    def _check_room(self) -> None:
        """Refuse a disk that has no room for two checkpoints; the optimizer's part is a guess."""
        x = self._stepper.replica.flat.x
        needed = 2 * len(self._everyone) * 3 * x.nbytes
        free = shutil.disk_usage(self._plan.folder).free
        if free < needed:
            raise UsageError(
                f"checkpoints in {self._plan.folder} need {in_words(needed)}, and"
                f" {in_words(free)} are free"
            )

    def after_step(self) -> None:
        """Make a checkpoint, if one is due after this step."""
        steps, now_s, minutes = self._stepper.steps, self._clock.now(), self._plan.minutes
        due = self._stop_asked or (minutes is not None and now_s - self._made_s >= 60 * minutes)
        if self._session.leads and self.agreement.call(steps, due, self._stop_asked):
            self._made_s = now_s
        call = self.agreement.after_step(steps)
        self.agreement.looked_at = steps
        if call is not None:
            self._save(call)

    def _save(self, call: Call) -> None:
        session, strategy = self._session, self._session.strategy
        self._stepper.settle()
        if not self._stepper.alone:
            strategy.before_checkpoint(call.number)
        workers = [rank for rank in _members(call) if rank < session.size]
        if self._meet(call, 1, workers):
            if session.rank == workers[0]:
                self._summon(call)
            self._save_together(call)
        self._after_checkpoint()
        self._clock.switch_in()

    def _meet(self, call: Call, phase: int, members: Sequence[int]) -> bool:
        with self._session.recorder.waiting:
            number = _PHASES * call.number + phase
            return self._rendezvous.meet(number, members, call.incarnations)

    def _summon(self, call: Call) -> None:
        """Call the ranks that are no workers; if one is lost, the rendezvous is given up."""
        for rank in self._everyone[self._session.size :]:
            try:
                self._session.served.summon(rank, call.number, call.stop)
            except PeerLost:
                if not self._session.all_ranks.elastic:
                    raise

    def summoned(self, number: int, stop: bool) -> None:
        """Save the state of this rank, which is no worker, together with all others."""
        call = self.agreement.summoned(number, stop)
        if call is not None:
            self._save_together(call)

    def _save_together(self, call: Call) -> None:
        """Save the state of this rank at the same moment as all the others."""
        clock, rank, members = self._clock, self._session.rank, _members(call)
        if not self._meet(call, 2, members):
            return
        clock.switch_in()  # its random generators are saved
        content, now_s = pack_state(self._read(members)), clock.now()
        self._made_s = now_s
        if self._meet(call, 3, members):
            saved = self._store.save_rank(call.step, rank, now_s, content)
            self._tell(replace(saved, ranks=members))
            if call.stop:
                raise Stopped

    def _read(self, members: Sequence[int]) -> dict[str, Any]:
        """All state of this rank; the first rank also saves what all share."""
        session, stepper = self._session, self._stepper
        others = [rank for rank in self._everyone if rank not in members]
        state: dict[str, Any] = {
            "strategy": session.strategy.state_dict(),
            "stale": vars(session.strategy.stale),
            "guard": session.strategy.guard.state(),
            "transport": {
                **self._rendezvous.snapshot(others if session.rank == members[0] else None),
                **session.recorder.state(),
            },
            "generators": read_generators(session.device),
            "pace": stepper.state(),
            "answered": self.agreement.answered,
        }
        if session.rank < session.size:
            session.check_positions()
            state |= session.own_state()
        return state

    # Resuming one -------------------------------------------------------------------------------

    def resume(self) -> None:
        """Restore the state of this rank, together with all others."""
        session = self._session
        state = load_state(Path(self._plan.resume or ""), f"rank{session.rank}")
        session.strategy.load_state_dict(state["strategy"])
        session.strategy.stale = Staleness(**state["stale"])
        session.strategy.guard.load_state(state["guard"])
        self._rendezvous.restore(state["transport"])
        session.recorder.load_state(state["transport"])
        self._stepper.load_state(state["pace"])
        self._made_s, self.agreement.answered = self._clock.now(), state["answered"]
        self.agreement.looked_at = self._stepper.steps
        if session.rank < session.size:
            session.show_again(state)
            session.catching.begin(session.fitted(state), self._after_checkpoint)
        else:
            write_generators(state["generators"], session.device)
        self.await_starters()
        if session.rank >= session.size:
            session.served.server.on_resume()

    def await_starters(self) -> None:
        """Wait until all starters have restored their state."""
        starters = self._session.ports.members.starters
        incarnations = tuple(int(rank in starters) for rank in self._everyone)
        self._meet(Call(incarnations=incarnations), _PHASES - 1, starters)

    def _after_checkpoint(self) -> None:
        if not self._stepper.alone:
            with self._stepper.replica.flat.lent() as x:
                self._session.strategy.after_checkpoint(x)


def _members(call: Call) -> list[int]:
    """The ranks that are called."""
    return [rank for rank, incarnation in enumerate(call.incarnations) if incarnation]
