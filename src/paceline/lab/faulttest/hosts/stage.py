"""Processes and threads in virtual time: exactly one thread runs."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from types import TracebackType

from paceline.comm.hosts.wire import Condition
from paceline.sim.kernel import Baton, Calendar, Killed

_HESITATION_S = 2e-3
"""The longest time for which a thread that could run does not."""


class Stage:
    """The threads of a run, and its clock.

    Attributes:
        calendar: what happens when.
        random: decides how long threads hesitate.
    """

    def __init__(self, seed: int) -> None:
        self.calendar = Calendar()
        self.random = random.Random(seed)
        self._baton = Baton(self.calendar, 0, math.inf)
        self._own = threading.local()

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.calendar.now_s

    def call_in(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` after so long."""
        self.calendar.call(self.now_s + seconds, act)

    def run(self) -> None:
        """Run until all threads have ended; raise the error of one that failed."""
        self._baton.run(lambda thread: None, [])

    def abort(self, error: BaseException) -> None:
        """End all threads, and the run, by ``error``."""
        self._baton.abort(error)

    # For a thread --------------------------------------------------------------------------------

    def start(self, body: Callable[[], None]) -> int:
        """Start a thread; return its number."""

        def begin(thread: int) -> None:
            self._own.thread = thread
            self._baton.check(thread)
            body()

        return self._baton.spawn(begin)

    @property
    def thread(self) -> int:
        """The number of the thread that runs."""
        number: int = self._own.thread
        return number

    def sleep(self, seconds: float) -> None:
        """Let time pass for the thread that runs."""
        self._baton.sleep(self.thread, seconds)

    def hesitate(self, chance: float) -> None:
        """Let others go first, maybe."""
        if self.random.random() < chance:
            self.sleep(_HESITATION_S * self.random.random())

    def wait(self, seconds: float) -> None:
        """Wait for :meth:`wake`, or for so long."""
        thread = self.thread
        self._baton.wake(thread, self.now_s + seconds)
        self._baton.wait(thread, "a wait", (), patient=True)

    def wake(self, thread: int) -> None:
        """End the wait of a thread, soon."""
        self._baton.wake(thread, self.now_s + 1e-4 * self.random.random())

    # For faults ----------------------------------------------------------------------------------

    def kill(self, thread: int) -> None:
        """End a thread where it is."""
        self._baton.interrupt(thread, Killed())

    def check(self) -> None:
        """End the thread that runs, if it was killed; block it, if it was stopped."""
        self._baton.check(self.thread)
        self._baton.stay_frozen(self.thread)

    def stop(self, thread: int) -> None:
        """Stop a thread until :meth:`resume`."""
        self._baton.freeze(thread)

    def resume(self, thread: int) -> None:
        """Let a stopped thread go on."""
        self._baton.thaw(thread)


class StageCondition(Condition):
    """A condition among the threads of one process.

    A thread gives way only before it has the lock, or in :meth:`wait`: so the lock is always free.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage, self._depth = stage, 0
        self._waiting: list[int] = []

    def __enter__(self) -> bool:
        if not self._depth:
            self._stage.hesitate(0.1)
        self._depth += 1
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        self._depth -= 1

    def wait(self, timeout: float) -> bool:
        depth, self._depth = self._depth, 0
        self._waiting.append(self._stage.thread)
        try:
            self._stage.wait(timeout)
        finally:
            self._waiting.remove(self._stage.thread)
            self._depth = depth
        return True

    def notify_all(self) -> None:
        for thread in self._waiting:
            self._stage.wake(thread)


class HostProcess:
    """A process on a host: threads that are killed and stopped together.

    Args:
        stage: where it runs.
        host: the number of its host.
        pid: its number, which no other process has.

    Attributes:
        alive, stopped: how it is.
        acts: how many frames it has sent, and states saved.
        on_act: called at each of them.
    """

    def __init__(self, stage: Stage, host: int, pid: int) -> None:
        self.stage, self.host, self.pid = stage, host, pid
        self.alive, self.stopped, self.acts = True, False, 0
        self.on_act: Callable[[int], None] = lambda acts: None
        self._threads: list[int] = []

    def start(self, body: Callable[[], None]) -> Callable[[], None]:
        """Start a thread; return what waits for its end."""
        ended: list[int] = []
        waiting: list[int] = []

        def run() -> None:
            body()
            ended.append(1)
            for thread in waiting:
                self.stage.wake(thread)

        def join() -> None:
            waiting.append(self.stage.thread)
            while not ended:
                self.stage.wait(1.0)

        self._threads.append(self.stage.start(run))
        return join

    def act(self) -> None:
        """Count an act; a fault may strike here."""
        self.acts += 1
        self.on_act(self.acts)
        self.stage.check()

    def kill(self) -> None:
        """End it where it is."""
        self.alive = self.stopped = False
        for thread in self._threads:
            self.stage.kill(thread)

    def exit(self) -> None:
        """End it, but for the thread that runs."""
        self._threads.remove(self.stage.thread)
        self.kill()

    def stop(self) -> None:
        """Stop it until :meth:`resume`."""
        self.stopped = self.alive
        for thread in self._threads:
            self.stage.stop(thread)

    def resume(self) -> None:
        """Let it go on."""
        self.stopped = False
        for thread in self._threads:
            self.stage.resume(thread)
