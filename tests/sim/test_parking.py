"""Ranks that wait for a joint computation: who goes on, and when."""

from __future__ import annotations

from paceline.sim.parking import NEVER, Parking


class Computed:
    """Lets all parked ranks go on, and counts how often it was asked."""

    def __init__(self):
        self.parked, self.times = [], 0

    def __call__(self):
        self.times += 1
        ready, self.parked = self.parked, []
        return ready


def parking_of(**until):
    computed = Computed()
    parking = Parking(computed)
    for rank, moment in enumerate(until.values()):
        parking.park(rank, moment)
        computed.parked.append(rank)
    return parking, computed


def test_events_before_the_first_promise_happen_first():
    parking, computed = parking_of(a=(2.0, 1), b=(3.0, 2))
    assert parking.next((1.0, 9)) is None
    assert computed.times == 0
    assert parking.next((2.0, 0)) is None, "its place is before that of the parked rank"
    assert [parking.next((2.0, 5)), parking.next((2.0, 5))] == [0, 1]
    assert computed.times == 1
    assert parking.next((2.0, 5)) is None


def test_parked_ranks_go_on_when_there_is_no_event():
    parking, _ = parking_of(a=(2.0, 1))
    assert parking.next(NEVER) == 0


def test_who_lets_others_go_on_is_last():
    parking, _ = parking_of(a=(2.0, 1), b=(2.0, 2))
    assert parking.go_last(7)
    assert [parking.next((0.0, 0)) for _ in range(4)] == [0, 1, 7, None]
    assert not parking.go_last(7), "nobody is parked"


def test_after_a_failure_all_go_on_without_a_result():
    parking, computed = parking_of(a=(2.0, 1), b=(2.0, 2))
    parking.release_all()
    assert [parking.next((0.0, 0)) for _ in range(3)] == [0, 1, None]
    assert computed.times == 0
