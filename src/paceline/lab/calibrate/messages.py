"""What messages and collectives take among two ranks, packed and taken in as strategies do it.

Each is timed in turn, between two barriers: what it costs the processors of the ranks, and what it
takes on top, when no core works on it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from paceline.comm.base import Comm, Transport
from paceline.comm.packet import Packet
from paceline.common.reference import refer_to
from paceline.lab.calibrate.clock import queued_s
from paceline.lab.calibrate.steps import NUMBERS
from paceline.launcher.rank_process import Channel, Message
from paceline.launcher.supervisor import run_ranks
from paceline.strategies.decentralised import average

RANKS = 2
BYTES_A_REPEAT = 16 << 20
IN_TURN = "round_trip"
"""The operation whose two ranks work one after the other; in the others they work at once."""

Operation = Callable[[], object]


class Taken(NamedTuple):
    """One operation that was timed.

    Attributes:
        what: its name.
        nbytes: the size of the vector.
        work_s: what a call cost the processor of each of them; the median.
        wait_s: what it took on top; the median.
    """

    what: str
    nbytes: int
    work_s: float
    wait_s: float


class Repeat(NamedTuple):
    """A call in one repeat on one rank: time of the wall, of its processor, and for a core."""

    wall_s: float
    work_s: float
    queued_s: float


def run_messages(nbytes: int, *, transport: str, repeats: int) -> list[Taken]:
    """Time every operation with vectors of ``nbytes``."""
    argument = {"nbytes": nbytes, "repeats": repeats}
    told = run_ranks(refer_to(time_messages), [argument] * RANKS, transport=transport)
    taken = []
    for what in told[0]:
        each = [[Repeat(*repeat) for repeat in rank[what]] for rank in told]
        work_s = statistics.median(repeat.work_s for rank in each for repeat in rank)
        waits = [_waited(what, calls) for calls in zip(*each, strict=True)]
        taken.append(Taken(what, nbytes, work_s, statistics.median(waits)))
    return taken


def _waited(what: str, calls: tuple[Repeat, ...]) -> float:
    """What a call took beside work, and beside standing in the queue for a core."""
    busy = [call.work_s + call.queued_s for call in calls]
    alone = sum(busy) if what == IN_TURN else max(busy)
    return max(0.0, max(call.wall_s for call in calls) - alone)


def time_messages(transport: Transport, channel: Channel, argument: Message) -> Message:
    """On one rank: the repeats of each operation."""
    comm, nbytes = Comm(transport), argument["nbytes"]
    operations = _operations(comm, transport, nbytes // 4)
    calls = max(2, min(8, BYTES_A_REPEAT // nbytes))
    told: dict[str, list[Repeat]] = {what: [] for what in operations}
    for repeat in range(argument["repeats"] + 1):
        for what, run in operations.items():
            comm.barrier()
            before = _moment()
            for _ in range(calls):
                run()
            spent = [(now - then) / calls for now, then in zip(_moment(), before, strict=True)]
            if repeat:
                told[what].append(Repeat(*spent))
    comm.barrier()  # whoever left before the others were done would be missed
    return told


def _moment() -> Repeat:
    return Repeat(time.perf_counter(), time.process_time(), queued_s())


def _operations(comm: Comm, transport: Transport, numel: int) -> dict[str, Operation]:
    x = transport.allocate(numel, torch.empty(0))
    numbers, peer = [1.0] * NUMBERS, 1 - comm.rank

    def leave() -> None:
        comm.post(Packet.of(numbers, x).buffer, peer)

    def take() -> None:
        message = comm.recv(Packet.empty(NUMBERS, x).buffer, peer)
        x.copy_(Packet(message, NUMBERS, x.dtype).vector)

    def there_and_back() -> None:
        first, second = (leave, take) if comm.rank == 0 else (take, leave)
        first()
        second()

    def publish() -> None:
        comm.publish(Packet.of(numbers, x).buffer)

    def peek() -> None:
        seen = comm.peek(peer, Packet.empty(NUMBERS, x).buffer)
        assert seen is not None, "both ranks have published"
        average(x, [Packet(seen[1], NUMBERS, x.dtype).vector])

    publish()
    return {
        "reduce": lambda: comm.all_reduce(x),
        IN_TURN: there_and_back,
        "publish": publish,
        "peek": peek,
    }
