"""The token of a ring: one is valid at any time, and everyone has its turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.strategies.toolbox.token import NOBODY, Token, next_in

rings = st.sets(st.integers(0, 9), min_size=1).map(sorted)


@given(rings, st.integers(0, 9))
def test_after_a_worker_comes_the_next_higher_one_or_the_lowest(ring, worker):
    after = next_in(ring, worker)
    assert after == min((rank for rank in ring if rank > worker), default=ring[0])


def test_of_an_empty_ring_nobody_is_next():
    assert next_in([], 3) == NOBODY


@given(rings)
def test_everyone_has_its_turn_before_anyone_has_another(ring):
    token = Token(holder=ring[0])
    turns = [token.holder]
    for _ in range(2 * len(ring) - 1):
        turns.append(token.pass_on(token.holder, ring))
    assert turns == ring * 2
    assert token.generation == 0


def test_a_worker_that_leaves_in_its_last_turn_is_followed_by_the_next():
    token = Token(holder=1)
    assert token.pass_on(1, ring=[0, 2]) == 2
    assert (token.holder, token.giver) == (2, 1)


def test_a_token_goes_with_its_holder():
    token = Token(holder=1)
    assert token.leave(1, ring=[0, 2])
    assert token.holder == 2


def test_a_token_may_go_with_who_was_to_pass_it_on():
    token = Token(holder=0)
    token.pass_on(0, ring=[0, 1, 2])
    assert token.leave(0, ring=[1, 2])
    assert token.holder == 1


def test_a_token_stays_where_it_is_when_another_leaves():
    token = Token(holder=0)
    token.pass_on(0, ring=[0, 1, 2])
    assert not token.leave(2, ring=[0, 1])
    assert (token.holder, token.giver, token.generation) == (1, 0, 0)


def test_with_the_last_worker_nobody_has_the_token():
    token = Token(holder=0)
    assert token.leave(0, ring=[])
    assert token.holder == NOBODY


def test_a_new_token_makes_all_older_ones_invalid():
    token = Token(holder=0)
    assert token.is_valid(0)
    token.regenerate()
    assert not token.is_valid(0) and token.is_valid(1)
    assert token.giver == NOBODY  # nobody is to pass it on


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=30))
def test_a_token_is_with_a_member_and_counts_once(events):
    """Members have their turn, or leave: whoever holds a valid token is the holder."""
    ring = list(range(5))
    token, hand = Token(holder=0), {0: 0}
    for leaves, worker in events:
        if worker not in ring:
            continue
        if leaves:
            ring.remove(worker)
            hand.pop(worker, None)
            if token.leave(worker, ring):
                token.regenerate()
                if token.holder != NOBODY:
                    hand[token.holder] = token.generation
        elif token.is_valid(hand.get(worker, -1)):
            generation = hand.pop(worker)
            hand[token.pass_on(worker, ring)] = generation
        valid = [worker for worker, generation in hand.items() if token.is_valid(generation)]
        assert valid == ([token.holder] if ring else [])
