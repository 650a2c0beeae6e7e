"""A cluster as a small TOML file, or one of the named presets.

.. code-block:: toml

    about = "four desks and an old switch"
    ranks_per_node = 1
    cores = 2                 # the ranks of a node share them; 0: one for each rank
    registrar = 0             # many hosts: the node of the process that knows the members

    [network]                 # the link between two nodes, and the network card of each
    latency_s = 5e-5
    bytes_per_s = 125e6

    [inside]                  # between ranks of one node
    latency_s = 2e-6
    bytes_per_s = 4e9

    [compute]
    sample_s = 3e-4           # forward and backward of one sample
    spread = 0.1              # each step takes up to 10 % more or less
    factors = [1.0, 1.0, 2.0] # by rank, cyclically: every third rank is twice as slow

    [loading]
    sample_s = 1e-5
    prefetch = 2

    [collectives]
    algorithm = "two-level"
    calls = 1                 # fused; 0: one call for each of the model's tensors

    [serving]
    bytes_per_s = 2e9         # how fast a server applies updates

    [handling.post]           # the time of the rank's own core to pack and post a message
    latency_s = 2e-5
    bytes_per_s = 2e9

    [[faults]]
    kind = "kill"
    rank = 3
    at_s = 10.0
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.common.faults import Fault
from paceline.common.files import reason_of
from paceline.common.options import above, at_least, build, one_of
from paceline.common.reading import read_text
from paceline.errors import UsageError, unknown
from paceline.sim.models import StandsFor

MAX_FILE_BYTES = 1 << 20
ALGORITHMS = ("auto", "ring", "tree", "two-level")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link: a message takes ``latency_s``, and one second for each ``bytes_per_s`` bytes."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        at_least("latency_s", self.latency_s, 0)
        above("bytes_per_s", self.bytes_per_s, 0)

    def seconds(self, nbytes: float) -> float:
        """How long a message takes on an idle link."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How long a gradient takes.

    Args:
        step_s: the fixed time of a step.
        sample_s: the time of each sample, forward and backward.
        spread: each step takes a random factor from 1 - spread to 1 + spread of that time.
        lognormal: or a lognormal factor with this sigma and mean 1, so that a few steps are long.
        trace: or these recorded factors, one for each step, cyclically; each rank starts at a
            random one.
        factors: slowness by rank, cyclically; 2.0 takes twice as long.
        slow: further slowness of single ranks; it multiplies ``factors``.
    """

    step_s: float = 0.0
    sample_s: float = 0.0
    spread: float = 0.0
    lognormal: float = 0.0
    trace: tuple[float, ...] = ()
    factors: tuple[float, ...] = (1.0,)
    slow: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("step_s", "sample_s", "spread", "lognormal"):
            at_least(name, getattr(self, name), 0)
        if self.spread >= 1:
            raise UsageError(f"spread ({self.spread}) must be below 1")
        if sum(map(bool, (self.spread, self.lognormal, self.trace))) > 1:
            raise UsageError("spread, lognormal and trace exclude each other")
        if not self.factors:
            raise UsageError("factors () must name at least one")
        for factor in (*self.factors, *self.slow.values(), *self.trace):
            above("factor", factor, 0)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How long a batch takes to load, and how many are loaded ahead."""

    batch_s: float = 0.0
    sample_s: float = 0.0
    prefetch: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_s", "sample_s", "prefetch"):
            at_least(name, getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True)
class CollectiveCosts:
    """How all-reduces and broadcasts are made.

    Args:
        algorithm: ``ring``, ``tree``, ``two-level`` (inside each node, among the first ranks of the
            nodes, inside again), or ``auto``, the cheapest of them.
        calls: how many blocking calls one collective on the whole model takes, each with its
            latency: 1 is fused, 0 is one for each tensor. A part of the model takes its share.
    """

    algorithm: Literal["auto", "ring", "tree", "two-level"] = "auto"
    calls: int = 1

    def __post_init__(self) -> None:
        one_of("algorithm", self.algorithm, ALGORITHMS)
        at_least("calls", self.calls, 0)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How many bytes of updates a server applies in a second."""

    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        above("bytes_per_s", self.bytes_per_s, 0)


@dataclass(frozen=True, kw_only=True)
class Handling:
    """The time that communication takes on a rank's own core; ranks of a node share its cores.

    Args:
        post: to pack and post a message.
        take: to receive and unpack a message.
        publish: to pack and publish a vector.
        peek: to read the vector that another rank published, and average with it.
        reduce: to add and copy in a collective.
        gather: to gather the gradients into one vector, if the method uses it.
    """

    post: Link = field(default_factory=Link)
    take: Link = field(default_factory=Link)
    publish: Link = field(default_factory=Link)
    peek: Link = field(default_factory=Link)
    reduce: Link = field(default_factory=Link)
    gather: Link = field(default_factory=Link)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A simulated cluster: nodes, links, computing times and faults.

    Args:
        name, about: shown to the user; they have no effect.
        ranks_per_node: 0 puts every rank on one node.
        cores: of each node; its computing ranks share them. 0: one for each rank.
        registrar: the node of the registrar, as in a run over many hosts: it gives out batches, and
            a rank that is cut off from it for ``dead_s`` is lost. None: all ranks know the members.
        network: the link between two nodes, and the network card of each.
        inside: the link between two ranks of one node.
        stands_for: charge the bytes and times of this model instead of the trained one's.
        faults: the faults to inject.
    """

    name: str = "unnamed"
    about: str = ""
    ranks_per_node: int = 1
    cores: int = 0
    registrar: int | None = None
    network: Link = field(default_factory=Link)
    inside: Link = field(default_factory=Link)
    compute: Compute = field(default_factory=Compute)
    loading: Loading = field(default_factory=Loading)
    collectives: CollectiveCosts = field(default_factory=CollectiveCosts)
    serving: Serving = field(default_factory=Serving)
    handling: Handling = field(default_factory=Handling)
    stands_for: StandsFor | None = None
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        at_least("ranks_per_node", self.ranks_per_node, 0)
        at_least("cores", self.cores, 0)
        at_least("registrar", self.registrar or 0, 0)

    def node(self, rank: int) -> int:
        """The node that ``rank`` runs on."""
        return rank // self.ranks_per_node if self.ranks_per_node else 0

    def check_faults(self, faults: Iterable[Fault], size: int) -> None:
        """Refuse faults of ranks and nodes that do not exist in a run of ``size`` ranks."""
        nodes = max(self.node(size - 1), self.registrar or 0) + 1
        for fault in faults:
            ends = size if fault.node is None else nodes
            for name, limit in {"rank": size, "node": nodes, "peer": ends}.items():
                value = getattr(fault, name)
                if value is not None and value >= limit:
                    existing = (
                        f"there are {name}s 0 to {limit - 1}" if limit > 1 else "there is one"
                    )
                    raise UsageError(
                        f"{fault.kind}: {name} ({value}) must be below {limit}: {existing}"
                    )


_MEMORY = Link(latency_s=2e-6, bytes_per_s=4e9)
_CPU = Compute(step_s=1e-3, sample_s=3e-4, spread=0.05)


def _ethernet(gbit_per_s: int, latency_s: float) -> Cluster:
    return Cluster(
        name=f"ethernet-{gbit_per_s}g",
        about=f"one worker a node, {gbit_per_s} Gbit/s Ethernet",
        network=Link(latency_s=latency_s, bytes_per_s=gbit_per_s * 1e9 / 8),
        inside=_MEMORY,
        compute=_CPU,
    )


PRESETS: dict[str, Cluster] = {
    preset.name: preset
    for preset in (
        Cluster(name="ideal", about="no cost at all: methods by their steps alone"),
        Cluster(
            name="one-server",
            about="every worker on one machine, talking through its memory",
            ranks_per_node=0,
            network=_MEMORY,
            inside=_MEMORY,
            compute=_CPU,
        ),
        _ethernet(1, 5e-5),
        _ethernet(10, 2e-5),
        _ethernet(100, 5e-6),
        Cluster(
            name="mixed-lab",
            about="1 Gbit/s Ethernet; of each four machines one is 1.5 and one 3 times slower",
            network=Link(latency_s=5e-5, bytes_per_s=125e6),
            inside=_MEMORY,
            compute=Compute(step_s=1e-3, sample_s=3e-4, spread=0.1, factors=(1.0, 1.0, 1.5, 3.0)),
        ),
        Cluster(
            name="wan",
            about="sites joined by 100 Mbit/s with 50 ms between them",
            network=Link(latency_s=0.05, bytes_per_s=12.5e6),
            inside=_MEMORY,
            compute=_CPU,
        ),
        Cluster(
            name="two-tier-256",
            about="nodes of 4 workers (256 in 64 nodes): 10 GB/s inside, 10 Gbit/s between",
            ranks_per_node=4,
            network=Link(latency_s=2e-5, bytes_per_s=1.25e9),
            inside=Link(latency_s=2e-6, bytes_per_s=10e9),
            compute=_CPU,
        ),
    )
}


def load_cluster(spec: str | os.PathLike[str] | Cluster) -> Cluster:
    """A cluster from an object, a preset's name, or a TOML file (anything ending in ``.toml``).

    >>> load_cluster("ethernet-1g").network
    Link(latency_s=5e-05, bytes_per_s=125000000.0)
    """
    if isinstance(spec, Cluster):
        return spec
    text = os.fspath(spec)
    if text in PRESETS:
        return PRESETS[text]
    if text.endswith(".toml") or os.sep in text:
        return read_cluster(Path(text))
    error = unknown("cluster", text, PRESETS)
    raise UsageError(f"{error} (or the path of a .toml file)")


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file; errors name the file and the key."""
    return build(Cluster, {"name": path.stem, **_read_toml(path)}, str(path))


@dataclass(frozen=True, kw_only=True)
class _Script:
    faults: tuple[Fault, ...] = ()


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Read a file with ``[[faults]]`` and nothing else."""
    return build(_Script, _read_toml(path), str(path)).faults


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path}: a cluster file must be at most {MAX_FILE_BYTES} bytes")
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise UsageError(f"{path}: {reason_of(error)}") from None
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a TOML file: {error}") from None
