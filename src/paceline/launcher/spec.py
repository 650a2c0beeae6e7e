"""Every option of a run: declared, checked and documented here, and nowhere else.

The fields of a spec are the keyword arguments of :func:`~paceline.launch`,
:func:`~paceline.simulate` and :func:`~paceline.init`; the decorator :func:`takes` makes them so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from paceline.comm.limits import Limits
from paceline.comm.membership import MembershipPolicy
from paceline.common.faults import LINK_KINDS, Fault
from paceline.common.options import check_device, one_of
from paceline.common.reference import Reference, plain_json
from paceline.common.seeds import check_seed
from paceline.errors import UsageError, unknown
from paceline.launcher.capacity import check_real_workers, check_virtual_workers
from paceline.launcher.checkpoints import CheckpointCoordinator
from paceline.launcher.many_hosts import ManyHosts
from paceline.launcher.transports import TRANSPORTS
from paceline.record.loggers import check_loggers
from paceline.record.result import OnMetric
from paceline.sim.cluster import Cluster, load_cluster
from paceline.sim.models import as_model as stand_for
from paceline.strategies import make_strategy, strategy_name
from paceline.strategies.base import Strategy

Train = Callable[..., Any]
P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The options of every run.

    Args:
        strategy: a name, a name with options, or an object.
        seed: the seed of everything random in the run.
        limits: how long workers wait for each other; in virtual time in a simulation.
        out: a folder for configuration, metrics, trace and model.
        on_metric: called with each record of ``worker.log`` as it arrives.
        trace: whether to write a trace to ``out``; replays and timelines need it.
        global_batch: the samples of all workers in a step of a synchronous method. Each worker
            gets an equal share, also when workers come and go, whatever the batch size of its
            loader.
        batch: ``by-speed``: the workers of a synchronous method get shares of each global batch in
            proportion to their measured speeds, not equal ones.
    """

    strategy: str | Strategy = "allreduce"
    seed: int = 0
    limits: Limits | None = None
    out: str | PathLike[str] | None = None
    on_metric: OnMetric | None = None
    trace: bool = True
    global_batch: int | None = None
    batch: str | None = None

    def __post_init__(self) -> None:
        _ = self.method  # refuses an unknown strategy
        check_seed(self.seed)
        if self.batch not in (None, "by-speed"):
            raise UsageError(f"batch ({self.batch}) must be by-speed")
        why = "its workers do not learn who is lost" if not self.method.divides_anew else ""
        if not self.method.synchronous:
            why = "it is asynchronous, and its workers take batches one by one"
        if why and (self.global_batch is not None or self.by_speed):
            name = strategy_name(self.method)
            option = "batch (by-speed)" if self.by_speed else f"global_batch ({self.global_batch})"
            raise UsageError(f"{option} must not be used with {name}: {why}")

    @property
    def by_speed(self) -> bool:
        """Whether the workers' shares of a global batch follow their speeds."""
        return self.batch is not None

    def check_global_batch(self, workers: int) -> None:
        """Refuse a global batch that has no sample for some worker."""
        if self.global_batch is not None and self.global_batch < workers:
            raise UsageError(
                f"global_batch ({self.global_batch}) must be at least workers ({workers})"
            )

    @functools.cached_property
    def method(self) -> Strategy:
        """The strategy as an object."""
        return make_strategy(self.strategy)

    @property
    def folder(self) -> Path | None:
        """The folder that the run writes to, if any."""
        return None if self.out is None else Path(self.out)


@dataclass(frozen=True, kw_only=True)
class OnDevice(RunSpec):
    """A run whose ranks are processes.

    Args:
        device: ``cpu``, or ``cuda`` to spread the ranks over the GPUs of each host.
    """

    device: str = "cpu"

    def device_of(self, rank: int) -> str:
        """The device of a rank on this host; ``cuda`` spreads ranks over all GPUs."""
        if not self.device.startswith("cuda"):
            return self.device
        import torch

        count = torch.cuda.device_count()
        if count == 0:
            raise UsageError(f"device ({self.device}) needs a GPU that torch can see")
        return f"cuda:{rank % count}" if self.device == "cuda" else self.device


@dataclass(frozen=True, kw_only=True)
class Started(RunSpec):
    """A run that starts its ranks itself.

    Args:
        train: the training function; it is called on each worker, and may return plain values and
            tensors for ``result.returned``.
        workers: the number of workers; the strategy adds its servers and communicators.
        arguments: more keyword arguments for ``train``.
        on_progress: called a few times a second with rank, steps and progress of a worker.
        log: loggers by name, one or a list: ``csv``, ``mlflow``, ``tensorboard``, ``wandb``.
        on_loss: ``continue`` without a lost worker, or ``stop``; by default asynchronous methods
            continue and synchronous ones stop.
        max_restarts: how many lost workers are restarted in the whole run.
        faults: faults to inject: kill, freeze or slow down a rank, or start it late.
        checkpoint_steps: make a checkpoint whenever the first worker has made so many steps.
        checkpoint_minutes: make one every so many minutes, of virtual time in a simulation.
        keep: how many of the newest checkpoints are kept.
        resume: resume from the newest intact checkpoint in ``out``, if there is one.
    """

    train: Train | Reference = field(kw_only=False)
    workers: int
    arguments: Mapping[str, Any] | None = None
    on_progress: OnMetric | None = None
    log: str | Sequence[str] = ()
    on_loss: str | None = None
    max_restarts: int = 0
    faults: Sequence[Fault] = ()
    checkpoint_steps: int | None = None
    checkpoint_minutes: float | None = None
    keep: int = 2
    resume: bool = False

    @functools.cached_property
    def loggers(self) -> list[str]:
        """The names of the loggers; refuses one that cannot be used."""
        return check_loggers(self.log, self.out)

    @property
    def size(self) -> int:
        """The number of ranks: workers, servers and communicators."""
        return ranks_for(self.method, self.workers)

    def policy(self, on_loss: str | None = None) -> MembershipPolicy:
        """What the run does when it loses a rank; ``on_loss`` is the default."""
        chosen = self.on_loss or on_loss
        method = self.method
        return MembershipPolicy(
            method.synchronous, self.workers, chosen, self.max_restarts, method.takes_workers_in
        )

    def check_faults(self, faults: Sequence[Fault], cluster: Cluster) -> None:
        """Refuse faults of ranks that do not exist, and late joiners that are not taken in."""
        cluster.check_faults(faults, self.size)
        name, policy = strategy_name(self.method), self.policy()
        if any(fault.kind == "join" for fault in faults) and not policy.accepts_joiners:
            if not self.method.takes_workers_in:
                raise UsageError(f"join: {name} cannot take workers in during a run")
            raise UsageError(
                f'join: {name} takes workers in only with on_loss="continue" (--on-loss continue)'
            )

    def checkpoints(self) -> CheckpointCoordinator:
        """The checkpoints of the run; refuses a method that does not support them."""
        coordinator = CheckpointCoordinator(
            self.out,
            steps=self.checkpoint_steps,
            minutes=self.checkpoint_minutes,
            keep=self.keep,
            resume=self.resume,
        )
        coordinator.check_strategy(self.method, self.size, self.workers)
        return coordinator


@dataclass(frozen=True, kw_only=True)
class LaunchSpec(Started, OnDevice):
    """A run in processes on this host; ``train`` must be at the top level of a module or script.

    Args:
        transport: ``shared_memory``, ``distributed`` for gloo and nccl, or ``hosts``; by default
            shared memory on one host, and ``hosts`` on many.
        on: ``ray`` to have the ranks on the nodes of a Ray cluster.
        hosts: how many hosts there are; the others join with ``paceline run --join``.
        workers_per_host: how many workers a host takes at most; those for whom there is no room
            wait for hosts that join in mid-run.
        listen: the address and the port of this host at which the others join.
        token_file: a file that holds the run's token; it is made if it does not exist.
        encryption: whether connections to other hosts are encrypted; False is for a network on
            which nobody listens.
    """

    workers: int = 2
    transport: str | None = None
    on: str | None = None
    hosts: int = 1
    workers_per_host: int | None = None
    listen: str | None = None
    token_file: str | PathLike[str] | None = None
    encryption: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.loggers
        if self.on is None:  # what Ray has is Ray's to say
            check_real_workers(self.workers, self.method)
            self.device_of(0)
        self.check_global_batch(self.workers)
        one_of("transport", self.world, TRANSPORTS)
        self._check_hosts()
        self._check_losses()
        self.check_faults(self.faults, Cluster())
        plain_json("arguments", dict(self.arguments or {}))

    @property
    def world(self) -> str:
        """The transport, as it was chosen or by default."""
        many = self.on is not None or self.hosts != 1 or self.listen is not None
        return self.transport or ("hosts" if many else "shared_memory")

    @functools.cached_property
    def many_hosts(self) -> ManyHosts | None:
        """Where the launcher listens for other hosts; None for a run on this host alone.

        Connects to Ray, if the run is on Ray.
        """
        if self.on is not None:
            from paceline.launcher.on_ray import connect

            return connect(self.size, 1 if self.device.startswith("cuda") else 0)
        file = None if self.token_file is None else Path(self.token_file)
        return ManyHosts.of(self.hosts, self.listen, file, self.encryption, self.workers_per_host)

    @property
    def waiting(self) -> range:
        """The workers for whom there is no room on the hosts that there are at first."""
        placed = self.hosts * (self.workers_per_host or self.workers)
        return range(placed, self.workers)

    def _check_hosts(self) -> None:
        """Refuse options of many hosts that do not fit together."""
        if self.on is not None:
            one_of("on", self.on, ("ray",))
            for name in ("listen", "token_file"):
                if (value := getattr(self, name)) is not None:
                    raise UsageError(f"{name} ({value}) must not be given with on ({self.on})")
            for name, default in (("hosts", 1), ("workers_per_host", None), ("encryption", True)):
                if (value := getattr(self, name)) != default:
                    raise UsageError(f"{name} ({value}) must not be given with on ({self.on})")
        elif self.many_hosts is None:
            return
        if not TRANSPORTS[self.world].spans_hosts:
            raise UsageError(f"transport ({self.world}) must be hosts for a run on many hosts")
        if self.waiting and not self.policy().accepts_joiners:
            raise UsageError(
                f"workers ({self.workers}) must be at most {self.waiting.start}, or"
                f' {strategy_name(self.method)} must take workers in: add on_loss="continue"'
            )

    @property
    def shared_device(self) -> str | None:
        """The GPU that all ranks share, if they share one: they communicate through its memory."""
        if self.world != "shared_memory" or not self.device.startswith("cuda"):
            return None
        devices = {self.device_of(rank) for rank in range(self.size)}
        return devices.pop() if len(devices) == 1 else None

    def _check_losses(self) -> None:
        """Refuse restarts and faults that this transport does not support, and faults of links."""
        wanted = self.policy().max_restarts or self.on_loss == "continue" or self.faults
        if wanted and not TRANSPORTS[self.world].survives_losses:
            raise UsageError(
                f"transport ({self.world}) must be shared_memory to continue without a lost"
                " rank, to restart one, or to inject faults"
            )
        for fault in self.faults:
            if fault.kind in LINK_KINDS:
                raise UsageError(f"{fault.kind}: there are no links between processes of one host")

    def checkpoints(self) -> CheckpointCoordinator:
        coordinator = super().checkpoints()
        if coordinator.on and not TRANSPORTS[self.world].makes_checkpoints:
            raise UsageError(f"transport ({self.world}) must be shared_memory for checkpoints")
        return coordinator


@dataclass(frozen=True, kw_only=True)
class SimulationSpec(Started):
    """A run in virtual time.

    Args:
        cluster: a preset's name, a TOML file, or a :class:`~paceline.sim.cluster.Cluster`.
        as_model: a model of :mod:`paceline.sim.models` whose sizes and times the run uses.
        replay: the folder of a real run with the same arguments, whose order of events to follow.
        device: where the models and batches of all workers are: ``cpu``, or one GPU.
        batched: ``on`` to compute the gradients of many workers together, ``auto`` to do so where
            it is possible and faster; see ``docs/batched.md``.
    """

    workers: int = 4
    device: str = "cpu"
    cluster: str | PathLike[str] | Cluster = "ethernet-10g"
    as_model: str | None = None
    replay: str | PathLike[str] | None = None
    batched: str = "off"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.one_device
        one_of("batched", self.batched, ("auto", "on", "off"))
        _ = self.loggers
        check_virtual_workers(self.workers, self.method)
        self.check_global_batch(self.workers)
        self.check_faults(self.all_faults, self.loaded_cluster)
        if self.batched == "on" and self.why_one_by_one is not None:
            raise UsageError(f"batched (on) must be off or auto: {self.why_one_by_one}")

    @functools.cached_property
    def one_device(self) -> str:
        """The device of all workers, by its whole name."""
        check_device(self.device)
        return OnDevice(device=self.device).device_of(0)

    @property
    def why_one_by_one(self) -> str | None:
        """What about the run may change how long a step takes while it is under way, if anything.

        Its gradients can then not be computed together.
        """
        cluster = self.loaded_cluster
        gradients_take_time = (
            cluster.stands_for or cluster.compute.step_s or cluster.compute.sample_s
        )
        reasons = {
            "the run has faults": self.all_faults,
            "the run makes checkpoints": self.checkpoints().on,
            "the run follows a recorded one": self.replay is not None,
            "the workers of a node share its cores": cluster.cores,
            "the cluster has a registrar": cluster.registrar is not None,
            "gradients take no virtual time on this cluster": not gradients_take_time,
        }
        return next((why for why, holds in reasons.items() if holds), None)

    @functools.cached_property
    def loaded_cluster(self) -> Cluster:
        """The cluster as an object, with the sizes and times of ``as_model``."""
        return stand_for(load_cluster(self.cluster), self.as_model)

    @property
    def all_faults(self) -> list[Fault]:
        """The faults of the cluster and those of the run."""
        return [*self.loaded_cluster.faults, *self.faults]


@dataclass(frozen=True, kw_only=True)
class InitSpec(OnDevice):
    """A run in which another launcher started all processes, including this one.

    Args:
        rank_order: sum in rank order, for the same bits as other transports; slower.
        transport: ``distributed`` for gloo and nccl, or ``hosts``, where asynchronous methods go
            on without a lost rank.
        token_file: a file that holds the token of a run over ``hosts``; by default
            ``PACELINE_TOKEN``, or the file ``run.token``.
    """

    rank_order: bool = False
    transport: str = "distributed"
    token_file: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("transport", self.transport, ("distributed", "hosts"))
        if self.token_file is not None and self.transport != "hosts":
            raise UsageError(f"token_file ({self.token_file}) must not be given without hosts")
        if self.rank_order and self.transport == "hosts":
            raise UsageError("rank_order must not be given with transport (hosts), which has it")


def takes(spec: Callable[P, S]) -> Callable[[Callable[[S], R]], Callable[P, R]]:
    """Make a function of a spec take the fields of the spec as its arguments."""

    signature = inspect.signature(spec)

    def wrap(run: Callable[[S], R]) -> Callable[P, R]:
        @functools.wraps(run)
        def start(*args: P.args, **options: P.kwargs) -> R:
            for name in options:
                if name not in signature.parameters:
                    raise unknown(f"argument of pl.{run.__name__}", name, signature.parameters)
            return run(spec(*args, **options))

        returned = inspect.signature(run).return_annotation
        vars(start)["__signature__"] = signature.replace(return_annotation=returned)
        start.__doc__ = _with_arguments(run, spec)
        return start

    return wrap


def _with_arguments(run: Callable[..., Any], spec: Any) -> str:
    """The docstring of a function, with the arguments of its spec in the order of the signature."""
    text, _, raises = inspect.cleandoc(run.__doc__ or "").partition("\nRaises:\n")
    kinds = [*(kind for kind in (Started, RunSpec, OnDevice) if issubclass(spec, kind)), spec]
    parts = [inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2] for kind in kinds]
    arguments = "\n".join(part.rstrip() for part in parts)
    return f"{text.rstrip()}\n\nArgs:\n{arguments}\n" + (f"\nRaises:\n{raises}" if raises else "")


def ranks_for(strategy: Strategy, workers: int) -> int:
    """How many ranks a run of so many workers has; a single worker needs no others."""
    return len(strategy.roles(workers)) if workers > 1 else 1
