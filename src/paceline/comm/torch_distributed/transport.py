"""torch.distributed as a transport: gloo on CPUs, nccl on GPUs, under any launcher.

Collectives are the backend's own, each preceded by a small one in which the members agree on
operation, shape and weights: gloo aborts the process when shapes differ. Messages go through a
service thread (:mod:`.mail`) over a gloo group of their own. torch.distributed has neither
authentication nor encryption: trusted networks only.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.base import Factor, Limits, Transport, Work
from paceline.comm.dtypes import DTYPES
from paceline.comm.launchers import Launched
from paceline.comm.liveness import Peers, Watch
from paceline.comm.torch_distributed.mail import Mail
from paceline.errors import MessageMismatch, NotLaunched, PeerLost

Tell = Callable[[PeerLost], None]
_PREFIX = "paceline"
_OPS = ("all_reduce", "broadcast")
_TICK = timedelta(seconds=0.25)
_SIOCGIFADDR = 0x8915
_POLL_S = 0.005
_NCCL_POLL_S = 2e-5


def connect_on_loopback(
    fd: int, port: int, rank: int, size: int, limits: Limits, started_s: float, tell: Tell
) -> DistributedTransport:
    """Join the run of a launcher on this host, which listens at ``fd``."""
    with _watched(rank, size, limits, tell) as peers:
        peers.awaits([0], "rank 0")
        store = open_store("127.0.0.1", port, rank, size, fd)
        return _join(store, "127.0.0.1", rank, size, limits, started_s, peers)


def connect_launched(
    place: Launched, limits: Limits, *, rank_order: bool = False, tell: Tell
) -> DistributedTransport:
    """Join the run that a launcher has started (torchrun, mpirun, srun, Ray)."""
    started_s = time.monotonic()
    rank, size, host, port = place.rank, place.size, place.address, place.port
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: dist.Store
    with _watched(rank, size, limits, tell) as peers:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            return DistributedTransport(
                store, rank, size, limits, peers, started_s, rank_order, owns_groups=False
            )
        if rank or agent:
            _reach(host, port, peers)
        with peers.explaining("the start", 0), peers.asking():
            store = open_store(host, port, None if agent else rank, size)
        if agent:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt_{attempt}", store)
        here = place.local_size
        return _join(store, host, rank, size, limits, started_s, peers, rank_order, here)


@contextmanager
def _watched(rank: int, size: int, limits: Limits, tell: Tell) -> Iterator[Peers]:
    """Those that look after the others; until the end of the run, if it comes to begin."""
    peers = Peers(rank, size, limits, tell)
    try:
        yield peers
    except BaseException:
        peers.close()
        raise


def _reach(host: str, port: int, peers: Peers) -> None:
    """Wait until somebody listens there."""
    while True:
        try:
            socket.create_connection((host, port), 1.0).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        peers.awaits([0], f"rank 0 at {host}:{port} ({why})")
        time.sleep(_TICK.total_seconds())


def open_store(
    host: str, port: int, rank: int | None, size: int, fd: int | None = None
) -> dist.Store:
    """A store of our own: rank 0 listens on the one address that was given, and on no other."""
    if rank != 0:
        if fd is not None:
            os.close(fd)
        return dist.TCPStore(host, port, size, False)
    if fd is None:
        try:
            fd = socket.create_server((host, port)).detach()
        except OSError as error:
            raise NotLaunched(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return dist.TCPStore(host, port, size, True, wait_for_workers=False, master_listen_fd=fd)


def _join(
    store: dist.Store,
    host: str,
    rank: int,
    size: int,
    limits: Limits,
    started_s: float,
    peers: Peers,
    rank_order: bool = False,
    local_size: int | None = None,
) -> DistributedTransport:
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_towards(host)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    peers.meet(dist.PrefixStore(_PREFIX, store))
    backend = _backend(local_size or size)
    with peers.explaining("the start"):
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=_forever(limits)
        )
    return DistributedTransport(store, rank, size, limits, peers, started_s, rank_order)


def _backend(here: int) -> str:
    """nccl for what lies on GPUs, unless ranks of this host share one, which nccl refuses."""
    return "cpu:gloo,cuda:nccl" if here <= torch.cuda.device_count() else "gloo"


def interface_towards(host: str) -> str | None:
    """The name of the network interface that reaches ``host``; None where that is not known."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            mine = probe.getsockname()[0]
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == mine:
                return name
    return None


class _Group:
    """The process groups of one set of members: one to agree on, one to move vectors on."""

    def __init__(self, members: tuple[int, ...], limits: Limits) -> None:
        ranks = list(members)
        options: Any = {"timeout": _forever(limits), "use_local_synchronization": True}
        self.members = members
        self.agreeing = dist.new_group(ranks, backend="gloo", **options)
        self.moving = dist.new_group(ranks, **options)
        self.under_way: list[_Collective] = []


class _Collective(Work):
    """A collective in two parts: agree on what it is, then move the vector.

    The second part is started by ``done`` or ``wait`` once the first is over, in the order in
    which collectives were started.
    """

    def __init__(
        self,
        transport: DistributedTransport,
        group: _Group,
        op: str,
        x: Tensor,
        weight: int,
        src: int = 0,
        factor: Factor | None = None,
    ) -> None:
        self._factor = factor
        self._transport, self._group, self._op, self._src = transport, group, op, src
        self._x, self._weight, self._total = x, weight, 0
        self._moving: Any = None
        self._buffer: Tensor | None = None
        self._over = False
        code = DTYPES.index(x.dtype) + len(DTYPES) * _OPS.index(op)
        limbs = _limbs(x.numel(), code)
        self._agreed = torch.tensor([weight, *limbs, *(limb**2 for limb in limbs)])
        self._agreeing = dist.all_reduce(self._agreed, group=group.agreeing, async_op=True)
        group.under_way.append(self)

    def done(self) -> bool:
        if not self._over and self._group.under_way[0] is self:
            if self._moving is None and self._agreeing.is_completed():
                self._move()
            if self._moving is not None and self._moving.is_completed():
                self.wait()
        return self._over

    def wait(self) -> int:
        while not self._over:
            oldest = self._group.under_way[0]
            if oldest._moving is None:
                oldest._move()
            oldest._conclude()
        return self._total

    def _move(self) -> None:
        self._transport.finish(self._agreeing, self._op, self._group.members)
        self._check_agreement()
        if self._total == 0 or self._x.numel() == 0:
            self._moving = _NOTHING
        elif self._op == "broadcast":
            src = self._src
            self._moving = dist.broadcast(self._x, src, group=self._group.moving, async_op=True)
        elif self._transport.rank_order:
            self._gather()
        else:
            self._buffer = self._x if self._weight else torch.zeros_like(self._x)
            self._moving = dist.all_reduce(self._buffer, group=self._group.moving, async_op=True)

    def _gather(self) -> None:
        """Sum in rank order, as the other transports do: every member gets every vector."""
        size = len(self._group.members)
        self._gathered = [torch.empty_like(self._x) for _ in range(size)]
        vector = self._x if self._weight else torch.zeros_like(self._x)
        self._moving = dist.all_gather(
            self._gathered, vector, group=self._group.moving, async_op=True
        )

    def _conclude(self) -> None:
        self._transport.finish(self._moving, self._op, self._group.members)
        if self._op == "all_reduce" and self._moving is not _NOTHING:
            if self._transport.rank_order:
                self._buffer = self._gathered[0]
                for vector in self._gathered[1:]:
                    self._buffer += vector
            if self._buffer is not None and self._factor is not None:
                self._buffer *= self._factor(self._total)
            if self._buffer is not None and self._buffer is not self._x:
                self._x.copy_(self._buffer)
        self._group.under_way.remove(self)
        self._over = True

    def _check_agreement(self) -> None:
        self._total, *sums = self._agreed.tolist()
        size, half = len(self._group.members), len(sums) // 2
        if any(size * squares != limb**2 for limb, squares in zip(sums, sums[half:], strict=False)):
            what = f"{self._op} of {self._x.numel()} x {self._x.dtype}"
            raise MessageMismatch(
                f"rank {self._transport.rank} calls {what} where another rank calls something else"
            )


def _limbs(numel: int, code: int) -> list[int]:
    """What a collective is, in numbers so small that the squares of all ranks can be summed.

    Members agree if and only if the squares of each number sum to the mean of its sum squared.
    """
    return [numel & 0xFFFFF, numel >> 20 & 0xFFFFF, numel >> 40, code]


class _Nothing:
    """A moving of nothing, which is over."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


_NOTHING = _Nothing()


class DistributedTransport(Transport):
    """One rank of a process group.

    Args:
        store: where ranks find each other, and count.
        rank: this rank.
        size: how many there are.
        limits: how long to wait.
        peers: looks after the others; has met them, unless torch.distributed was there before.
        started_s: the monotonic time that the run's clock begins at.
        rank_order: sum in rank order, bit for bit as the other transports do; slower.
        owns_groups: whether torch.distributed was initialised for this transport alone.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        limits: Limits,
        peers: Peers,
        started_s: float = 0.0,
        rank_order: bool = False,
        owns_groups: bool = True,
    ) -> None:
        self.rank, self.size, self.rank_order = rank, size, rank_order
        self._owns_groups = owns_groups
        self._limits, self._started_s = limits, started_s
        self._nccl = "nccl" in str(dist.get_backend_config())
        self._store = dist.PrefixStore(_PREFIX, store)
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._peers = peers
        if not owns_groups:
            peers.meet(self._store)
        self._mail = Mail(rank, size, limits, self._peers)
        self._group(tuple(range(size)))

    # Messages: the mail's own --------------------------------------------------------------------

    def alive(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if self._mail.why_gone(rank) is None)

    def retire(self) -> None:
        self._mail.retire()

    def stop_all(self) -> None:
        self._mail.stop_all()

    def stopping(self) -> bool:
        return self._mail.stopping

    def retired(self) -> frozenset[int]:
        return self._mail.retired

    def start_send(self, x: Tensor, dst: int, tag: int) -> Work:
        self._peers.check()
        return self._mail.start_send(x, dst, tag)

    def post(self, x: Tensor, dst: int, tag: int) -> bool:
        self._peers.check()
        return self._mail.post(x, dst, tag)

    def take(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, watch: bool = False
    ) -> tuple[int, Tensor]:
        self._peers.check()
        return self._mail.take(like, sources, tag, op, watch)

    def take_now(self, like: Tensor, sources: Sequence[int], tag: int) -> tuple[int, Tensor] | None:
        self._peers.check()
        return self._mail.take_now(like, sources, tag)

    def publish(self, x: Tensor) -> int:
        self._peers.check()
        return self._mail.publish(x)

    def peek(self, src: int, like: Tensor | None) -> tuple[int, Tensor] | None:
        self._peers.check()
        return self._mail.peek(src, like)

    def shelve(self, x: Tensor, shelf: int) -> None:
        self._mail.publish(x, 1 + shelf)

    def shelved(self, rank: int, shelf: int) -> Tensor | None:
        left = self._mail.peek(rank, None, 1 + shelf)
        return None if left is None else left[1]

    # Collectives ---------------------------------------------------------------------------------

    def start_all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None = None
    ) -> Work:
        group = self._group(members)
        return _Collective(self, group, "all_reduce", x, weight, factor=factor)

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        _Collective(self, self._group(members), "broadcast", x, 1, src).wait()

    def _group(self, members: tuple[int, ...]) -> _Group:
        self._peers.check()
        if members not in self._groups:
            with self._peers.explaining("the making of a group"):
                self._groups[members] = _Group(members, self._limits)
        return self._groups[members]

    def finish(self, work: Any, op: str, members: tuple[int, ...]) -> None:
        """Wait for a collective of the backend; give up when a member is gone."""
        watch = None
        others = [member for member in members if member != self.rank]
        while True:
            try:
                self._wait_a_tick(work)
                return
            except RuntimeError as error:
                watch = watch or Watch(op, self._limits)
                if "timed out" not in str(error).lower():
                    raise self._peers.find_lost(watch, others) from None
                gone = {r: why for r in others if (why := self._mail.why_gone(r)) is not None}
                if gone:
                    raise self._peers.lost(watch, gone) from None
                self._peers.check()
                watch.keep_patience(others)

    def _wait_a_tick(self, work: Any) -> None:
        """Wait for a while; nccl must not be told how long, or it gives up for good."""
        if not self._nccl or work is _NOTHING:
            work.wait(_TICK)
            return
        until_s = time.monotonic() + _TICK.total_seconds()
        while not work.is_completed():
            if time.monotonic() > until_s:
                raise RuntimeError("timed out")
            time.sleep(_NCCL_POLL_S)
        work.wait()

    # Clock and data ------------------------------------------------------------------------------

    def ticket(self, queue: int, epoch: int) -> int | None:
        self._peers.check()
        with self._peers.explaining("the drawing of a batch", 0), self._peers.asking():
            return int(self._store.add(f"queue/{queue}/{epoch}", 1)) - 1

    def allocate(self, numel: int, like: Tensor) -> Tensor:
        return like.new_zeros(numel)

    def now(self) -> float:
        return time.monotonic() - self._started_s

    def close(self) -> None:
        self._mail.close()
        self._meet_to_part()
        self._peers.close()
        if self._owns_groups and self._mail.closed and dist.is_initialized():
            dist.destroy_process_group()

    def first_loss(self, error: PeerLost) -> PeerLost:
        return self._peers.first_loss(error)

    def give_up(self) -> None:
        self._peers.close()

    def _meet_to_part(self) -> None:
        """Wait until all have heard that all leave: a connection closed before then loses words."""
        with suppress(RuntimeError):  # the store went with rank 0, which had seen everyone part
            heard = self._count_heard(1)
            while heard < self.size and len(self._ended()) < self.size - heard:
                time.sleep(_POLL_S)
                heard = self._count_heard(0)

    def _count_heard(self, more: int) -> int:
        with self._peers.asking():
            return int(self._store.add("heard", more))

    def _ended(self) -> list[int]:
        others = (rank for rank in range(self.size) if rank != self.rank)
        return [rank for rank in others if self._peers.has_ended(rank)]


def _forever(limits: Limits) -> timedelta:
    """The backend's own limit: beyond ours, which says more."""
    return timedelta(seconds=10 * limits.progress_limit_s)
