"""One contract over every transport; those that are real run in real processes."""

from __future__ import annotations

import pytest
from support import programs, worlds
from support.worlds import on_hosts, on_shared_memory, run_program

from paceline.comm.limits import Limits
from paceline.comm.membership import MembershipPolicy
from paceline.errors import PeerLost

SIZE = 4
WORLDS = worlds.WORLDS


def test_everyone_is_here(transport):
    outcome = run_program(transport, programs.who_is_here, SIZE)
    assert outcome.values == [[rank, SIZE, [0, 1, 2, 3]] for rank in range(SIZE)]


def test_messages_arrive_whole_in_every_dtype(transport):
    outcome = run_program(transport, programs.send_and_receive, 2)
    assert outcome.values[1] == [True] * 5


def test_messages_keep_their_order_within_a_tag(transport):
    outcome = run_program(transport, programs.order_and_tags, 2)
    assert outcome.values[1] == [3.0, 1.0, 2.0]


def test_a_send_is_done_when_it_was_taken(transport):
    returned_s, taken_s = run_program(transport, programs.send_waits, 2).values
    assert returned_s >= taken_s


def test_a_header_travels_beside_its_vector(transport):
    texts = ["posted!", "no vector", "sent", "window"]
    vectors = [[1.0, 2.0, 3.0], [], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    outcome = run_program(transport, programs.headers, 2)
    assert outcome.values[1] == [list(pair) for pair in zip(texts, vectors, strict=True)]


def test_receive_any_takes_from_all_in_each_senders_order(transport):
    outcome = run_program(transport, programs.receive_from_all, SIZE)
    for sender in range(1, SIZE):
        from_sender = [x for src, x in outcome.values[0] if src == sender]
        assert from_sender == [[sender, number] for number in range(3)]


def test_a_ring_of_exchanges_does_not_deadlock(transport):
    outcome = run_program(transport, programs.ring, SIZE)
    assert outcome.values == [1.0, 2.0, 3.0, 0.0]


def test_post_copies_until_the_mailbox_is_full(transport):
    outcome = run_program(transport, programs.post_and_poll, 2)
    assert outcome.values[0] == [True, True, False, False, True]
    empty, taken, last = outcome.values[1]
    assert (empty, last) == ([], 7.0)
    assert taken == [[0, 0.0], [0, 1.0]]


@pytest.mark.parametrize("numel", [1, 300_000])
def test_a_peek_is_never_torn_and_never_goes_back(transport, numel):
    outcome = run_program(transport, programs.publish_and_peek, 3, numel=numel, count=60)
    assert outcome.values[0] is True
    for unpublished, torn, wrong, backwards, read in outcome.values[1:]:
        assert (unpublished, torn, wrong, backwards, read) == (None, 0, 0, 0, True)


def test_what_is_shelved_is_seen_by_all_beside_what_is_published(transport):
    outcome = run_program(transport, programs.shelve_and_look, 3)
    for rank in range(3):
        others = [peer for peer in range(3) if peer != rank]
        seen = [[[10.0 * peer + 1], [peer] * 3] for peer in others]
        assert outcome.values[rank] == [[None, None], seen]


@pytest.mark.parametrize("numel", [0, 1, 5, 100_003])
def test_all_reduce_sums_and_counts(transport, numel):
    outcome = run_program(transport, programs.reduce_all, SIZE, numel=numel)
    assert outcome.values == [[4, 10.0 if numel else None, True]] * SIZE


def test_a_rank_of_weight_0_hands_in_nothing(transport):
    outcome = run_program(transport, programs.reduce_weighted, SIZE)
    assert outcome.values == [[12, [6.0, 3.0], 0, rank] for rank in range(SIZE)]


@pytest.mark.parametrize("name", ["simulated", "shared_memory", "hosts"])
def test_sums_are_in_rank_order(name):
    outcome = run_program(name, programs.reduce_in_rank_order, SIZE, numel=70_001)
    assert outcome.values == [True] * SIZE


def test_flags_of_all_ranks_are_or_ed(transport):
    outcome = run_program(transport, programs.reduce_flags, SIZE)
    assert outcome.values == [[[6, 0b1111], [4, 0]]] * SIZE


def test_broadcast_from_every_rank(transport):
    outcome = run_program(transport, programs.broadcast_all, SIZE)
    assert outcome.values == [[True] * SIZE] * SIZE


def test_groups_talk_apart_and_together(transport):
    outcome = run_program(transport, programs.groups, SIZE)
    assert outcome.values == [
        [0, 2, [0, 1], 2, 2.0, 2.0, 4.0],
        [0, 2, [0, 1], 2, 4.0, 3.0, 4.0],
        [1, 2, [0, 1], 2, 2.0, 0.0, 4.0],
        [1, 2, [0, 1], 2, 4.0, 1.0, 4.0],
    ]


def test_a_message_that_does_not_fit_is_refused(transport):
    outcome = run_program(transport, programs.mismatched_messages, 2)
    size, dtype = outcome.values[1]
    assert "holds 3 x torch.float32, expected 2 x torch.float32" in size
    assert "holds 2 x torch.float64, expected 2 x torch.float32" in dtype


def test_a_collective_that_does_not_fit_is_refused(transport):
    outcome = run_program(transport, programs.mismatched_collective, 2)
    assert "MessageMismatch" in repr(outcome.error)
    assert [message["kind"] for _, message in outcome.messages].count("refused") >= 1


def test_who_has_come_to_the_end_of_its_data_is_seen_by_all(transport):
    outcome = run_program(transport, programs.retire_one_by_one, SIZE)
    assert outcome.values == [[[], [1], list(range(SIZE))]] * SIZE


def test_every_ticket_is_drawn_once(transport):
    outcome = run_program(transport, programs.tickets, SIZE)
    drawn = sorted(ticket for value in outcome.values for ticket in value[0])
    assert drawn == list(range(20 * SIZE))
    assert sorted(value[1] for value in outcome.values) == list(range(SIZE))
    assert sorted(value[2] for value in outcome.values) == list(range(SIZE))


def test_a_server_ends_when_all_have_left(transport):
    outcome = run_program(transport, programs.server_and_leavers, SIZE)
    got, silent, unseen, alive, lost, reason = outcome.values[0]
    assert got == [1.0, 2.0, 3.0]
    assert (silent, unseen, alive) == (False, None, [0])
    assert (lost, reason) == ([1], "it has finished")


def test_a_loss_is_heard_once_and_after_the_last_message(transport):
    heard = run_program(transport, programs.messages_and_losses, SIZE, how=None).values[0]
    assert sorted(heard, key=str) == sorted([[r, v] for r in (1, 2, 3) for v in (None, r)], key=str)
    assert all(heard.index([rank, rank]) < heard.index([rank, None]) for rank in (1, 2, 3))
    assert heard.index([3, 3]) > max(heard.index([1, None]), heard.index([2, None]))


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize(
    "world",
    [
        "simulated",
        pytest.param("shared_memory", marks=on_shared_memory),
        pytest.param("hosts", marks=on_hosts),
    ],
)
def test_a_lost_sender_is_heard_of_while_others_are_silent(world, how):
    limits, policy = Limits(dead_s=0.5), MembershipPolicy(True, SIZE, "continue", 0)
    outcome = run_program(
        world, programs.messages_and_losses, SIZE, how=how, limits=limits, policy=policy
    )
    heard, *_ = [message["heard"] for _, message in outcome.messages if "heard" in message]
    assert heard.count([2, None]) == 1
    assert heard.index([2, 2]) < heard.index([2, None])


def test_compute_is_charged_on_a_virtual_clock_alone(transport):
    passed = run_program(transport, programs.time_passes, 1 if transport == "simulated" else 2)
    if transport == "simulated":
        assert passed.values == [60.0]
    else:
        assert all(0 <= seconds < 60 for seconds in passed.values)


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("op", ["all_reduce", "receive", "send", "broadcast"])
def test_a_lost_peer_is_named_with_the_operation(transport, op, how):
    limits = Limits(dead_s=0.5)
    outcome = run_program(transport, programs.lose_one, SIZE, op=op, how=how, limits=limits)
    assert isinstance(outcome.error, PeerLost) and outcome.error.rank == 2
    assert op in outcome.error.op
    messages = [message for _, message in outcome.messages]
    assert messages, "no survivor told what it saw"
    if how == "freeze":  # survivors that are late see how the launcher ended the stopped rank
        reasons = [outcome.error.reason, *(message["reason"] for message in messages)]
        assert any(reason.startswith("it has been stopped") for reason in reasons)
    for message in messages:
        assert message["ranks"] == [2] and op in message["op"]
        assert message["reason"].startswith("it died") or how == "freeze"
        assert 2 not in message["alive"]


def test_a_rank_that_dies_in_a_collective_counts_for_no_one(transport):
    outcome = run_program(transport, programs.arrive_then_die, SIZE)
    assert isinstance(outcome.error, PeerLost) and outcome.error.rank == 2
    seen = [(message["ranks"], message["x"]) for _, message in outcome.messages]
    assert seen and set(map(str, seen)) <= {str(([2], rank + 1.0)) for rank in (0, 1, 3)}


def test_a_wait_for_a_busy_peer_has_a_limit(transport):
    limits = Limits(progress_limit_s=0.6)
    outcome = run_program(transport, programs.wait_too_long, 2, limits=limits)
    ranks, op, waited_s = outcome.values[0]
    assert (ranks, op) == ([1], "receive from rank 1")
    assert waited_s >= 0.6


def test_a_busy_rank_is_not_lost(transport):
    limits = Limits(dead_s=0.4)
    outcome = run_program(transport, programs.be_busy, 2, limits=limits, seconds=1.2)
    assert outcome.error is None
    assert outcome.values == [[2, 2.0]] * 2
