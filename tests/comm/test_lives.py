"""Ranks that are lost and come again, on shared memory, without waiting for real ones to die."""

from __future__ import annotations

import os

import pytest
import torch

from paceline.comm.arena import Arena
from paceline.comm.base import Comm, Limits
from paceline.comm.roll import Standing
from paceline.comm.shared_memory import SharedMemoryTransport

LIKE = torch.zeros(1)


@pytest.fixture
def two():
    """Two ranks of a run, both in this process."""
    fd = Arena.create(2)
    yield [SharedMemoryTransport(fd, rank, 2, Limits()) for rank in range(2)]
    os.close(fd)


def lose(rank: SharedMemoryTransport) -> None:
    """Have the roll say that a rank has died, and the rank come again."""
    assert rank.roll.change(rank.rank, rank.roll[rank.rank], Standing.DIED)
    rank.rejoin()


def test_a_loss_is_heard_before_what_the_next_life_says(two, monkeypatch):
    """Also when both come about while the one who is to hear of them waits already."""
    reader, other = two
    comm, take = Comm(reader), reader.take

    def take_meanwhile(*args, **how):
        monkeypatch.setattr(reader, "take", take)
        lose(other)
        assert other.post(LIKE + 7, 0, 0)
        return take(*args, **how)

    monkeypatch.setattr(reader, "take", take_meanwhile)
    assert comm.recv_or_loss(LIKE) == (1, None)
    assert comm.recv_or_loss(LIKE) == (1, torch.tensor([7.0]))


def test_what_a_life_said_that_is_over_is_not_heard(two, monkeypatch):
    reader, other = two
    comm, take = Comm(reader), reader.take
    said = iter([1.0, 2.0])

    def take_meanwhile(*args, **how):
        lose(other)
        assert other.post(LIKE + next(said), 0, 0)
        return take(*args, **how)

    monkeypatch.setattr(reader, "take", take_meanwhile)
    assert comm.recv_or_loss(LIKE) == (1, None)
    lose(other)
    assert comm.recv_or_loss(LIKE) == (1, None)
    assert comm.recv_or_loss(LIKE) == (1, None)
    assert comm.recv_or_loss(LIKE) == (1, torch.tensor([2.0]))
