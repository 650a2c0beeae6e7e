"""What messages cost."""

from __future__ import annotations

import math

import pytest

from paceline.sim.cluster import Cluster, Link
from paceline.sim.network import Network

MB = 1_000_000


def network(per_node=1):
    return Network(
        Cluster(
            ranks_per_node=per_node,
            network=Link(latency_s=0.001, bytes_per_s=100 * MB),
            inside=Link(latency_s=0.0001, bytes_per_s=1000 * MB),
        )
    )


def test_a_message_takes_latency_and_bandwidth():
    assert network().transfer(5.0, 0, 1, 10 * MB) == pytest.approx(5.0 + 0.001 + 0.1)


def test_messages_queue_at_the_receivers_card():
    net = network()
    ends = [net.transfer(0.0, src, 0, 10 * MB) for src in (1, 2, 3)]
    assert ends == pytest.approx([0.101, 0.201, 0.301])


def test_messages_queue_at_the_senders_card():
    net = network()
    ends = [net.transfer(0.0, 0, dst, 10 * MB) for dst in (1, 2, 3)]
    assert ends == pytest.approx([0.101, 0.201, 0.301])


def test_pairs_that_share_no_card_do_not_wait_for_each_other():
    net = network()
    ends = [net.transfer(0.0, src, src + 1, 10 * MB) for src in (0, 2, 4)]
    assert ends == pytest.approx([0.101] * 3)


def test_ranks_of_a_node_use_its_memory_and_share_its_card():
    net = network(per_node=2)
    assert net.transfer(0.0, 0, 1, 10 * MB) == pytest.approx(0.0101)
    ends = [net.transfer(0.0, 0, 2, 10 * MB), net.transfer(0.0, 1, 3, 10 * MB)]
    assert ends == pytest.approx([0.101, 0.201])


def test_an_all_reduce_is_a_ring_for_large_and_a_tree_for_small_vectors():
    net = network()
    large = net.all_reduce(range(8), 80 * MB)
    assert large.seconds == pytest.approx(14 * (0.001 + 0.1))
    assert large.wire_bytes == pytest.approx(14 / 8 * 80 * MB)
    small = net.all_reduce(range(8), 8)
    assert small.seconds == pytest.approx(2 * 3 * (0.001 + 8 / (100 * MB)))


def test_a_ring_goes_at_the_pace_of_its_slowest_link():
    inside, across = network(per_node=8), network(per_node=4)
    assert inside.all_reduce(range(8), 80 * MB).seconds < 0.2
    assert across.all_reduce(range(8), 80 * MB).seconds == pytest.approx(14 * 0.101)


def test_an_ideal_network_costs_nothing():
    net = Network(Cluster())
    assert net.transfer(1.0, 0, 1, 10**9) == 1.0
    assert net.all_reduce(range(1000), 10**9).seconds == 0.0
    assert math.isfinite(net.wire_bytes)
