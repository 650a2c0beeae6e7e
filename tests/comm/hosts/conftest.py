"""Ranks of the world of many hosts, all in this process."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from paceline.comm.hosts.journal import Journal
from paceline.comm.hosts.registrar import Registrar
from paceline.comm.hosts.registrar_process import at_descriptor
from paceline.comm.hosts.secret import Secret, new_token
from paceline.comm.hosts.world import HostsPorts
from paceline.comm.hosts.zeromq import ZmqWire
from paceline.comm.limits import Limits

SIZE = 3


class Served(NamedTuple):
    """A registrar in this process, and what who connects to it needs."""

    registrar: Registrar
    address: str
    secret: Secret
    limits: Limits


@pytest.fixture
def served():
    """A registrar of three ranks."""
    limits, secret = Limits(progress_limit_s=20.0), Secret(new_token(), encrypted=False)
    registrar, journal = Registrar(SIZE, SIZE, (), limits.dead_s), Journal.create()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = at_descriptor(registrar, os.dup(listener.fileno()), journal, secret, limits)
        threading.Thread(target=process.run, daemon=True).start()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        yield Served(registrar, address, secret, limits)


@pytest.fixture
def world(served):
    """A registrar and three ranks."""
    registrar, address, secret, limits = served
    with ThreadPoolExecutor() as threads:
        ranks = [
            HostsPorts(address, "127.0.0.1", ZmqWire(secret, limits.dead_s), rank, SIZE, limits)
            for rank in range(SIZE)
        ]
        yield registrar, ranks, threads
        for rank in ranks:
            rank.link.close()
