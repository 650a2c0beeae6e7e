"""Where data sets lie in a folder; does not load torch."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UsageError

TEXTS = ("tinyshakespeare.txt", "input.txt")


def cifar_file(folder: Path) -> Path:
    """CIFAR-10 in a folder: that of its binary version, or a subset as a mosaic."""
    for path in (folder / "cifar-10-batches-bin", folder / "cifar10_20k4k.npz"):
        if path.exists():
            return path
    raise UsageError(
        f"data ({folder}) must hold CIFAR-10: cifar-10-batches-bin (its binary version)"
        " or cifar10_20k4k.npz"
    )


def text_file(folder: Path) -> Path:
    """The text in a folder."""
    for path in (folder / name for name in TEXTS):
        if path.is_file():
            return path
    raise UsageError(f"data ({folder}) must hold a text: {' or '.join(TEXTS)}")


def existing_file(path: Path) -> Path:
    """The path itself; refuses one that is not a file."""
    if not path.is_file():
        raise UsageError(f"data ({path.parent}) must hold {path.name}")
    return path
