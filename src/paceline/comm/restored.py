"""The messages of a checkpoint, which a rank takes before all others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.ports import Message, check_fit

SavedMessage = tuple[int, int, Tensor, str]
"""A message in a checkpoint: its sender, its tag, its vector, and its header in hexadecimal."""


def take_restored(
    restored: list[SavedMessage], like: Tensor, sources: Sequence[int], tag: int
) -> Message | None:
    """Take the first message with this tag of one of ``sources`` out of the list."""
    for index, (src, its_tag, x, header) in enumerate(restored):
        if src in sources and its_tag == tag:
            del restored[index]
            check_fit(like, x.numel(), x.dtype, src, tag)
            return Message(src, x.to(like.device).view_as(like), bytes.fromhex(header))
    return None
