"""The device that benchmarks run on."""

from __future__ import annotations

import torch


def shared(device: str) -> str | None:
    """The device whose memory the ranks share, if it is not that of the host."""
    return None if device == "cpu" else device


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
