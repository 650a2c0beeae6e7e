"""Messages over torch.distributed: one service thread a rank, over a gloo group of its own.

The thread receives announcements and nothing else. A vector stays with its sender until somebody
asks for it; a receiver can refuse it by its announcement alone, before it allocates memory. A poll
does not wait for a vector: it starts the transfer, and a later poll returns the message. A send is
done, and a mailbox has room again, when the receiver has said so. The header of a message travels
behind its vector.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.dtypes import DTYPES, dtype_of
from paceline.comm.liveness import Watch
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
from paceline.comm.torch_distributed.peers import Peers
from paceline.comm.torch_distributed.staging import host_copy, host_vector

_ANNOUNCED_TAG, _FIRST_TAG, _TAGS = 1, 16, 1 << 30
_TICK_S = 0.1
_SMALL_BYTES = 4096
"""A vector that travels in no more time than its announcement took."""
_ANNOUNCED_KEPT = 4 * (MAILBOX_CAPACITY + 4)
"""An announcement must be kept until it has arrived; fewer than these can be on their way to one
rank."""


class Kind(IntEnum):
    """What is announced."""

    SEND = 1
    POST = 2
    TAKEN = 3
    PEEK = 4
    WINDOW = 5
    LEFT = 6
    FINISHED = 7
    STOP = 8


class Announcement(NamedTuple):
    """What comes before every message; ``number`` names the vector that it announces."""

    kind: int
    tag: int = 0
    dtype: int = 0
    numel: int = 0
    number: int = 0
    version: int = 0
    header_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the vector."""
        return self.numel * dtype_of(self.dtype).itemsize


class _Fetch:
    """A vector on its way here. Waiting for it cannot be ended, so a thread does, and is left."""

    def __init__(self, group: Any, x: Tensor, src: int, tag: int) -> None:
        self.x, self.came = x, False
        self._thread = threading.Thread(
            target=self._receive, args=(group, src, tag), name="paceline-fetch", daemon=True
        )
        self._thread.start()

    def _receive(self, group: Any, src: int, tag: int) -> None:
        with suppress(RuntimeError):
            group.recv([self.x], src, tag).wait()
            self.came = True

    def is_over(self, seconds: float = 0.0) -> bool:
        """Whether it came, or failed, after so long a wait."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


class DistributedMail(Mail):
    """The messages of one rank."""

    def __init__(self, peers: Peers) -> None:
        self.rank, self.size, self._peers = peers.rank, peers.size, peers
        with peers.explaining("the start"):
            self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self._changed = threading.Condition()
        self._inbox: list[tuple[int, Announcement]] = []
        self._windows: dict[int, Announcement] = {}
        self._held: dict[int, tuple[tuple[int, int], Any]] = {}
        self._fetches: dict[tuple[int, int], _Fetch] = {}
        self._announced = [deque[Any](maxlen=_ANNOUNCED_KEPT) for _ in range(self.size)]
        self._shown: dict[int, tuple[Announcement, Tensor]] = {}
        self._left: set[int] = set()
        self.finished: frozenset[int] = frozenset()
        self.stopping = False
        self._numbers = count(1)
        self._thread = threading.Thread(target=self._serve, name="paceline-mail", daemon=True)
        if self.size > 1:
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
        self.tell_all(Kind.LEFT)
        while len(self._left) < self.size:
            self._peers.check()
            with self._changed:
                self._changed.wait(_TICK_S)

    def gone(self) -> tuple[frozenset[int], frozenset[int]]:
        """The ranks that are lost, and those that departed."""
        gone = frozenset(rank for rank in range(self.size) if self.why_gone(rank))
        departed = frozenset(self._left)
        return gone - departed, departed

    def tell_all(self, kind: Kind) -> None:
        """Tell every rank, this one included, what this rank does."""
        for dst in range(self.size):
            if dst != self.rank and self._peers.why_lost(dst) is None:
                self._announce(dst, Announcement(kind))
        self._handle(self.rank, Announcement(kind))

    @property
    def closed(self) -> bool:
        """Whether everyone has left in good order, so that the service has ended, too."""
        if len(self._left) == self.size and self.size > 1:
            self._thread.join(timeout=5)
        return not self._thread.is_alive()

    # Waiting -------------------------------------------------------------------------------------

    def wait(
        self, ready: Callable[[], Any], peers: Sequence[int], op: str, any_loss: bool = False
    ) -> Any:
        """Wait until ``ready`` returns something; return ``Lost`` when all, or any, are gone."""
        watch = Watch(op, self._peers.limits, patient=any_loss)
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
            if len(gone) == len(peers) or (gone and any_loss):
                return as_value(self._peers.lost(watch, gone))
            self._peers.check()
            watch.check_limits(peers)

    # Sending -------------------------------------------------------------------------------------

    def start_send(self, x: Tensor, dst: int, tag: int, header: bytes) -> Offer:
        self._peers.check()
        payload = _payload(x, header) if header or x.is_cuda else x
        number = self._offer(dst, _announcement(Kind.SEND, tag, x, header), payload)
        return Offer(partial(self._await_taken, dst, number))

    def _await_taken(self, dst: int, number: int) -> Lost | None:
        held, op = self._held, f"send to rank {dst}"
        taken = self.wait(lambda: number not in held or None, [dst], op)
        return taken if isinstance(taken, Lost) else None

    def post(self, x: Tensor, dst: int, tag: int, header: bytes) -> bool:
        self._peers.check()
        with self._changed:
            held = [key for key, _ in self._held.values()].count((dst, Kind.POST))
        if held >= MAILBOX_CAPACITY or self.why_gone(dst) is not None:
            return False
        self._offer(dst, _announcement(Kind.POST, tag, x, header), _payload(x, header))
        return True

    def _offer(self, dst: int, announcement: Announcement, payload: Tensor) -> int:
        number = next(self._numbers)
        with self._changed:
            work = self._send(payload, dst, _FIRST_TAG + number % _TAGS)
            # What is on its way must stay until it was taken.
            self._held[number] = (dst, announcement.kind), (work, payload)
        self._announce(dst, announcement._replace(number=number))
        return number

    def _announce(self, dst: int, announcement: Announcement) -> None:
        message = torch.tensor(announcement)
        with self._changed:
            self._announced[dst].append((self._send(message, dst, _ANNOUNCED_TAG), message))

    def _send(self, x: Tensor, dst: int, tag: int) -> Any:
        """Start to send; that a connection broke is for those to say who wait for ``dst``."""
        try:
            return self._group.send([x], dst, tag)
        except RuntimeError:
            return None

    # Receiving -----------------------------------------------------------------------------------

    def receive(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, any_loss: bool = False
    ) -> Message | Lost:
        """The next message is fetched while the caller works on this one."""
        self._peers.check()
        while True:
            found = self.wait(lambda: self._find(sources, tag), sources, op, any_loss)
            if isinstance(found, Lost):
                return found
            src, announced = found[0]
            if (message := self._take(src, announced, like)) is not None:
                for src, announced in (self._find(sources, tag) or ())[:1]:
                    if self._fits(announced, like):
                        self._fetch(src, announced)
                return message

    def try_receive(self, like: Tensor, sources: Sequence[int], tag: int) -> Message | None:
        """Take a message that is here in full; those that are not are fetched meanwhile."""
        self._peers.check()
        for src, announced in self._find(sources, tag) or ():
            if not self._fits(announced, like) or self._is_here(src, announced):
                message = self._take(src, announced, like)
                if message is not None:
                    return message
        return None

    def _find(self, sources: Sequence[int], tag: int) -> list[tuple[int, Announcement]] | None:
        """The first message of each sender, as they came; None when there is none."""
        oldest: dict[int, Announcement] = {}
        with self._changed:
            for src, announced in self._inbox:
                if src in sources and announced.tag == tag:
                    oldest.setdefault(src, announced)
        return [*oldest.items()] or None

    def _fits(self, announced: Announcement, like: Tensor) -> bool:
        return (announced.numel, announced.dtype) == (like.numel(), DTYPES.index(like.dtype))

    def _is_here(self, src: int, announced: Announcement) -> bool:
        """Whether to take a message would not wait; its fetching begins, if it has not.

        A small one is as good as here. Nor does it wait when the sender was lost.
        """
        fetch = self._fetch(src, announced)
        small = fetch.x.nbytes <= _SMALL_BYTES
        return small or fetch.is_over() or self._peers.why_lost(src) is not None

    def _take(self, src: int, announced: Announcement, like: Tensor | None) -> Message | None:
        """Fetch an announced message; None when its sender died with it."""
        with self._changed:
            if (src, announced) in self._inbox:
                self._inbox.remove((src, announced))
        dtype, number = dtype_of(announced.dtype), announced.number
        try:
            if like is not None:
                check_fit(like, announced.numel, dtype, src, announced.tag)
            fetch = self._fetch(src, announced)
            self._await(fetch, src)
            del self._fetches[src, number]
            if not fetch.came:
                return None
        finally:
            self._announce(src, Announcement(Kind.TAKEN, number=number))
        x, header = fetch.x, b""
        if announced.header_bytes:
            header = x[announced.nbytes :].numpy().tobytes()
            x = x[: announced.nbytes].view(dtype)
        return Message(src, x if like is None else x.to(like.device).view_as(like), header)

    def _fetch(self, src: int, announced: Announcement) -> _Fetch:
        """The fetching of an announced message, from the first time that it is asked for."""
        key = (src, announced.number)
        if key not in self._fetches:
            if announced.header_bytes:
                x = host_vector(announced.nbytes + announced.header_bytes, torch.uint8)
            else:
                x = host_vector(announced.numel, dtype_of(announced.dtype))
            self._fetches[key] = _Fetch(self._group, x, src, _FIRST_TAG + announced.number % _TAGS)
        return self._fetches[key]

    def _await(self, fetch: _Fetch, src: int) -> None:
        """Wait for a vector, or until its sender is lost.

        A sender that has finished is still here: it stays until all have what they were sent.
        """
        while not fetch.is_over(_TICK_S) and self._peers.why_lost(src) is None:
            pass

    # Windows -------------------------------------------------------------------------------------

    def publish(self, x: Tensor, header: bytes = b"", window: int = PUBLISHED) -> int:
        self._peers.check()
        payload = _payload(x, header)
        with self._changed:
            version = self._shown[window][0].version + 1 if window in self._shown else 1
            announcement = _announcement(Kind.WINDOW, 0, x, header, version)
            self._shown[window] = announcement, payload
        return version

    def peek(
        self, src: int, like: Tensor | None, window: int = PUBLISHED, gone: bool = False
    ) -> Published | None:
        """Ask the service of ``src``; once that is gone, its windows are."""
        self._peers.check()
        if self.why_gone(src) is not None:
            return None
        request = next(self._numbers)
        self._announce(src, Announcement(Kind.PEEK, tag=window, number=request))
        answer = self.wait(lambda: self._windows.pop(request, None), [src], f"peek at rank {src}")
        if isinstance(answer, Lost) or answer.version == 0:
            return None
        message = self._take(src, answer, None if like is None else like.view(-1))
        return message and Published(answer.version, message.x, message.header)

    # The service ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        while len(self._left | {self.rank}) < self.size:
            message = torch.zeros(len(Announcement._fields), dtype=torch.int64)
            try:
                work = self._group.recv_anysource([message], _ANNOUNCED_TAG)
                work.wait()
            except RuntimeError:
                return
            self._handle(work._source_rank(), Announcement(*message.tolist()))

    def _handle(self, src: int, announced: Announcement) -> None:
        if announced.kind == Kind.PEEK:
            self._answer_peek(src, announced.tag, announced.number)
            return
        with self._changed:
            if announced.kind in (Kind.SEND, Kind.POST):
                self._inbox.append((src, announced))
            elif announced.kind == Kind.WINDOW:
                self._windows[announced.tag] = announced
            elif announced.kind == Kind.TAKEN:
                self._held.pop(announced.number, None)
            elif announced.kind == Kind.LEFT:
                self._left.add(src)
                self._peers.mark_departed(src)
            elif announced.kind == Kind.FINISHED:
                self.finished |= {src}
            elif announced.kind == Kind.STOP:
                self.stopping = True
            self._changed.notify_all()

    def _answer_peek(self, src: int, window: int, request: int) -> None:
        with self._changed:
            shown = self._shown.get(window)
        if shown is None:
            self._announce(src, Announcement(Kind.WINDOW, tag=request))
        else:
            announcement, payload = shown
            self._offer(src, announcement._replace(tag=request), payload)


def _announcement(kind: Kind, tag: int, x: Tensor, header: bytes, version: int = 0) -> Announcement:
    code = DTYPES.index(x.dtype)
    return Announcement(kind, tag, code, x.numel(), version=version, header_bytes=len(header))


def _payload(x: Tensor, header: bytes) -> Tensor:
    """A copy of a message in one tensor: the vector, and the bytes of the header behind it."""
    if not header:
        return host_copy(x)
    payload = host_vector(x.nbytes + len(header), torch.uint8, x.is_cuda)
    payload[: x.nbytes].view(x.dtype).copy_(x.detach())
    payload[x.nbytes :] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return payload
