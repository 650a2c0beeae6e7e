"""Ranks and launchers that are killed, stopped or only busy, in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, nullcontext, suppress

import pytest
from support import runs
from support.worlds import on_both, on_distributed, on_shared_memory

import paceline as pl
from paceline.launcher.fork_server import receive_message

WORKERS = 4
PATIENCE_S = 60.0


def shared_files():
    return set(os.listdir("/dev/shm"))


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After each test: no rank, no open file and nothing in /dev/shm remain; a run works."""
    pl.launch(runs.log_surroundings, workers=1)
    files, shared = open_files(), shared_files()
    yield
    assert runs.ranks_left() == []
    assert open_files() <= files
    end_s = time.monotonic() + PATIENCE_S  # other programs may use /dev/shm for a while
    while shared_files() - shared and time.monotonic() < end_s:
        os.sched_yield()
    assert shared_files() - shared == set()
    assert pl.launch(runs.log_surroundings, workers=2).workers == 2


def launch_and_lose(world="shared_memory", train=runs.train_until_lost, **how):
    """Launch a run that loses a rank; returns the error and the pids of all ranks."""
    pids = []
    with pytest.raises(pl.PeerLost) as caught:
        pl.launch(
            train,
            workers=WORKERS,
            transport=world,
            on_metric=lambda record: pids.append(record["pid"]),
            **how,
        )
    assert [runs.state_of(pid) for pid in pids] == [None] * WORKERS
    assert caught.value.waited_s < PATIENCE_S
    return caught.value


# Lost ranks --------------------------------------------------------------------------------------


@on_shared_memory
@pytest.mark.parametrize("strategy", ["allreduce", "sasgd(interval=4)"])
def test_a_killed_rank_is_named_with_the_operation(strategy):
    lost = launch_and_lose(strategy=strategy, arguments={"rank": 2, "how": "kill"})
    assert (lost.ranks, lost.op, lost.reason) == ((2,), "all_reduce", "it was ended by SIGKILL")


@on_shared_memory
@pytest.mark.parametrize("strategy", ["allreduce", "sasgd(interval=4)"])
def test_a_stopped_rank_is_named_with_the_operation(strategy):
    how = {"strategy": strategy, "limits": pl.Limits(dead_s=0.5)}
    lost = launch_and_lose(arguments={"rank": 1, "how": "stop"}, **how)
    assert (lost.ranks, lost.op) == ((1,), "all_reduce")
    assert lost.reason.startswith("it has been stopped for")
    assert lost.waited_s >= 0.5


@on_shared_memory
def test_a_rank_that_stops_when_no_other_waits_for_it_is_named():
    arguments = {"rank": 2, "how": "stop", "when": "after"}
    lost = launch_and_lose(arguments=arguments, limits=pl.Limits(dead_s=0.5))
    assert (lost.ranks, lost.op) == ((2,), "the run")
    assert lost.reason.startswith("it has been stopped for")


@on_distributed
@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_of_a_distributed_run_is_named(rank):
    lost = launch_and_lose("distributed", arguments={"rank": rank, "how": "kill"})
    assert (lost.ranks, lost.op, lost.reason) == ((rank,), "all_reduce", "it was ended by SIGKILL")


@on_shared_memory
@pytest.mark.parametrize("when", ["start", "end"])
def test_a_rank_may_die_before_its_setup_and_while_others_finish(when):
    lost = launch_and_lose(arguments={"rank": 3, "how": "kill", "when": when})
    assert (lost.ranks, lost.op) == ((3,), "all_reduce")


@on_shared_memory
def test_a_rank_may_die_in_its_setup():
    never = {"rank": -1, "how": "kill"}
    lost = launch_and_lose(strategy=runs.DiesInSetup(), arguments=never)
    assert (lost.ranks, lost.reason) == ((1,), "it was ended by SIGKILL")


# Ranks that are not lost -------------------------------------------------------------------------


@on_both
def test_a_rank_that_is_busy_for_three_times_dead_s_is_not_lost(world):
    how = {"limits": pl.Limits(dead_s=0.4), "arguments": {"seconds": 1.2}}
    result = pl.launch(runs.be_busy, workers=WORKERS, transport=world, **how)
    assert result.steps == 2 * WORKERS
    assert result.seconds >= 1.2


@on_shared_memory
def test_a_rank_that_continues_in_time_is_not_lost():
    result = pl.launch(runs.stop_and_go_on, workers=3, arguments={"seconds": 0.5})
    assert result.steps == 3


# The fork server ---------------------------------------------------------------------------------


@on_shared_memory
@pytest.mark.parametrize(
    ("how", "more", "message"),
    [
        ("return", {}, None),
        ("raise", {}, r"^rank \d: KeyError: 'no such thing'"),
        ("kill", {}, r"^lost rank 0 in .*: it was ended by SIGKILL$"),
        (
            "kill",
            {"strategy": "gossip", "max_restarts": 1, "limits": pl.Limits(dead_s=0.3)},
            r"^the fork server, which starts the ranks, cannot start one: it has been stopped for",
        ),
    ],
)
def test_a_run_ends_although_its_fork_server_is_stopped(how, more, message):
    fork_servers, expected = (
        [],
        nullcontext() if message is None else pytest.raises(pl.PacelineError),
    )
    with expected as caught:
        pl.launch(
            runs.stop_the_fork_server,
            workers=2,
            arguments={"how": how},
            on_metric=lambda record: fork_servers.append(record["fork_server"]),
            **more,
        )
    assert message is None or re.search(message, str(caught.value))
    assert message is None or caught.value.exit_code == (1 if how == "raise" else 3)
    assert [runs.state_of(pid) for pid in fork_servers] == [None]


# The launcher ------------------------------------------------------------------------------------

SCRIPT = """
import paceline as pl
from support.runs import wait_forever


def show(record):
    print(record["pid"], record["fork_server"], flush=True)


if __name__ == "__main__":
    pl.launch(wait_forever, workers=3, on_metric=show)
"""


class Launcher:
    """A program that launches ranks, in its own session."""

    def __init__(self, script):
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            env=runs.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.fork_server = 0
        self.pidfds = []

    def wait_for_ranks(self):
        lines = [self.process.stdout.readline().split() for _ in range(3)]
        ranks, (self.fork_server,) = (
            [int(line[0]) for line in lines],
            {int(line[1]) for line in lines},
        )
        self.pidfds = [os.pidfd_open(pid) for pid in [self.fork_server, *ranks]]

    def close(self):
        for pidfd in self.pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def launchers(tmp_path):
    """Two launchers that start at the same time."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with ExitStack() as stack:
        started = [stack.enter_context(closing(Launcher(script))) for _ in range(2)]
        for launcher in started:
            launcher.wait_for_ranks()
        yield started


@on_shared_memory
def test_nothing_outlives_a_launcher(launchers):
    killed, interrupted = launchers
    os.kill(killed.fork_server, signal.SIGSTOP)  # only the kernel can end the ranks
    killed.process.kill()
    assert runs.wait_for_ends(killed.pidfds, PATIENCE_S)
    os.killpg(interrupted.process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    assert runs.wait_for_ends(interrupted.pidfds, PATIENCE_S)
    assert interrupted.process.wait(PATIENCE_S) in (130, -signal.SIGINT)
    output = interrupted.process.stderr.read()
    assert output.count("Traceback") == output.count("KeyboardInterrupt") == 1


# Other launchers ---------------------------------------------------------------------------------


def scenario(strategy, how, rank, when, hosts=False, **limits):
    limits = {"dead_s": 2.0 if hosts else 1.0, "notice_s": 0.5, "start_s": 60.0, **limits}
    facts = {"strategy": strategy, "how": how, "rank": rank, "when": when}
    return {**facts, "hosts": hosts, "limits": limits}


SCENARIOS = [
    scenario("allreduce", "kill", 1, "meeting"),
    scenario("sasgd(interval=8)", "stop", 0, "meeting"),
    scenario("gossip", "kill", 1, "middle"),
    scenario("downpour", "stop", 0, "middle"),
    scenario("cyclic", "kill", 1, "middle"),
    scenario("layered", "kill", 0, "end"),
    scenario("easgd", "stop", 1, "end"),
    scenario("gossip", "stop", 1, "middle", hosts=True),
    scenario("downpour", "stop", 0, "middle", hosts=True),
    scenario("allreduce", "kill", 2, "before", notice_s=3.0, start_s=6.0),
]


@on_distributed
def test_a_lost_rank_ends_all_others_of_another_launcher_wherever_they_are(tmp_path):
    """At the start, in the middle and at the end; also when only a heartbeat can tell."""
    ended = subprocess.run(
        [sys.executable, "-m", "support.lost_ranks", json.dumps(SCENARIOS)],
        env=runs.environment(OMP_NUM_THREADS="1", TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stderr
    for played, facts in zip(SCENARIOS, json.loads(ended.stdout), strict=True):
        lost = played["rank"]
        for rank in {0, 1, 2} - {lost}:
            log = facts["logs"][rank]
            assert facts["codes"][rank] == 3, (played, rank, facts)
            assert f"paceline: lost rank {lost} in " in log and "Traceback" not in log, (
                played,
                log,
            )
    never = facts["logs"][0]
    assert "paceline: rank 0 still waits at the start for rank 2 after 3 s; the limit is" in never
    assert "lost rank 2 in the run" in never and "pl.Limits(start_s=6)" in never


def test_a_fork_server_that_died_before_it_read_a_request_has_ended():
    ours, theirs = socket.socketpair()
    ours.send(b"a request")
    theirs.close()
    with ours:
        assert receive_message(ours) is None
