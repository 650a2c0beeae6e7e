"""Layered SGD: communicators reduce between groups while workers load their next batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from paceline.comm.packet import Packet
from paceline.common.options import at_least
from paceline.errors import PeerLost
from paceline.model.gradient import Gradient
from paceline.model.hyperparameters import read_settings, write_settings
from paceline.strategies.base import COMMUNICATOR, SUMMONS, WORKER, Strategy
from paceline.strategies.lockstep import BEHIND, ODD, take_latest
from paceline.strategies.toolbox.guard import norm
from paceline.strategies.toolbox.topology import groups

if TYPE_CHECKING:
    from torch import Tensor

UP, DOWN = 1, 2


class Head(NamedTuple):
    """The numbers before a gradient, on its way up or down; then one for each parameter.

    Attributes:
        round: which step it belongs to.
        weight: the samples of a contribution, with the flags of a lockstep; on its way down, 1 in
            place of each that is not 0.
        overflow: on how many workers a scaler has found it to be infinite.
    """

    round: float
    weight: float
    overflow: float


@dataclass(kw_only=True)
class Layered(Strategy):
    r"""Layered SGD: synchronous SGD whose communication hides behind the loading of data.

    Workers hand their gradients to the communicator of their group and go on to load the next
    batch. Meanwhile the communicators add up over all groups and hand the mean down. It is applied
    before the next forward, with the learning rate that it was made for: nothing is stale, and
    the result is that of synchronous SGD.

    ======  ==========================================================
    symbol  here
    ======  ==========================================================
    W       ``group_size``: consecutive workers
    G       the number of groups, each with a communicator, its own rank
    n_i     samples in the batch of worker i
    ======  ==========================================================

    .. math::
        x_{t+1} = \mathrm{optimizer}\Big(x_t, \sum_{k=1}^{G}
        \sum_{i \in \text{group } k} n_i g_i(x_t) / \sum_i n_i\Big)

    Args:
        group_size: workers to a communicator; the last group may be smaller.

    Example:
        >>> import paceline as pl, torch
        >>> def train(worker):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     model, sgd = worker.setup(model, sgd)
        ...     x = torch.tensor([float(worker.rank)])
        ...     model(x).backward()  # gradients 0, 1, 2
        ...     sgd.step()
        ...     before = model.weight.item()
        ...     worker.settle()
        ...     worker.log(before=before, after=model.weight.item())
        >>> run = pl.simulate(train, workers=3, strategy="layered(group_size=2)")
        >>> run.metrics[0]["before"], run.metrics[0]["after"]
        (0.0, -1.0)

    Faults: a slow worker slows all to its pace. A dead or stopped one ends the run, naming it; or,
    with ``on_loss="continue"``, it is left out, and the mean is that of the others. When a
    communicator is lost then, its group goes on through the next one, which hands out again what
    the group may have missed; the only one is followed by another. A worker that runs out of data
    takes part with weight 0; it ends with the same parameters.

    Bytes: at each step a worker sends and is sent the size of the gradient, and each communicator
    hands it in once more; each message carries 24 bytes and 8 for each parameter tensor with it.

    When to use: data that takes long to load, fast links inside groups and slow ones between. With
    a loader that has the next batch ready there is nothing to hide behind. The learning rate is
    that of one large batch (factor 1).

    Reference: Yu, Flynn, Yoo, D'Imperio, "Layered SGD: a decentralized and synchronous SGD
    algorithm for scalable deep neural network training", 2019. Its public code applies a gradient
    with the next step's learning rate while that warms up; here it is its own.
    """

    paper: ClassVar[str] = "Yu, Flynn, Yoo, D'Imperio, 2019"
    defers: ClassVar[bool] = True
    resumable: ClassVar[bool] = False
    state: ClassVar[tuple[str, ...]] = ("steps", "rounds", "behind")

    group_size: int = 4

    def __post_init__(self) -> None:
        at_least("group_size", self.group_size, 1)
        self.steps = self.rounds = 0
        self._sent: Tensor | None = None
        self._last: Tensor | None = None
        self._round = 0
        self._came: dict[int, Packet] = {}
        self.behind = False

    @property
    def equal_rates(self) -> bool:
        return True

    def roles(self, workers: int) -> tuple[str, ...]:
        return (WORKER,) * workers + (COMMUNICATOR,) * len(groups(workers, self.group_size))

    def home(self, rank: int, workers: int) -> int:
        return rank if rank < workers else (rank - workers) * self.group_size

    def payload(self, steps: int, nbytes: int, workers: int) -> int:
        communicators = len(groups(workers, self.group_size))
        message = nbytes + 8 * (len(Head._fields) + len(self.replica.flat.spans))
        rounds = steps + 1  # in the last one, all say that they have come to their end
        up_and_down = 2 * workers * rounds * message
        return up_and_down + communicators * steps * nbytes + nbytes * (workers + communicators)

    # A worker's side -----------------------------------------------------------------------------

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        self._lay_out(x)

    def adopt(self, x: Tensor) -> None:
        self.comm.group(self.first_workers()).broadcast(x)  # communicators hold no model

    def _lay_out(self, x: Tensor) -> None:
        flat = self.replica.flat
        self._numbers = len(Head._fields) + len(flat.spans)
        self._mean = x.new_zeros(x.shape)
        self._views = flat.views(self._mean)
        self._communicator = self.workers + self.comm.rank // self.group_size
        self._life = 1

    def step(self, x: Tensor, g: Gradient) -> None:
        self.steps += 1
        self._send_up(g)
        self._settings = read_settings(self.replica.optimizer)
        self._max_norm = g.max_norm

    def settle(self, x: Tensor) -> None:
        """Take the mean of the last step, and make the update that was put off."""
        if self._sent is None:
            return
        overflow, present, total = self._receive()
        if total % ODD and not self.behind:
            self._update(
                Gradient(
                    gathered=self._mean,
                    present=tuple(count > 0 for count in present),
                    overflow=overflow > 0,
                    max_norm=self._max_norm,
                )
            )

    def finish(self, x: Tensor) -> None:
        total = 1
        while total % BEHIND:
            self._send_up(Gradient.nothing(x, len(self.replica.flat.spans)))
            *_, total = self._receive()
            self.behind = self.behind or total % ODD > 0
        if total >= BEHIND:
            self.among_live(lambda workers: take_latest(workers, x, self.steps))

    def _send_up(self, g: Gradient) -> None:
        """Hand a gradient, and which parameters have one, to the communicator."""
        if g.dropped:
            g.vector.zero_()
        contributes = g.weight > 0
        head = Head(
            round=self.rounds,
            weight=g.weight + ODD * (not g.ordinary) + BEHIND * self.behind,
            overflow=contributes and g.overflow,
        )
        present = [float(contributes and has) for has in g.present]
        self._sent = Packet.of((*head, *present), g.vector).buffer
        self.rounds += 1
        self._post()

    def _post(self) -> None:
        assert self._sent is not None
        self._life = self.comm.life(self._communicator)
        while not self.comm.post(self._sent, self._communicator, UP):
            self._communicator = self._successor(self._communicator)

    def _receive(self) -> tuple[float, list[float], int]:
        """Wait for the mean of this round, from a successor if need be."""
        assert self._sent is not None
        while True:
            message = self._mean_from_communicator()
            if message is None:
                try:
                    self._communicator = self._successor(self._communicator)
                    self._post()
                    continue
                except PeerLost:  # all of them may have come to their end with this round
                    message = self._published()
                    if message is None or self._number(message) != self.rounds - 1:
                        raise
            packet = Packet(message, self._numbers, self._mean.dtype)
            number, total, overflow, *present = packet.numbers.tolist()
            if round(number) == self.rounds - 1:
                break
        self._sent = None
        self._mean.copy_(packet.vector)
        return overflow, present, round(total)

    def _mean_from_communicator(self) -> Tensor | None:
        """What the communicator hands down; None when it was lost, or has been followed."""
        assert self._sent is not None
        if self.comm.life(self._communicator) > self._life:
            return None
        try:
            return self.comm.recv(self._sent, self._communicator, DOWN)
        except PeerLost:
            return None

    def _update(self, mean: Gradient) -> None:
        """Step with the mean and the settings of its own step; leave the rest as it was."""
        replica, spans = self.replica, self.replica.flat.spans
        grads, settings = [span.parameter.grad for span in spans], read_settings(replica.optimizer)
        for span, view, present in zip(spans, self._views, mean.present, strict=True):
            span.parameter.grad = view if present else None
        write_settings(replica.optimizer, self._settings)
        self.local_update(mean)
        write_settings(replica.optimizer, settings)
        for span, grad in zip(spans, grads, strict=True):
            span.parameter.grad = grad

    def _successor(self, communicator: int) -> int:
        """The next communicator that is there; when none is, who follows the last one."""
        if not self.comm.elastic:
            raise PeerLost(communicator, "the wait for the mean gradient", "it is gone", 0.0)
        alive = [rank for rank in self.comm.alive() if rank >= self.workers]
        for rank in [rank for rank in alive if rank > communicator] or alive:
            if rank != communicator or self.comm.life(rank) > self._life:
                break
        else:
            try:
                rank = communicator
                self.comm.await_return(rank, self._life)
            except PeerLost:
                if not any(other >= self.workers for other in self.comm.alive()):
                    raise
                return self._successor(communicator)  # which came before it, and has its group
        self._life = self.comm.life(rank)
        return rank

    def _published(self) -> Tensor | None:
        """The mean of the latest round that any communicator has left, in whichever life."""
        like = Packet.empty(self._numbers, self._mean).buffer
        left = [self.comm.inherited(like, rank) for rank in range(self.workers, self.comm.size)]
        return max((each for each in left if each is not None), key=self._number, default=None)

    def _number(self, message: Tensor) -> int:
        """The round of a message."""
        return round(float(Packet(message, self._numbers, self._mean.dtype).numbers[0]))

    def summon(self, rank: int, number: int, stop: bool) -> None:
        head, nothing = Head(SUMMONS, number, stop), [0.0] * len(self.replica.flat.spans)
        self.comm.send(Packet.of((*head, *nothing), self._mean).buffer, rank, UP)

    def state_dict(self) -> dict[str, Any]:
        if self.comm.rank >= self.workers:
            return {"round": self._round, "last": self._last}
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.comm.rank >= self.workers:
            self._round, self._last = state["round"], state["last"]
        else:
            super().load_state_dict(state)

    # A communicator's side -----------------------------------------------------------------------

    def succeed(self, x: Tensor) -> dict[str, Any]:
        """Follow a lost communicator, if it was the only one; otherwise others have its group."""
        self._lay_out(x)
        self._last = self._published()
        self._round = 0 if self._last is None else 1 + self._number(self._last)
        self._peers = {rank for rank in self.comm.alive() if rank >= self.workers}
        alone = self._peers == {self.comm.rank}
        self._members = set(self.live_workers()) if alone else set()
        return {"round": self._round, "alone": alone}

    def serve(self, x: Tensor) -> None:
        if self.comm.transport.late:
            if not self._members:
                return
        else:
            place = self.comm.rank - self.workers
            self._members = set(groups(self.workers, self.group_size)[place])
            self._peers = set(range(self.workers, self.comm.size))
        total = 1
        while total % BEHIND:
            self._gather()
            head, present, mean = self._combine(x)
            self._last = Packet.of((*head, *present), mean).buffer
            self.comm.publish(self._last)  # for who follows, should this one be lost meanwhile
            for src in sorted(self._came):
                self.comm.post(self._last, src, DOWN)
            self._came.clear()
            self._round += 1
            total = round(head.weight)

    def _gather(self) -> None:
        """Wait for a contribution of every member, less those that are lost on the way."""
        like = Packet.empty(self._numbers, self._mean)
        while self._members - self._came.keys():
            src, message = self.comm.recv_or_loss(like.buffer, UP)
            if message is None:
                self._lose(src)
                continue
            packet = Packet(message, self._numbers, self._mean.dtype)
            number, meeting, stop = packet.numbers[:3].tolist()
            if number == SUMMONS:
                self.listener.summoned(round(meeting), bool(stop))
            elif round(number) == self._round:
                self._judge(src, packet)
                self._came[src] = packet
                self._members.add(src)
            elif self._last is not None:  # its communicator was lost before it handed this out
                self.comm.post(self._last, src, DOWN)

    def _judge(self, src: int, packet: Packet) -> None:
        """Let what the guard drops count for nothing; its worker is not at its end, though.

        What a scaler has found infinite is nothing to judge: all skip that step.
        """
        _, weight, overflow, *_ = packet.numbers.tolist()
        if not weight % ODD or overflow:
            return
        if not self.guard.admits(norm(packet.vector), src, "gradient"):
            packet.numbers[1] = weight - weight % ODD + ODD
            packet.numbers[2:] = 0

    def _lose(self, rank: int) -> None:
        """Go on without a rank; take over the group of a communicator if it is this one's turn."""
        self._members.discard(rank)
        if rank not in self._peers:
            return
        self._peers.discard(rank)
        alive = set(self.live_workers())
        for number, group in enumerate(groups(self.workers, self.group_size)):
            if self._owner(self.workers + number) == self.comm.rank:
                self._members |= set(group) & alive

    def _owner(self, home: int) -> int:
        """The communicator that a group goes through whose own was ``home``."""
        left = sorted(self._peers)
        return next((peer for peer in left if peer >= home), left[0])

    def _combine(self, x: Tensor) -> tuple[Head, list[float], Tensor]:
        """Add up over all communicators; again, with their orphans, when one of them is lost."""
        while True:
            mean, weight, flags = self._sum(x)
            peers = self.comm.group(sorted(self._peers), strict=True)
            try:
                total = peers.all_reduce(mean, weight, lambda total: 1 / (total % ODD or 1))
                if total % BEHIND >= ODD:
                    peers.all_reduce(flags)
                else:  # nobody lacks anything; of a group without workers, nobody has said so
                    flags[1:] = float(total % ODD > 0)
                overflow, *present = flags.tolist()
                return Head(self._round, _flags(total), overflow), present, mean
            except PeerLost as lost:
                for rank in lost.ranks:
                    self._lose(rank)
                self._gather()

    def _sum(self, x: Tensor) -> tuple[Tensor, int, Tensor]:
        """The contributions of this group, in rank order."""
        total, weight = x.new_zeros(x.shape), 0
        flags = x.new_zeros(1 + len(self.replica.flat.spans)).double()
        for src in sorted(self._came):
            packet = self._came[src]
            _, its_weight, *its_flags = packet.numbers.tolist()
            weight += round(its_weight)
            flags += flags.new_tensor(its_flags)
            if its_weight % ODD:
                total.add_(packet.vector, alpha=its_weight % ODD)
        return total, weight, flags


def _flags(total: int) -> int:
    """The counts in a sum of weights, each no more than 1: larger ones have no room in a float."""
    return bool(total % ODD) + ODD * (total % BEHIND >= ODD) + BEHIND * (total >= BEHIND)
