"""How many workers this machine can hold: refused before any process starts."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import UsageError
from paceline.options import at_least

PROCESS_BYTES = 150 << 20
"""What a rank's process takes on top of what ranks share; measured with the built-in network."""
MAX_VIRTUAL_WORKERS = 16_000


def check_real_workers(workers: int) -> None:
    """Refuse more processes than the memory holds, saying what they would need."""
    at_least("workers", workers, 1)
    memory = memory_bytes()
    limit = max(2, memory // PROCESS_BYTES)
    if workers > limit:
        raise UsageError(
            f"workers ({workers}) must be at most {limit} here: at about"
            f" {PROCESS_BYTES >> 20} MB a process they would need"
            f" {workers * PROCESS_BYTES / 1e9:,.0f} GB, and this machine has {memory / 1e9:,.0f} GB"
        )


def check_virtual_workers(workers: int) -> None:
    """Refuse more virtual workers than there can be threads."""
    at_least("workers", workers, 1)
    limit = min(MAX_VIRTUAL_WORKERS, _threads() // 2)
    if workers > limit:
        raise UsageError(
            f"workers ({workers}) must be at most {limit} here: each virtual worker needs a thread"
            f" and a model of its own, and this machine allows {_threads()} threads"
        )


def memory_bytes() -> int:
    """The memory that processes of this machine, or of its container, may take."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _number("/sys/fs/cgroup/memory.max", total))


def _threads() -> int:
    many = 1 << 22
    return min(
        _number("/proc/sys/kernel/threads-max", many),
        _number("/proc/sys/kernel/pid_max", many),
        _number("/sys/fs/cgroup/pids.max", many),
    )


def _number(path: str, default: int) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return default
