"""Windows in shared memory: what a rank publishes, whole at every moment, also after its death.

A window has three buffers. Its owner copies into the one that was written longest ago, then names
it as the present version. A reader that was overtaken twice while it copied starts again.
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm.dtypes import DTYPES, dtype_of
from paceline.comm.ports import Published, check_fit
from paceline.comm.shared.layout import BUFFERS
from paceline.comm.shared.memory import lies_with
from paceline.comm.shared.rank import SharedRank
from paceline.errors import MessageMismatch

MAX_HEADER_BYTES = 1 << 24
"""The largest header that a rank reads, whatever a peer claims."""


class Windows:
    """The windows of all ranks; each rank writes its own."""

    def __init__(self, shared: SharedRank) -> None:
        self._words, self._layout, self._arena = shared.words, shared.layout, shared.arena
        self._rank = shared.rank
        self._own: dict[int, tuple[Tensor, list[int]]] = {}

    def write(self, x: Tensor, header: bytes, window: int) -> int:
        """Copy a message into the buffer that was written longest ago, and show that one."""
        words, start = self._words, self._layout.window(self._rank, window)
        if window not in self._own:
            self._own[window] = self._open(x, header, start, window)
        first, offsets = self._own[window]
        check_fit(first, x.numel(), x.dtype, self._rank, 0)
        if len(header) != words[start + 3]:
            raise MessageMismatch(
                f"a header of {len(header)} bytes: the window has one of {words[start + 3]}"
            )
        version = words[start] + 1
        buffer = version % BUFFERS
        words.announce(start + 4 + 2 * buffer + 1, 0)
        self._arena.write(offsets[buffer], x, header)
        words.announce(start + 4 + 2 * buffer + 1, version)
        words.announce(start, version)
        return version

    def _open(self, x: Tensor, header: bytes, start: int, window: int) -> tuple[Tensor, list[int]]:
        self._words.write(start + 1, (x.numel(), DTYPES.index(x.dtype), len(header)))
        nbytes = x.nbytes + len(header)
        offsets = [self._arena.window(buffer, nbytes, window) for buffer in range(BUFFERS)]
        for buffer, offset in enumerate(offsets):
            self._words[start + 4 + 2 * buffer] = offset
        return self._arena.tensor(offsets[0], x.numel(), x.dtype), offsets

    def read(self, src: int, like: Tensor | None, window: int) -> Published | None:
        """A copy of what is in a window of ``src``; None before the first version."""
        words, start = self._words, self._layout.window(src, window)
        if words[start] == 0:
            return None
        words.fence()
        numel, code, header_bytes = words.read(start + 1, 3)
        dtype = dtype_of(code)
        if like is not None:
            check_fit(like, numel, dtype, src, 0)
        while True:
            version = words[start]
            buffer = start + 4 + 2 * (version % BUFFERS)
            offset = words[buffer]
            check_range(src, offset, numel * dtype.itemsize, header_bytes)
            x, header = self._arena.read(offset, numel, dtype, header_bytes)
            words.fence()
            if words[buffer + 1] == version:
                return Published(version, x if like is None else x.to(like.device), header)
            if words[start] == version:  # else its owner has come round to this buffer again
                raise MessageMismatch(f"the window of rank {src} holds no version {version}")


def check_range(src: int, offset: int, nbytes: int, header_bytes: int) -> None:
    """Refuse what does not lie where ``src`` may write, before it is looked at."""
    sane = nbytes >= 0 and 0 <= header_bytes <= MAX_HEADER_BYTES
    if not sane or not lies_with(src + 1, offset, nbytes + header_bytes):
        raise MessageMismatch(
            f"{nbytes} bytes and a header of {header_bytes} of rank {src} at {offset}: not its own"
            " memory"
        )
