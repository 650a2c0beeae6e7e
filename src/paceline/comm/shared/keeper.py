"""The keeper of a device's memory: a process that holds a context of the device, and nothing else.

What ranks on a GPU leave for each other lies in its memory, so that it stays whole when they die.
It starts with the run and outlives its ranks; when it is lost, the run ends. A rank asks for a
segment by setting its size in the control area, and the keeper answers with a handle there.
"""

from __future__ import annotations

from paceline.comm.liveness import TICK_S
from paceline.comm.shared.drivers import Driver, DriverError, driver_of
from paceline.comm.shared.layout import GIVEN, Layout
from paceline.comm.shared.memory import SharedWords, map_control


def keep(fd: int, size: int, device: str) -> None:
    """Give out memory of ``device`` to ``size`` ranks, until this process is ended."""
    layout = Layout(size)
    words = SharedWords(map_control(fd, layout.words * 8), size)
    driver: Driver | None = None
    while True:
        rung = words[layout.keeper_bell]
        for index in layout.segments():
            nbytes, given = words.read(index, 2)
            if nbytes and not given:
                try:
                    driver = driver or driver_of(device)
                    handle = memoryview(driver.allocate(nbytes)).cast("q")
                    words.write(index + 2, tuple(handle))
                    words.announce(index + 1, GIVEN)
                except DriverError as error:
                    words.announce(index + 1, -error.code)
        while not words.wait_change(layout.keeper_bell, rung, TICK_S):
            pass
