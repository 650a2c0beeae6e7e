"""What messages cost: links with latency and bandwidth, and cards that are busy.

A message from one node to another occupies the sender's card and the receiver's card, one message
at a time on each, so that many senders queue at one receiver: that is what chokes a parameter
server. Ranks of one node share its card; among themselves they use the node's memory.
A collective is not sent message by message: it takes what its algorithm takes once all are there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paceline.sim.cluster import Cluster, Link


class Cost(NamedTuple):
    """What a collective takes: seconds, and the bytes that each member puts on its link."""

    seconds: float
    wire_bytes: float


class Network:
    """The links of one cluster, and until when each card is busy."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sending_until_s: dict[int, float] = {}
        self._receiving_until_s: dict[int, float] = {}
        self.wire_bytes = 0.0

    def link(self, src: int, dst: int) -> Link:
        """The way from one rank to another."""
        same_node = self._cluster.node(src) == self._cluster.node(dst)
        return self._cluster.inside if same_node else self._cluster.network

    def transfer(self, now_s: float, src: int, dst: int, nbytes: int) -> float:
        """Put a message on the way; return when the last byte is there."""
        self.wire_bytes += nbytes
        link = self.link(src, dst)
        duration_s = nbytes / link.bytes_per_s
        if link is self._cluster.inside:
            return now_s + link.latency_s + duration_s
        sender, receiver = self._cluster.node(src), self._cluster.node(dst)
        start_s = max(now_s, self._sending_until_s.get(sender, 0.0))
        self._sending_until_s[sender] = start_s + duration_s
        first_byte_s = max(start_s + link.latency_s, self._receiving_until_s.get(receiver, 0.0))
        self._receiving_until_s[receiver] = first_byte_s + duration_s
        return first_byte_s + duration_s

    def all_reduce(self, members: Sequence[int], nbytes: int) -> Cost:
        """The cheaper of a ring (large vectors) and a binary tree (small ones)."""
        cost = min(self._ring(members, nbytes), self._tree(members, nbytes, ways=2))
        self.wire_bytes += cost.wire_bytes * len(members)
        return cost

    def broadcast(self, members: Sequence[int], nbytes: int) -> Cost:
        """A binary tree, one way."""
        cost = self._tree(members, nbytes, ways=1)
        self.wire_bytes += cost.wire_bytes * len(members)
        return cost

    def _ring(self, members: Sequence[int], nbytes: int) -> Cost:
        size = len(members)
        hops = 2 * (size - 1)
        links = {self.link(a, b) for a, b in zip(members, [*members[1:], members[0]], strict=True)}
        slowest_s = max(link.seconds(nbytes / size) for link in links)
        return Cost(hops * slowest_s, hops * nbytes / size)

    def _tree(self, members: Sequence[int], nbytes: int, ways: int) -> Cost:
        size = len(members)
        nodes = {self._cluster.node(member) for member in members}
        link = self._cluster.network if len(nodes) > 1 else self._cluster.inside
        hops = ways * math.ceil(math.log2(size))
        return Cost(hops * link.seconds(nbytes), ways * nbytes * (size - 1) / size)
