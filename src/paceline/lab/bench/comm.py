"""``paceline bench comm``: averaging a vector among processes of one host.

Every repeat times each engine in turn, in the same processes, so that a slow moment of the machine
affects all of them. The time of a repeat is that of its slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.comm import Comm
from paceline.comm.ports import Ports
from paceline.common.reference import refer_to
from paceline.lab.bench.device import finish, shared
from paceline.lab.bench.gloo import free_port, join_gloo
from paceline.launcher.rank_process import Channel
from paceline.launcher.supervisor import run_ranks

SIZES = (4 << 10, 4 << 20, 64 << 20)


def bench_comm(workers: int, sizes: list[int], repeats: int, device: str) -> list[dict[str, Any]]:
    """Time shared memory, gloo and a plain copy; one row for each engine and size.

    The vectors are in the host's memory, or on one GPU that all ranks share.
    """
    argument = {"sizes": sizes, "repeats": repeats, "port": free_port(), "device": device}
    ranks = run_ranks(refer_to(time_engines), [argument] * workers, device=shared(device))
    return _rows(ranks, workers, sizes)


def time_engines(ports: Ports, channel: Channel, argument: dict[str, Any]) -> Any:
    """Time each engine on one rank: the seconds of each repeat, by size and engine."""
    comm = Comm(ports)
    join_gloo(comm, argument["port"])
    device = torch.device(argument["device"])
    times: dict[str, dict[str, list[float]]] = {}
    for nbytes in argument["sizes"]:
        engines = _engines(comm, ports, torch.empty(nbytes // 4, device=device))
        seconds = times[str(nbytes)] = {name: [] for name in engines}
        calls = _calls(nbytes)
        for repeat in range(argument["repeats"] + 1):
            for name, run in engines.items():
                comm.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    run()
                finish(device)
                if repeat:
                    seconds[name].append((time.perf_counter() - start) / calls)
    dist.destroy_process_group()
    return times


def _calls(nbytes: int) -> int:
    """How many calls make one repeat: enough that the first call does not dominate."""
    return max(2, min(20, (80 << 20) // nbytes))


def _engines(comm: Comm, ports: Ports, like: Tensor) -> dict[str, Callable[[], object]]:
    shared = ports.collectives.allocate(like.numel(), like)
    other, copied = torch.zeros_like(like), torch.zeros_like(like)
    _check(comm, shared.fill_(comm.rank + 1))
    shared.zero_()
    return {
        "shared_memory": lambda: comm.all_reduce(shared),
        "gloo": lambda: dist.all_reduce(other),
        "memory_copy": lambda: copied.copy_(other),
    }


def _check(comm: Comm, x: Tensor) -> None:
    comm.all_reduce(x)
    expected = comm.size * (comm.size + 1) / 2
    assert bool((x == expected).all()), f"all-reduce gave {x}, expected {expected}"


def _rows(reports: list[Any], workers: int, sizes: list[int]) -> list[dict[str, Any]]:
    rows = []
    for nbytes in sizes:
        ranks = [report[str(nbytes)] for report in reports]
        slowest = {
            engine: [max(times) for times in zip(*(rank[engine] for rank in ranks), strict=True)]
            for engine in ranks[0]
        }
        gloo, copy = slowest["gloo"], slowest["memory_copy"]
        for engine, seconds in slowest.items():
            rows.append(
                {
                    "op": "all_reduce" if engine != "memory_copy" else "copy",
                    "engine": engine,
                    "workers": workers,
                    "bytes": nbytes,
                    "ms": statistics.median(seconds) * 1e3,
                    "ratio_to_gloo": statistics.median(seconds) / statistics.median(gloo),
                    "ratio_to_copy": statistics.median(seconds) / statistics.median(copy),
                }
            )
    return rows
