"""The commands: each checks what was typed, runs, and shows what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from paceline._version import __version__
from paceline.cli.options import (
    Device,
    Output,
    Repeats,
    StrategySpec,
    Training,
    TransportName,
    Workers,
    command,
    refuse_beside,
)
from paceline.cli.screen import show_result
from paceline.cli.task import choose_out, find_task
from paceline.cli.train import Job, replay_run
from paceline.options import at_least
from paceline.sim.cluster import PRESETS, load_cluster
from paceline.strategies import STRATEGIES, make_strategy, parse_settings

CLUSTER = "ethernet-10g"
BESIDE_REPLAY = ("replay", "cluster", "out", "json", "quiet", "verbose")
_STRATEGIES = f"Strategies: {', '.join(STRATEGIES)}; paceline strategies explains them."
_CLUSTERS = f"{_STRATEGIES} Clusters: {', '.join(PRESETS)}, or the path of a TOML file."

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Time Paceline beside its peers, in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _say_version(asked: bool) -> None:
    if asked:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        Option("--version", help="Say the version.", is_eager=True, callback=_say_version),
    ] = False,
) -> None:
    """Train PyTorch models on workers that need not march in lockstep."""


@command(app, epilog=_STRATEGIES)
def run(
    training: Training,
    strategy: StrategySpec = "allreduce",
    workers: Annotated[
        int | None, Option("--workers", "-w", help="How many workers. [default: 2]")
    ] = None,
    transport: TransportName = None,
    device: Device = "cpu",
) -> None:
    """Train in real processes, of this machine or a launcher."""
    job, screen = _job(training, strategy), training.screen()
    result = job.run(screen, workers, transport, device)
    if result is not None:
        show_result(screen, result, job.task.name, "real processes")


@command(app, epilog=_CLUSTERS)
def sim(
    training: Training,
    context: typer.Context,
    strategy: StrategySpec = "allreduce",
    workers: Workers = 8,
    cluster: Annotated[
        str, Option("--cluster", "-c", help="A named cluster, or a TOML file.")
    ] = CLUSTER,
    replay: Annotated[
        Path | None,
        Option("--replay", metavar="RUN", help="Follow the recorded order of a real run's folder."),
    ] = None,
) -> None:
    """Train in virtual time, on a simulated cluster."""
    screen, place = training.screen(), load_cluster(cluster)
    if replay is not None:
        refuse_beside(context, "--replay", BESIDE_REPLAY)
        replay_run(screen, replay, place, training.out)
        return
    job = _job(training, strategy)
    show_result(screen, job.simulate(screen, workers, place), job.task.name, place.name)


def _job(training: Training, strategy: str) -> Job:
    task = find_task(training)
    method = make_strategy(strategy, parse_settings(training.settings))
    return Job(task=task, strategy=method, seed=training.seed, out=training.out)


@command(app, epilog=_CLUSTERS)
def compare(
    training: Training,
    strategy: Annotated[
        list[str] | None,
        Option("--strategy", "-s", help="Methods; repeat, or separate by commas. [default: all]"),
    ] = None,
    workers: Annotated[
        list[str] | None,
        Option("--workers", "-w", help="How many; repeat, or separate by commas. [default: 8]"),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        Option("--cluster", "-c", help=f"Clusters, likewise. [default: {CLUSTER}]"),
    ] = None,
    real: Annotated[bool, Option("--real", help="In real processes, not in virtual time.")] = False,
    target: Annotated[
        float | None,
        Option("--target", help="Accuracy to take the time to. [default: 0.8, built-in task]"),
    ] = None,
    transport: TransportName = None,
    device: Device = "cpu",
) -> None:
    """Put several strategies, workers and clusters side by side."""
    from paceline.cli import compare as c

    task, screen = find_task(training), training.screen()
    clusters = [] if real else [load_cluster(s) for s in c.split_specs(cluster or [CLUSTER])]
    comparison = c.Comparison(
        task=task,
        strategies=c.strategies_of(strategy or [], parse_settings(training.settings)),
        workers=c.workers_of(workers or ["2" if real else "8"], virtual=not real),
        clusters=clusters,
        target=c.TARGET if target is None and training.script is None else target,
        seed=training.seed,
        out=choose_out(training.out, "compare"),
        transport=transport,
        device=device,
    )
    comparison.run(screen)
    comparison.show(screen)
    screen.emit({"rows": comparison.rows, "report": None})


@command(app)
def strategies(
    output: Output,
    name: Annotated[str | None, Argument(metavar="[NAME]", show_default=False)] = None,
) -> None:
    """List the methods, or explain one of them."""
    from paceline.cli.about import show_strategies, show_strategy

    if name is None:
        show_strategies(output.screen())
    else:
        show_strategy(output.screen(), name)


@command(app)
def doctor(output: Output) -> None:
    """Check that this machine has what Paceline needs."""
    from paceline.cli.doctor import examine

    if not examine(output.screen()):
        raise typer.Exit(1)


@command(bench)
def comm(
    output: Output,
    workers: Workers = 4,
    repeats: Repeats = 15,
    size: Annotated[
        list[int] | None,
        Option("--size", help="Bytes of the vector; may be repeated. [default: 4 KB, 4 MB, 64 MB]"),
    ] = None,
) -> None:
    """Average a vector among processes: shared memory, gloo, and a plain copy as the limit."""
    from paceline.cli.benches import show_comm

    for nbytes in size or ():
        at_least("size", nbytes, 4)
    show_comm(output.screen(), workers, repeats, size)


@command(bench)
def step(output: Output, workers: Workers = 2, repeats: Repeats = 40) -> None:
    """Add each way of training to a step of 1.9 million parameters: ours, DDP, PostLocalSGD."""
    from paceline.cli.benches import show_step

    show_step(output.screen(), workers, repeats)


@command(bench, name="sim")
def bench_sim(
    output: Output,
    workers: Workers = 64,
    repeats: Repeats = 5,
    steps: Annotated[int, Option("--steps", help="Steps of each worker in a repeat.")] = 10,
) -> None:
    """Simulate: events a second, and what that adds to the gradients of the built-in networks."""
    from paceline.cli.benches import show_sim

    at_least("steps", steps, 1)
    show_sim(output.screen(), workers, repeats, steps)
