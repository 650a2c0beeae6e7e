"""Train over three hosts for half an hour, with a random fault every 20 s.

    python benchmarks/soak_hosts.py [--minutes 30] [--every 20] [--strategy gossip] [--seed 0]

The hosts are namespaces on this machine, with two workers each. A fault is drawn at random: a
worker is killed, a worker is stopped for some seconds, the link of a host is cut for some seconds,
or all processes of a host are killed and it joins anew. The run must end with exit code 0 on all
hosts, and every batch must have been trained on, or be counted as lost. The script prints each
fault, and in the end what the launcher and the registrar held: memory and open descriptors, early
and late in the run. The exit code is 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from paceline.lab.drill.over_hosts import HostsRun
from paceline.lab.drill.scenario import Scenario, Strike
from paceline.lab.network.hosts import HostNetwork
from paceline.record.folder import TRACE
from paceline.record.trace import read

HOSTS = 3
LASTS_S = (1.0, 12.0)
"""How long a stop or a cut lasts: shorter or longer than ``dead_s``."""
QUIET_S = 90.0
"""No fault comes so shortly before the end: on a busy machine a host takes long to join anew."""
GROWTH = 1.2
"""Memory and descriptors may grow by this factor from the second quarter of a run to the last."""


class Held(NamedTuple):
    """What a process holds."""

    mib: float
    descriptors: int


def main() -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to train")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--strategy", default="gossip", help="an asynchronous method")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and the run")
    options = parser.parse_args()
    seconds = 60 * options.minutes
    scenario = Scenario(about="", ids=(), kind="hosts", epochs=1, max_restarts=10**6)
    with (
        TemporaryDirectory(prefix="paceline-soak-") as folder,
        HostNetwork(HOSTS) as network,
    ):
        run = HostsRun(network, scenario, options.strategy, options.seed, Path(folder), seconds)
        run.start(range(HOSTS))
        run.await_steps()
        samples = harm(network, run, seconds, options.every, Random(options.seed))
        network.heal()
        run.finish()
        wrong = [*judge(run), *grown(samples)]
    for text in wrong:
        print(f"WRONG: {text}")
    return 1 if wrong else 0


def harm(
    network: HostNetwork, run: HostsRun, seconds: float, every_s: float, random: Random
) -> list[Mapping[str, Held]]:
    """Inject faults until shortly before the end; return what the processes held meanwhile."""
    began_s, samples = time.monotonic(), []
    last_s = seconds - max(QUIET_S, every_s + LASTS_S[1])
    while (now_s := time.monotonic() - began_s) < last_s and not run.is_over:
        samples.append({name: held(pid) for name, pid in lasting(network)})
        kind, host = random.choice((kill, stop, cut, join)), random.randrange(1, HOSTS)
        text = kind(network, run, host, random)
        print(f"{now_s:7.1f} s  {text}", flush=True)
        time.sleep(max(0.0, began_s + now_s + every_s - time.monotonic()))
    return samples


# Faults ------------------------------------------------------------------------------------------


def processes(network: HostNetwork, host: int) -> Iterator[tuple[str, int]]:
    """The names and pids of the processes of a host."""
    for pid in network.pids(host):
        with suppress(OSError):
            yield Path(f"/proc/{pid}/comm").read_text().strip(), pid


def a_worker(network: HostNetwork, host: int, random: Random) -> tuple[str, int] | None:
    found = [each for each in processes(network, host) if each[0].startswith("pl-rank-")]
    return random.choice(sorted(found)) if found else None


def kill(network: HostNetwork, run: HostsRun, host: int, random: Random) -> str:
    """Kill a worker."""
    if (worker := a_worker(network, host, random)) is None:
        return f"host {host} has no worker to kill"
    with suppress(ProcessLookupError):
        os.kill(worker[1], signal.SIGKILL)
    return f"killed {worker[0]} on host {host}"


def stop(network: HostNetwork, run: HostsRun, host: int, random: Random) -> str:
    """Stop a worker for a while."""
    if (worker := a_worker(network, host, random)) is None:
        return f"host {host} has no worker to stop"
    seconds = random.uniform(*LASTS_S)
    with suppress(ProcessLookupError):
        os.kill(worker[1], signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(worker[1], signal.SIGCONT)
    return f"stopped {worker[0]} on host {host} for {seconds:.1f} s"


def cut(network: HostNetwork, run: HostsRun, host: int, random: Random) -> str:
    """Cut the link of a host for a while."""
    seconds = random.uniform(*LASTS_S)
    network.cut(host)
    time.sleep(seconds)
    network.mend(host)
    return f"cut host {host} off for {seconds:.1f} s"


def join(network: HostNetwork, run: HostsRun, host: int, random: Random) -> str:
    """Kill all processes of a host, and let it join anew."""
    run.strike(Strike(what="kill_processes", host=host))
    run.strike(Strike(what="join", host=host))
    return f"killed all processes of host {host}, which joined anew"


# What is wrong -----------------------------------------------------------------------------------


def judge(run: HostsRun) -> Iterator[str]:
    """What is wrong with the end of the run."""
    yield from run.failures()
    result = run.result()
    if result is None:
        yield f"it has no result: {run.last_words(0)}"
        return
    events: dict[str, int] = {}
    for event in result.events:
        events[event["event"]] = events.get(event["event"], 0) + 1
    print(f"accuracy {result.accuracy}; {result.steps} steps of the last processes; {events}")
    drawn, used = batches(read(run.out / TRACE))
    print(f"{len(drawn)} batches drawn, {len(drawn - used)} of them not trained on")
    if len(drawn - used) > result.lost_batches:
        yield f"{len(drawn - used)} batches were not trained on, {result.lost_batches} are counted"
    last = max(epoch for epoch, _ in drawn)
    whole = {index for epoch, index in drawn if epoch == 0}
    for epoch in range(last):
        if missing := whole - {index for e, index in drawn if e == epoch}:
            yield f"nobody drew the batches {sorted(missing)} of epoch {epoch}"


def batches(trace: Iterator[dict[str, Any]]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """The batches that were drawn, and those that a worker made a step with."""
    drawn, used, in_hand = set(), set(), {}
    for record in trace:
        rank = record["rank"]
        if record["event"] == "batch":
            in_hand[rank] = record["epoch"], record["index"]
            drawn.add(in_hand[rank])
        elif record["event"] == "step" and rank in in_hand:
            used.add(in_hand.pop(rank))
    return drawn, used


def lasting(network: HostNetwork) -> Iterator[tuple[str, int]]:
    """The processes that last as long as the run: the launcher, and the registrar."""
    for name, pid in processes(network, 0):
        line = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if name == "pl-registrar":
            yield name, pid
        elif "paceline.lab.drill.host_process" in line:
            yield "launcher", pid


def held(pid: int) -> Held:
    """The resident memory and the open descriptors of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = int(status.partition("VmRSS:")[2].split()[0])
    return Held(kib / 1024, len(os.listdir(f"/proc/{pid}/fd")))


def grown(samples: list[Mapping[str, Held]]) -> Iterator[str]:
    """The processes that hold more in the last quarter of the run than in the second."""
    quarter = len(samples) // 4
    if quarter == 0:
        return
    for name in ("launcher", "pl-registrar"):
        early, late = (
            [
                statistics.median(values)
                for values in zip(*(s[name] for s in part if name in s), strict=True)
            ]
            for part in (samples[quarter : 2 * quarter], samples[-quarter:])
        )
        print(
            f"{name}: {early[0]:.0f} MiB and {early[1]:.0f} descriptors,"
            f" in the end {late[0]:.0f} MiB and {late[1]:.0f}"
        )
        for what, before, after in zip(("memory", "descriptors"), early, late, strict=True):
            if after > GROWTH * before:
                yield f"the {what} of the {name} grew from {before:.0f} to {after:.0f}"


if __name__ == "__main__":
    sys.exit(main())
