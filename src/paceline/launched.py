"""Who the launcher of this process says that it is: torchrun, Slurm, Ray, or nobody."""

from __future__ import annotations

import os

from paceline.errors import UsageError

_VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


def launched_rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of processes; (0, 1) without a launcher."""
    for names in _VARIABLES:
        if all(name in os.environ for name in names):
            rank, size = (_number(name) for name in names)
            if not 0 <= rank < size:
                raise UsageError(
                    f"{names[0]} ({rank}) must be from 0 to {names[1]} - 1 ({size - 1})"
                )
            return rank, size
    return 0, 1


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise UsageError(f"{name} ({os.environ[name]}) must be a whole number") from None
