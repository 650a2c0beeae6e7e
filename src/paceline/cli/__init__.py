"""The command line. ``paceline --help`` loads no torch."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, and exit with its exit code; what follows ``--`` is a script's own."""
    if sys.platform == "win32":
        print("paceline: Windows is not supported; use WSL", file=sys.stderr)
        sys.exit(2)
    from paceline.cli.app import app

    own = sys.argv[1:]
    where = own.index("--") if "--" in own else len(own)
    app(own[:where], prog_name="paceline", obj=own[where + 1 :])
