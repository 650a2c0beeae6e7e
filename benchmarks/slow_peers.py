"""Local SGD of torchft and of hivemind, for benchmarks/slow_training.py.

Each is a context manager that prepares the model of one worker, gives the optimizer to step with,
and ends what it has started. The workers have joined a run over gloo before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.lab.tasks.recipe import batch_of
from paceline.launcher.agent import own_address
from paceline.training.worker import Worker

PATIENCE = timedelta(seconds=120)
MATCHMAKING_S, REQUEST_S = 1.0, 0.5
"""How long a peer of hivemind looks for others, and waits for the answer of one. Its authors advise
3 s and more; the shorter, the better for workers that make hundreds of steps a second."""


def _beside_rank_0() -> tuple[str, int]:
    """The address for what rank 0 starts beside itself."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1


@contextmanager
def torchft_local_sgd(
    worker: Worker, net: nn.Module, optimizer: Optimizer, interval: int
) -> Iterator[Optimizer]:
    """Torchft's LocalSGD: one replica group for each worker, over gloo."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import LocalSGD

    address, port = _beside_rank_0()
    lighthouse = None
    if worker.rank == 0:
        lighthouse = LighthouseServer(bind=f"{address}:{port}", min_replicas=worker.size)
    worker.comm.barrier()
    here = own_address(address, port)
    store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=worker.size,
        use_async_quorum=False,  # LocalSGD needs it
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=f"http://{address}:{port}",
        replica_id=f"worker{worker.rank}",
        hostname=here,
        init_sync=False,  # all begin with the same model
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
    )
    try:
        with LocalSGD(manager, net, optimizer, sync_every=interval):
            yield optimizer
        worker.comm.barrier()
    finally:
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


@contextmanager
def hivemind_local_sgd(
    worker: Worker, net: nn.Module, optimizer: Optimizer, interval: int
) -> Iterator[Any]:
    """Hivemind's optimizer with local updates: peers average every ``interval`` steps of all."""
    import hivemind

    address, port = _beside_rank_0()
    store = dist.TCPStore(address, port, is_master=worker.rank == 0, wait_for_workers=False)
    peers = [] if worker.rank == 0 else [store.get("peer").decode()]
    listen = f"/ip4/{own_address(address, port)}/tcp/0"
    dht = hivemind.DHT(host_maddrs=[listen], initial_peers=peers, start=True)
    if worker.rank == 0:
        store.set("peer", str(dht.get_visible_maddrs()[0]))
    batch = batch_of(worker.size)
    paced = hivemind.Optimizer(
        dht=dht,
        run_id="slow",
        target_batch_size=interval * batch * worker.size,
        batch_size_per_step=batch,
        optimizer=optimizer,
        use_local_updates=True,
        delay_state_averaging=False,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=PATIENCE.total_seconds(),
        averager_opts={"request_timeout": REQUEST_S, "target_group_size": worker.size},
    )
    try:
        worker.comm.barrier()
        yield paced
        worker.comm.barrier()
    finally:
        paced.shutdown()
        dht.shutdown()
