"""Reads rank and size of this process from its launcher: torchrun, Ray, mpirun, srun, or none.

Launchers set environment variables. An incomplete set is an error: otherwise each process would
silently train alone, as a run of its own.
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
"""Slurm steps with this number or a higher one are batch scripts, shells and the like."""


class Launched(NamedTuple):
    """The rank of this process, according to its launcher.

    Attributes:
        rank, size: the number of this process, and the number of processes.
        local_rank, local_size: the same among the processes of this host.
        address, port: of rank 0; the port is 0 in a world of one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = LOOPBACK
    port: int = 0


class _Family(NamedTuple):
    """The names of the environment variables of a launcher."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    jobs: tuple[str, ...] = ()
    """Variables that identify a run on its host; the port is derived from the first one set."""


def _mpi_family(prefix: str, *jobs: str) -> _Family:
    """The names of an MPI that begin with its own name, as OMPI_COMM_WORLD_RANK does."""
    start = f"{prefix}_COMM_WORLD_"
    return _Family(f"{start}RANK", f"{start}SIZE", f"{start}LOCAL_RANK", f"{start}LOCAL_SIZE", jobs)


_TORCH = _Family("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_STEP = _Family("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "most tasks of a host")
_MPI = (
    _mpi_family("OMPI", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    _mpi_family("MV2"),
    _Family("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_NOT_UNDERSTOOD = ("PMIX_RANK", "PALS_RANKID", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK")
_SET = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """Rank, size and address according to the launcher; a world of one without a launcher."""
    if _is_set(environment, _TORCH):
        return _read(environment, _TORCH)
    step = _step_of(environment)
    for family in _MPI:
        if _is_set(environment, family):
            by_slurm = _read(step, _STEP) if step else None
            by_mpi = _number(environment, family.rank), _number(environment, family.size)
            return by_slurm if by_slurm and by_slurm[:2] == by_mpi else _read(environment, family)
    if step:
        return _read(step, _STEP)
    for name in _NOT_UNDERSTOOD:
        if name in environment:
            raise NotLaunched(f"{name} ({environment[name]}) gives no number of processes: {_SET}")
    return Launched()


def _is_set(environment: Mapping[str, str], family: _Family) -> bool:
    """Whether the rank and size variables of a launcher are set; refuses one alone."""
    present = [name for name in family[:2] if name in environment]
    if len(present) == 1:
        (missing,) = {*family[:2]} - {*present}
        value = environment[present[0]]
        raise NotLaunched(f"{present[0]} ({value}) must not be set without {missing}: {_SET}")
    return bool(present)


def _step_of(environment: Mapping[str, str]) -> Mapping[str, str] | None:
    """The variables of an srun task, with its number of tasks and the largest number on a host.

    None if this is no task: batch scripts and salloc shells have a rank variable, too.
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


def _read(environment: Mapping[str, str], family: _Family) -> Launched:
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
    address = _address(environment, family, local_size == size)
    return Launched(rank, size, local_rank, local_size, *address)


def _address(environment: Mapping[str, str], family: _Family, one_host: bool) -> tuple[str, int]:
    """The address and port of rank 0: from MASTER_ADDR and MASTER_PORT, or derived from the job."""
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
    """The first host of a list in Slurm's notation, and whether there are more.

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
    """A variable as a number; ``default`` if it is not set."""
    text = environment.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise NotLaunched(f"{name} ({text}) must be a whole number") from None
