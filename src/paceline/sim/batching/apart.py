"""A thread of its own for joint computations.

What a user's thread has switched on (autocast, no_grad, function modes) does not hold there, and
what torch keeps for each thread is kept once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

Outcome = tuple[Any, BaseException | None]


class Apart:
    """Calls functions in one other thread, which starts with the first of them.

    Args:
        device: where they compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, act: Callable[[], Any]) -> Any:
        """The result of ``act``, or its exception."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="joint", daemon=True)
            self._thread.start()
        self._asked.put(act)
        result, error = self._outcomes.get()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()

    def _serve(self) -> None:
        torch.set_num_threads(1)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        torch.autograd.set_multithreading_enabled(False)
        while (act := self._asked.get()) is not None:
            try:
                outcome: Outcome = act(), None
            except BaseException as error:
                outcome = None, error
            del act
            self._outcomes.put(outcome)
            del outcome
