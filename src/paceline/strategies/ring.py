"""What methods with a token share: turns, the worker's side of the token, and the server's.

A token goes round among the workers, and only its holder pushes. The first server knows where the
token is. When its holder is lost, or the worker that was to pass it on, the server makes a new one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.comm.ports import Lost
from paceline.errors import PeerLost
from paceline.strategies.served import PushStrategy
from paceline.strategies.server import ABSENT, ShardServer
from paceline.strategies.service import CALL, Reply, Request, Service, pack, unpack
from paceline.strategies.toolbox.token import NOBODY, Token

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.comm import Comm
    from paceline.comm.ports import Message
    from paceline.model.gradient import Gradient
    from paceline.strategies.served import ServerStrategy

TOKEN = 3
"""The tag of messages in the ring: the token, and calls to a checkpoint."""


@dataclass(kw_only=True)
class RingStrategy(PushStrategy):
    """A method whose workers push in turn: subclasses say what they bring to a turn.

    Attributes:
        seat: this worker's place in the ring.
    """

    state: ClassVar[tuple[str, ...]] = ("ring",)

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether this worker must have its turn before it makes another step."""

    @abstractmethod
    def bring(self, x: Tensor) -> Tensor:
        """What this worker pushes in its turn."""

    @abstractmethod
    def begin_at(self, x: Tensor) -> None:
        """Continue from the model that was just read."""

    @abstractmethod
    def keep(self, a: Tensor, x: Tensor) -> None:
        """Keep what was refused for the next turn; the first shard of ``x`` was just read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._dropped = False

    def connect(self) -> None:
        super().connect()
        self.seat = Seat(self.comm, self.services)

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        self.begin_at(x)
        if self.comm.rank == self.comm.members.starters()[0]:
            self.seat.generation = 0

    def adopt(self, x: Tensor) -> None:
        super().adopt(x)
        self.begin_at(x)

    def join(self, x: Tensor) -> None:
        super().join(x)
        self.begin_at(x)

    def look_for_turn(self, x: Tensor, g: Gradient) -> None:
        """After the step with ``g``: take a turn, if the token has come."""
        self._dropped = g.dropped
        self.seat.look()
        self._take_turns(x)

    def after_checkpoint(self, x: Tensor) -> None:
        self._take_turns(x)

    def _take_turns(self, x: Tensor) -> None:
        """Take a turn, if the token is here or must be waited for; a checkpoint comes first."""
        seat = self.seat
        while seat.has_token or self.is_full:
            if not seat.has_token and seat.is_called:
                return
            if not seat.has_token:
                seat.wait()
            elif not (self.pending or self._dropped) or self._take_turn(x, last=False):
                return

    def before_checkpoint(self, number: int) -> None:
        self.seat.call(number, self.live_workers())

    def flush(self, x: Tensor) -> None:
        """Wait for the token once more: push the rest, and leave the ring."""
        self.seat.look()
        while not self.seat.has_token or not self._take_turn(x, last=True):
            self.seat.wait()
        self.seat.generation = None

    def _take_turn(self, x: Tensor, last: bool) -> bool:
        """Push and fetch, then pass the token on; False if it is not valid any more."""
        a = self.bring(x)
        (first,) = self._push(a, x, last, [0])
        if not first.accepted:
            self.seat.generation = None
            self.keep(a, x)
            return False
        self._push(a, x, last, range(1, self.shards))
        self.pushed()
        self.begin_at(x)
        self.seat.pass_on(first.next_worker, self.versions[0], last)
        return True

    def _push(self, a: Tensor, x: Tensor, last: bool, shards: Sequence[int]) -> list[Reply]:
        """Send ``a`` to these servers, and copy their replies into ``x``."""
        turn = Request(batches=self.pending, token=self.seat.generation or 0, last=last)
        for shard in shards:
            self.send_request(shard, a, turn._replace(version=self.versions[shard]))
        return [self.await_reply(shard, x) for shard in shards]

    @property
    def ring(self) -> list[int | None]:
        """What a checkpoint holds of this worker's seat."""
        return [self.seat.generation, self.seat.attended, self.seat.called]

    @ring.setter
    def ring(self, state: list[Any]) -> None:
        """Take the seat up."""
        self.seat.generation, self.seat.attended, self.seat.called = state


class Seat:
    """A worker's place in the ring: the worker receives the token here, and passes it on.

    A worker that stops for a checkpoint may hold the token. It calls the others, so that none of
    them waits for the token and misses the checkpoint. A call is a message of its own.

    Attributes:
        generation: of the token that is here; None: it is elsewhere.
        called: the last rendezvous that another worker called this one to.
        attended: the last rendezvous that this worker went to.
    """

    def __init__(self, comm: Comm, services: Sequence[Service]) -> None:
        self._comm, self._services = comm, {service.server: service for service in services}
        self.generation: int | None = None
        self.attended = self.called = 0

    @property
    def has_token(self) -> bool:
        """Whether the token is here."""
        return self.generation is not None

    @property
    def is_called(self) -> bool:
        """Whether others stop for a checkpoint that this worker has not come to."""
        return self.called > self.attended

    def look(self) -> None:
        """Take the token, if it has arrived."""
        for message in self._comm.board.poll(_nothing(), TOKEN):
            self._take(message)

    def wait(self) -> None:
        """Wait for the token, for a call, or for a successor of a server."""
        received = self._comm.receive_any(_nothing(), TOKEN)
        if not isinstance(received, Lost):
            self._take(received)
        elif (server := received.src) in self._services:
            self._services[server].await_successor(self._comm.members.view().last_ended(server))

    def _take(self, message: Message) -> None:
        kind, number = unpack(message.header)
        if kind == CALL:
            self.called = max(self.called, number)
        else:
            self.generation = kind if self.generation is None else max(self.generation, kind)

    def pass_on(self, worker: int, version: int, last: bool) -> None:
        """Pass the token on, unless this worker is the only one.

        If the mailbox of ``worker`` is full, this worker keeps the token for another turn. After
        its last turn it waits until there is room.
        """
        if worker in (self._comm.rank, NOBODY) or self.generation is None:
            return
        generation, self.generation = self.generation, None
        token = pack(generation, version)
        if self._comm.board.post(_nothing(), worker, TOKEN, token):
            return
        if not last:
            self.generation = generation
            return
        with suppress(PeerLost):
            self._comm.send(_nothing(), worker, TOKEN, token)

    def call(self, number: int, workers: Sequence[int]) -> None:
        """Call the others to a checkpoint that this worker is about to stop for."""
        self.attended = number
        for worker in workers:
            if worker != self._comm.rank:
                self._comm.board.post(_nothing(), worker, TOKEN, pack(CALL, number))


class TokenServer(ShardServer):
    """A server that accepts pushes from the holder of the token only.

    Of several servers only the first one gives out tokens and refuses invalid ones. Workers push to
    it first.

    Attributes:
        token: where the valid token is.
    """

    def __init__(self, method: ServerStrategy) -> None:
        super().__init__(method)
        self.token = Token(min(self.present()))
        self._owes = False

    @abstractmethod
    def take(self, worker: int, request: Request, vector: Tensor) -> None:
        """Apply what the holder of the token pushes."""

    @property
    def generation(self) -> int:
        """That of the valid token: a successor must give out a higher one."""
        return self.token.generation

    @generation.setter
    def generation(self, generation: int) -> None:
        self.token.generation = generation

    @property
    def _is_first(self) -> bool:
        return self.comm.rank == self.method.workers

    def on_request(self, worker: int, request: Request, vector: Tensor) -> None:
        if request.join:
            self._enter(worker)
        elif self._is_first and not self.token.is_valid(request.token):
            self.reply(worker, accepted=False)
            if self._owes and worker == self.token.holder:
                self._give_token()
        else:
            if request.last:
                self.clocks[worker] = ABSENT
            self.take(worker, request, vector)
            if request.last:
                self.publish()
            self.reply(worker, next_worker=self.token.pass_on(worker, self.present()))

    def _enter(self, worker: int) -> None:
        self.clocks[worker] = 0
        self.publish()
        self.reply(worker)
        if self.token.holder == NOBODY:
            self.token.holder = worker
            self.regenerate()

    def on_leave(self, worker: int) -> None:
        super().on_leave(worker)
        if self.token.leave(worker, self.present()):
            self.regenerate()

    def take_over(self) -> dict[str, Any]:
        """Start the ring again among the workers that are left, with a new token."""
        facts = super().take_over()
        for worker in set(self.present()) - set(self.method.live_workers()):
            self.clocks[worker] = ABSENT
        self.token.holder = min(self.present(), default=NOBODY)
        self.regenerate()
        return facts

    def regenerate(self) -> None:
        """Make a new token, publish its generation, and give it to the holder."""
        self.token.regenerate()
        self.publish()
        if self.token.holder != NOBODY and self._is_first:
            self._give_token()

    def _give_token(self) -> None:
        """Give the token to the holder; if its mailbox is full, when it pushes next."""
        token = pack(self.token.generation, self.version)
        self._owes = not self.clients.board.post(_nothing(), self.token.holder, TOKEN, token)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "token": asdict(self.token), "owes": self._owes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.token, self._owes = Token(**state["token"]), state["owes"]


def _nothing() -> Tensor:
    """The vector of messages that are all header."""
    import torch

    return torch.empty(0)
