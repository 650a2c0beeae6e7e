"""Messages and windows in the simulated world."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from paceline.comm.offer import Offer, as_value
from paceline.comm.ports import (
    MAILBOX_CAPACITY,
    PUBLISHED,
    Lost,
    Mail,
    Message,
    Published,
    check_fit,
)
from paceline.errors import PeerLost
from paceline.sim.inbox import Letter
from paceline.sim.rank import SimulatedRank


class SimulatedMail(Mail):
    """The mail of one rank."""

    def __init__(self, own: SimulatedRank) -> None:
        self._own, self._world, self._rank = own, own.world, own.rank
        self._calendar, self._inbox = own.calendar, own.world.inboxes[own.rank]

    # Messages ------------------------------------------------------------------------------------

    def start_send(self, x: Tensor, dst: int, tag: int, header: bytes) -> Offer:
        self._charge_post(x, header)
        letter = Letter(self._rank, tag, x, header, False, self._calendar.now_s)
        if dst not in self._world.departed:
            self._world.offered_to[self._rank].add(dst)
            self._world.inboxes[dst].add(letter)
            self.wake_receiver(letter, dst)
        return Offer(partial(self._await_taken, letter, dst))

    def _await_taken(self, letter: Letter, dst: int) -> Lost | None:
        if not letter.taken:
            own, op = self._own, f"send to rank {dst}"
            letter.awaited = True
            try:
                own.wait(op, (dst,), lambda: own.loss([dst], op))
            except PeerLost as lost:
                return as_value(lost)
        return None

    def post(self, x: Tensor, dst: int, tag: int, header: bytes) -> bool:
        self._own.check_in_order()
        held = self._world.inboxes[dst].posted_by(self._rank)
        if held >= MAILBOX_CAPACITY or dst in self._world.departed:
            return False
        self.deliver(x, dst, tag, header)
        return True

    def deliver(self, x: Tensor, dst: int, tag: int, header: bytes) -> None:
        """Post a message, even if the mailbox of ``dst`` is full."""
        self._charge_post(x, header)
        if dst not in self._world.departed:
            letter = Letter(self._rank, tag, x.clone(), header, True, math.inf)
            self._world.inboxes[dst].add(letter)
            self._dispatch(letter, dst)

    def _charge_post(self, x: Tensor, header: bytes) -> None:
        self._own.charge(self._world.handling.post, x.nbytes + len(header))
        self._own.pass_time()
        self._own.baton.refuse_late(self._rank)

    def _dispatch(self, letter: Letter, dst: int) -> None:
        """Put a posted message on the link, as soon as the link is up."""
        network, now_s = self._world.network, self._calendar.now_s
        uncut_s = network.outages.uncut_s(now_s, (self._rank, dst))
        if uncut_s > now_s:
            self._world.later(uncut_s, lambda: self._dispatch(letter, dst))
            return
        arrival_s = network.transfer(now_s, self._rank, dst, letter.nbytes)
        letter.arrived_s = arrival_s
        self._world.inboxes[dst].note_arrival(letter)
        if arrival_s > now_s:
            self._world.later(arrival_s, lambda: self.wake_receiver(letter, dst))
        else:
            self.wake_receiver(letter, dst)

    def wake_receiver(self, letter: Letter, dst: int) -> None:
        """Wake ``dst`` if it waits for this message."""
        sources, tag = self._world.receivers.get(dst, ((), 0))
        if letter.tag == tag and letter.src in sources:
            self._world.end_wait(dst)

    def receive(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, any_loss: bool = False
    ) -> Message | Lost:
        self._own.check_in_order()
        loss_check = partial(self._any_loss if any_loss else self._no_more, sources, tag, op)
        try:
            while (letter := self._inbox.find(sources, tag, self._calendar.now_s)) is None:
                self._world.receivers[self._rank] = (sources, tag)
                try:
                    self._own.wait(op, sources, loss_check, patient=any_loss)
                finally:
                    del self._world.receivers[self._rank]
            return self._take(letter, like, op)
        except PeerLost as lost:
            return as_value(lost)

    def try_receive(self, like: Tensor, sources: Sequence[int], tag: int) -> Message | None:
        self._own.check_in_order()
        letter = self._inbox.find(sources, tag, self._calendar.now_s)
        return None if letter is None else self._take(letter, like, "poll")

    def _take(self, letter: Letter, like: Tensor, op: str) -> Message:
        self._inbox.remove(letter)
        x, src = letter.x, letter.src
        try:
            check_fit(like, x.numel(), x.dtype, src, letter.tag)
            if not letter.posted:
                x = x.clone()
                self._own.transfer_from(src, letter.nbytes, op)
        finally:
            letter.taken = True
            if letter.awaited:
                self._world.end_wait(src)
        self._own.charge(self._world.handling.take, letter.nbytes)
        return Message(src, x.view_as(like), letter.header)

    def _no_more(self, sources: Sequence[int], tag: int, op: str) -> PeerLost | None:
        """The error if all ``sources`` are gone and no message of theirs is on its way."""
        if any(src in sources for src in self._inbox.senders(tag)):
            return None
        return self._own.loss(sources, op)

    def _any_loss(self, sources: Sequence[int], tag: int, op: str) -> PeerLost | None:
        """The error if one of ``sources`` is gone and no message of it is on its way."""
        departed, senders = self._world.departed, self._inbox.senders(tag)
        gone = [rank for rank in departed if rank in sources and rank not in senders]
        return PeerLost([min(gone)], op, departed[min(gone)], 0.0) if gone else None

    # Windows -------------------------------------------------------------------------------------

    def publish(self, x: Tensor, header: bytes = b"", window: int = PUBLISHED) -> int:
        if window == PUBLISHED:
            self._own.charge(self._world.handling.publish, x.nbytes + len(header))
        self._own.check_in_order()
        windows, key = self._world.windows, (self._rank, window)
        version = windows[key].version + 1 if key in windows else 1
        windows[key] = Published(version, x.clone(), header)
        return version

    def peek(
        self, src: int, like: Tensor | None, window: int = PUBLISHED, gone: bool = False
    ) -> Published | None:
        if gone:
            return _copy(self._world.windows.get((src, window)))
        self._own.check_in_order()
        if not self._own.charged:
            return _copy(self._window(src))
        latency_s = self._world.network.link(self._rank, src).latency_s
        if latency_s == 0 or self._world.network.outages:
            try:
                return self.read(src, like, lambda: self._window(src))
            except PeerLost:
                return None
        seen = self._fetch(src, latency_s)
        return None if seen is None else self._copy_here(src, seen, like)

    def _window(self, src: int) -> Published | None:
        is_member = src not in self._world.departed and src not in self._world.joining
        return self._world.windows.get((src, PUBLISHED)) if is_member else None

    def _fetch(self, src: int, latency_s: float) -> Published | None:
        """Let the owed time pass, request the window and wait for it, blocked only once."""
        own, baton, calendar = self._own, self._own.baton, self._calendar
        network, seen = self._world.network, list[Published | None]()

        def ask() -> None:
            turn = baton.ranks[own.rank].turn
            arrival_s = network.request(calendar.now_s, own.rank, src)
            calendar.call(arrival_s, partial(look, turn))

        def look(turn: int) -> None:
            if baton.ranks[own.rank].turn != turn:
                return  # the requesting rank was lost meanwhile
            now_s, window = calendar.now_s, self._window(src)
            seen.append(window)
            arrival_s = now_s + latency_s
            if window is not None:
                arrival_s = network.transfer(now_s, src, own.rank, _nbytes(window))
            calendar.wake(arrival_s, own.rank, turn)

        baton.check(own.rank)
        owed_s = own.settle_debt()
        if owed_s > 0:
            baton.compute_then(own.rank, owed_s, ask)
        else:
            ask()
        own.wait(f"peek at rank {src}", (src,), lambda: None, after_s=owed_s)
        return seen[0]

    def read(
        self, src: int, like: Tensor | None, look: Callable[[], Published | None]
    ) -> Published | None:
        """Fetch what ``look`` finds at ``src``; the request and the transfer take time."""
        own, network, op = self._own, self._world.network, f"peek at rank {src}"
        own.pass_time()
        latency_s = network.link(own.rank, src).latency_s
        uncut_s = network.outages.uncut_s(self._calendar.now_s, (src, own.rank))
        own.wait_until(uncut_s, op, src, loss_check=partial(self._is_out_of_reach, src, op))
        own.wait_until(network.request(self._calendar.now_s, own.rank, src), op, src)
        seen = look()
        if seen is None:
            own.wait_until(self._calendar.now_s + latency_s, op, src)
            return None
        if like is not None:
            check_fit(like, seen.x.numel(), seen.x.dtype, src, 0)
        own.transfer_from(src, _nbytes(seen), op)
        return self._copy_here(src, seen, like)

    def _is_out_of_reach(self, src: int, op: str) -> PeerLost | None:
        """The error of a wait for the window of a rank that the registrar does not hear."""
        registrar = self._world.registrar
        if registrar is not None and src in registrar.quiet:
            return PeerLost([src], op, "it is out of reach", 0.0)
        return self._own.loss_behind_cut(src, op)

    def _copy_here(self, src: int, seen: Published, like: Tensor | None) -> Published | None:
        if like is not None:
            check_fit(like, seen.x.numel(), seen.x.dtype, src, 0)
        self._own.charge(self._world.handling.peek, _nbytes(seen))
        return _copy(seen)


def _nbytes(seen: Published) -> int:
    return seen.x.nbytes + len(seen.header)


def _copy(seen: Published | None) -> Published | None:
    return None if seen is None else seen._replace(x=seen.x.clone())
