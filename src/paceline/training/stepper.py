"""One worker's step: charge its time, gather its gradient, let the strategy act."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline.errors import LeftBehind, Outlived, UsageError
from paceline.model.gradient import Gradient
from paceline.model.part import WHOLE, Part
from paceline.model.replica import Replica
from paceline.record.history import History
from paceline.strategies.toolbox.device_guard import WHAT, DeviceGuard
from paceline.strategies.toolbox.guard import glance, is_sound, norm
from paceline.training.freshness import Freshness
from paceline.training.rates import Rates

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.training.session import Session


T = TypeVar("T")


class Mark(NamedTuple):
    """A moment on the run's clock and the wall's, and what its worker had done by then."""

    time_s: float
    wall_s: float
    wait_s: float
    io_s: float = 0.0
    samples: int = 0


class Stepper:
    """What happens between ``optimizer.step()`` and its return.

    Args:
        session: of this rank; it is called before and after each step.
        replica: this rank's model and optimizer.
        alone: whether this is the only worker: then no method has anything to do.

    Attributes:
        io_s: how long this worker has waited for its data.
        batch_size: the samples of a full batch.
        rejoined: how often it was left behind, and came back.
        lr: the learning rate that it began with.
        history: its samples and bytes after each step.
        rates: its learning rates, beside those of others.
        max_norm: the norm that the next step clips its gradient to; None where it does not.
        freshness: which gradients are new, where there are several optimizers.
        skipping: whether steps are not made: they lie before the checkpoint that the run goes on
            from.
    """

    def __init__(self, session: Session, replica: Replica, alone: bool) -> None:
        self.strategy, self.replica, self.alone = session.strategy, replica, alone
        self.steps = self.samples = 0
        self.io_s = 0.0
        self.rejoined = 0
        self.lr = replica.lrs()[0]
        self.history = History()
        self.rates = Rates(self.strategy, replica)
        self.max_norm: float | None = None
        self._device_guards: dict[int, DeviceGuard] = {}
        self.first: Mark | None = None
        self.warm: Mark | None = None
        self.last: Mark | None = None
        self.paused: str | None = None
        self.syncing, self.skipping = True, False
        self._session, self._costs = session, session.costs
        self._clock, self._recorder = session.clock, session.recorder
        self._drawn = self._weight = self.batch_size = 0
        self.freshness = Freshness(replica) if replica.several else None

    def drew(self, samples: int, full_batch: int) -> None:
        """Count a batch towards the next step."""
        self._drawn += samples
        self.batch_size = max(self.batch_size, full_batch)

    def forget(self, samples: int) -> None:
        """Take back a batch that the loop did not train on."""
        self._drawn -= samples

    @property
    def drew_in_vain(self) -> bool:
        """Whether there were batches to train with, but no step was made."""
        return self._drawn > 0 and self.steps == 0

    def foresee_s(self) -> float | None:
        """How long the next step's gradient takes at least, in virtual time.

        None where no step may follow.
        """
        if self._costs is None or self.paused or self.skipping:
            return None
        return self._costs.foresee_s(self._session.pending.samples)

    def step(self, overflow: bool, part: Part = WHOLE) -> None:
        """Make one step of the strategy with the gradients that a part has now."""
        if self.paused:
            raise UsageError(f"optimizer.step() must not be called {self.paused}")
        self._session.pending.before_step()
        if self.skipping:
            self._session.step_skipped()
            return
        self._session.loads.check_step()
        samples, self._drawn = self._drawn, 0
        self._weight = samples or self._weight  # without new ones, it is the last batch again
        self.batch_size = max(self.batch_size, samples)
        shares = self._session.shares
        if shares is not None:
            shares.await_device()
        begin = self._mark()
        self.first = self.first or begin
        self.replica.flat.check()
        charged_s = None
        try:
            charged_s = self._begin(part)
            g = Gradient(
                samples=self._weight or 1, overflow=overflow, max_norm=self.max_norm, part=part
            )
            if part is WHOLE:
                self._act(g)
            else:
                with self._only(part):
                    self._act(g)
        except LeftBehind:
            self.come_back()
        if self.freshness is not None:
            self.freshness.after_step(part)
        if charged_s is None:  # it was left behind while it computed its gradient
            charged_s = self._clock.charged_s
        self.max_norm = None
        self.samples += samples
        self.last = self._mark()
        step_s, wait_s = self.last.time_s - begin.time_s, self.last.wait_s - begin.wait_s
        apply_s = step_s - wait_s
        if self._costs is not None:
            apply_s = self._clock.charged_s - charged_s
        self._recorder.note(
            "step", step=self.steps, samples=samples, step_s=step_s, wait_s=wait_s, apply_s=apply_s
        )
        if shares is not None:
            shares.note(samples, self.last.time_s - self.last.wait_s)
        self.steps += 1
        self.history.note(self.last.time_s, self.samples, self._recorder.meter.bytes_sent)
        self._session.after_step()
        self.warm = self.warm or self.last
        self._clock.switch_in()

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Have the optimizer train more parameters of the model."""
        if self.paused:
            raise UsageError(f"add_param_group must not be called {self.paused}")
        why = "" if self.alone else self.strategy.fixed_groups
        if self.replica.several:
            why = "with several optimizers, the parameters of each have their place"
        if why:
            raise UsageError(
                f"add_param_group must be called before worker.setup: {why}. Give the optimizer the"
                " frozen parameters as a group of their own, and"
                " worker.setup(model, optimizer, with_frozen=True); then unfreeze them later"
            )
        self._session.settle()
        self.replica.add_param_group(group)
        if not self.alone:
            self.strategy.regrouped()

    def _begin(self, part: Part) -> float:
        """Let the time of the gradient pass; return what has been charged by then.

        A gradient that came with that of another step has been charged.
        """
        self._clock.begin_step(self.steps)
        is_new = self.freshness is None or self.freshness.is_new(part)
        if self._costs is not None and is_new:
            self._clock.charge(self._costs.gradient_s(self._weight or self.batch_size))
        return self._clock.charged_s

    def _only(self, part: Part) -> AbstractContextManager[None]:
        """Inside, only this part has gradients."""
        if self.alone or not self.syncing:
            return nullcontext()
        clear = self.strategy.uses_gradient and not self.strategy.by_part
        return self.replica.flat.only(part, clear)

    def _act(self, g: Gradient) -> None:
        if self.alone or not self.syncing:
            self.replica.local_update(g)
            return
        if self.replica.flat.apart:
            with self.replica.flat.lent() as x:
                self._exchange(x, g)
        else:
            self._exchange(self.replica.flat.x, g)

    def _exchange(self, x: Tensor, g: Gradient) -> None:
        self.strategy.settle(x)
        self.strategy.step(x, self._judged(self._gathered(g)))
        if self.strategy.synchronous:
            self.rates.after_step(self.steps + 1)

    def _gathered(self, g: Gradient) -> Gradient:
        """The gradient with its vector, if the method asks for it."""
        if not self.strategy.uses_gradient:
            return g
        flat = self.replica.flat
        self._clock.charge_gather(flat.x.nbytes)
        gathered = flat.gather(g.part)
        if not self.replica.several:
            self._session.ports.collectives.expect(gathered)
        return replace(g, gathered=gathered, present=flat.present())

    def _judged(self, g: Gradient) -> Gradient:
        """The gradient; dropped, if it is not finite or explodes.

        A gradient that stays on this worker is only sampled. A bad one that slips through breaks
        this worker's model until the next exchange repairs it; gradients of a broken model do not
        count towards setting the worker aside. On a GPU, the device judges it.
        """
        if g.overflow:
            return g
        flat, guard, shared = self.replica.flat, self.strategy.guard, g.gathered
        told = self._session.told_norm() if g.part is WHOLE else None
        stays = shared is None and guard.rank not in guard.aside
        if told is None and stays and flat.x.is_cuda and not (flat.apart or flat.has_sparse()):
            own = flat.gather(g.part)[g.part.place]
            if self._session.resident is None:
                self._device_guard(g.part).pass_through(own, g.max_norm)
                return g
            told = norm(own)  # for many workers, a graph of each takes too much memory
        size = 0.0
        if guard.rank not in guard.aside:
            if told is not None and math.isfinite(told):
                size = told
            else:
                size = glance(flat.gradients()) if shared is None else norm(g.own)
        if g.max_norm is not None and math.isfinite(size):
            size = min(size, g.max_norm)
        admitted = guard.admits(
            size, guard.rank, self._what(g.part), lambda: shared is not None or is_sound(flat.x)
        )
        return g if admitted else replace(g, dropped=True)

    def _device_guard(self, part: Part) -> DeviceGuard:
        if part.number not in self._device_guards:
            self._device_guards[part.number] = DeviceGuard(
                self.strategy.guard, lambda: is_sound(self.replica.flat.x), self._what(part)
            )
        return self._device_guards[part.number]

    def _what(self, part: Part) -> str:
        """What the guard knows the gradients of a part as: those of others may be far larger."""
        return f"{WHAT} of optimizer {part.number}" if self.replica.several else WHAT

    def _mark(self) -> Mark:
        wait_s = self._recorder.meter.wait_s
        return Mark(self._clock.now(), time.monotonic(), wait_s, self.io_s, self.samples)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it, between two steps."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "io_s": self.io_s,
            "lr": self.lr,
            "full_batch": self.batch_size,
            "weight": self._weight,
            "first": self.first,
            "history": vars(self.history),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.steps, self.samples, self.io_s = state["steps"], state["samples"], state["io_s"]
        self.lr, self.batch_size = state["lr"], state["full_batch"]
        self._weight = state.get("weight", 0)  # a checkpoint of an earlier version has none
        if state["first"] is not None:
            self.first = Mark(*state["first"])._replace(wall_s=time.monotonic())
        self.history.__dict__.update(state["history"])

    def account(self, last: bool = False) -> None:
        """Record samples and bytes so far, outside of steps."""
        sent = self._recorder.meter.bytes_sent
        self.history.note(self._clock.now(), self.samples, sent, last)

    def account_first(self) -> None:
        """Record the bytes of the start; a resumed run has them already."""
        if not self.history.rows:
            self.account()

    def settle(self) -> None:
        """Finish what the strategy left pending."""
        for guard in self._device_guards.values():
            guard.settle()
        if not (self.alone or self.paused or self.skipping):
            self.keep_up(self._settle)

    def _settle(self) -> None:
        with self.replica.flat.lent() as x:
            self.strategy.settle(x)

    def keep_up(self, act: Callable[[], T], again: bool = False) -> T | None:
        """Act with the others; if they have gone on without this rank, rejoin them.

        What the rank computed before is dropped, by itself and by the others. After it has
        rejoined, it acts ``again``, or returns None.
        """
        while True:
            try:
                return act()
            except LeftBehind:
                self.come_back()
            if not again:
                return None

    def come_back(self) -> None:
        """Begin a new incarnation with the state of the others; end, if none of them is left.

        A rank that cannot return ends itself: workers of a synchronous method, and a server, which
        has a successor by now.
        """
        if not self._session.may_return:
            raise Outlived
        members, self._drawn, self._weight = self._session.ports.members, 0, 0
        while True:
            try:
                members.rejoin()
                self.replica.forget_moments()
                self._session.rejoin(self.replica.flat.x)
                members.announce_ready()
            except LeftBehind:
                continue
            self.rejoined += 1
            self._session.has_returned()
            return
