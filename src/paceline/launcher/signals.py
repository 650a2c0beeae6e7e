"""Signals that end a run after a final checkpoint.

After SIGTERM, SIGUSR1 or Ctrl-C the first worker calls all ranks to a final checkpoint, and then
they end. A second signal, or ``PATIENCE_S`` without a checkpoint, ends the run at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.errors import Interrupted

if TYPE_CHECKING:
    from paceline.launcher.supervisor import Rank

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ASK = signal.SIGUSR1
"""The signal that asks ranks for a final checkpoint."""
PATIENCE_S = 25.0
REPEAT_S = 1.0


class Stop:
    """A context manager that handles signals if it is on and in the main thread."""

    def __init__(self, on: bool) -> None:
        self._checkpoints = on
        self._on = on and threading.current_thread() is threading.main_thread()
        self._former: dict[int, Any] = {}
        self._since_s = self._asked_s = 0.0
        self.number: int | None = None

    def __enter__(self) -> Stop:
        if self._on:
            self._former = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise self.error("no checkpoint was made: a second signal came")
        self.number, self._since_s = number, time.monotonic()

    def ask(self) -> dict[str, Any]:
        """Ask for a final checkpoint, as SIGTERM does; returns the reply to who asked."""
        if not self._checkpoints:
            return {"error": "the run makes no checkpoints"}
        if self.number is None:
            self.number, self._since_s = signal.SIGTERM, time.monotonic()
        return {"stopping": True}

    def act(self, ranks: Sequence[Rank]) -> None:
        """Ask the ranks for a final checkpoint, if a signal came."""
        now_s = time.monotonic()
        if self.number is None:
            return
        if now_s > self._since_s + PATIENCE_S:
            raise self.error(f"no checkpoint was made within {PATIENCE_S:.0f} s")
        if now_s > self._asked_s + REPEAT_S:  # a rank that has just started ignores the signal
            self._asked_s = now_s
            for rank in ranks:
                rank.send_signal(ASK)

    def error(self, what: str) -> BaseException:
        """The exception that ends the run."""
        if self.number == signal.SIGINT:
            return KeyboardInterrupt(what)
        return Interrupted(signal.Signals(self.number or signal.SIGTERM), what)
