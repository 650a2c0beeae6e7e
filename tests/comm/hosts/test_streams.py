"""Messages arrive once, whole and in order, whatever a connection loses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.hosts import streams
from paceline.comm.hosts.near import NearMemory, NearView
from paceline.comm.hosts.streams import InStream, OutStream, Part

SLOTS = 2


class Wire:
    """A connection that may break: then all that is on its way is lost, in both directions."""

    def __init__(self, near: bool = False) -> None:
        self.outbox, self.inbox = OutStream(), InStream()
        self.memory, self.view = NearMemory(SLOTS) if near else None, None
        self.outbox.window = SLOTS if near else 4
        self.parts: list[Part] = []
        self.late: list[Part] = []
        self.acknowledged: list[int] = []
        self.arrived: list[tuple[bytes, bytes]] = []

    def send(self, room=1000):
        for part in self.outbox.due():
            if len(self.parts) >= room:
                self.outbox.unsend()
                return
            put = self.memory.put if self.memory else lambda number, chunk: bytes(chunk)
            self.parts.append(part._replace(chunk=put(part.number, part.chunk)))

    def deliver(self):
        if self.parts:
            self.take(self.parts.pop(0))

    def take(self, part):
        if self.memory:
            self.view = self.view or NearView(part.chunk)
            part = part._replace(chunk=self.view.part(part.chunk))
        if (message := self.inbox.add(part)) is not None:
            meta, body = message
            self.arrived.append((meta, body.numpy().tobytes()))
        self.acknowledged.append(self.inbox.last)

    def straggle(self):
        """A part arrives that an earlier connection had on its way."""
        if self.late:
            self.take(self.late.pop(0))

    def acknowledge(self, now_s=0.0):
        while self.acknowledged:
            self.outbox.acknowledge(self.acknowledged.pop(0), now_s)

    def break_down(self):
        self.late += self.parts
        self.parts.clear()
        self.acknowledged.clear()

    def connect_again(self):
        self.outbox.rewind()


MESSAGES = st.lists(st.tuples(st.binary(max_size=3), st.binary(max_size=60)), max_size=8)
KINDS = ("send", "deliver", "acknowledge", "break", "tight", "straggle")
ACTS = st.lists(st.sampled_from([*KINDS]), max_size=80)


@pytest.mark.parametrize("near", [False, True])
@given(MESSAGES, ACTS)
def test_each_message_arrives_once_and_in_order(near, messages, acts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "PART_BYTES", 16)
        wire, waiting = Wire(near), [*messages]
        for act in [*acts, *["break"] * bool(acts)]:
            if waiting:
                meta, body = waiting.pop(0)
                wire.outbox.add(meta, memoryview(body))
            match act:
                case "send":
                    wire.send()
                case "tight":
                    wire.send(room=2)
                case "deliver":
                    wire.deliver()
                case "acknowledge":
                    wire.acknowledge()
                case "straggle":
                    wire.straggle()
                case "break":
                    wire.break_down()
                    wire.connect_again()
            assert wire.arrived == messages[: len(wire.arrived)]
        for meta, body in waiting:
            wire.outbox.add(meta, memoryview(body))
        while not wire.outbox.is_empty:
            wire.send()
            wire.deliver()
            wire.acknowledge()
        assert wire.arrived == messages


def test_what_is_never_acknowledged_is_sent_again_ever_less_often():
    wire, sent_s = Wire(), []
    wire.outbox.add(b"", memoryview(b"x"))
    for tick in range(400):
        wire.outbox.look(tick / 4)
        wire.send()
        sent_s += [tick / 4 for _ in wire.parts]
        wire.break_down()
    waits = [later - earlier for earlier, later in itertools.pairwise(sent_s)]
    assert waits[0] >= streams.STALL_S
    assert waits[1] > waits[0] and all(
        later >= earlier for earlier, later in itertools.pairwise(waits)
    )


@pytest.mark.parametrize(
    "parts",
    [
        [Part(1, True, True, 2, b"", b"three")],
        [Part(1, True, False, 2, b"", b"a"), Part(2, False, True, 2, b"", b"")],
    ],
)
def test_parts_that_do_not_make_up_their_message_are_refused(parts):
    inbox = InStream()
    with pytest.raises(ValueError, match="message"):
        for part in parts:
            inbox.add(part)
