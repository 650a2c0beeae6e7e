"""The distributions as an index takes them: metadata and front page pass its checks."""

from __future__ import annotations

from pathlib import Path

from support.distribution import build, python

ROOT = Path(__file__).parents[2]


def test_an_index_takes_both_distributions(tmp_path):
    paths = [build(ROOT, tmp_path, kind) for kind in ("wheel", "sdist")]
    printed = python(tmp_path, "-m", "twine", "check", "--strict", *paths)
    assert printed.count("PASSED") == 2
