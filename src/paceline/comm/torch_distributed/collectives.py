"""Collectives over torch.distributed: the backend's own, gloo on CPUs and nccl on GPUs.

Where ranks share a GPU, nccl does not work: their vectors go through page-locked memory and gloo.

Each is preceded by a small one in which the members agree on operation, shape, weights and flags:
gloo aborts the process when shapes differ.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.dtypes import DTYPES
from paceline.comm.limits import Limits
from paceline.comm.liveness import Watch
from paceline.comm.ports import Collectives, Factor, Total
from paceline.comm.torch_distributed.mail import DistributedMail
from paceline.comm.torch_distributed.peers import Peers
from paceline.comm.torch_distributed.staging import host_copy
from paceline.errors import MessageMismatch

_ALL_REDUCE, _BROADCAST = "all_reduce", "broadcast"
_OPS = (_ALL_REDUCE, _BROADCAST)
_FLAGS = 8
"""How many bits the flags of an all-reduce can have."""
_TICK = timedelta(seconds=0.25)
_NCCL_POLL_S = 2e-5


class _Group:
    """The process groups of one set of members: one to agree on, one to move vectors on."""

    def __init__(self, members: tuple[int, ...], limits: Limits) -> None:
        ranks = list(members)
        options: Any = {"timeout": forever(limits), "use_local_synchronization": True}
        self.members = members
        self.agreeing = dist.new_group(ranks, backend="gloo", **options)
        self.moving = dist.new_group(ranks, **options)


class DistributedCollectives(Collectives):
    """The collectives of one rank.

    Args:
        peers: looks after the others.
        mail: knows who has departed.
        rank_order: sum in rank order, bit for bit as the other worlds do; slower.
    """

    def __init__(self, peers: Peers, mail: DistributedMail, rank_order: bool) -> None:
        self._rank, self._peers, self._mail = peers.rank, peers, mail
        self._rank_order = rank_order
        self._nccl = "nccl" in str(dist.get_backend_config())
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._group(tuple(range(peers.size)))

    def all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None, flags: int
    ) -> Total:
        group = self._group(members)
        total = self._agree(group, _ALL_REDUCE, x, weight, flags)
        if total.weight and x.numel():
            vector = self._on_backend(x if weight else torch.zeros_like(x))
            reduce = self._sum_in_rank_order if self._rank_order else self._sum
            vector = reduce(group, vector)
            if factor is not None:
                vector *= factor(total.weight)
            if vector is not x:
                x.copy_(vector)
        return total

    def _sum(self, group: _Group, vector: Tensor) -> Tensor:
        work = dist.all_reduce(vector, group=group.moving, async_op=True)
        self._finish(work, _ALL_REDUCE, group.members)
        return vector

    def _sum_in_rank_order(self, group: _Group, vector: Tensor) -> Tensor:
        """Every member gets every vector, and adds them up as the other worlds do."""
        gathered = [torch.empty_like(vector) for _ in group.members]
        work = dist.all_gather(gathered, vector, group=group.moving, async_op=True)
        self._finish(work, _ALL_REDUCE, group.members)
        total = gathered[0]
        for theirs in gathered[1:]:
            total += theirs
        return total

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        group = self._group(members)
        self._agree(group, _BROADCAST, x, 1)
        if x.numel():
            vector = self._on_backend(x)
            work = dist.broadcast(vector, src, group=group.moving, async_op=True)
            self._finish(work, _BROADCAST, members)
            if vector is not x:
                x.copy_(vector)

    def _on_backend(self, x: Tensor) -> Tensor:
        """The vector where the backend can have it: gloo does not get one on a GPU."""
        return host_copy(x) if x.is_cuda and not self._nccl else x

    def allocate(self, numel: int, like: Tensor) -> Tensor:
        return like.new_zeros(numel)

    def _group(self, members: tuple[int, ...]) -> _Group:
        self._peers.check()
        if members not in self._groups:
            with self._peers.explaining("the making of a group"):
                self._groups[members] = _Group(members, self._peers.limits)
        return self._groups[members]

    def _agree(self, group: _Group, op: str, x: Tensor, weight: int, flags: int = 0) -> Total:
        """Agree on what is done; return the weights of all, summed, and their flags."""
        numbers = _limbs(x.numel(), DTYPES.index(x.dtype) + len(DTYPES) * _OPS.index(op))
        bits = [flags >> bit & 1 for bit in range(_FLAGS)]
        agreed = torch.tensor([weight, *bits, *numbers, *(number**2 for number in numbers)])
        work = dist.all_reduce(agreed, group=group.agreeing, async_op=True)
        self._finish(work, op, group.members)
        total, *sums = agreed.tolist()
        counts, sums = sums[:_FLAGS], sums[_FLAGS:]
        size, half = len(group.members), len(sums) // 2
        if any(size * squares != limb**2 for limb, squares in zip(sums, sums[half:], strict=False)):
            raise MessageMismatch(
                f"rank {self._rank} calls {op} of {x.numel()} x {x.dtype} where another rank calls"
                " something else"
            )
        return Total(total, sum((count > 0) << bit for bit, count in enumerate(counts)))

    # Waiting -------------------------------------------------------------------------------------

    def _finish(self, work: Any, op: str, members: tuple[int, ...]) -> None:
        """Wait for a collective of the backend; give up when a member is gone."""
        watch = None
        others = [member for member in members if member != self._rank]
        while True:
            try:
                self._wait_a_tick(work)
                return
            except RuntimeError as error:
                watch = watch or Watch(op, self._peers.limits)
                if "timed out" not in str(error).lower():
                    raise self._peers.find_lost(watch, others) from None
                gone = {r: why for r in others if (why := self._mail.why_gone(r)) is not None}
                if gone:
                    raise self._peers.lost(watch, gone) from None
                self._peers.check()
                watch.check_limits(others)

    def _wait_a_tick(self, work: Any) -> None:
        """Wait for a while; nccl must not be given a timeout, or it gives up for good."""
        if not self._nccl:
            work.wait(_TICK)
            return
        until_s = time.monotonic() + _TICK.total_seconds()
        while not work.is_completed():
            if time.monotonic() > until_s:
                raise RuntimeError("timed out")
            time.sleep(_NCCL_POLL_S)
        work.wait()


def _limbs(numel: int, code: int) -> list[int]:
    """What a collective is, in numbers so small that the squares of all ranks can be summed.

    All of ``size`` members have the same number n if and only if size * sum(n^2) = sum(n)^2.
    """
    return [numel & 0xFFFFF, numel >> 20 & 0xFFFFF, numel >> 40, code]


def forever(limits: Limits) -> timedelta:
    """The backend's own limit: beyond ours, whose message says more."""
    return timedelta(seconds=10 * limits.progress_limit_s)
