"""Hand records to a logger in a thread of its own, so that a dead back-end stops nobody."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any

from paceline.errors import summary_of
from paceline.record.loggers.base import Logger

MOST_WAITING = 100_000
"""How many records wait for a slow back-end; further ones are lost."""
PATIENCE_S = 30.0
"""How long the end of a run waits for a back-end to take what is left."""
MINUTE_S = 60.0
"""The shortest time between two warnings, and between two tries to open a back-end."""

Entry = tuple[str, Mapping[str, Any]]


class Feed:
    """One logger of a run; whatever happens to its back-end, the run goes on.

    Args:
        name: of the logger.
        make: opens its back-end; called in the thread.
        patience_s: how long the end of the run waits for it.
    """

    def __init__(
        self, name: str, make: Callable[[], Logger], patience_s: float = PATIENCE_S
    ) -> None:
        self._name, self._make, self._patience_s = name, make, patience_s
        self._queue: SimpleQueue[Entry | None] = SimpleQueue()
        self._logger: Logger | None = None
        self._reason: str | None = None
        self._warned_s = self._tried_s = -MINUTE_S
        self._thread = Thread(target=self._serve, name=f"log-{name}", daemon=True)
        self._thread.start()

    def put(self, kind: str, record: Mapping[str, Any]) -> None:
        """Hand on a ``metric`` or an ``event``, without waiting."""
        if self._queue.qsize() < MOST_WAITING:
            self._queue.put((kind, record))
        else:
            self._reason = f"it is too slow: {MOST_WAITING:,} records wait for it"
        self._warn()

    def close(self) -> None:
        """Wait until everything is written, but not for long."""
        self._queue.put(None)
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            self._reason = f"it has not taken all records {self._patience_s:g} s after the end"
        self._warn()

    def _warn(self) -> None:
        """Warn of failures, at most once a minute; in the thread of the run, not of the logger."""
        now_s = time.monotonic()
        if self._reason is None or now_s < self._warned_s + MINUTE_S:
            return
        reason, self._reason, self._warned_s = self._reason, None, now_s
        warnings.warn(
            f"log ({self._name}) loses records: {reason}; training continues", stacklevel=4
        )

    def _serve(self) -> None:
        """The thread: write one record after the other."""
        while (entry := self._queue.get()) is not None:
            self._attempt(*entry)
        self._attempt("close")

    def _attempt(self, method: str, *record: Mapping[str, Any]) -> None:
        try:
            if self._logger is None and not self._open():
                return
            getattr(self._logger, method)(*record)
        except Exception as error:
            self._reason = summary_of(error)

    def _open(self) -> bool:
        """Open the back-end, unless that was tried within the last minute."""
        now_s = time.monotonic()
        if now_s < self._tried_s + MINUTE_S:
            return False
        self._tried_s = now_s
        self._logger = self._make()
        return True
