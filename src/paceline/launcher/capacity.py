"""How many ranks this machine can run; a run with more is refused before any process starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.common.options import at_least
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.strategies.base import Strategy

PROCESS_BYTES = 150 << 20
"""The private memory of one rank's process, measured with the built-in network."""
MAX_VIRTUAL_WORKERS = 16_000


def check_real_workers(workers: int, strategy: Strategy | None = None) -> None:
    """Refuse more processes than fit into memory; the error says how much they would need."""
    memory = memory_bytes()
    limit = max(2, memory // PROCESS_BYTES)
    for who, count in _counts(workers, strategy):
        if count > limit:
            raise UsageError(
                f"{who} ({count}) must be at most {limit} here: at about"
                f" {PROCESS_BYTES >> 20} MB a process they would need"
                f" {count * PROCESS_BYTES / 1e9:,.0f} GB, and this machine has"
                f" {memory / 1e9:,.0f} GB"
            )


def check_virtual_workers(workers: int, strategy: Strategy | None = None) -> None:
    """Refuse more virtual ranks than this machine allows threads."""
    limit = min(MAX_VIRTUAL_WORKERS, _threads() // 2)
    for who, count in _counts(workers, strategy):
        if count > limit:
            raise UsageError(
                f"{who} ({count}) must be at most {limit} here: each virtual worker needs a thread"
                f" and a model of its own, and this machine allows {_threads()} threads"
            )


def _counts(workers: int, strategy: Strategy | None) -> Iterator[tuple[str, int]]:
    """The number of workers, and of all ranks; a single worker runs without other ranks."""
    at_least("workers", workers, 1)
    yield "workers", workers
    if strategy is not None and workers > 1:
        yield "workers and servers", len(strategy.roles(workers))


def memory_bytes() -> int:
    """The memory that processes of this machine, or of its container, may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _number("/sys/fs/cgroup/memory.max", total))


def _threads() -> int:
    unlimited = 1 << 22
    return min(
        _number("/proc/sys/kernel/threads-max", unlimited),
        _number("/proc/sys/kernel/pid_max", unlimited),
        _number("/sys/fs/cgroup/pids.max", unlimited),
    )


def _number(path: str, default: int) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return default
