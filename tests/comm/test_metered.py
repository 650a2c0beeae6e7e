"""Ports under the meter behave as the world's own."""

from __future__ import annotations

from paceline.comm.metered import MeteredPorts
from paceline.comm.solo import solo_ports
from paceline.errors import PeerLost


def test_the_meter_asks_the_world_which_loss_was_the_first(monkeypatch):
    ports, ended = solo_ports(), []
    first, later = PeerLost(2, "the run", "it died", 0.0), PeerLost(1, "send", "it is gone", 0.0)
    monkeypatch.setattr(ports, "first_loss", lambda error: first if error is later else error)
    monkeypatch.setattr(ports, "give_up", lambda: ended.append(True))
    metered = MeteredPorts(ports)
    assert metered.first_loss(later) is first
    metered.give_up()
    assert ended == [True]
