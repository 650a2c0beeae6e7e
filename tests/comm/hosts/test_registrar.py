"""The registrar decides once, whatever is repeated, lost, or silent."""

from __future__ import annotations

import json
import os
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.hosts.journal import Journal
from paceline.comm.hosts.registrar import Registrar
from paceline.comm.standing import Standing

DEAD_S = 1.0


class Client:
    """A process of a rank, as the registrar hears it."""

    names = count()

    def __init__(self, registrar, rank):
        self.registrar, self.rank = registrar, rank
        self.name, self.number, self.incarnation = f"client {next(self.names)}", 0, 0

    def order(self, *order):
        self.number += 1
        return self.repeat(*order)

    def repeat(self, *order):
        reply = self.registrar.handle(
            self.name, self.rank, self.incarnation, self.number, self.number - 1, order
        )
        return reply.get("value", reply)

    def enter(self, pid=100, start=0):
        found = self.order("enter", "host", pid + self.rank, ["control", "data"], start)
        self.incarnation = found["incarnation"]
        return self


def three(late=()):
    registrar = Registrar(3, 3, late, DEAD_S)
    return registrar, [Client(registrar, rank).enter() for rank in range(3)]


def die(client):
    client.registrar.strike(client.rank, client.incarnation, Standing.DIED, "it died")


def test_an_order_that_comes_twice_is_done_once():
    _, (first, second, _) = three()
    assert first.order("draw", 0, 0) == 0
    assert first.repeat("draw", 0, 0) == 0
    assert second.order("draw", 0, 0) == 1
    assert first.order("draw", 0, 0) == 2


def test_an_order_before_which_one_was_lost_waits_for_that_one():
    registrar, (first, *_) = three()
    lost = first.number + 1
    assert registrar.handle(first.name, 0, 1, lost + 1, lost - 1, ["draw", 0, 0]) is None
    assert registrar.handle(first.name, 0, 1, lost, lost - 1, ["draw", 0, 0])["value"] == 0


def test_the_batches_of_a_lost_rank_are_given_out_again():
    _registrar, (first, second, _) = three()
    assert [first.order("draw", 0, 0) for _ in range(3)] == [0, 1, 2]
    first.order("mark_used", 0, 0, 1)
    die(first)
    assert second.order("lost_batches") == 2
    assert [second.order("draw", 0, 0) for _ in range(3)] == [0, 2, 3]


def test_an_incarnation_that_is_over_orders_nothing():
    _, (first, *_) = three()
    die(first)
    assert first.order("draw", 0, 0)["left_behind"]
    assert Client(first.registrar, 0).enter().incarnation == 2


def test_a_rank_whose_process_lives_is_not_given_to_another():
    registrar, _ = three()
    assert "taken" in Client(registrar, 1).order("enter", "host", 7, [])


def test_a_late_joiner_is_here_when_it_is_ready():
    registrar, (_, _, late) = three(late=[2])
    assert registrar.roll[2].standing is Standing.JOINING
    late.order("ready")
    assert registrar.roll[2].standing is Standing.HERE


@pytest.mark.parametrize("order", [["draw"], ["draw", "x", []], ["format_disk"], [7], []])
def test_an_order_that_makes_no_sense_is_refused_and_changes_nothing(order):
    registrar, (first, second, _) = three()
    before = registrar.shared()
    assert "error" in first.order(*order)
    assert registrar.shared() == before
    assert second.order("draw", 0, 0) == 0


# Silence -----------------------------------------------------------------------------------------


def pass_time(registrar, seconds, running):
    for _ in range(round(seconds * 10)):
        for rank in running:
            registrar.hear(rank, registrar.roll[rank].incarnation)
        registrar.pass_time(0.1)


def test_a_silent_rank_is_lost_after_dead_s():
    registrar, _ = three()
    pass_time(registrar, 0.9 * DEAD_S, running=[0, 1])
    assert registrar.lost() == []
    pass_time(registrar, 0.3 * DEAD_S, running=[0, 1])
    assert registrar.lost() == [2]
    assert registrar.roll[2].reason.startswith("nothing was heard of it for")


def test_nobody_is_lost_while_all_are_silent():
    registrar, _ = three()
    pass_time(registrar, 5 * DEAD_S, running=[])
    assert registrar.lost() == []


def test_a_rank_that_is_heard_again_in_time_is_not_lost():
    registrar, _ = three()
    for _ in range(5):
        pass_time(registrar, 0.8 * DEAD_S, running=[0, 1])
        pass_time(registrar, 0.1, running=[0, 1, 2])
    assert registrar.lost() == []


def test_silence_counts_between_two_beats_of_the_only_other_worker():
    registrar, _ = three()
    for tick in range(round(12 * DEAD_S)):
        if tick % 3 == 0:
            registrar.hear(0, 1)
        registrar.pass_time(0.1)
    assert registrar.lost() == [1, 2]


def test_who_wants_to_enter_is_no_sign_of_life_of_the_one_before_it():
    registrar, (_, _, third) = three()
    newcomer = Client(registrar, third.rank)
    for _ in range(round(12 * DEAD_S)):
        registrar.hear(0, 1)
        registrar.hear(1, 1)
        found = newcomer.order("enter", "host", 7, [])
        registrar.pass_time(0.1)
    assert found["incarnation"] == 2


# Rendezvous --------------------------------------------------------------------------------------


def test_a_rendezvous_is_decided_once_all_have_come():
    registrar, clients = three()
    for client in clients:
        assert registrar.shared()["outcomes"] == {}
        client.order("meet", 1, [0, 1, 2], [1, 1, 1])
    assert registrar.shared()["outcomes"] == {"1": True}
    die(clients[0])
    assert registrar.shared()["outcomes"] == {"1": True}


@pytest.mark.parametrize("how", [die, lambda client: client.order("mark_finished")])
def test_a_rendezvous_is_given_up_when_one_will_not_come(how):
    registrar, (first, second, third) = three()
    first.order("meet", 1, [0, 1, 2], [1, 1, 1])
    how(third)
    assert registrar.shared()["outcomes"] == {"1": False}
    second.order("meet", 1, [0, 1, 2], [1, 1, 1])
    assert registrar.shared()["outcomes"] == {"1": False}


def test_of_two_who_call_at_once_one_does():
    registrar, (first, second, _) = three()
    first.order("call_all", 0, 10, False, 0)
    second.order("call_all", 0, 20, True, 0)
    assert registrar.shared()["call"] == [1, 10, False, [1, 1, 1]]


# The journal -------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["draw", "used", "die", "enter", "meet", "finish"]), max_size=30))
def test_a_registrar_that_takes_over_goes_on_as_the_first_would_have(acts):
    registrar, clients = three()
    for number, act in enumerate(acts):
        client = clients[number % 3]
        match act:
            case "draw":
                client.order("draw", number % 2, 0)
            case "used":
                client.order("mark_used", 0, 0, number)
            case "die":
                die(client)
            case "enter":
                die(client)
                clients[number % 3] = Client(registrar, client.rank).enter()
            case "meet":
                client.order("meet", 1, [0, 1, 2], [1, 1, 1])
            case "finish":
                client.order("mark_finished")
    other = Registrar(3, 3, (), DEAD_S)
    other.load_state(json.loads(json.dumps(registrar.state())))
    assert other.state() == registrar.state()
    for client in clients:
        replies = []
        for each in (registrar, other):
            arguments = client.name, client.rank, client.incarnation
            replies.append(each.handle(*arguments, client.number, 0, ["draw", 0, 0]))
            replies.append(each.handle(*arguments, client.number + 1, 0, ["draw", 0, 0]))
        assert replies[:2] == replies[2:]


def test_a_journal_that_was_cut_off_has_the_state_before():
    fd = Journal.create()
    Journal(fd).write({"state": 1})
    journal = Journal(fd)
    assert journal.read() == {"state": 1}
    journal.write({"state": 2})
    assert Journal(fd).read() == {"state": 2}
    os.pwrite(fd, b"\xff", 30)  # the second state was written to the first slot
    assert Journal(fd).read() == {"state": 1}
    os.close(fd)


def test_a_rank_of_which_nothing_is_heard_counts_as_stopped_before_it_is_lost():
    registrar = Registrar(3, 3, (), dead_s=5.0)
    for rank in range(3):
        Client(registrar, rank).enter()
    for _ in range(12):  # the first pass counts what was heard at the entry
        for rank in (0, 1):
            registrar.hear(rank, 1)
        registrar.pass_time(0.1)
    assert registrar.shared()["stopped"] == [2]
    assert registrar.lost() == []
    version = registrar.version
    registrar.hear(2, 1)
    assert registrar.shared()["stopped"] == []
    assert registrar.version > version


def test_a_process_that_was_started_later_takes_the_place_of_an_earlier_one():
    registrar, clients = three()
    other = Client(registrar, 1)
    assert other.order("enter", "host", 999, [], 0)["by_later"] is False
    assert other.enter(pid=999, start=1).incarnation == 2
    assert clients[1].order("enter", "host", 101, [], 0)["by_later"] is True
    assert clients[1].order("mark_finished") == {"number": 3, "left_behind": True}
