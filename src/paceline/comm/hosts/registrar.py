"""The registrar: it alone decides who is a member, and who gets which batch.

It is a state machine. It takes one order of a rank after the other, hears from time to time which
processes run, and is told how much time has passed. It knows no socket, no process and no clock:
:mod:`.registrar_process` runs it. Its whole state is one JSON object, so that another process can
go on from there when the one that it lives in dies.

An order that arrives twice is done once: orders are numbered, and the reply to each is kept until
its rank has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from paceline.comm.batches import SharedBatches, as_batch
from paceline.comm.hosts.wire import BEAT_S
from paceline.comm.standing import GONE, LOST, PRESENT, Standing

QUIET_S = 1.0
"""A rank of which nothing was heard for so long counts as stopped: others do not wait for it."""
OUTCOMES_KEPT = 8
"""Of how many rendezvous the outcome is remembered."""

Json = Any
Order = Sequence[Json]
"""The name of an order, and its arguments."""


@dataclass
class RollEntry:
    """What the roll says of a rank.

    Attributes:
        incarnation: which incarnation of the rank this is; 0 before it has come.
        standing: how that one stands.
        host: names the host that it is on.
        pid: of its process on that host.
        addresses: where it listens, for control and for data.
        reason: why it is gone.
        start: how many processes the launcher had started for the rank before this one.
    """

    incarnation: int = 0
    standing: Standing = Standing.EXPECTED
    host: str = ""
    pid: int = 0
    addresses: list[str] = field(default_factory=list)
    reason: str = ""
    start: int = 0

    def row(self) -> list[Json]:
        """The entry as a list, for JSON."""
        return list(astuple(self))

    @classmethod
    def of(cls, row: Sequence[Json]) -> RollEntry:
        """The entry that :meth:`row` returned."""
        incarnation, standing, host, pid, addresses, reason, start = row
        return cls(incarnation, Standing(standing), host, pid, list(addresses), reason, start)


@dataclass
class Meeting:
    """A rendezvous that is not decided yet: who has to come, who must not end, who has come."""

    members: list[int]
    incarnations: list[int]
    arrived: list[int] = field(default_factory=list)


class LeftOut(Exception):
    """An order of an incarnation that is over: it is not done."""


class Registrar:
    """The table of members, the batches, and the calls to a rendezvous of one run.

    Args:
        size: how many ranks there are.
        workers: how many of them, the first ones, are workers.
        late: the ranks that come after the beginning.
        dead_s: a rank of which nothing was heard for so long is lost.

    Attributes:
        version: grows whenever something changes that all ranks see.
    """

    def __init__(self, size: int, workers: int, late: Sequence[int], dead_s: float) -> None:
        self.size, self._workers, self._dead_s = size, workers, dead_s
        self._late = [*late]
        self.roll = [RollEntry() for _ in range(size)]
        self.version = 1
        self._batches = SharedBatches()
        self._closed = False
        self._finished = [0] * size
        self._roster: list[list[int]] | None = None
        self._agreed: dict[str, list[Json]] = {}
        self._call: list[Json] = [0, 0, False, []]
        self._meetings: dict[int, Meeting] = {}
        self._outcomes: dict[int, bool] = {}
        self._given_up = 0
        self._clients: dict[str, dict[str, Json]] = {}
        # Not saved: a registrar that takes over counts silence anew.
        self._silent_s = [0.0] * size
        self._heard: set[int] = set()
        self._none_heard_s = 0.0
        self._stopped: set[int] = set()
        self._quiet: set[int] = set()

    # Orders --------------------------------------------------------------------------------------

    def handle(
        self, client: str, rank: int, incarnation: int, number: int, done: int, order: Order
    ) -> dict[str, Json] | None:
        """Do an order, unless that was done before; return the reply to it.

        Args:
            client: names the process of the rank.
            rank, incarnation: who gives the order.
            number: of the order, among those of this client; None is returned for one that is
                too early, because an order before it was lost.
            done: the client has the replies to all orders up to this number.
            order: the name of the order, and its arguments.
        """
        kept = self._clients.setdefault(client, {"last": 0, "replies": {}, "rank": rank})
        for old in [key for key in kept["replies"] if int(key) <= done]:
            del kept["replies"][old]
        if number <= kept["last"]:
            return {"number": number, **kept["replies"].get(str(number), {"value": None})}
        if number > kept["last"] + 1:
            return None
        try:
            reply = {"value": self._do(rank, incarnation, order)}
        except LeftOut:
            reply = {"left_behind": True}
        except (ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        kept["last"] = number
        kept["replies"][str(number)] = reply
        return {"number": number, **reply}

    def _do(self, rank: int, incarnation: int, order: Order) -> Json:
        name, *arguments = order
        if name not in _ORDERS or not 0 <= rank < self.size:
            raise ValueError(f"no order {name!r} of rank {rank}")
        if name != "enter" and not self._is_present(rank, incarnation):
            raise LeftOut
        if name not in ("enter", "leave"):  # who wants to enter may be another process
            self._hear(rank)
        return _ORDERS[name](self, rank, *arguments)

    def _is_present(self, rank: int, incarnation: int) -> bool:
        entry = self.roll[rank]
        return entry.incarnation == incarnation and entry.standing not in GONE

    # Who is a member -----------------------------------------------------------------------------

    def _enter(self, rank: int, host: str, pid: int, addresses: list[str], start: int = 0) -> Json:
        """Begin an incarnation of ``rank``; a late joiner is not here before it has its state.

        A process that the launcher started later takes the place of an earlier one.
        """
        entry = self.roll[rank]
        if entry.standing in PRESENT:
            if (entry.host, entry.pid) != (host, pid) and start <= entry.start:
                text = f"process {entry.pid} on {entry.host} has it"
                return {"taken": text, "by_later": start < entry.start}
            self._strike(rank, Standing.DIED, "it begins anew")
        late = rank in self._late or entry.incarnation > 0
        standing = Standing.JOINING if late else Standing.HERE
        own = RollEntry(entry.incarnation + 1, standing, host, pid, addresses, start=start)
        self.roll[rank] = own
        self._silent_s[rank] = 0.0
        for client in [c for c, kept in self._clients.items() if kept["rank"] == rank][:-2]:
            del self._clients[client]  # of processes that are long gone
        self._changed()
        return {"incarnation": self.roll[rank].incarnation, "late": late}

    def _ready(self, rank: int) -> None:
        if self.roll[rank].standing is Standing.JOINING:
            self.roll[rank].standing = Standing.HERE
            self._changed()

    def _wait(self, rank: int) -> None:
        """Note that a late joiner waits to be taken in."""
        if self.roll[rank].standing is Standing.JOINING:
            self.roll[rank].standing = Standing.WAITING
            self._changed()

    def _agree(self, rank: int, number: int, take_in: bool) -> list[Json] | None:
        """The members and their incarnations, as they were when the first rank asked, and who of
        them was taken in with it; None when a later number was asked for."""
        kind = "taken in" if take_in else "here"
        last, roster = self._agreed.get(kind, [0, []])
        if last < number:
            waiting = [r for r, e in enumerate(self.roll) if e.standing is Standing.WAITING]
            joined = waiting if take_in else []
            for joiner in joined:
                self.roll[joiner].standing = Standing.HERE
            here = [[member, self._incarnation(member)] for member in self._alive()]
            last, roster = self._agreed[kind] = [number, [here, joined]]
            if joined:
                self._changed()
        return roster if last == number else None

    def _taken_in_with(self, rank: int) -> list[Json]:
        """The roster with which members were last taken in."""
        found: list[Json] = self._agreed["taken in"][1]
        return found

    def _leave(self, rank: int) -> None:
        self._strike(rank, Standing.LEFT, "it has finished")

    def strike(self, rank: int, incarnation: int, standing: Standing, reason: str) -> None:
        """Strike off a rank that is lost, unless it has come again meanwhile."""
        if self._is_present(rank, incarnation):
            self._strike(rank, standing, reason)

    def _strike(self, rank: int, standing: Standing, reason: str) -> None:
        entry = self.roll[rank]
        entry.standing, entry.reason = standing, reason
        self._batches.take_back(rank)
        self._stopped.discard(rank)
        self._quiet.discard(rank)
        self._decide()
        self._changed()

    def _alive(self) -> list[int]:
        """The ranks that are here, or will be at the beginning."""
        here = (Standing.HERE, Standing.EXPECTED)
        return [
            rank
            for rank, entry in enumerate(self.roll)
            if entry.standing in here[: 1 if rank in self._late else 2]
        ]

    def _incarnation(self, rank: int) -> int:
        number = self.roll[rank].incarnation
        return number if number or rank in self._late else 1

    def _final_roster(self, rank: int) -> list[list[int]]:
        if self._roster is None:
            members = sorted({*self._alive(), rank})
            self._roster = [[member, self._incarnation(member)] for member in members]
        return self._roster

    # Who is silent -------------------------------------------------------------------------------

    def hear(self, rank: int, incarnation: int) -> None:
        """Hear from a rank, or from its host, that it runs."""
        if 0 <= rank < self.size and self._is_present(rank, incarnation):
            self._hear(rank)
            self._note(self._stopped, rank, False)

    def hear_stopped(self, rank: int, incarnation: int) -> None:
        """Hear from the host of a rank that its process is stopped."""
        if 0 <= rank < self.size and self._is_present(rank, incarnation):
            self._note(self._stopped, rank, True)

    def _hear(self, rank: int) -> None:
        self._heard.add(rank)
        self._silent_s[rank] = 0.0
        self._note(self._quiet, rank, False)

    def _note(self, ranks: set[int], rank: int, whether: bool) -> None:
        if whether != (rank in ranks):
            ranks ^= {rank}
            self._changed()

    def pass_time(self, seconds: float) -> None:
        """Strike off those of whom nothing was heard for too long.

        Time in which no worker was heard of, and none has come to its end, does not count: nobody
        misses another then. Between two beats of a single worker time does count.
        """
        heard, self._heard = self._heard, set()
        workers = range(self._workers)
        some = any(r in heard or self.roll[r].standing is Standing.LEFT for r in workers)
        self._none_heard_s = 0.0 if some else self._none_heard_s + seconds
        if self._none_heard_s > 2 * BEAT_S:
            return
        for rank, entry in enumerate(self.roll):
            if entry.standing not in PRESENT or rank in heard:
                continue
            self._silent_s[rank] += seconds
            self._note(self._quiet, rank, self._silent_s[rank] >= QUIET_S)
            if self._silent_s[rank] >= self._dead_s:
                how = "it has been stopped" if rank in self._stopped else "nothing was heard of it"
                self._strike(rank, Standing.STOPPED, f"{how} for {self._silent_s[rank]:.1f} s")

    # Batches -------------------------------------------------------------------------------------

    def _draw(self, rank: int, queue: int, epoch: int) -> int | None:
        return self._batches.draw(rank, int(queue), int(epoch))

    def _mark_used(self, rank: int, queue: int, epoch: int, number: int) -> None:
        self._batches.mark_used(rank, queue, epoch, number)

    def _lost_batches(self, rank: int) -> int:
        return len(self._batches.returned)

    def _close(self, rank: int) -> None:
        self._closed = True
        self._changed()

    def _mark_finished(self, rank: int) -> None:
        self._finished[rank] = self.roll[rank].incarnation
        self._decide()
        self._changed()

    # Rendezvous ----------------------------------------------------------------------------------

    def _call_all(self, rank: int, known: int, step: int, stop: bool, over: int) -> None:
        if self._call[0] != known:
            return
        alive = self._alive()
        called = [self._incarnation(r) if r in alive else 0 for r in range(self.size)]
        self._call = [known + 1, step, stop, called]
        self._given_up = max(self._given_up, over)
        self._decide()
        self._changed()

    def _meet(
        self, rank: int, number: int, members: Sequence[int], incarnations: Sequence[int]
    ) -> None:
        """Note that a rank has come to a rendezvous; all will see the outcome."""
        if number not in self._outcomes:
            meeting = self._meetings.setdefault(number, Meeting([*members], [*incarnations]))
            meeting.arrived.append(rank)
            self._decide()

    def _decide(self) -> None:
        """Decide each rendezvous to which all have come, or to which somebody will not come."""
        for number, meeting in [*self._meetings.items()]:
            given_up = self._given_up >= number
            ended = any(
                needed and not self._is_present(rank, needed)
                for rank, needed in enumerate(meeting.incarnations)
            )
            if not given_up and set(meeting.members) <= set(meeting.arrived):
                self._outcomes[number] = True
            elif given_up or ended or any(self._finished):
                self._outcomes[number] = False
                self._given_up = max(self._given_up, number)
            else:
                continue
            del self._meetings[number]
            for old in sorted(self._outcomes)[:-OUTCOMES_KEPT]:
                del self._outcomes[old]
            self._changed()

    # Checkpoints ---------------------------------------------------------------------------------

    def _in_hand(self, rank: int) -> list[Json]:
        return sorted(self._batches.in_hand[rank])

    def _snapshot(self, rank: int, without: Sequence[int]) -> dict[str, Json]:
        return {"queues": self._batches.state(without), "call": self._call[:2]}

    def _restore(self, rank: int, in_hand: list[Json], shared: dict[str, Json] | None) -> None:
        if shared is not None:
            held = self._batches.in_hand
            self._batches.load_state(shared["queues"])
            self._batches.in_hand = held
            number, step = shared["call"]
            self._call = [number, step, False, [0] * self.size]
            self._changed()
        self._batches.in_hand[rank] = {as_batch(batch) for batch in in_hand}

    # What others see -----------------------------------------------------------------------------

    def _changed(self) -> None:
        self.version += 1

    def shared(self) -> dict[str, Json]:
        """What every rank sees: pushed to all of them when its version has grown."""
        return {
            "version": self.version,
            "roll": [entry.row() for entry in self.roll],
            "closed": self._closed,
            "finished": self._finished,
            "call": self._call,
            "outcomes": {str(number): outcome for number, outcome in self._outcomes.items()},
            "stopped": sorted(self._stopped | self._quiet),
        }

    def lost(self) -> list[int]:
        """The ranks that are lost."""
        return [rank for rank, entry in enumerate(self.roll) if entry.standing in LOST]

    # The journal ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Json]:
        """All that a registrar needs to go on in the place of this one."""
        return {
            **self.shared(),
            "batches": self._batches.state(),
            "in_hand": {str(rank): sorted(held) for rank, held in self._batches.in_hand.items()},
            "roster": self._roster,
            "agreed": self._agreed,
            "given_up": self._given_up,
            "meetings": {str(number): asdict(each) for number, each in self._meetings.items()},
            "clients": self._clients,
        }

    def load_state(self, state: Mapping[str, Json]) -> None:
        """Go on from what :meth:`state` returned."""
        self.version = state["version"]
        self.roll = [RollEntry.of(row) for row in state["roll"]]
        self._closed, self._finished = state["closed"], [*state["finished"]]
        self._call, self._roster = state["call"], state["roster"]
        self._agreed = dict(state["agreed"])
        self._outcomes = {int(number): outcome for number, outcome in state["outcomes"].items()}
        self._given_up = state["given_up"]
        self._meetings = {int(n): Meeting(**each) for n, each in state["meetings"].items()}
        self._batches.load_state(state["batches"])
        for rank, held in state["in_hand"].items():
            self._batches.in_hand[int(rank)] = {as_batch(batch) for batch in held}
        self._clients = {name: dict(kept) for name, kept in state["clients"].items()}


_ORDERS: dict[str, Callable[..., Json]] = {
    "enter": Registrar._enter,
    "ready": Registrar._ready,
    "wait": Registrar._wait,
    "agree": Registrar._agree,
    "taken_in_with": Registrar._taken_in_with,
    "leave": Registrar._leave,
    "final_roster": Registrar._final_roster,
    "draw": Registrar._draw,
    "mark_used": Registrar._mark_used,
    "lost_batches": Registrar._lost_batches,
    "close": Registrar._close,
    "mark_finished": Registrar._mark_finished,
    "call_all": Registrar._call_all,
    "meet": Registrar._meet,
    "in_hand": Registrar._in_hand,
    "snapshot": Registrar._snapshot,
    "restore": Registrar._restore,
}
"""The orders that a rank may give."""
