"""Messages over torch.distributed: one service thread a rank, over a gloo group of its own.

The thread receives headers and nothing else; a vector stays with its sender until somebody asks for
it, and is refused by its header before memory is taken for it. Who polls does not wait for it: it
is fetched until the next time. A send is done, and a mailbox has room again, when the receiver has
said so.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.base import MAILBOX_CAPACITY, Limits, Work, check_fit
from paceline.comm.dtypes import DTYPES, dtype_of
from paceline.comm.liveness import Peers, Watch
from paceline.errors import PeerLost, PeersGone

_HEADER_TAG, _FIRST_TAG, _TAGS = 1, 16, 1 << 30
_TICK_S = 0.1
_SMALL_BYTES = 4096
"""A vector that travels in no more time than its header took."""
_HEADERS_KEPT = 4 * (MAILBOX_CAPACITY + 4)
"""A header must be kept until it has arrived; fewer than these can be on their way to one rank."""


class Kind(IntEnum):
    """What a header says."""

    SEND = 1
    POST = 2
    TAKEN = 3
    PEEK = 4
    WINDOW = 5
    LEFT = 6
    RETIRED = 7
    STOP = 8


class Header(NamedTuple):
    """The fixed part of every message; ``number`` names the vector that it announces."""

    kind: int
    tag: int = 0
    dtype: int = 0
    numel: int = 0
    number: int = 0
    version: int = 0


class _Held(NamedTuple):
    """A vector on its way, which must stay until it was taken."""

    dst: int
    kind: int
    work: Any
    x: Tensor


class _Offer(Work):
    def __init__(self, mail: Mail, dst: int, number: int) -> None:
        self._mail, self._dst, self._number = mail, dst, number

    def done(self) -> bool:
        return self._mail.is_taken(self._number)

    def wait(self) -> int:
        op = f"send to rank {self._dst}"
        self._mail.wait(lambda: self.done() or None, [self._dst], op)
        return 1


class _Fetch:
    """A vector on its way here. Waiting for it cannot be ended, so a thread does, and is left."""

    def __init__(self, group: Any, x: Tensor, src: int, tag: int) -> None:
        self.x = x
        self._looked_s = time.monotonic()
        self._came: list[bool] = []
        arguments = (group, src, tag)
        self._thread = threading.Thread(
            target=self._receive, args=arguments, name="paceline-fetch", daemon=True
        )
        self._thread.start()

    def _receive(self, group: Any, src: int, tag: int) -> None:
        try:
            group.recv([self.x], src, tag).wait()
            self._came.append(True)
        except RuntimeError:
            self._came.append(False)

    def outcome(self, seconds: float) -> bool | None:
        """Whether it came; None while that is not known, after so long a wait."""
        if seconds and not self._came:
            self._thread.join(seconds)
        return self._came[0] if self._came else None

    def is_late(self) -> bool:
        """Whether it is time to look after its sender: once in a while."""
        now_s = time.monotonic()
        late = now_s >= self._looked_s + _TICK_S
        if late:
            self._looked_s = now_s
        return late


class Mail:
    """The messages of one rank."""

    def __init__(self, rank: int, size: int, limits: Limits, peers: Peers) -> None:
        self.rank, self.size = rank, size
        self._limits, self._peers = limits, peers
        with peers.explaining("the start"):
            self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self._changed = threading.Condition()
        self._inbox: list[tuple[int, Header]] = []
        self._windows: dict[int, tuple[int, Header]] = {}
        self._held: dict[int, _Held] = {}
        self._fetches: dict[tuple[int, int], _Fetch] = {}
        self._headers = [deque[Any](maxlen=_HEADERS_KEPT) for _ in range(size)]
        self._shown: dict[int, tuple[int, Tensor]] = {}
        self._left: set[int] = set()
        self.retired: frozenset[int] = frozenset()
        self.stopping = False
        self._number = 0
        self._thread = threading.Thread(target=self._serve, name="paceline-mail", daemon=True)
        if size > 1:
            self._thread.start()

    def why_gone(self, rank: int) -> str | None:
        """Why ``rank`` is not here any more; None while it is."""
        if rank in self._left:
            return "it has finished"
        return self._peers.why_lost(rank) if rank != self.rank else None

    def close(self) -> None:
        """Say that this rank leaves, and wait until all others have; a lost one never does."""
        if self.rank in self._left:
            return
        for (src, _), fetch in self._fetches.items():
            self._await(fetch, src)
        self._tell_all(Kind.LEFT)
        self._left.add(self.rank)
        while len(self._left) < self.size:
            self._peers.check()
            with self._changed:
                self._changed.wait(_TICK_S)

    def retire(self) -> None:
        """Say that this rank has come to the end of its data."""
        self._tell_all(Kind.RETIRED)
        with self._changed:
            self.retired |= {self.rank}

    def stop_all(self) -> None:
        """Have every worker come to its end."""
        self._tell_all(Kind.STOP)
        self.stopping = True

    def _tell_all(self, kind: Kind) -> None:
        for dst in range(self.size):
            if dst != self.rank and self._peers.why_lost(dst) is None:
                self._send_header(dst, Header(kind))

    @property
    def closed(self) -> bool:
        """Whether everyone has left in good order, so that the service has ended, too."""
        if len(self._left) == self.size and self.size > 1:
            self._thread.join(timeout=5)
        return not self._thread.is_alive()

    # Waiting -------------------------------------------------------------------------------------

    def wait(
        self,
        ready: Callable[[], Any],
        peers: Sequence[int],
        op: str,
        patient: bool = False,
        any_loss: bool = False,
    ) -> Any:
        """Wait until ``ready`` gives something, or all ``peers`` are gone, or any of them is."""
        watch = Watch(op, self._limits, patient)
        while True:
            with self._changed:
                if (value := ready()) is not None:
                    return value
                leaving = any_loss and not self._left.isdisjoint(peers)
                if not leaving and self._changed.wait(_TICK_S):
                    continue
            gone = {peer: why for peer in peers if (why := self.why_gone(peer)) is not None}
            with self._changed:
                value = ready()
            if value is not None:
                return value
            if gone and any_loss:
                raise self._peers.lost(watch, gone)
            if len(gone) == len(peers):
                raise PeersGone if op == "recv_any" else self._peers.lost(watch, gone)
            self._peers.check()
            watch.keep_patience(peers)

    # Sending -------------------------------------------------------------------------------------

    def start_send(self, x: Tensor, dst: int, tag: int) -> Work:
        """Offer a vector to ``dst``."""
        return _Offer(self, dst, self._offer(Kind.SEND, x.cpu(), dst, tag))

    def post(self, x: Tensor, dst: int, tag: int) -> bool:
        """Leave a copy for ``dst``, if its mailbox has room."""
        with self._changed:
            held = sum(h.dst == dst and h.kind == Kind.POST for h in self._held.values())
        if held >= MAILBOX_CAPACITY or self.why_gone(dst) is not None:
            return False
        self._offer(Kind.POST, x.detach().cpu().clone(), dst, tag)
        return True

    def is_taken(self, number: int) -> bool:
        """Whether a vector was taken."""
        return number not in self._held

    def _offer(self, kind: Kind, x: Tensor, dst: int, tag: int, version: int = 0) -> int:
        with self._changed:
            self._number += 1
            number = self._number
            work = self._send(x, dst, _FIRST_TAG + number % _TAGS)
            self._held[number] = _Held(dst, kind, work, x)
        dtype = DTYPES.index(x.dtype)
        self._send_header(dst, Header(kind, tag, dtype, x.numel(), number, version))
        return number

    def _send_header(self, dst: int, header: Header) -> None:
        message = torch.tensor(header)
        with self._changed:
            self._headers[dst].append((self._send(message, dst, _HEADER_TAG), message))

    def _send(self, x: Tensor, dst: int, tag: int) -> Any:
        """Start to send; that a connection broke is for those to say who wait for ``dst``."""
        try:
            return self._group.send([x], dst, tag)
        except RuntimeError:
            return None

    # Taking --------------------------------------------------------------------------------------

    def take(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, watch: bool
    ) -> tuple[int, Tensor]:
        """Wait for a message and take it; the next one is fetched while this one is made use of."""
        while True:
            src, header = self.wait(
                lambda: self._find(sources, tag), sources, op, op == "recv_any", watch
            )
            taken = self._take(src, header, like)
            if taken is not None:
                self._fetch_ahead(like, sources, tag)
                return src, taken

    def _fetch_ahead(self, like: Tensor, sources: Sequence[int], tag: int) -> None:
        with self._changed:
            found = self._find(sources, tag)
        if found is not None and self._fits(found[1], like):
            self._fetch(*found)

    def take_now(self, like: Tensor, sources: Sequence[int], tag: int) -> tuple[int, Tensor] | None:
        """Take a message that is here in full; those that are not are fetched meanwhile."""
        for src, header in self._oldest(sources, tag):
            if not self._fits(header, like) or self._is_here(src, header):
                taken = self._take(src, header, like)
                if taken is not None:
                    return src, taken
        return None

    def _find(self, sources: Sequence[int], tag: int) -> tuple[int, Header] | None:
        for src, header in self._inbox:
            if src in sources and header.tag == tag:
                return src, header
        return None

    def _oldest(self, sources: Sequence[int], tag: int) -> list[tuple[int, Header]]:
        """The first message of each sender."""
        oldest: dict[int, Header] = {}
        with self._changed:
            for src, header in self._inbox:
                if src in sources and header.tag == tag:
                    oldest.setdefault(src, header)
        return list(oldest.items())

    def _fits(self, header: Header, like: Tensor) -> bool:
        return (header.numel, header.dtype) == (like.numel(), DTYPES.index(like.dtype))

    def _is_here(self, src: int, header: Header) -> bool:
        """Whether to take an announced vector would not wait; its fetching begins, if it has not.

        A small one is as good as here. That its sender was lost is not to be waited for, either.
        """
        fetch = self._fetch(src, header)
        if fetch.x.nbytes <= _SMALL_BYTES:
            return True
        return fetch.outcome(0) is not None or self._is_hopeless(fetch, src)

    def _take(self, src: int, header: Header, like: Tensor | None) -> Tensor | None:
        """Fetch an announced vector; None when its sender died with it."""
        with self._changed:
            if (src, header) in self._inbox:
                self._inbox.remove((src, header))
        try:
            if like is not None:
                check_fit(like, header.numel, dtype_of(header.dtype), src, header.tag)
            fetch = self._fetch(src, header)
            self._await(fetch, src)
            del self._fetches[src, header.number]
            if not fetch.outcome(0):
                return None
        finally:
            self._send_header(src, Header(Kind.TAKEN, number=header.number))
        return fetch.x if like is None else fetch.x.to(like.device).view_as(like)

    def _fetch(self, src: int, header: Header) -> _Fetch:
        """The fetching of an announced vector, from the first time that it is asked for."""
        key = (src, header.number)
        if key not in self._fetches:
            x = torch.empty(header.numel, dtype=dtype_of(header.dtype))
            self._fetches[key] = _Fetch(self._group, x, src, _FIRST_TAG + header.number % _TAGS)
        return self._fetches[key]

    def _await(self, fetch: _Fetch, src: int) -> None:
        """Wait for a vector, or until its sender is lost.

        One that has finished is still here: it stays until all have what they were sent.
        """
        while fetch.outcome(_TICK_S) is None and not self._is_hopeless(fetch, src):
            pass

    def _is_hopeless(self, fetch: _Fetch, src: int) -> bool:
        return fetch.is_late() and self._peers.why_lost(src) is not None

    # Windows -------------------------------------------------------------------------------------

    def publish(self, x: Tensor, window: int = 0) -> int:
        """Put a copy into one of this rank's windows."""
        copy = x.detach().cpu().clone()
        with self._changed:
            version = self._shown[window][0] + 1 if window in self._shown else 1
            self._shown[window] = (version, copy)
        return version

    def peek(self, src: int, like: Tensor | None, window: int = 0) -> tuple[int, Tensor] | None:
        """Ask the service of ``src`` for what it last put into a window."""
        if self.why_gone(src) is not None:
            return None
        with self._changed:
            self._number += 1
            request = self._number
        self._send_header(src, Header(Kind.PEEK, tag=window, number=request))
        try:
            src, header = self.wait(
                lambda: self._windows.pop(request, None), [src], f"peek at rank {src}"
            )
        except PeerLost:
            return None
        if header.version == 0:
            return None
        x = self._take(src, header, None if like is None else like.view(-1))
        return None if x is None else (header.version, x)

    # The service ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        while len(self._left | {self.rank}) < self.size:
            message = torch.zeros(len(Header._fields), dtype=torch.int64)
            try:
                work = self._group.recv_anysource([message], _HEADER_TAG)
                work.wait()
            except RuntimeError:
                return
            self._handle(work._source_rank(), Header(*message.tolist()))

    def _handle(self, src: int, header: Header) -> None:
        if header.kind == Kind.PEEK:
            self._answer_peek(src, header.tag, header.number)
            return
        with self._changed:
            if header.kind in (Kind.SEND, Kind.POST):
                self._inbox.append((src, header))
            elif header.kind == Kind.WINDOW:
                self._windows[header.tag] = (src, header)
            elif header.kind == Kind.TAKEN:
                self._held.pop(header.number, None)
            elif header.kind == Kind.LEFT:
                self._left.add(src)
                self._peers.leaves(src)
            elif header.kind == Kind.RETIRED:
                self.retired |= {src}
            elif header.kind == Kind.STOP:
                self.stopping = True
            self._changed.notify_all()

    def _answer_peek(self, src: int, window: int, request: int) -> None:
        with self._changed:
            shown = self._shown.get(window)
        if shown is None:
            self._send_header(src, Header(Kind.WINDOW, tag=request))
        else:
            self._offer(Kind.WINDOW, shown[1], src, request, version=shown[0])
