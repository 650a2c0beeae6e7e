"""What tests of hosts on one machine need; named after what such hosts are made of."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache

import pytest

from paceline.lab.network.hosts import why_no_hosts

_reason = cache(why_no_hosts)


def need_hosts() -> None:
    """Skip the test where no hosts can be made; fail in continuous integration, where they can."""
    reason = _reason()
    if reason is not None:
        verdict = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        verdict(f"not tried: {reason}")


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for what another process does."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {limit_s} s in vain"
        time.sleep(0.01)
