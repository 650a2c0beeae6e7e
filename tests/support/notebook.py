"""Runs a notebook's cells as IPython does: in a ``__main__`` that no file has, by ``python -c``."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support import runs, warm

SHELL = """
import json, linecache, sys

for number, text in enumerate(json.loads(sys.argv[1])):
    name = f"<ipython-input-{number}-cell>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), vars(sys.modules["__main__"]))
"""


def run_cells(texts: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run cells, a list of texts as JSON, one after the other."""
    return subprocess.run(
        [warm.python(), "-c", SHELL, texts],
        cwd=folder,
        env=runs.environment(OMP_NUM_THREADS="1", TMPDIR=str(folder)),
        capture_output=True,
        text=True,
        check=False,
    )
