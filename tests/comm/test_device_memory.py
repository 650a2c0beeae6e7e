"""Ranks whose vectors lie in memory that a keeper holds; all of them in this process."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from support.worlds import on_shared_memory

from paceline.comm.limits import Limits
from paceline.comm.ports import MAILBOX_CAPACITY, PUBLISHED, SAVED
from paceline.comm.shared.drivers import CudaDriver
from paceline.comm.shared.keeper import keep
from paceline.comm.shared.memory import Arena
from paceline.comm.shared.segments import ADDRESSES
from paceline.comm.shared.windows import HEADERS
from paceline.comm.shared.world import SharedPorts
from paceline.errors import MessageMismatch

SIZE = 2

pytestmark = on_shared_memory


@pytest.fixture
def join():
    """Join the run as a rank, or as the next process of a rank."""
    fd = Arena.create(SIZE)
    threading.Thread(target=keep, args=(fd, SIZE, "host"), daemon=True).start()
    yield lambda rank: SharedPorts(fd, rank, SIZE, Limits(), device="host")
    os.close(fd)


def words_of(ports, src, dst, slot=0):
    """The sequence of a message, and that of its receipt."""
    layout, words = ports.shared.layout, ports.shared.words
    return words[layout.slot(src, dst, slot)], words[layout.receipt(src, dst, slot)]


def test_a_receipt_comes_after_the_device_has_read_and_the_message_comes_once(join):
    sender, receiver = join(0), join(1)
    x = torch.arange(5.0)
    assert sender.mail.post(x, 1, 0, b"header")
    message = receiver.mail.try_receive(x, (0,), 0)
    assert (message.x.tolist(), message.header) == (x.tolist(), b"header")
    sent, receipt = words_of(sender, 0, 1)
    assert receipt < sent
    assert receiver.mail.try_receive(x, (0,), 0) is None
    receiver.shared.deferred.settle(wait=True)
    assert words_of(sender, 0, 1) == (sent, sent)


def test_a_message_that_was_taken_is_not_saved_again_in_a_checkpoint(join):
    sender, receiver = join(0), join(1)
    sender.mail.post(torch.ones(2), 1, 0, b"")
    receiver.mail.try_receive(torch.ones(2), (0,), 0)
    sender.mail.post(torch.zeros(2), 1, 0, b"")
    saved = receiver.rendezvous.snapshot(None)["mail"]
    assert [x.tolist() for _, _, x, _ in saved] == [[0.0, 0.0]]


def test_memory_is_used_again_when_its_receipt_has_come(join):
    sender, receiver = join(0), join(1)
    layout, places = sender.shared.layout, set()
    for number in range(20):
        assert sender.mail.post(torch.full((1 << 20,), float(number)), 1, 0, b"number")
        slot = number % MAILBOX_CAPACITY
        places.add(sender.shared.words[layout.slot(0, 1, slot) + 4])
        assert receiver.mail.try_receive(torch.empty(1 << 20), (0,), 0).x[0] == number
        receiver.shared.deferred.settle(wait=True)
    assert all(place >= ADDRESSES for place in places if place) and len(places) <= 4


def test_a_reader_gets_the_header_of_the_version_that_it_reads(join):
    owner, reader = join(0), join(1)
    for number in range(3 * HEADERS):
        version = owner.mail.publish(torch.full((3,), float(number)), b"%08d" % number)
        seen = reader.mail.peek(0, torch.empty(3))
        assert (seen.version, seen.header) == (version, b"%08d" % number)
        assert seen.x.tolist() == [number] * 3


def test_a_header_of_another_version_is_refused(join):
    owner, reader = join(0), join(1)
    owner.mail.publish(torch.ones(3), b"header")
    layout, shared = owner.shared.layout, owner.shared
    place = shared.words[layout.window(0, PUBLISHED) + 4 + 3 * 1 + 2]
    shared.places.arena.write(place + 14, torch.empty(0), (7).to_bytes(8, "little"))
    with pytest.raises(MessageMismatch, match="holds no version 1"):
        reader.mail.peek(0, torch.empty(3))


def test_the_next_process_of_a_rank_takes_over_its_windows(join):
    first, reader = join(0), join(1)
    first.mail.publish(torch.ones(3), b"one")
    first.mail.publish(torch.ones(7), b"", SAVED)
    layout, words = reader.shared.layout, reader.shared.words
    words[layout.pid(0)] = 0  # as if its process had died
    second = join(0)
    seen = second.mail.peek(0, None, SAVED, gone=True)
    assert seen.x.tolist() == [1.0] * 7
    start = layout.window(0)
    places = words.read(start + 4, 9)
    assert second.mail.publish(torch.zeros(3), b"two") == 2
    assert [words.read(start + 4, 9)[i] for i in (1, 4, 7)] == [places[i] for i in (1, 4, 7)]
    assert reader.mail.peek(0, None, gone=True).header == b"two"


def test_a_vector_outside_of_its_segment_is_refused(join):
    sender, receiver = join(0), join(1)
    sender.mail.post(torch.ones(3), 1, 0, b"")
    index = sender.shared.layout.slot(0, 1, 0)
    sender.shared.words[index + 4] += 1 << 30
    with pytest.raises(MessageMismatch, match="must lie in its segment"):
        receiver.mail.try_receive(torch.ones(3), (0,), 0)


class Stream:
    """A stream of a GPU that notes when the host waits for it."""

    def __init__(self):
        self.waits = 0

    def synchronize(self):
        self.waits += 1


def test_what_was_asked_on_another_stream_is_done_first(monkeypatch):
    driver = CudaDriver.__new__(CudaDriver)  # without a GPU
    driver._index, driver._stream = 0, None
    first, second = Stream(), Stream()
    for stream in (first, first, second):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index, stream=stream: stream)
        driver.enter()
    assert (first.waits, second.waits) == (1, 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: first)
    driver.finish()
    assert (first.waits, second.waits) == (1, 1)
