"""Drills over many hosts: namespaces on this machine, which the drill strikes from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.lab.drill.scenario import Scenario, Strike
from paceline.lab.network.hosts import HostNetwork
from paceline.launcher.many_hosts import TOKEN_BYTES, split
from paceline.record.folder import RESULT
from paceline.record.result import Result
from paceline.strategies import make_strategy
from paceline.strategies.base import homes_of

WORKERS_PER_HOST = 2
PORT = 7000
BEGIN_S, END_S = 120.0, 240.0
"""How long a run may take to begin, and how long to end."""
AFTER_S = 8.0
"""How long a run goes on after the last strike has ended."""
LOST_LAUNCHER = 3
"""The exit code of an agent that has lost the launcher."""
_ENDS = ("kill_processes", "power_off")


class HostsRun:
    """One run over many hosts.

    Args:
        network: the hosts.
        scenario: what happens.
        method: the method to train with.
        seed: of the run.
        folder: where all of its files are.
        least_s: how long it trains; by default, until it has seen all strikes and their ends.
        more: more options of ``launch``.

    Attributes:
        scenario: what happens.
        workers: how many there are.
        victims: the ranks that strikes affect.
        struck_s: when the first strike was, on the run's clock.
        codes: the exit code of the process on each host that was not killed.
        ended_s: how long after the first strike each of these processes ended.
    """

    def __init__(
        self,
        network: HostNetwork,
        scenario: Scenario,
        method: str,
        seed: int,
        folder: Path,
        least_s: float | None = None,
        **more: Any,
    ) -> None:
        self._network, self.scenario, self._method = network, scenario, make_strategy(method)
        self._folder, self._out = folder, folder / "run"
        folder.mkdir(exist_ok=True)
        self.workers = WORKERS_PER_HOST * network.size
        homes = homes_of(self._method, self.workers)
        self._host_of = split(homes, self.workers, network.size)
        self.victims = [rank for strike in scenario.strikes for rank in self._hit(strike)]
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self.codes: dict[int, int] = {}
        self.ended_s: dict[int, float] = {}
        self.struck_s: float | None = None
        self._token, self._began = folder / "token", folder / "began"
        self._began.unlink(missing_ok=True)
        self.least_s = self._until_strikes_end() if least_s is None else least_s
        self._options = {"strategy": method, "seed": seed, **more}

    def run(self) -> None:
        """Start the run, strike it, and wait for its end."""
        late = [self._index(s.host) for s in self.scenario.strikes if s.what == "join"]
        self.start([host for host in range(self._network.size) if host not in late])
        self.await_steps()
        due = [(strike.after_s, self.strike, strike) for strike in self.scenario.strikes]
        for strike in self.scenario.strikes:
            if strike.for_s is not None:
                due.append((strike.after_s + strike.for_s, self._undo, strike))
        began_s = time.monotonic()
        for after_s, act, strike in sorted(due, key=lambda each: each[0]):
            time.sleep(max(0.0, began_s + after_s - time.monotonic()))
            if self.struck_s is None:
                self._struck_at_s = time.monotonic()
                self.struck_s = self._struck_at_s - float(self._began.read_text())
            act(strike)
        self.finish()

    # Starting ------------------------------------------------------------------------------------

    def start(self, hosts: Sequence[int]) -> None:
        """Start the launcher, and an agent on each other of these hosts."""
        self._token.touch(mode=0o600)
        self._token.write_text("5a" * TOKEN_BYTES)
        scenario = self.scenario
        self._begin(
            0,
            "launch",
            workers=self.workers,
            dead_s=scenario.dead_s,
            on_loss="continue",
            max_restarts=scenario.max_restarts,
            hosts=len(hosts),
            workers_per_host=WORKERS_PER_HOST,
            listen=self._address,
            out=str(self._out),
            arguments={
                "epochs": scenario.epochs,
                "incarnations": self._awaited(),
                "least_s": self.least_s,
                "began": str(self._began),
            },
            **self._options,
        )
        for host in hosts:
            if host > 0:
                self._begin(host, "join", join=self._address)

    @property
    def _address(self) -> str:
        return f"{self._network.address(0)}:{PORT}"

    def _begin(self, host: int, what: str, **options: Any) -> None:
        line = [sys.executable, "-m", "paceline.lab.drill.host_process", what]
        options["token_file"] = str(self._token)
        with self._log(host).open("a") as log:
            self._processes[host] = self._network.popen(
                host, [*line, json.dumps(options)], stdout=log, stderr=log
            )

    def _log(self, host: int) -> Path:
        return self._folder / f"host{host}.log"

    def _awaited(self) -> dict[str, int]:
        """The ranks that the run waits for in the end, and their incarnations."""
        strikes, back = self.scenario.strikes, bool(self.scenario.expect.joined)
        follows = any(strike.what == "kill_server" for strike in strikes)
        comes = [rank for rank in self.victims if (back if rank < self.workers else follows)]
        late = self.workers if any(strike.what == "join" for strike in strikes) else 0
        waiting = range(max(0, late - WORKERS_PER_HOST), late)
        return {str(rank): 2 for rank in comes} | {str(rank): 1 for rank in waiting}

    def _until_strikes_end(self) -> float:
        """How long the run trains, so that it sees the strikes and their ends."""
        if self._method.synchronous and self.scenario.kind == "resume_hosts":
            return 0.0  # it must make as many steps as a calm run, to have the same bits
        ends = [strike.after_s + (strike.for_s or 0.0) for strike in self.scenario.strikes]
        return max(ends) + AFTER_S if ends else 0.0

    def await_steps(self) -> None:
        """Wait until rank 0 has made its first step."""
        until_s = time.monotonic() + BEGIN_S
        while not self._began.exists():
            for host, process in self._processes.items():
                if process.poll() is not None:
                    raise PacelineError(f"the run did not begin: {self.last_words(host)}")
            if time.monotonic() > until_s:
                raise PacelineError(f"the run did not begin: {self.last_words(0)}")
            time.sleep(0.02)

    def last_words(self, host: int) -> str:
        """The last line that the process on a host wrote."""
        lines = self._log(host).read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it wrote nothing"

    # Strikes -------------------------------------------------------------------------------------

    def _index(self, host: int) -> int:
        return host % self._network.size

    def _hit(self, strike: Strike) -> list[int]:
        """The ranks that a strike affects."""
        host = self._index(strike.host)
        here = [rank for rank, where in enumerate(self._host_of) if where == host]
        match strike.what:
            case "kill_worker" | "stop":
                return here[:1]
            case "kill_server":
                return [rank for rank in here if rank >= self.workers][:1]
            case "kill_registrar" | "join":
                return []
            case "cut" if host == 0:  # the others lose the launcher
                return [rank for rank, where in enumerate(self._host_of) if where]
        return here

    def strike(self, strike: Strike) -> None:
        """Do what a strike says; it may have to be undone later."""
        host = self._index(strike.host)
        match strike.what:
            case "kill_worker" | "kill_server" | "kill_registrar" | "stop":
                what = signal.SIGSTOP if strike.what == "stop" else signal.SIGKILL
                self._send_signal(strike, what)
            case "kill_processes":
                del self._processes[host]
                for pid in self._network.pids(host):
                    with suppress(ProcessLookupError):  # it ended with its parent
                        os.kill(pid, signal.SIGKILL)
            case "power_off":
                del self._processes[host]
                self._network.kill_host(host)
            case "cut":
                self._network.cut(host)
            case "deafen":
                for other in range(self._network.size):
                    if other != host:
                        self._network.drop(other, host)
            case "join":
                self._begin(host, "join", join=self._address)

    def _undo(self, strike: Strike) -> None:
        if strike.what == "stop":
            self._send_signal(strike, signal.SIGCONT)
        else:
            self._network.heal()

    def _send_signal(self, strike: Strike, what: signal.Signals) -> None:
        """Send a signal to a process, which is known by its name."""
        name = "pl-registrar"
        if strike.what != "kill_registrar":
            name = f"pl-rank-{self._hit(strike)[0]}"
        for pid in self._network.pids(self._index(strike.host)):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    os.kill(pid, what)
                    return
        raise PacelineError(f"there is no process {name} on host {strike.host}")

    # The end -------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the launcher has ended."""
        return self._processes[0].poll() is not None

    def finish(self) -> None:
        """Wait until all processes have ended that were not killed."""
        until_s = time.monotonic() + END_S
        while len(self.codes) < len(self._processes):
            for host, process in self._processes.items():
                if host not in self.codes and (code := process.poll()) is not None:
                    self.codes[host] = code
                    if self.struck_s is not None:
                        self.ended_s[host] = time.monotonic() - self._struck_at_s
            if time.monotonic() > until_s:
                missing = sorted(self._processes.keys() - self.codes)
                raise PacelineError(
                    f"hosts {missing} had not ended after {END_S:.0f} s: {self.last_words(0)}"
                )
            time.sleep(0.02)

    def failures(self) -> list[str]:
        """The hosts whose process ended with another exit code than it should have."""
        alone = {
            self._index(strike.host)
            for strike in self.scenario.strikes
            if strike.what in ("cut", "deafen") and strike.for_s is None
        }
        lost_launcher = any(
            self._index(strike.host) == 0 and strike.what in ("cut", "deafen", *_ENDS)
            for strike in self.scenario.strikes
        )
        found = []
        for host, code in sorted(self.codes.items()):
            cut_off = host > 0 and (lost_launcher or host in alone)
            wanted = LOST_LAUNCHER if cut_off else self.scenario.expect.exit_code
            if code != wanted:
                text = f"exit code {code} of host {host}, not {wanted}"
                found.append(f"{text}: {self.last_words(host)}")
        return found

    def result(self) -> Result | None:
        """The result that the launcher wrote, if it did."""
        try:
            return Result(**json.loads((self._out / RESULT).read_text()))
        except FileNotFoundError:
            return None

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return self._out
