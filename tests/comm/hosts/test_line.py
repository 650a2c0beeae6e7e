"""Messages of agents and launcher, over a link that is cut and comes again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.comm.hosts import line as module
from paceline.comm.hosts.line import JsonLine


class Link:
    """Two lines, and the frames on their way; what is sent while it is cut is lost."""

    def __init__(self, monkeypatch):
        self.now_s, self.is_cut, self.frames = 0.0, False, []
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.ends = [JsonLine(self.sender(1)), JsonLine(self.sender(0))]

    def sender(self, to):
        def send(frames):
            if not self.is_cut:
                self.frames.append((to, frames))
            return True

        return send

    def deliver(self):
        """Deliver all frames; return the messages that have come, by their receiver."""
        come = ([], [])
        while self.frames:
            to, frames = self.frames.pop(0)
            come[to].extend(self.ends[to].take(frames))
        return come

    def pass_time(self, seconds):
        """Let both ends look four times a second, and return what comes last."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.25
            for end in self.ends:
                end.look()
            come = self.deliver()
        return come


@pytest.fixture
def link(monkeypatch):
    return Link(monkeypatch)


def test_messages_come_once_and_in_order(link):
    for number in range(3):
        link.ends[0].put({"number": number})
    assert link.deliver() == ([], [{"number": 0}, {"number": 1}, {"number": 2}])
    assert all(end.is_idle for end in link.ends)


def test_what_was_lost_in_a_cut_comes_as_soon_as_the_other_end_is_heard_again(link):
    """Not after a time-out, which doubles while the link is cut."""
    link.pass_time(1.0)
    link.is_cut = True
    link.ends[0].put({"kill": 2})
    link.pass_time(11.0)
    link.is_cut = False
    assert link.pass_time(0.25) == ([], [{"kill": 2}])
    assert link.pass_time(60.0) == ([], []) and link.ends[0].is_idle
