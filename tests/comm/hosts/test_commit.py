"""A contribution counts for everyone or for no one, whoever has got it when its rank is lost."""

from __future__ import annotations

import threading

import pytest
import torch
from support.worlds import on_hosts

from paceline.comm.hosts.collectives import _NAME, _pack_ranks
from paceline.comm.hosts.link import Topic
from paceline.comm.standing import Standing
from paceline.errors import PeerLost

SIZE, LOST = 3, 2
pytestmark = on_hosts


def withhold(rank, heard, topics=(Topic.COLLECT,)):
    """Have ``rank`` not hear the lost rank on some topics; set ``heard`` when it would have."""
    for topic in topics:
        handle = rank.link.handlers[topic]

        def hear(src, *message, handle=handle):
            if src == LOST:
                heard.set()
            else:
                handle(src, *message)

        rank.link.handlers[topic] = hear


def reduce(rank, numel):
    """What a rank gets: the sum of the weights and the sum, or the ranks that it lost."""
    x = torch.full((numel,), rank.rank + 1.0)
    try:
        total = rank.collectives.all_reduce(x, 1, tuple(range(SIZE)), None, 0)
    except PeerLost as lost:
        assert x.unique().tolist() == [rank.rank + 1.0], "the vector of a failed sum has changed"
        return lost.ranks
    return total.weight, x.unique().tolist()


def lose(registrar):
    registrar.strike(LOST, 1, Standing.DIED, "it died")


@pytest.mark.parametrize("numel", [4, 100_000])
def test_who_misses_a_part_takes_the_sum_of_one_that_has_concluded(world, numel):
    registrar, ranks, threads = world
    heard = threading.Event()
    withhold(ranks[1], heard)
    outcomes = [threads.submit(reduce, rank, numel) for rank in ranks]
    if numel == 4:  # every vector goes to everyone: ranks 0 and 2 conclude without rank 1
        assert outcomes[0].result() == (SIZE, [6.0])
        lose(registrar)
        assert outcomes[1].result() == (SIZE, [6.0])
    else:  # rank 1 cannot sum its slice, so nobody concludes
        assert heard.wait(10)
        lose(registrar)
        assert [outcome.result() for outcome in outcomes[:2]] == [(LOST,), (LOST,)]


def test_where_nobody_has_concluded_all_raise_and_can_do_it_again(world):
    registrar, ranks, threads = world
    heard = [threading.Event() for _ in range(2)]
    for rank, event in zip(ranks, heard, strict=False):
        withhold(rank, event)
    outcomes = [threads.submit(reduce, rank, 4) for rank in ranks]
    assert all(event.wait(10) for event in heard)
    lose(registrar)
    assert [outcome.result() for outcome in outcomes[:2]] == [(LOST,), (LOST,)]

    def again(rank):
        x = torch.ones(4)
        return rank.collectives.all_reduce(x, 1, (0, 1), None, 0).weight, x.tolist()

    assert [*threads.map(again, ranks[:2])] == [(2, [2.0] * 4)] * 2


def test_who_has_promised_not_to_conclude_does_not(world):
    """Rank 0 gets the part of rank 2 after rank 1, which misses it, has asked for the sum."""
    registrar, ranks, threads = world
    heard, held = [threading.Event() for _ in range(2)], []
    withhold(ranks[1], heard[1])
    take, ask = (ranks[0].link.handlers[topic] for topic in (Topic.COLLECT, Topic.ASK))

    def hold(src, *message):
        if src == LOST:
            held.append((src, *message))
            heard[0].set()
        else:
            take(src, *message)

    ranks[0].link.handlers[Topic.COLLECT] = hold
    outcomes = [threads.submit(reduce, rank, 4) for rank in ranks]
    assert all(event.wait(10) for event in heard)
    with ranks[0].link.changed:
        (name,) = ranks[0].collectives._operations
        ask(1, 1, _NAME.pack(*name) + _pack_ranks(frozenset({LOST})), torch.empty(0))
        take(*held[0])
    lose(registrar)
    assert [outcome.result() for outcome in outcomes[:2]] == [(LOST,), (LOST,)]


def test_a_copy_of_what_a_server_published_outlives_it(world):
    registrar, ranks, _ = world
    ranks[LOST].mail.publish(torch.arange(3.0), b"shelf", window=2)
    ranks[LOST].link.flush()
    lose(registrar)
    seen = ranks[0].mail.peek(LOST, None, window=2, gone=True)
    assert (seen.x.tolist(), seen.header) == ([0.0, 1.0, 2.0], b"shelf")
    assert ranks[1].mail.peek(LOST, None, window=2, gone=True).version == seen.version
