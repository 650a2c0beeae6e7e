"""The options that commands share, each declared once as a field of a dataclass.

A command takes such a dataclass as one argument; :func:`command` makes options of its fields.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer import Argument, Option

from paceline.cli.screen import Screen
from paceline.common.faults import EXAMPLE, Fault, parse_fault
from paceline.common.options import above, at_least, check_device, one_of
from paceline.errors import PacelineError, UsageError
from paceline.sim.cluster import read_faults
from paceline.sim.models import MODELS

StrategySpec = Annotated[
    str, Option("--strategy", "-s", help='A method: "sasgd", or "sasgd(interval=8)".')
]
Workers = Annotated[int, Option("--workers", "-w", help="Number of workers.")]
TransportName = Annotated[
    str | None,
    Option(
        "--transport",
        help="shared_memory, distributed (gloo, nccl), or hosts (ZeroMQ)."
        " [default: shared_memory on Linux]",
    ),
]
Listen = Annotated[
    str | None,
    Option("--listen", metavar="ADDRESS:PORT", help="Where this host listens for the others."),
]
TokenFile = Annotated[
    Path | None,
    Option("--token-file", help="Holds the token of a run on many hosts. [default: run.token]"),
]
NoEncryption = Annotated[
    bool,
    Option(
        "--no-encryption",
        help="Do not encrypt between hosts; for a network on which nobody listens. Give it on"
        " every host.",
    ),
]
Device = Annotated[
    str, Option("--device", help="cpu, or cuda to spread the workers over this machine's GPUs.")
]
AsModel = Annotated[
    str | None,
    Option(
        "--as-model",
        metavar="NAME",
        help=f"Use the sizes and step times of this model: {', '.join(MODELS)}.",
    ),
]
Script = Annotated[
    Path | None,
    Argument(
        metavar="SCRIPT",
        help="Python file that defines train(worker), or calls pl.init(); its own arguments"
        " follow after --. [default: the built-in task]",
        show_default=False,
    ),
]
GlobalBatchSize = Annotated[
    int | None,
    Option(
        "--global-batch",
        help="Samples of all workers in a step, shared out equally; synchronous methods only.",
    ),
]
BatchShares = Annotated[
    str | None,
    Option(
        "--batch",
        metavar="by-speed",
        help="Divide each global batch by the measured speeds of the workers, not equally;"
        " synchronous methods only.",
    ),
]
Batched = Annotated[
    str,
    Option(
        "--batched",
        help="on: compute the gradients of many workers together; auto: where that is faster.",
    ),
]
NoTrace = Annotated[
    bool, Option("--no-trace", help="Write no trace; replays and timelines need one.")
]
BenchDevice = Annotated[str, Option("--device", help="cpu, or one GPU: cuda, cuda:1, ...")]
Repeats = Annotated[int, Option("--repeats", help="How often each is timed.")]


Log = Annotated[
    list[str] | None,
    Option(
        "--log",
        metavar="NAME",
        help="Also log to csv, mlflow, tensorboard or wandb; may be repeated.",
    ),
]


@dataclass(kw_only=True)
class OutputOptions:
    """The options for a command's output."""

    json: Annotated[bool, Option("--json", help="Print one JSON object as the last line.")] = False
    quiet: Annotated[bool, Option("--quiet", "-q", help="Show only the outcome.")] = False
    verbose: Annotated[bool, Option("--verbose", "-v", help="Show the records of every rank.")] = (
        False
    )

    def screen(self) -> Screen:
        """The screen to write to."""
        return Screen(as_json=self.json, quiet=self.quiet, verbose=self.verbose)


@dataclass(kw_only=True)
class ScriptOptions(OutputOptions):
    """The options for a script; ``script_arguments`` is what was typed after ``--``."""

    script: Script = None
    function: Annotated[
        str | None,
        Option("--function", metavar="NAME", help="The function to call. [default: train]"),
    ] = None
    script_arguments: Sequence[str] = field(init=False, default=())


@dataclass(kw_only=True)
class TrainingOptions(ScriptOptions):
    """The options for what is trained, and where the run is written."""

    settings: Annotated[
        list[str],
        Option("--set", metavar="NAME=VALUE", help="An option of the strategy; may be repeated."),
    ] = field(default_factory=list)
    seed: Annotated[int, Option("--seed", help="Seed of everything random.")] = 0
    epochs: Annotated[int | None, Option("--epochs", help="Passes over the data.")] = None
    steps: Annotated[int | None, Option("--steps", help="End after so many steps per worker.")] = (
        None
    )
    lr: Annotated[
        float | None, Option("--lr", help="Learning rate. [default: tuned for the method]")
    ] = None
    batch_size: Annotated[
        int | None,
        Option("--batch-size", help="Samples per batch of a worker. [default: 128 / workers]"),
    ] = None
    model: Annotated[
        str | None,
        Option(
            "--model",
            help="Network: cnn or mlp of the built-in task; resnet20, resnet18 (CIFAR-10) or gpt"
            " (characters), with --data.",
        ),
    ] = None
    data: Annotated[
        str | None,
        Option(
            "--data",
            help="Folder with the whole Fashion-MNIST as IDX files, with CIFAR-10, or with a text.",
        ),
    ] = None
    full: Annotated[
        bool, Option("--full", help="Use the whole Fashion-MNIST, if this machine has it.")
    ] = False
    out: Annotated[
        Path | None,
        Option("--out", help="Folder for metrics, trace and model. [default: runs/...]"),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The arguments for ``train``."""
        names = ("epochs", "steps", "lr", "batch_size", "model", "data")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(kw_only=True)
class FaultOptions:
    """The options for faults and for what the run does about losses."""

    fault: Annotated[
        list[str],
        Option("--fault", help=f'A fault to inject: "{EXAMPLE}"; may be repeated.'),
    ] = field(default_factory=list)
    faults: Annotated[
        Path | None, Option("--faults", help="A TOML file with [[faults]] to inject.")
    ] = None
    on_loss: Annotated[
        str | None,
        Option(
            "--on-loss",
            help="continue without a lost worker, or stop. [default: stop if synchronous]",
        ),
    ] = None
    max_restarts: Annotated[
        int, Option("--max-restarts", help="How many lost workers are restarted.")
    ] = 0

    def script(self) -> list[Fault]:
        """All faults to inject."""
        faults = [parse_fault(text) for text in self.fault]
        return faults if self.faults is None else [*faults, *read_faults(self.faults)]

    def policy(self) -> dict[str, Any]:
        """What the run does about losses, as arguments of a run."""
        return {"on_loss": self.on_loss, "max_restarts": self.max_restarts}


@dataclass(kw_only=True)
class CheckpointOptions:
    """The options for checkpoints."""

    checkpoint_steps: Annotated[
        int | None,
        Option("--checkpoint-steps", help="Save a checkpoint every so many steps of a worker."),
    ] = None
    checkpoint_minutes: Annotated[
        float | None,
        Option("--checkpoint-minutes", help="Save a checkpoint every so many minutes."),
    ] = None
    keep: Annotated[int, Option("--keep", help="How many checkpoints to keep.")] = 2
    resume: Annotated[
        bool,
        Option("--resume", help="Resume from the newest checkpoint in --out, if there is one."),
    ] = False

    def policy(self) -> dict[str, Any]:
        """These options as arguments of a run."""
        return vars(self)


@dataclass(kw_only=True)
class CalibrationOptions(ScriptOptions):
    """The options for a calibration."""

    seed: Annotated[int, Option("--seed", help="Seed of everything random.")] = 0
    steps: Annotated[
        int | None, Option("--steps", help="End after so many steps per worker. [built-in: 100]")
    ] = None
    batch_size: Annotated[
        int | None,
        Option("--batch-size", help="Samples per batch of a worker. [built-in: 128 / workers]"),
    ] = None
    model: Annotated[
        str | None,
        Option(
            "--model",
            help="Network of the built-in task: cnn, mlp or wide (1.9 million parameters)."
            " [default: cnn; with --check, mlp and wide]",
        ),
    ] = None
    transport: TransportName = None
    device: BenchDevice = "cpu"
    listen: Listen = None
    token_file: TokenFile = None
    no_encryption: NoEncryption = False
    rounds: Annotated[int, Option("--rounds", help="How often everything is measured.")] = 3
    out: Annotated[
        Path, Option("--out", help="The cluster file; for several models, one each.")
    ] = Path("machine.toml")

    def arguments(self) -> dict[str, Any]:
        """The arguments for ``train``."""
        names = ("steps", "batch_size", "model")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class FullOptions:
    """The options of ``paceline papers --full``."""

    scale: Annotated[
        float, Option("--scale", help="With --full: the share of the epochs to train.")
    ] = 1.0
    minutes: Annotated[
        float | None,
        Option("--minutes", help="With --full: end after so long; the next call goes on."),
    ] = None
    processes: Annotated[
        int | None, Option("--processes", help="With --full: runs at a time. [default: the cores]")
    ] = None
    data: Annotated[
        Path | None,
        Option("--data", help="With --full: folder of CIFAR-10, for ResNet-20 on it."),
    ] = None
    device: BenchDevice = "cpu"
    batched: Batched = "off"

    def check(self, full: bool) -> None:
        """Refuse them without ``--full``, and values out of range."""
        for each in fields(self):
            if not full and getattr(self, each.name) != each.default:
                raise UsageError(f"--{each.name} must not be given without --full")
        above("scale", self.scale, 0)
        if self.minutes is not None:
            above("minutes", self.minutes, 0)
        if self.processes is not None:
            at_least("processes", self.processes, 1)
        one_of("batched", self.batched, ("auto", "on", "off"))
        check_device(self.device)


def refuse_together(
    context: typer.Context, option: str, allowed: Container[str], reason: str
) -> None:
    """Refuse other options together with ``option``, except those ``allowed``."""
    named = {p.name: max(p.opts, key=len) for p in context.command.params if p.name not in allowed}
    typed = [text for name, text in named.items() if is_typed(context, name or "")]
    for text in [*typed, *(["--"] if context.obj else [])]:
        raise UsageError(f"{text} must not be given with {option}: {reason}")


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was typed, so that its value is not a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def command(group: typer.Typer, **more: Any) -> Callable[[Callable[..., None]], None]:
    """Make a command of a function; its errors become one message and an exit code."""

    def register(body: Callable[..., None]) -> None:
        hints = get_type_hints(body, include_extras=True)
        shared: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

        @functools.wraps(body)
        def run(**given: Any) -> None:
            made = {
                name: kind(**{f.name: given.pop(f.name) for f in fields(kind) if f.init})
                for name, kind in shared.items()
            }
            context = given["context"] if "context" in hints else given.pop("context")
            output = next(each for each in made.values() if isinstance(each, OutputOptions))
            with errors_as_exit_codes(output):
                _hand_on(context.obj or (), output)
                body(**made, **given)

        _show_options(run, body, hints, shared)
        group.command(**more)(run)

    return register


def _hand_on(script_arguments: Sequence[str], options: OutputOptions) -> None:
    """Give a command what was typed after ``--``; refuse it where there can be no script."""
    if isinstance(options, ScriptOptions):
        options.script_arguments = script_arguments
    elif script_arguments:
        raise UsageError("-- must be given with a script: paceline run SCRIPT -- ...")


def _show_options(run: Any, body: Any, hints: dict[str, Any], shared: Mapping[str, Any]) -> None:
    """Give ``run`` the parameters of ``body``, its dataclasses replaced by their fields."""
    own = [p for p in inspect.signature(body).parameters.values() if p.name not in shared]
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(annotation=hints[p.name], kind=kind) for p in own]
    if "context" not in hints:
        parameters.append(inspect.Parameter("context", kind, annotation=typer.Context))
    every = [(each, f) for each in [*shared.values()][::-1] for f in fields(each) if f.init]
    for each, f in sorted(every, key=lambda e: e[1].name in OutputOptions.__dataclass_fields__):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        hint = get_type_hints(each, include_extras=True)[f.name]
        parameters.append(inspect.Parameter(f.name, kind, default=default, annotation=hint))
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}


@contextmanager
def errors_as_exit_codes(output: OutputOptions) -> Iterator[None]:
    """Print an error as one message, and exit with its exit code."""
    warnings.showwarning = _show_warning
    try:
        yield
    except KeyboardInterrupt as interrupt:
        print("; ".join(["paceline: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        if any(thread.name.startswith("rank-") for thread in threading.enumerate()):
            # A simulated rank still runs; if it writes while the interpreter exits, that aborts.
            sys.stderr.flush()
            os._exit(130)
        raise typer.Exit(130) from None
    except PacelineError as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"paceline: {error}{notes}", file=sys.stderr)
        if output.verbose:
            traceback.print_exception(error)
        summary = str(error).partition("\n")[0]
        output.screen().emit({"error": summary, "exit_code": error.exit_code})
        raise typer.Exit(error.exit_code) from None


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"paceline: warning: {message}", file=sys.stderr)
