"""Faults that a real rank inflicts on itself: those that are due at one of its steps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.comm.ports import Clock, Ports
from paceline.common.faults import Fault
from paceline.launcher.rank_process import Channel


class FaultClock(Clock):
    """A real clock that kills, stops or slows its rank down as a step begins, when that is due.

    The launcher does what happens at a time, except for slowing down. ``before_end`` is called
    before a rank is killed.
    """

    def __init__(
        self,
        faults: Sequence[dict[str, Any]],
        ports: Ports,
        channel: Channel,
        before_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(time.monotonic() - ports.clock.now())
        self._rank, self._channel, self._before_end = ports.rank, channel, before_end
        mine = [Fault(**fault) for fault in faults if fault["rank"] == ports.rank]
        self._faults = [] if ports.members.late else mine
        self._ended_s = self.now()
        self._slow_since: dict[Fault, float] = {}

    def begin_step(self, step: int) -> None:
        now_s = self.now()
        for fault in self._faults:
            if fault.kind == "slow" and self._is_slow(fault, step, now_s):
                time.sleep((now_s - self._ended_s) * ((fault.factor or 1.0) - 1))
            elif fault.at_step == step and fault.kind == "kill":
                self._before_end()
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.at_step == step and fault.kind == "freeze":
                self._report("stopped", now_s)
                if fault.for_s is not None:
                    self._channel.send({"kind": "thaw", "for_s": fault.for_s})
                os.kill(os.getpid(), signal.SIGSTOP)
        self._ended_s = self.now()

    def _is_slow(self, fault: Fault, step: int, now_s: float) -> bool:
        due = now_s >= (fault.at_s or 0.0) if fault.at_step is None else step >= fault.at_step
        if due and fault not in self._slow_since:
            self._slow_since[fault] = now_s
            self._report("slowed", now_s)
        return due and (fault.for_s is None or now_s < self._slow_since[fault] + fault.for_s)

    def _report(self, event: str, now_s: float) -> None:
        self._channel.report("event", {"t": now_s, "event": event, "rank": self._rank})
