"""``paceline papers --full``: the claims at the papers' scale, in pieces."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.screen import Screen, seconds
from paceline.lab.papers.full import FULL_CLAIMS, find_full

if TYPE_CHECKING:
    from paceline.lab.papers.full.setup import Extent
    from paceline.lab.papers.full.study import FullResult, Study

FOLDER = Path("runs") / "papers-full"
REPORT = "claims.json"


@dataclass(frozen=True, kw_only=True)
class FullChoice:
    """The options of the command."""

    name: str | None
    extent: Extent
    out: Path | None
    minutes: float | None
    processes: int | None

    @property
    def folder(self) -> Path:
        """Of finished runs, pictures and the report."""
        return self.out or FOLDER

    @property
    def again(self) -> str:
        """The command that goes on."""
        extent = self.extent
        options = {
            "--seed": extent.seed or None,
            "--scale": None if extent.scale == 1 else f"{extent.scale:g}",
            "--data": extent.data,
            "--device": None if extent.device == "cpu" else extent.device,
            "--batched": None if extent.batched == "off" else extent.batched,
            "--minutes": None if self.minutes is None else f"{self.minutes:g}",
            "--processes": self.processes,
            "--out": self.out,
        }
        given = [str(part) for item in options.items() if item[1] is not None for part in item]
        name = [] if self.name is None else [self.name]
        return shlex.join(["paceline", "papers", *name, "--full", *given])


def list_full(screen: Screen, choice: FullChoice) -> None:
    """Show each claim that has a full form, and how it is tested there."""
    from paceline.cli.papers import show_words

    claims = [find_full(name) for name in _names(choice)]
    for claim in claims:
        show_words(screen, claim)
    screen.emit({"claims": [claim.description() for claim in claims]})


def try_full(screen: Screen, choice: FullChoice) -> int:
    """Make the runs that are missing, show what is known, and draw the curves.

    Returns:
        The exit code: 1 if runs failed.
    """
    from paceline.lab.papers.full.study import Study
    from paceline.lab.pool import cores

    choice.extent.check()
    began_s = time.monotonic()
    limit_s = float("inf") if choice.minutes is None else 60 * choice.minutes
    claims = [find_full(name) for name in _names(choice)]
    study = Study(claims, choice.extent, choice.folder, limit_s)
    screen.say(f"at least {study.left} runs to make")
    study.run(choice.processes or cores(), screen.say)
    findings = list(study.findings())
    _show(screen, findings)
    took_s = time.monotonic() - began_s
    outcome = {
        "claims": [finding.to_json() for finding in findings],
        "epochs": choice.extent.epochs,
        "failures": study.failures,
        "left": study.left,
        "seconds": took_s,
        "go_on": choice.again if study.left else None,
    }
    _write(choice.folder, study, findings, outcome)
    _tell_end(screen, choice, study, took_s)
    screen.emit(outcome)
    return int(bool(study.failures))


def _names(choice: FullChoice) -> Sequence[str]:
    return [choice.name] if choice.name else [*FULL_CLAIMS]


def _show(screen: Screen, findings: Sequence[FullResult]) -> None:
    from paceline.cli.papers import show_finding

    for finding in findings:
        show_finding(screen, finding)
        rates = "; ".join(f"{way}: {rate:g}" for way, rate in finding.rates.items())
        screen.show(screen.wrap(f"Best rates: {rates or 'none is known'}.", "    "))
    screen.show()
    screen.table(
        ["claim", "source", "verdict", "minutes of its runs", "runs missing"],
        [
            (f.claim.id, f.claim.source, f.verdict, f"{f.minutes:.1f}", str(f.missing))
            for f in findings
        ],
    )


def _write(
    folder: Path, study: Study, findings: Sequence[FullResult], outcome: dict[str, object]
) -> None:
    """Write the report and the pictures into the folder."""
    from paceline.report.panels import picture

    (folder / REPORT).write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    for finding, panels in zip(findings, study.panels(), strict=True):
        if any(any(panel.lines.values()) for panel in panels):
            text = picture(panels, f"Curves of {finding.claim.id}: {finding.verdict}")
            (folder / f"{finding.claim.id}.svg").write_text(text, encoding="utf-8")


def _tell_end(screen: Screen, choice: FullChoice, study: Study, took_s: float) -> None:
    screen.say(f"{seconds(took_s)}; runs, {REPORT} and curves in {choice.folder}")
    for what, error in study.failures.items():
        screen.tell(f"failed: {what}: {error}")
    if study.left:
        screen.tell(f"At least {study.left} runs are left. To go on, type: {choice.again}")
