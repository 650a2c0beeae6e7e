"""``paceline demo``: the built-in task in several ways, in real processes and in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.cli.compare import TARGET, Comparison, strategies_of
from paceline.cli.screen import Screen
from paceline.cli.task import Task
from paceline.lab.tasks.recipe import BUILT_IN
from paceline.sim.cluster import load_cluster

NEXT = """
What to try next:
  paceline compare -s allreduce,sasgd -c wan --epochs 6 --seeds 5
  paceline sim -s "sasgd(interval=4)" -w 16 -c mixed-lab --epochs 4
  paceline strategies            the methods, and what each is for
  paceline run train.py -w 2     a script of yours that has def train(worker)"""


@dataclass(frozen=True)
class Part:
    """A part of the demonstration: one comparison.

    Args:
        text: what is shown before it.
        strategies: by name.
        workers: the number of them.
        epochs: of each run.
        cluster: where it is simulated; None for real processes.
    """

    text: str
    strategies: str
    workers: int
    epochs: int
    cluster: str | None = None

    def comparison(self, out: Path) -> Comparison:
        """The comparison of this part, with its files in a folder."""
        return Comparison(
            task=Task("built-in task", BUILT_IN, {"epochs": self.epochs}),
            strategies=strategies_of([self.strategies], {}),
            workers=[self.workers],
            clusters=[] if self.cluster is None else [load_cluster(self.cluster)],
            target=TARGET,
            seeds=[0],
            out=out / (self.cluster or "real"),
        )


PARTS = (
    Part(
        """1. Two real processes train a small network on the bundled images.
   allreduce: they average their gradients at every step.
   sasgd:     each goes its own way; every 16 steps they average their models.
   gossip:    each reads the other's model at every step, and waits for nobody.
""",
        strategies="allreduce,sasgd,gossip",
        workers=2,
        epochs=4,
    ),
    Part(
        """
2. The same training function on a cluster that you need not own: eight workers,
   in virtual time, joined by links of 100 Mbit/s with 50 ms between them.
""",
        strategies="allreduce,sasgd,gossip,easgd",
        workers=8,
        epochs=6,
        cluster="wan",
    ),
)


def show_demo(screen: Screen, out: Path) -> None:
    """Make the runs of all parts that are not in the folder yet, and show what came out."""
    shown = {}
    for part in PARTS:
        screen.say(part.text)
        comparison = part.comparison(out)
        comparison.run(screen)
        comparison.show(screen)
        shown[part.cluster or "real"] = {
            "rows": comparison.rows,
            "report": str(comparison.report),
        }
    screen.say(NEXT)
    screen.emit(shown)
