"""Metering as a wrapper: any transport, counted and traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.comm.base import Call, Factor, Transport, Work
from paceline.errors import PeerLost, PeersGone
from paceline.record.history import History
from paceline.record.trace import Trace

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Meter:
    """What one rank has sent, and how long it has waited for others."""

    bytes_sent: int = 0
    wait_s: float = 0.0
    charged_s: float = 0.0
    """Computing that a virtual clock was told of."""


class MeteredTransport(Transport):
    """Counts what goes through another transport, and writes it to a trace.

    ``bytes_sent`` is the payload that strategies hand in: the same on every transport. An
    all-reduce of n bytes counts n for each rank that contributes, a broadcast n for each member.

    What chance or timing decides is in the trace, so that a run can be replayed from it: which
    message was taken, which version was read, which ticket was drawn, who was seen to be here.
    ``look`` is the number of the call that saw it, among those that may see nothing.

    What ends in ``_s`` is how long it took: ``wait_s`` until it came, ``send_s`` to hand it over.

    Args:
        inner: the other transport.
        trace: what events are written to.
        on_step: called with the number of each step that begins.

    Attributes:
        meter: what has been counted so far.
    """

    def __init__(
        self,
        inner: Transport,
        trace: Trace | None = None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.meter = Meter()
        self._on_step = on_step
        self._sends: History | None = None
        self._trace = trace
        self._scale = 1.0
        self._looks = 0
        self._waited_s = 0.0
        self._missing: tuple[int, ...] = ()
        self._retired: frozenset[int] = frozenset()
        self._members: tuple[int, ...] | None = None

    def note(self, event: str, peer: int | None = None, nbytes: int = 0, **more: Any) -> None:
        """Write an event of this rank to the trace, at the present time."""
        if self._trace is not None:
            weighed = self._weigh(nbytes)
            self._trace.record(self.inner.now(), self.rank, event, peer, weighed, **more)

    def account_sends(self, history: History) -> None:
        """From now on, note each send there: a rank that serves makes no steps to note it at."""
        self._sends = history

    def _weigh(self, nbytes: int) -> int:
        """What bytes count for: others than there are when the model stands for another."""
        return nbytes if self._scale == 1 else round(nbytes * self._scale)

    def _sent(self, event: str, peer: int | None, nbytes: int, **more: Any) -> None:
        self.meter.bytes_sent += self._weigh(nbytes)
        self.note(event, peer, nbytes, **more)
        if self._sends is not None:
            self._sends.note(self.inner.now(), 0, self.meter.bytes_sent)

    def _waiting(self, operation: Callable[[], Any]) -> Any:
        start_s = self.inner.now()
        try:
            return operation()
        finally:
            self._waited_s = self.inner.now() - start_s
            self.meter.wait_s += self._waited_s

    def _clock(self) -> float:
        """The present time, if there is a trace to write it to."""
        return 0.0 if self._trace is None else self.inner.now()

    # Messages ------------------------------------------------------------------------------------

    def alive(self) -> tuple[int, ...]:
        return self._saw(self.inner.alive())

    def _saw(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Note who is missing, if it is not as when this rank asked last; at first, nobody is."""
        self._looks += 1
        if members is self._members:
            return members
        self._members = members
        missing: tuple[int, ...] = ()
        if len(members) < self.size:
            here = set(members)
            missing = tuple(rank for rank in range(self.size) if rank not in here)
        if missing != self._missing:
            self._missing = missing
            self.note("alive", missing=list(missing), look=self._looks)
        return members

    def starters(self) -> tuple[int, ...]:
        return self.inner.starters()

    def uncharged(self) -> Transport:
        return self.inner.uncharged()

    @property
    def late(self) -> bool:  # type: ignore[override]  # an attribute where there is no inner one
        return self.inner.late

    def membership(self) -> int:
        return self.inner.membership()

    def last_members(self) -> tuple[tuple[int, int], ...]:
        return self.inner.last_members()

    def lost_life(self, rank: int) -> int:
        return self.inner.lost_life(rank)

    def lost(self) -> frozenset[int]:
        return self.inner.lost()

    def left(self) -> frozenset[int]:
        return self.inner.left()

    def stopped(self) -> frozenset[int]:
        return self.inner.stopped()

    def stop_all(self) -> None:
        self.inner.stop_all()

    def stopping(self) -> bool:
        return self._saw_stop(self.inner.stopping())

    def _saw_stop(self, stopping: bool) -> bool:
        """Note when this rank first saw that all are to stop, for a replay."""
        if stopping and not self._stopping:
            self._stopping = True
            self.note("stop")
        return stopping

    def retired(self) -> frozenset[int]:
        return self._saw_retired(self.inner.retired())

    def _saw_retired(self, ranks: frozenset[int]) -> frozenset[int]:
        """Note who has come to the end of its data, if others have than when this rank last asked.

        A replay needs to know: whom a worker picks depends on it.
        """
        self._looks += 1
        if ranks != self._retired:
            self._retired = ranks
            self.note("retired", ranks=sorted(ranks), look=self._looks)
        return ranks

    def life(self, rank: int) -> int:
        return self.inner.life(rank)

    def arrived(self) -> None:
        self.inner.arrived()
        self.note("arrived", life=self.life(self.rank))

    def rejoin(self) -> None:
        self.inner.rejoin()
        self.note("rejoin", life=self.life(self.rank))

    def inherited(self, like: Tensor, rank: int) -> tuple[int, Tensor] | None:
        return self.inner.inherited(like, rank)

    def keep(self, x: Tensor) -> None:
        self.inner.keep(x)

    def kept(self) -> Tensor | None:
        return self.inner.kept()

    def shelve(self, x: Tensor, shelf: int) -> None:
        self.inner.shelve(x, shelf)

    def shelved(self, rank: int, shelf: int) -> Tensor | None:
        return self.inner.shelved(rank, shelf)

    def await_change(self, seconds: float) -> bool:
        changed: bool = self._waiting(lambda: self.inner.await_change(seconds))
        return changed

    def await_return(self, rank: int, life: int) -> None:
        self._waiting(lambda: self.inner.await_return(rank, life))
        self.note("returned", rank, wait_s=self._waited_s)

    def done_with(self, queue: int, epoch: int, number: int) -> None:
        self.inner.done_with(queue, epoch, number)

    def batches_lost(self) -> int:
        return self.inner.batches_lost()

    # Meetings ------------------------------------------------------------------------------------

    @property
    def meets(self) -> bool:  # type: ignore[override]  # an attribute where there is no inner one
        return self.inner.meets

    def call(self, known: int, step: int, stop: bool, over: int) -> None:
        self.inner.call(known, step, stop, over)

    def called(self) -> Call:
        return self.inner.called()

    def meet(self, number: int, members: Sequence[int], lives: Sequence[int]) -> bool:
        there: bool = self._waiting(lambda: self.inner.meet(number, members, lives))
        return there

    def retire(self) -> None:
        self.inner.retire()

    def snapshot(self, without: Sequence[int] | None) -> dict[str, Any]:
        return {**self.inner.snapshot(without), "meter": vars(self.meter), "looks": self._looks}

    def restore(self, state: dict[str, Any]) -> None:
        self.inner.restore(state)
        self.meter.__dict__.update(state["meter"])
        self._looks = state["looks"]

    @contextmanager
    def free(self) -> Iterator[None]:
        meter, trace = replace(self.meter), self._trace
        self._trace = None
        try:
            with self.inner.free():
                yield
        finally:
            self._trace = trace
            self.meter.__dict__.update(vars(meter))

    def start_send(self, x: Tensor, dst: int, tag: int) -> Work:
        self._sent("send", dst, x.nbytes, tag=tag)
        return _MeteredWork(self, "send", self.inner.start_send(x, dst, tag))

    def post(self, x: Tensor, dst: int, tag: int) -> bool:
        start_s = self._clock()
        left = self.inner.post(x, dst, tag)
        return self._posted(x, dst, tag, left, start_s)

    def _posted(self, x: Tensor, dst: int, tag: int, left: bool, start_s: float) -> bool:
        if left:
            self._sent("post", dst, x.nbytes, tag=tag, send_s=self._clock() - start_s)
        else:
            self.note("post_refused", dst, tag=tag)
        return left

    def take(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, watch: bool = False
    ) -> tuple[int, Tensor]:
        try:
            src, x = self._waiting(lambda: self.inner.take(like, sources, tag, op, watch))
        except PeerLost as lost:
            if watch:
                self.note("gone", lost.rank, wait_s=self._waited_s)
            raise
        except PeersGone:
            self.note("gone", wait_s=self._waited_s)
            raise
        self.note("recv", src, x.nbytes, tag=tag, wait_s=self._waited_s)
        return src, x

    def take_now(self, like: Tensor, sources: Sequence[int], tag: int) -> tuple[int, Tensor] | None:
        return self._polled(self.inner.take_now(like, sources, tag), tag)

    def _polled(self, message: tuple[int, Tensor] | None, tag: int) -> tuple[int, Tensor] | None:
        self._looks += 1
        if message is not None:
            self.note("recv", message[0], message[1].nbytes, tag=tag, look=self._looks)
        return message

    def publish(self, x: Tensor) -> int:
        start_s = self._clock()
        version = self.inner.publish(x)
        self.note("publish", version=version, send_s=self._clock() - start_s)
        return version

    def peek(self, src: int, like: Tensor | None) -> tuple[int, Tensor] | None:
        return self._peeked(src, lambda: self.inner.peek(src, like))

    def _peeked(
        self, src: int, peek: Callable[[], tuple[int, Tensor] | None]
    ) -> tuple[int, Tensor] | None:
        seen: tuple[int, Tensor] | None = self._waiting(peek)
        if seen is None:
            self.note("peek", src, version=None, wait_s=self._waited_s)
        else:
            self._sent("peek", src, seen[1].nbytes, version=seen[0], wait_s=self._waited_s)
        return seen

    # Collectives ---------------------------------------------------------------------------------

    def start_all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None = None
    ) -> Work:
        self._reducing(x, weight, members)
        return _MeteredWork(
            self, "all_reduce", self.inner.start_all_reduce(x, weight, members, factor)
        )

    def all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None = None
    ) -> int:
        self._reducing(x, weight, members)
        try:
            total: int = self._waiting(lambda: self.inner.all_reduce(x, weight, members, factor))
        except PeerLost as lost:
            self.note("missed", lost.rank, wait_s=self._waited_s)
            raise
        self.note("all_reduce_end", wait_s=self._waited_s)
        return total

    def _reducing(self, x: Tensor, weight: int, members: tuple[int, ...]) -> None:
        nbytes = x.nbytes if weight else 0
        self._sent("all_reduce", None, nbytes, members=len(members), first=members[0])

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        self._waiting(lambda: self.inner.broadcast(x, src, members))
        self._sent("broadcast", src, x.nbytes, members=len(members), wait_s=self._waited_s)

    # Clock and data ------------------------------------------------------------------------------

    def ticket(self, queue: int, epoch: int) -> int | None:
        return self._drew(queue, epoch, self.inner.ticket(queue, epoch))

    def _drew(self, queue: int, epoch: int, number: int | None) -> int | None:
        self.note("ticket", queue=queue, epoch=epoch, number=number)
        return number

    def now(self) -> float:
        return self.inner.now()

    def compute(self, seconds: float) -> None:
        self.meter.charged_s += seconds
        self.inner.compute(seconds)

    def charge_gather(self, nbytes: int) -> None:
        self.inner.charge_gather(nbytes)

    def serves(self) -> None:
        self.inner.serves()

    def charge_update(self, nbytes: int) -> None:
        self.inner.charge_update(nbytes)

    def know_model(self, nbytes: int, tensors: int) -> float:
        self._scale = self.inner.know_model(nbytes, tensors)
        return self._scale

    def step_begins(self, step: int) -> None:
        self.inner.step_begins(step)
        self._on_step(step)

    def allocate(self, numel: int, like: Tensor) -> Tensor:
        return self.inner.allocate(numel, like)

    def resume(self) -> None:
        self.inner.resume()

    def close(self) -> None:
        self.inner.close()


class _MeteredWork(Work):
    def __init__(self, transport: MeteredTransport, op: str, inner: Work) -> None:
        self._transport, self._op, self._inner = transport, op, inner

    def done(self) -> bool:
        return self._inner.done()

    def wait(self) -> int:
        transport = self._transport
        total: int = transport._waiting(self._inner.wait)
        transport.note(f"{self._op}_end", wait_s=transport._waited_s)
        return total
