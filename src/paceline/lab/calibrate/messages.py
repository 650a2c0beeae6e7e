"""Time messages and collectives between two ranks, packed and unpacked as strategies do it.

The ranks are on this host; or one of them on another host that joins, to time the link between.

Each operation is timed between two barriers: the processor time of the ranks, and the time on top
in which no core works on it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.comm import Comm
from paceline.comm.ports import Ports
from paceline.common.reference import refer_to
from paceline.lab.bench.device import shared
from paceline.lab.calibrate.clock import WorkTime, queued_s
from paceline.lab.calibrate.steps import HEADER_BYTES
from paceline.launcher.many_hosts import ManyHosts
from paceline.launcher.rank_process import Channel, Message
from paceline.launcher.supervisor import run_ranks
from paceline.strategies.pairs import average

RANKS = 2
LINK_BYTES = (4 << 10, 1 << 20, 4 << 20)
"""The messages by which the link to another host is timed."""
BYTES_A_REPEAT = 16 << 20
ROUND_TRIP = "round_trip"
"""In this operation the two ranks work one after the other; in all others, at the same time."""

Operation = Callable[[], object]
_HOST = torch.device("cpu")


class OperationTime(NamedTuple):
    """The time of one operation.

    Attributes:
        operation: its name.
        nbytes: the size of the vector.
        work_s: the median processor time of a call, for each rank.
        wait_s: the median time on top, in which no core worked on it.
    """

    operation: str
    nbytes: int
    work_s: float
    wait_s: float


class Repeat(NamedTuple):
    """A call of one repeat on one rank: wall-clock, processor, and waiting-for-a-core time."""

    wall_s: float
    work_s: float
    queued_s: float


def run_messages(
    nbytes: int, *, transport: str, repeats: int, device: str = "cpu"
) -> list[OperationTime]:
    """Time every operation with vectors of ``nbytes``."""
    argument = {"nbytes": nbytes, "repeats": repeats, "device": device}
    ranks = run_ranks(
        refer_to(time_messages), [argument] * RANKS, transport=transport, device=shared(device)
    )
    return [
        _median_of(operation, nbytes, [rank[operation] for rank in ranks]) for operation in ranks[0]
    ]


def run_link(hosts: ManyHosts, repeats: int) -> list[OperationTime]:
    """Time round trips to another host, which joins."""
    ranks = run_ranks(
        refer_to(time_link), [{"repeats": repeats}] * RANKS, transport="hosts", hosts=hosts
    )
    return [
        _median_of(ROUND_TRIP, nbytes, calls)
        for nbytes, *calls in zip(LINK_BYTES, *ranks, strict=True)
    ]


def _median_of(operation: str, nbytes: int, ranks: list[list[list[float]]]) -> OperationTime:
    """The medians of the repeats of both ranks."""
    repeats_by_rank = [[Repeat(*repeat) for repeat in rank] for rank in ranks]
    work_s = statistics.median(each.work_s for rank in repeats_by_rank for each in rank)
    waits = [_waited(operation, calls) for calls in zip(*repeats_by_rank, strict=True)]
    return OperationTime(operation, nbytes, work_s, statistics.median(waits))


def _waited(operation: str, calls: tuple[Repeat, ...]) -> float:
    """The time of a call, without processor time and without waiting for a core."""
    busy = [call.work_s + call.queued_s for call in calls]
    busy_s = sum(busy) if operation == ROUND_TRIP else max(busy)
    return max(0.0, max(call.wall_s for call in calls) - busy_s)


def time_messages(ports: Ports, channel: Channel, argument: Message) -> Message:
    """Time the repeats of each operation on one rank."""
    comm, nbytes = Comm(ports), argument["nbytes"]
    like = torch.empty(0, device=argument["device"])
    operations = _operations(comm, ports, nbytes // 4, like)
    timed = _time(comm, operations, nbytes, argument["repeats"], like.device)
    comm.barrier()  # a rank that left earlier would be reported as lost
    return timed


def time_link(ports: Ports, channel: Channel, argument: Message) -> list[list[Repeat]]:
    """Time the repeats of a round trip on one rank, for each size."""
    comm, times = Comm(ports), []
    for nbytes in LINK_BYTES:
        round_trip = _round_trip(comm, torch.zeros(nbytes // 4))
        timed = _time(comm, {ROUND_TRIP: round_trip}, nbytes, argument["repeats"])
        times.append(timed[ROUND_TRIP])
    comm.barrier()
    return times


def _time(
    comm: Comm,
    operations: Mapping[str, Operation],
    nbytes: int,
    repeats: int,
    device: torch.device = _HOST,
) -> dict[str, list[Repeat]]:
    clock = WorkTime(device)
    calls = max(2, min(8, BYTES_A_REPEAT // nbytes))
    timed: dict[str, list[Repeat]] = {operation: [] for operation in operations}
    for repeat in range(repeats + 1):
        for operation, run in operations.items():
            comm.barrier()
            before = _clocks(clock)
            for _ in range(calls):
                run()
            spent = [(now - then) / calls for now, then in zip(_clocks(clock), before, strict=True)]
            if repeat:
                timed[operation].append(Repeat(*spent))
    return timed


def _clocks(clock: WorkTime) -> Repeat:
    work_s = clock.now()
    return Repeat(time.perf_counter(), work_s, queued_s())


def _round_trip(comm: Comm, x: Tensor) -> Operation:
    peer = 1 - comm.rank

    def post() -> None:
        comm.board.post(x, peer, header=bytes(HEADER_BYTES))

    def receive() -> None:
        x.copy_(comm.receive(x, peer).x)

    def round_trip() -> None:
        first, second = (post, receive) if comm.rank == 0 else (receive, post)
        first()
        second()

    return round_trip


def _operations(comm: Comm, ports: Ports, numel: int, like: Tensor) -> dict[str, Operation]:
    x = ports.collectives.allocate(numel, like)
    peer = 1 - comm.rank

    def publish() -> None:
        comm.board.publish(x, bytes(HEADER_BYTES))

    def peek() -> None:
        read = comm.board.peek(peer, x)
        assert read is not None, "both ranks have published"
        average(x, [read.x])

    publish()
    return {
        "reduce": lambda: comm.all_reduce(x),
        ROUND_TRIP: _round_trip(comm, x),
        "publish": publish,
        "peek": peek,
    }
