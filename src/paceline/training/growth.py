"""How the workers of a synchronous method take in those who come in mid-run.

A worker that comes waits, before its first batch or step. In every collective of all workers each
member says whether it knows of one that waits. After the step, between two batches, all members
then take in those who wait. The world decides who that is, for all alike. The first of the members
gives its state to them, and the next collective is among all. A newcomer calls ``train`` from its
top and catches up with that state (:mod:`.catching_up`), while the others wait for it in that
collective.

A newcomer that is lost on the way is missed by the next collective, like any member. When the
member that gives its state is lost, the next one does. Nobody is taken in once a member has come
to the end of its data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint.states import pack_state, unpack_state
from paceline.comm.comm import Comm
from paceline.comm.ports import Roster
from paceline.errors import PeerLost

if TYPE_CHECKING:
    from paceline.training.session import Session

_NOTHING = torch.empty(0, dtype=torch.uint8)
LACKS = 1
"""A flag of an all-reduce: this worker has not got the state yet."""


class Growth:
    """One worker's part in it.

    Args:
        session: of the worker.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._comm = session, session.all_ranks
        self._put_off = False

    @cached_property
    def _workers(self) -> Comm:
        return self._comm.group(range(self._session.size))

    @cached_property
    def _measuring(self) -> Comm:
        return self._comm.group(range(self._session.size), metered=False)

    # A member ------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Take in those who wait, if all members know that somebody does."""
        session = self._session
        number = None if session.running.alone else session.strategy.to_take_in()
        self._comm.someone_waits = False
        if number is None or not self._are_together():
            return
        roster = session.ports.members.roster(number, take_in=True)
        if roster is not None and roster.joined:
            session.running.settle()
            self._hand_over(roster)
            session.strategy.grown()
            session.clock.switch_in()

    def _are_together(self) -> bool:
        """Whether all members are at the same place in the data that they divide."""
        places = [
            (loader.epoch, loader.division.used, int(loader.under_way))
            for loader in self._session.loaders.values()
            if loader.division is not None
        ]
        numbers = torch.tensor(places, dtype=torch.int64).reshape(-1)
        sums = torch.cat([numbers, numbers.square()])
        count = self._measuring.all_reduce(sums).weight
        totals, squares = sums.chunk(2)
        return bool((count * squares == totals.square()).all())

    def _state(self) -> torch.Tensor:
        """What a newcomer needs, as bytes."""
        session = self._session
        checkpointing = session.checkpointing
        state = {
            **session.own_state(),
            "strategy": session.strategy.state_dict(),
            "steps": session.running.steps,
            "answered": 0 if checkpointing is None else checkpointing.agreement.answered,
        }
        return torch.frombuffer(bytearray(pack_state(state)), dtype=torch.uint8)

    # A newcomer ----------------------------------------------------------------------------------

    def put_off(self) -> None:
        """Do not wait yet: what ``train`` does before its first batch or step need not wait."""
        self._put_off = True
        self._session.running.skipping = True

    def enter(self) -> None:
        """Wait until the others have taken this worker in, and begin to catch up with them."""
        if not self._put_off:
            return
        self._put_off = False
        session, members = self._session, self._session.ports.members
        x = session.running.replica.flat.x
        roster = session.join(lambda _: members.wait_to_be_taken_in(session.size), x)
        content = self._hand_over(roster)
        self._take_up(unpack_state(content.numpy().tobytes()))
        session.clock.switch_in()

    def _take_up(self, state: dict[str, Any]) -> None:
        session = self._session
        session.running.steps = state["steps"]
        self._comm.collectives_done = state["collectives_done"]
        session.strategy.load_state_dict(state["strategy"])
        if session.checkpointing is not None:
            session.checkpointing.agreement.answered = state["answered"]
            session.checkpointing.agreement.looked_at = state["steps"]
        session.catching.begin(state, self._arrive)

    def _arrive(self) -> None:
        """Begin to train, in the state of a member."""
        session = self._session
        session.buffers.take_fixed()
        session.buffers.adopt()
        with session.running.replica.flat.lent() as x:
            session.strategy.join(x)
        session.strategy.grown()
        session.tell("joined")

    # Both ----------------------------------------------------------------------------------------

    def _hand_over(self, roster: Roster) -> torch.Tensor:
        """Give the state to those who have joined; again, until all who are left have it."""
        self._comm.admit(roster.members)
        here, own = [rank for rank, _ in roster.members], self._session.rank
        state = None if own in roster.joined else _NOTHING
        while True:
            members = [r for r in here if r < self._session.size and r not in roster.joined]
            if not members:
                raise PeerLost([*here], "joining", "nobody who has a state is left", 0.0)
            takers = [rank for rank in here if rank in roster.joined]
            if own == members[0]:
                self._broadcast([own, *takers], self._state())
            elif own in takers:
                state = self._broadcast([members[0], *takers], None)
            total = self._workers.all_reduce(torch.empty(0), flags=LACKS * (state is None))
            if state is not None and not total.flags & LACKS:
                return state
            here = [*self._workers.present]

    def _broadcast(self, ranks: Sequence[int], state: torch.Tensor | None) -> torch.Tensor | None:
        """The state of the first of these ranks; None if one of them is lost on the way."""
        group = self._comm.group(ranks, strict=True)
        size = torch.tensor([0 if state is None else len(state)])
        try:
            group.broadcast(size)
            if group.rank:
                state = torch.empty(int(size), dtype=torch.uint8)
            assert state is not None
            group.broadcast(state)
        except PeerLost:
            return None
        return state
