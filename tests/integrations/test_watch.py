"""The page of a run in a real browser while a real run trains, and who may see it and stop it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.chromium import PROGRAM, Chromium
from support.namespaces import wait_until

from paceline.watch.page import MOST_CLIENTS
from paceline.watch.server import Beside

SCRIPT = '''
import os
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def train(worker):
    """Train until told to end; leave the number of the process, so that a test can end it."""
    Path(f"pid.{worker.rank}").write_text(str(os.getpid()))
    model = torch.nn.Linear(8, 2)
    model, optimizer = worker.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=16, shuffle=True)
    loader = worker.setup_dataloaders(loader, epochs=2000)
    for epoch in range(2000):
        for inputs, labels in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            time.sleep(0.01)
            if Path("enough").exists():
                worker.stop_all()
            worker.log(loss=loss, accuracy=(outputs.argmax(1) == labels).float().mean())
        if worker.stopping:
            break
'''
NAME = "<b>a run<i>"
WIDTHS = (360, 1280)
pytestmark = pytest.mark.timeout(300)
in_browser = [
    pytest.mark.may_skip,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium in the path: apt-get install chromium"),
]


@contextmanager
def training(folder: Path, *options: str):
    """A run of three workers with a live page; yields its process and the page's address."""
    (folder / "train.py").write_text(SCRIPT)
    command = ["run", "train.py", "-w", "3", "-s", "gossip", "--live", "-q", "--out", NAME]
    run = subprocess.Popen(
        [sys.executable, "-m", "paceline", *command, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        line = run.stdout.readline()
        yield run, re.fullmatch(r"Live page: (http://127\.0\.0\.1:\d+/#\S+)\n", line)[1]
    finally:
        run.kill()
        run.communicate()


@pytest.fixture
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture
def shots(tmp_path_factory):
    """Where screenshots stay; ``--basetemp`` chooses it."""
    folder = tmp_path_factory.getbasetemp() / "screenshots"
    folder.mkdir(exist_ok=True)
    return folder


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")


def await_text(browser, selector, wanted, seconds=60):
    wait_until(lambda: wanted in text(browser, selector), seconds)


def press(browser, key, code):
    """Press a key, as a person without a mouse does."""
    for kind in ("keyDown", "keyUp"):
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        more = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
        browser.call("Input.dispatchKeyEvent", type=kind, **event, **more)


def go_to(browser, name):
    """Move the focus with the keyboard alone until it is on a control."""
    for _ in range(40):
        if browser.evaluate("document.activeElement.id") == name:
            return
        press(browser, "Tab", 9)
    raise AssertionError(f"the keyboard does not reach {name}")


# In a browser ------------------------------------------------------------------------------------


class TestInBrowser:
    pytestmark = in_browser

    def test_it_follows_a_run_through_a_loss_and_a_return_to_its_end(
        self, tmp_path, browser, shots
    ):
        with training(tmp_path, "--max-restarts", "1") as (run, url):
            browser.open(url, 1280)
            await_text(browser, "#worker-1", "training")
            await_text(browser, "#charts", "samples per second")
            assert text(browser, "h1") == NAME and text(browser, "#state") == "running"
            os.kill(int((tmp_path / "pid.1").read_text()), signal.SIGKILL)
            await_text(browser, "#events", "rank 1 lost")
            await_text(browser, "#worker-1", "back")
            os.kill(int((tmp_path / "pid.2").read_text()), signal.SIGKILL)
            await_text(browser, "#worker-2", "lost")
            await_text(browser, "#notice", "Worker 2: lost")
            for width in WIDTHS:
                browser.open(url, width)
                await_text(browser, "#worker-2", "lost")
                browser.photograph(shots / f"live-{width}.png")
                seen = browser.measure()
                assert seen["overlaps"] == seen["cut"] == []
                assert seen["width"] <= seen["viewport"] == width and seen["smallest"] >= 11.5
                base = url.partition("#")[0]
                assert all(one.startswith((base, "data:")) for one in browser.requests)
            before = browser.evaluate("document.querySelector('#number-steps').innerText")
            wait_until(lambda: text(browser, "#number-steps") != before, 30)
            (tmp_path / "enough").touch()
            assert run.wait(60) == 0
            await_text(browser, "#state", "ended")
            await_text(browser, "#notice", "Not connected")
            browser.evaluate("document.querySelector('#charts details summary').click()")
            wait_until(lambda: "least" in text(browser, "#charts details[open]"), 10)
            assert "rank 2 lost" in text(browser, "#events")

    def test_a_person_with_a_keyboard_stops_it_with_a_checkpoint(self, tmp_path, browser):
        with training(tmp_path, "--checkpoint-minutes", "60") as (run, url):
            browser.open(url, 360)
            await_text(browser, "#worker-2", "training")
            wait_until(lambda: not browser.evaluate("document.getElementById('stop').disabled"), 30)
            go_to(browser, "stop")
            press(browser, "Enter", 13)
            assert browser.evaluate("document.activeElement.id") == "no"
            browser.evaluate("document.getElementById('yes').focus()")
            press(browser, "Enter", 13)
            await_text(browser, "#stopping", "makes a checkpoint and ends")
            assert run.wait(60) == 128 + signal.SIGTERM
        assert [*(tmp_path / NAME / "checkpoints").glob("*/manifest.json")]

    def test_what_a_screen_reader_is_told(self, tmp_path, browser):
        with training(tmp_path) as (_, url):
            browser.open(url, 360)
            await_text(browser, "#worker-2", "training")
            await_text(browser, "#charts", "loss")
            browser.call("Accessibility.enable")
            nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        told = {
            (node["role"]["value"], node["name"]["value"])
            for node in nodes
            if node.get("role") and node.get("name") and not node.get("ignored")
        }
        roles = [node["role"]["value"] for node in nodes if node.get("role")]
        assert ("table", "Workers") in told and ("rowheader", "worker 0") in told
        assert ("button", "Stop with a checkpoint") in told
        assert {"columnheader", "cell", "progressbar", "status"} <= {*roles}
        charts = [name for role, name in told if role in ("image", "img", "graphics-document")]
        assert any(
            re.match(r"loss from .* to .*: between .* and .*, at last .*", c) for c in charts
        )


# Who may see it ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run that has ended."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    command = ["-m", "paceline", "sim", "--steps", "30", "-w", "2", "--out", str(folder), "-q"]
    subprocess.run([sys.executable, *command], check=True)
    return folder


@pytest.fixture
def served(ended):
    """The page of that run: its port and its token."""
    page = Beside(ended)
    port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/#(\S+)", page.url).groups()
    yield int(port), token, page
    page.close()


def ask(port, path, token=None, method="GET", **headers):
    """The status, the headers and the beginning of a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    body = reply.readline() if path == "/events" and reply.status == 200 else reply.read()
    found = (reply.status, dict(reply.getheaders()), body.decode())
    connection.close()
    return found


def test_only_the_token_opens_it(served):
    port, token, _ = served
    for wrong in (None, "", "x" * len(token), token[:-1]):
        assert ask(port, "/events", wrong)[0] == 401
        assert ask(port, "/stop", wrong, "POST")[0] == 401
    status, _, body = ask(port, "/events", token)
    assert status == 200 and json.loads(body.removeprefix("data: "))["state"] == "ended"


def test_other_hosts_and_origins_are_refused(served):
    port, token, _ = served
    here = f"127.0.0.1:{port}"
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""):
        assert ask(port, "/", Host=host)[0] == 403, host
        assert ask(port, "/events", token, Host=host)[0] == 403, host
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"https://{here}"):
        assert ask(port, "/stop", token, "POST", Origin=origin)[0] == 403, origin
    assert ask(port, "/stop", token, "POST", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(port, "/", Host=f"localhost:{port}")[0] == 200
    assert ask(port, "/stop", token, "POST", Origin=f"http://{here}")[0] == 409


def test_a_run_that_has_ended_cannot_be_stopped(served):
    port, token, _ = served
    status, _, body = ask(port, "/stop", token, "POST")
    assert status == 409 and "must be the folder of a run in progress" in body


def test_every_reply_forbids_scripts_of_others_frames_and_caches(served):
    port, token, _ = served
    for path in ("/", "/page.js", "/page.css", "/events", "/nothing"):
        _, headers, body = ask(port, path, token)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://(?!www\.w3\.org/)", body), path


def test_what_is_not_there_and_other_methods_are_refused(served):
    port, token, _ = served
    assert ask(port, "/stop", token)[0] == 405
    assert ask(port, "/", token, "POST")[0] == 405
    for path in ("/config.json", "/../config.json", "/static/page.html", "/%2e%2e/pid"):
        assert ask(port, path, token)[0] == 404, path


def test_it_listens_on_this_machine_alone(served):
    port, _, _ = served
    lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    listening = [line.split()[1] for line in lines.splitlines() if f":{port:04X} " in line]
    assert f"0100007F:{port:04X}" in listening
    assert not [one for one in listening if one.startswith("0" * 8)]


# Many clients ------------------------------------------------------------------------------------


def resident_kb(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def open_stream(port, token):
    """A connection that has asked for events, and reads nothing by itself."""
    stream = socket.create_connection(("127.0.0.1", port))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    request = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
    stream.sendall(f"{request}\r\n".encode())
    return stream


def test_a_hundred_clients_of_whom_one_never_reads(tmp_path, served):
    """Memory stays bounded, the others are served, and more than enough are refused."""
    port, token, page = served
    ask(port, "/events", token)
    before = resident_kb(page.pid)
    streams = [open_stream(port, token) for _ in range(100)]
    for stream in streams[1:]:
        assert stream.recv(15) == b"HTTP/1.1 200 OK"
    more = [open_stream(port, token) for _ in range(MOST_CLIENTS - 100)]
    for stream in more:
        stream.recv(15)
    assert ask(port, "/events", token)[0] == 503
    assert resident_kb(page.pid) - before < 64_000
    for stream in [*streams[1:], *more]:
        stream.close()
    wait_until(lambda: ask(port, "/events", token)[0] == 200, 60)
    streams[0].close()


def test_it_ends_with_the_process_that_has_begun_it(ended):
    begin = (
        "import sys, time; from pathlib import Path; from paceline.watch.server import Beside;"
        f"page = Beside(Path({str(ended)!r})); print(page.pid, flush=True); time.sleep(100)"
    )
    owner = subprocess.Popen([sys.executable, "-c", begin], stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.communicate()
    wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or is_dead(pid), 60)


def is_dead(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_page_of_a_folder_of_a_run_that_has_ended(ended):
    """As ``paceline watch RUN --page`` serves it."""
    command = [sys.executable, "-m", "paceline", "watch", str(ended), "--page", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = json.loads(server.stdout.readline())["page"]
        port, token = re.search(r":(\d+)/#(\S+)", url).groups()
        status, _, body = ask(int(port), "/events", token)
        assert status == 200 and '"state":"ended"' in body
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.communicate()
