"""A plugin of pytest: tests need the clone, its environment and this Python, and nothing else.

A test fails if it, or a Python that it starts, looks at a file that is neither of those nor of the
system nor in the session's temporary folder. Homes and caches are in that folder, too.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]
STARTUP = Path(__file__).with_name("startup")
SYSTEM = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/proc", "/sys", "/dev", "/run"),
    *(f"/usr/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "include")),
    *(f"/usr/local/{name}" for name in ("bin", "sbin", "lib", "include", "cuda")),
    *(
        f"/usr/share/{name}"
        for name in ("zoneinfo", "locale", "locale-langpack", "i18n", "terminfo")
    ),
)
"""Programs, libraries and settings that a bare system has; not its data."""
CACHES = {
    "HOME": "",
    "TORCH_HOME": "torch",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "XDG_CACHE_HOME": ".cache",
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
}
sys.path.insert(0, str(STARTUP))
import outside  # noqa: E402 - beside what other Pythons load first, which is found by that path


def roots(*own: Path) -> list[str]:
    """What tests may look at: their own, the environment, this Python, and the system."""
    base = Path(sys.base_prefix)
    python = [
        *sysconfig.get_paths().values(),
        *(str(base / n) for n in ("bin", "lib", "include", "share/locale")),
    ]
    paths = filter(os.path.isabs, [*sys.path, *os.get_exec_path()])
    return [*map(str, own), sys.prefix, *python, *paths, *SYSTEM]


class _Notes:
    """What was noted, and not yet told."""

    path: Path | None = None
    told = 0

    def begin(self, path: Path) -> None:
        path.touch()
        self.path, self.told = path, 0

    def new(self) -> str:
        if self.path is None or self.path.lstat().st_size == self.told:
            return ""
        with self.path.open() as notes:
            notes.seek(self.told)
            new = notes.read()
            self.told = notes.tell()
        return "a look at what not every machine has:\n" + new


_notes = _Notes()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Give the tests and what they start another home, and watch them."""
    own = session.config._tmp_path_factory.getbasetemp()
    for name, place in CACHES.items():
        os.environ[name] = str(own / "home" / place)
    os.environ["TMPDIR"] = tempfile.tempdir = str(own / "tmp")
    for folder in ("home", "tmp"):
        (own / folder).mkdir()
    _notes.begin(own / "notes")
    os.environ[outside.NOTES] = str(own / "notes")
    os.environ[outside.ROOTS] = os.pathsep.join(roots(own, CLONE, session.config.rootpath))
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP), *path]))
    outside.watch()


@pytest.hookimpl(wrapper=True)
def _fail_for_looks(item: pytest.Item) -> Iterator[None]:
    """The first test is also to blame for looks at the collection."""
    yield
    if told := _notes.new():
        pytest.fail(told, pytrace=False)


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _fail_for_looks
