"""The kernel: order, blocking, killing, freezing, deadlock."""

from __future__ import annotations

import threading

import pytest

from paceline.errors import CommTimeout, Deadlock
from paceline.sim.kernel import Baton, Calendar, Killed


def run(size, body, starts=None, limit_s=600.0):
    calendar = Calendar()
    baton = Baton(calendar, size, limit_s)
    baton.run(lambda rank: body(baton, rank), starts or [0.0] * size)
    return calendar


def test_events_of_one_time_happen_in_the_order_they_were_made():
    calendar, seen = Calendar(), []
    for name in "abc":
        calendar.call(1.0, lambda name=name: seen.append(name))
    calendar.call(0.5, lambda: seen.append("first"))
    while calendar.next_time_s() is not None:
        calendar.pop()[2]()
    assert seen == ["first", "a", "b", "c"]
    assert calendar.now_s == 1.0


def test_exactly_one_rank_runs_at_a_time_in_order_of_time():
    log, running = [], []

    def body(baton, rank):
        for turn in range(3):
            running.append(rank)
            assert running == [rank]
            log.append((baton.calendar.now_s, rank))
            running.pop()
            baton.sleep(rank, 1.0 + rank + turn)

    run(4, body)
    assert [time_s for time_s, _ in log] == sorted(time_s for time_s, _ in log)
    assert len(log) == 12


def test_a_rank_may_start_late():
    log = []
    run(2, lambda baton, rank: log.append((rank, baton.calendar.now_s)), starts=[0.0, 2.5])
    assert log == [(0, 0.0), (1, 2.5)]


def test_a_deadlock_names_every_rank_and_what_it_waits_for():
    def body(baton, rank):
        if rank < 2:
            baton.sleep(rank, 0.25)
            baton.wait(rank, f"recv from rank {1 - rank}", [1 - rank])

    with pytest.raises(Deadlock) as caught:
        run(3, body)
    text = str(caught.value)
    assert "at 0.250000 s of virtual time every rank waits" in text
    assert "rank 0: recv from rank 1, waiting for [1] since 0.250000 s" in text
    assert "rank 1: recv from rank 0, waiting for [0] since 0.250000 s" in text
    assert "rank 2" not in text


def test_an_error_ends_all_ranks_and_no_thread_is_left():
    before, cleaned = threading.active_count(), []

    def body(baton, rank):
        try:
            baton.sleep(rank, 1.0 + rank)
            if rank == 1:
                raise KeyError("broken")
            baton.wait(rank, "nothing", [])
        finally:
            cleaned.append(rank)

    with pytest.raises(KeyError, match="broken"):
        run(3, body)
    assert sorted(cleaned) == [0, 1, 2]
    assert threading.active_count() == before


def test_a_killed_rank_is_killed_again_at_each_call():
    again = []

    def body(baton, rank):
        if rank == 0:
            baton.sleep(0, 1.0)
            baton.interrupt(1, Killed())
            return
        try:
            baton.sleep(1, 5.0)
        except Killed:
            try:
                baton.sleep(1, 5.0)
            except Killed:
                again.append(baton.calendar.now_s)
                raise

    calendar = run(2, body)
    assert again == [1.0]
    assert calendar.now_s == 1.0


def test_a_freeze_stretches_what_is_computed():
    ends = {}

    def body(baton, rank):
        if rank == 0:
            baton.calendar.call(1.0, lambda: baton.freeze(1))
            baton.calendar.call(4.0, lambda: baton.thaw(1))
        baton.sleep(rank, 2.0)
        ends[rank] = baton.calendar.now_s

    run(2, body)
    assert ends == {0: 2.0, 1: 5.0}


def test_a_freeze_holds_back_what_arrives():
    ends = {}

    def body(baton, rank):
        if rank == 0:
            baton.calendar.call(1.0, lambda: baton.freeze(1))
            baton.calendar.call(2.0, lambda: baton.wake(1))
            baton.calendar.call(7.0, lambda: baton.thaw(1))
        else:
            baton.wait(1, "a message", [0])
        ends[rank] = baton.calendar.now_s

    run(2, body)
    assert ends == {0: 0.0, 1: 7.0}


def test_a_wait_ends_at_its_limit_unless_it_is_patient():
    seen = {}

    def body(baton, rank):
        if rank == 0:
            baton.sleep(0, 100.0)
            baton.wake(2)
        elif rank == 1:
            with pytest.raises(CommTimeout) as caught:
                baton.wait(1, "recv", [0])
            seen[1] = (baton.calendar.now_s, caught.value.waited_s, caught.value.rank)
        else:
            baton.wait(2, "recv_any", [0], patient=True)
            seen[2] = baton.calendar.now_s

    run(3, body, limit_s=10.0)
    assert seen == {1: (10.0, 10.0, 0), 2: 100.0}


def test_events_that_are_left_at_the_end_do_not_move_the_clock():
    def body(baton, rank):
        baton.calendar.call(50.0, lambda: None)
        baton.sleep(rank, 1.0)

    assert run(2, body).now_s == 1.0


def test_an_event_in_the_past_is_a_bug():
    calendar = Calendar()
    calendar.call(1.0, lambda: None)
    calendar.pop()
    with pytest.raises(AssertionError, match="in the past"):
        calendar.call(0.5, lambda: None)
