"""How the runs of a full study train; does not load torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path

from paceline.common.seeds import MAX_SEED
from paceline.lab.papers.clusters import CONTENDED
from paceline.lab.sweep import SEEDS, Arm
from paceline.lab.tasks.files import cifar_file
from paceline.lab.tasks.recipe import Recipe
from paceline.lab.trials import Trial
from paceline.sim.cluster import Cluster, load_cluster
from paceline.strategies import make_strategy

TRAIN = {"module": "paceline.lab.papers.training", "name": "train_long"}
MOMENTUM = 0.9
RUNS = 3
"""Seeds of each run that counts; none is that of the sweep."""
STEP, MOST = 4.0, 5
"""Neighboring rates differ by this factor; so the best one tried is within twice the best."""
SMALL = 0.25
"""The share of the best rate that is the small one."""
MOST_WORKERS = 128


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How long the networks of a task train, and with what.

    Attributes:
        network: as :func:`paceline.lab.papers.training.long_network` knows it.
        batch_size: of a worker.
        recipe: its rate is the middle one of those tried with momentum, in lockstep.
    """

    network: str
    batch_size: int
    recipe: Recipe


IMAGES = Recipe(
    data="images", epochs=60, lr=0.02, weight_decay=5e-4, warm_up=0.05, drops=(0.5, 0.75)
)
SETTINGS = {
    "bundled": Setting(network="cnn", batch_size=15, recipe=IMAGES),
    "cifar10": Setting(
        network="resnet20",
        batch_size=32,
        recipe=replace(IMAGES, data="cifar10", epochs=30, lr=0.1),
    ),
}


@dataclass(frozen=True)
class Way:
    """One way to train, in which only the rate is open."""

    method: str
    workers: int
    momentum: float = MOMENTUM
    contended: bool = False

    def __str__(self) -> str:
        where = ", contended" if self.contended else ""
        return f"{self.method}, {self.workers} workers, momentum {self.momentum:g}{where}"

    @property
    def cluster(self) -> Cluster:
        """Where the workers are."""
        return CONTENDED if self.contended else load_cluster("ethernet-10g")


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The extent of a full study.

    Args:
        seed: those of the runs derive from it.
        scale: the share of the epochs.
        data: the folder of CIFAR-10; None for the bundled images.
        device, batched: where and how gradients are computed.
    """

    seed: int = 0
    scale: float = 1.0
    data: Path | None = None
    device: str = "cpu"
    batched: str = "off"

    def check(self) -> None:
        """Refuse a folder without the data set."""
        if self.data is not None:
            cifar_file(self.data.expanduser())

    @property
    def task(self) -> str:
        """What is trained."""
        return "bundled" if self.data is None else "cifar10"

    @property
    def epochs(self) -> int:
        """Of each run."""
        return max(1, round(SETTINGS[self.task].recipe.epochs * self.scale))

    @property
    def seeds(self) -> list[int]:
        """Of the runs that count."""
        return seeds_from(self.seed, RUNS)

    def arm(self, way: Way) -> Arm:
        """The sweep of a way: three rates, and more while the best is at an edge."""
        factor = make_strategy(way.method).lr_factor(way.workers)
        middle = SETTINGS[self.task].recipe.lr * factor * (1 - way.momentum) / (1 - MOMENTUM)
        grid = (middle / STEP, middle, middle * STEP)
        trial = partial(self.trial, way)
        return Arm(str(way), trial, grid, seeds=SEEDS[:1], most=MOST, factor=STEP)

    def trial(self, way: Way, rate: float, seed: int) -> Trial:
        """A run of a way."""
        arguments = {
            "task": self.task,
            "epochs": self.epochs,
            "lr": rate,
            "momentum": way.momentum,
            "data": None if self.data is None else str(self.data),
        }
        return Trial(
            train=TRAIN,
            strategy=make_strategy(way.method),
            workers=way.workers,
            cluster=way.cluster,
            seed=seed,
            arguments={name: value for name, value in arguments.items() if value is not None},
            device=self.device,
            batched=self.batched,
        )


def seeds_from(seed: int, number: int) -> list[int]:
    """Seeds of runs that derive from an experiment's; none of the sweep's."""
    first = seed * 100 % (MAX_SEED - 10_000)
    return list(islice((seed for seed in count(first) if seed not in SEEDS), number))
