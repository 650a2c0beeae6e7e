"""A gloo group for the peers that are measured, among ranks that have their own transport."""

from __future__ import annotations

import socket

import torch.distributed as dist

from paceline.comm.base import Comm
from paceline.comm.torch_distributed.transport import open_store


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def join_gloo(comm: Comm, port: int) -> None:
    """Make torch's default group of all ranks, on the loopback."""
    if comm.rank == 0:
        store = open_store("127.0.0.1", port, 0, comm.size)
    comm.barrier()
    if comm.rank != 0:
        store = open_store("127.0.0.1", port, comm.rank, comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
