"""Servers that reply in rounds: each one waits for a request of every worker in its group.

The servers combine what has arrived among themselves, and each one replies to its group. When one
is lost, the next one takes over its group, and replies again to workers that may have missed a
reply. When the only one is lost, a successor takes its place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import PeerLost
from paceline.strategies.server import Server
from paceline.strategies.service import REPLY, Numbered, last_published, pack, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.comm import Comm
    from paceline.strategies.served import RoleStrategy


class Combined(NamedTuple):
    """What all servers made of a round.

    Attributes:
        numbers: of the header of the reply.
        vector: of the reply.
        over: whether this was the last round.
    """

    numbers: Sequence[int]
    vector: Tensor
    over: bool


class RoundServer(Server):
    """One of the servers that reply in rounds.

    Args:
        method: the strategy of this rank.
        groups: the workers of each server.

    Attributes:
        round: how many rounds are over. A request of the next round has the number after it.
        members: the workers that this server waits for.
        peers: the servers that combine, this one included.
        arrived: the requests of this round.
    """

    def __init__(self, method: RoleStrategy, groups: Sequence[Sequence[int]]) -> None:
        super().__init__(method)
        self.clients = self.comm  # the loss of another server matters, too
        self.round, self.arrived = 0, dict[int, Numbered]()
        self.members = {*groups[self.comm.rank - method.workers]} & {*method.first_workers()}
        self.peers = set(range(method.workers, self.comm.size))
        self._groups = groups
        self._reply: Numbered | None = None

    @abstractmethod
    def combine(self, requests: Sequence[Numbered], peers: Comm) -> Combined:
        """Combine the requests of this group, in the order of workers, with those of the peers."""

    def judged(self, worker: int, request: Numbered) -> Numbered:
        """What counts of a request; the guard may drop it."""
        return request

    def serve(self) -> None:
        self._reply_if_complete()
        super().serve()

    def on_message(self, worker: int, message: Numbered) -> None:
        if message.number == self.round + 1:
            self.arrived[worker] = self.judged(worker, message)
            self.members.add(worker)
            self._reply_if_complete()
        elif self._reply is not None:  # the worker's server was lost before it replied
            self._post(self._reply, worker)

    def on_leave(self, worker: int) -> None:
        self._continue_without(worker)
        self._reply_if_complete()

    def _reply_if_complete(self) -> None:
        """End the round if all members have arrived; without members, also those after it."""
        while not self.over and self.members <= self.arrived.keys():
            requests = [self.arrived[worker] for worker in sorted(self.arrived)]
            try:
                combined = self.combine(requests, self.comm.group(sorted(self.peers), strict=True))
            except PeerLost as error:
                for rank in error.ranks:
                    self._continue_without(rank)
            else:
                self._end_round(combined)

    def _end_round(self, combined: Combined) -> None:
        self.round += 1
        reply = self._reply = Numbered(self.round, pack(*combined.numbers), combined.vector)
        self.comm.board.publish(reply.vector, reply.header)  # for a successor of this server
        for worker in sorted(self.arrived):
            self._post(reply, worker)
        self.arrived.clear()
        self.over = combined.over

    def _post(self, reply: Numbered, worker: int) -> None:
        self.comm.board.post(reply.vector, worker, REPLY, reply.header)

    def _continue_without(self, rank: int) -> None:
        """Continue without a worker or server; take over the group of a server, if it is next."""
        self.members.discard(rank)
        if rank not in self.peers:
            return
        self.peers.discard(rank)
        alive = set(self.method.live_workers())
        for server, group in enumerate(self._groups, start=self.method.workers):
            if self._stands_in_for(server):
                self.members |= set(group) & alive

    def _stands_in_for(self, server: int) -> bool:
        """Whether the workers of ``server`` send their requests to this one."""
        peers = sorted(self.peers)
        return self.comm.rank == next((peer for peer in peers if peer >= server), peers[0])

    def succeed(self) -> dict[str, Any]:
        """Take the place of a lost server, if it was the only one; else others have its group."""
        servers = range(self.method.workers, self.comm.size)
        self._reply = last_published(self.comm, servers, self.method.vector_at(self.comm.rank))
        self.round = 0 if self._reply is None else self._reply.number
        self.peers = set(servers) & set(self.comm.members.alive())
        alone = self.peers == {self.comm.rank}
        self.members = set(self.method.live_workers()) if alone else set()
        self.over = not alone
        return {"round": self.round, "alone": alone}

    def state_dict(self) -> dict[str, Any]:
        reply = self._reply
        return {
            "round": self.round,
            "numbers": None if reply is None else [*unpack(reply.body)],
            "vector": None if reply is None else reply.vector,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.round, vector = state["round"], state["vector"]
        if vector is not None:
            self._reply = Numbered(self.round, pack(*state["numbers"]), vector)
