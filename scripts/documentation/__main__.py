"""The command: ``python -m documentation [--out FOLDER]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from documentation.build import build


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/docs", description="Build the site, strictly.")
    parser.add_argument("--out", type=Path, default=Path("site"), help="The folder of the site.")
    out: Path = parser.parse_args().out
    if out.exists() and not (out / "llms.txt").exists():
        parser.error(f"--out ({out}) must be a new folder, or a site that this has built")
    problems = build(out)
    for problem in problems:
        print(f"scripts/docs: {problem}", file=sys.stderr)
    if not problems:
        print(f"Built: {out / 'index.html'}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
