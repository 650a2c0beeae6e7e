"""Ranks of one host hand each other large messages through memory; the sockets carry the rest."""

from __future__ import annotations

import fcntl
import os
import struct

import pytest
import torch
from support.worlds import on_hosts

from paceline.comm.hosts.near import NearMemory, NearView
from paceline.comm.hosts.streams import PART_BYTES
from paceline.comm.hosts.zeromq import ZmqConnection

NUMEL = 1_000_000
SIZE = 16 * PART_BYTES


def place(fd, start=0, length=1):
    return struct.pack("<IIII", os.getpid(), fd, start, length)


def test_what_is_put_there_is_seen_at_the_other_end():
    memory = NearMemory(2)
    view = NearView(first := memory.put(1, b"one"))
    second = memory.put(2, b"second")
    assert [bytes(view.part(p)) for p in (first, second)] == [b"one", b"second"]
    assert bytes(view.part(memory.put(3, b"three"))) == b"three"
    assert bytes(view.part(first)) == b"thr", "the third part lies where the first one was"


def test_a_view_outlives_the_memory_of_its_sender():
    memory = NearMemory(2)
    view = NearView(found := memory.put(1, b"last words"))
    fd = memory._fd
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert bytes(view.part(found)) == b"last words"


@pytest.mark.parametrize("length", [0, PART_BYTES, SIZE])
def test_no_other_memory_is_read(length):
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE)
        with pytest.raises(ValueError, match="no memory of a stream"):
            NearView(place(fd))  # it could shrink
        os.ftruncate(fd, length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        if length == 0:
            with pytest.raises(ValueError, match="no memory of a stream"):
                NearView(place(fd))
            return
        view = NearView(place(fd))
        for start, asked in [(length, 1), (0, PART_BYTES + 1), (2**32 - 1, PART_BYTES)]:
            with pytest.raises(ValueError, match="bytes at"):
                view.part(place(fd, start, asked))
    finally:
        os.close(fd)


def test_an_ordinary_file_is_not_read(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(SIZE)
        with pytest.raises(OSError, match="Invalid argument"):
            NearView(place(file.fileno()))


@pytest.fixture
def sent(monkeypatch):
    """The bytes that go over sockets."""
    sizes, send = [], ZmqConnection.send

    def count(self, head, chunk=None):
        sizes.append(len(head) + len(chunk or b""))
        return send(self, head, chunk)

    monkeypatch.setattr(ZmqConnection, "send", count)
    return sizes


def exchange(ranks):
    """A large message from rank 0 to rank 1, and what arrives."""
    x = torch.randn(NUMEL)
    assert ranks[0].mail.post(x, 1, 0, b"")
    message = ranks[1].mail.receive(torch.empty(NUMEL), [0], 0, "receive")
    assert torch.equal(message.x, x)


@on_hosts
def test_a_large_message_does_not_go_over_a_socket(world, sent):
    _, ranks, _ = world
    exchange(ranks)
    assert max(sent) < 1000 and sum(sent) < 4 * NUMEL / 20


@on_hosts
def test_who_cannot_see_the_memory_gets_messages_over_the_socket(world, sent, monkeypatch):
    def refuse(place):
        raise PermissionError("not yours")

    monkeypatch.setattr("paceline.comm.hosts.link.NearView", refuse)
    _, ranks, _ = world
    exchange(ranks)
    exchange(ranks)
    assert sum(sent) > 2 * 4 * NUMEL
