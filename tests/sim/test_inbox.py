"""A mailbox finds what a look at all of its messages would find."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.ranks import Others, Ranks, everyone, ranks
from paceline.sim.inbox import Inbox, Letter

RANKS, TAGS = st.integers(0, 2), st.sampled_from([0, 0, 0, 1])
ASKED = st.sampled_from([(0,), (1,), (0, 1), (1, 2), (0, 1, 2)])
ADD = st.tuples(st.just("add"), RANKS, TAGS, st.booleans(), st.sampled_from([1, 2, 5, 5, math.inf]))
TAKE = st.tuples(st.just("take"), ASKED, TAGS, st.integers(0, 6))
ARRIVES = st.tuples(st.just("arrives"), st.integers(0, 20), st.integers(1, 6))
GO = st.one_of(st.tuples(st.just("withdraw"), RANKS), st.tuples(st.just("clear")))
steps = st.lists(st.one_of(ADD, ADD, ADD, TAKE, TAKE, TAKE, ARRIVES, GO), min_size=15, max_size=60)


def first(messages, sources, tag, now_s):
    """By the words of the contract: in order from each sender, else by time of arrival."""
    heads = {}
    for message in messages:
        if message.tag == tag and message.src in sources:
            heads.setdefault(message.src, message)
    arrived = [message for message in heads.values() if message.arrived_s <= now_s]
    return min(arrived, key=lambda message: message.arrived_s, default=None)


@settings(max_examples=150)
@given(steps)
def test_a_mailbox_finds_the_first_that_arrived(script):
    inbox, plain = Inbox(), []
    for what, *how in script:
        if what == "add":
            src, tag, posted, at_s = how
            plain.append(Letter(src, tag, None, b"", posted, at_s))
            inbox.add(plain[-1])
        elif what == "take":
            found = inbox.find(*how)
            assert found is first(plain, *how)
            if found is not None:
                inbox.remove(found)
                plain.remove(found)
        elif what == "arrives" and how[0] < len(plain) and plain[how[0]].arrived_s == math.inf:
            plain[how[0]].arrived_s = how[1]
            inbox.note_arrival(plain[how[0]])
        elif what == "withdraw":
            inbox.withdraw(how[0])
            plain = [message for message in plain if message.posted or message.src != how[0]]
        elif what == "clear":
            inbox.clear()
            plain = []
        for src in range(4):
            assert inbox.posted_by(src) == sum(m.src == src and m.posted for m in plain)
        for tag in range(2):
            assert set(inbox.senders(tag)) == {m.src for m in plain if m.tag == tag}


@given(
    members=st.lists(st.integers(0, 9), min_size=1, unique=True), gone=st.sets(st.integers(0, 9))
)
def test_ranks_and_others_are_what_a_tuple_says(members, gone):
    own, shared = members[0], ranks(tuple(members))
    assert isinstance(shared, Ranks) and shared == tuple(members)
    assert shared is ranks(tuple(members)) and hash(shared) == hash(tuple(members))
    assert [rank in shared for rank in range(10)] == [rank in members for rank in range(10)]
    gone = gone & set(members) - {own}
    others = [rank for rank in members if rank != own and rank not in gone]
    view = Others(shared, own, gone)
    assert (list(view), len(view)) == (others, len(others))
    assert [rank in view for rank in range(10)] == [rank in others for rank in range(10)]
    assert everyone(4) == (0, 1, 2, 3)


def test_what_one_asked_for_alone_does_not_bring_its_next_one_forward():
    inbox, sent = (
        Inbox(),
        [Letter(src, 0, None, b"", True, s) for src, s in ((0, 1), (1, 2), (1, 5))],
    )
    for message in sent:
        inbox.add(message)
    assert inbox.find((1,), 0, 3) is sent[1]
    inbox.remove(sent[1])
    assert inbox.find((1, 2), 0, 3) is None
    assert inbox.find((1, 2), 0, 5) is sent[2]
