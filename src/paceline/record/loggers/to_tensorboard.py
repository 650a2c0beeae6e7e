"""TensorBoard: the run's folder ``tensorboard``, with one TensorBoard run for each worker.

The files are written through the package ``tensorboard`` alone, without torch or TensorFlow.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from paceline.common.date import date_s
from paceline.common.files import make_folder, opener
from paceline.record.folder import TENSORBOARD, TENSORBOARD_SUFFIX
from paceline.record.loggers.base import About, Logger, sentence_of, values_of


def open_logger(about: About) -> Logger:
    """Write the settings."""
    assert about.folder is not None
    return TensorBoardLogger(about.folder / TENSORBOARD, about)


class TensorBoardLogger(Logger):
    """Scalars and texts by worker; events of all ranks as texts."""

    def __init__(self, folder: Path, about: About) -> None:
        self._folder, self._began_s = folder, about.began_s
        self._files: dict[str, EventsFile] = {}
        self._events = 0
        self._write("", 0, 0.0, hparams_pb(about.settings, about.name))

    def metric(self, record: Mapping[str, Any]) -> None:
        name = f"worker-{record['rank']}"
        for tag, value in values_of(record).items():
            summary = text_pb(tag, value) if isinstance(value, str) else scalar_pb(tag, value)
            self._write(name, record["step"], record["t"], summary)

    def event(self, record: Mapping[str, Any]) -> None:
        self._events += 1
        self._write("", self._events, record["t"], text_pb("events", sentence_of(record)))

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _write(self, name: str, step: int, t: float, summary: Summary) -> None:
        """Write a summary into the file of one TensorBoard run; a removed file is made again."""
        file = self._files.get(name)
        if file is not None and not file.exists():
            file.close()
            file = None
        if file is None:
            file = self._files[name] = EventsFile(self._folder / name)
        file.write(Event(wall_time=self._began_s + t, step=step, summary=summary))


class EventsFile:
    """A file of TensorBoard events."""

    _numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        number = f"{date_s():.0f}.{os.getpid()}.{next(self._numbers)}"
        self._path = folder / f"events.out.tfevents.{number}{TENSORBOARD_SUFFIX}"
        self._records = RecordWriter(open(self._path, "wb", opener=opener))  # noqa: SIM115
        self.write(Event(wall_time=date_s(), file_version="brain.Event:2"))

    def exists(self) -> bool:
        """Whether nobody has removed the file."""
        return self._path.exists()

    def write(self, event: Event) -> None:
        """Append an event."""
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        """Close the file."""
        self._records.close()
