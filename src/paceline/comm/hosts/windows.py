"""What a rank publishes, over many hosts: peers ask for it, and its own thread answers.

What must outlive a rank has a copy with another rank, its holder, on another host if there is one:
the windows of servers, which their successors need, and the shelves of all. What a server sends
after it has published goes out when the holder has the copy: a worker never gets a reply that the
successor of the server does not know of.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from torch import Tensor

from paceline.comm.dtypes import DTYPES, dtype_of
from paceline.comm.hosts.link import RankLink, Receipt, Topic, host_copy
from paceline.comm.hosts.roll import Roll
from paceline.comm.liveness import TICK_S
from paceline.comm.ports import PUBLISHED, Published, check_fit
from paceline.errors import MessageMismatch

_PEEK = struct.Struct("<QIB")
_WINDOW = struct.Struct("<QQB")
_COPY = struct.Struct("<IBQB")
_VERSIONS = 1 << 32
"""Versions of the second incarnation of a rank begin here, and so on: they never go back."""


class WindowVersion(NamedTuple):
    """A version of a window."""

    version: int
    x: Tensor
    header: bytes

    @property
    def published(self) -> Published:
        """A copy of it."""
        return Published(self.version, self.x.clone(), self.header)


class HostsWindows:
    """The windows of one rank, the copies that it holds for others, and its own copies.

    Args:
        link: the connections of the rank.
        workers: how many of the ranks, the first ones, are workers; the others are servers, whose
            windows their successors need.
        elastic: whether the run goes on when a rank is lost.
    """

    def __init__(self, link: RankLink, workers: int, elastic: bool) -> None:
        self._link, self._workers, self._elastic = link, workers, elastic
        self._own: dict[int, WindowVersion] = {}
        self._held: dict[tuple[int, int], WindowVersion] = {}
        self._requests, self._answers = count(1), dict[int, WindowVersion | None]()
        self._holder: tuple[int, int] | None = None
        self._copies: list[tuple[int, Receipt]] = []
        self._copied = 0
        link.handlers[Topic.PEEK] = self._on_peek
        link.handlers[Topic.WINDOW] = self._on_window
        link.handlers[Topic.COPY] = self._on_copy
        link.on_roll = self._on_roll

    def begin(self) -> None:
        """Begin an incarnation: what an earlier one gave its holder may not have arrived."""
        self._copy_all()

    # Writing -------------------------------------------------------------------------------------

    def write(self, x: Tensor, header: bytes, window: int) -> int:
        """Publish a copy of ``x``; return its version."""
        last = self._own.get(window)
        if last is not None:
            check_fit(x, last.x.numel(), last.x.dtype, self._link.rank, 0)
            if len(header) != len(last.header):
                raise MessageMismatch(
                    f"a header of {len(header)} bytes: the window has one of {len(last.header)}"
                )
        copy = host_copy(x).view(-1)
        with self._link.changed:
            first = (self._link.incarnation - 1) * _VERSIONS
            version = max(first, last.version if last else 0) + 1
            self._own[window] = WindowVersion(version, copy, header)
            if self._elastic and self._is_copied(window):
                self._copied += 1
                self._copy(window, self._copied)
        return version

    def _is_copied(self, window: int) -> bool:
        return self._serves(self._link.rank) or window != PUBLISHED

    def _serves(self, rank: int) -> bool:
        return rank >= self._workers

    def _copy(self, window: int, number: int) -> None:
        """Give the holder a copy of a window."""
        if self._holder is None:
            self._holder = self._choose_holder()
        if self._holder is not None:
            rank, incarnation = self._holder
            receipt = self._send_copy(rank, incarnation, self._link.rank, window)
            self._copies.append((number, receipt))

    def _send_copy(self, dst: int, incarnation: int, owner: int, window: int) -> Receipt:
        own = owner == self._link.rank
        seen = self._own[window] if own else self._held[owner, window]
        meta = _COPY.pack(owner, window, seen.version, DTYPES.index(seen.x.dtype)) + seen.header
        return self._link.send(dst, Topic.COPY, meta, seen.x, incarnation=incarnation)

    def _choose_holder(self, without: int = -1) -> tuple[int, int] | None:
        """Another rank: on another host, if there is one; the next one in turn."""
        roll, own = self._link.roll, self._link.rank
        if roll is None:
            return None
        others = [rank for rank in roll.alive if rank not in (own, without)]
        host = roll.entries[own].host
        others.sort(key=lambda rank: (roll.entries[rank].host == host, rank <= own, rank))
        return (others[0], roll.incarnation(others[0])) if others else None

    def _on_roll(self, roll: Roll) -> None:
        """If the holder is gone, give all copies to another one."""
        if self._holder is not None and roll.why_gone(*self._holder) is not None:
            self._copy_all()

    def _copy_all(self) -> None:
        """Choose a holder, and give it a copy of all windows."""
        self._holder = None
        self._copies.clear()
        for window in filter(self._is_copied, self._own if self._elastic else ()):
            self._copy(window, 0)

    def gate(self) -> Callable[[], bool] | None:
        """For a message: whether the holder has all that was published before it."""
        self._copies = [
            (number, receipt) for number, receipt in self._copies if not receipt.has_come
        ]
        if not self._copies or not self._serves(self._link.rank):
            return None
        last = self._copied
        return lambda: all(n > last or receipt.has_come for n, receipt in self._copies)

    def hand_over(self) -> None:
        """Before this rank leaves: give others what they may still look for."""
        with self._link.changed:
            own = self._link.rank
            kept = [(own, window) for window in filter(self._is_copied, self._own)]
            # An owner that seems to be here may have died: this rank has not heard of it yet.
            for owner, window in [*self._held, *kept]:
                if (holder := self._choose_holder(without=owner)) is not None:
                    self._send_copy(*holder, owner, window)

    # Reading -------------------------------------------------------------------------------------

    def read(self, src: int, window: int, gone: bool) -> Published | None:
        """What is in a window of ``src``; with ``gone``, copies of others count."""
        own = self._link.rank
        if src == own and window in self._own:
            return self._own[window].published
        if src != own:
            found = self._ask([src], src, window, patient=gone or self._serves(src))
            if found is not None or not gone:
                return found
        if not gone:
            return None
        others = [rank for rank in self._link.check().alive if rank not in (src, own)]
        found = self._ask(others, src, window, patient=True)
        held = self._held.get((src, window))
        if held is not None and (found is None or held.version > found.version):
            return held.published
        return found

    def _ask(self, ranks: list[int], owner: int, window: int, patient: bool) -> Published | None:
        """Ask ranks for a window of ``owner``; the newest version that one of them has.

        Unless this rank is ``patient``, it does not wait for those that are stopped.
        """
        watch = self._link.watch(f"peek at rank {owner}")
        with self._link.changed:
            roll = self._link.check()
            asked: dict[int, tuple[int, int]] = {}
            for rank in ranks:
                number, incarnation = next(self._requests), roll.incarnation(rank)
                if incarnation and roll.why_gone(rank, incarnation) is None:
                    asked[number] = rank, incarnation
                    meta = _PEEK.pack(number, owner, window)
                    self._link.send(rank, Topic.PEEK, meta, incarnation=incarnation)
            while True:
                roll = self._link.check()
                missing = [
                    rank
                    for number, (rank, incarnation) in asked.items()
                    if number not in self._answers
                    and (patient or rank not in roll.view.stopped)
                    and roll.why_gone(rank, incarnation) is None
                ]
                if not missing:
                    break
                self._link.changed.wait(TICK_S)
                watch.check_limits(missing)
            answers = [self._answers.pop(number, None) for number in asked]
        found = [answer for answer in answers if answer is not None]
        newest = max(found, key=lambda seen: seen.version, default=None)
        return None if newest is None else Published(*newest)

    def _on_peek(self, src: int, incarnation: int, meta: bytes, body: Tensor) -> None:
        number, owner, window = _PEEK.unpack(meta)
        own = owner == self._link.rank
        seen = self._own.get(window) if own else self._held.get((owner, window))
        if seen is None:
            answer = _WINDOW.pack(number, 0, 0)
            self._link.send(src, Topic.WINDOW, answer, incarnation=incarnation)
        else:
            answer = _WINDOW.pack(number, seen.version, DTYPES.index(seen.x.dtype)) + seen.header
            self._link.send(src, Topic.WINDOW, answer, seen.x, incarnation=incarnation)

    def _on_window(self, src: int, incarnation: int, meta: bytes, body: Tensor) -> None:
        number, version, code = _WINDOW.unpack_from(meta)
        seen = WindowVersion(version, body.view(dtype_of(code)), meta[_WINDOW.size :])
        self._answers[number] = seen if version else None

    def _on_copy(self, src: int, incarnation: int, meta: bytes, body: Tensor) -> None:
        owner, window, version, code = _COPY.unpack_from(meta)
        held = self._held.get((owner, window))
        if held is None or version > held.version:
            seen = WindowVersion(version, body.view(dtype_of(code)), meta[_COPY.size :])
            self._held[owner, window] = seen
