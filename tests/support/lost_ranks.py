"""Runs of another launcher that lose a rank: ``python -m support.lost_ranks SCENARIOS``.

A scenario names a method, the rank that stops or kills itself, and when. All scenarios run at the
same time, each in processes that end like a user's script. Prints the exit code and the output of
each rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paceline as pl
import paceline.launcher.init
from paceline.comm.torch_distributed import peers, world  # noqa: F401 - for ranks, before the fork
from support.runs import free_port, set_up, step

RANKS, STEPS, WAIT_S = 3, 60, 90.0


def play(scenario: Mapping[str, Any], rank: int, port: int, log: Path) -> None:
    """Run the script of a rank."""
    fd = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_PORT": str(port)}
    if scenario.get("hosts"):
        peers._host = lambda: f"host{rank}"
    strike(scenario, rank, "before")
    init_process_group = dist.init_process_group

    def init_after_strike(*args: Any, **options: Any) -> None:
        strike(scenario, rank, "meeting")
        init_process_group(*args, **options)

    dist.init_process_group = init_after_strike
    with pl.init(strategy=scenario["strategy"], limits=pl.Limits(**scenario["limits"])) as worker:
        strike(scenario, rank, "start")
        net, sgd = set_up(worker)
        for number in range(STEPS):
            if number == 3:
                strike(scenario, rank, "middle")
            step(net, sgd)
            time.sleep(0.01)
        strike(scenario, rank, "end")


def strike(scenario: Mapping[str, Any], rank: int, when: str) -> None:
    if (rank, when) == (scenario["rank"], scenario["when"]):
        os.kill(os.getpid(), signal.SIGKILL if scenario["how"] == "kill" else signal.SIGSTOP)


def watch(pids: list[int], spared: int) -> list[int | None]:
    """The exit codes of all ranks but ``spared``; None for a rank that does not end."""
    codes: dict[int, int] = {}
    until_s = time.monotonic() + WAIT_S
    while len(codes) < len(pids) - 1 and time.monotonic() < until_s:
        for rank, pid in enumerate(pids):
            if rank not in codes and rank != spared:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for rank, pid in enumerate(pids):
        if rank not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(rank) for rank in range(len(pids))]


def main(folder: Path) -> None:
    scenarios = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)]).zero_grad()
    started: list[list[int]] = []
    for number, scenario in enumerate(scenarios):
        started.append([])
        port = free_port()
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                play(scenario, rank, port, folder / f"{number}.{rank}")
                return
            started[-1].append(pid)
    outcomes = []
    for number, (scenario, pids) in enumerate(zip(scenarios, started, strict=True)):
        codes = watch(pids, scenario["rank"])
        logs = [(folder / f"{number}.{rank}").read_text() for rank in range(RANKS)]
        outcomes.append({"codes": codes, "logs": logs})
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(tempfile.mkdtemp()))
