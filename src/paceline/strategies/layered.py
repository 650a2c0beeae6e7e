"""Layered SGD: communicators reduce between groups while workers load their next batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from paceline.common.options import at_least
from paceline.errors import UsageError
from paceline.model.gradient import Gradient
from paceline.model.hyperparameters import read_hyperparameters, write_hyperparameters
from paceline.model.part import WHOLE
from paceline.strategies.about import About
from paceline.strategies.base import WORKER, Role
from paceline.strategies.lockstep import BEHIND, ODD, take_latest
from paceline.strategies.rounds import Combined, RoundServer
from paceline.strategies.served import RoleStrategy
from paceline.strategies.service import Numbered, Service, pack, unpack
from paceline.strategies.toolbox.guard import norm
from paceline.strategies.toolbox.topology import groups

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.comm import Comm

OVERFLOW = 4
"""A flag beside ODD and BEHIND: a gradient scaler found this gradient infinite, or one of these."""


@dataclass(kw_only=True)
class Layered(RoleStrategy):
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
    """

    paper: ClassVar[str] = "Yu, Flynn, Yoo, D'Imperio, 2019"
    about = About(
        faults="""A slow worker slows all to its pace. A dead or stopped one ends the run,
        naming it; or, with on_loss="continue", it is left out, and the mean is that of the
        others. When a communicator is lost then, its group goes on through the next one, which
        hands out again what the group may have missed; the only one is followed by another. No
        worker can join in mid-run. A worker that runs out of data takes part with weight 0; it
        ends with the same parameters.""",
        bytes="""At each step a worker sends and is sent the size of the gradient, and each
        communicator hands it in once more; each message carries 24 bytes and 8 for each
        parameter tensor with it.""",
        when_to_use="""Data that takes long to load, fast links inside groups and slow ones
        between. With a loader that has the next batch ready there is nothing to hide behind.
        The learning rate is that of one large batch (factor 1).""",
        reference="""Yu, Flynn, Yoo, D'Imperio, "Layered SGD: a decentralized and synchronous
        SGD algorithm for scalable deep neural network training", 2019. Its public code applies
        a gradient with the next step's learning rate while that warms up; here it is its own.""",
    )
    defers: ClassVar[bool] = True
    divides_anew: ClassVar[bool] = False
    equal_rates: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ("steps", "behind")

    group_size: int = 4

    def __post_init__(self) -> None:
        at_least("group_size", self.group_size, 1)
        self.steps = 0
        self.behind = False
        self._max_norm: float | None = None
        self._part = WHOLE

    def roles(self, workers: int) -> tuple[Role, ...]:
        beside = [group[0] for group in groups(workers, self.group_size)]
        return (WORKER,) * workers + tuple(Role("communicator", home) for home in beside)

    def can_stand_still(self, ranks: Collection[int]) -> bool:
        """The communicator of a group without workers waits in the next round already."""
        parts = groups(self.workers, self.group_size)
        return super().can_stand_still(ranks) and not any(map({*ranks}.isdisjoint, parts))

    @property
    def request_numbers(self) -> int:
        return 3 + len(self.replica.flat.spans)  # number, weight, flags; which parameters have one

    def make_services(self) -> list[Service]:
        communicators = range(self.workers, self.comm.size)
        own = self.workers + self.comm.rank // self.group_size
        return [Service(self.comm, own, self.replica.flat.x, stand_ins=communicators)]

    def make_server(self) -> Communicator:
        return Communicator(self, groups(self.workers, self.group_size))

    def step(self, x: Tensor, g: Gradient) -> None:
        self.steps += 1
        self._send(g)
        self._hyperparameters = read_hyperparameters(self.replica.optimizer)
        self._max_norm, self._part = g.max_norm, g.part

    def settle(self, x: Tensor) -> None:
        """Take the mean of the last step, and make the update that was put off."""
        if self.services[0].awaits_reply:
            mean, _ = self._receive()
            self._check_part(mean)
            if mean.samples and not self.behind:
                self._update(mean)

    def finish(self, x: Tensor) -> None:
        samples, flags = 1, 0
        while samples or flags & ODD:
            self._send(Gradient.nothing(x, len(self.replica.flat.spans)))
            mean, flags = self._receive()
            samples = mean.samples
            self.behind = self.behind or samples > 0
        if flags & BEHIND:
            self.among_live(lambda workers: take_latest(workers, x, self.steps))

    def _send(self, g: Gradient) -> None:
        """Send a gradient, and which parameters have one, to the communicator."""
        if g.dropped:
            g.vector.zero_()
        overflow, *present = (g.weight > 0 and flag for flag in (g.overflow, *g.present))
        odd = not g.ordinary or (g.samples > 0 and self.replica.several)
        flags = OVERFLOW * overflow | ODD * odd | BEHIND * self.behind
        body = pack(g.weight, flags, *present)
        self.services[0].send_request(body, g.vector.clone())  # n_i, g_i(x_t)

    def _receive(self) -> tuple[Gradient, int]:
        """Wait for the mean, sum n_i g_i / sum n_i, whose samples are 0 if nobody had any."""
        reply = self.services[0].await_reply()
        samples, flags, *counts = unpack(reply.body)
        present, overflow = tuple(count > 0 for count in counts), flags & OVERFLOW > 0
        mean = Gradient(gathered=reply.vector, present=present, samples=samples, overflow=overflow)
        return replace(mean, max_norm=self._max_norm, part=self._part), flags

    def _check_part(self, mean: Gradient) -> None:
        """Refuse a step in which others step another optimizer, or have parameters in one."""
        self.replica.flat.check_present(mean.present)
        others = mean.present[: mean.part.spans.start] + mean.present[mean.part.spans.stop :]
        if self.replica.several and any(others):
            raise UsageError(
                "all workers must call step() of the same optimizer in the same step, and after"
                f" {self.steps} steps they did not"
            )

    def _update(self, mean: Gradient) -> None:
        """Step with the mean and the hyperparameters of its own step; leave the rest as it was."""
        flat, optimizer = self.replica.flat, self.replica.optimizer
        grads, own = [span.parameter.grad for span in flat.spans], read_hyperparameters(optimizer)
        flat.set_gradients(mean.vector, mean.present)
        write_hyperparameters(optimizer, self._hyperparameters)
        self.local_update(mean)  # x_{t+1} = optimizer(x_t, mean)
        write_hyperparameters(optimizer, own)
        for span, grad in zip(flat.spans, grads, strict=True):
            span.parameter.grad = grad


class Communicator(RoundServer):
    """Adds up the gradients of its group, and those of all groups with the other communicators."""

    method: Layered

    def judged(self, worker: int, request: Numbered) -> Numbered:
        """Let a gradient that the guard drops count for nothing.

        A gradient that a scaler found infinite is not judged: all workers skip that step.
        """
        weight, flags, *present = unpack(request.body)
        if not weight or flags & OVERFLOW:
            return request
        if self.method.guard.admits(norm(request.vector), worker, "gradient"):
            return request
        return request._replace(body=pack(0, flags | ODD, *[0] * len(present)))

    def combine(self, requests: Sequence[Numbered], peers: Comm) -> Combined:
        flat, weight, flags = self.method.replica.flat, 0, 0
        mean = flat.x.new_zeros(flat.x.shape)
        counts = flat.x.new_zeros(1 + len(flat.spans)).double()
        for request in requests:
            n, its_flags, *present = unpack(request.body)
            weight, flags = weight + n, flags | its_flags
            counts += counts.new_tensor([its_flags & OVERFLOW, *present])
            if n:
                mean.add_(request.vector, alpha=n)  # sum n_i g_i
        total = peers.all_reduce(mean, weight, lambda total: 1 / (total or 1), flags)
        if total.flags & ODD:
            peers.all_reduce(counts)
        else:  # everybody has everything; a group without workers has counted nothing
            counts[1:] = float(total.weight > 0)
        told = (total.weight, total.flags, *map(round, counts[1:].tolist()))
        return Combined(told, mean, over=not total.weight and not total.flags & ODD)
