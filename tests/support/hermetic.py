"""A plugin of pytest: tests must need only the clone, its environment and this Python.

A test fails if it, or a Python that it starts, accesses any other file, unless that belongs to the
system or lies in the session's temporary folder. Homes and caches are in that folder, too.
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
    *(f"/usr/local/{name}" for name in ("bin", "sbin", "etc", "lib", "include", "cuda")),
    *(f"{folder}/share/jupyter" for folder in ("/usr", "/usr/local")),
    *(
        f"/usr/share/{name}"
        for name in ("zoneinfo", "locale", "locale-langpack", "i18n", "terminfo")
    ),
)
"""The programs, libraries and settings of a bare system, without its data."""
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
import outside  # noqa: E402 - it lies beside the sitecustomize that other Pythons load


def roots(*own: Path) -> list[str]:
    """The folders that tests may access: their own, the environment, this Python, the system."""
    base = Path(sys.base_prefix)
    python = [
        *sysconfig.get_paths().values(),
        *(str(base / n) for n in ("bin", "lib", "include", "share/locale")),
    ]
    paths = filter(os.path.isabs, [*sys.path, *os.get_exec_path()])
    return [*map(str, own), sys.prefix, *python, *paths, *SYSTEM]


class _Notes:
    """The file of noted accesses; returns each note once."""

    path: Path | None = None
    offset = 0

    def begin(self, path: Path) -> None:
        path.touch()
        self.path, self.offset = path, 0

    def new(self) -> str:
        if self.path is None or self.path.lstat().st_size == self.offset:
            return ""
        with self.path.open() as notes:
            notes.seek(self.offset)
            new = notes.read()
            self.offset = notes.tell()
        return "access to a file that not every machine has:\n" + new


_notes = _Notes()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Give the tests and the processes they start another home, and watch their accesses."""
    own = session.config._tmp_path_factory.getbasetemp()
    for name, folder in CACHES.items():
        os.environ[name] = str(own / "home" / folder)
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
def _fail_for_accesses(item: pytest.Item) -> Iterator[None]:
    """Fail a test for its accesses; the first test also for those of the collection."""
    yield
    if accesses := _notes.new():
        pytest.fail(accesses, pytrace=False)


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _fail_for_accesses
