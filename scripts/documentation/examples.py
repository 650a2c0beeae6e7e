"""The sources of the examples, on one page of the site."""

from __future__ import annotations

from pathlib import Path

from documentation.navigation import ROOT

EXAMPLES = "examples"


def example_sources(pattern: str) -> str:
    """The examples that match a pattern, each below a heading of its own."""
    paths = sorted(ROOT.glob(pattern))
    return "\n\n".join(f"### {path.name}\n\n```python\n{path.read_text()}```" for path in paths)


def example_anchor(path: str) -> str:
    """The anchor of an example on that page; none for a folder."""
    name = Path(path).name
    return name.replace(".", "") if name.endswith(".py") else ""
