"""A rank in its own process, and its pipe to the launcher.

The rank sends what it logs, how it failed and what it returns, as one line of JSON each. Nothing
is pickled.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from paceline.comm.limits import Limits
from paceline.common.reference import find
from paceline.errors import (
    CommTimeout,
    Outlived,
    PeerLost,
    RunLost,
    UsageError,
    summary_of,
    user_traceback,
)
from paceline.launcher.signals import ASK
from paceline.launcher.transports import TRANSPORTS

Message = dict[str, Any]

in_rank = False
"""Whether this process is a rank; a rank cannot launch another run."""


def refuse_in_rank() -> None:
    """Refuse to launch in a rank."""
    if in_rank:
        raise UsageError(
            "a rank must not launch: each rank imports the script again, so the call that starts"
            ' the run must be under if __name__ == "__main__":'
        )


class Channel:
    """Sends messages from a rank to its launcher."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.RLock()

    def send(self, message: Message) -> None:
        """Send one message without interruption; does nothing if the launcher has ended.

        A pipe takes 64 KB at a time, and a signal would interrupt the write of a longer message.
        Signals wait until all of it is written, because their handlers may raise or send messages.
        """
        data = memoryview(json.dumps(message).encode() + b"\n")
        with self._lock, _signals_blocked(), suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._fd, data) :]

    def report(self, kind: str, record: Message) -> None:
        """Send a record, for the launcher to hand on."""
        self.send({"kind": kind, "record": record})


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block all signals in this thread."""
    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)


def keeper_main(config: Message, fds: list[int]) -> int:
    """The main function of the keeper of a device's memory; the launcher ends it."""
    from paceline.comm.shared.keeper import keep

    _heed_launcher_alone(config)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    keep(fds[0], config["size"], config["device"])
    return 1


def registrar_main(config: Message, fds: list[int]) -> int:
    """The main function of the registrar, who knows the members; the launcher ends it."""
    from paceline.comm.hosts.registrar_process import keep_roll

    _heed_launcher_alone(config)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    journal, listener = fds
    own = {name: config[name] for name in ("size", "workers", "late")}
    token, limits = bytes.fromhex(config["token"]), Limits(**config["limits"])
    keep_roll(listener, journal, token, config["encrypted"], limits=limits, **own)
    return 1


def _heed_launcher_alone(config: Message) -> None:
    """Take over the launcher's environment, and leave signals of a terminal to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(ASK, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(config["environment"])


def rank_main(config: Message, fds: list[int]) -> int:
    """The main function of a rank's process; returns its exit code."""
    _heed_launcher_alone(config)
    os.chdir(config["cwd"])
    sys.argv[:] = config["argv"]
    sys.path[:] = config["path"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whole lines, so that ranks' output does not mix
            stream.reconfigure(line_buffering=True, write_through=False)
    channel = Channel(fds[0])
    global in_rank
    in_rank = True
    try:
        import torch

        torch.set_num_threads(config["threads"])
        connect = TRANSPORTS[config["transport"]].connect
        ports = connect(config, fds[1], lambda loss: channel.send(_describe(loss)))
        channel.send({"kind": "entered"})
        if ports.members.late and not config["seen"] and config["rank"] not in config["late"]:
            return 1  # an earlier process took this rank and was lost before it could report that
        value = find(config["program"])(ports, channel, config["argument"])
        ports.close()
        channel.send({"kind": "value", "value": value})
        return 0
    except Outlived:  # this rank counts as lost, and may be restarted
        return 1
    except BaseException as error:
        error = error.loss if isinstance(error, RunLost) else error
        channel.send(_describe(error))
        return getattr(error, "exit_code", 1)


def _describe(error: BaseException) -> Message:
    message: Message = {
        "kind": "error",
        "type": type(error).__name__,
        "message": str(error),
        "usage": isinstance(error, UsageError),
        "summary": summary_of(error),
        "traceback": user_traceback(error),
        "time_s": time.monotonic(),
    }
    if isinstance(error, (PeerLost, CommTimeout)):
        message |= {"ranks": error.ranks, "op": error.op, "waited_s": error.waited_s}
        message |= {"reason": getattr(error, "reason", "")}
    return message


def none_main(config: Message, fds: list[int]) -> int:
    """The main function of a process that shows that processes can be started."""
    return 0


MAIN_OF = {
    "rank": rank_main,
    "keeper": keeper_main,
    "registrar": registrar_main,
    "none": none_main,
}
"""The main function of each role that a forked process can have."""
