"""The recorded order of a real run, followed in the simulated world.

A real run leaves to chance which message comes first, which version is read, which ticket is drawn
and who is still seen. Its trace tells all of that, in each rank's own order. In a replay the next
recorded event of a rank decides what chance decided then, and every event that the rank notes must
be the recorded one, but for the time that it took.

A worker that was lost then is killed where its record ends, once the others have had all of it that
they had then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.comm.metered import MeteredTransport
from paceline.common.faults import kill
from paceline.errors import PacelineError, PeerLost, UsageError
from paceline.record.trace import Trace, is_duration, read

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.record.folder import RecordedRun
    from paceline.sim.world import SimulatedTransport

Event = dict[str, Any]
Edition = tuple[int, int]
"""A rank, and the version of what it published."""
T = TypeVar("T")
_NEEDS = {"send", "post", "recv", "peek"}
"""What a rank does with another that is there."""


def check_trace(run: RecordedRun) -> None:
    """Refuse a run whose trace cannot be followed; runs nothing."""
    try:
        Replay(run.trace)
    except UsageError as error:
        raise run.unfit(str(error)) from None


class Replay:
    """A recorded run, as the ranks of its replay share it.

    Args:
        trace: its trace.
        lost: the workers that were lost.
        workers: how many there were.
    """

    def __init__(self, trace: Path, lost: Collection[int] = (), workers: int = 0) -> None:
        self.lost = lost
        self._events: defaultdict[int, list[Event]] = defaultdict(list)
        try:
            for record in read(trace):
                rank = record.pop("rank")
                facts = {k: v for k, v in record.items() if k != "t" and not is_duration(k)}
                self._events[rank].append(facts)
            if not self._events:
                raise ValueError("it holds no record")
            self._archive = Archive(event for events in self._events.values() for event in events)
            self._ends = Ends(self._events, lost, workers)
            lacking = [rank for rank in lost if self._lacks(rank)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{trace} is not the trace of a run: {error}") from None
        for rank in lacking:
            raise UsageError(
                f"{trace} lacks the last moments of rank {rank}, which was killed: others had more"
                " of it than it has written down, so the run cannot be replayed"
            )

    def _lacks(self, rank: int) -> bool:
        """Whether others have had something of ``rank`` that its own record does not hold."""
        own, sent, had, published, seen = self._events[rank], Counter[Any](), Counter[Any](), 0, 0
        for event in own:
            sent[event["peer"], event.get("tag")] += event["event"] in ("post", "send")
            published = max(published, event["version"] if event["event"] == "publish" else 0)
        for reader, events in self._events.items():
            for event in events:
                if event["peer"] == rank:
                    had[reader, event.get("tag")] += event["event"] == "recv"
                    seen = max(seen, event["version"] or 0 if event["event"] == "peek" else 0)
        return not own or seen > published or not had <= sent

    def follow(self, inner: SimulatedTransport, trace: Trace) -> ReplayedTransport:
        """The transport of a rank that does as it did."""
        script = Script(inner.rank, self._events[inner.rank])
        return ReplayedTransport(inner, trace, script, self._archive, self._ends)


class Script:
    """What one rank did, in order, and how far its replay has come."""

    def __init__(self, rank: int, events: Sequence[Event]) -> None:
        self._rank, self._events, self._done = rank, events, 0

    @property
    def next(self) -> Event | None:
        """The event that was recorded next; None at the end."""
        return self._events[self._done] if self._done < len(self._events) else None

    def decision(self, what: str, *events: str) -> Event:
        """The next event, one of ``events``: how ``what`` came out."""
        due = self.next
        if due is None or due["event"] not in events:
            raise self.differs(what)
        return due

    def sight(self, **facts: Any) -> Event | None:
        """The next event, if it has these ``facts``; None when the present look saw nothing."""
        due = self.next
        return due if due is not None and facts.items() <= due.items() else None

    def ahead(self, event: str) -> Event | None:
        """The next event of that kind."""
        return next((due for due in self._events[self._done :] if due["event"] == event), None)

    def go_on(self, event: Event) -> None:
        """Leave an event behind, of which all must be true that was recorded."""
        due = self.next
        if due is None or not due.items() <= event.items():
            raise self.differs(_describe(event))
        self._done += 1

    def end(self) -> None:
        """Refuse to end before the recorded run did."""
        if self.next is not None:
            raise self.differs("the end of the rank")

    def differs(self, what: str) -> PacelineError:
        """The error of a replay that comes to ``what`` instead of the recorded event."""
        place = f"event {self._done + 1} of {len(self._events)}"
        recorded = "nothing more" if self.next is None else _describe(self.next)
        return PacelineError(
            f"rank {self._rank} leaves the recorded run at its {place}: recorded is {recorded},"
            f" the replay comes to {what}"
        )


def _describe(event: Event) -> str:
    facts = {
        name: value
        for name, value in event.items()
        if name != "event" and value is not None and not is_duration(name)
    }
    return f"{event['event']} ({', '.join(f'{name} {value}' for name, value in facts.items())})"


class Archive:
    """The published versions that are still to be read, and who waits for one."""

    def __init__(self, events: Iterable[Event]) -> None:
        peeks = (event for event in events if event["event"] == "peek" and event["version"])
        self._wanted = Counter((event["peer"], event["version"]) for event in peeks)
        self._kept: dict[Edition, Tensor] = {}
        self._waiting: defaultdict[Edition, list[SimulatedTransport]] = defaultdict(list)

    def add(self, edition: Edition, x: Tensor) -> None:
        """Keep a copy of what was published, if it will be read."""
        if edition in self._wanted:
            self._kept[edition] = x.clone()
            for reader in self._waiting.pop(edition, ()):
                reader.world.end_wait(reader.rank)

    def take(self, reader: SimulatedTransport, edition: Edition) -> tuple[int, Tensor]:
        """Wait until it is published; forget it when nobody else will read it."""
        src, version = edition
        if edition not in self._kept:
            self._waiting[edition].append(reader)
            op = f"peek at version {version} of rank {src}"
            reader.wait(op, (src,), lambda: reader.loss((src,), op))
        self._wanted[edition] -= 1
        return version, self._kept[edition] if self._wanted[edition] else self._kept.pop(edition)


class Ends:
    """The ends of those that were lost, and what others still have to do with each before."""

    def __init__(
        self, events: Mapping[int, Iterable[Event]], lost: Collection[int], workers: int
    ) -> None:
        self.lost, self._left = frozenset(lost), workers - len(lost)
        theirs = (event for mine in events.values() for event in mine)
        needs = Counter(event["peer"] for event in theirs if event["event"] in _NEEDS)
        self._needed = {rank: needs[rank] for rank in lost}
        self._waiting: dict[int, SimulatedTransport] = {}

    def missed(self, members: int) -> frozenset[int]:
        """Who was not among so many workers that met."""
        missing = self._left + len(self.lost) - members
        if missing not in (0, len(self.lost)):
            raise PacelineError(
                f"{members} workers met, and the trace does not say which of the lost ones did"
            )
        return self.lost if missing else frozenset()

    def passes(self, event: str, peer: int | None) -> None:
        """Hear that a rank has come to an event of its record."""
        if peer in self._needed and event in _NEEDS:
            self._needed[peer] -= 1
            if not self._needed[peer] and peer in self._waiting:
                self._waiting[peer].world.end_wait(peer)

    def come(self, transport: SimulatedTransport) -> None:
        """Have a rank end, when all others have had of it what they had."""
        rank = transport.rank
        if self._needed[rank]:
            self._waiting[rank] = transport
            transport.wait("its end", (), lambda: None)
        transport.world.inject(kill(rank=rank))
        transport.step_begins(-1)


class ReplayedTransport(MeteredTransport):
    """One rank of a replay: what chance decides comes from its script.

    What only looks at the run, through :meth:`uncharged`, sees the present, not the script.
    """

    inner: SimulatedTransport

    def __init__(
        self,
        inner: SimulatedTransport,
        trace: Trace,
        script: Script,
        archive: Archive,
        ends: Ends,
    ) -> None:
        super().__init__(inner, trace)
        self._script, self._archive, self._ends = script, archive, ends

    def _come_to_end(self) -> None:
        """End here, if this rank was lost and has done all that it did."""
        if self._script.next is None and self.rank in self._ends.lost:
            self._ends.come(self.inner)

    def last_members(self) -> tuple[tuple[int, int], ...]:
        """Whether they knew of a loss is seen by how many of them meet."""
        due = self._script.ahead("all_reduce") if self._ends.lost else None
        if due is None:
            return super().last_members()
        missed = self._ends.missed(due["members"])
        return tuple((rank, self.life(rank)) for rank in range(self.size) if rank not in missed)

    def step_begins(self, step: int) -> None:
        self._come_to_end()
        super().step_begins(step)

    def note(self, event: str, peer: int | None = None, nbytes: int = 0, **more: Any) -> None:
        self._come_to_end()
        self._script.go_on({"event": event, "peer": peer, "bytes": nbytes, **more})
        self._ends.passes(event, peer)
        super().note(event, peer, nbytes, **more)

    def alive(self) -> tuple[int, ...]:
        due = self._script.sight(event="alive", look=self._looks + 1)
        missing = self._missing if due is None else due["missing"]
        return self._saw(tuple(rank for rank in range(self.size) if rank not in missing))

    def stopping(self) -> bool:
        return self._saw_stop(self._stopping or self._script.sight(event="stop") is not None)

    def retired(self) -> frozenset[int]:
        due = self._script.sight(event="retired", look=self._looks + 1)
        return self._saw_retired(self._retired if due is None else frozenset(due["ranks"]))

    def post(self, x: Tensor, dst: int, tag: int) -> bool:
        self._come_to_end()
        came_out = self._script.decision(f"post to rank {dst}", "post", "post_refused")
        left, start_s = bool(came_out["event"] == "post"), self._clock()
        if left:
            self.inner.deliver(x, dst, tag)
        return self._posted(x, dst, tag, left, start_s)

    def take(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, watch: bool = False
    ) -> tuple[int, Tensor]:
        self._come_to_end()
        if len(sources) > 1:
            peer = self._script.decision(f"{op} with tag {tag}", "recv", "gone")["peer"]
            sources = sources if peer is None else (peer,)
        return super().take(like, sources, tag, op, watch)

    def take_now(self, like: Tensor, sources: Sequence[int], tag: int) -> tuple[int, Tensor] | None:
        due = self._script.sight(event="recv", tag=tag, look=self._looks + 1)
        if due is None:
            return self._polled(None, tag)
        peer = due["peer"]
        return self._polled(self._come(lambda: self.inner.take(like, (peer,), tag, "poll")), tag)

    def publish(self, x: Tensor) -> int:
        self._come_to_end()
        version = super().publish(x)
        self._archive.add((self.rank, version), x)
        return version

    def peek(self, src: int, like: Tensor | None) -> tuple[int, Tensor] | None:
        self._come_to_end()
        version = self._script.decision(f"peek at rank {src}", "peek")["version"]

        def look() -> tuple[int, Tensor] | None:
            return self._archive.take(self.inner, (src, version)) if version else None

        return self._peeked(src, lambda: self._come(lambda: self.inner.read(src, like, look)))

    def _come(self, wait: Callable[[], T]) -> T:
        """What was recorded comes, unless its rank ends before."""
        try:
            return wait()
        except PeerLost as lost:
            raise self._script.differs(f"the end of rank {lost.rank}") from None

    def ticket(self, queue: int, epoch: int) -> int | None:
        self._come_to_end()
        return self._drew(queue, epoch, self._script.decision("ticket", "ticket")["number"])

    def close(self) -> None:
        self._script.end()
        super().close()
