"""The commands: each checks its options, runs, and shows the outcome."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from paceline._version import __version__
from paceline.cli.options import (
    AsModel,
    Batched,
    BatchShares,
    BenchDevice,
    CalibrationOptions,
    CheckpointOptions,
    Device,
    FaultOptions,
    FullOptions,
    GlobalBatchSize,
    Listen,
    Log,
    NoEncryption,
    NoTrace,
    OutputOptions,
    Repeats,
    StrategySpec,
    TokenFile,
    TrainingOptions,
    TransportName,
    Workers,
    command,
    is_typed,
    refuse_together,
)
from paceline.cli.screen import Screen, show_result
from paceline.cli.task import choose_out, find_task
from paceline.cli.train import Job, join_hosts, join_run, replay_run
from paceline.common.options import at_least, one_of
from paceline.common.seeds import check_seed
from paceline.errors import UsageError
from paceline.launcher.capacity import check_virtual_workers
from paceline.record.folder import check_out
from paceline.sim.cluster import PRESETS, load_cluster
from paceline.sim.models import as_model as with_model
from paceline.strategies import STRATEGIES, make_strategy, parse_settings

if TYPE_CHECKING:
    from paceline.record.result import Result

CLUSTER = "ethernet-10g"
ALLOWED_WITH_REPLAY = (
    "replay",
    "cluster",
    "as_model",
    "no_trace",
    "out",
    "json",
    "quiet",
    "verbose",
)
_STRATEGIES = f"Strategies: {', '.join(STRATEGIES)}; paceline strategies explains them."
_CLUSTERS = f"{_STRATEGIES} Clusters: {', '.join(PRESETS)}, or the path of a TOML file."

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Time Paceline and its alternatives in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Train PyTorch models on workers that need not march in lockstep."""


@command(app, epilog=_STRATEGIES)
def run(
    training: TrainingOptions,
    injected: FaultOptions,
    saving: CheckpointOptions,
    context: typer.Context,
    strategy: StrategySpec = "allreduce",
    workers: Annotated[
        int | None, Option("--workers", "-w", help="How many workers. [default: 2]")
    ] = None,
    transport: TransportName = None,
    device: Device = "cpu",
    no_trace: NoTrace = False,
    global_batch: GlobalBatchSize = None,
    batch: BatchShares = None,
    log: Log = None,
    live: Annotated[
        bool, Option("--live", help="Show the run on a page while it goes on (paceline watch).")
    ] = False,
    on: Annotated[
        str | None, Option("--on", help="ray: have the workers on the nodes of a Ray cluster.")
    ] = None,
    hosts: Annotated[
        int, Option("--hosts", help="How many hosts; each of the others joins with --join.")
    ] = 1,
    workers_per_host: Annotated[
        int | None,
        Option(
            "--workers-per-host",
            help="How many workers a host takes at most; the others wait for hosts that join in"
            " mid-run.",
        ),
    ] = None,
    listen: Listen = None,
    token_file: TokenFile = None,
    no_encryption: NoEncryption = False,
    join: Annotated[
        str | None,
        Option(
            "--join",
            metavar="ADDRESS:PORT|RUN",
            help="Train for the run that listens there; or ask the run that writes this folder to"
            " start a worker that replaces a lost one.",
        ),
    ] = None,
) -> None:
    """Train in real processes, on this machine, on many hosts, or under a launcher."""
    if join is not None and re.fullmatch(r".+:\d+", join):
        fits = ("script", "join", "token_file", "no_encryption", "json", "quiet", "verbose")
        refuse_together(context, "--join", fits, "the run at that address decides it")
        raise typer.Exit(join_hosts(training.script, join, token_file, not no_encryption))
    if join is not None:
        allowed = ("join", "json", "quiet", "verbose")
        refuse_together(context, "--join", allowed, "the run in that folder decides it")
        join_run(training.screen(), Path(join))
        return
    options = {"strategy": strategy, "global_batch": global_batch, "batch": batch}
    job, device = _job(context, training, saving, no_trace, {**options, "device": device})
    screen = training.screen()
    policy = {**injected.policy(), **saving.policy(), "log": log or ()}
    if on is not None:
        one_of("on", on, ("ray",))
    many = {"on": on, "workers_per_host": workers_per_host, "listen": listen}
    if hosts != 1 or no_encryption or any(value is not None for value in many.values()):
        policy |= {**many, "hosts": hosts, "token_file": token_file}
        policy |= {"encryption": not no_encryption}
        transport = transport or "hosts"
        if workers is None and workers_per_host is not None:
            workers = hosts * workers_per_host
    result = job.run(screen, workers, transport, device, injected.script(), policy, live)
    if result is not None:
        show_result(screen, result, job.task.name, "real processes")
        _exit_if_failed(result)


@command(app, epilog=_CLUSTERS)
def sim(
    training: TrainingOptions,
    injected: FaultOptions,
    saving: CheckpointOptions,
    context: typer.Context,
    strategy: StrategySpec = "allreduce",
    workers: Workers = 8,
    cluster: Annotated[
        str, Option("--cluster", "-c", help="A named cluster, or a TOML file.")
    ] = CLUSTER,
    as_model: AsModel = None,
    no_trace: NoTrace = False,
    global_batch: GlobalBatchSize = None,
    batch: BatchShares = None,
    batched: Batched = "off",
    device: BenchDevice = "cpu",
    log: Log = None,
    replay: Annotated[
        Path | None,
        Option(
            "--replay", metavar="RUN", help="Follow the recorded order of events of a real run."
        ),
    ] = None,
) -> None:
    """Train in virtual time on a simulated cluster."""
    screen, target = training.screen(), with_model(load_cluster(cluster), as_model)
    script = injected.script()
    if replay is not None:
        refuse_together(context, "--replay", ALLOWED_WITH_REPLAY, "the recorded run decides it")
        replay_run(screen, replay, target, training.out, trace=not no_trace)
        return
    options = {"strategy": strategy, "global_batch": global_batch, "batch": batch}
    job, _ = _job(context, training, saving, no_trace, options)
    check_virtual_workers(workers, job.strategy)
    target.check_faults([*target.faults, *script], len(job.strategy.roles(workers)))
    policy = {**injected.policy(), **saving.policy(), "batched": batched, "log": log or ()}
    policy["device"] = device
    result = job.simulate(screen, workers, target, faults=script, policy=policy)
    show_result(screen, result, job.task.name, target.name)
    _exit_if_failed(result)


def _exit_if_failed(result: Result) -> None:
    """Exit with 1 if all workers were set aside, or a checkpoint or the model was not saved."""
    if result.diverged:
        reason = "the updates of every worker were not finite, or exploded; a smaller learning rate"
        print(f"paceline: training ended early: {reason} may help", file=sys.stderr)
    if result.diverged or result.checkpoint_error or result.model_error:
        raise typer.Exit(1)


def _job(
    context: typer.Context,
    training: TrainingOptions,
    saving: CheckpointOptions,
    no_trace: bool,
    options: dict[str, Any],
) -> tuple[Job, str]:
    """What to train and how, and on which device.

    What a script that runs as a whole gives to ``pl.init`` counts where nothing was typed.
    """
    task = find_task(training)
    options |= {"seed": training.seed, "out": training.out}
    left = [name for name in task.asked if name not in options]
    for name in options:
        if name in task.asked and not is_typed(context, name):
            options[name] = task.value(name)
    if left:
        names = ", ".join(left)
        training.screen().say(f"{names} of pl.init in {task.name}: this command decides instead")
    if saving.resume and options["out"] is None:
        raise UsageError("--resume needs --out, the folder of the run to resume")
    device = options.pop("device", "cpu")
    method = make_strategy(options.pop("strategy"), parse_settings(training.settings))
    out = options.pop("out")
    out = None if out is None else Path(out)
    return Job(task=task, strategy=method, out=out, trace=not no_trace, **options), device


@command(app, epilog=_CLUSTERS)
def compare(
    training: TrainingOptions,
    strategy: Annotated[
        list[str] | None,
        Option(
            "--strategy",
            "--strategies",
            "-s",
            help="Methods, separated by commas or repeated. [default: all]",
        ),
    ] = None,
    workers: Annotated[
        list[str] | None,
        Option("--workers", "-w", help="Numbers of workers, likewise. [default: 8]"),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        Option("--cluster", "-c", help=f"Clusters, likewise. [default: {CLUSTER}]"),
    ] = None,
    as_model: AsModel = None,
    real: Annotated[bool, Option("--real", help="Use real processes, not virtual time.")] = False,
    target: Annotated[
        float | None,
        Option("--target", help="Measure the time to this accuracy. [default: 0.8, built-in task]"),
    ] = None,
    seeds: Annotated[
        str | None,
        Option("--seeds", help="How many seeds (3), or which (0,1,2). [default: only --seed]"),
    ] = None,
    transport: TransportName = None,
    device: Device = "cpu",
) -> None:
    """Compare strategies, numbers of workers, and clusters. Makes a table and an HTML report."""
    from paceline.cli import compare as c

    task, screen = find_task(training), training.screen()
    if real and as_model is not None:
        raise UsageError(
            f"--as-model ({as_model}) must not be used with --real: it needs a simulation"
        )
    names = [] if real else c.split_specs(cluster or [CLUSTER])
    clusters = [with_model(load_cluster(name), as_model) for name in names]
    strategies = c.strategies_of(strategy or [], parse_settings(training.settings))
    comparison = c.Comparison(
        task=task,
        strategies=strategies,
        workers=c.workers_of(workers or ["2" if real else "8"], strategies, virtual=not real),
        clusters=clusters,
        target=c.TARGET if target is None and training.script is None else target,
        seeds=c.seeds_of(seeds, training.seed),
        out=choose_out(training.out, "compare"),
        transport=transport,
        device=device,
    )
    comparison.run(screen)
    comparison.show(screen)
    screen.emit({"rows": comparison.rows, "report": str(comparison.report)})


@command(app, epilog=_CLUSTERS)
def plan(
    training: TrainingOptions,
    cluster: Annotated[
        str,
        Option("--cluster", "-c", help="Where the run would be: see paceline calibrate."),
    ] = CLUSTER,
    target: Annotated[
        float | None,
        Option("--target", help="The accuracy to reach. [default: 0.8, built-in task]"),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        Option(
            "--strategy",
            "--strategies",
            "-s",
            help="Methods, separated by commas or repeated. [default: all, at several intervals]",
        ),
    ] = None,
    workers: Annotated[
        list[str] | None,
        Option("--workers", "-w", help="Numbers of workers, likewise. [default: 2,4,8]"),
    ] = None,
    as_model: AsModel = None,
    price: Annotated[
        float | None, Option("--price", help="Of one process for an hour, in any currency.")
    ] = None,
    mtbf: Annotated[
        str | None,
        Option("--mtbf", metavar="TIME", help="Mean time between failures of a process: 12h."),
    ] = None,
    seeds: Annotated[str, Option("--seeds", help="How many seeds (3), or which (0,1,2).")] = "3",
    check: Annotated[
        bool, Option("--check", help="Make the best runs for real, on this machine.")
    ] = False,
) -> None:
    """Say which method, how many workers and which interval reach an accuracy soonest."""
    from paceline.cli import compare as c
    from paceline.cli import plan as p

    task = find_task(training)
    if training.settings:
        raise UsageError("--set is for one method: write its options as in sasgd(interval=8)")
    if training.out is not None:
        raise UsageError(f"--out ({training.out}) is not used: a plan writes nothing")
    if target is None and training.script is not None:
        raise UsageError("--target is missing: the accuracy that your script is to reach")
    p.show_plan(
        training.screen(),
        task,
        with_model(load_cluster(cluster), as_model),
        p.goal_of(c.TARGET if target is None else target, price, mtbf),
        p.candidates_of(strategy or [], workers or ["2,4,8"]),
        c.seeds_of(seeds, training.seed),
        check,
    )


@command(app)
def demo(
    output: OutputOptions,
    out: Annotated[
        Path, Option("--out", help="Folder of the runs; those in it are not repeated.")
    ] = Path("runs/demo"),
) -> None:
    """Train the built-in task in several ways and compare them; takes about a minute."""
    from paceline.cli.demo import show_demo

    check_out(out)
    show_demo(output.screen(), out)


@command(app)
def drill(
    output: OutputOptions,
    cases: Annotated[
        list[str] | None,
        Argument(metavar="[CASE]...", help="Which faults. [default: all]", show_default=False),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        Option("--strategy", "-s", help="Methods; may be repeated. [default: those of each fault]"),
    ] = None,
    full: Annotated[
        bool, Option("--full", help="All methods, and the long cases; takes an hour.")
    ] = False,
    seeds: Annotated[int, Option("--seeds", help="How many runs for each fault.")] = 1,
    simulated: Annotated[
        bool, Option("--sim", help="In virtual time; only the cases that can be simulated.")
    ] = False,
    device: BenchDevice = "cpu",
    hosts: Annotated[
        int, Option("--hosts", help="Over so many hosts, made of namespaces on this machine.")
    ] = 1,
) -> None:
    """Kill, freeze and disturb real runs on purpose. Shows how each run coped."""
    from paceline.cli import drill as d

    at_least("seeds", seeds, 1)
    at_least("hosts", hosts, 1)
    trials = d.choose(cases or [], strategy or [], full, simulated, device, hosts)
    d.drill(output.screen(), trials, simulated, seeds, device, hosts)


@command(app)
def watch(
    output: OutputOptions,
    run: Annotated[Path, Argument(metavar="RUN", help="The folder that the run writes to.")],
    page: Annotated[
        bool, Option("--page", help="Serve a page for a browser, not in this terminal.")
    ] = False,
    listen: Annotated[
        str | None,
        Option(
            "--listen",
            metavar="ADDRESS:PORT",
            help="Where the page is served. [default: only on this machine, at a free port]",
        ),
    ] = None,
) -> None:
    """Show a run while it goes on, or after it: how far it is, its workers, its events."""
    from paceline.cli import watch as w

    if page:
        w.watch_on_page(output.screen(), run, listen)
        return
    if listen is not None:
        raise UsageError(f"--listen ({listen}) must be given with --page")
    w.watch_in_terminal(output.screen(), run)


@command(app)
def report(
    output: OutputOptions,
    folders: Annotated[
        list[Path],
        Argument(metavar="FOLDER...", help="Folder of a comparison, or folders of runs."),
    ],
    target: Annotated[
        float | None,
        Option(
            "--target", help="Measure the time to this accuracy. [default: as in the comparison]"
        ),
    ] = None,
    out: Annotated[
        Path | None, Option("--out", help="The file. [default: report.html in the first folder]")
    ] = None,
) -> None:
    """Write the HTML report of a comparison or of runs."""
    from paceline.report.page import write_report

    screen, path = output.screen(), write_report(folders, target=target, out=out)
    screen.show(f"Report: {path}")
    screen.emit({"report": str(path), "bytes": path.stat().st_size})


@command(app)
def timeline(
    output: OutputOptions,
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN...", help="Folders of runs, real or simulated.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        Option("--out", help="The file; gzipped if it ends in .gz. [default: RUN/timeline.json]"),
    ] = None,
    svg: Annotated[Path | None, Option("--svg", help="Also draw a picture into this file.")] = None,
    from_s: Annotated[
        float | None,
        Option("--from", metavar="S", help="Start so many seconds after the first gradient."),
    ] = None,
    to_s: Annotated[
        float | None, Option("--to", metavar="S", help="End so many seconds after it.")
    ] = None,
) -> None:
    """Show how each rank spent its time. Writes a file for Perfetto (ui.perfetto.dev)."""
    from paceline.cli.timeline import show_timeline

    show_timeline(output.screen(), runs, out, svg, from_s, to_s)


@command(app, epilog=_STRATEGIES)
def calibrate(
    calibration: CalibrationOptions,
    check: Annotated[
        bool, Option("--check", help="Predict real runs, then make them, and show each error.")
    ] = False,
    strategy: Annotated[
        list[str] | None,
        Option("--strategy", "-s", help="With --check: methods. [default: five of all]"),
    ] = None,
    workers: Annotated[
        list[str] | None,
        Option("--workers", "-w", help="With --check: numbers of workers. [default: 2,4]"),
    ] = None,
    repeats: Annotated[
        int | None, Option("--repeats", help="With --check: real runs for each. [default: 5]")
    ] = None,
) -> None:
    """Measure this machine, and write a cluster file. The simulator can then predict its runs."""
    from paceline.cli import calibrate as c

    if not check:
        c.refuse_without_check(strategy=strategy, workers=workers, repeats=repeats)
        c.show_calibration(calibration)
        return
    c.show_check(calibration, strategy or [], workers or [], 5 if repeats is None else repeats)


@command(app)
def papers(
    output: OutputOptions,
    larger: FullOptions,
    name: Annotated[
        str | None, Argument(metavar="[CLAIM]", help="One claim. [default: all]")
    ] = None,
    list_: Annotated[
        bool, Option("--list", help="List the claims and how each is tested; run nothing.")
    ] = False,
    sweep: Annotated[
        bool, Option("--sweep", help="Make the file of learning rates; continues an earlier sweep.")
    ] = False,
    full: Annotated[
        bool,
        Option("--full", help="Test the claims about accuracy in longer runs, rates included."),
    ] = False,
    seed: Annotated[int, Option("--seed", help="Seed of the experiments.")] = 0,
    rates: Annotated[
        Path | None, Option("--rates", help="File of learning rates. [default: the recorded one]")
    ] = None,
    out: Annotated[
        Path | None,
        Option("--out", help="Folder of finished runs; those in it are not repeated."),
    ] = None,
) -> None:
    """Test the claims of the papers. Shows our figures, and whether each claim holds."""
    from paceline.cli import papers as p

    check_seed(seed)
    larger.check(full)
    if full:
        if sweep or rates is not None:
            option = "--sweep" if sweep else "--rates"
            raise UsageError(f"{option} must not be given with --full: it sweeps its own rates")
        _papers_full(output.screen(), name, list_, seed, larger, out)
        return
    choice = p.Choice(name=name, seed=seed, rates=rates, out=out)
    act = p.list_claims if list_ else p.sweep_rates if sweep else p.try_claims
    act(output.screen(), choice)


def _papers_full(
    screen: Screen, name: str | None, list_: bool, seed: int, larger: FullOptions, out: Path | None
) -> None:
    """The full form of the claims."""
    from paceline.cli import papers_full as p
    from paceline.lab.papers.full.setup import Extent

    extent = Extent(
        seed=seed,
        scale=larger.scale,
        data=larger.data,
        device=larger.device,
        batched=larger.batched,
    )
    choice = p.FullChoice(
        name=name, extent=extent, out=out, minutes=larger.minutes, processes=larger.processes
    )
    if list_:
        p.list_full(screen, choice)
    elif code := p.try_full(screen, choice):
        raise typer.Exit(code)


@command(app)
def faulttest(
    output: OutputOptions,
    context: typer.Context,
    method: Annotated[
        list[str] | None, Option("--method", "-m", help="A method; may be repeated. [default: all]")
    ] = None,
    world: Annotated[
        str | None,
        Option("--world", help="Only runs in this world: simulated or hosts. [default: both]"),
    ] = None,
    seeds: Annotated[int, Option("--seeds", help="How many seeds for each method.")] = 200,
    seed: Annotated[int, Option("--seed", help="The first seed.")] = 0,
    replay: Annotated[
        str | None,
        Option("--replay", metavar="SCHEDULE", help="Run one schedule, as it was printed."),
    ] = None,
    corpus: Annotated[
        Path | None,
        Option("--corpus", metavar="FILE", help="Run the schedules in a file, one per line."),
    ] = None,
) -> None:
    """Inject random faults into simulated runs. Checks that the laws of every method hold."""
    from paceline.cli import faulttest as f

    if replay is not None or corpus is not None:
        chosen = "--replay" if replay is not None else "--corpus"
        allowed = (chosen[2:], "json", "quiet", "verbose")
        refuse_together(context, chosen, allowed, "the schedule decides it")
        f.replay(output.screen(), [replay] if replay else f.schedules_in(corpus or Path()))
        return
    f.show_campaign(output.screen(), method or [], world, seeds, seed)


@command(app)
def strategies(
    output: OutputOptions,
    name: Annotated[str | None, Argument(metavar="[NAME]", show_default=False)] = None,
) -> None:
    """List the methods, or explain one of them."""
    from paceline.cli.about import show_strategies, show_strategy

    if name is None:
        show_strategies(output.screen())
    else:
        show_strategy(output.screen(), name)


@command(app)
def doctor(output: OutputOptions) -> None:
    """Check that this machine has what Paceline needs."""
    from paceline.cli.doctor import examine

    if not examine(output.screen()):
        raise typer.Exit(1)


@command(bench)
def comm(
    output: OutputOptions,
    workers: Workers = 4,
    repeats: Repeats = 15,
    size: Annotated[
        list[int] | None,
        Option(
            "--size",
            help="Size of the vector in bytes; may be repeated. [default: 4 KB, 4 MB, 64 MB]",
        ),
    ] = None,
    device: BenchDevice = "cpu",
) -> None:
    """Time an all-reduce: shared memory, gloo, and a plain copy as the lower limit."""
    from paceline.cli.benches import show_comm

    for nbytes in size or ():
        at_least("size", nbytes, 4)
    show_comm(output.screen(), workers, repeats, size, device)


@command(bench)
def step(
    output: OutputOptions,
    workers: Workers = 2,
    repeats: Repeats = 40,
    device: BenchDevice = "cpu",
    hidden: Annotated[
        int,
        Option("--hidden", help="Width of the model; 3072 has 12 million parameters."),
    ] = 1024,
) -> None:
    """Time a training step: Paceline's methods, DDP and PostLocalSGD."""
    from paceline.cli.benches import show_step

    show_step(output.screen(), workers, repeats, device, hidden)


@command(bench, name="hosts")
def bench_hosts(
    output: OutputOptions,
    repeats: Repeats = 5,
    link: Annotated[
        list[str] | None,
        Option(
            "--link",
            help="A line between hosts: 100 Mbit, 1 Gbit or 100 Mbit 50 ms; may be repeated."
            " [default: all]",
        ),
    ] = None,
) -> None:
    """Time messages and all-reduces between hosts, with and without encryption, and gloo's."""
    from paceline.cli.benches import show_hosts

    show_hosts(output.screen(), link or [], repeats)


@command(bench, name="lab")
def bench_lab(
    output: OutputOptions,
    model: Annotated[
        list[str] | None,
        Option(
            "--model", help="A network; may be repeated. [default: mlp, cnn; on a GPU resnet20]"
        ),
    ] = None,
    workers: Annotated[
        list[int] | None,
        Option("--workers", "-w", help="Number of workers; may be repeated. [default: 64]"),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        Option("--strategy", "-s", help="A method; may be repeated. [default: sasgd(interval=16)]"),
    ] = None,
    precision: Annotated[
        list[str] | None,
        Option("--precision", help="default, tf32 or bf16; may be repeated."),
    ] = None,
    device: BenchDevice = "cpu",
    batched: Batched = "on",
    file: Annotated[
        Path | None, Option("--file", help="Holds the rows; those in it are not timed again.")
    ] = None,
    minutes: Annotated[
        float | None, Option("--minutes", help="Begin with nothing more after so long.")
    ] = None,
) -> None:
    """Time the gradients of many virtual workers, computed together and one at a time."""
    from paceline.cli.benches import LabChoice, show_lab

    chosen = LabChoice(
        models=model or (["mlp", "cnn"] if device == "cpu" else ["resnet20"]),
        workers=workers or [64],
        methods=strategy or ["sasgd(interval=16)"],
        precisions=precision or ["default"],
        device=device,
        batched=batched,
        file=file,
        minutes=minutes,
    )
    show_lab(output.screen(), chosen)


@command(bench, name="sim")
def bench_sim(
    output: OutputOptions,
    workers: Workers = 64,
    repeats: Repeats = 5,
    steps: Annotated[int, Option("--steps", help="Steps of each worker in one repeat.")] = 10,
    scale: Annotated[
        bool, Option("--scale", help="Time one step with 8, 64 and 1,000 workers instead.")
    ] = False,
) -> None:
    """Time the simulator: events per second, and its overhead on training."""
    from paceline.cli.benches import show_scale, show_sim

    at_least("steps", steps, 1)
    if scale:
        show_scale(output.screen(), repeats, steps)
    else:
        show_sim(output.screen(), workers, repeats, steps)
