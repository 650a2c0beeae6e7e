"""What the ranks of a run over many hosts do: random acts on their ports, and what they see."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.comm.hosts.world import HostsPorts
from paceline.comm.ports import SHELF, Lost, Total
from paceline.errors import LeftBehind, PeerLost, UsageError
from paceline.lab.faulttest.hosts.laws import Sent, Who
from paceline.lab.faulttest.hosts.network import StageWire

if TYPE_CHECKING:
    from paceline.lab.faulttest.hosts.world import HostsWorld, RankProcess

REGISTRAR = "registrar"
TAGS = range(2)
PUSH, REPLY, GOODBYE = 7, 8, 9
_SENT = struct.Struct("<6I")
_COUNTS = struct.Struct(f"<{len(TAGS)}I")
_SEEN = struct.Struct("<II")
SMALL, LARGE, SLICED = 3, 80_000, 20_000
"""Vectors of which one goes whole in one part, in two parts, and in slices."""
FLOOD = 3
"""How many large messages a worker leaves at once."""


class Program(ABC):
    """One process of a rank, from its start to its end.

    Attributes:
        ports: the rank's.
        who: the rank, and its present incarnation.
    """

    ports: HostsPorts
    who: Who

    def __init__(self, world: HostsWorld, process: RankProcess) -> None:
        self.world, self.laws, self.schedule = world, world.laws, world.schedule
        self._process, self.rank = process, process.rank
        self.random = Random(f"{self.schedule.seed} {self.rank} {process.pid}")

    def run(self) -> None:
        """Enter, act, and leave; come again if the others have gone on without this rank."""
        try:
            self._enter()
        except UsageError:
            self.laws.sites["rank was taken"] += 1
            return
        while True:
            try:
                self._begin()
                self.act()
                self.laws.leave(self.who)
                self.ports.close()
                self.laws.note(self.who, "left")
                return
            except LeftBehind:
                self.laws.left.discard(self.who)
                self.laws.note(self.who, "is left behind")
                self.laws.sites["left behind"] += 1
                if self._process.replaced or not self.may_rejoin:
                    self.ports.give_up()
                    return
            try:
                self.ports.members.rejoin()
            except UsageError:
                self.ports.give_up()
                return
            self.laws.sites["rejoined"] += 1

    def _enter(self) -> None:
        schedule, process = self.schedule, self._process
        wire = StageWire(self.world.network, process)
        self.ports = HostsPorts(
            REGISTRAR,
            f"host{process.host}",
            wire,
            self.rank,
            schedule.size,
            schedule.limits,
            0.0,
            schedule.late,
            workers=schedule.workers,
        )

    def killed(self) -> None:
        """The process of this rank is killed."""
        if hasattr(self, "who"):
            self.laws.lose(self.who)

    def _begin(self) -> None:
        """Begin an incarnation."""
        self.who = self.rank, self.ports.link.incarnation
        self.laws.entered[self.rank] = max(self.who[1], self.laws.entered[self.rank])
        self.laws.note(self.who, "enters")
        self.begin()
        if self.ports.members.late:
            self.ports.members.announce_ready()

    @property
    def may_rejoin(self) -> bool:
        """Whether a lost rank comes again; not in a run with sums, whose workers become fewer."""
        return self.rank >= self.schedule.workers or not self.schedule.sums

    @abstractmethod
    def begin(self) -> None:
        """Make ready, before others see this incarnation."""

    @abstractmethod
    def act(self) -> None:
        """Do what this rank is there for."""

    # Messages ------------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int, tag: int, more: bytes = b"", wait: bool = False) -> None:
        """Send a message that says who it is of; with ``wait``, until it was taken."""
        mail = self.ports.mail
        self.ports.link.check()
        sent = self.laws.sent(self.who, (dst, self.ports.members.incarnation(dst)), tag)
        header = _pack(sent) + more
        offer = mail.start_send(x, dst, tag, header)
        if wait:
            offer.wait()

    def take(self, like: Tensor, src: int, tag: int) -> tuple[Tensor, bytes] | None:
        """Take a message that has come, and check it."""
        message = self.ports.mail.try_receive(like, [src], tag)
        return None if message is None else self.check(message.x, message.header, src, tag)

    def check(self, x: Tensor, header: bytes, src: int, tag: int) -> tuple[Tensor, bytes]:
        """Check a message; return its vector, and what its header says beside."""
        known = self.ports.members.incarnation(src)
        self.laws.received(_unpack(header), self.who, tag, known)
        return x, header[_SENT.size :]

    def pause(self) -> None:
        """Compute for a while."""
        self._process.stage.sleep(self.schedule.pause_s * self.random.random())


class WorkerProgram(Program):
    """What a worker does: the acts of the schedule, one after the other."""

    def begin(self) -> None:
        self._sums = self.rank not in self.schedule.late
        self._met = self.ports.rendezvous.last_call().number
        self._published = [0, 0]

    def __init__(self, world: HostsWorld, process: RankProcess) -> None:
        super().__init__(world, process)
        self._done = self._pushes = 0
        self._missed: set[int] = set()

    def act(self) -> None:
        acts = self.schedule.acts
        while self._done < len(acts):
            index, self._done = self._done, self._done + 1
            self.pause()
            self._come()
            getattr(self, f"_{acts[index]}")(index)
            self._look()
        self.ports.queue.mark_finished()
        self._say_goodbye()
        if self.schedule.sums:
            self._sum(len(acts))

    def _others(self) -> list[int]:
        alive = self.ports.members.alive()
        return [rank for rank in alive if rank < self.schedule.workers and rank != self.rank]

    def _rest(self, index: int) -> None:
        self.pause()

    # Sums ----------------------------------------------------------------------------------------

    def _sum(self, index: int, numel: int = SMALL) -> None:
        """Sum over all who are here since the beginning; after a loss, over the others."""
        while self._sums:
            group = self._group()
            x = self._contribution(index, self.rank, numel)
            before = x.clone()
            try:
                total = self.ports.collectives.all_reduce(x, 1, group, None, self.rank == group[0])
            except PeerLost as lost:
                self.laws.check(torch.equal(x, before), "sums", f"{self.who}: a failed sum moved x")
                self.laws.raised(index, group, self.who, lost.ranks)
                self._missed |= {*lost.ranks}
                continue
            due = torch.stack([self._contribution(index, rank, numel) for rank in group]).sum(0)
            self.laws.summed(index, group, self.who, total, x, due)
            return

    def _group(self) -> tuple[int, ...]:
        """All who are here from the beginning, without those whom a sum has missed."""
        left_out = {*self.schedule.late, *self._missed}
        return tuple(rank for rank in range(self.schedule.workers) if rank not in left_out)

    def _contribution(self, index: int, rank: int, numel: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * index + rank)
        return torch.randn(numel, generator=generator)

    def _slices(self, index: int) -> None:
        self._sum(index, SLICED)

    def _broadcast(self, index: int) -> None:
        """The first of the group gives all the others its vector."""
        while self._sums:
            group = self._group()
            x = self._contribution(index, self.rank, SMALL)
            due = self._contribution(index, group[0], SMALL)
            try:
                self.ports.collectives.broadcast(x, group[0], group)
            except PeerLost as lost:
                self.laws.raised(index, group, self.who, lost.ranks)
                self._missed |= {*lost.ranks}
                continue
            self.laws.summed(index, group, self.who, Total(len(group), 1), x, due)
            return

    # Messages and windows ------------------------------------------------------------------------

    def _post(self, index: int, numel: int = SMALL, among: Sequence[int] = ()) -> None:
        """Leave a message with another worker, or one of these, if there is room."""
        if not (others := among or self._others()):
            return
        dst, tag = self.random.choice(others), self.random.choice(TAGS)
        self.ports.link.check()
        sent = self.laws.sent(self.who, (dst, self.ports.members.incarnation(dst)), tag)
        x = torch.full((numel,), float(sent.number))
        if not self.ports.mail.post(x, dst, tag, _pack(sent)):
            self.laws.refused(sent)

    def _shout(self, index: int) -> None:
        """Leave a large message with another worker: small ones overtake it."""
        self._post(index, LARGE)

    def _flood(self, index: int) -> None:
        """Leave several large messages with the workers of this host."""
        near = [rank for rank in self._others() if self._is_near(rank)]
        for _ in range(FLOOD if near else 0):
            self._post(index, LARGE, near)

    def _is_near(self, rank: int) -> bool:
        return self.schedule.host_of(rank) == self._process.host

    def _look(self) -> None:
        """Take the messages that have come."""
        for src in self._others():
            for tag in TAGS:
                while self._take_post(src, tag):
                    pass

    def _take_post(self, src: int, tag: int) -> bool:
        """Take a small or a large message: the receiver does not know which one comes."""
        for letter in self.ports.mail._valid(src):
            if letter.tag == tag:
                found = self.take(torch.empty(letter.x.numel()), src, tag)
                if found is not None:
                    number = float(_unpack(letter.header).number)
                    right = found[0].unique().tolist() == [number]
                    self.laws.check(right, "messages", f"{self.who} got other bytes of {src}")
                return found is not None
        return False

    def _publish(self, index: int, window: int = 0) -> None:
        self._published[bool(window)] += 1
        seen = self.who[1], self._published[bool(window)]
        x = torch.full((SMALL,), float(1000 * seen[0] + seen[1]))
        self.ports.mail.publish(x, _SEEN.pack(*seen), window)

    def _shelve(self, index: int) -> None:
        self._publish(index, SHELF)

    def _peek(self, index: int) -> None:
        """Read a window of another worker, which may be gone."""
        owner = self.random.randrange(self.schedule.workers)
        window = self.random.choice((0, SHELF))
        seen = self.ports.mail.peek(owner, torch.empty(SMALL), window, gone=bool(window))
        if seen is not None:
            self.laws.sites["read"] += 1
            incarnation, number = _SEEN.unpack(seen.header)
            self.laws.read(self.who, owner, window, (incarnation, number), seen.x)

    # Batches -------------------------------------------------------------------------------------

    def _draw(self, index: int) -> None:
        """Draw two batches, use both of them after a while, and say so."""
        for _ in range(2):
            batch = self.ports.queue.draw(0, 0)
            assert batch is not None
            self.laws.drew(self.who, batch)
            self.pause()
            self.laws.used(self.who, batch)
            self.ports.queue.mark_used(0, 0, batch)

    # The server ----------------------------------------------------------------------------------

    def _push(self, index: int) -> None:
        """Push to the server until it replies; a successor of it may have to."""
        server, members = self.schedule.workers, self.ports.members
        self._pushes += 1
        number = 1000 * self.who[1] + self._pushes
        self.laws.pushed(self.rank)
        while True:
            self.ports.link.check()
            incarnation = members.incarnation(server)
            self.send(torch.ones(1), server, PUSH, _SEEN.pack(number, 0))
            while incarnation == members.incarnation(server):
                if server in members.view().lost:
                    break
                reply = self.take(torch.empty(1), server, REPLY)
                if reply is not None and _SEEN.unpack(reply[1])[0] == number:
                    self.laws.replied(self.who, number, reply[0].item())
                    return
                members.wait_for_change(0.1)
            self.laws.sites["push asked again"] += 1
            members.wait_for_successor(server, incarnation)

    # Rendezvous ----------------------------------------------------------------------------------

    def _meet(self, index: int) -> None:
        """Call all to a rendezvous."""
        rendezvous = self.ports.rendezvous
        known = rendezvous.last_call().number
        rendezvous.call(known, index, False, known)
        self._come()

    def _come(self) -> None:
        """Come to the last rendezvous, if this rank is called."""
        call, workers = self.ports.rendezvous.last_call(), self.schedule.workers
        if call.number <= self._met or call.incarnations[self.rank] != self.who[1]:
            return
        self._met = call.number
        called = [number if rank < workers else 0 for rank, number in enumerate(call.incarnations)]
        members = [rank for rank, number in enumerate(called) if number]
        self.laws.came(self.who, call.number)
        outcome = self.ports.rendezvous.meet(call.number, members, called)
        everyone = [(rank, called[rank]) for rank in members]
        self.laws.met(self.who, call.number, outcome, everyone)
        if outcome:
            waiting = Counter(
                (src, letter.incarnation)
                for src in members
                for letter in self.ports.mail._valid(src)
            )
            self.laws.arrived(self.who, call.number, waiting)

    # The end -------------------------------------------------------------------------------------

    def _say_goodbye(self) -> None:
        """Tell all others how many messages they get; take all that they have sent."""
        others = self._others()
        incarnations = {rank: self.ports.members.incarnation(rank) for rank in others}
        for rank in others:
            counts = self.laws.counts(self.who, (rank, incarnations[rank]), TAGS)
            self.send(torch.ones(1), rank, GOODBYE, _COUNTS.pack(*counts))
        for rank in others:
            message = self.ports.mail.receive(torch.empty(1), [rank], GOODBYE, "the goodbye")
            if isinstance(message, Lost):
                continue
            src = _unpack(message.header).src
            _, more = self.check(message.x, message.header, rank, GOODBYE)
            for tag, count in zip(TAGS, _COUNTS.unpack(more), strict=True):
                self._take_all(src, tag, count)

    def _take_all(self, src: Who, tag: int, count: int) -> None:
        """Wait for the last messages of one who is still here."""
        while self.laws.missing(src, self.who, tag, count) > 0:
            self.ports.link.check()
            if not self._take_post(src[0], tag):
                view = self.ports.members.view()
                gone = src[0] in view.lost | view.departed
                if gone or view.incarnations[src[0]] != src[1]:
                    return
                self.ports.members.wait_for_change(0.1)


class ServerProgram(Program):
    """What a server does: it counts the pushes of each worker, and replies to them."""

    def begin(self) -> None:
        """Take up what an earlier incarnation had published."""
        self._x, self._ledger = torch.zeros(self.schedule.workers), [0] * self.schedule.workers
        if self.who[1] > 1:
            seen = self.ports.mail.peek(self.rank, None, gone=True)
            if seen is not None:
                self._x, self._ledger = seen.x.clone(), [*self._numbers.unpack(seen.header)]
            self.laws.succeeded(self.who, self._ledger)

    @property
    def _numbers(self) -> struct.Struct:
        return struct.Struct(f"<{self.schedule.workers}I")

    def act(self) -> None:
        while self.world.works:
            for src in range(self.schedule.workers):
                pushed = self.take(torch.empty(1), src, PUSH)
                if pushed is not None:
                    self._serve(src, *_SEEN.unpack(pushed[1]))
            self.ports.members.wait_for_change(0.05)

    def _serve(self, src: int, number: int, _: int) -> None:
        if number > self._ledger[src]:
            self._x[src] += 1
            self._ledger[src] = number
            self.ports.mail.publish(self._x, self._numbers.pack(*self._ledger))
        self.send(self._x[src : src + 1].clone(), src, REPLY, _SEEN.pack(number, 0))


def _pack(sent: Sent) -> bytes:
    return _SENT.pack(*sent.src, *sent.dst, sent.tag, sent.number)


def _unpack(header: bytes) -> Sent:
    numbers = _SENT.unpack_from(header)
    return Sent(numbers[:2], numbers[2:4], *numbers[4:])
