"""A run whose launcher and agent meet over a network: here both are on the loopback."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import runs, warm
from support.namespaces import need_hosts, wait_until
from support.worlds import on_hosts

import paceline as pl
from paceline.lab.network.hosts import HostNetwork
from paceline.launcher.many_hosts import ManyHosts, address_and_port, read_token

ROOT = Path(__file__).resolve().parents[2]
pytestmark = on_hosts

TRAIN = """
import sys

sys.path[:0] = {path!r}
from support import runs


def train(worker):
    worker.log(typed=" ".join(sys.argv[1:]))
    if worker.rank == {broken}:
        raise KeyError("no such thing")
    runs.train_through_losses(worker, until_incarnation={until_incarnation}, victim=3)
"""


HOW = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
HOW |= {"stderr": subprocess.STDOUT}


def page_commands():
    """The commands of the page on many hosts: the launcher's, and the agent's."""
    text = (ROOT / "docs" / "how-to" / "many-hosts.md").read_text()
    return re.findall(r"^paceline run .*(?:--listen|--join) .*$", text, re.M)


def start(command, folder, address):
    line = shlex.split(command.replace("10.0.0.1:7000", address))
    return subprocess.Popen(
        [warm.python(), "-m", *line],
        cwd=folder,
        env=runs.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def hosts(tmp_path):
    """Two folders in place of two hosts, each with the script, and a free address."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    return folders, f"127.0.0.1:{runs.free_port()}"


def start_both(hosts, *more, broken=-1, until_incarnation=0):
    """Start the page's commands: the launcher, and an agent."""
    folders, address = hosts
    facts = {"broken": broken, "until_incarnation": until_incarnation}
    for folder in folders:
        (folder / "train.py").write_text(TRAIN.format(path=sys.path, **facts))
    first, second = page_commands()
    launcher = start(shlex.join([*shlex.split(first), *more]), folders[0], address)
    token = folders[0] / "run.token"
    while not (token.exists() and token.read_text()) and launcher.poll() is None:
        time.sleep(0.01)
    assert token.stat().st_mode & 0o777 == 0o600
    (folders[1] / "run.token").touch(mode=0o600)
    (folders[1] / "run.token").write_text(token.read_text())
    return launcher, start(second, folders[1], address)


def run_on(hosts, *more, broken=-1):
    """Run the page's commands; return how both ended, and what they printed."""
    both = start_both(hosts, *more, broken=broken)
    printed = [process.communicate(timeout=90)[0] for process in both]
    return tuple(process.returncode for process in both), printed


def lose_second_host(hosts, *more):
    """Start a run that goes on until rank 3 is back; kill its host. Returns the launcher."""
    launcher, agent = start_both(hosts, *more, until_incarnation=2)
    metrics = hosts[0][0] / "runs" / "many" / "metrics.jsonl"
    wait_until(lambda: launcher.poll() is not None or '"rank": 3' in read(metrics))
    agent.kill()  # its ranks end with it
    agent.communicate()
    return launcher


def read(path):
    return path.read_text() if path.exists() else ""


def happened(hosts, event):
    result = json.loads((hosts[0][0] / "runs" / "many" / "result.json").read_text())
    return sorted(each["rank"] for each in result["events"] if each["event"] == event)


def test_the_commands_of_the_page_train_together(hosts):
    """The script's own arguments are those that were typed where the run was launched."""
    codes, (launched, joined) = run_on(hosts, "--", "--name", "a name")
    assert codes == (0, 0), launched + joined
    logged = (hosts[0][0] / "runs" / "many" / "metrics.jsonl").read_text()
    assert logged.count('"typed": "--name a name"') == 4
    assert "1 other host; to join, type there: paceline run SCRIPT --join 127.0.0.1:" in launched
    assert (hosts[0][0] / "runs" / "many" / "model.safetensors").is_file()
    assert (hosts[0][1] / "runs" / "many").is_dir()


def test_the_others_go_on_when_a_worker_of_the_other_host_dies(hosts):
    more = ["--fault", "kill(rank=3).at(step=3)"]
    codes, (launched, joined) = run_on(hosts, *more)
    assert codes == (0, 0), launched + joined
    assert re.search(r"lost workers +1", launched)


def test_an_error_on_one_host_ends_all(hosts):
    codes, (launched, _) = run_on(hosts, broken=3)
    assert codes == (1, 1)
    assert "rank 3: KeyError: 'no such thing'" in launched


# A host that is gone ------------------------------------------------------------------------------

UNTIL = """
import pathlib
import sys

sys.path[:0] = {path!r}
import torch

import paceline as pl
from support import runs


def train(worker):
    net = runs.new_net()
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    here = pathlib.Path({folder!r})
    while not (here / "enough").exists():
        sgd.zero_grad()
        net(torch.ones(4, 6)).sum().backward()
        sgd.step()
        (here / f"rank{{worker.rank}}").touch()


if __name__ == "__main__":
    limits = pl.Limits(dead_s=1.0)
    how = dict(transport="hosts", hosts=3, listen={address!r}, token_file={token!r})
    result = pl.launch(train, workers=3, strategy="gossip", limits=limits, **how)
    print("lost workers:", result.lost_workers)
"""


@pytest.fixture
def three_hosts(tmp_path):
    """The launcher and two agents of a run that trains until it is told to end."""
    address, token = f"127.0.0.1:{runs.free_port()}", tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("ab" * 32)
    words = {"path": sys.path, "folder": str(tmp_path), "address": address, "token": str(token)}
    (tmp_path / "train.py").write_text(UNTIL.format(**words))
    processes = [start("train", tmp_path, address)]
    join = f"paceline run train.py --join {address} --token-file {token}"
    processes += [start(join, tmp_path, address) for _ in range(2)]
    try:
        while not all((tmp_path / f"rank{rank}").exists() for rank in range(3)):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.02)
        yield tmp_path, processes
    finally:
        for process in processes:
            process.kill()
            print(process.communicate()[0])


def test_agents_end_when_most_hosts_have_lost_the_launcher(three_hosts):
    _, (launcher, *agents) = three_hosts
    launcher.kill()
    for agent in agents:
        printed = agent.communicate(timeout=60)[0]
        assert agent.returncode == 3, printed
        assert "most hosts agree that it is gone" in printed


def test_the_others_go_on_when_an_agent_is_gone(three_hosts):
    folder, (launcher, *agents) = three_hosts
    agents[0].kill()
    (folder / "enough").touch()
    assert launcher.communicate(timeout=60)[0].splitlines()[-1] == "lost workers: 1"
    assert (launcher.returncode, agents[1].wait()) == (0, 0)


def test_workers_of_a_lost_host_are_started_again_on_another(hosts):
    launcher = lose_second_host(hosts, "--max-restarts", "2")
    printed, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 0, printed
    assert happened(hosts, "lost") == happened(hosts, "restarted") == [2, 3]
    assert 3 in happened(hosts, "joined")


def test_a_host_that_joins_in_mid_run_takes_the_workers_of_a_lost_one(hosts):
    launcher = lose_second_host(hosts)
    agent = start(page_commands()[1], hosts[0][1], hosts[1])
    printed = [process.communicate(timeout=90)[0] for process in (launcher, agent)]
    assert (launcher.returncode, agent.returncode) == (0, 0), printed
    assert happened(hosts, "lost") == happened(hosts, "restarted") == [2, 3]
    assert 3 in happened(hosts, "joined")


# Encryption --------------------------------------------------------------------------------------

MECHANISMS = ("NULL", "PLAIN", "CURVE")
GREET = """
import socket, sys, time
greeting = bytes.fromhex("ff00000000000000017f0300") + sys.argv[1].encode().ljust(52, bytes(1))
while True:
    try:
        connection = socket.create_connection(("10.77.0.1", 7000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
connection.sendall(greeting)
answer = b""
while len(answer) < 32 and (more := connection.recv(64)):
    answer += more
print(answer[12:32].rstrip(bytes(1)).decode())
"""
"""Says the name of a mechanism of ZeroMQ; the launcher answers with it if it is its own."""


@pytest.mark.may_skip
@pytest.mark.parametrize(
    ("more", "mechanism"), [([], "CURVE"), (["--no-encryption"], "PLAIN")], ids=["with", "without"]
)
def test_between_hosts_a_run_is_encrypted_unless_it_says_that_it_is_not(tmp_path, more, mechanism):
    need_hosts()
    (tmp_path / "train.py").write_text(TRAIN.format(path=sys.path, broken=-1, until_incarnation=0))
    how = {**HOW, "env": runs.environment(), "cwd": tmp_path}
    first, second = (
        shlex.split(command.replace("10.0.0.1", "10.77.0.1")) for command in page_commands()
    )
    with HostNetwork(2) as network:
        line = [sys.executable, "-m", *first, *more]
        launcher = network.popen(0, line, **how)
        answers = [network.run(1, sys.executable, "-c", GREET, name) for name in MECHANISMS]
        assert [answer.strip() for answer in answers] == [
            name if name == mechanism else "" for name in MECHANISMS
        ]
        agent = network.popen(1, [sys.executable, "-m", *second, *more], **how)
        launched, joined = (process.communicate(timeout=90)[0] for process in (launcher, agent))
    assert (launcher.returncode, agent.returncode) == (0, 0), launched + joined
    for text in (launched, joined):
        assert ("connections between hosts are not encrypted" in text) is bool(more)
    assert ("--no-encryption" in launched) is bool(more), "the line to type on the other hosts"


@pytest.mark.may_skip
def test_hosts_whose_clocks_are_days_apart_train_together_over_ipv6(tmp_path):
    """The kernel has no other calendars for namespaces; no duration is read off a calendar."""
    need_hosts()
    (tmp_path / "train.py").write_text(TRAIN.format(path=sys.path, broken=-1, until_incarnation=0))
    first, second = (
        shlex.split(command.replace("10.0.0.1", "[fd77::1]")) for command in page_commands()
    )
    later = ["unshare", "--time", "--monotonic", "300000", "--fork", "--kill-child"]
    with HostNetwork(2) as network:
        launcher = network.popen(
            0, [sys.executable, "-m", *first], **HOW, env=runs.environment(), cwd=tmp_path
        )
        wait_until(lambda: (tmp_path / "run.token").exists())
        agent = network.popen(
            1, [*later, sys.executable, "-m", *second], **HOW, env=runs.environment(), cwd=tmp_path
        )
        launched, joined = (process.communicate(timeout=90)[0] for process in (launcher, agent))
    assert (launcher.returncode, agent.returncode) == (0, 0), launched + joined


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"hosts": 2, "transport": "hosts"}, r"hosts \(2\) needs listen"),
        ({"hosts": 0, "transport": "hosts"}, r"hosts \(0\) must be at least 1"),
        (
            {"hosts": 2, "listen": "10.0.0.1:7000", "transport": "shared_memory"},
            r"transport \(shared_memory\) must be hosts",
        ),
        ({"on": "slurm"}, r"on \(slurm\) must be one of ray"),
        ({"on": "ray", "transport": "distributed"}, r"transport \(distributed\) must be hosts"),
        ({"on": "ray", "hosts": 2}, r"hosts \(2\) must not be given with on \(ray\)"),
        ({"on": "ray", "listen": "10.0.0.1:7000"}, r"listen \(10.0.0.1:7000\) must not be given"),
        (
            {"listen": "7000", "transport": "hosts"},
            r"listen \(7000\) must be an address and a port",
        ),
        ({"workers_per_host": 1}, r"workers_per_host \(1\) is for a run on many hosts"),
        (
            {"listen": "10.0.0.1:7000", "workers_per_host": 1},
            r"workers \(2\) must be at most 1, or allreduce must take workers in: add on_loss",
        ),
        ({"listen": "10.0.0.1:70000", "transport": "hosts"}, "must be an address and a port"),
        ({"encryption": False, "transport": "hosts"}, r"encryption \(False\) is for a run on many"),
    ],
)
def test_options_that_do_not_fit_are_refused(how, message):
    with pytest.raises(pl.UsageError, match=message):
        pl.launch(runs.train, workers=2, **how)


def test_without_ray_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(pl.UsageError, match=r'on \(ray\) needs Ray: pip install "paceline\[ray\]"'):
        pl.launch(runs.train, workers=2, on="ray")


@pytest.mark.parametrize(
    ("more", "wrong"),
    [([], ["--token-file", "wrong"]), (["--no-encryption"], ["--token-file", "run.token"])],
    ids=["another token", "encryption on one side alone"],
)
@pytest.mark.may_skip
def test_a_host_that_is_refused_is_told_so_and_the_run_waits_on(tmp_path, more, wrong):
    need_hosts()
    (tmp_path / "train.py").write_text(TRAIN.format(path=sys.path, broken=-1, until_incarnation=0))
    how = {**HOW, "env": runs.environment(), "cwd": tmp_path}
    first, second = (
        shlex.split(command.replace("10.0.0.1", "10.77.0.1")) for command in page_commands()
    )
    (tmp_path / "wrong").touch(mode=0o600)
    (tmp_path / "wrong").write_text("0b" * 32)
    with HostNetwork(2) as network:
        launcher = network.popen(0, [sys.executable, "-m", *first, *more], **how)
        wait_until(lambda: (tmp_path / "run.token").exists())
        stranger = [sys.executable, "-m", *second[: second.index("--token-file")], *wrong]
        refused = network.popen(1, stranger, **how)
        text = refused.communicate(timeout=90)[0]
        assert refused.returncode == 2 and "what listens at 10.77.0.1:7000 refuses" in text
        agent = network.popen(1, [sys.executable, "-m", *second, *more], **how)
        launched, joined = (process.communicate(timeout=90)[0] for process in (launcher, agent))
    assert (launcher.returncode, agent.returncode) == (0, 0), launched + joined


OTHER_VERSION = """
import sys
import paceline.launcher.agent as agent
agent.__version__ = "0.0.1"
from paceline.cli import main
sys.argv = ["paceline", *sys.argv[1:]]
main()
"""


def test_a_host_with_another_version_is_told_so_and_the_run_waits_on(hosts):
    (folder, _), address = hosts
    token = folder / "run.token"
    token.touch(mode=0o600)
    token.write_text("5a" * 32)
    launcher = ManyHosts(2, *address_and_port("listen", address), token)
    with launcher.agents(pl.Limits()) as agents:
        try:
            line = [warm.python(), "-c", OTHER_VERSION, "run", "--join", address]
            told = subprocess.run(
                line, cwd=folder, env=runs.environment(), **HOW, check=False, timeout=60
            )
            assert told.returncode == 2
            assert f"this is paceline 0.0.1, the launcher's is {pl.__version__}" in told.stdout
            assert not agents.hosts
        finally:
            agents.end(0)


def test_an_address_of_another_host_and_a_port_that_is_taken_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how = {"workers": 2, "transport": "hosts", "hosts": 2}
    with pytest.raises(pl.UsageError, match="must be a free port of this host: Cannot assign"):
        pl.launch(runs.train, listen="192.0.2.1:7000", **how)
    with ManyHosts(1, "127.0.0.1", 0, None).listener() as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(pl.UsageError, match="must be a free port of this host: Address alr"):
            pl.launch(runs.train, listen=address, **how)


def test_a_launcher_whose_hosts_do_not_come_ends(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    how = {"workers": 2, "transport": "hosts", "hosts": 3, "limits": pl.Limits(start_s=0.2)}
    with pytest.raises(pl.PacelineError, match="2 of 2 other hosts have not joined") as caught:
        pl.launch(runs.train, listen=f"127.0.0.1:{runs.free_port()}", **how)
    assert caught.value.exit_code == 3
    assert "waiting for 2 other hosts" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["", "zz", "ab" * 31, "ab" * 33])
def test_a_token_that_is_none_is_refused(text, tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(pl.UsageError, match="must hold 64 hexadecimal digits"):
        read_token(path)
    monkeypatch.setenv("PACELINE_TOKEN", text)
    with pytest.raises(pl.UsageError):
        read_token(None)


def test_a_token_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "token"
    path.write_text("ab" * 32)
    path.chmod(0o644)
    with pytest.raises(pl.UsageError, match=f"chmod 600 {path}"):
        read_token(path)
    os.chmod(path, 0o600)
    assert read_token(path) == b"\xab" * 32


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--join", "host:1", "-w", "2"], "--workers must not be given with --join"),
        (["--join", "10.0.0.1:99999"], "join (10.0.0.1:99999) must be an address and a port"),
        (["--join", "10.0.0.1:7000"], "token_file (run.token) must be a file"),
    ],
)
def test_a_join_that_cannot_be_is_refused(line, message, paceline):
    assert message in paceline("run", *line, code=2).err
