"""What the launcher knows of another host."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from paceline.comm.limits import Limits
from paceline.launcher.agents import OtherHost


def test_what_an_earlier_process_of_a_rank_said_is_not_taken_for_that_of_a_later_one():
    """The rank has been on another host meanwhile, and nobody asked this one."""
    agents = SimpleNamespace(lock=threading.RLock(), limits=Limits())
    line = SimpleNamespace(put=lambda message: None)
    host = OtherHost(agents, line, {"address": "10.0.0.2", "slots": None}, None)
    host.start(2, {"started_s": 0.0})
    host.hear({"rank": 2, "times": 1, "said": {"kind": "error"}})
    host.hear({"rank": 2, "times": 1, "ended": 1})
    host.start(2, {"started_s": 0.0})
    assert [*host.messages(2)] == [] and host.code_of(2) is None
    host.hear({"rank": 2, "times": 1, "said": {"kind": "error"}})
    host.hear({"rank": 2, "times": 2, "said": {"kind": "entered"}})
    assert [*host.messages(2)] == [{"kind": "entered"}]
