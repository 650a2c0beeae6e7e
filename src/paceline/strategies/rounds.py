"""Servers that answer in rounds: each waits for one request of every worker in its group.

The servers combine what has come among themselves, and each hands the outcome to its group. When
one is lost, the next one takes its group over and answers again what the group may have missed.
When the only one is lost, it is followed by a successor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import PeerLost
from paceline.strategies.server import Server
from paceline.strategies.service import REPLY, Message, encode, last_published

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.comm import Comm
    from paceline.strategies.served import RoleStrategy


class Outcome(NamedTuple):
    """What all servers have combined in a round.

    Attributes:
        numbers: that go with the vector.
        vector: for every worker.
        over: whether this was the last round.
    """

    numbers: Sequence[float]
    vector: Tensor
    over: bool


class RoundServer(Server):
    """One of several servers that answer in rounds.

    Args:
        method: the strategy of this rank.
        groups: the workers of each server.

    Attributes:
        round: how many rounds are over; requests of the next one have the number after it.
        members: the workers that this server waits for.
        peers: the servers that combine, this one included.
        came: what workers have brought to this round.
    """

    def __init__(self, method: RoleStrategy, groups: Sequence[Sequence[int]]) -> None:
        super().__init__(method)
        self.clients = self.comm  # the loss of another server is heard, too
        self.round, self.came = 0, dict[int, Message]()
        self.members = set(groups[self.comm.rank - method.workers])
        self.peers = set(range(method.workers, self.comm.size))
        self._groups = groups
        self._answer: Tensor | None = None

    @abstractmethod
    def combine(self, came: Sequence[Message], peers: Comm) -> Outcome:
        """Combine what this group has brought, in the order of workers, with what others have."""

    def judged(self, worker: int, message: Message) -> Message:
        """What counts of a request; the guard may drop it."""
        return message

    def serve(self) -> None:
        self._answer_when_complete()
        super().serve()

    def on_message(self, worker: int, message: Message) -> None:
        if message.number == self.round + 1:
            self.came[worker] = self.judged(worker, message)
            self.members.add(worker)
            self._answer_when_complete()
        elif self._answer is not None:  # its server was lost before it answered
            self.comm.post(self._answer, worker, REPLY)

    def on_leave(self, rank: int) -> None:
        self._go_on_without(rank)
        self._answer_when_complete()

    def _answer_when_complete(self) -> None:
        """End the round, if every member has come; and those after it, if there is no member."""
        while not self.over and self.members <= self.came.keys():
            came = [self.came[worker] for worker in sorted(self.came)]
            try:
                outcome = self.combine(came, self.comm.group(sorted(self.peers), strict=True))
            except PeerLost as error:
                for rank in error.ranks:
                    self._go_on_without(rank)
            else:
                self._end_round(outcome)

    def _end_round(self, outcome: Outcome) -> None:
        self.round += 1
        self._answer = encode((self.round, *outcome.numbers), outcome.vector)
        self.comm.publish(self._answer)  # for a successor, if this server is lost meanwhile
        for worker in sorted(self.came):
            self.comm.post(self._answer, worker, REPLY)
        self.came.clear()
        self.over = outcome.over

    def _go_on_without(self, rank: int) -> None:
        """Go on without a worker, or a server: its group is this one's, if this is the next."""
        self.members.discard(rank)
        if rank not in self.peers:
            return
        self.peers.discard(rank)
        alive = set(self.method.live_workers())
        for server, group in enumerate(self._groups, start=self.method.workers):
            if self._stands_in_for(server):
                self.members |= set(group) & alive

    def _stands_in_for(self, server: int) -> bool:
        """Whether the group of ``server`` goes through this one."""
        peers = sorted(self.peers)
        return self.comm.rank == next((peer for peer in peers if peer >= server), peers[0])

    def succeed(self) -> dict[str, Any]:
        """Follow a lost server, if it was the only one; otherwise others have its group."""
        servers = range(self.method.workers, self.comm.size)
        numbers, like = self.method.request_numbers, self.method.vector_at(self.comm.rank)
        last = last_published(self.comm, servers, numbers, like)
        if last is not None:
            self.round, self._answer = last.number, encode(last.numbers, last.vector)
        self.peers = set(servers) & set(self.comm.alive())
        alone = self.peers == {self.comm.rank}
        self.members = set(self.method.live_workers()) if alone else set()
        self.over = not alone
        return {"round": self.round, "alone": alone}

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "answer": self._answer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.round, self._answer = state["round"], state["answer"]
