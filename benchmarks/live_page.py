"""What the page of a run costs at 64 workers: CPU and memory of its server.

    python benchmarks/live_page.py [--workers 64] [--seconds 30] [--clients 1]

The folder of a run is written here as a launcher writes it: a report of each worker once a second,
and a logged loss of each worker every second. The server reads it and serves clients that read all
they get. Then the cost of the reports themselves is timed: on a worker, and in the launcher.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from paceline.record.folder import RunFolder, claim
from paceline.watch.server import Beside

TICKS = os.sysconf("SC_CLK_TCK")


def write_run(folder: Path, workers: int, ended: threading.Event) -> None:
    """Write a run as its launcher does, until told to end."""
    out = RunFolder(folder)
    out.write_config({"workers": workers, "spec": "gossip", "world": "shared_memory"})
    began_s = time.monotonic()
    while not ended.wait(0.25):
        t = time.monotonic() - began_s
        for rank in range(workers):
            out.progress.note(report(rank, t))
            if int(4 * t) % 4 == 0:
                record = {"rank": rank, "t": t, "step": round(10 * t), "samples": round(80 * t)}
                out.metric({**record, "loss": 1 / (1 + t)})
    out.close()


def report(rank: int, t: float) -> dict[str, object]:
    """A report as a worker makes it."""
    totals = {"steps": round(10 * t), "samples": round(80 * t), "wait_s": t / 10}
    more = {"bytes": round(1e6 * t), "stale_count": round(10 * t), "stale_total": round(30 * t)}
    shown = {"progress": t / 1000, "parameters": [rank + t] * 64}
    return {"rank": rank, "t": t, **totals, **more, **shown}


def read_all(port: int, token: str, ended: threading.Event, sizes: list[int]) -> None:
    """Read the page's events as a browser does."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/events", headers={"Authorization": f"Bearer {token}"})
    reply = connection.getresponse()
    while not ended.is_set() and (line := reply.readline()):
        if len(line) > 1:
            sizes.append(len(line))
    connection.close()


def cpu_s(pid: int) -> float:
    """The CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def serve(workers: int, seconds: float, clients: int) -> dict[str, float]:
    ended, sizes = threading.Event(), list[int]()
    with tempfile.TemporaryDirectory() as folder, claim(folder):
        begin = threading.Thread(target=write_run, args=(Path(folder), workers, ended))
        begin.start()
        page = Beside(Path(folder))
        port, token = re.search(r":(\d+)/#(\S+)", page.url).groups()
        readers = [
            threading.Thread(target=read_all, args=(int(port), token, ended, sizes))
            for _ in range(clients)
        ]
        for reader in readers:
            reader.start()
        time.sleep(5)
        before_s, start_s = cpu_s(page.pid), time.monotonic()
        time.sleep(seconds)
        used = (cpu_s(page.pid) - before_s) / (time.monotonic() - start_s)
        memory = resident_mb(page.pid)
        ended.set()
        for thread in [begin, *readers]:
            thread.join()
        page.close()
    return {
        "workers": workers,
        "clients": clients,
        "core_share": round(used, 4),
        "resident_mb": round(memory, 1),
        "bytes_per_event": max(sizes, default=0),
        "events": len(sizes),
    }


def reports() -> dict[str, float]:
    """Microseconds of CPU to make a report on a worker, and to take one in the launcher."""
    import torch

    from paceline.training.progress import ProgressReport

    stale, x = SimpleNamespace(count=1, total=1), torch.randn(1_000_000)
    replica = SimpleNamespace(flat=SimpleNamespace(x=x))
    session = SimpleNamespace(
        rank=0,
        clock=SimpleNamespace(now=time.monotonic),
        running=SimpleNamespace(alone=False, steps=1, samples=1, replica=replica),
        recorder=SimpleNamespace(meter=SimpleNamespace(wait_s=0.0, bytes_sent=0)),
        strategy=SimpleNamespace(stale=stale),
        epochs=1,
        progress=0.5,
    )
    maker, count = ProgressReport(session), 2000
    start_s = time.process_time()
    for _ in range(count):
        maker.make()
        maker._second = -1
    make_s = (time.process_time() - start_s) / count
    with tempfile.TemporaryDirectory() as folder:
        out, lines = RunFolder(folder), [json.dumps(report(rank, 1.0)) for rank in range(64)]
        start_s = time.process_time()
        for _ in range(20):
            for line in lines:
                out.progress.note(json.loads(line))
            out.progress._write()
        take_s = (time.process_time() - start_s) / 20 / 64
        out.close()
    return {"make_us": round(make_s * 1e6, 1), "take_us": round(take_s * 1e6, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=1)
    chosen = parser.parse_args()
    print(json.dumps(serve(chosen.workers, chosen.seconds, chosen.clients)))
    print(json.dumps(reports()))
