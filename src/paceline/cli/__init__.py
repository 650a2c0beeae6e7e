"""The command line. ``paceline --help`` loads no torch."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, and exit with its exit code."""
    if sys.platform == "win32":
        print("paceline: Windows is not supported; use WSL", file=sys.stderr)
        sys.exit(2)
    from paceline.cli.app import app

    app(prog_name="paceline")
