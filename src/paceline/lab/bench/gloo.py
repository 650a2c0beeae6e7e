"""A gloo group for torch's own engines, among ranks that also have a transport of Paceline."""

from __future__ import annotations

import socket

import torch.distributed as dist

from paceline.comm.comm import Comm
from paceline.comm.torch_distributed.connect import open_store


def free_port() -> int:
    """A free port on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def join_gloo(comm: Comm, port: int) -> None:
    """Make all ranks torch's default process group, over the loopback interface."""
    if comm.rank == 0:
        store = open_store("127.0.0.1", port, 0, comm.size)
    comm.barrier()
    if comm.rank != 0:
        store = open_store("127.0.0.1", port, comm.rank, comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
