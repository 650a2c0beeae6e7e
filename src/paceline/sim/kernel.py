"""The kernel of the simulator: which event is next, and which rank runs.

:class:`Calendar` is pure data: a heap ordered by ``(time_s, sequence)``, the only source of order.
:class:`Baton` gives each rank an OS thread and lets exactly one of them run: a rank that waits
takes the next event from the calendar itself and hands the baton to the rank that is due.
"""

from __future__ import annotations

import _thread
import heapq
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import CommTimeout, Deadlock, PacelineError, UsageError
from paceline.sim.cores import Cores
from paceline.sim.parking import NEVER, Moment, Parking


class Killed(BaseException):
    """Ends the thread of a rank: a fault has killed the rank, or the run has been aborted."""


class Calendar:
    """Events in virtual time. An event is a callback, or the waking of a rank."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self.events = 0
        self._heap: list[tuple[float, int, int, int, Callable[[], None] | None]] = []
        self._sequence = 0

    def call(self, time_s: float, callback: Callable[[], None]) -> None:
        """Schedule ``callback`` at ``time_s``."""
        self._push(time_s, -1, 0, callback)

    def wake(self, time_s: float, rank: int, turn: int) -> None:
        """Wake ``rank`` at ``time_s``, if it still is in its wait number ``turn``."""
        self._push(time_s, rank, turn, None)

    def reserve(self) -> int:
        """Take a place in the order of events of equal time, for :meth:`wake_in_place`."""
        self._sequence += 1
        return self._sequence

    def wake_in_place(self, time_s: float, rank: int, turn: int, place: int) -> None:
        """Do as :meth:`wake`, in a place that was reserved."""
        assert time_s >= self.now_s, f"event at {time_s} s is in the past of {self.now_s} s"
        heapq.heappush(self._heap, (time_s, place, rank, turn, None))

    def next_time_s(self) -> float | None:
        """When the next event is due; None when there is none."""
        return self._heap[0][0] if self._heap else None

    def next_moment(self) -> Moment:
        """When the next event is due, and its place in the order."""
        return self._heap[0][:2] if self._heap else NEVER

    def pop(self) -> tuple[int, int, Callable[[], None] | None]:
        """Move the clock to the next event and return it: ``(rank, turn, callback)``."""
        self.now_s, _, rank, turn, callback = heapq.heappop(self._heap)
        self.events += 1
        return rank, turn, callback

    def _push(
        self, time_s: float, rank: int, turn: int, callback: Callable[[], None] | None
    ) -> None:
        assert time_s >= self.now_s, f"event at {time_s} s is in the past of {self.now_s} s"
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, self._sequence, rank, turn, callback))


class Wait(NamedTuple):
    """What a blocked rank waits for."""

    op: str
    peers: Iterable[int]
    since_s: float
    patient: bool

    def __str__(self) -> str:
        return f"{self.op}, waiting for {list(self.peers)} since {self.since_s:.6f} s"


class Lag(NamedTuple):
    """The moment at which a rank was parked: the calendar may be ahead of it since.

    Attributes:
        since_s: its time.
        place: its place in the order of events; ``events`` is how many had happened.
    """

    since_s: float
    place: int
    events: int


@dataclass
class RankState:
    """The scheduling state of one rank.

    Attributes:
        lag: since when it lags behind the calendar; None if it does not.
    """

    turn: int = 0
    wait: Wait | None = None
    computing_until_s: float | None = None
    remaining_s: float | None = None
    on_computed: Callable[[], None] | None = None
    interrupt: BaseException | None = None
    frozen_since_s: float | None = None
    held_wake: bool = False
    ended: bool = False
    lag: Lag | None = None


class Baton:
    """One thread for each rank, of which exactly one runs.

    Attributes:
        failure: the error that ended the run early.
        stalled: whether a message can never arrive, because its link stays cut: a wait then ends
            with a timeout, not as a deadlock.
    """

    def __init__(self, calendar: Calendar, size: int, progress_limit_s: float) -> None:
        self.calendar = calendar
        self.ranks = [RankState() for _ in range(size)]
        self.failure: BaseException | None = None
        self.stalled = False
        self._running = size
        self._limit_s = progress_limit_s
        self._alarm_s: float | None = None
        self._cores: list[Cores] | None = None
        self._parking: Parking | None = None
        self._in_order = True
        self._locks = [_locked() for _ in range(size)]
        self._threads: list[threading.Thread] = []
        self._over = _locked()

    # For the thread that starts the run ----------------------------------------------------------

    def share_cores(self, nodes: Sequence[int], count: int) -> None:
        """Let the ranks of each node share ``count`` cores; ``nodes`` is the node of each rank."""
        each = {node: Cores(self.calendar, count, self.wake) for node in set(nodes)}
        self._cores = [each[node] for node in nodes]

    def share_cores_of(self, rank: int, other: int) -> None:
        """Move ``rank``, which does not compute now, to the node of ``other``."""
        if self._cores is not None:
            self._cores[rank] = self._cores[other]

    def cores(self) -> list[Cores]:
        """The cores of each node; empty if ranks do not share cores."""
        return [*dict.fromkeys(self._cores or ())]

    def compute_together(self, compute: Callable[[], Iterable[int]], in_order: bool) -> None:
        """Let ranks :meth:`park`; see :class:`~paceline.sim.parking.Parking` for ``compute``.

        With ``in_order``, it matters in which order ranks act that act at the same time.
        """
        self._parking, self._in_order = Parking(compute), in_order

    def run(self, body: Callable[[int], None], start_s: Sequence[float]) -> None:
        """Run ``body(rank)`` on every rank until all have ended; raise :attr:`failure`, if any."""
        for rank, at_s in enumerate(start_s):
            self._start(body, rank, at_s)
        self._hand_on()
        self._over.acquire()
        for thread in self._threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def spawn(self, body: Callable[[int], None]) -> int:
        """Have one more rank begin now; return its number."""
        self.ranks.append(RankState())
        self._locks.append(_locked())
        self._running += 1
        rank = len(self.ranks) - 1
        self._start(body, rank, self.calendar.now_s)
        return rank

    def _start(self, body: Callable[[int], None], rank: int, at_s: float) -> None:
        arguments = body, rank
        thread = threading.Thread(target=self._thread, args=arguments, name=f"rank-{rank}")
        thread.daemon = True
        self._threads.append(thread)
        thread.start()
        self.calendar.wake(at_s, rank, 0)

    # For a rank's own thread ---------------------------------------------------------------------

    def sleep(self, rank: int, seconds: float) -> None:
        """Let virtual time pass for ``rank``."""
        state = self.ranks[rank]
        self._compute(rank, state, seconds)
        self._block(rank, state)
        state.computing_until_s = None

    def compute_then(self, rank: int, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` when ``rank`` has computed for ``seconds``; the rank must :meth:`wait` next.

        The rank blocks once; with :meth:`sleep`, ``act()`` and a wait it would block twice.
        """
        state = self.ranks[rank]
        state.on_computed = act
        self._compute(rank, state, seconds)

    def wait(
        self, rank: int, op: str, peers: Iterable[int], patient: bool = False, after_s: float = 0.0
    ) -> None:
        """Block until :meth:`wake`. Errors name ``op`` and ``peers``.

        A ``patient`` wait has no time limit. The limit counts from ``after_s`` on: the rank
        computes before that.
        """
        state = self.ranks[rank]
        since_s = self.now_s(rank) + after_s
        state.wait = Wait(op, peers, since_s, patient)
        alarm_s = since_s + self._limit_s
        if self._alarm_s is None or alarm_s < self._alarm_s:
            self._alarm_s = alarm_s
        try:
            self._block(rank, state)
        finally:
            state.wait = None

    def now_s(self, rank: int) -> float:
        """The time of ``rank``: the calendar's, or an earlier one if it lags."""
        lag = self.ranks[rank].lag
        return self.calendar.now_s if lag is None else lag.since_s

    def place(self, rank: int) -> int:
        """How many events had happened when ``rank`` began what it does now."""
        lag = self.ranks[rank].lag
        return self.calendar.events if lag is None else lag.events

    def earliest_s(self) -> float:
        """The least time of any rank that can still act."""
        lags = (state.lag for state in self.ranks if not state.ended)
        return min([self.calendar.now_s, *(lag.since_s for lag in lags if lag is not None)])

    def park(self, rank: int, until_s: float) -> None:
        """Stop until what ``rank`` waits for is computed together with that of other ranks.

        No virtual time passes for it. It must do nothing that others can see before ``until_s``.
        """
        assert self._parking is not None, "nothing is computed together"
        state = self.ranks[rank]
        self.check(rank)
        if state.lag is None:
            calendar = self.calendar
            state.lag = Lag(calendar.now_s, calendar.reserve(), calendar.events)
        in_order = self._in_order and until_s == state.lag.since_s
        self._parking.park(rank, (until_s, -1 if in_order else state.lag.place))
        self._pass_on(rank)
        self.check(rank)

    def await_parked(self, rank: int) -> None:
        """Let every parked rank go on to its next wait, before ``rank`` changes what they see."""
        if self._parking is not None and self._parking.go_last(rank):
            self._pass_on(rank)
            self.check(rank)

    def catch_up(self, rank: int) -> None:
        """Let ``rank``, which has no time left to pass, act in the calendar's present."""
        lag = self.ranks[rank].lag
        if lag is not None:
            self._refuse_past(rank, lag.since_s)
        if self._in_order:
            self.refuse_late(rank)

    def refuse_late(self, rank: int) -> None:
        """Refuse an act of ``rank`` that should have come before those of others."""
        lag = self.ranks[rank].lag
        if lag is not None and self.calendar.events > lag.events:
            self._refuse_past(rank, lag.since_s, is_late=True)

    def check(self, rank: int) -> None:
        """Raise the pending interrupt of ``rank``; ``Killed`` is raised again at each call."""
        interrupt = self.ranks[rank].interrupt
        if interrupt is None:
            return
        if not isinstance(interrupt, Killed):
            self.ranks[rank].interrupt = None
        raise interrupt

    # For events ----------------------------------------------------------------------------------

    def wake(self, rank: int, at_s: float | None = None) -> None:
        """End the wait of ``rank``, now or at a later time."""
        time_s = self.calendar.now_s if at_s is None else at_s
        self.calendar.wake(time_s, rank, self.ranks[rank].turn)

    def interrupt(self, rank: int, error: BaseException) -> None:
        """Raise ``error`` in ``rank``: in its present wait, or at its next call."""
        state = self.ranks[rank]
        if state.ended or isinstance(state.interrupt, Killed):
            return
        state.interrupt = error
        state.on_computed = None
        if self._cores is not None and state.computing_until_s is not None:
            self._cores[rank].leave(rank)
        if isinstance(error, Killed):
            state.frozen_since_s = None
        if state.frozen_since_s is not None:
            state.held_wake = True
            return
        state.turn += 1
        self.calendar.wake(self.calendar.now_s, rank, state.turn)

    def freeze(self, rank: int) -> None:
        """Stop ``rank``: no event reaches it until :meth:`thaw`."""
        state = self.ranks[rank]
        if state.ended or state.frozen_since_s is not None:
            return
        state.frozen_since_s = self.calendar.now_s
        if state.computing_until_s is None:
            return
        if self._cores is None:
            state.remaining_s = state.computing_until_s - self.calendar.now_s
            state.turn += 1
        else:
            state.remaining_s = self._cores[rank].leave(rank)

    def thaw(self, rank: int) -> None:
        """Let ``rank`` continue where it stopped, with the computing time that it had left."""
        state = self.ranks[rank]
        if state.ended or state.frozen_since_s is None:
            return
        state.frozen_since_s = None
        if state.remaining_s is not None:
            remaining_s, state.remaining_s = state.remaining_s, None
            self._compute(rank, state, remaining_s)
        elif state.held_wake:
            state.held_wake = False
            self.wake(rank)

    def stay_frozen(self, rank: int) -> None:
        """Block the running ``rank`` here if it has just been frozen."""
        state = self.ranks[rank]
        if state.frozen_since_s is not None:
            state.held_wake = True
            self.wait(rank, "a freeze", (), patient=True)

    def revive(self, rank: int, after_s: float) -> None:
        """Restart a killed ``rank`` after ``after_s``; its own thread calls this."""
        self.ranks[rank] = RankState(turn=self.ranks[rank].turn + 1)
        self.sleep(rank, after_s)

    def abort(self, failure: BaseException) -> None:
        """End the run because of ``failure``: kill every rank that has not ended."""
        self.failure = self.failure or failure
        for rank in range(len(self.ranks)):
            self.interrupt(rank, Killed())
        if self._parking is not None:
            self._parking.release_all()

    # Inside --------------------------------------------------------------------------------------

    def _thread(self, body: Callable[[int], None], rank: int) -> None:
        self._locks[rank].acquire()
        try:
            body(rank)  # checks itself whether the rank was killed before it began
        except Killed:
            pass
        except BaseException as error:
            self.abort(error)
        self.ranks[rank].ended = True
        self._running -= 1
        self._hand_on()

    def _compute(self, rank: int, state: RankState, seconds: float) -> None:
        """Wake ``rank`` when it has computed for ``seconds``, or longer on shared cores."""
        if state.lag is not None:
            time_s = state.computing_until_s = state.lag.since_s + seconds
            self._refuse_past(rank, time_s)
            return self.calendar.wake_in_place(time_s, rank, state.turn, state.lag.place)
        state.computing_until_s = self.calendar.now_s + seconds
        if self._cores is None:
            self.calendar.wake(state.computing_until_s, rank, state.turn)
        else:
            self._cores[rank].begin(rank, seconds)

    def _refuse_past(self, rank: int, time_s: float, is_late: bool = False) -> None:
        if time_s < self.calendar.now_s or is_late:
            raise UsageError(
                f"rank {rank} communicates at {time_s:.6f} s, after model(x) and before"
                f" optimizer.step(), when others are at {self.calendar.now_s:.6f} s already:"
                ' communicate after the step, or use batched="off"'
            )

    def _block(self, rank: int, state: RankState) -> None:
        self.check(rank)
        self._pass_on(rank)
        state.turn += 1
        state.on_computed = state.lag = None
        if state.interrupt is not None:
            self.check(rank)

    def _pass_on(self, rank: int) -> None:
        """Let others run until ``rank`` is due."""
        due = self._next()
        if due != rank:
            assert due is not None, "a rank that waits has not ended"
            self._locks[due].release()
            self._locks[rank].acquire()

    def _hand_on(self) -> None:
        due = self._next()
        (self._over if due is None else self._locks[due]).release()

    def _next(self) -> int | None:
        """Run events until a rank is due, and return it; None when every rank has ended."""
        while self._running:
            if self._parking is not None and (rank := self._next_parked()) is not None:
                return rank
            next_s = self.calendar.next_time_s()
            if next_s is None and not (self.stalled and self._alarm_s is not None):
                self.abort(self._deadlock())
            elif self._alarm_s is not None and (next_s is None or next_s > self._alarm_s):
                self._raise_timeouts()
            else:
                rank, turn, callback = self.calendar.pop()
                if callback is not None:
                    self._call(callback)
                elif self._is_due(state := self.ranks[rank], turn):
                    if state.on_computed is None:
                        return rank
                    act, state.on_computed, state.computing_until_s = state.on_computed, None, None
                    self._call(act)
        return None

    def _next_parked(self) -> int | None:
        """The parked rank that goes on before the next event, if there is one."""
        assert self._parking is not None
        event = self.calendar.next_moment()
        if self._alarm_s is not None:
            event = min(event, (self._alarm_s, sys.maxsize))
        try:
            return self._parking.next(event)
        except Exception as error:
            self.abort(error)
            return self._parking.next(event)

    def _is_due(self, state: RankState, turn: int) -> bool:
        if state.ended or turn != state.turn:
            return False
        state.held_wake = state.frozen_since_s is not None
        return not state.held_wake

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:
            self.abort(error)

    def _raise_timeouts(self) -> None:
        assert self._alarm_s is not None
        now_s = self.calendar.now_s = self._alarm_s
        waits = [(rank, state.wait) for rank, state in enumerate(self.ranks) if state.wait]
        for rank, wait in waits:
            if wait.since_s + self._limit_s <= now_s and not wait.patient:
                self.interrupt(rank, CommTimeout([*wait.peers], wait.op, now_s - wait.since_s))
        later = [wait.since_s + self._limit_s for _, wait in waits]
        self._alarm_s = min((time_s for time_s in later if time_s > now_s), default=None)

    def _deadlock(self) -> PacelineError:
        blocked = [
            f"  rank {rank}: {'frozen in ' if state.frozen_since_s is not None else ''}{state.wait}"
            for rank, state in enumerate(self.ranks)
            if not state.ended
        ]
        return Deadlock(
            f"at {self.calendar.now_s:.6f} s of virtual time every rank waits:\n"
            + "\n".join(blocked)
        )


def _locked() -> _thread.LockType:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock
