"""A rank of ``paceline bench hosts``, on one of the hosts that the benchmark has made.

    python -m paceline.lab.bench.host_rank CONFIG

Each rank has three engines side by side: Paceline with encryption, Paceline without it, and gloo.
It prints when each transfer began and ended here, as one JSON object. All hosts are on one machine
and have one clock.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.comm import Comm
from paceline.comm.hosts.journal import Journal
from paceline.comm.hosts.registrar_process import keep_roll
from paceline.comm.hosts.secret import Secret
from paceline.comm.hosts.world import HostsPorts
from paceline.comm.hosts.zeromq import ZmqWire
from paceline.comm.limits import Limits
from paceline.comm.torch_distributed.connect import open_store
from paceline.lab.bench.hosts import REGISTRAR_PORTS

SMALL_BYTES = 64
STORE_PORT = 7003
WARM_BYTES = 8 << 20
"""How much passes before a transfer is timed: until then TCP does not know the line."""

Span = tuple[float, float]


class PacelineEngine:
    """Messages and collectives over ``transport="hosts"``."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        secret = Secret(bytes.fromhex(config["token"]), name == "paceline")
        address = f"tcp://{config['first']}:{REGISTRAR_PORTS[name]}"
        rank, size, limits = config["rank"], config["size"], Limits()
        wire = ZmqWire(secret, limits.dead_s)
        self._ports = HostsPorts(address, config["own"], wire, rank, size, limits)
        self._comm = Comm(self._ports)

    def send(self, x: Tensor) -> None:
        """Send from rank 0 to rank 1."""
        self._ports.mail.start_send(x, 1, 0, b"").wait()

    def receive(self, x: Tensor) -> None:
        """Receive from rank 0."""
        self._comm.receive(x, 0)

    def send_both(self, large: Tensor, small: Tensor) -> None:
        """Send a small message right behind a large one."""
        offers = [
            self._ports.mail.start_send(x, 1, tag, b"") for tag, x in enumerate((large, small))
        ]
        for offer in offers:
            offer.wait()

    def receive_both(self, large: Tensor, small: Tensor) -> float:
        """Receive both; return when the small one was there."""
        self._comm.receive(small, 0, tag=1)
        came_s = time.monotonic()
        self._comm.receive(large, 0)
        return came_s

    def all_reduce(self, x: Tensor) -> None:
        """Sum over all ranks."""
        self._comm.all_reduce(x)

    def close(self) -> None:
        """Leave the others."""
        self._ports.close()


class GlooEngine:
    """The same over torch.distributed, with gloo."""

    def __init__(self, config: dict[str, Any]) -> None:
        rank, size = config["rank"], config["size"]
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        store = open_store(config["first"], STORE_PORT, rank, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def send(self, x: Tensor) -> None:
        """Send from rank 0 to rank 1."""
        dist.send(x, 1)

    def receive(self, x: Tensor) -> None:
        """Receive from rank 0."""
        dist.recv(x, 0)

    def send_both(self, large: Tensor, small: Tensor) -> None:
        """Send a small message right behind a large one."""
        for work in [dist.isend(x, 1, tag=tag) for tag, x in enumerate((large, small))]:
            assert work is not None
            work.wait()

    def receive_both(self, large: Tensor, small: Tensor) -> float:
        """Receive both; return when the small one was there."""
        works = [dist.irecv(x, 0, tag=tag) for tag, x in enumerate((large, small))]
        assert works[0] is not None and works[1] is not None
        works[1].wait()
        came_s = time.monotonic()
        works[0].wait()
        return came_s

    def all_reduce(self, x: Tensor) -> None:
        """Sum over all ranks."""
        dist.all_reduce(x)

    def close(self) -> None:
        """Leave the others."""
        dist.destroy_process_group()


Engine = PacelineEngine | GlooEngine


def time_case(engine: Engine, rank: int, what: str, nbytes: int) -> Span:
    """Do it once; return when it began and ended here."""
    x = torch.full((nbytes // 4,), rank + 1.0)
    if what == "all_reduce":
        return _between(lambda: engine.all_reduce(x))
    if what == "send":
        return _between(lambda: engine.receive(x) if rank else engine.send(x))
    small, began_s = torch.zeros(SMALL_BYTES // 4), time.monotonic()
    if rank == 0:
        engine.send_both(x, small)
        return began_s, time.monotonic()
    return began_s, engine.receive_both(x, small)


def _between(action: Callable[[], None]) -> Span:
    began_s = time.monotonic()
    action()
    return began_s, time.monotonic()


def check(engine: Engine, rank: int, size: int) -> None:
    """Refuse to time an engine that sums wrongly."""
    x = torch.full((1 << 18,), rank + 1.0)
    engine.all_reduce(x)
    expected = size * (size + 1) / 2
    assert bool((x == expected).all()), f"all-reduce gave {x}, expected {expected}"


def run_cases(config: dict[str, Any]) -> dict[str, dict[str, list[Span]]]:
    """Time each case with each engine in turn: when it began and ended, by case and engine."""
    rank = config["rank"]
    engines: dict[str, Engine] = {name: PacelineEngine(config, name) for name in REGISTRAR_PORTS}
    engines["gloo"] = GlooEngine(config)
    for engine in engines.values():
        check(engine, rank, config["size"])
    spans: dict[str, dict[str, list[Span]]] = {}
    for what, nbytes in config["cases"]:
        found = spans[f"{what} {nbytes}"] = {name: [] for name in engines}
        for _ in range(config["repeats"]):
            for name, engine in engines.items():
                dist.barrier()
                for _ in range(0 if what == "small" else WARM_BYTES // max(nbytes, 1 << 21)):
                    time_case(engine, rank, what, nbytes)
                found[name].append(time_case(engine, rank, what, nbytes))
    for engine in engines.values():
        engine.close()
    return spans


def keep_registrar(config: dict[str, Any]) -> None:
    """Be the registrar of one of the engines."""
    name, size = config["registrar"], config["size"]
    listener = socket.create_server((config["first"], REGISTRAR_PORTS[name]))
    print("ready", flush=True)
    keep_roll(
        listener.fileno(),
        Journal.create(),
        bytes.fromhex(config["token"]),
        name == "paceline",
        size=size,
        workers=size,
        late=(),
        limits=Limits(),
    )


def main() -> None:
    """Do what the command line says."""
    config = json.loads(sys.argv[1])
    if "registrar" in config:
        keep_registrar(config)
    else:
        print(json.dumps(run_cases(config)))


if __name__ == "__main__":
    main()
