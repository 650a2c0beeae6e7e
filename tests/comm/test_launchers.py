"""What a process makes of its launcher's variables."""

from __future__ import annotations

import re

import pytest

from paceline.comm.launchers import Launched, first_host, launched
from paceline.errors import UsageError

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}
OMPI_HERE = {
    **OMPI,
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-host-1234@1",
    "PMIX_RANK": "2",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "node[01-09]",
    "SLURM_STEP_NODELIST": "node[03,07]",
}
BATCH = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}


def port_of(environment):
    return launched(environment).port


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, Launched()),
        (TORCH, Launched(1, 4, 1, 4, "10.0.0.1", 29500)),
        (
            {**TORCH, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            Launched(1, 4, 0, 2, "10.0.0.1", 29500),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launched()),
        ({**SRUN, **OMPI_HERE, **TORCH}, Launched(1, 4, 1, 4, "10.0.0.1", 29500)),
        (OMPI_HERE, Launched(2, 3, 2, 3, "127.0.0.1", port_of(OMPI_HERE))),
        ({**OMPI, "MASTER_ADDR": "a", "MASTER_PORT": "7"}, Launched(2, 3, 2, 3, "a", 7)),
        ({**PMI, "MASTER_PORT": "7"}, Launched(1, 2, 1, 2, "127.0.0.1", 7)),
        (SRUN, Launched(3, 4, 1, 4, "node03", port_of(SRUN))),
        ({**SRUN, "MASTER_ADDR": "b", "MASTER_PORT": "9"}, Launched(3, 4, 1, 4, "b", 9)),
        (
            {**SRUN, "SLURM_STEP_NODELIST": "node03"},
            Launched(3, 4, 1, 4, "127.0.0.1", port_of(SRUN)),
        ),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1,2(x3)"},
            Launched(3, 4, 1, 2, "node03", port_of(SRUN)),
        ),
        ({**SRUN, "PMIX_RANK": "3"}, Launched(3, 4, 1, 4, "node03", port_of(SRUN))),
        (
            {**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"},
            Launched(3, 4, 1, 4, "node03", port_of(SRUN)),
        ),
        ({**SRUN, **PMI, "MASTER_PORT": "7"}, Launched(1, 2, 1, 2, "127.0.0.1", 7)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Launched()),
        (BATCH, Launched()),
        ({**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFA)}, Launched()),
    ],
)
def test_the_variables_of_a_launcher_say_who_this_process_is(environment, told):
    assert launched(environment) == told


def test_ranks_of_one_job_have_one_port_and_other_jobs_another():
    for job, name in [
        (SRUN, "SLURM_JOB_ID"),
        (SRUN, "SLURM_STEP_ID"),
        (OMPI_HERE, "PMIX_NAMESPACE"),
    ]:
        rank = "SLURM_PROCID" if job is SRUN else "OMPI_COMM_WORLD_RANK"
        assert port_of(job) == port_of({**job, rank: "0"})
        others = {port_of({**job, name: str(number)}) for number in range(20)}
        assert len(others) > 15 and all(15000 <= port < 30000 for port in others)


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"RANK": "1"}, "RANK (1) must not be set without WORLD_SIZE: set RANK, WORLD_SIZE,"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE (2) must not be set without RANK: set RANK, WORLD_SIZE,"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK (x) must be a whole number"),
        ({**TORCH, "RANK": "4"}, "RANK (4) must be from 0 to WORLD_SIZE - 1 (3)"),
        ({**TORCH, "LOCAL_RANK": "x"}, "LOCAL_RANK (x) must be a whole number"),
        (
            {**TORCH, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK (2) must be below LOCAL_WORLD_SIZE (2)",
        ),
        ({**TORCH, "MASTER_PORT": "70000"}, "MASTER_PORT (70000) must be a whole number from 1 to"),
        ({**TORCH, "MASTER_PORT": "web"}, "MASTER_PORT (web) must be a whole number from 1 to"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "MASTER_PORT must be set to a free port of rank 0's host",
        ),
        (PMI, "MASTER_PORT must be set to a free port of rank 0's host, on every rank"),
        ({**OMPI_HERE, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK (2) must"),
        (
            {**OMPI_HERE, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "MASTER_ADDR must be set to the host of rank 0, and MASTER_PORT to a free port there",
        ),
        ({"PMIX_RANK": "1"}, "PMIX_RANK (1) gives no number of processes: set RANK, WORLD_SIZE"),
        ({"PMI_RANK": "1"}, "PMI_RANK (1) must not be set without PMI_SIZE: set RANK"),
        (
            {**TORCH, "MASTER_ADDR": "", "LOCAL_WORLD_SIZE": "2"},
            "MASTER_ADDR must be set to the host of rank 0",
        ),
        ({**SRUN, "SLURM_STEP_NODELIST": "node["}, "SLURM_STEP_NODELIST (node[) must be a list of"),
    ],
)
def test_variables_that_do_not_say_enough_are_refused(environment, complaint):
    with pytest.raises(UsageError, match=re.escape(complaint)):
        launched(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a7", ("a7", False)),
        ("node[5]", ("node5", False)),
        ("node[01-03,07],gpu4", ("node01", True)),
        ("gpu4,node[01-03]", ("gpu4", True)),
        ("node-1.lab,node-2.lab", ("node-1.lab", True)),
        ("rack[2-3]n[08,10]-ib", ("rack2n08-ib", True)),
    ],
)
def test_the_first_host_of_a_list_of_nodes(nodes, first):
    assert first_host(nodes) == first
