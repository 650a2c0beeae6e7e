"""What a message tells besides itself, whatever becomes of the small ones around it."""

from __future__ import annotations

import torch
from support.worlds import on_hosts

from paceline.comm.hosts.link import Topic

REQUEST, REPLY = 1, 2
pytestmark = on_hosts


def test_who_gets_a_request_knows_that_there_is_room_for_the_reply(world):
    _, (server, worker, _), threads = world
    server.link.handlers[Topic.TAKEN] = lambda *message: None  # a cut link holds them up
    like = torch.zeros(20_000)

    def ask():
        for number in range(8):
            assert worker.mail.post(like + number, 0, REQUEST, b"")
            assert worker.mail.receive(like, [0], REPLY, "a reply").x[0] == number

    asked = threads.submit(ask)
    for _ in range(8):
        request = server.mail.receive(like, [1], REQUEST, "a request")
        assert server.mail.post(request.x, 1, REPLY, b""), "there is no room for the reply"
    asked.result()
