"""``paceline bench hosts``: one small session over hosts that are really made."""

from __future__ import annotations

import pytest
from support.namespaces import need_hosts
from support.worlds import on_hosts

from paceline.lab.bench.hosts import LINKS, SESSIONS, Session, bench_session

ENGINES = ["paceline", "paceline, not encrypted", "gloo"]


@on_hosts
@pytest.mark.may_skip
def test_a_session_times_each_case_with_each_engine():
    need_hosts()
    cases = (("send", 1 << 18), ("small", 1 << 20), ("all_reduce", 1 << 17))
    rows = bench_session(Session("100 Mbit", (0, 1), cases), repeats=1)
    whats = ["send", "64 bytes behind it", "all_reduce, 2 hosts"]
    assert [(row["what"], row["engine"]) for row in rows] == [
        (w, e) for w in whats for e in ENGINES
    ]
    assert all(row["link"] == "100 Mbit" and row["ms"] > 0 for row in rows)
    sends, small, sums = rows[:3], rows[3:6], rows[6:]
    # What an idle cable lets pass at once is more than the line carries in the time.
    assert all(0 < row["share_of_line"] < 1.2 for row in sends)
    assert all(row["small_ms"] == row["ms"] for row in small)
    assert sums[2]["ratio_to_gloo"] == 1.0


def test_the_sessions_are_those_that_have_targets():
    cases = {(s.link, len(set(s.hosts)), len(s.hosts), *case) for s in SESSIONS for case in s.cases}
    large = [4 << 20, 64 << 20]
    expected = {(link, 2, 2, "send", n) for link in ("100 Mbit", "1 Gbit") for n in large}
    expected |= {(link, 2, 2, "small", large[1]) for link in ("100 Mbit", "1 Gbit")}
    expected |= {("100 Mbit 50 ms", 2, 2, "send", large[0])}
    expected |= {("100 Mbit 50 ms", 4, 4, "all_reduce", 4 << 10)}
    expected |= {("100 Mbit", n, 4, "all_reduce", m << 20) for n in (2, 4) for m in (4, 32)}
    assert cases == expected
    assert {link for link, *_ in cases} == set(LINKS)
