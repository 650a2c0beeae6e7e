"""The process of the drill on each host: the launcher on the first, an agent on each other.

    python -m paceline.lab.drill.host_process launch OPTIONS
    python -m paceline.lab.drill.host_process join OPTIONS

The options are JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from paceline.comm.limits import Limits
from paceline.common.reference import Reference
from paceline.errors import PacelineError
from paceline.launcher.agent import join
from paceline.launcher.launch import launch
from paceline.launcher.many_hosts import ManyHosts, address_and_port, read_token

TRAIN: Reference = {"module": "paceline.lab.drill.task", "name": "train"}
"""The training, which only the ranks import."""


def main(what: str, options: dict[str, Any]) -> int:
    """Be the launcher or an agent; return the exit code."""
    try:
        if what == "join":
            token = read_token(Path(options["token_file"]))
            launcher = ManyHosts(1, *address_and_port("join", options["join"]), None)
            return join(launcher, token, TRAIN)
        launch(TRAIN, limits=Limits(dead_s=options.pop("dead_s")), transport="hosts", **options)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
