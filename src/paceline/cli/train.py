"""The runs of the commands: real or virtual, with their progress shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.screen import LineView, Replayed, Screen, show_result
from paceline.cli.script import read_script
from paceline.cli.task import Task, choose_out, recorded_task
from paceline.cli.watch import live_page
from paceline.comm.launchers import launched
from paceline.common.options import check_device, one_of
from paceline.common.reading import refuse_malformed
from paceline.errors import PacelineError, UsageError
from paceline.launcher.capacity import check_real_workers, check_virtual_workers
from paceline.launcher.fork_client import ForkServer
from paceline.launcher.transports import TRANSPORTS
from paceline.record.folder import MODEL, RecordedRun, largest_difference
from paceline.strategies import strategy_name

if TYPE_CHECKING:
    from paceline.common.faults import Fault
    from paceline.record.result import Result
    from paceline.sim.cluster import Cluster
    from paceline.strategies.base import Strategy


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train and how, in real processes or simulated."""

    task: Task
    strategy: Strategy
    seed: int
    out: Path | None
    trace: bool = True
    global_batch: int | None = None
    batch: str | None = None

    def run(
        self,
        screen: Screen,
        workers: int | None,
        transport: str | None,
        device: str,
        faults: Sequence[Fault] = (),
        policy: Mapping[str, Any] | None = None,
        live: bool = False,
    ) -> Result | None:
        """Run in real processes: those of another launcher, including this one, or our own.

        Returns the result; None on ranks other than 0 under another launcher.
        """
        world = launched().size
        count = (world if world > 1 else 2) if workers is None else workers
        if not (policy or {}).get("on"):  # what other hosts can run is theirs to say
            check_real_workers(count, self.strategy)
        chosen = transport or default_transport()
        one_of("transport", chosen, TRANSPORTS)
        check_device(device)
        if world > 1:
            _refuse_under_launcher({**(policy or {}), "fault": faults, "live": live})
            if transport not in (None, "distributed"):
                raise UsageError(
                    f"transport ({transport}) must be distributed under a launcher; a script with"
                    ' pl.init(transport="hosts") can use that'
                )
            return self._train_launched(screen, workers, device)
        folder = choose_out(self.out, f"{strategy_name(self.strategy)}-{count}")
        ForkServer.warm_up()
        from paceline.launcher.launch import launch

        page = live_page(screen, folder) if live else nullcontext()
        with page, self._watched(screen) as watch:
            return launch(
                self.task.reference,
                workers=count,
                transport=chosen,
                device=device,
                faults=faults,
                arguments=self.task.arguments,
                out=folder,
                on_progress=watch.progress,
                **self._common(watch),
                **(policy or {}),
            )

    def _train_launched(self, screen: Screen, workers: int | None, device: str) -> Result | None:
        from paceline.launcher.init import train_launched
        from paceline.launcher.spec import InitSpec

        with self._watched(screen) as watch:
            spec = InitSpec(device=device, out=self.out, **self._common(watch))
            task = self.task
            return train_launched(task.reference, spec, workers=workers, arguments=task.arguments)

    def simulate(
        self,
        screen: Screen,
        workers: int,
        cluster: Cluster,
        replay: Path | None = None,
        faults: Sequence[Fault] = (),
        policy: Mapping[str, Any] | None = None,
    ) -> Result:
        """Run on a simulated cluster; with ``replay``, in the order of a recorded run."""
        check_virtual_workers(workers, self.strategy)
        kind = "sim" if replay is None else "replay"
        folder = choose_out(self.out, f"{kind}-{strategy_name(self.strategy)}-{workers}")
        from paceline.launcher.simulate import simulate

        with self._watched(screen) as watch:
            return simulate(
                self.task.reference,
                workers=workers,
                cluster=cluster,
                faults=faults,
                replay=replay,
                arguments=self.task.arguments,
                out=folder,
                on_progress=watch.progress,
                **self._common(watch),
                **(policy or {}),
            )

    def _watched(self, screen: Screen) -> AbstractContextManager[LineView]:
        return screen.watch(self.task.arguments.get("steps"))

    def _common(self, watch: LineView) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "seed": self.seed,
            "on_metric": watch.metric,
            "trace": self.trace,
            "global_batch": self.global_batch,
            "batch": self.batch,
        }


def join_run(screen: Screen, folder: Path) -> None:
    """Ask a running run to add a worker."""
    from paceline.launcher.control_socket import ask

    reply = ask("join", folder, {"ask": "join"})
    if "error" in reply:
        raise PacelineError(f"the run in {folder} cannot take a worker: {reply['error']}")
    screen.show(f"Worker {reply['rank']} joins the run in {folder}.")
    screen.emit(reply)


def join_hosts(script: Path | None, address: str, token_file: Path | None, encryption: bool) -> int:
    """Train for a run that listens on another host; return the exit code of that run."""
    if script is not None:
        read_script(script)
    from paceline.launcher.agent import join
    from paceline.launcher.many_hosts import (
        TOKEN_FILE,
        TOKEN_VARIABLE,
        ManyHosts,
        address_and_port,
        read_token,
    )

    host, port = address_and_port("join", address)
    if token_file is None and TOKEN_VARIABLE not in os.environ:
        token_file = Path(TOKEN_FILE)
    launcher = ManyHosts(1, host, port, token_file, encryption)
    here = None if script is None else {"script": str(script.resolve())}
    return join(launcher, read_token(token_file), here)


def replay_run(
    screen: Screen, path: Path, cluster: Cluster, out: Path | None, *, trace: bool
) -> None:
    """Replay a real run, and show whether it ends with the same parameters.

    Everything in the folder is checked before any code that it names is imported.
    """
    from paceline.sim.replay import check_trace

    run = RecordedRun(path)
    run.check_model()
    check_trace(run)
    with refuse_malformed(f"replay ({path}) must be the folder of a real run"):
        recorded, task = run.model, recorded_task(run.config)
        source = next(location for kind, location in task.reference.items() if kind != "name")
        screen.say(f"Replaying {path}, a run of {task.reference['name']} in {source}")
        method, seed = _recorded_method(run), run.config["seed"]
    shares = {name: run.config.get(name) for name in ("global_batch", "batch")}
    job = Job(task=task, strategy=method, seed=seed, out=out, trace=trace, **shares)
    result = job.simulate(screen, run.config["workers"], cluster, path)
    difference = largest_difference(Path(result.out or "") / MODEL, recorded)
    show_result(screen, result, task.name, cluster.name, _compared(run, difference))


def _recorded_method(run: RecordedRun) -> Strategy:
    from paceline.common.reference import check_reference
    from paceline.strategies.packing import unpack_strategy

    method = run.config["method"]
    if not isinstance(method.get("class"), dict) or not isinstance(method.get("fields"), dict):
        raise UsageError(f"strategy ({method}) must have a class and fields")
    check_reference("strategy", method["class"])
    try:
        return unpack_strategy(method)
    except (ImportError, AttributeError) as error:
        recorded = run.config["strategy"]
        raise UsageError(f"strategy ({recorded}) must be importable: {error}") from None


def _compared(run: RecordedRun, difference: float | None) -> Replayed:
    same = difference is None
    verdict = "same parameters as the recorded run"
    if not same:
        threads, world = run.config["threads"], run.config["world"]
        verdict = (
            f"parameters differ by up to {difference:g} from the recorded run"
            f" ({world}, {threads} thread{'s' if threads != 1 else ''} per rank)"
        )
    return Replayed(str(run.path), same, verdict)


_NOT_UNDER_LAUNCHER = {
    "train can call worker.save there": ("checkpoint_steps", "checkpoint_minutes", "resume"),
    "a lost rank ends the run there": ("on_loss", "max_restarts", "fault"),
    "the launcher has chosen the hosts": ("on", "listen", "hosts"),
    "nobody there receives what all workers log": ("log", "live"),
}


def _refuse_under_launcher(options: Mapping[str, Any]) -> None:
    """Refuse options that do not work in processes of another launcher."""
    for reason, names in _NOT_UNDER_LAUNCHER.items():
        for name in filter(options.get, names):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} must not be given under a launcher: {reason}")


def default_transport() -> str:
    """Shared memory on Linux; elsewhere gloo."""
    return "shared_memory" if sys.platform == "linux" else "distributed"
