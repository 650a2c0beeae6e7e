"""The device that benchmarks run on."""

from __future__ import annotations

import torch


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
