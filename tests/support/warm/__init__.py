"""A Python that starts in milliseconds: it is forked from a process that has loaded torch.

To import torch, and to make the first optimizer, takes three seconds of processor time, which every
Python that a test starts would pay. :func:`programs` returns a folder with a ``python`` and a
``paceline``, to be used as the real ones: each asks the server of this session to fork a process
with its own arguments, environment, folder and open files, passes on signals, and ends as that
process does. They may be used wherever a test does not care who the parent of a process is, what
its session and process group are, and which modules of other packages are loaded already.
Paceline itself is not loaded before the process is forked.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def programs() -> Path:
    """Their folder; the first call starts the server, which ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    text = f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}"
    for name in ("python", "paceline"):
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    atexit.register(server.communicate)  # it ends when its input does
    return folder


def python() -> str:
    """The path of the Python that starts in milliseconds."""
    return str(programs() / "python")


def search_path() -> str:
    """A ``PATH`` that finds the programs first."""
    return os.pathsep.join([str(programs()), os.environ["PATH"]])
