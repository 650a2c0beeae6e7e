"""The verdict in plain words: which method was fastest, by how much, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.common.format import seconds
from paceline.lab.stats import LEVEL, Spread, ratio, spread
from paceline.report.material import Material, Setting

SURE, UNSURE = "sure", "not sure"
MIN_SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class MethodTimes:
    """The times of a method to the target in one setting, one for each run; None if never.

    The key of a run is its seed, and how many earlier runs had the same seed.
    """

    method: str
    times: Mapping[tuple[int, int], float | None]
    errors: Sequence[str] = ()

    @property
    def reached(self) -> list[float]:
        """The times of the runs that reached the target."""
        return [time_s for time_s in self.times.values() if time_s is not None]

    @property
    def always(self) -> bool:
        """Whether every run reached the target."""
        return bool(self.times) and len(self.reached) == len(self.times)

    @property
    def spread(self) -> Spread:
        """The mean time with its confidence interval."""
        return spread(self.reached)

    def speedup_over(self, other: MethodTimes) -> Spread:
        """How many times faster this one is, paired by seed; by the means if no seed is shared."""
        both = [
            (theirs, ours)
            for seed, ours in self.times.items()
            if ours and (theirs := other.times.get(seed))
        ]
        pairs = both or [(other.spread.mean, self.spread.mean)]
        return ratio(*zip(*pairs, strict=True))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one setting: the first method, sentences about it, and how sure that is."""

    setting: Setting
    first: str | None
    sentences: list[str]
    sure: str | None = None
    why: str = ""


def standings(material: Material, setting: Setting) -> list[MethodTimes]:
    """All methods in a setting: first those that always reached the target, by their time."""
    target, found = material.target, []
    for method in material.methods:
        runs = material.of(setting, method)
        if not runs:
            continue
        times: dict[tuple[int, int], float | None] = {}
        for run in runs:
            repeats = sum(seed == run.seed for seed, _ in times)
            reached = None if run.result is None or not target else run.result.seconds_to(target)
            times[run.seed, repeats] = reached
        errors = [run.error or "it failed" for run in runs if run.result is None]
        found.append(MethodTimes(method=method, times=times, errors=errors))
    return sorted(found, key=lambda s: (not s.always, s.spread.mean if s.reached else 0.0))


def verdict(material: Material, setting: Setting) -> Verdict:
    """The verdict on one setting."""
    ranked = standings(material, setting)
    if material.target is None:
        return Verdict(setting=setting, first=None, sentences=[*_by_accuracy(material, setting)])
    always = [standing for standing in ranked if standing.always]
    behind = [*_failures(ranked, material.target)]
    if not always:
        sentence = f"No method reached accuracy {material.target:g} in every run."
        return Verdict(setting=setting, first=None, sentences=[sentence, *behind])
    first, others = always[0], always[1:]
    clock = " of virtual time" if _virtual(material, setting) else ""
    after = f"after {seconds(first.spread.mean)}{clock}"
    if len(ranked) == 1:
        sentence = f"{first.method} reached accuracy {material.target:g} {after}."
        return Verdict(setting=setting, first=None, sentences=[sentence, "It ran alone here."])
    sentence = f"{first.method} reached accuracy {material.target:g} first, {after}"
    sentence += f"{_by_how_much(first, others)}."
    if not others:
        return Verdict(setting=setting, first=first.method, sentences=[sentence, *behind])
    sure, why = _confidence(first, others)
    if too_close := _too_close(material, setting, first, others[0]):
        sure, why = UNSURE, f"{why} {too_close}"
    sentences = [sentence, *behind]
    return Verdict(setting=setting, first=first.method, sentences=sentences, sure=sure, why=why)


def headline(verdicts: Sequence[Verdict]) -> str:
    """One sentence about all verdicts."""
    won = [v for v in verdicts if v.first]
    if not won:
        return verdicts[0].sentences[0] if len(verdicts) == 1 else "No method was first anywhere."
    systems = {f"on {v.setting.system}": v.first for v in won}
    counts = {f"with {v.setting.workers} workers": v.first for v in won}
    if len({v.first for v in won}) == 1:
        text = f"{won[0].first} was first{' in every setting' if len(verdicts) > 1 else ''}"
    elif all(systems[f"on {v.setting.system}"] == v.first for v in won):
        text = "First was " + ", ".join(f"{method} {where}" for where, method in systems.items())
    elif all(counts[f"with {v.setting.workers} workers"] == v.first for v in won):
        text = "First was " + ", ".join(f"{method} {where}" for where, method in counts.items())
    else:
        text = "The first method depends on the setting"
    unsure = any(v.sure == UNSURE for v in won)
    return f"{text}, but not all of this is sure." if unsure else f"{text}."


def _by_how_much(first: MethodTimes, others: Sequence[MethodTimes]) -> str:
    """How much faster the first was than the second, and than allreduce or else the last."""
    if not others:
        return ""
    named = {standing.method.partition("(")[0]: standing for standing in others}
    chosen = {s.method: s for s in (others[0], named.get("allreduce", others[-1]))}
    parts = [
        f"{first.speedup_over(other).mean:.2f} times faster than {other.method}"
        for other in chosen.values()
    ]
    return ": " + " and ".join(parts)


def _confidence(first: MethodTimes, others: Sequence[MethodTimes]) -> tuple[str, str]:
    second, margin = others[0], first.speedup_over(others[0])
    if margin.seeds < 2:
        return UNSURE, (
            "Each method ran with one seed, and another seed may give another order."
            " Run it again with --seeds 5 to find out."
        )
    more = "" if margin.seeds >= MIN_SEEDS else f" It takes at least {MIN_SEEDS} seeds to be sure."
    interval = (
        f"over {margin.seeds} seeds, {first.method} was {margin.low:.2f} to {margin.high:.2f} times"
        f" faster than {second.method} ({LEVEL} interval)"
    )
    if margin.low > 1:
        return UNSURE if more else SURE, f"{interval[0].upper()}{interval[1:]}.{more}"
    beaten = [o.method for o in others if first.speedup_over(o).low > 1]
    also = f" It is ahead of {', '.join(beaten)}." if beaten and not more else ""
    return UNSURE, f"The two are too close to tell: {interval}; below 1 means slower.{also}{more}"


def _too_close(
    material: Material, setting: Setting, first: MethodTimes, second: MethodTimes
) -> str:
    """A remark if the first two are closer than the time between two evaluations."""
    results = material.results(setting, first.method)
    gaps = [gap for result in results for gap in result.evaluation_gaps()]
    if not gaps or second.spread.mean - first.spread.mean >= median(gaps):
        return ""
    return (
        f"Accuracy was measured about every {seconds(median(gaps))}, and the first two are closer"
        " than that."
    )


def _failures(ranked: Sequence[MethodTimes], target: float) -> Iterator[str]:
    for standing in ranked:
        runs = len(standing.times)
        never = runs - len(standing.reached) - len(standing.errors)
        if standing.errors:
            reason = standing.errors[0].partition("\n")[0]
            yield f"{standing.method} failed: {reason}."
        if never:
            of = f" in {never} of {runs} runs" if runs > 1 else ""
            yield f"{standing.method} did not reach {target:g}{of}."


def _by_accuracy(material: Material, setting: Setting) -> Iterator[str]:
    """Without a target: which method ended with the highest accuracy."""
    ends = {
        method: spread(values).mean
        for method in material.methods
        if (values := _ends(material, setting, method))
    }
    yield "No target accuracy was given (--target), so no method was first."
    if len(ends) > 1:
        best = max(ends, key=lambda method: ends[method])
        yield f"{best} ended with the highest accuracy, {ends[best]:.3f}."


def _ends(material: Material, setting: Setting, method: str) -> list[float]:
    results = material.results(setting, method)
    return [result.accuracy for result in results if result.accuracy is not None]


def _virtual(material: Material, setting: Setting) -> bool:
    return any(run.virtual for run in material.runs if run.setting == setting)
