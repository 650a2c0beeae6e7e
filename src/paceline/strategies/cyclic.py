"""Cyclic gradient updates: a token goes round, and its holder pushes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from paceline.errors import PeerLost
from paceline.options import at_least
from paceline.strategies.served import GradientServed, Request

if TYPE_CHECKING:
    from torch import Tensor

TOKEN = 3


@dataclass(kw_only=True)
class Cyclic(GradientServed):
    r"""Cyclic: workers push to the server in turn, as a token goes round among them.

    Only the holder of the token pushes, so that the server's link is used by one worker at a time
    and every gradient is exactly p - 1 updates old. Meanwhile the others go on and add up: with
    the dynamic delay a fast worker brings more gradients to its turn, and waits for nobody.

    =======  =====================================================================
    symbol   here
    =======  =====================================================================
    w        the servers' model, V its version
    a_i      the sum of the gradients since worker i's last turn, c_i their number
    =======  =====================================================================

    .. math::
        a_i \leftarrow a_i + g_i(x_i),\ c_i \leftarrow c_i + 1 \qquad
        \text{with the token: }
        w \leftarrow \mathrm{optimizer}(w, a_i / c_i),\ x_i \leftarrow w,\ a_i, c_i \leftarrow 0

    Args:
        max_accumulated: mini-batches after which a worker waits for the token; 1 is the fixed
            cyclic method.
        scale: ``mean`` pushes a/c, ``sum`` pushes a.
        local_move: whether a worker moves its own model, by lr * g, between its turns.
        server_optimizer: as for Downpour.
        shards: servers, each with an equal part of the model.

    Example:
        >>> import paceline as pl, torch
        >>> def train(worker):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     model, sgd = worker.setup(model, sgd)
        ...     x = torch.tensor([1.0 + worker.rank])
        ...     model(x).backward()  # gradients 1 and 2
        ...     sgd.step()
        ...     worker.log(weight=model.weight.item())
        >>> run = pl.simulate(train, workers=2, strategy="cyclic(max_accumulated=1)")
        >>> [m["weight"] for m in run.metrics]  # rank 0 pushes, then rank 1
        [-1.0, -3.0]

    Faults: a slow worker lets the others add up, until they have ``max_accumulated`` and wait for
    it (the fixed method always waits). When the holder is dead, or stopped for too long, the server
    makes a new token of a higher generation for the next worker, and refuses pushes under an older
    one; their gradients stay with their worker until its next turn. Who has come to its end is
    skipped. A worker that comes late fetches the model and enters the ring at its place. The loss
    of a server ends the run, naming it.

    Bytes: each turn sends and is sent the size of the model (and a few numbers), and passes on a
    token of 16.

    When to use: machines of lastingly unequal speed, and a link to the server that must not choke.
    Turns follow each other p to a round, each p - 1 updates old, so that the learning rate wants to
    be about 1/p of that of one large batch (factor 1/p with ``mean``).

    Reference: Hu et al., "Dynamic delay based cyclic gradient update method for distributed
    training", PRCV 2018; fixed: Langford, Smola, Zinkevich, "Slow learners are fast", NIPS 2009.
    """

    paper: ClassVar[str] = "Hu et al., PRCV 2018"
    state: ClassVar[tuple[str, ...]] = ("steps", "versions", "pending", "accrued", "token")

    max_accumulated: int = 4
    scale: Literal["mean", "sum"] = "mean"
    local_move: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("max_accumulated", self.max_accumulated, 1)
        self.token: int | None = None

    def payload(self, steps: int, nbytes: int, workers: int) -> int | None:
        if self.max_accumulated > 1:
            return None
        turns = workers * (steps + 1)
        tokens = turns - 1
        return turns * self.exchange_bytes(nbytes) + 16 * tokens + nbytes * (workers + self.shards)

    def exchange_bytes(self, nbytes: int) -> int:
        """What one turn sends, beside the token."""
        return 2 * nbytes + self.request_overhead + self.reply_overhead

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        if self.comm.rank == self.comm.starters()[0]:
            self.token = 0

    def step(self, x: Tensor, g: Tensor | None) -> None:
        assert g is not None
        self.steps += 1
        self.accrue(g, self.local_move)
        self._look_for_token()
        while self.token is not None or self.pending >= self.max_accumulated:
            if self.token is None:
                self._wait_for_token()
            elif not self.pending or self._take_turn(x, last=False):
                return

    def flush(self, x: Tensor) -> None:
        """Wait for the token once more: hand in the rest, and leave the ring."""
        self._look_for_token()
        while self.token is None or not self._take_turn(x, last=True):
            self._wait_for_token()
        self.token = None

    def _look_for_token(self) -> None:
        for _, message in self.comm.poll(self._token(), TOKEN):
            self._receive(message)

    def _wait_for_token(self) -> None:
        src, message = self.comm.recv_or_loss(self._token(), TOKEN)
        if message is not None:
            self._receive(message)
        elif src >= self.workers:
            raise PeerLost(src, "the wait for the token", "it is gone", 0.0)

    def _receive(self, message: Tensor) -> None:
        generation = int(message[0])
        self.token = generation if self.token is None else max(self.token, generation)

    def _take_turn(self, x: Tensor, last: bool) -> bool:
        """Push and fetch, then pass the token on; False when it is not valid any more."""
        assert self.token is not None
        a = x if self.accrued is None else self.accrued
        if self.pending and self.scale == "mean":
            a = a / self.pending
        self._push(0, a, last)
        first = self.hear(0, x)
        if not first.accepted:
            self.token = None
            return False
        for shard in range(1, self.shards):
            self._push(shard, a, last)
        for shard in range(1, self.shards):
            self.hear(shard, x)
        self.pushed()
        self._pass_on(round(first.successor))
        return True

    def _push(self, shard: int, a: Tensor, last: bool) -> None:
        assert self.token is not None
        version = self.versions[shard]
        request = Request(version=version, batches=self.pending, token=self.token, last=last)
        self.ask(shard, a, request)

    def _token(self, generation: int = 0, version: int = 0) -> Tensor:
        """The message that a token is."""
        return self.replica.flat.x.new_empty(0).double().new_tensor([generation, version])

    def _pass_on(self, successor: int) -> None:
        if successor in (self.comm.rank, -1):
            return
        assert self.token is not None
        message = self._token(self.token, self.versions[0])
        self.token = None
        self.comm.post(message, successor, TOKEN)

    # A server's side -----------------------------------------------------------------------------

    def open(self, w: Tensor, part: slice) -> None:
        super().open(w, part)
        self.ring = set(self.first_workers())
        self.holder, self.giver = min(self.ring), -1
        self.generation = 0

    def act(self, src: int, request: Request, vector: Tensor, settings: list[float]) -> None:
        if request.join:
            self._enter(src)
        elif request.token < self.generation and self._judges():
            self.reply(src, accepted=False)
        else:
            self.apply(request, vector, settings, self._decays(request))
            if request.last:
                self.ring.discard(src)
            self.giver, self.holder = src, self._after(src)
            self.reply(src, successor=self.holder)

    def gone(self, src: int) -> None:
        self.ring.discard(src)
        if self.holder == src:
            self.holder = self._after(src)
            self._make_token()
        elif self.giver == src:  # it may not have come to pass the token on
            self._make_token()

    def _enter(self, src: int) -> None:
        self.ring.add(src)
        self.reply(src)
        if self.holder < 0:
            self.holder = src
            self._make_token()

    def _make_token(self) -> None:
        self.generation += 1
        if self.holder >= 0 and self._judges():
            message = self._token(self.generation, self.version)
            self.desk.post(message, self.holder, TOKEN)

    def _judges(self) -> bool:
        """Whether this is the server that says which token is valid."""
        return self.comm.rank == self.workers

    def _after(self, src: int) -> int:
        """Who comes next in the ring; -1 when nobody is left."""
        later = [rank for rank in sorted(self.ring) if rank > src]
        return later[0] if later else min(self.ring, default=-1)

    def _decays(self, request: Request) -> float:
        return request.batches if self.scale == "sum" else 1
