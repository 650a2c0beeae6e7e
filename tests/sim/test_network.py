"""What messages cost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.common.faults import cut, degrade
from paceline.sim.cluster import Cluster, CollectiveCosts, Link, Serving
from paceline.sim.network import Network

MB = 1_000_000


def network(per_node=1, *faults, **collectives):
    return Network(
        Cluster(
            ranks_per_node=per_node,
            network=Link(latency_s=0.001, bytes_per_s=100 * MB),
            inside=Link(latency_s=0.0001, bytes_per_s=1000 * MB),
            collectives=CollectiveCosts(**collectives),
        ),
        faults,
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


def test_a_request_waits_behind_messages_and_keeps_no_card_busy():
    net = network()
    assert net.request(2.0, 0, 1) == pytest.approx(2.001)
    net.transfer(5.0, 0, 1, 10 * MB)  # on the cards until 5.1, and 5.101
    assert net.request(5.0, 2, 1) == pytest.approx(5.101)
    assert net.request(5.0, 0, 3) == pytest.approx(5.101)
    assert net.request(5.0, 1, 0) == pytest.approx(5.001), "the other way is free"
    assert net.transfer(5.0, 2, 3, 10 * MB) == pytest.approx(5.101)


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
    assert net.all_reduce(range(8), 80 * MB) == pytest.approx(14 * (0.001 + 0.1))
    assert net.wire_bytes == pytest.approx(14 * 80 * MB)
    assert net.all_reduce(range(8), 8) == pytest.approx(2 * 3 * (0.001 + 8 / (100 * MB)))


def test_a_ring_goes_at_the_pace_of_its_slowest_link():
    inside, across = network(per_node=8), network(per_node=4, algorithm="ring")
    assert inside.all_reduce(range(8), 80 * MB) < 0.2
    assert across.all_reduce(range(8), 80 * MB) == pytest.approx(14 * 0.101)


def test_an_ideal_network_costs_nothing():
    net = Network(Cluster())
    assert net.transfer(1.0, 0, 1, 10**9) == 1.0
    assert net.all_reduce(range(1000), 10**9) == 0.0
    assert math.isfinite(net.wire_bytes)


# The closed forms of docs/simulator.md ----------------------------------------------------------

links = st.builds(
    Link,
    latency_s=st.sampled_from([0.0, 1e-6, 1e-4, 0.05]),
    bytes_per_s=st.sampled_from([1e6, 125e6, 1e10, math.inf]),
)


def ring(n, nbytes, link):
    return 2 * (n - 1) * (link.latency_s + nbytes / n / link.bytes_per_s)


def tree(n, nbytes, link):
    return 2 * math.ceil(math.log2(n)) * (link.latency_s + nbytes / link.bytes_per_s)


@given(
    between=links,
    inside=links,
    per_node=st.integers(1, 5),
    size=st.integers(1, 40),
    nbytes=st.sampled_from([0, 8, 10**5, 10**8]),
    calls=st.integers(1, 7),
)
def test_collectives_take_what_their_closed_forms_say(
    between, inside, per_node, size, nbytes, calls
):
    nodes, most = math.ceil(size / per_node), min(size, per_node)
    part, wide = nbytes / calls, between if nodes > 1 else inside
    slowest = max(
        [inside] * (most > 1) + [between] * (nodes > 1),
        key=lambda link: link.seconds(part / size),
        default=inside,
    )
    both_ways = {
        "ring": ring(size, part, slowest),
        "tree": tree(size, part, wide),
        "two-level": tree(most, part, inside)
        + min(ring(nodes, part, between), tree(nodes, part, between)),
    }
    one_way = {
        "ring": tree(size, part, wide) / 2,
        "tree": tree(size, part, wide) / 2,
        "two-level": (tree(most, part, inside) + tree(nodes, part, between)) / 2,
    }
    for table in (both_ways, one_way):
        table["auto"] = min(table.values())
    for algorithm, seconds in both_ways.items():
        net = Network(
            Cluster(
                ranks_per_node=per_node,
                network=between,
                inside=inside,
                collectives=CollectiveCosts(algorithm=algorithm, calls=calls),
            )
        )
        assert net.all_reduce(range(size), nbytes) == pytest.approx(calls * seconds)
        assert net.wire_bytes == pytest.approx(2 * nbytes * (size - 1))
        assert net.broadcast(range(size), nbytes) == pytest.approx(calls * one_way[algorithm])
        assert net.wire_bytes == pytest.approx(3 * nbytes * (size - 1))


def test_two_levels_pay_where_the_network_is_slow():
    ring, two = (network(8, algorithm=a) for a in ("ring", "two-level"))
    assert two.all_reduce(range(64), 8 * MB) < ring.all_reduce(range(64), 8 * MB)
    assert two.wire_bytes == ring.wire_bytes


def test_every_call_pays_its_latency():
    fused, cut = network(algorithm="ring"), network(algorithm="ring", calls=50)
    extra = cut.all_reduce(range(4), 8 * MB) - fused.all_reduce(range(4), 8 * MB)
    assert extra == pytest.approx(49 * 6 * 0.001)


def test_a_part_of_the_model_is_cut_into_its_share_of_the_calls():
    net = network(algorithm="ring", calls=0)
    net.set_model_size(8 * MB, tensors=50)
    whole, half, number = (net.all_reduce(range(2), n) for n in (8 * MB, 4 * MB, 8))
    assert whole == pytest.approx(50 * 2 * 0.001 + 0.08)
    assert half == pytest.approx(25 * 2 * 0.001 + 0.04)
    assert number == pytest.approx(2 * 0.001, abs=1e-6)


def test_an_update_takes_a_server_its_bytes():
    assert Network(Cluster(serving=Serving(bytes_per_s=1e6))).update_s(500_000) == 0.5
    assert Network(Cluster()).update_s(500_000) == 0.0


# Links that are cut or degraded -----------------------------------------------------------------


def test_a_degraded_link_moves_its_share():
    net = network(1, degrade(rank=1, factor=0.25).at(seconds=2))
    assert net.transfer(0.0, 0, 1, 10 * MB) == pytest.approx(0.101)
    assert net.transfer(2.0, 0, 1, 10 * MB) == pytest.approx(2.401)
    assert net.transfer(2.0, 2, 3, 10 * MB) == pytest.approx(2.101)


def test_what_is_on_the_way_stops_at_a_cut_and_goes_on_after_it():
    net = network(1, cut(rank=0, peer=1, for_s=5).at(seconds=0.051))
    assert net.transfer(0.0, 0, 1, 10 * MB) == pytest.approx(0.101 + 5)
    assert net.transfer(0.0, 0, 2, 10 * MB) == pytest.approx(0.201), "the card is not held up"
    assert net.outages.uncut_s(0.0, (0, 1)) == 0.0
    assert net.outages.uncut_s(1.0, (1, 0)) == 5.051
    assert net.outages.uncut_s(1.0, (0, 2)) == 1.0


def test_a_cut_for_good_lets_nothing_through():
    net = network(1, cut(rank=0))
    assert net.outages.uncut_s(0.0, (0, 1)) == math.inf
    assert net.transfer(0.0, 0, 1, 10 * MB) == math.inf
    assert net.outages.uncut_s(0.0, (2, 1)) == 0.0


def test_a_node_that_is_cut_off_still_talks_inside():
    outages = network(2, cut(node=0, for_s=1)).outages
    pairs = ((0, 1), (0, 2), (2, 3), (3, 1))
    assert [outages.uncut_s(0.0, pair) for pair in pairs] == [0, 1, 0, 1]
    assert outages.passage(0.0, 0.5, (0, 1))[0] == 0.5
    assert outages.passage(0.0, 0.5, range(4))[0] == 1.5
    assert outages.affected(0.0, range(4)) == [0, 1]


outages = st.builds(
    lambda share, rank, start, span: (
        degrade(rank=rank, factor=share, for_s=span) if share else cut(rank=rank, for_s=span)
    ).at(seconds=start),
    share=st.sampled_from([0, 0.5, 0.25]),
    rank=st.integers(0, 2),
    start=st.integers(0, 8),
    span=st.integers(1, 4),
)


@given(faults=st.lists(outages, max_size=4), start=st.integers(0, 8), seconds=st.integers(1, 4))
def test_a_collective_moves_as_much_as_its_links_let_it(faults, start, seconds):
    """Against a sum over seconds, in each of which the lowest share on its links counts."""
    left, time = float(seconds), start
    while left > 0:
        on = [f for f in faults if f.at_s <= time < f.at_s + f.for_s and f.rank in (0, 1)]
        share = min([f.factor or 0.0 for f in on], default=1.0)
        step = min(1.0, left / share) if share else 1.0
        left, time = left - share * step, time + step
    end_s, _ = network(1, *faults).outages.passage(float(start), float(seconds), (0, 1))
    assert end_s == pytest.approx(time)
