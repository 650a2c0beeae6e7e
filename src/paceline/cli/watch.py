"""The commands that show a run while it goes on: in this terminal, or on a page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.launcher.many_hosts import address_and_port
from paceline.watch.run import WatchedRun, check_is_run

if TYPE_CHECKING:
    from paceline.cli.screen import Screen

INTERVAL_S = 1.0


def watch_in_terminal(screen: Screen, folder: Path) -> None:
    """Show a run until it ends; where there is no terminal, or it has ended, show it once."""
    from rich.live import Live

    from paceline.watch.terminal import view

    check_is_run(folder)
    run, console = WatchedRun(folder), screen.console
    run.look_at_all()
    if console.is_terminal and run.state == "running":
        with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
            while run.state == "running":
                live.update(view(run.summary()), refresh=True)
                time.sleep(INTERVAL_S)
                run.look()
            run.look_at_all()
            live.update(view(run.summary()), refresh=True)
    elif not screen.as_json:
        console.print(view(run.summary()))
    screen.emit(run.summary())


def watch_on_page(screen: Screen, folder: Path, listen: str | None) -> None:
    """Serve the page of a run until Ctrl-C."""
    from paceline.watch.server import Place, serve

    check_is_run(folder)
    place = Place.at() if listen is None else Place.at(*address_and_port("listen", listen))
    screen.show(f"The page of {folder}, until Ctrl-C: {place.url}")
    screen.emit({"page": place.url})
    with suppress(KeyboardInterrupt):
        serve(folder, place)


@contextmanager
def live_page(screen: Screen, folder: Path) -> Iterator[None]:
    """Serve the page of a run beside it; on a terminal, also after the run, until Ctrl-C."""
    from paceline.watch.server import Beside

    page = Beside(folder)
    screen.tell(f"Live page: {page.url}")
    try:
        yield
        if screen.is_watched:
            screen.tell(f"The page stays until Ctrl-C: {page.url}")
            with suppress(KeyboardInterrupt):
                page.wait()
    finally:
        page.close()
