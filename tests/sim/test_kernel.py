"""The kernel: order, blocking, killing, freezing, deadlock."""

from __future__ import annotations

import threading
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_a_rank_that_is_added_runs_from_then_on_until_it_ends():
    log = []

    def late(baton, rank):
        log.append((rank, baton.calendar.now_s))
        baton.sleep(rank, 3.0)
        log.append((rank, baton.calendar.now_s))

    def body(baton, rank):
        baton.sleep(rank, 1.0)
        log.append(baton.spawn(lambda rank: late(baton, rank)))
        baton.sleep(rank, 1.0)

    assert run(1, body).now_s == 4.0
    assert log == [1, (1, 1.0), (1, 4.0)]


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
            baton.wait(2, "receive_any", [0], patient=True)
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


def ends_on(cores, *starts_and_work):
    """When ranks end that begin at given times and have so much to compute, on one node."""
    calendar, ends = Calendar(), {}
    baton = Baton(calendar, len(starts_and_work), 600.0)
    baton.share_cores([0] * len(starts_and_work), cores)

    def body(rank):
        baton.sleep(rank, starts_and_work[rank][1])
        ends[rank] = calendar.now_s

    baton.run(body, [start_s for start_s, _ in starts_and_work])
    return [ends[rank] for rank in range(len(starts_and_work))]


def test_ranks_on_enough_cores_do_not_slow_each_other():
    assert ends_on(2, (0.0, 1.0), (0.5, 1.0)) == [1.0, 1.5]


def test_ranks_share_the_cores_from_when_they_begin_until_they_end():
    # alone to 1, by halves to 3 (one second each), and the other goes on alone
    assert ends_on(1, (0.0, 2.0), (1.0, 4.0)) == [3.0, 6.0]
    assert ends_on(2, (0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)) == [2.0] * 4


@given(
    cores=st.integers(1, 4),
    ranks=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=6),
)
def test_shared_cores_are_never_idle_and_never_more_than_there_are(cores, ranks):
    """Against a plain integration in small exact steps of time."""
    ends = ends_on(cores, *[(float(start), float(work)) for start, work in ranks])
    left, time, expected = [Fraction(work) for _, work in ranks], Fraction(0), {}
    while len(expected) < len(ranks):
        busy = [r for r, (start, _) in enumerate(ranks) if start <= time and r not in expected]
        later = [start - time for start, _ in ranks if start > time]
        stepper = min(Fraction(1), Fraction(cores, len(busy) or 1))
        span = min([left[r] / stepper for r in busy] + later)
        time += span
        for r in busy:
            left[r] -= span * stepper
            if left[r] == 0:
                expected[r] = float(time)
    assert ends == pytest.approx([expected[r] for r in range(len(ranks))])


def test_a_frozen_or_killed_rank_leaves_its_core_to_the_others():
    ends, calendar = {}, Calendar()
    baton = Baton(calendar, 3, 600.0)
    baton.share_cores([0, 0, 0], 1)

    def body(rank):
        baton.sleep(rank, 3.0)
        ends[rank] = calendar.now_s

    calendar.call(3.0, lambda: baton.freeze(0))  # each has 2 left
    calendar.call(3.0, lambda: baton.interrupt(1, Killed()))
    calendar.call(4.0, lambda: baton.thaw(0))  # rank 2 has 1 left
    baton.run(body, [0.0] * 3)
    assert ends == {2: 6.0, 0: 7.0}


def test_who_is_frozen_when_it_has_just_ended_goes_on_at_the_thaw():
    ends, calendar = {}, Calendar()
    baton = Baton(calendar, 1, 600.0)
    baton.share_cores([0], 1)
    calendar.call(0.5, lambda: calendar.call(1.0, lambda: baton.freeze(0)))
    calendar.call(4.0, lambda: baton.thaw(0))
    baton.run(lambda rank: (baton.sleep(rank, 1.0), ends.update({rank: calendar.now_s})), [0.0])
    assert ends == {0: 4.0}
