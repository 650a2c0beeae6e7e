"""Ranks that are lost and come again, on shared memory, without waiting for real ones to die."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress

import pytest
import torch

from paceline.comm.base import Comm, Limits
from paceline.comm.shared.members import Standing
from paceline.comm.shared.memory import Arena
from paceline.comm.shared.transport import SharedMemoryTransport

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


def test_what_is_said_to_a_new_life_at_once_is_heard(two, monkeypatch):
    writer, other = two
    enter = other.roll.enter

    def enter_and_be_written_to(rank, late):
        entry = enter(rank, late)
        assert writer.post(LIKE + 7, 1, 0)
        return entry

    monkeypatch.setattr(other.roll, "enter", enter_and_be_written_to)
    lose(other)
    assert Comm(other).poll(LIKE) == [(0, torch.tensor([7.0]))]


# Batches -----------------------------------------------------------------------------------------


class Killed(BaseException):
    """Where a process would end."""


class Fragile:
    """Words of which so many can be set before the process is killed."""

    def __init__(self, words, stores):
        self._words, self._stores = words, stores

    def __getattr__(self, name):
        return getattr(self._words, name)

    def __getitem__(self, index):
        return self._words[index]

    def __setitem__(self, index, value):
        if self._stores == 0:
            raise Killed
        self._stores -= 1
        self._words[index] = value

    def write(self, index, values):
        for place, value in enumerate(values, index):
            self[place] = value


@contextmanager
def killed_after(rank, stores):
    words = rank.words
    rank.words = Fragile(words, stores)
    with suppress(Killed):
        yield
    rank.words = words


def hold_three(rank):
    """Take three batches, and make use of the first."""
    for _ in range(3):
        rank.ticket(0, 0)
    rank.done_with(0, 0, 0)


@pytest.mark.parametrize("stores", range(4))
@pytest.mark.parametrize(("comes_again", "epoch"), [(False, 0), (True, 0), (False, 1)])
def test_a_kill_while_a_batch_is_drawn_loses_none_and_doubles_none(two, stores, comes_again, epoch):
    reader, other = two
    hold_three(other)
    if comes_again:
        lose(other)  # so that there are batches to be given out again
    with killed_after(other, stores):
        other.ticket(0, epoch)
    assert other.roll.change(1, other.roll[1], Standing.DIED)
    first = 0 if epoch else 1
    assert sorted(reader.ticket(0, epoch) for _ in range(9)) == list(range(first, first + 9))


@pytest.mark.parametrize("stores", range(5))
def test_a_kill_while_batches_are_taken_back_loses_none_and_doubles_none(two, stores):
    reader, other = two
    hold_three(other)
    struck = other.roll.change(1, other.roll[1], Standing.DIED)
    with killed_after(reader, stores):
        reader._take_back(1, struck)
    assert sorted(reader.ticket(0, 0) for _ in range(9)) == list(range(1, 10))


def test_batches_are_not_taken_from_who_has_come_again_meanwhile(two):
    reader, other = two
    hold_three(other)
    struck = other.roll.change(1, other.roll[1], Standing.DIED)
    other.rejoin()
    assert [other.ticket(0, 0) for _ in range(3)] == [1, 2, 3]
    reader._take_back(1, struck)
    assert reader.ticket(0, 0) == 4 and other.batches_in_hand(1)
