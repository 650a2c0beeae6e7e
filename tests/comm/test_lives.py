"""Ranks that are lost and come again, on shared memory, without waiting for real ones to die."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress

import pytest
import torch

from paceline.comm.comm import Comm, Seats
from paceline.comm.limits import Limits
from paceline.comm.ports import Roster
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


# Members that are taken in ------------------------------------------------------------------------


def wait(rank: SharedPorts) -> None:
    """Have the member table say that a rank, which has come again, waits to be taken in."""
    table = rank.shared.table
    assert table.change(rank.rank, table[rank.rank], Standing.WAITING)


def test_all_who_ask_for_a_number_get_the_same_roster(two):
    first, other = two
    members = first.members
    lose(other)
    before = members.roster(3, take_in=True)
    assert before == Roster(((0, 1),)), "one that has not asked is not taken in"
    assert not members.someone_waits()
    wait(other)
    assert members.someone_waits()
    assert members.roster(3, take_in=True) == before
    assert members.roster(4) == before, "the other kind takes nobody in"
    taken = members.roster(5, take_in=True)
    assert taken == Roster(((0, 1), (1, 2)), frozenset({1}))
    assert members.roster(5, take_in=True) == taken and members.alive() == (0, 1)
    assert members.roster(3, take_in=True) is None and members.roster(4) == before


def test_a_collective_misses_a_rank_that_was_not_taken_in(two):
    first, other = two
    comm = Comm(first, elastic=True, seats=Seats([(0, 1), (1, 1)]))
    lose(other)
    assert comm.all_reduce(LIKE.clone()).weight == 1 and tuple(comm.present) == (0,)
    wait(other)
    assert comm.all_reduce(LIKE.clone()).weight == 1 and comm.someone_waits


@pytest.mark.parametrize("stores", range(9))
def test_a_kill_while_one_is_taken_in_leaves_it_out_or_lets_the_next_take_it_in(two, stores):
    first, other = two
    lose(other)
    wait(other)
    with killed_after(first, stores):
        first.members.roster(5, take_in=True)
    taken = first.members.roster(5, take_in=True)
    assert taken == Roster(((0, 1), (1, 2)), frozenset({1}))
    assert other.shared.table[1] == Entry(2, Standing.HERE)
