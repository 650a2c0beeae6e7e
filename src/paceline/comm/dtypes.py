"""The dtypes that messages may have; a message names its dtype by its index in ``DTYPES``."""

from __future__ import annotations

import torch

from paceline.errors import MessageMismatch

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
)


def dtype_of(code: int) -> torch.dtype:
    """The dtype with this number in a message.

    >>> dtype_of(1)
    torch.float64
    """
    if not 0 <= code < len(DTYPES):
        raise MessageMismatch(f"dtype ({code}) must be a number from 0 to {len(DTYPES) - 1}")
    return DTYPES[code]
