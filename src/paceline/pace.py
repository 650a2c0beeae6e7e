"""One worker's step: charge its time, gather its gradient, let the strategy act."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.comm.metered import MeteredTransport
from paceline.errors import UsageError
from paceline.replica import Replica
from paceline.strategies.base import Strategy

if TYPE_CHECKING:
    from paceline.sim.compute import Costs


class Mark(NamedTuple):
    """A moment of a run on its own clock and the wall's, and how long its worker had waited."""

    time_s: float
    wall_s: float
    wait_s: float


class Pace:
    """What happens between ``optimizer.step()`` and its return.

    Args:
        strategy: the method, bound to its communicator.
        replica: this rank's model and optimizer.
        transport: for the clock and the trace.
        costs: what computing takes in virtual time; None where time is real.
        alone: whether this is the only worker: then no method has anything to do.
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
        self.first: Mark | None = None
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
        self.first = self.first or self._mark()
        self._transport.step_begins(self.steps)
        flat.check()
        if self._costs is not None:
            self._transport.compute(self._costs.gradient_s(samples or self._full_batch))
        replica.share = samples / self._full_batch if samples else 1.0
        replica.overflow = overflow
        self._act()
        replica.max_norm = None
        self._transport.note("step", step=self.steps, samples=samples)
        self.steps += 1
        self.samples += samples
        self.last = self._mark()
        self._transport.resume()

    def _act(self) -> None:
        if self.alone or not self.syncing:
            self.replica.local_update()
            return
        self.settle()
        g = self.replica.flat.gather() if self.strategy.uses_gradient else None
        self.strategy.step(self.replica.flat.x, g)

    def _mark(self) -> Mark:
        return Mark(self._transport.now(), time.monotonic(), self._transport.meter.wait_s)

    def settle(self) -> None:
        """Finish what the strategy left pending."""
        if not self.alone:
            self.strategy.settle(self.replica.flat.x)
