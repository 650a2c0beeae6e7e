"""What a claim consists of: its description, the runs that test it, and how they are judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.errors import PacelineError
from paceline.lab.papers.full.setup import seeds_from
from paceline.lab.papers.rates import LearningRates, method, momentum
from paceline.lab.papers.tasks import QUICK, SETTINGS
from paceline.lab.papers.verdict import FAILS, Figure, combine
from paceline.lab.trials import Trial, TrialOutcome
from paceline.record.result import Result
from paceline.sim.cluster import Cluster, load_cluster

TRAIN = {"module": "paceline.lab.papers.training", "name": "train"}
MANY = 32
"""With more workers each takes half the batch, so that an epoch has enough steps."""
LEAST_STEPS = 100
"""With fewer steps per worker the accuracies of two methods are not compared."""
MOST_OFF = 2.0
"""A rate chosen at 8 workers may differ by this factor from that swept at the actual number."""
NEEDS = f"""
    At least {LEAST_STEPS} steps a worker; rates within a factor of {MOST_OFF:g} of those swept at
    that number of workers; the same momentum on both sides. A figure without all three is too
    small to tell.
"""
Key = tuple[Any, ...]
"""Identifies a run within its claim; the last item is the seed."""
Trials = dict[Key, Trial]


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The extent of an experiment: its seed and its learning rates.

    Args:
        rates: the learning rate of each method.
        seed: the seed of the experiment; the seeds of the runs derive from it.
    """

    rates: LearningRates
    seed: int = 0
    tasks: ClassVar[tuple[str, ...]] = QUICK

    def seeds(self, number: int) -> list[int]:
        """The seeds of a claim's runs: none of the sweep's."""
        return seeds_from(self.seed, number)

    def trial(
        self,
        task: str,
        name: str,
        workers: int,
        seed: int,
        *,
        cluster: str | Cluster = "ethernet-1g",
        column: str = "held",
        factor: float = 1.0,
        **more: Any,
    ) -> Trial:
        """A run of the method ``name`` on a task, at ``factor`` times its recorded rate."""
        held = column == "held"
        rates = self.rates
        lr = rates.held(task, name) if held else rates.own(task, name, workers)
        arguments = task_arguments(task, workers)
        if workers == 1:
            name = "sgd"
        options: dict[str, Any] = {
            "train": TRAIN,
            "strategy": method(name),
            "arguments": {**arguments, "lr": lr * factor},
        }
        return Trial(
            workers=workers, cluster=load_cluster(cluster), seed=seed, **{**options, **more}
        )

    def too_small(
        self, task: str, names: Iterable[str], workers: int, column: str, results: Iterable[Result]
    ) -> str | None:
        """Why runs of these methods cannot decide whose accuracy is higher; None if they can."""
        names = list(names)
        why = []
        steps = min(result.steps / result.workers for result in results)
        if steps < LEAST_STEPS:
            needed = f"{LEAST_STEPS} are needed (--full has them)"
            why.append(f"{steps:.0f} steps a worker, where {needed}")
        for name in names if column == "held" else ():
            held, own = self.rates.held(task, name), self.rates.own(task, name, workers)
            if not 1 / MOST_OFF <= held / own <= MOST_OFF:
                why.append(
                    f"the rate of {name} is {held:g}, held from 8 workers, and {own:g} where it is"
                    f" swept at {workers} (own rates)"
                )
        momenta = {name: momentum(name) for name in names}
        if len(set(momenta.values())) > 1:
            values = " and ".join(f"{value:g} in {name}" for name, value in momenta.items())
            why.append(f"momentum is {values}, where both need the same (--full has it)")
        return "; ".join(why) or None


def task_arguments(task: str, workers: int) -> dict[str, Any]:
    """The arguments of the training function for a task, without the learning rate."""
    setting = SETTINGS[task]
    batch_size = setting.batch_size if workers <= MANY else setting.batch_size // 2
    return {"task": task, "epochs": setting.epochs, "batch_size": batch_size}


class Runs:
    """The outcomes of a claim's trials."""

    def __init__(self, outcomes: Mapping[Key, TrialOutcome]) -> None:
        self._outcomes = outcomes

    def outcomes(self, *key: Any) -> list[TrialOutcome]:
        """The outcomes of all seeds under a key."""
        return [outcome for name, outcome in self._outcomes.items() if name[:-1] == key]

    def of(self, *key: Any) -> list[Result]:
        """The results of all seeds under a key; a run that failed is an error."""
        return [_result(outcome, key) for outcome in self.outcomes(*key)]

    def map(self, figure: Callable[[Result], float], *key: Any) -> list[float]:
        """``figure`` of each result under a key."""
        return [figure(result) for result in self.of(*key)]

    def pairs(self, one: Key, other: Key) -> Iterator[tuple[Result, Result]]:
        """The results under two keys, seed by seed."""
        return zip(self.of(*one), self.of(*other), strict=True)


def _result(outcome: TrialOutcome, key: Key) -> Result:
    if outcome.result is None:
        raise PacelineError(f"the run {' '.join(map(str, key))} failed: {outcome.error}")
    return outcome.result


class Described(ABC):
    """A claim of a paper in words.

    Class attributes:
        id: its name.
        paper: the paper that makes it.
        claim: the claim in words.
        source: ``abstract`` of the paper, ``reported`` by others, or ``derived`` in this project.
        setup: what is run.
        rule: which figures lead to which verdict.
        needs: what the set-up must have to decide it, if it may lack it.
        because: why it fails here, if it does and the reason is known.
    """

    id: ClassVar[str]
    paper: ClassVar[str]
    claim: ClassVar[str]
    source: ClassVar[str]
    setup: ClassVar[str]
    rule: ClassVar[str]
    needs: ClassVar[str] = ""
    because: ClassVar[str] = ""

    def description(self) -> dict[str, str]:
        """Its texts by name, each in one line."""
        names = ("id", "paper", "claim", "source", "setup", "rule", "needs")
        return {name: " ".join(getattr(self, name).split()) for name in names}


class Claim(Described):
    """A claim, and the experiment that tests it."""

    @abstractmethod
    def trials(self, scope: Scope) -> Trials:
        """The runs that it needs, by key."""

    @abstractmethod
    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        """The figures that the runs yield, with their verdicts."""


@dataclass(frozen=True)
class ClaimResult:
    """The result of testing a claim."""

    claim: Described
    figures: list[Figure]

    @property
    def verdict(self) -> str:
        """holds, does not hold, not decided, or too small to tell."""
        return combine(self.figures)

    @property
    def decides(self) -> str:
        """Whether the set-up can decide the claim; if not, why not, and which set-up could."""
        small = [f.too_small for f in self.figures if f.decides and f.too_small]
        count = sum(f.decides for f in self.figures)
        why = "; ".join(dict.fromkeys(part for text in small for part in text.split("; ")))
        return f"no, {len(small)} of {count} figures are too small to tell: {why}" if why else "yes"

    @property
    def reasons(self) -> list[str]:
        """The figures that contradict it, in words; then the reason, if it is known."""
        failing = [f for f in self.figures if f.decides and f.verdict == FAILS]
        reasons = [f"{f.what}: {f.mean:.3g}, wanted {f.wanted}" for f in failing]
        if reasons and self.claim.because:
            reasons.append(" ".join(self.claim.because.split()))
        return reasons

    def to_json(self) -> dict[str, Any]:
        """The result as ``--json`` prints it."""
        return {
            **self.claim.description(),
            "verdict": self.verdict,
            "decides": self.decides,
            "reasons": self.reasons,
            "figures": [figure.to_json() for figure in self.figures],
        }
