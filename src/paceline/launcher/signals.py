"""What a launcher does when it is told to end: a checkpoint first, then the end.

SIGTERM, SIGUSR1 and Ctrl-C have the first worker call all ranks to a last checkpoint, after which
they end. A second signal, or ``PATIENCE_S``, ends the run without one.
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
"""What ranks are asked with to make a last checkpoint."""
PATIENCE_S = 25.0
AGAIN_S = 1.0


class Stop:
    """As a context manager it listens for signals, if it is on; only a main thread can."""

    def __init__(self, on: bool) -> None:
        self._on = on and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self._since_s = self._asked_s = 0.0
        self.number: int | None = None

    def __enter__(self) -> Stop:
        if self._on:
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise self.error("no checkpoint was made: it was told to end twice")
        self.number, self._since_s = number, time.monotonic()

    def act(self, ranks: Sequence[Rank]) -> None:
        """Ask the ranks for a last checkpoint, if the run was told to end."""
        now_s = time.monotonic()
        if self.number is None:
            return
        if now_s > self._since_s + PATIENCE_S:
            raise self.error(f"no checkpoint was made within {PATIENCE_S:.0f} s")
        if now_s > self._asked_s + AGAIN_S:  # a rank that has only just started does not hear it
            self._asked_s = now_s
            for rank in ranks:
                rank.strike(ASK)

    def error(self, what: str) -> BaseException:
        """How the run ends."""
        if self.number == signal.SIGINT:
            return KeyboardInterrupt(what)
        return Interrupted(signal.Signals(self.number or signal.SIGTERM), what)
