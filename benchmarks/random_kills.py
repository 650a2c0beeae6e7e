"""Kill and stop random processes of real runs at random moments, and check how the runs end.

    python benchmarks/random_kills.py --trials 200 --seed 0

Each trial trains the built-in task with a random method, and harms one process: a worker, a server
or communicator, rank 0, the launcher or the fork server. The process is killed, or stopped for a
few seconds, at a moment between its start and the usual end of the run. A trial fails if the run
has not ended ``dead_s`` + 30 s after the harm and its usual time, if its exit code or its message
does not fit what happened, if it ends with 0 and a model that has learned nothing, or if a process
is left. Every trial prints one JSON object; the last line sums up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from paceline.comm.limits import Limits
from paceline.strategies import STRATEGIES, make_strategy

VARIABLE = "PACELINE_TRIAL"
WORKERS = 3
SYNCHRONOUS = ("allreduce", "sasgd", "hierarchical", "diloco", "layered")
VICTIMS = ("worker", "rank 0", "server", "launcher", "fork server")
LEARNED = 0.4
"""A run with this accuracy has learned something: a guess among ten classes has 0.1."""


@dataclass
class Trial:
    """What is done to a run, and how it ended.

    The victim is harmed after ``share`` of the time between its start and the usual end, at
    ``at_s``. ``found`` says what was wrong with the end; it is empty if nothing was.
    """

    method: str
    victim: str
    harm: str
    on_loss: str | None
    share: float
    stopped_s: float
    seed: int
    at_s: float = 0.0
    code: int | None = None
    seconds: float = 0.0
    accuracy: float | None = None
    found: str = ""


def draw(generator: random.Random) -> Trial:
    method = generator.choice(sorted(STRATEGIES))
    has_server = len(make_strategy(method).roles(WORKERS)) > WORKERS
    victim = generator.choice([who for who in VICTIMS if has_server or who != "server"])
    harm = generator.choice(("kill", "stop"))
    on_loss = generator.choice((None, "continue")) if method in SYNCHRONOUS else None
    share, stopped_s = generator.uniform(0, 1), generator.uniform(0.5, 9)
    return Trial(method, victim, harm, on_loss, share, stopped_s, generator.randrange(1000))


def processes(trial_id: str) -> dict[int, int]:
    """The running processes of a trial, each with its parent."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{VARIABLE}={trial_id}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if state != "Z":
                    parents[int(folder.name)] = int(parent)
    return parents


def victim_of(trial: Trial, launcher: int, trial_id: str) -> int | None:
    """The process to harm; None if none of that kind is running."""
    parents = processes(trial_id)
    if trial.victim == "launcher":
        return launcher if launcher in parents else None
    fork_servers = [pid for pid, parent in parents.items() if parent == launcher]
    if trial.victim == "fork server":
        return next(iter(fork_servers), None)
    ranks = sorted(pid for pid, parent in parents.items() if parent in fork_servers)
    groups = {"rank 0": ranks[:1], "worker": ranks[1:WORKERS], "server": ranks[WORKERS:]}
    group = groups[trial.victim]
    return group[trial.seed % len(group)] if group else None


def command_of(trial: Trial, out: str) -> list[str]:
    command = [sys.executable, "-m", "paceline", "run", "-s", trial.method, "-w", str(WORKERS)]
    command += ["--model", "mlp", "--epochs", "36", "--seed", str(trial.seed), "--json", "--quiet"]
    command += ["--on-loss", trial.on_loss] if trial.on_loss else []
    return [*command, "--out", f"{out}/run"]


def run(trial: Trial) -> None:
    expected_s, trial_id, started_s = usual_s(trial.method), uuid.uuid4().hex, time.monotonic()
    with tempfile.TemporaryDirectory() as out, open(f"{out}/errors", "w+") as errors:
        process = subprocess.Popen(
            command_of(trial, out),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, VARIABLE: trial_id},
        )
        while process.poll() is None and victim_of(trial, process.pid, trial_id) is None:
            time.sleep(0.02)
        victim_started_s = time.monotonic() - started_s
        with suppress(subprocess.TimeoutExpired):
            process.wait(trial.share * max(0.0, expected_s - victim_started_s))
        trial.at_s = time.monotonic() - started_s
        victim = victim_of(trial, process.pid, trial_id)
        stop_s = harm(trial, victim)
        limit_s = expected_s + stop_s + Limits().dead_s + 30
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            output, trial.found = "", f"still running {limit_s:.0f} s after the harm"
        trial.code, trial.seconds = process.returncode, time.monotonic() - started_s
        errors.seek(0)
        trial.found = trial.found or judge(trial, victim, output, errors.read())
        left = wait_for_end(trial_id)
        if left and not trial.found:
            trial.found = f"leftover processes: {left}"
        for pid in processes(trial_id):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def harm(trial: Trial, victim: int | None) -> float:
    """Kill or stop the victim; return for how long it was stopped."""
    if victim is None:
        trial.victim, trial.harm = f"{trial.victim} (not there)", "none"
        return 0.0
    with suppress(ProcessLookupError):
        if trial.harm == "kill":
            os.kill(victim, signal.SIGKILL)
            return 0.0
        os.kill(victim, signal.SIGSTOP)
        time.sleep(trial.stopped_s)
        os.kill(victim, signal.SIGCONT)
    return trial.stopped_s


def wait_for_end(trial_id: str) -> list[int]:
    """The processes that are left 10 s after the end of a run."""
    until_s = time.monotonic() + 10
    while (left := [*processes(trial_id)]) and time.monotonic() < until_s:
        time.sleep(0.1)
    return left


def judge(trial: Trial, victim: int | None, output: str, errors: str) -> str:
    """What is wrong with the end of a run; an empty text if nothing is."""
    code = trial.code
    if trial.victim == "launcher" and trial.harm == "kill":
        return "" if code in (0, -signal.SIGKILL) else f"exit code {code}"
    if "Traceback" in errors:
        return f"a traceback: {errors[-600:]}"
    if code == 0:
        result = json.loads(output.splitlines()[-1])
        trial.accuracy = result["accuracy"]
        if trial.accuracy is None or trial.accuracy < LEARNED:
            return f"exit code 0 and accuracy {trial.accuracy}"
        return ""
    if victim is None or trial.victim == "launcher":
        return f"exit code {code}, although no rank was harmed: {errors[-300:]}"
    if code != 3:
        return f"exit code {code}: {errors[-300:]}"
    return may_end(trial, errors)


def may_end(trial: Trial, errors: str) -> str:
    """Why a run may not end because of this loss; an empty text if it may."""
    if trial.victim == "fork server":
        return "" if "fork server" in errors or "rank" in errors else f"not named: {errors[-300:]}"
    if "rank" not in errors:
        return f"the lost rank is not named: {errors[-300:]}"
    goes_on = trial.method not in SYNCHRONOUS or trial.on_loss == "continue"
    if goes_on and trial.victim == "worker":
        return f"ended by the loss of a worker: {errors[-300:]}"
    return ""


@cache
def usual_s(method: str) -> float:
    """How long an undisturbed run with this method takes here."""
    trial = Trial(method, "launcher", "none", None, 0.0, 0.0, 0)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(command_of(trial, out), check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = random.Random(options.seed)
    trials, failed = Counter[str](), 0
    for number in range(options.trials):
        trial = draw(generator)
        run(trial)
        trials[f"{trial.harm} {trial.victim}"] += 1
        failed += bool(trial.found)
        print(json.dumps({"trial": number, **asdict(trial)}), flush=True)
    print(json.dumps({"trials": options.trials, "failed": failed, **trials}))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
