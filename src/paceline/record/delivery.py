"""What the ranks of a run deliver beside numbers: its final model, and what ``train`` returned.

Both travel in the format of checkpoints, in which everything is a tensor or JSON: nothing that a
rank sends is unpickled.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError, name_ranks

if TYPE_CHECKING:
    from torch import Tensor

PART_BYTES = 1 << 19
"""The most bytes in one message."""
ANSWER, RETURNED, UNFIT = "answer", "returned", "unfit"
Record = dict[str, Any]


def parts_of(what: str, rank: int, content: bytes) -> Iterator[Record]:
    """The messages by which a rank delivers a model, or what it returned."""
    for start in range(0, len(content), PART_BYTES):
        part = content[start : start + PART_BYTES]
        text = base64.b64encode(part).decode()
        yield {"what": what, "rank": rank, "first": start == 0, "part": text}


def packed_model(state: Mapping[str, Tensor]) -> tuple[str, bytes]:
    """The state dict of the final model, to deliver."""
    from paceline.checkpoint.states import pack_state

    return ANSWER, pack_state({"model": dict(state)})


def packed_return(value: Any) -> tuple[str, bytes]:
    """What ``train`` returned, to deliver; if that is ``UNFIT``, what it was."""
    from safetensors import SafetensorError

    from paceline.checkpoint.states import pack_state, unpack_state

    try:
        content = pack_state({"returned": value})
        unpack_state(content)
    except (UsageError, SafetensorError, TypeError, ValueError, RuntimeError) as error:
        return UNFIT, str(error).partition(" in the state")[0].partition("\n")[0].encode()
    return RETURNED, content


class Delivery:
    """What has been delivered, unpacked when somebody asks for it.

    Args:
        workers: how many there are.
        model: the file of the final model, if the run writes one.
    """

    def __init__(self, workers: int, model: Path | None) -> None:
        self._workers, self._file = workers, model
        self._stamp: tuple[int, int] | None = None
        self._parts: dict[tuple[str, int], list[bytes]] = {}

    def take(self, record: Mapping[str, Any]) -> None:
        """Take a message of a rank."""
        key = record["what"], record["rank"]
        if record["first"]:  # what an earlier process of the rank has sent does not count
            self._parts[key] = []
        self._parts[key].append(base64.b64decode(record["part"]))

    def put(self, what: str, rank: int, content: bytes) -> None:
        """Take all that a rank of this process delivers."""
        self._parts[what, rank] = [content]

    def end(self) -> None:
        """Note that the run has ended: a later run may replace its files."""
        self._stamp = _stamp_of(self._file)

    def model(self) -> dict[str, Tensor]:
        """The state dict of the final model, once; refuses one that is not the run's."""
        if self._file is not None:
            return self._read(self._file)
        from paceline.checkpoint.states import unpack_state

        answers = [key for key in self._parts if key[0] == ANSWER]
        if not answers:
            raise UsageError("result.model: no worker that leads has finished with a model")
        model: dict[str, Tensor] = unpack_state(b"".join(self._parts.pop(answers[-1])))["model"]
        return model

    def _read(self, path: Path) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        if self._stamp is None:
            raise UsageError(
                f"result.model: the run has left no {path}; result.model_error says why, if it"
                " could not be written. On many hosts it is on the host of the worker that leads"
            )
        if _stamp_of(path) != self._stamp:
            raise UsageError(f"result.model: something has replaced {path} since the run has ended")
        return load_file(path)

    def returned(self) -> list[Any]:
        """What ``train`` returned on each worker; None where that is not known."""
        from paceline.checkpoint.states import unpack_state

        values: list[Any] = [None] * self._workers
        for (what, rank), parts in self._parts.items():
            if what == RETURNED and rank < self._workers:
                values[rank] = unpack_state(b"".join(parts))["returned"]
        return values

    def unfit(self) -> str | None:
        """Which workers returned something that cannot be delivered, and what it was."""
        reasons = {rank: parts for (what, rank), parts in self._parts.items() if what == UNFIT}
        if not reasons:
            return None
        reason = b"".join(next(iter(reasons.values()))).decode()
        return f"{reason}, on {name_ranks(sorted(reasons))}"


def _stamp_of(path: Path | None) -> tuple[int, int] | None:
    """What tells a file from a later one of the same name; None if there is none."""
    if path is None:
        return None
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns
