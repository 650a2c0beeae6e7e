"""How a worker comes to a state that it did not reach by training: it calls ``train`` from its top.

Until the loop reaches the point of the state, the worker only catches up: loaders return one batch
of each completed epoch, and steps are skipped. Then the state is restored, which undoes whatever
the loop did until there: model, optimizer, random generators, and all that was given to
``worker.track``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.common.generators import write_generators
from paceline.training.loader import Position

if TYPE_CHECKING:
    from paceline.training.session import Session


class CatchingUp:
    """One worker on its way to a state.

    Args:
        session: of the worker.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._state: dict[str, Any] = {}
        self._steps_left: int | None = None
        self._then: Callable[[], None] = lambda: None

    def begin(self, state: dict[str, Any], then: Callable[[], None]) -> None:
        """Go to ``state``, what :meth:`Session.own_state` returned; and call ``then`` there."""
        session, places = self._session, [Position(*place) for place in state["loaders"]]
        self._state, self._then = state, then
        if not any(place.under_way for place in places):
            self._steps_left = session.running.steps
            places = [Position() for _ in places]
        session.running.skipping = True
        if session.shares is not None:
            session.shares.load(state["shares"])
        session.go_on_from(places, state["epochs_done"])

    def step_skipped(self) -> None:
        """Count a skipped step; after the last one before the state, restore it."""
        if self._steps_left:
            self._steps_left -= 1
            if self._steps_left == 0:
                self.arrive()

    def arrive(self) -> None:
        """Restore the state, if this worker is on its way to one: from here on all counts."""
        session, state = self._session, self._state
        if not state:
            return
        self._state = {}
        session.running.skipping = False
        session.load_own_state(state)
        if "generators" in state:
            write_generators(state["generators"], session.device)
        self._then()
        session.clock.switch_in()
