"""The sources of the examples, on one page of the site."""

from __future__ import annotations

import json
from pathlib import Path

from documentation.navigation import ROOT

EXAMPLES = "examples"


def example_sources(pattern: str) -> str:
    """The examples that match a pattern, each below a heading of its own."""
    paths = sorted(ROOT.glob(pattern))
    return "\n\n".join(f"### {path.name}\n\n```python\n{_source_of(path)}```" for path in paths)


def _source_of(path: Path) -> str:
    """The text of a program; of a notebook, that of its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n\n".join("".join(lines) for lines in cells) + "\n"


def example_anchor(path: str) -> str:
    """The anchor of an example on that page; none for a folder."""
    name = Path(path).name
    return name.replace(".", "") if name.endswith((".py", ".ipynb")) else ""
