"""The page of a run: a small web application that reads the run's folder.

Its files hold nothing of the run, so anyone who reaches the port may load them. What is known of
the run, and the button that stops it, need the token: the end of the page's address, which browsers
send to nobody. There are no cookies, so no other page can act in the user's name.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import UsageError
from paceline.launcher.control_socket import ask
from paceline.watch.run import WatchedRun

INTERVAL_S = 1.0
BEATS = 5
"""After so many intervals without anything new, clients get the last state again."""
MOST_CLIENTS = 128
_TYPES = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Page:
    """The application.

    Args:
        run: what it shows.
        token: whoever has it may see the run and stop it.
        hosts: the values of the header ``Host`` that are allowed: address and port.
    """

    def __init__(self, run: WatchedRun, token: str, hosts: Callable[[str], bool]) -> None:
        self._run, self._token = run, token
        self._changed = asyncio.Condition()
        self._number, self._message = 0, b""
        self.clients = 0
        self.app = Starlette(
            routes=[
                *(Route(_path(name), self._file(name)) for name in _TYPES),
                Route("/events", self._events),
                Route("/stop", self._stop, methods=["POST"]),
            ],
            middleware=[Middleware(Guard, hosts=hosts)],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        ticking = asyncio.create_task(self._tick())
        yield
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking

    def _file(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        content = files("paceline.watch").joinpath("static", name).read_bytes()

        async def reply(request: Request) -> Response:
            return Response(content, media_type=_TYPES[name])

        return reply

    def _is_known(self, request: Request) -> bool:
        given = request.headers.get("authorization", "")
        return secrets.compare_digest(given.encode(), f"Bearer {self._token}".encode())

    # What is known of the run --------------------------------------------------------------------

    async def _events(self, request: Request) -> Response:
        """The state of the run as server-sent events, each of them whole."""
        if not self._is_known(request):
            return PlainTextResponse("the token is missing or wrong", 401)
        if self.clients >= MOST_CLIENTS:
            return PlainTextResponse(f"{MOST_CLIENTS} others look at this run", 503)
        return StreamingResponse(self._states(), media_type="text/event-stream")

    async def _states(self) -> AsyncIterator[bytes]:
        """The newest state, and each newer one; a client that reads slowly misses some."""
        self.clients += 1
        try:
            if self.clients == 1:
                self._read()
            seen = -1
            while True:
                async with self._changed:
                    while self._number == seen:
                        await self._changed.wait()
                    seen, message = self._number, self._message
                yield message
        finally:
            self.clients -= 1

    async def _tick(self) -> None:
        """Read what is new once a second, while anybody looks."""
        idle = 0
        while True:
            await asyncio.sleep(INTERVAL_S)
            if not self.clients:
                continue
            idle += 1
            if self._run.look() or idle >= BEATS:
                idle = 0
                self._encode()
                async with self._changed:
                    self._changed.notify_all()

    def _read(self) -> None:
        self._run.look_at_all()
        self._encode()

    def _encode(self) -> None:
        text = json.dumps(self._run.summary(), separators=(",", ":"))
        self._number, self._message = self._number + 1, f"data: {text}\n\n".encode()

    # Stopping it ---------------------------------------------------------------------------------

    async def _stop(self, request: Request) -> Response:
        """Ask the launcher for a checkpoint and the end of the run."""
        if not self._is_known(request):
            return PlainTextResponse("the token is missing or wrong", 401)
        try:
            reply = await asyncio.to_thread(ask, "run", self._run.path, {"ask": "stop"})
        except UsageError as error:
            reply = {"error": str(error)}
        return JSONResponse(reply, 409 if "error" in reply else 200)


def _path(name: str) -> str:
    return "/" if name == "page.html" else f"/{name}"


class Guard:
    """Refuses requests for other hosts and from other origins; adds headers to every reply."""

    def __init__(self, app: ASGIApp, hosts: Callable[[str], bool]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        site = request.headers.get("sec-fetch-site", "same-origin")

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        app = self._app
        if not self._hosts(host):
            app = PlainTextResponse("this page is not on that host", 403)
        elif origin not in (None, f"http://{host}") or site not in ("same-origin", "none"):
            app = PlainTextResponse("another page must not ask this one", 403)
        await app(scope, receive, guarded)
