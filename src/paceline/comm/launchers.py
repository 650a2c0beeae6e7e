"""Who the launcher of this process says that it is: torchrun, Ray, mpirun, srun, or nobody.

Launchers tell by environment variables. Those of a launcher that are there and do not say enough
are an error: otherwise each process would be a run of its own, and nobody would notice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

from paceline.errors import NotLaunched

LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 15000, 15000
_SPECIAL_STEPS = 0xFFFFFFF0
"""From here on the number of a Slurm step means a batch script, a shell, or the like."""


class Launched(NamedTuple):
    """What a launcher says of this process.

    Attributes:
        rank, size: this process, and how many there are.
        local_rank, local_size: the same among those of this host.
        address, port: where rank 0 is to be found; port 0 of a process that is alone.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = LOOPBACK
    port: int = 0


class _Family(NamedTuple):
    """The names of a launcher's variables."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    jobs: tuple[str, ...] = ()
    """What is the same on all processes of a run on one host, and no other's: makes a port."""


_TORCH = _Family("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_STEP = _Family("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "most tasks of a host")
_MPI = (
    _Family(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Family(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Family("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_NOT_UNDERSTOOD = ("PMIX_RANK", "PALS_RANKID", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK")
_SET = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """What the launcher of this process says of it; a world of one without a launcher."""
    if _is_there(environment, _TORCH):
        return _told_by(environment, _TORCH)
    step = _step_of(environment)
    for family in _MPI:
        if _is_there(environment, family):
            told = _told_by(step, _STEP) if step else None
            rank = _number(environment, family.rank), _number(environment, family.size)
            return told if told and told[:2] == rank else _told_by(environment, family)
    if step:
        return _told_by(step, _STEP)
    for name in _NOT_UNDERSTOOD:
        if name in environment:
            raise NotLaunched(
                f"{name} ({environment[name]}) does not say how many there are: {_SET}"
            )
    return Launched()


def _is_there(environment: Mapping[str, str], family: _Family) -> bool:
    """Whether the variables of a launcher are there; refuses one without the other."""
    there = [name for name in family[:2] if name in environment]
    if len(there) == 1:
        (missing,) = {*family[:2]} - {*there}
        value = environment[there[0]]
        raise NotLaunched(f"{there[0]} ({value}) must not be set without {missing}: {_SET}")
    return bool(there)


def _step_of(environment: Mapping[str, str]) -> Mapping[str, str] | None:
    """The variables of a task of srun, with the number of tasks, and the most of a host.

    None elsewhere: a batch script, or a shell of salloc, has a rank as well, and is no task.
    """
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return None
    if _number(environment, "SLURM_STEP_ID") >= _SPECIAL_STEPS:
        return None
    tasks = environment.get(_STEP.size) or environment.get("SLURM_NTASKS")
    if tasks is None:
        raise NotLaunched(f"SLURM_PROCID must not be set without {_STEP.size}: {_SET}")
    by_node = re.findall(r"(\d+)(?:\(|,|$)", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    most = max(by_node, key=int, default=tasks)
    return {**environment, _STEP.size: tasks, _STEP.local_size: most}


def _told_by(environment: Mapping[str, str], family: _Family) -> Launched:
    rank, size = (_number(environment, name) for name in family[:2])
    if not 0 <= rank < size:
        raise NotLaunched(
            f"{family.rank} ({rank}) must be from 0 to {family.size} - 1 ({size - 1})"
        )
    if size == 1:
        return Launched()
    local_rank = _number(environment, family.local_rank, rank)
    local_size = _number(environment, family.local_size, size)
    if not 0 <= local_rank < local_size <= size:
        raise NotLaunched(
            f"{family.local_rank} ({local_rank}) must be below {family.local_size} ({local_size}),"
            f" and that at most {family.size} ({size})"
        )
    where = _where(environment, family, local_size == size)
    return Launched(rank, size, local_rank, local_size, *where)


def _where(environment: Mapping[str, str], family: _Family, one_host: bool) -> tuple[str, int]:
    """The address and the port of rank 0: as they are set, or else as they can be made up."""
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if family is _STEP:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        first, several = first_host(nodes)
        address = address or (first if several else LOOPBACK)
        job = f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}"
    else:
        job = next((environment[name] for name in family.jobs if name in environment), "")
        address = address or (LOOPBACK if one_host else None)
    if address is None:
        raise NotLaunched(
            "MASTER_ADDR must be set to the host of rank 0, and MASTER_PORT to a free port there,"
            " on every rank: there are several hosts"
        )
    if port is not None:
        return address, _port(port)
    if not job:
        raise NotLaunched("MASTER_PORT must be set to a free port of rank 0's host, on every rank")
    return address, _FIRST_PORT + int.from_bytes(blake2b(job.encode()).digest()[:4]) % _PORTS


def first_host(nodes: str) -> tuple[str, bool]:
    """The first host of a list as Slurm writes it, and whether there are more.

    >>> first_host("node[01-03,07],gpu4"), first_host("rack[2-3]n[08,10]-ib"), first_host("a7")
    (('node01', True), ('rack2n08-ib', True), ('a7', False))
    """
    found = re.fullmatch(r"((?:[\w.-]|\[\w[^\[\]]*\])+)(?:,.+)?", nodes)
    if found is None:
        raise NotLaunched(
            f"SLURM_STEP_NODELIST ({nodes}) must be a list of hosts; or set MASTER_ADDR and"
            " MASTER_PORT, on every rank"
        )
    several = bool(re.search(r"[,\[]", re.sub(r"\[\w+\]", "", nodes)))
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found[1]), several


def _port(text: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= 65535:
        raise NotLaunched(f"MASTER_PORT ({text}) must be a whole number from 1 to 65535")
    return int(text)


def _number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    """A variable as a number; the ``default`` where the launcher has none of that name."""
    text = environment.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise NotLaunched(f"{name} ({text}) must be a whole number") from None
