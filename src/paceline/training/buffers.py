"""What workers share of a model beside its trained parameters: see :class:`~.rest.Rest`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.comm.comm import Comm
from paceline.comm.ports import SHELF
from paceline.model.replica import Replica
from paceline.training.rest import Rest

if TYPE_CHECKING:
    from paceline.training.session import Session

BUFFERS, FIXED = SHELF, SHELF + 1
"""The windows in which workers show them, also when they are gone."""
SHOWN_EVERY = 8
"""Steps after which a worker shows its buffers anew; in the beginning, after each."""


class SharedBuffers:
    """The buffers of one worker, among those of the others.

    Args:
        model: the user's.
        replica: whose parameters are trained, and no part of this.
        session: of the rank.
    """

    def __init__(self, model: nn.Module, replica: Replica, session: Session) -> None:
        self.rest = Rest(model, {id(span.parameter) for span in replica.flat.spans})
        self._session, self._shown = session, torch.empty(0, dtype=torch.uint8)

    # At the beginning ----------------------------------------------------------------------------

    @property
    def _first(self) -> int:
        return self._session.strategy.first_workers()[0]

    def show_first(self) -> None:
        """Before the run begins: the first worker shows what it has."""
        self._show_fixed()
        if self._session.rank == self._first:
            self._show()

    def _show_fixed(self) -> None:
        """Let those who come late see what is not averaged: the first worker does."""
        ranks = self._session.all_ranks
        someone_may = ranks.elastic or len(ranks.members.starters()) < ranks.size
        if self._session.rank == self._first and someone_may:
            fixed = self.rest.fixed()
            if fixed.numel():
                ranks.board.publish(fixed, window=FIXED)

    def take_first(self) -> None:
        """Give every worker rank 0's buffers, and its parameters that are not trained."""
        workers = Comm(self._session.ports.inner, self._session.strategy.first_workers())
        for tensors in self.rest.by_dtype():
            together = torch.cat([t.reshape(-1) for t in tensors])
            workers.broadcast(together.view(torch.uint8))
            parts = torch.split(together, [t.numel() for t in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        self.rest.begin()

    def take_fixed(self) -> None:
        """Of a worker that comes late: take what is not averaged."""
        fixed = self._session.all_ranks.board.peek(self._first, window=FIXED, gone=True)
        if fixed is not None:
            self.rest.load_fixed(fixed.x)

    # While training ------------------------------------------------------------------------------

    @property
    def _weight(self) -> int:
        """What this worker's buffers count for: the samples, or else the steps, that it trained."""
        stepper = self._session.running
        return 0 if self._session.set_aside else stepper.samples or stepper.steps

    def after_step(self) -> None:
        """Show the buffers, if that is due."""
        stepper = self._session.running
        due = stepper.steps <= SHOWN_EVERY or stepper.steps % SHOWN_EVERY == 0
        if due and self.rest.averaged and not stepper.alone:
            stepper.keep_up(self._show)

    def _show(self) -> None:
        """Let others see the buffers as they are now."""
        resident = self._session.resident
        packet = self.rest.packet(self._weight, resident) if self.rest.averaged else None
        if packet is not None:
            self._shown = packet
            self._session.all_ranks.board.publish(packet, window=BUFFERS)

    def _seen(self, ranks: Iterable[int]) -> list[Tensor]:
        """The buffers of other workers, as they have last shown them."""
        if not self.rest.averaged:
            return []
        own, peek = self._session.rank, self._session.all_ranks.board.peek
        seen = [peek(rank, window=BUFFERS, gone=True) for rank in ranks if rank != own]
        return [packet.x for packet in seen if packet is not None]

    def adopt(self) -> None:
        """Take the buffers of the others; of one that comes again, not its own."""
        strategy = self._session.strategy
        live, first = strategy.live_workers(), strategy.first_workers()[:1]
        self.rest.adopt(self._seen(live) or self._seen(first))

    def fit(self) -> None:
        """Give the model the average of all workers' buffers, as far as they are to be seen."""
        total = self.rest.share(self._weight)
        for packet in self._seen(self._session.strategy.live_workers()):
            total += self.rest.share_of(packet)
        self.rest.fit(total)

    def average(self) -> None:
        """At the end: give the model the average of all workers' buffers."""

        def average(workers: Comm) -> None:
            if workers.size == 1:
                return self.fit()
            total = self.rest.share(self._weight)
            workers.all_reduce(total)
            self.rest.fit(total)

        self._session.strategy.among_live(average, measuring=True)

    # Checkpoints ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {**self.rest.state(), "shown": self._shown.cpu()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state` gave."""
        self.rest.load_state(state)
        self._shown = state["shown"]

    def show_again(self) -> None:
        """Let others see what they saw when the state was saved."""
        self._show_fixed()
        if self._shown.numel():
            self._session.all_ranks.board.publish(self._shown, window=BUFFERS)
