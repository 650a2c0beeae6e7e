"""Replays a real run in the simulated world, in its recorded order.

In a real run, chance decides which message arrives first, which version a rank reads, which ticket
it draws and which ranks it sees alive. The trace records these outcomes, in the order of each rank.
In a replay the next recorded event of a rank decides instead of chance, and every event of the rank
must equal the recorded one, except for its duration.

The replay kills a worker that was lost in the recorded run where its record ends, once the others
have had all their recorded events with it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.comm.metered import MeteredPorts, Recorder
from paceline.comm.ports import PUBLISHED, Lost, Message, Published
from paceline.common.faults import kill
from paceline.errors import PacelineError, PeerLost, UsageError
from paceline.record.folder import RecordedRun
from paceline.record.trace import Trace, is_duration, read
from paceline.sim.clock import SimulatedClock
from paceline.sim.mail import SimulatedMail
from paceline.sim.members import SimulatedMembers
from paceline.sim.queue import SimulatedQueue
from paceline.sim.rank import SimulatedRank
from paceline.sim.world import SimulatedPorts

Event = dict[str, Any]
Edition = tuple[int, int]
"""A rank, and the version of the vector that it published."""
_NEEDS = {"send", "post", "recv", "peek"}
"""Events that need the peer to be a member."""


def check_trace(run: RecordedRun) -> None:
    """Refuse a run whose trace cannot be replayed, without replaying it."""
    try:
        Replay(run.trace)
    except UsageError as error:
        raise run.unfit(str(error)) from None


class Replay:
    """A recorded run, shared by the ranks of its replay.

    Args:
        trace: its trace.
        lost: the workers that were lost.
        workers: the number of workers.
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
            incomplete = [rank for rank in lost if self._is_incomplete(rank)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{trace} is not the trace of a run: {error}") from None
        for rank in incomplete:
            raise UsageError(
                f"{trace} lacks the last moments of rank {rank}, which was killed: others received"
                " more from it than it recorded, so the run cannot be replayed"
            )

    def _is_incomplete(self, rank: int) -> bool:
        """Whether others received something from ``rank`` that its own record does not hold."""
        own, published, seen = self._events[rank], 0, 0
        sent, received = Counter[Any](), Counter[Any]()
        for event in own:
            sent[event["peer"], event.get("tag")] += event["event"] in ("post", "send")
            published = max(published, event["version"] if event["event"] == "publish" else 0)
        for reader, events in self._events.items():
            for event in events:
                if event["peer"] == rank:
                    received[reader, event.get("tag")] += event["event"] == "recv"
                    seen = max(seen, event["version"] or 0 if event["event"] == "peek" else 0)
        return not own or seen > published or not received <= sent

    def follow(self, inner: SimulatedPorts, trace: Trace) -> MeteredPorts:
        """The ports of a rank that repeats its recorded events."""
        script = Script(inner.rank, self._events[inner.rank])
        recorder = ReplayedRecorder(inner, trace, script, self._ends)
        return MeteredPorts(ReplayedPorts(inner, recorder, self._archive), recorder=recorder)


class Script:
    """The recorded events of one rank, and how many of them its replay has reached."""

    def __init__(self, rank: int, events: Sequence[Event]) -> None:
        self._rank, self._events, self._done = rank, events, 0

    @property
    def next(self) -> Event | None:
        """The next recorded event; None at the end."""
        return self._events[self._done] if self._done < len(self._events) else None

    def decision(self, what: str, *events: str) -> Event:
        """The next event, which must be one of ``events``: the outcome of ``what``."""
        due = self.next
        if due is None or due["event"] not in events:
            raise self.mismatch(what)
        return due

    def next_if(self, **facts: Any) -> Event | None:
        """The next event if it has these ``facts``; None if the recorded poll found nothing."""
        due = self.next
        return due if due is not None and facts.items() <= due.items() else None

    def find_next(self, event: str) -> Event | None:
        """The next recorded event of this kind."""
        return next((due for due in self._events[self._done :] if due["event"] == event), None)

    def advance(self, event: Event) -> None:
        """Move past the next recorded event; ``event`` must have all its facts."""
        due = self.next
        if due is None or not due.items() <= event.items():
            raise self.mismatch(_describe(event))
        self._done += 1

    def end(self) -> None:
        """Refuse to end before the last recorded event."""
        if self.next is not None:
            raise self.mismatch("the end of the rank")

    def mismatch(self, what: str) -> PacelineError:
        """The error of a replay that does ``what`` instead of the recorded event."""
        position = f"event {self._done + 1} of {len(self._events)}"
        recorded = "nothing more" if self.next is None else _describe(self.next)
        return PacelineError(
            f"rank {self._rank} leaves the recorded run at its {position}: recorded is {recorded},"
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
    """The published versions that some rank will still read, and the ranks that wait for one."""

    def __init__(self, events: Iterable[Event]) -> None:
        peeks = (event for event in events if event["event"] == "peek" and event["version"])
        self._wanted = Counter((event["peer"], event["version"]) for event in peeks)
        self._kept: dict[Edition, Published] = {}
        self._waiting: defaultdict[Edition, list[SimulatedRank]] = defaultdict(list)

    def add(self, src: int, published: Published) -> None:
        """Keep a copy of a published vector if some rank will read it."""
        edition = (src, published.version)
        if edition in self._wanted:
            self._kept[edition] = published._replace(x=published.x.clone())
            for reader in self._waiting.pop(edition, ()):
                reader.world.end_wait(reader.rank)

    def take(self, reader: SimulatedRank, edition: Edition) -> Published:
        """Wait until ``edition`` is published; drop it after its last read."""
        src, version = edition
        if edition not in self._kept:
            self._waiting[edition].append(reader)
            op = f"peek at version {version} of rank {src}"
            reader.wait(op, (src,), lambda: reader.loss((src,), op))
        self._wanted[edition] -= 1
        return self._kept[edition] if self._wanted[edition] else self._kept.pop(edition)


class Ends:
    """Where the lost ranks end, and how many events of others each must wait for before."""

    def __init__(
        self, events: Mapping[int, Iterable[Event]], lost: Collection[int], workers: int
    ) -> None:
        self.lost, self._survivors = frozenset(lost), workers - len(lost)
        all_events = (event for of_rank in events.values() for event in of_rank)
        needs = Counter(event["peer"] for event in all_events if event["event"] in _NEEDS)
        self._needed = {rank: needs[rank] for rank in lost}
        self._waiting: dict[int, SimulatedRank] = {}

    def missed(self, members: int) -> frozenset[int]:
        """The lost ranks that did not take part in a collective of so many ``members``."""
        missing = self._survivors + len(self.lost) - members
        if missing not in (0, len(self.lost)):
            raise PacelineError(
                f"{members} workers met, and the trace does not say which of the lost ones did"
            )
        return self.lost if missing else frozenset()

    def count(self, event: str, peer: int | None) -> None:
        """Record that a rank has reached an event with ``peer``."""
        if peer in self._needed and event in _NEEDS:
            self._needed[peer] -= 1
            if not self._needed[peer] and peer in self._waiting:
                self._waiting[peer].world.end_wait(peer)

    def end_rank(self, ports: SimulatedPorts) -> None:
        """Kill a rank, once the others have had all their recorded events with it."""
        own = ports.own
        if self._needed[own.rank]:
            self._waiting[own.rank] = own
            own.wait("its end", (), lambda: None)
        own.world.inject(kill(rank=own.rank))
        ports.clock.begin_step(-1)


class ReplayedRecorder(Recorder):
    """Checks every event against the script before it records the event."""

    def __init__(self, inner: SimulatedPorts, trace: Trace, script: Script, ends: Ends) -> None:
        super().__init__(inner.rank, inner.clock, trace)
        self.script, self.ends, self._inner = script, ends, inner

    def end_if_due(self) -> None:
        """End this rank here if it was lost and its record ends here."""
        if self.script.next is None and self.rank in self.ends.lost:
            self.ends.end_rank(self._inner)

    def note(self, event: str, peer: int | None = None, nbytes: int = 0, **more: Any) -> None:
        self.end_if_due()
        self.script.advance({"event": event, "peer": peer, "bytes": nbytes, **more})
        self.ends.count(event, peer)
        super().note(event, peer, nbytes, **more)


class ReplayedMail(SimulatedMail):
    """The mail of a replay: the script decides which message and which version a rank gets."""

    def __init__(self, own: SimulatedRank, recorder: ReplayedRecorder, archive: Archive) -> None:
        super().__init__(own)
        self._recorder, self._archive, self._script = recorder, archive, recorder.script

    def post(self, x: Tensor, dst: int, tag: int, header: bytes) -> bool:
        self._recorder.end_if_due()
        outcome = self._script.decision(f"post to rank {dst}", "post", "post_refused")
        posted = bool(outcome["event"] == "post")
        if posted:
            self.deliver(x, dst, tag, header)
        return posted

    def receive(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, any_loss: bool = False
    ) -> Message | Lost:
        self._recorder.end_if_due()
        if len(sources) > 1:
            peer = self._script.decision(f"{op} with tag {tag}", "recv", "gone")["peer"]
            sources = sources if peer is None else (peer,)
        return super().receive(like, sources, tag, op, any_loss)

    def try_receive(self, like: Tensor, sources: Sequence[int], tag: int) -> Message | None:
        due = self._script.next_if(event="recv", tag=tag, look=self._recorder.looks + 1)
        if due is None:
            return None
        message = super().receive(like, (due["peer"],), tag, "poll")
        if isinstance(message, Lost):
            raise self._script.mismatch(f"the end of rank {message.ranks[0]}")
        return message

    def publish(self, x: Tensor, header: bytes = b"", window: int = PUBLISHED) -> int:
        self._recorder.end_if_due()
        version = super().publish(x, header, window)
        if window == PUBLISHED:
            self._archive.add(self._own.rank, Published(version, x, header))
        return version

    def peek(
        self, src: int, like: Tensor | None, window: int = PUBLISHED, gone: bool = False
    ) -> Published | None:
        if window != PUBLISHED or gone:
            return super().peek(src, like, window, gone)
        self._recorder.end_if_due()
        version = self._script.decision(f"peek at rank {src}", "peek")["version"]

        def look() -> Published | None:
            return self._archive.take(self._own, (src, version)) if version else None

        try:
            return self.read(src, like, look)
        except PeerLost as lost:
            raise self._script.mismatch(f"the end of rank {lost.rank}") from None


class ReplayedMembers(SimulatedMembers):
    """The members of a replay: the script decides which ranks are seen alive."""

    def __init__(self, inner: SimulatedPorts, recorder: ReplayedRecorder) -> None:
        super().__init__(inner.own)
        self._simulated, self._everyone = inner.members, range(inner.size)
        self._recorder, self._script, self._ends = recorder, recorder.script, recorder.ends
        self._missing: Collection[int] = ()

    def final_roster(self) -> tuple[tuple[int, int], ...]:
        """The size of the next all-reduce shows whether the ranks knew of a loss."""
        due = self._script.find_next("all_reduce") if self._ends.lost else None
        if due is None:
            return self._simulated.final_roster()
        missed = self._ends.missed(due["members"])
        roster = (rank for rank in self._everyone if rank not in missed)
        return tuple((rank, self.incarnation(rank)) for rank in roster)

    def alive(self) -> tuple[int, ...]:
        due = self._script.next_if(event="alive", look=self._recorder.looks + 1)
        self._missing = self._missing if due is None else due["missing"]
        return tuple(rank for rank in self._everyone if rank not in self._missing)


class ReplayedQueue(SimulatedQueue):
    """The data queue of a replay: the script decides which batch a rank draws."""

    def __init__(self, own: SimulatedRank, recorder: ReplayedRecorder) -> None:
        super().__init__(own)
        self._recorder, self._script = recorder, recorder.script
        self._closed, self._finished = False, frozenset[int]()

    def draw(self, queue: int, epoch: int) -> int | None:
        self._recorder.end_if_due()
        number: int | None = self._script.decision("ticket", "ticket")["number"]
        return number

    def closed(self) -> bool:
        self._closed = self._closed or self._script.next_if(event="stop") is not None
        return self._closed

    def finished(self) -> frozenset[int]:
        due = self._script.next_if(event="retired", look=self._recorder.looks + 1)
        self._finished = self._finished if due is None else frozenset(due["ranks"])
        return self._finished


class ReplayedClock(SimulatedClock):
    """A clock that ends a lost rank before the first step that its record does not hold."""

    def __init__(self, own: SimulatedRank, recorder: ReplayedRecorder) -> None:
        super().__init__(own)
        self._end_if_due = recorder.end_if_due

    def begin_step(self, step: int) -> None:
        self._end_if_due()
        super().begin_step(step)


class ReplayedPorts(SimulatedPorts):
    """The ports of one rank of a replay: its script decides instead of chance.

    Measurements, through :meth:`off_meter`, see the simulated state, not the script.
    """

    def __init__(self, inner: SimulatedPorts, recorder: ReplayedRecorder, archive: Archive) -> None:
        super().__init__(inner.own)
        self.mail = ReplayedMail(inner.own, recorder, archive)
        self.members = ReplayedMembers(inner, recorder)
        self.queue = ReplayedQueue(inner.own, recorder)
        self.clock = ReplayedClock(inner.own, recorder)
        self._script = recorder.script

    def close(self) -> None:
        self._script.end()
        super().close()
