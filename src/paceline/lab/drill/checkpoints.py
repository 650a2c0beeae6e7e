"""Drills of checkpoints: runs that are killed while they save, and damaged files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from paceline.checkpoint.disk import FAILPOINT
from paceline.record.folder import MODEL
from paceline.strategies import make_strategy

EVERY = 20
FAILPOINTS = (
    "rank.open",
    "rank.write",
    "rank.fsync",
    "rank.rename",
    "metrics.write",
    "manifest.fsync",
    "manifest.rename",
    "manifest.folder",
    "latest.rename",
    "latest.end",
)
"""One failpoint of each kind; the tests of the disk cover all."""
ROOM = "12m"
"""A disk of this size has room for a few checkpoints of the drill's model, but not for four."""
KILLS, KILLED_AFTER_S = 20, (0.5, 4.0)
"""How often a run is killed, and after how long: sometimes before it begins to train."""


class Ended(NamedTuple):
    """How a run ended: its exit code, its result and what it wrote to standard error."""

    code: int
    result: dict[str, Any]
    errors: str


def plain_command(method: str, folder: Path, workers: int, epochs: int) -> list[str]:
    """The command line of a run, as a user types it."""
    line = [sys.executable, "-m", "paceline", "run", "--strategy", method, "--model", "mlp"]
    line += ["--workers", str(workers), "--epochs", str(epochs), "--out", str(folder)]
    return [*line, "--json"]


def command(method: str, folder: Path, workers: int, epochs: int) -> list[str]:
    """The command line of a run with checkpoints that resumes from the latest one."""
    line = plain_command(method, folder, workers, epochs)
    return [*line, "--checkpoint-steps", str(EVERY), "--resume"]


def run(line: list[str], failpoint: str | None = None) -> Ended:
    """Run a command line to its end, however it ends."""
    environment = {**os.environ, **({FAILPOINT: failpoint} if failpoint else {})}
    process = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    last = (process.stdout.splitlines() or ["{}"])[-1]
    result = json.loads(last) if last.startswith("{") else {}
    return Ended(process.returncode, result, process.stderr)


def kill_while_saving(method: str, workers: int, epochs: int) -> tuple[str, list[str]]:
    """Kill a run at each failpoint of saving, and resume it; return a summary and the failures."""
    failures = []
    with TemporaryDirectory(prefix="paceline-drill-") as name:
        calm, folder = Path(name, "calm"), Path(name, "killed")
        run(command(method, calm, workers, epochs))
        for failpoint in FAILPOINTS:
            ended = run(command(method, folder, workers, epochs), failpoint)
            if ended.code == 0:
                failures.append(f"{failpoint}: the run was not killed")
        ended = run(command(method, folder, workers, epochs))
        if ended.code != 0 or ended.result.get("resumed_at") is None:
            failures.append(f"the last run ended with {ended.code}: {ended.errors[-200:]}")
        elif differ(folder, calm):
            failures.append("it ended with other parameters than an undisturbed run")
    return f"killed at {len(FAILPOINTS)} points, resumed each time, the same bits", failures


def kill_all(method: str, workers: int, epochs: int) -> tuple[str, list[str]]:
    """Kill all processes of a run at random moments, and resume it each time."""
    failures: list[str] = []
    random, kills, rounds = Random(method), 0, 0
    with TemporaryDirectory(prefix="paceline-drill-") as name:
        calm = Path(name, "calm")
        undisturbed = run(command(method, calm, workers, epochs)).result.get("accuracy")
        while kills < KILLS and not failures:
            rounds += 1
            folder, step = Path(name, f"killed-{rounds}"), 0
            line = command(method, folder, workers, epochs)
            while kills < KILLS and _is_killed(line, random.uniform(*KILLED_AFTER_S)):
                kills += 1
                before, step = step, _latest_step(folder)
                if step < before:
                    failures.append(f"kill {kills}: the checkpoint of step {before} is gone")
            ended = run(line)
            accuracy = ended.result.get("accuracy")
            if ended.code != 0 or (ended.result.get("resumed_at") or 0) < step:
                failures.append(f"after kill {kills} it ended with {ended.code}: {ended.errors}")
            elif make_strategy(method).synchronous and differ(folder, calm):
                failures.append("it ended with other parameters than an undisturbed run")
    bits = ", the same bits" if make_strategy(method).synchronous else ""
    summary = f"accuracy {accuracy} ({undisturbed}){bits}"
    return f"killed {kills} times and resumed; {summary}", failures


def _is_killed(line: list[str], after_s: float) -> bool:
    """Kill a run and its processes after ``after_s``; False if it ended before."""
    process = subprocess.Popen(
        line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def _latest_step(folder: Path) -> int:
    if not (folder / "checkpoints" / "latest").exists():
        return 0
    return int(_latest(folder).name[5:])


def differ(folder: Path, other: Path) -> bool:
    """Whether two runs ended with different parameters."""
    return (folder / MODEL).read_bytes() != (other / MODEL).read_bytes()


def spoil(method: str, workers: int, epochs: int) -> tuple[str, list[str]]:
    """Flip a bit of the latest checkpoint, then truncate it; a run resumes from the one before."""
    failures = []
    with TemporaryDirectory(prefix="paceline-drill-") as name:
        folder = Path(name, "run")
        run(command(method, folder, workers, epochs))
        model = (folder / MODEL).read_bytes()
        for damage in (_flip, _cut_off):
            latest = _latest(folder)
            damage(latest / "rank1.safetensors")
            ended = run(command(method, folder, workers, epochs))
            resumed = ended.result.get("resumed_at")
            if ended.code != 0 or resumed is None or resumed >= int(latest.name[5:]):
                failures.append(
                    f"{damage.__name__[1:]}: exit code {ended.code}, from step {resumed}"
                )
            elif latest.name not in ended.errors:
                failures.append(f"{damage.__name__[1:]}: {latest.name} is not named")
            elif (folder / MODEL).read_bytes() != model:
                failures.append(f"{damage.__name__[1:]}: it ended with other parameters")
    return "the one before was taken, the same bits at the end", failures


def why_no_small_disk() -> str | None:
    """Why this process cannot mount a small disk; None if it can."""
    able = os.geteuid() == 0 and shutil.which("unshare") is not None
    return None if able else "a small disk needs root and unshare"


def fill_disk(method: str, workers: int, epochs: int) -> tuple[str, list[str]]:
    """Save on a disk that fills up: training goes on, and the exit code is 1."""
    with TemporaryDirectory(prefix="paceline-drill-") as name:
        folder = Path(name, "run")
        disk = folder / "checkpoints"
        disk.mkdir(parents=True)
        mount = f'mount -t tmpfs -o size={ROOM} none "$0" && exec "$@"'
        line = ["unshare", "--mount", "sh", "-c", mount, str(disk)]
        ended = run([*line, *command(method, folder, workers, epochs), "--keep", "3"])
        failures = []
        if ended.code != 1 or not ended.result.get("checkpoint_error"):
            reason = ended.result.get("checkpoint_error") or ended.errors[-200:]
            failures.append(f"exit code {ended.code}: {reason}")
        if not (folder / MODEL).is_file():
            failures.append("training did not finish")
    return f"training went on; {ended.result.get('checkpoint_error')}, exit code 1", failures


def end_by_signal(method: str, workers: int, epochs: int) -> tuple[str, list[str]]:
    """Send SIGTERM: the run saves, exits with the signal's code, and can be resumed."""
    with TemporaryDirectory(prefix="paceline-drill-") as name:
        folder = Path(name, "run")
        line = command(method, folder, workers, epochs)
        process = subprocess.Popen(
            line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        while not (folder / "checkpoints" / "latest").exists() and process.poll() is None:
            os.sched_yield()
        process.send_signal(signal.SIGTERM)
        errors = process.communicate()[1]
        code, latest = process.returncode, _latest_step(folder)
        failures = [] if code == 143 else [f"exit code {code}, not 143: {errors[-200:]}"]
        again = run(line)
        if again.code != 0 or again.result.get("resumed_at") != latest:
            failures.append(f"resumed, it ended with {again.code}: {again.errors[-200:]}")
    return f"exit code {code} after a checkpoint of step {latest}, from which it went on", failures


def _latest(folder: Path) -> Path:
    checkpoints = folder / "checkpoints"
    return checkpoints / (checkpoints / "latest").read_text().strip()


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])
