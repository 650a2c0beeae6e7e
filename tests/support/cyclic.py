"""Cyclic methods whose servers a test watches."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.strategies.cyclic import Cyclic, MoveServer, TurnServer


def cyclic_with(watched: type) -> type[Cyclic]:
    """Cyclic whose servers, of either form, have ``watched`` mixed in."""

    class WatchedMoveServer(watched, MoveServer):
        pass

    class WatchedTurnServer(watched, TurnServer):
        pass

    @dataclass(kw_only=True)
    class WatchedCyclic(Cyclic):
        def make_server(self):
            return WatchedMoveServer(self) if self.moves else WatchedTurnServer(self)

    return WatchedCyclic
