"""Jobs on all cores: what comes next may depend on results."""

import importlib
import json
import os

import pytest

from paceline.errors import PacelineError
from paceline.lab.pool import cores_of, run_jobs, run_next

PROGRAM = """
import json, os
from paceline.lab.pool import serve_jobs

def answer(job):
    if job.strip() == "die":
        os._exit(1)
    return json.dumps([job.strip(), os.getpid(), sorted(os.sched_getaffinity(0))])

if __name__ == "__main__":
    serve_jobs(answer)
"""
"""Answers with the job, its process and its cores."""


@pytest.fixture
def program(monkeypatch, tmp_path):
    """The module that the processes run."""
    (tmp_path / "program_of_a_pool.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("program_of_a_pool")


def test_results_decide_what_comes_next(program):
    known, begun = [], []

    def next_job():  # the second and the third need the result of the first
        wanted = ["second", "third"] if known else ["first"]
        job = next((job for job in wanted if job not in begun), None)
        begun.append(job)
        return job

    for job, result in run_next(next_job, program.__name__, program.answer, 2, apart=True):
        known.append(json.loads(result))
        assert known[-1][0] == job
    assert sorted(job for job, *_ in known) == ["first", "second", "third"]
    assert all(pid != os.getpid() for _, pid, _ in known)
    shares = {pid: cores for _, pid, cores in known}.values()  # each has cores of its own
    assert sum(map(len, shares)) <= max(len(os.sched_getaffinity(0)), len(shares))


def test_one_process_is_this_one(program):
    ((job, result),) = run_jobs(["only"], program.__name__, program.answer, 4)
    assert (job, json.loads(result)[1]) == ("only", os.getpid())


def test_a_process_that_ends_is_an_error(program):
    with pytest.raises(PacelineError, match="ended before it answered"):
        list(run_jobs(["die", "die"], program.__name__, program.answer, 2))


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_cores_are_divided(processes, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5}, raising=False)
    shares = [cores_of(number, processes) for number in range(processes)]
    assert set().union(*shares) == {0, 1, 4, 5} and all(shares)
    assert sum(map(len, shares)) == max(4, processes)
