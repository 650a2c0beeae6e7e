"""CSV files in the run's folder: ``metrics.csv``, ``events.csv`` and ``settings.csv``."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.common.files import open_private
from paceline.record.folder import TABLES
from paceline.record.loggers.base import About, Logger

METRICS, EVENTS, SETTINGS = TABLES


def open_logger(about: About) -> Logger:
    """Write the settings, and begin the other files."""
    assert about.folder is not None
    settings = Table(about.folder / SETTINGS, ["name", "value"])
    for name, value in about.settings.items():
        settings.add({"name": name, "value": value})
    settings.close()
    return CsvLogger(about.folder)


class CsvLogger(Logger):
    """A row for each record and for each event."""

    def __init__(self, folder: Path) -> None:
        self._metrics = Table(folder / METRICS, ["t", "rank", "step", "samples"])
        self._events = Table(folder / EVENTS, ["t", "rank", "event"])

    def metric(self, record: Mapping[str, Any]) -> None:
        self._metrics.add(record)

    def event(self, record: Mapping[str, Any]) -> None:
        self._events.add(record)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


class Table:
    """A CSV file that gets more columns as names appear; then it is written anew."""

    def __init__(self, path: Path, columns: Iterable[str]) -> None:
        self._path, self._columns = path, [*columns]
        self._file = open_private(path)
        self._write_header()

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        if new := [name for name in row if name not in self._columns]:
            self._widen(new)
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_header(self) -> None:
        self._writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")
        self._writer.writeheader()
        self._file.flush()

    def _widen(self, new: list[str]) -> None:
        part = self._path.with_name(f".{self._path.name}.part")
        self._columns += new
        with self._path.open(newline="", encoding="utf-8") as before:
            self._file.close()
            self._file = open_private(part)
            self._write_header()
            self._writer.writerows(csv.DictReader(before))
        part.replace(self._path)
