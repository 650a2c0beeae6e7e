"""Ranks that are lost and come again, on shared memory, without waiting for real ones to die."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress

import pytest
import torch

from paceline.comm.comm import Comm
from paceline.comm.limits import Limits
from paceline.comm.shared.members import Entry
from paceline.comm.shared.memory import Arena
from paceline.comm.shared.world import SharedPorts
from paceline.comm.standing import Standing

LIKE = torch.zeros(1)


@pytest.fixture
def two():
    """Two ranks of a run, both in this process."""
    fd = Arena.create(2)
    yield [SharedPorts(fd, rank, 2, Limits()) for rank in range(2)]
    os.close(fd)


def strike(rank: SharedPorts) -> Entry | None:
    """Have the member table say that a rank has died."""
    table = rank.shared.table
    return table.change(rank.rank, table[rank.rank], Standing.DIED)


def lose(rank: SharedPorts) -> None:
    """Have a rank die, and come again."""
    assert strike(rank)
    rank.members.rejoin()


def test_a_loss_is_heard_before_what_the_next_life_says(two, monkeypatch):
    """Also when both come about while the one who is to hear of them waits already."""
    reader, other = two
    comm, take = Comm(reader), reader.mail.receive

    def take_meanwhile(*args, **how):
        monkeypatch.setattr(reader.mail, "receive", take)
        lose(other)
        assert other.mail.post(LIKE + 7, 0, 0, b"")
        return take(*args, **how)

    monkeypatch.setattr(reader.mail, "receive", take_meanwhile)
    assert comm.receive_any(LIKE).ranks == (1,)
    assert comm.receive_any(LIKE) == (1, torch.tensor([7.0]), b"")


def test_what_a_life_said_that_is_over_is_not_heard(two, monkeypatch):
    reader, other = two
    comm, take = Comm(reader), reader.mail.receive
    said = iter([1.0, 2.0])

    def take_meanwhile(*args, **how):
        lose(other)
        assert other.mail.post(LIKE + next(said), 0, 0, b"")
        return take(*args, **how)

    monkeypatch.setattr(reader.mail, "receive", take_meanwhile)
    assert comm.receive_any(LIKE).ranks == (1,)
    lose(other)
    assert comm.receive_any(LIKE).ranks == (1,)
    assert comm.receive_any(LIKE).ranks == (1,)
    assert comm.receive_any(LIKE) == (1, torch.tensor([2.0]), b"")


def test_what_is_said_to_a_new_life_at_once_is_heard(two, monkeypatch):
    writer, other = two
    enter = other.shared.table.enter

    def enter_and_be_written_to(rank, late):
        entry = enter(rank, late)
        assert writer.mail.post(LIKE + 7, 1, 0, b"")
        return entry

    monkeypatch.setattr(other.shared.table, "enter", enter_and_be_written_to)
    lose(other)
    assert Comm(other).board.poll(LIKE) == [(0, torch.tensor([7.0]), b"")]


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
    words = rank.shared.words
    rank.shared.words = Fragile(words, stores)
    with suppress(Killed):
        yield
    rank.shared.words = words


def hold_three(rank):
    """Take three batches, and make use of the first."""
    for _ in range(3):
        rank.queue.draw(0, 0)
    rank.queue.mark_used(0, 0, 0)


@pytest.mark.parametrize("stores", range(4))
@pytest.mark.parametrize(("comes_again", "epoch"), [(False, 0), (True, 0), (False, 1)])
def test_a_kill_while_a_batch_is_drawn_loses_none_and_doubles_none(two, stores, comes_again, epoch):
    reader, other = two
    hold_three(other)
    if comes_again:
        lose(other)  # so that there are batches to be given out again
    with killed_after(other, stores):
        other.queue.draw(0, epoch)
    assert strike(other)
    first = 0 if epoch else 1
    assert sorted(reader.queue.draw(0, epoch) for _ in range(9)) == list(range(first, first + 9))


@pytest.mark.parametrize("stores", range(5))
def test_a_kill_while_batches_are_taken_back_loses_none_and_doubles_none(two, stores):
    reader, other = two
    hold_three(other)
    struck = strike(other)
    with killed_after(reader, stores):
        reader.batches.take_back(1, struck)
    assert sorted(reader.queue.draw(0, 0) for _ in range(9)) == list(range(1, 10))


def test_batches_are_not_taken_from_who_has_come_again_meanwhile(two):
    reader, other = two
    hold_three(other)
    struck = strike(other)
    other.members.rejoin()
    assert [other.queue.draw(0, 0) for _ in range(3)] == [1, 2, 3]
    reader.batches.take_back(1, struck)
    assert reader.queue.draw(0, 0) == 4 and other.batches.in_hand(1)
