"""Rendezvous over many hosts: the registrar decides whether all have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.comm.hosts.link import RankLink
from paceline.comm.hosts.mail import HostsMail
from paceline.comm.liveness import TICK_S
from paceline.comm.ports import PUBLISHED, SAVED, Call, Rendezvous


class HostsRendezvous(Rendezvous):
    """One rank's part in them."""

    def __init__(self, link: RankLink, mail: HostsMail) -> None:
        self._link, self._mail = link, mail

    def call(self, known: int, step: int, stop: bool, over: int) -> None:
        self._link.order("call_all", known, step, stop, over)

    def last_call(self) -> Call:
        return self._link.check().call

    def meet(self, number: int, members: Sequence[int], incarnations: Sequence[int]) -> bool:
        """Wait for all; what they have sent has arrived by then."""
        self._link.flush()
        self._link.order("meet", number, [*members], [*incarnations])
        watch = self._link.watch("a rendezvous")
        with self._link.changed:
            while number not in self._link.check().outcomes:
                self._link.changed.wait(TICK_S)
                watch.check_limits(members)
            return bool(self._link.check().outcomes[number])

    # What a checkpoint holds ---------------------------------------------------------------------

    def snapshot(self, without: Sequence[int] | None) -> dict[str, Any]:
        state: dict[str, Any] = {
            "mail": self._mail.waiting(),
            "window": self._window(PUBLISHED),
            "kept": self._window(SAVED),
            "in_hand": self._link.order("in_hand"),
        }
        if without is not None:
            state |= self._link.order("snapshot", [*without])
        return state

    def _window(self, window: int) -> tuple[Tensor, str, bool] | None:
        """As on one host, where a window may lie on a device: a run can go on in either world."""
        seen = self._mail.peek(self._link.rank, None, window, gone=True)
        return None if seen is None else (seen.x, seen.header.hex(), False)

    def restore(self, state: dict[str, Any]) -> None:
        """Only on a rank that has done nothing yet."""
        self._mail.restored = [*state["mail"]]
        for name, window in (("window", PUBLISHED), ("kept", SAVED)):
            if state[name] is not None:
                x, header, _ = state[name]
                self._mail.publish(x, bytes.fromhex(header), window)
        shared = {name: state[name] for name in ("queues", "call") if name in state}
        self._link.order("restore", state["in_hand"], shared or None)
