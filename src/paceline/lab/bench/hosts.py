"""``paceline bench hosts``: what ranks on several hosts get out of the lines between them.

The hosts are namespaces of this machine, see :mod:`paceline.lab.network.hosts`. Every repeat times
each engine in turn, in the same processes.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
from typing import Any, NamedTuple

from paceline.errors import PacelineError
from paceline.lab.network.hosts import HostNetwork

MB = 1 << 20
REGISTRAR_PORTS = {"paceline": 7001, "paceline, not encrypted": 7002}
"""Two of the engines, and where the registrar of each listens on the first host."""
_RANK = (sys.executable, "-m", "paceline.lab.bench.host_rank")


class Line(NamedTuple):
    """A kind of network.

    Attributes:
        rate_mbit: of each host's cable.
        delay_ms: from host to host.
    """

    rate_mbit: float
    delay_ms: float = 0.0


class Session(NamedTuple):
    """Cases that the same ranks do, one after the other.

    Attributes:
        link: a name of ``LINKS``.
        hosts: the host of each rank.
        cases: what is done, and with how many bytes.
    """

    link: str
    hosts: tuple[int, ...]
    cases: tuple[tuple[str, int], ...]


LINKS = {
    "100 Mbit": Line(100),
    "1 Gbit": Line(1000),
    "100 Mbit 50 ms": Line(100, 50),
}
_TWO, _FOUR, _PAIRS = (0, 1), (0, 1, 2, 3), (0, 0, 1, 1)
_SENDS = (("send", 4 * MB), ("send", 64 * MB), ("small", 64 * MB))
_SUMS = (("all_reduce", 4 * MB), ("all_reduce", 32 * MB))
SESSIONS = (
    Session("100 Mbit", _TWO, _SENDS),
    Session("1 Gbit", _TWO, _SENDS),
    Session("100 Mbit 50 ms", _TWO, (("send", 4 * MB),)),
    Session("100 Mbit 50 ms", _FOUR, (("all_reduce", 4 << 10),)),
    Session("100 Mbit", _FOUR, _SUMS),
    Session("100 Mbit", _PAIRS, _SUMS),
)


def bench_hosts(links: list[str], repeats: int) -> list[dict[str, Any]]:
    """Time all cases on these links; one row for each case and engine."""
    return [
        row
        for session in SESSIONS
        if session.link in links
        for row in bench_session(session, repeats)
    ]


def bench_session(session: Session, repeats: int) -> list[dict[str, Any]]:
    """Time the cases of one session."""
    line, count = LINKS[session.link], max(session.hosts) + 1
    with HostNetwork(count, rate_mbit=line.rate_mbit, delay_ms=line.delay_ms) as network:
        reports = _run_ranks(network, session, repeats)
    rows = []
    for what, nbytes in session.cases:
        spans = [report[f"{what} {nbytes}"] for report in reports]
        seconds = {
            engine: [
                _seconds(what, ranks) for ranks in zip(*(s[engine] for s in spans), strict=True)
            ]
            for engine in spans[0]
        }
        rows += [_row(session, what, nbytes, engine, seconds) for engine in seconds]
    return rows


def _run_ranks(network: HostNetwork, session: Session, repeats: int) -> list[dict[str, Any]]:
    """Have all ranks do the cases; return what each of them says."""
    common: dict[str, Any] = {"first": network.address(0), "token": secrets.token_hex(32)}
    common |= {"size": len(session.hosts), "cases": session.cases, "repeats": repeats}
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    registrars = [
        network.popen(0, [*_RANK, json.dumps({**common, "registrar": name})], env=env, **pipe)
        for name in REGISTRAR_PORTS
    ]
    for registrar in registrars:
        assert registrar.stdout is not None
        registrar.stdout.readline()
    ranks = [
        network.popen(
            host,
            [*_RANK, json.dumps({**common, "rank": rank, "own": network.address(host)})],
            env=env,
            **pipe,
        )
        for rank, host in enumerate(session.hosts)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise PacelineError(f"a rank of the benchmark failed: {[r.returncode for r in ranks]}")
    for registrar in registrars:
        registrar.kill()
        registrar.communicate()
    return [json.loads(text) for text in printed]


def _seconds(what: str, spans: tuple[tuple[float, float], ...]) -> float:
    """How long it took: from the sender's beginning, or the last one's, to the end of the last."""
    if what == "all_reduce":
        return max(end for _, end in spans) - max(began for began, _ in spans)
    return spans[1][1] - spans[0][0]


def _row(
    session: Session, what: str, nbytes: int, engine: str, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    times, median = seconds[engine], statistics.median(seconds[engine])
    row: dict[str, Any] = {
        "link": session.link,
        "engine": engine,
        "what": _name(what, session.hosts),
        "bytes": nbytes,
        "ms": median * 1e3,
        "ms_range": [min(times) * 1e3, max(times) * 1e3],
    }
    if what == "small":
        return row | {"small_ms": median * 1e3}
    if what == "send":
        bytes_per_s = LINKS[session.link].rate_mbit * 1e6 / 8
        return row | {"share_of_line": nbytes / median / bytes_per_s}
    return row | {"ratio_to_gloo": median / statistics.median(seconds["gloo"])}


def _name(what: str, hosts: tuple[int, ...]) -> str:
    """What a row calls a case."""
    if what != "all_reduce":
        return {"send": "send", "small": "64 bytes behind it"}[what]
    count = len(set(hosts))
    each = "" if count == len(hosts) else f" x {len(hosts) // count}"
    return f"all_reduce, {count} hosts{each}"
