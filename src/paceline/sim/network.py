"""How long messages take: links have latency and bandwidth, and network cards can be busy.

A message from one node to another occupies the sender's card and the receiver's card, one message
at a time on each, so many senders queue at one receiver: that makes a parameter server a
bottleneck. Ranks of one node share its card; among themselves they use the node's memory.
A collective is not simulated message by message: when all members have arrived, it takes the time
of its algorithm, in one call or in one for each tensor of the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.common.faults import Fault
from paceline.sim.cluster import Cluster, Link
from paceline.sim.outages import Outages

Algorithm = Callable[[Sequence[int], float, int], float]
"""The seconds that it takes, from members, bytes and passes (all-reduce 2, broadcast 1)."""


class Network:
    """The links of one cluster, and until when each card is busy.

    Attributes:
        outages: when links are cut or degraded.
        wire_bytes: all bytes that links have carried.
    """

    def __init__(
        self, cluster: Cluster, faults: Sequence[Fault] = (), nodes: Sequence[int] | None = None
    ) -> None:
        self._cluster = cluster
        self._node = cluster.node if nodes is None else nodes.__getitem__
        self.outages = Outages(faults, self._node)
        self._sending_until_s: dict[int, float] = {}
        self._receiving_until_s: dict[int, float] = {}
        self._model_bytes = self._tensors = 0
        self._scale = 1.0
        self.wire_bytes = 0.0

    def set_model_size(self, nbytes: int, tensors: int) -> float:
        """Set the size of the model; return the factor that scales bytes from now on."""
        stands_for = self._cluster.stands_for
        self._model_bytes, self._tensors = nbytes, tensors
        if stands_for is not None:
            self._tensors, self._scale = stands_for.tensors, stands_for.bytes / nbytes
        return self._scale

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint: until when the cards are busy, and the bytes sent."""
        return {
            "sending": dict(self._sending_until_s),
            "receiving": dict(self._receiving_until_s),
            "wire_bytes": self.wire_bytes,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self._sending_until_s, self._receiving_until_s = state["sending"], state["receiving"]
        self.wire_bytes = state["wire_bytes"]

    def link(self, src: int, dst: int) -> Link:
        """The link from one rank to another."""
        same_node = self._node(src) == self._node(dst)
        return self._cluster.inside if same_node else self._cluster.network

    def transfer(self, now_s: float, src: int, dst: int, nbytes: int) -> float:
        """Send a message; return when its last byte arrives."""
        self.wire_bytes += nbytes * self._scale
        link = self.link(src, dst)
        duration_s = nbytes * self._scale / link.bytes_per_s
        if link is self._cluster.inside:
            return self.outages.passage(now_s + link.latency_s, duration_s, (src, dst))[0]
        sender, receiver = self._node(src), self._node(dst)
        start_s = max(now_s, self._sending_until_s.get(sender, 0.0))
        first_byte_s = max(start_s + link.latency_s, self._receiving_until_s.get(receiver, 0.0))
        last_byte_s, moving_s = self.outages.passage(first_byte_s, duration_s, (src, dst))
        self._sending_until_s[sender] = start_s + moving_s
        self._receiving_until_s[receiver] = first_byte_s + moving_s
        return last_byte_s

    def request(self, now_s: float, src: int, dst: int) -> float:
        """When a request of a few bytes arrives; it queues behind the messages before it."""
        link = self.link(src, dst)
        if link is self._cluster.inside:
            return now_s + link.latency_s
        start_s = max(now_s, self._sending_until_s.get(self._node(src), 0.0))
        return max(start_s + link.latency_s, self._receiving_until_s.get(self._node(dst), 0.0))

    def work_s(self, work: Link, nbytes: int) -> float:
        """How long a rank's own core needs to handle a vector."""
        return work.seconds(nbytes * self._scale)

    def update_s(self, nbytes: int) -> float:
        """How long a server needs to apply an update."""
        return nbytes * self._scale / self._cluster.serving.bytes_per_s

    def all_reduce(self, members: Sequence[int], nbytes: int) -> float:
        """Make an all-reduce in the cluster's way; return the seconds that it takes."""
        return self._in_calls(members, nbytes, 2, self._ring)

    def broadcast(self, members: Sequence[int], nbytes: int) -> float:
        """Make a broadcast; return its seconds. The ring algorithm broadcasts by a tree."""
        return self._in_calls(members, nbytes, 1, self._tree)

    def _in_calls(self, members: Sequence[int], nbytes: int, passes: int, ring: Algorithm) -> float:
        algorithms = {"ring": ring, "tree": self._tree, "two-level": self._two_level}
        chosen, calls = self._cluster.collectives.algorithm, self._calls(nbytes)
        allowed = algorithms.values() if chosen == "auto" else [algorithms[chosen]]
        load = nbytes * self._scale
        self.wire_bytes += passes * load * (len(members) - 1)
        return calls * min(time_of(members, load / calls, passes) for time_of in allowed)

    def _calls(self, nbytes: int) -> int:
        """How many calls ``nbytes`` take: their share of the calls of the whole model."""
        calls = self._cluster.collectives.calls or self._tensors
        if self._model_bytes:
            calls = round(calls * nbytes / self._model_bytes)
        return max(1, calls)

    def _ring(self, members: Sequence[int], nbytes: float, passes: int) -> float:
        size = len(members)
        links = {self.link(a, b) for a, b in zip(members, [*members[1:], members[0]], strict=True)}
        return passes * (size - 1) * max(link.seconds(nbytes / size) for link in links)

    def _tree(self, members: Sequence[int], nbytes: float, passes: int) -> float:
        nodes = {self._node(member) for member in members}
        link = self._cluster.network if len(nodes) > 1 else self._cluster.inside
        return passes * _depth(len(members)) * link.seconds(nbytes)

    def _two_level(self, members: Sequence[int], nbytes: float, passes: int) -> float:
        """A tree inside each node; a tree or a ring, if cheaper, among their first ranks."""
        first: dict[int, int] = {}
        counts = Counter(self._node(member) for member in members)
        for member in members:
            first.setdefault(self._node(member), member)
        leaders = list(first.values())
        inside_s = passes * _depth(max(counts.values())) * self._cluster.inside.seconds(nbytes)
        among_s = self._tree(leaders, nbytes, passes)
        if passes == 2:
            among_s = min(among_s, self._ring(leaders, nbytes, passes))
        return inside_s + among_s


def _depth(size: int) -> int:
    return math.ceil(math.log2(size))
