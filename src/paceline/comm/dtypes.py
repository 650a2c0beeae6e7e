"""The dtypes that messages may have, by the number that stands for them."""

from __future__ import annotations

import torch

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
)
