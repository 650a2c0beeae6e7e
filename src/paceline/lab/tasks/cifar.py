"""CIFAR-10, from a folder: its binary version, or a subset whose images are one mosaic."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.errors import UsageError
from paceline.lab.tasks.fashion import Images, as_images
from paceline.lab.tasks.files import cifar_file, existing_file

_BATCHES = [f"data_batch_{number}.bin" for number in range(1, 6)]
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_BORDER = 4


@cache
def load_cifar(folder: str) -> Images:
    """The images in a folder, normalized; each process reads them once."""
    path = cifar_file(Path(folder).expanduser())
    if path.suffix == ".npz":
        with np.load(path) as bundle:
            parts = [
                (_mosaic(bundle[f"x_{part}"], int(bundle[f"cols_{part}"])), bundle[f"y_{part}"])
                for part in ("train", "test")
            ]
    else:
        parts = [_records(path, names) for names in (_BATCHES, ["test_batch.bin"])]
    (x_train, y_train), (x_test, y_test) = parts
    return as_images(_scaled(x_train), y_train, _scaled(x_test), y_test)


def _records(folder: Path, names: list[str]) -> tuple[Any, Any]:
    """Images (n, 3, 32, 32) and labels of CIFAR-10's binary files: a label byte, then 3,072."""
    raw = np.concatenate([np.fromfile(existing_file(folder / name), np.uint8) for name in names])
    if raw.size % 3073:
        raise UsageError(f"data ({folder}) must hold records of 3,073 bytes")
    records = raw.reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _mosaic(encoded: Any, columns: int) -> Any:
    """The images (n, 3, 32, 32) in a mosaic."""
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(
            "cifar10_20k4k.npz needs pillow (pip install 'paceline[papers]'); or use"
            " cifar-10-batches-bin"
        ) from None
    Image.MAX_IMAGE_PIXELS = None
    picture = np.asarray(Image.open(io.BytesIO(encoded.tobytes())).convert("RGB"))
    tiles = picture.reshape(picture.shape[0] // 32, 32, columns, 32, 3)
    return tiles.transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


def _scaled(pixels: Any) -> Any:
    mean, std = (np.array(value, np.float32)[:, None, None] for value in (_MEAN, _STD))
    return (pixels.astype(np.float32) / 255 - mean) / std


def augment(images: Tensor) -> Tensor:
    """Each image shifted by up to four pixels, and every other one mirrored, at random."""
    count, _, height, width = images.shape
    device = images.device
    shifts = torch.randint(0, 2 * _BORDER + 1, (2, count, 1, 1), device=device)
    rows = shifts[0] + torch.arange(height, device=device)[:, None]
    columns = torch.arange(width, device=device).expand(count, 1, width)
    mirrored = torch.rand(count, 1, 1, device=device) < 0.5
    columns = shifts[1] + torch.where(mirrored, width - 1 - columns, columns)
    padded = pad(images, [_BORDER] * 4)
    number = torch.arange(count, device=device)[:, None, None]
    return padded.movedim(1, -1)[number, rows, columns].movedim(-1, 1)
