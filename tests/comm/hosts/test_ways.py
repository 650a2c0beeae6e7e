"""Sums between hosts: the same bits as one after the other, and a commit point, in all ways."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from support.worlds import on_hosts

from paceline.comm.hosts import ways
from paceline.comm.hosts.collectives import WHOLE_BYTES
from paceline.comm.hosts.journal import Journal
from paceline.comm.hosts.link import Topic
from paceline.comm.hosts.registrar import Registrar
from paceline.comm.hosts.registrar_process import at_descriptor
from paceline.comm.hosts.secret import Secret, new_token
from paceline.comm.hosts.world import HostsPorts
from paceline.comm.hosts.zeromq import ZmqWire
from paceline.comm.limits import Limits
from paceline.comm.standing import Standing
from paceline.errors import MessageMismatch, PeerLost

pytestmark = on_hosts
LARGE = WHOLE_BYTES + 1000


@contextmanager
def ranks_on(hosts):
    """A registrar and a rank on each of these hosts, all in this process."""
    limits, secret = Limits(progress_limit_s=30.0), Secret(new_token(), encrypted=False)
    size = len(hosts)
    registrar, journal = Registrar(size, size, (), limits.dead_s), Journal.create()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(size) as threads:
        process = at_descriptor(registrar, os.dup(listener.fileno()), journal, secret, limits)
        threading.Thread(target=process.run, daemon=True).start()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        ranks = []
        for rank, host in enumerate(hosts):
            wire = ZmqWire(secret, limits.dead_s)
            wire.place = host, os.getpid()
            ranks.append(HostsPorts(address, "127.0.0.1", wire, rank, size, limits))
        try:
            yield registrar, ranks, threads
        finally:
            for rank in ranks:
                rank.link.close()


@pytest.fixture
def taken(monkeypatch):
    """Which way was taken, by every rank."""
    found = []
    for name in ("sum_whole", "sum_slices", "sum_along"):
        way = getattr(ways, name)

        def note(part, x, name=name, way=way):
            found.append(name)
            return way(part, x)

        monkeypatch.setattr(f"paceline.comm.hosts.collectives.{name}", note)
    return found


def sum_all(world_, vectors, weights, factor=None):
    """What every rank gets of an all-reduce, and the sum of the weights."""
    _, ranks, threads = world_
    members = tuple(range(len(ranks)))

    def reduce(rank):
        x = vectors[rank.rank].clone()
        total = rank.collectives.all_reduce(x, weights[rank.rank], members, factor, 1 << rank.rank)
        return x, total

    return [*threads.map(reduce, ranks)]


def in_order(vectors, weights, factor):
    parts = [x for x, weight in zip(vectors, weights, strict=True) if weight]
    if not parts:
        return None
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total if factor is None else total * factor(sum(weights))


CHAIN, SLICES, WHOLE = "sum_along", "sum_slices", "sum_whole"


@pytest.mark.parametrize(
    ("hosts", "way"),
    [
        ("aabb", CHAIN),
        ("aab", CHAIN),
        ("abbcc", CHAIN),
        ("abcd", SLICES),
        ("abab", SLICES),
        ("aaa", SLICES),
        ("ab", WHOLE),
    ],
)
def test_sums_have_the_bits_of_a_sum_in_rank_order(hosts, way, taken, monkeypatch):
    monkeypatch.setattr(ways, "CHUNK_BYTES", 1 << 12)  # many chunks
    size, generator = len(hosts), torch.Generator().manual_seed(1)
    weightings = [[1] * size, [0, *[2] * (size - 1)], [*[3] * (size - 1), 0], [0] * size]
    weightings += [[int(r == own) for r in range(size)] for own in range(size)]
    with ranks_on(hosts) as world_:
        for weights in weightings:
            for factor in (None, lambda total: 1 / (3 * total)):
                vectors = [torch.randn(LARGE, generator=generator) * 10**r for r in range(size)]
                expected = in_order(vectors, weights, factor)
                for x, (got, total) in zip(
                    vectors, sum_all(world_, vectors, weights, factor), strict=True
                ):
                    assert total == (sum(weights), (1 << size) - 1)
                    assert torch.equal(got, x if expected is None else expected)
    assert set(taken) == {way}


def test_a_small_vector_goes_whole_to_everyone(taken):
    with ranks_on("aabb") as world_:
        results = sum_all(world_, [torch.ones(4) for _ in range(4)], [1] * 4)
    assert [x.tolist() for x, _ in results] == [[4.0] * 4] * 4
    assert set(taken) == {WHOLE}


@pytest.mark.parametrize("hosts", ["aabb", "abcd"])
def test_members_that_call_something_else_are_refused(hosts):
    with ranks_on(hosts) as (_, ranks, threads):

        def reduce(rank):
            x = torch.ones(LARGE if rank.rank else 4)
            with pytest.raises(MessageMismatch, match=f"calls all_reduce of {LARGE} x"):
                rank.collectives.all_reduce(x, 1, (0, 1, 2, 3), None, 0)
            return True

        assert [*threads.map(reduce, ranks)] == [True] * 4


# Losses in a chain -------------------------------------------------------------------------------


def lose_in_chain(world_, lost, deaf, summed):
    """Let no sum, or no part of the sum, of ``lost`` come to ``deaf``; then lose it."""
    registrar, ranks, threads = world_
    heard, take = threading.Event(), ranks[deaf].link.handlers[Topic.COLLECT]

    def hear(src, incarnation, meta, body):
        is_sum = meta[16] == 1
        if src == lost and len(body) and is_sum is summed:
            heard.set()
        else:
            take(src, incarnation, meta, body)

    ranks[deaf].link.handlers[Topic.COLLECT] = hear

    def reduce(rank):
        x = torch.full((LARGE,), rank.rank + 1.0)
        try:
            total = rank.collectives.all_reduce(x, 1, (0, 1, 2, 3), None, 0)
        except PeerLost as error:
            assert x.unique().tolist() == [rank.rank + 1.0], "the vector of a failed sum changed"
            return error.ranks
        return total.weight, x.unique().tolist()

    outcomes = [threads.submit(reduce, rank) for rank in ranks]
    assert heard.wait(20)
    registrar.strike(lost, 1, Standing.DIED, "it died")
    return [outcomes[rank].result() for rank in range(4) if rank != lost]


@pytest.mark.parametrize(("lost", "deaf"), [(0, 1), (1, 2), (2, 3)])
def test_a_loss_before_the_whole_sum_is_made_counts_for_no_one(lost, deaf):
    with ranks_on("aabb") as world_:
        assert lose_in_chain(world_, lost, deaf, summed=False) == [(lost,)] * 3

        def again(rank):
            x = torch.ones(LARGE)
            members = tuple(r for r in range(4) if r != lost)
            return rank.collectives.all_reduce(x, 1, members, None, 0).weight, x[-1].item()

        _, ranks, threads = world_
        survivors = [rank for rank in ranks if rank.rank != lost]
        assert [*threads.map(again, survivors)] == [(3, 3.0)] * 3


@pytest.mark.parametrize(("lost", "deaf"), [(1, 0), (2, 1)])
def test_a_loss_after_one_has_concluded_costs_no_one_the_sum(lost, deaf):
    with ranks_on("aabb") as world_:
        assert lose_in_chain(world_, lost, deaf, summed=True) == [(4, [10.0])] * 3


def test_the_loss_of_the_only_one_that_has_concluded_counts_for_no_one():
    """Rank 3 alone has the whole sum; it dies with it."""
    with ranks_on("aabb") as world_:
        assert lose_in_chain(world_, lost=3, deaf=2, summed=True) == [(3,)] * 3
