"""What a member sends ahead: enough for a busy line, and no more, on a line that is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.worlds import on_hosts

from paceline.comm.hosts.link import Receipt
from paceline.comm.hosts.outbound import GAIN, LEAST_BYTES, Allowance, Outbound

pytestmark = on_hosts
NEAR, FAR = 1, 2
PIECE = torch.zeros(1 << 14)


@dataclass
class Line:
    """A line that carries one part after the other; its receivers answer at once."""

    bytes_per_s: float
    delay_s: float
    time_s: float = 0.0
    free_s: float = 0.0
    due_s: list[float] = field(default_factory=list)
    most_on_its_way: int = 0
    sent: list[tuple[int, int]] = field(default_factory=list)

    def now_s(self):
        return self.time_s

    def is_near(self, rank):
        return rank == NEAR

    def send(self, rank, start, piece, summed):
        self.sent.append((rank, start))
        self.free_s = max(self.free_s, self.time_s) + piece.nbytes / self.bytes_per_s
        due_s = self.free_s + 2 * self.delay_s
        self.due_s = [*(due for due in self.due_s if due > self.time_s), due_s]
        self.most_on_its_way = max(self.most_on_its_way, len(self.due_s) * piece.nbytes)
        return Receipt(rank, Arrival(self, due_s), 1)

    def await_next(self):
        self.time_s = min(due_s for due_s in self.due_s if due_s > self.time_s)


@dataclass
class Arrival:
    line: Line
    due_s: float

    def has_arrived(self, number):
        return self.line.time_s >= self.due_s


def send_all(line, allowance, parts):
    """Send so many parts; return how long it took until the last arrived."""
    out, began_s = Outbound(line, allowance), line.time_s
    for number in range(parts):
        out.put(FAR, number, PIECE)
    out.send()
    while max(line.due_s) > line.time_s:
        assert not out.can_send
        assert out.awaited == ([] if out.is_empty else [FAR])
        line.await_next()
        out.send()
    assert out.is_empty
    return line.time_s - began_s


@given(rate=st.floats(1e6, 1e8), delay_s=st.floats(0, 0.1))
def test_a_line_is_busy_and_its_queue_short(rate, delay_s):
    line, allowance = Line(rate, delay_s), Allowance()
    held = rate * 2 * delay_s  # what is on its way when the line is busy and nothing queues
    parts = max(64, int(8 * held / PIECE.nbytes))
    send_all(line, allowance, parts)
    seconds = send_all(line, allowance, parts)
    assert seconds <= 1.01 * (parts * PIECE.nbytes / rate + 2 * delay_s)
    # A trip includes the time that the part itself takes on the line.
    most = max(LEAST_BYTES, GAIN * 1.01 * (held + PIECE.nbytes)) + PIECE.nbytes
    assert line.most_on_its_way <= most


def test_in_a_first_collective_more_is_on_its_way_with_every_trip():
    line = Line(100e6, 0.1)
    seconds = send_all(line, Allowance(), 2000)
    trips = math.log(20e6 / LEAST_BYTES, GAIN)  # until the line is busy
    assert seconds <= 2000 * PIECE.nbytes / 100e6 + (trips + 2) * 0.2


def test_a_slower_line_is_noticed_after_a_collective():
    line, allowance = Line(1e8, 0.1), Allowance()
    for _ in range(2):
        send_all(line, allowance, 2000)
    before, line.bytes_per_s = allowance.nbytes, 1e6
    for _ in range(2):
        send_all(line, allowance, 64)
    assert allowance.nbytes < before / 20


def test_parts_for_this_host_do_not_wait():
    line = Line(1e6, 1.0)
    out = Outbound(line, Allowance())
    for number in range(8):
        out.put(FAR, number, PIECE)
    out.send()
    few = LEAST_BYTES // PIECE.nbytes
    assert line.sent == [(FAR, number) for number in range(few)]
    out.put(NEAR, 0, PIECE)
    assert line.sent[-1] == (NEAR, 0)
    out.send()
    assert len(line.sent) == few + 1
    assert not out.can_send
    line.await_next()
    assert out.can_send


@pytest.mark.parametrize("piece", [torch.zeros(0), torch.zeros(1 << 20)])
def test_a_part_of_any_length_goes(piece):
    line = Line(1e6, 1.0)
    out = Outbound(line, Allowance())
    out.put(FAR, 0, piece)
    out.send()
    assert out.is_empty
    assert out.awaited == []
