"""Metering and tracing as wrappers of a world's ports.

What a strategy hands to Comm is counted, and written to a trace. So is what chance or timing
decides, so that a run can be replayed from its trace: which message was taken, which version was
read, which batch was drawn, who was seen to be here. In an event, ``look`` counts this rank's calls
that may see nothing (``poll``, ``alive``, ``finished``): it says which of them saw the event. What
ends in ``_s`` is a duration: ``wait_s`` until it came, ``send_s`` to hand it over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from paceline.comm.offer import Offer
from paceline.comm.ports import (
    PUBLISHED,
    Clock,
    Collectives,
    DataQueue,
    Factor,
    Lost,
    Mail,
    Members,
    Message,
    Ports,
    Published,
    Roster,
    Sending,
    Total,
    View,
)
from paceline.errors import PeerLost
from paceline.record.history import History
from paceline.record.trace import Trace


@dataclass
class Meter:
    """What one rank has sent, and how long it has waited for others."""

    bytes_sent: int = 0
    wait_s: float = 0.0


class Recorder:
    """What one rank has done: its meter and its part of the trace.

    Args:
        rank: this rank.
        clock: the world's.
        trace: what events are written to.

    Attributes:
        meter: what has been counted so far.
        looks: how many calls there were that may see nothing.
        scale: what each byte counts for, where the model stands for another.
        waiting: a context; the time inside it counts as waiting for others.
        waited_s: how long the last wait took.
    """

    def __init__(self, rank: int, clock: Clock, trace: Trace | None = None) -> None:
        self.rank, self.meter, self.looks, self.scale = rank, Meter(), 0, 1.0
        self.waited_s = 0.0
        self.waiting = _Waiting(self, clock)
        self._clock, self._trace = clock, trace
        self._sends: History | None = None

    def note(self, event: str, peer: int | None = None, nbytes: int = 0, **more: Any) -> None:
        """Write an event of this rank to the trace, at the present time."""
        if self._trace is not None:
            scaled = self._scaled(nbytes)
            self._trace.record(self._clock.now(), self.rank, event, peer, scaled, **more)

    def sent(self, event: str, peer: int | None, nbytes: int, **more: Any) -> None:
        """Count bytes that this rank has sent, and note the event."""
        self.meter.bytes_sent += self._scaled(nbytes)
        self.note(event, peer, nbytes, **more)
        if self._sends is not None:
            self._sends.note(self._clock.now(), 0, self.meter.bytes_sent)

    def time_s(self) -> float:
        """The present time, if there is a trace to write it to."""
        return 0.0 if self._trace is None else self._clock.now()

    def account_sends(self, history: History) -> None:
        """From now on, note each send there: a rank that serves makes no steps to note it at."""
        self._sends = history

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"meter": vars(self.meter), "looks": self.looks}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state` returned."""
        self.meter = Meter(**state["meter"])
        self.looks = state["looks"]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing counts and nothing is noted."""
        meter, trace = replace(self.meter), self._trace
        self._trace = None
        try:
            yield
        finally:
            self.meter, self._trace = meter, trace

    def _scaled(self, nbytes: int) -> int:
        return nbytes if self.scale == 1 else round(nbytes * self.scale)


class _Waiting:
    """Counts the time inside it; an object, not a function, so that no frame is added to a wait."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self._recorder, self._clock, self._start_s = recorder, clock, 0.0

    def __enter__(self) -> None:
        self._start_s = self._clock.now()

    def __exit__(self, *error: object) -> None:
        recorder = self._recorder
        recorder.waited_s = self._clock.now() - self._start_s
        recorder.meter.wait_s += recorder.waited_s


class MeteredMail(Mail):
    """Counts the payload that strategies hand in: the same in every world."""

    def __init__(self, inner: Mail, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def start_send(self, x: Tensor, dst: int, tag: int, header: bytes) -> Sending:
        recorder = self._recorder
        recorder.sent("send", dst, x.nbytes + len(header), tag=tag)
        return Offer(partial(self._await, self._inner.start_send(x, dst, tag, header)))

    def _await(self, sending: Sending) -> Lost | None:
        recorder = self._recorder
        with recorder.waiting:
            lost = sending.wait()
        if lost is None:
            recorder.note("send_end", wait_s=recorder.waited_s)
        return lost

    def post(self, x: Tensor, dst: int, tag: int, header: bytes) -> bool:
        recorder, nbytes = self._recorder, x.nbytes + len(header)
        start_s = recorder.time_s()
        posted = self._inner.post(x, dst, tag, header)
        if posted:
            recorder.sent("post", dst, nbytes, tag=tag, send_s=recorder.time_s() - start_s)
        else:
            recorder.note("post_refused", dst, tag=tag)
        return posted

    def receive(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, any_loss: bool = False
    ) -> Message | Lost:
        recorder = self._recorder
        with recorder.waiting:
            got = self._inner.receive(like, sources, tag, op, any_loss)
        if not isinstance(got, Lost):
            recorder.note("recv", got.src, got.nbytes, tag=tag, wait_s=recorder.waited_s)
        elif any_loss:
            recorder.note("gone", got.ranks[0], wait_s=recorder.waited_s)
        return got

    def try_receive(self, like: Tensor, sources: Sequence[int], tag: int) -> Message | None:
        recorder, message = self._recorder, self._inner.try_receive(like, sources, tag)
        recorder.looks += 1
        if message is not None:
            recorder.note("recv", message.src, message.nbytes, tag=tag, look=recorder.looks)
        return message

    def publish(self, x: Tensor, header: bytes = b"", window: int = PUBLISHED) -> int:
        if window != PUBLISHED:
            return self._inner.publish(x, header, window)
        recorder = self._recorder
        start_s = recorder.time_s()
        version = self._inner.publish(x, header)
        recorder.note("publish", version=version, send_s=recorder.time_s() - start_s)
        return version

    def peek(
        self, src: int, like: Tensor | None, window: int = PUBLISHED, gone: bool = False
    ) -> Published | None:
        if window != PUBLISHED or gone:
            return self._inner.peek(src, like, window, gone)
        recorder = self._recorder
        with recorder.waiting:
            seen = self._inner.peek(src, like)
        if seen is None:
            recorder.note("peek", src, version=None, wait_s=recorder.waited_s)
        else:
            nbytes = seen.x.nbytes + len(seen.header)
            recorder.sent("peek", src, nbytes, version=seen.version, wait_s=recorder.waited_s)
        return seen


class MeteredCollectives(Collectives):
    """Counts collectives: an all-reduce of n bytes is n for each rank that contributes."""

    def __init__(self, inner: Collectives, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def expect(self, x: Tensor) -> None:
        self._inner.expect(x)

    def allocate(self, numel: int, like: Tensor) -> Tensor:
        return self._inner.allocate(numel, like)

    def all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None, flags: int
    ) -> Total:
        recorder, nbytes = self._recorder, x.nbytes if weight else 0
        recorder.sent("all_reduce", None, nbytes, members=len(members), first=members[0])
        try:
            with recorder.waiting:
                total = self._inner.all_reduce(x, weight, members, factor, flags)
        except PeerLost as lost:
            recorder.note("missed", lost.rank, wait_s=recorder.waited_s)
            raise
        recorder.note("all_reduce_end", wait_s=recorder.waited_s)
        return total

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        recorder = self._recorder
        with recorder.waiting:
            self._inner.broadcast(x, src, members)
        recorder.sent("broadcast", src, x.nbytes, members=len(members), wait_s=recorder.waited_s)


class TracedMembers(Members):
    """Notes who was seen to be here, whenever that has changed."""

    def __init__(self, inner: Members, rank: int, size: int, recorder: Recorder) -> None:
        self._inner, self._rank, self._size, self._recorder = inner, rank, size, recorder
        self._missing: tuple[int, ...] = ()
        self._seen: tuple[int, ...] | None = None
        self.late, self.starters = inner.late, inner.starters

    def incarnation(self, rank: int) -> int:
        return self._inner.incarnation(rank)

    def alive(self) -> tuple[int, ...]:
        """Note who is missing, if it is not as when this rank asked last; at first, nobody is."""
        members = self._inner.alive()
        self._recorder.looks += 1
        if members is self._seen:
            return members
        self._seen = members
        missing = tuple(sorted({*range(self._size)}.difference(members)))
        if missing != self._missing:
            self._missing = missing
            self._recorder.note("alive", missing=list(missing), look=self._recorder.looks)
        return members

    def view(self) -> View:
        return self._inner.view()

    def final_roster(self) -> tuple[tuple[int, int], ...]:
        return self._inner.final_roster()

    def roster(self, number: int, take_in: bool = False) -> Roster | None:
        return self._inner.roster(number, take_in)

    def someone_waits(self) -> bool:
        return self._inner.someone_waits()

    def wait_to_be_taken_in(self, workers: int) -> Roster:
        with self._recorder.waiting:
            roster = self._inner.wait_to_be_taken_in(workers)
        self._recorder.note("arrived", life=self.incarnation(self._rank))
        return roster

    def wait_for_change(self, seconds: float) -> bool:
        with self._recorder.waiting:
            return self._inner.wait_for_change(seconds)

    def wait_for_successor(self, rank: int, incarnation: int) -> None:
        with self._recorder.waiting:
            self._inner.wait_for_successor(rank, incarnation)
        self._recorder.note("returned", rank, wait_s=self._recorder.waited_s)

    def announce_ready(self) -> None:
        self._inner.announce_ready()
        self._recorder.note("arrived", life=self.incarnation(self._rank))

    def rejoin(self) -> None:
        self._inner.rejoin()
        self.late = self._inner.late
        self._recorder.note("rejoin", life=self.incarnation(self._rank))


class TracedQueue(DataQueue):
    """Notes each batch that was drawn, and who was seen to have come to the end of its data."""

    def __init__(self, inner: DataQueue, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder
        self._closed = False
        self._finished: frozenset[int] = frozenset()

    def mark_used(self, queue: int, epoch: int, number: int) -> None:
        self._inner.mark_used(queue, epoch, number)

    def lost_batches(self) -> int:
        return self._inner.lost_batches()

    def close(self) -> None:
        self._inner.close()

    def mark_finished(self) -> None:
        self._inner.mark_finished()

    def draw(self, queue: int, epoch: int) -> int | None:
        number = self._inner.draw(queue, epoch)
        self._recorder.note("ticket", queue=queue, epoch=epoch, number=number)
        return number

    def closed(self) -> bool:
        """Note when this rank first saw that all are to stop."""
        closed = self._inner.closed()
        if closed and not self._closed:
            self._closed = True
            self._recorder.note("stop")
        return closed

    def finished(self) -> frozenset[int]:
        """Note who has come to the end of its data, if that is not as when this rank last asked.

        A replay needs to know: whom a worker picks depends on it.
        """
        ranks = self._inner.finished()
        self._recorder.looks += 1
        if ranks != self._finished:
            self._finished = ranks
            self._recorder.note("retired", ranks=sorted(ranks), look=self._recorder.looks)
        return ranks


class MeteredPorts(Ports):
    """The ports of a world, counted and traced.

    Args:
        inner: the world's own; what goes through them is off the meter.
        trace: what events are written to.
        clock: in place of the world's own.
        recorder: counts and notes, in place of one that writes to ``trace``.
    """

    def __init__(
        self,
        inner: Ports,
        trace: Trace | None = None,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        recorder = recorder or Recorder(inner.rank, inner.clock, trace)
        self.inner, self.recorder = inner, recorder
        super().__init__(
            inner.rank,
            inner.size,
            MeteredMail(inner.mail, recorder),
            MeteredCollectives(inner.collectives, recorder),
            TracedMembers(inner.members, inner.rank, inner.size, recorder),
            TracedQueue(inner.queue, recorder),
            clock or inner.clock,
            inner.rendezvous,
        )

    def off_meter(self) -> Ports:
        return self.inner.off_meter()

    @contextmanager
    def uncharged(self) -> Iterator[None]:
        with self.inner.uncharged():
            yield

    def close(self) -> None:
        self.inner.close()

    def give_up(self) -> None:
        self.inner.give_up()

    def first_loss(self, error: PeerLost) -> PeerLost:
        return self.inner.first_loss(error)
