"""Builds the distributions of a source tree, without network."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support import warm
from support.hermetic import outside


def python(folder: Path, *arguments: object, **variables: str) -> str:
    """Run Python in a folder; returns what it printed."""
    done = subprocess.run(
        [warm.python(), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, folder: Path, kind: str) -> Path:
    """Build a ``wheel`` or an ``sdist``; the builder looks for a repository of Mercurial above."""
    looks = [str(above / name) for above in source.parents for name in (".hg", ".hgignore")]
    roots = {outside.ROOTS: os.pathsep.join([os.environ[outside.ROOTS], *looks])}
    python(source, "-m", "hatchling", "build", "-t", kind, "-d", folder, **roots)
    (path,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return path
