"""A rank that the registrar refuses is told so; one that is early waits."""

from __future__ import annotations

import socket
import threading

import pytest
from support.worlds import on_hosts

from paceline.comm.hosts.refusals import await_admission
from paceline.comm.hosts.secret import Secret, new_token
from paceline.comm.limits import Limits
from paceline.errors import UsageError

pytestmark = on_hosts
REFUSED = r"what listens at tcp://127.0.0.1:\d+ refuses this rank: .* has another token"


def test_a_rank_of_the_run_is_admitted(served):
    await_admission(served.address, served.secret, served.limits)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_rank_with_another_token_is_told_so(served, encrypted):
    with pytest.raises(UsageError, match=REFUSED):
        await_admission(served.address, Secret(new_token(), encrypted), served.limits)


def test_a_rank_that_meets_another_program_is_told_so(served):
    def answer(listener):
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UsageError, match=REFUSED):
            await_admission(address, served.secret, served.limits)
        listener.shutdown(socket.SHUT_RDWR)


def test_a_rank_waits_for_a_registrar_that_is_not_there_yet(served, capfd):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    await_admission(address, served.secret, Limits(start_s=0.5, notice_s=0.1))
    assert f"still waiting in the start for the registrar at {address}" in capfd.readouterr().err
