"""The devices that benchmarks run on."""

from __future__ import annotations

import torch

from paceline.errors import UsageError


def shared_device(device: str) -> str:
    """The device by its whole name: ``cpu``, or one GPU, which all ranks share."""
    if device == "cpu":
        return device
    if not torch.cuda.is_available():
        raise UsageError(f"device ({device}) needs a GPU that torch can see")
    return "cuda:0" if device == "cuda" else device


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
