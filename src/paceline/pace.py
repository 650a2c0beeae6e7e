"""One worker's step: charge its time, gather its gradient, let the strategy act."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.comm.metered import MeteredTransport
from paceline.errors import UsageError
from paceline.history import History
from paceline.replica import Replica
from paceline.strategies.base import Strategy

if TYPE_CHECKING:
    from paceline.sim.compute import Costs


class Mark(NamedTuple):
    """A moment on the run's clock and the wall's, and what its worker had done by then."""

    time_s: float
    wall_s: float
    wait_s: float
    io_s: float = 0.0
    samples: int = 0


class Pace:
    """What happens between ``optimizer.step()`` and its return.

    Args:
        strategy: the method, bound to its communicator.
        replica: this rank's model and optimizer.
        transport: for the clock and the trace.
        costs: what computing takes in virtual time; None where time is real.
        alone: whether this is the only worker: then no method has anything to do.

    Attributes:
        io_s: how long this worker has waited for its data.
        lr: the learning rate that it began with.
        history: its samples and bytes after each step.
    """

    def __init__(
        self,
        strategy: Strategy,
        replica: Replica,
        transport: MeteredTransport,
        costs: Costs | None,
        alone: bool,
    ) -> None:
        self.strategy, self.replica, self.alone = strategy, replica, alone
        self.steps = self.samples = 0
        self.io_s = 0.0
        self.lr = replica.lrs()[0]
        self.history = History()
        self.first: Mark | None = None
        self.warm: Mark | None = None
        self.last: Mark | None = None
        self.paused: str | None = None
        self.syncing = True
        self._transport, self._costs = transport, costs
        self._drawn = 0
        self._full_batch = 0

    def drew(self, samples: int, full_batch: int) -> None:
        """Hear that a batch was drawn: the next step's gradient stands for it, too."""
        self._drawn += samples
        self._full_batch = max(self._full_batch, full_batch)

    def step(self, overflow: bool) -> None:
        """Make one step of the strategy with the gradients that are there now."""
        if self.paused:
            raise UsageError(f"optimizer.step() must not be called {self.paused}")
        replica, flat = self.replica, self.replica.flat
        samples, self._drawn = self._drawn, 0
        self._full_batch = max(self._full_batch, samples)
        begin = self._mark()
        self.first = self.first or begin
        self._transport.step_begins(self.steps)
        flat.check()
        if self._costs is not None:
            self._transport.compute(self._costs.gradient_s(samples or self._full_batch))
        charged_s = self._transport.meter.charged_s
        replica.share = samples / self._full_batch if samples else 1.0
        replica.overflow = overflow
        self._act()
        replica.max_norm = None
        self.samples += samples
        self.last = self._mark()
        step_s, wait_s = self.last.time_s - begin.time_s, self.last.wait_s - begin.wait_s
        apply_s = step_s - wait_s
        if self._costs is not None:
            apply_s = self._transport.meter.charged_s - charged_s
        self._transport.note(
            "step", step=self.steps, samples=samples, step_s=step_s, wait_s=wait_s, apply_s=apply_s
        )
        self.steps += 1
        self.history.note(self.last.time_s, self.samples, self._transport.meter.bytes_sent)
        self.warm = self.warm or self.last
        self._transport.resume()

    def _act(self) -> None:
        if self.alone or not self.syncing:
            self.replica.local_update()
            return
        self.settle()
        flat, g = self.replica.flat, None
        if self.strategy.uses_gradient:
            self._transport.charge_gather(flat.x.nbytes)
            g = flat.gather()
        self.strategy.step(flat.x, g)

    def _mark(self) -> Mark:
        wait_s = self._transport.meter.wait_s
        return Mark(self._transport.now(), time.monotonic(), wait_s, self.io_s, self.samples)

    @property
    def batch_size(self) -> int:
        """The samples of a full batch."""
        return self._full_batch

    def account(self, last: bool = False) -> None:
        """Note what has been done and sent by now, outside of steps."""
        meter, now_s = self._transport.meter, self._transport.now()
        self.history.note(now_s, self.samples, meter.bytes_sent, last)

    def settle(self) -> None:
        """Finish what the strategy left pending."""
        if not self.alone:
            self.strategy.settle(self.replica.flat.x)
