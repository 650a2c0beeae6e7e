"""``paceline papers``: test the claims of the papers, and show the verdicts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.screen import Screen, seconds
from paceline.cli.task import choose_out
from paceline.lab.papers import CLAIMS, find_claim

if TYPE_CHECKING:
    from paceline.lab.papers.claim import Claim, ClaimResult, Described, Scope
    from paceline.lab.papers.verdict import Figure


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The options of the command; the defaults of ``rates`` and ``out`` depend on the others."""

    name: str | None
    seed: int
    rates: Path | None
    out: Path | None

    def claims(self) -> list[Claim]:
        """The named claim, or all claims."""
        return [find_claim(name) for name in ([self.name] if self.name else CLAIMS)]

    def rates_path(self) -> Path:
        """The file of learning rates."""
        from paceline.lab.papers.rates import RATES

        return self.rates or RATES


def list_claims(screen: Screen, choice: Choice) -> None:
    """Show each claim, its source, and how it is tested and judged."""
    claims = choice.claims()
    for claim in claims:
        show_words(screen, claim)
    screen.emit({"claims": [claim.description() for claim in claims]})


def sweep_rates(screen: Screen, choice: Choice) -> None:
    """Make the file of learning rates."""
    from paceline.lab.papers.rates import LearningRates
    from paceline.lab.papers.sweeping import make_rates
    from paceline.lab.papers.tasks import QUICK

    path, began_s = choice.rates_path(), time.monotonic()
    make_rates(
        QUICK,
        path=path,
        folder=choice.out or Path("runs") / "papers-sweep",
        say=screen.say,
    )
    rates, took_s = LearningRates.read(path), time.monotonic() - began_s
    screen.facts({"written to": str(path), "sha256": rates.sha256, "took": seconds(took_s)})
    screen.emit({"rates": str(path), "rates_sha256": rates.sha256, "seconds": took_s})


def try_claims(screen: Screen, choice: Choice) -> None:
    """Test the claims, and show the figures and verdicts."""
    claims, scope = choice.claims(), scope_of(choice)
    folder = choice.out or choose_out(None, "papers")
    from paceline.lab.papers.experiment import run_claims

    began_s, last_shown = time.monotonic(), -1

    def show_progress(done: int, planned: int) -> None:
        nonlocal last_shown
        if (tenth := 10 * done // planned) > last_shown:
            last_shown = tenth
            screen.say(f"{done} of {planned} runs, {seconds(time.monotonic() - began_s)}")

    findings = run_claims(claims, scope, folder=folder, on_run=show_progress)
    for finding in findings:
        show_finding(screen, finding)
    _show_summary(screen, findings)
    took_s = time.monotonic() - began_s
    screen.say(f"{seconds(took_s)}; learning rates {scope.rates.sha256[:12]}; runs in {folder}")
    screen.emit(
        {
            "claims": [finding.to_json() for finding in findings],
            "seed": choice.seed,
            "rates_sha256": scope.rates.sha256,
            "seconds": took_s,
            "runs": str(folder),
        }
    )


def scope_of(choice: Choice) -> Scope:
    """The extent of the tests; refuses missing rates."""
    from paceline.lab.papers.claim import Scope
    from paceline.lab.papers.rates import LearningRates

    rates = LearningRates.read(choice.rates_path())
    return Scope(rates=rates, seed=choice.seed)


def show_finding(screen: Screen, finding: ClaimResult) -> None:
    """Show a claim, its source, the figures with their intervals, and the verdict."""
    show_words(screen, finding.claim)
    for figure in finding.figures:
        screen.show(screen.wrap(_line_of(figure), "    "))
    screen.show(f"  {finding.verdict}")
    if finding.decides != "yes":
        screen.show(screen.wrap(f"Can this setup decide it? {finding.decides}.", "    "))
    for reason in finding.reasons:
        screen.show(screen.wrap(reason, "    "))


def show_words(screen: Screen, claim: Described) -> None:
    """Show what a claim says, and how it is tested."""
    screen.show(f"\n{claim.id}")
    texts = claim.description()
    for name in ("claim", "paper", "source", "setup", "rule", "needs"):
        if texts[name]:
            screen.show(screen.wrap(texts[name], f"  {name:<6}  "))


def _line_of(figure: Figure) -> str:
    low, high = figure.interval
    text = f"{figure.what}: {figure.mean:.4g} ({low:.4g} to {high:.4g})"
    if figure.column == "own":
        text += ", own rates"
    return text if figure.wanted is None else f"{text}; wanted {figure.wanted}: {figure.verdict}"


def _show_summary(screen: Screen, findings: Sequence[ClaimResult]) -> None:
    screen.show()
    screen.table(
        ["claim", "source", "verdict"],
        [(f.claim.id, f.claim.source, f.verdict) for f in findings],
    )
