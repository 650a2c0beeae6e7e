"""``paceline calibrate``: write this machine as a cluster file, and check its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.benches import one_device
from paceline.cli.compare import split_specs, workers_of
from paceline.cli.options import CalibrationOptions, TrainingOptions
from paceline.cli.screen import Screen, number, size
from paceline.cli.task import find_task, refuse_without_script
from paceline.cli.train import default_transport
from paceline.common.options import at_least, one_of
from paceline.common.seeds import check_seed
from paceline.errors import UsageError
from paceline.lab.tasks.recipe import MODELS
from paceline.launcher.capacity import check_real_workers
from paceline.launcher.fork_client import ForkServer
from paceline.launcher.many_hosts import ManyHosts
from paceline.launcher.transports import TRANSPORTS
from paceline.strategies import make_strategy

if TYPE_CHECKING:
    from paceline.lab.calibrate.check import Row
    from paceline.lab.calibrate.machine import Calibration, Subject

STRATEGIES = ("allreduce", "sasgd", "gossip", "downpour", "easgd")
WORKERS = ("2", "4")
CHECKED_MODELS = ("mlp", "wide")
STEPS = 100
BUSY = 0.05
"""Report other programs if they used more than this share of the cores."""
MARK = "# Measured by paceline calibrate"
BUILT_IN = {"module": "paceline.lab.calibrate.task", "name": "train"}


def refuse_without_check(**options: Any) -> None:
    """Refuse options that need ``--check``."""
    for name, value in options.items():
        if value:
            raise UsageError(f"--{name} ({value}) must be given together with --check")


def show_calibration(chosen: CalibrationOptions) -> None:
    """Measure, write the file, and show the figures."""
    screen = chosen.screen()
    (subject,) = _subjects(chosen, ["cnn"])
    _check_file(chosen.out)
    found = _calibrate(screen, subject, chosen)
    _write(found, chosen.out)
    _show(screen, found)
    screen.say(f"Written to {chosen.out}. Use it with paceline sim --cluster {chosen.out}")
    screen.emit({"cluster": str(chosen.out), **_facts(found), "fits": found.fits()})


def show_check(
    chosen: CalibrationOptions, specs: Sequence[str], workers: Sequence[str], repeats: int
) -> None:
    """Calibrate, predict, measure, and show the error of each prediction."""
    screen = chosen.screen()
    if chosen.listen is not None:
        raise UsageError("--check makes its runs on this host: it must not be given with --listen")
    at_least("repeats", repeats, 1)
    strategies = split_specs(specs) or list(STRATEGIES)
    methods = {spec: make_strategy(spec) for spec in strategies}
    counts = workers_of(list(workers or WORKERS), methods, virtual=False)
    subjects = _subjects(chosen, CHECKED_MODELS)
    files = [_file(chosen.out, subject, many=len(subjects) > 1) for subject in subjects]
    for file in files:
        _check_file(file)
    from paceline.lab.calibrate import check as c

    calibrations = {}
    for subject, file in zip(subjects, files, strict=True):
        found = calibrations[subject.name] = _calibrate(screen, subject, chosen)
        _write(found, file)
        _show(screen, found)
    setups = [
        c.Setup(subject, count, spec)
        for subject in subjects
        for count in counts
        for spec in strategies
    ]
    screen.say(f"Predicting {len(setups)} runs, before measuring any of them.")
    rows = c.predict(setups, calibrations)
    screen.say(f"Measuring each run {repeats} times, in turn.")
    c.measure(rows, repeats)
    _show_rows(screen, rows)
    rankings = c.rank_methods(rows)
    _show_rankings(screen, rankings)
    screen.emit(
        {
            "rows": [row.to_json() for row in rows],
            "ranking": rankings,
            "within": sum(row.within for row in rows),
            "repeats": repeats,
            "clusters": [str(file) for file in files],
            "calibrations": [
                {**_facts(each), "fits": each.fits()} for each in calibrations.values()
            ],
        }
    )


# What to measure ---------------------------------------------------------------------------------


def _subjects(chosen: CalibrationOptions, models: Sequence[str]) -> list[Subject]:
    """The script, or the built-in task with the chosen model or else each of ``models``."""
    hosts = _other_host(chosen)
    transport = chosen.transport or (default_transport() if hosts is None else "hosts")
    one_of("transport", transport, TRANSPORTS)
    at_least("rounds", chosen.rounds, 1)
    if chosen.script is None:
        refuse_without_script(chosen)
        named = [chosen.model] if chosen.model is not None else models
        tasks = [_built_in(chosen, model) for model in named]
    else:
        given: dict[str, Any] = {"script": chosen.script, "function": chosen.function}
        training = TrainingOptions(**given, seed=chosen.seed, **chosen.arguments())
        training.script_arguments = chosen.script_arguments
        task = find_task(training)
        tasks = [(task.name, task.reference, task.arguments)]
    check_seed(chosen.seed)
    check_real_workers(4)
    ForkServer.warm_up()
    from paceline.lab.calibrate.machine import Subject

    return [
        Subject(
            name=name,
            train=train,
            arguments=arguments,
            transport=transport,
            seed=chosen.seed,
            hosts=hosts,
            device=one_device(chosen.device),
        )
        for name, train, arguments in tasks
    ]


def _other_host(chosen: CalibrationOptions) -> ManyHosts | None:
    """Where this host waits for the one at the other end of the link; None without a link."""
    if chosen.listen is None:
        for option, value in (
            ("token-file", chosen.token_file),
            ("no-encryption", chosen.no_encryption),
        ):
            if value:
                raise UsageError(
                    f"--{option} needs --listen: the address at which another host joins"
                )
        return None
    return ManyHosts.of(2, chosen.listen, chosen.token_file, not chosen.no_encryption, None)


def _built_in(chosen: CalibrationOptions, model: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    one_of("model", model, (*MODELS, "wide"))
    arguments = {"steps": STEPS, **chosen.arguments(), "model": model}
    for name in ("steps", "batch_size"):
        at_least(name, arguments.get(name, 1), 1)
    return model, BUILT_IN, arguments


def _calibrate(screen: Screen, subject: Subject, chosen: CalibrationOptions) -> Calibration:
    from paceline.lab.calibrate.machine import Effort, calibrate

    what = f"{subject.name} over {subject.transport}"
    if subject.hosts is not None:
        what = f"the link to another host, then {what}"
    screen.say(f"Measuring {what}.")
    effort = Effort(rounds=chosen.rounds)
    if chosen.steps is not None:
        effort = replace(effort, steps=min(effort.steps, chosen.steps))
    return calibrate(subject, effort, screen.say)


# The file ----------------------------------------------------------------------------------------


def _file(out: Path, subject: Subject, many: bool) -> Path:
    return out.with_stem(f"{out.stem}-{subject.name}") if many else out


def _check_file(path: Path) -> None:
    """Refuse a path that cannot be written, and a file that is not a calibration."""
    if path.suffix != ".toml":
        raise UsageError(f"out ({path}) must end in .toml")
    if not path.parent.is_dir():
        raise UsageError(f"out ({path}) must be in a folder that exists")
    if path.exists() and not (path.is_file() and path.read_bytes().startswith(MARK.encode())):
        raise UsageError(f"out ({path}) exists and is not the file of an earlier calibration")


def _write(found: Calibration, path: Path) -> None:
    from paceline.lab.calibrate.machine import to_toml

    text = to_toml(found)
    assert text.startswith(MARK), "_check_file recognizes the file by it"
    path.write_text(text, encoding="utf-8")


# Showing the outcome ------------------------------------------------------------------------------


def _facts(found: Calibration) -> dict[str, Any]:
    return {
        "what": found.subject.name,
        "transport": found.subject.transport,
        "cores": found.cores,
        "model_bytes": found.nbytes,
        "crowding": found.crowding,
        "busy": found.queued,
    }


def _show(screen: Screen, found: Calibration) -> None:
    batch = found.batches[-1]
    varies = found.variation
    kinds = {"none": "", "trace": ", varying as recorded"}
    variation = kinds.get(varies.kind, f", {varies.kind} {varies.value:.2f}")
    line = found.network
    other = [("a message to the other host", _ms(line.seconds(found.nbytes)), line)] if line else []
    rows = [
        (f"step of {batch} samples{variation}", _ms(found.gradient.seconds(batch)), found.gradient),
        (f"loading {batch} samples", _ms(found.loading.seconds(batch)), found.loading),
        ("a message on the link", _ms(found.link.seconds(found.nbytes)), found.link),
        *other,
        *(
            (f"own work: {w}", _ms(line.seconds(found.nbytes)), line)
            for w, line in found.work.items()
        ),
        ("a server's request", _ms(found.serve.seconds(found.nbytes)), found.serve),
    ]
    screen.table(
        [f"{found.subject.name}, {size(found.nbytes)}", "ms", "error of the fit"],
        [(what, ms, f"{line.error:.1%}") for what, ms, line in rows],
    )
    text = (
        f"{found.cores} cores, one thread per rank. With 4 ranks the own time of a step is"
        f" {found.crowding:.2f} times as long."
    )
    if found.queued > BUSY:
        text += (
            f" Other programs used the cores for {found.queued:.0%} of the time. The figures"
            " exclude that, so real runs will be slower than predicted."
        )
    screen.say(screen.wrap(text))


def _show_rows(screen: Screen, rows: Sequence[Row]) -> None:
    screen.table(
        ["run", "predicted samples/s", "measured", "error", "spread", "within"],
        [
            (
                row.setup.what,
                number(round(row.predicted)),
                number(round(row.median)),
                f"{row.error:+.0%}",
                f"{row.spread:.0%}",
                "yes" if row.within else "no",
            )
            for row in rows
        ],
    )
    good = sum(row.within for row in rows)
    screen.show(f"{good} of {len(rows)} errors are within 15 %, or twice the spread of the runs.")
    busy = sum(sum(row.busy) for row in rows) / sum(len(row.busy) for row in rows)
    if busy > BUSY:
        screen.show(f"Other programs used {busy:.0%} of the cores, which adds to the errors.")


def _show_rankings(screen: Screen, rankings: Sequence[dict[str, Any]]) -> None:
    for ranking in rankings:
        verdict = "right" if ranking["right"] else "wrong"
        predicted, measured = (" > ".join(ranking[key]) for key in ("predicted", "measured"))
        screen.show(f"{ranking['where']}: ranking {verdict}, {predicted}")
        if predicted != measured:
            screen.show(f"  measured: {measured}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
