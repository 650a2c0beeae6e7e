"""A headless Chromium, driven over a pipe, that opens, measures and photographs pages."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--mute-audio",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)

MEASURE = """
(() => {
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    const silent = ["style", "script", "title"].includes(parent.tagName.toLowerCase());
    if (!node.data.trim() || silent) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter(box => box.width > 0.5 && box.height > 0.5);
    if (!boxes.length || !parent.checkVisibility({visibilityProperty: true})) continue;
    const head = parent.closest("thead");
    if (head && getComputedStyle(head).position === "absolute") continue;  // not shown
    let left = 0, right = innerWidth, top = -1e9, bottom = 1e9;
    for (let around = parent; around; around = around.parentElement) {
      const frame = around.getBoundingClientRect(), how = getComputedStyle(around);
      const drawn = around.tagName === "svg";
      if (drawn || how.overflowX !== "visible") {
        left = Math.max(left, frame.left); right = Math.min(right, frame.right);
      }
      if ((drawn || how.overflowY !== "visible") && around !== document.documentElement) {
        top = Math.max(top, frame.top); bottom = Math.min(bottom, frame.bottom);
      }
    }
    const size = parseFloat(getComputedStyle(parent).fontSize);
    const drawing = parent.closest("svg");
    const wide = drawing ? drawing.getBoundingClientRect().width : 1;
    const scale = drawing ? wide / drawing.viewBox.baseVal.width : 1;
    for (const box of boxes)
      texts.push({text: node.data.trim().slice(0, 60), id: texts.length, size: size * scale,
                  node: node, in_svg: !!drawing,
                  box: [box.left, box.top + scrollY, box.right, box.bottom + scrollY],
                  cut: box.left < left - 1 || box.right > right + 1
                       || box.top < top - 1 || box.bottom > bottom + 1});
  }
  texts.sort((a, b) => a.box[1] - b.box[1]);
  const overlaps = [];
  for (let i = 0; i < texts.length; i++)
    for (let j = i + 1; j < texts.length && texts[j].box[1] < texts[i].box[3]; j++) {
      const [a, b] = [texts[i], texts[j]];
      if (a.node === b.node) continue;
      const across = Math.min(a.box[2], b.box[2]) - Math.max(a.box[0], b.box[0]);
      const down = Math.min(a.box[3], b.box[3]) - Math.max(a.box[1], b.box[1]);
      const line = a.in_svg && b.in_svg ? 1.5 : 4;  // lines of a text may touch
      if (across > 1 && down > line) overlaps.push([a.text, b.text, across, down]);
    }
  return {
    texts: texts.length,
    overlaps: overlaps,
    cut: texts.filter(t => t.cut).map(t => [t.text, t.box]),
    smallest: Math.min(...texts.map(t => t.size)),
    width: document.documentElement.scrollWidth,
    viewport: innerWidth,
    loaded: performance.getEntriesByType("resource").map(entry => entry.name),
    scripts: document.querySelectorAll("script").length,
    alarmed: window.alarmed === true,
  };
})()
"""
"""All text on the page: what overlaps, what is cut off, and what the page requested."""


class Chromium:
    """A browser with one page, as a context manager."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def as_3_and_4() -> None:
            os.dup2(theirs_in, 13)
            os.dup2(theirs_out, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        self._process = subprocess.Popen(
            [PROGRAM, *SWITCHES, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=as_3_and_4,
            close_fds=False,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._unread, self.requests = 0, b"", list[str]()
        targets = self._ask("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")
        self.call("Network.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ask("Browser.close")
        os.close(self._out)
        os.close(self._in)
        self._process.wait(20)

    def open(self, page: Path | str, width: int, height: int = 900) -> None:
        """Open a file or an address in a window of this width, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.requests.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while self.evaluate("document.readyState") != "complete":
            pass

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def measure(self) -> dict[str, Any]:
        """The positions of the texts on the page, and what is wrong with them."""
        return self.evaluate(MEASURE)

    def photograph(self, path: Path) -> None:
        """Write the whole page as a PNG file."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def print_to(self, path: Path) -> None:
        """Write the page as a PDF file."""
        pdf = self.call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(pdf["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the page."""
        return self._ask(method, session=self._session, **parameters)

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            request["sessionId"] = session
        os.write(self._out, json.dumps(request).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has ended"
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\0")
        return json.loads(line)
