"""The tasks of the claims: the bundled images, and whole data sets from a folder.

=================  ============================  ===============================================
name               where, in the data folder     network
=================  ============================  ===============================================
``bundled``        comes with the package        the built-in MLP, 102 thousand parameters
``fashion-mnist``  ``fashion-mnist/*.gz`` (IDX)  the built-in convolutional network, 21 thousand
``cifar10``        ``cifar-10-batches-bin/``     a convolutional network, 39 thousand
``banking77``      ``banking77/*.csv``           a bag of hashed words, 134 thousand
=================  ============================  ===============================================

Fashion-MNIST is also found where Debian's package puts it; CIFAR-10 also as ``cifar10_20k4k.npz``,
a subset whose images are one mosaic (reading it needs pillow).
"""

from __future__ import annotations

import csv
import io
import re
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.lab.tasks.recipe import IDX_FILES, find_folder

if TYPE_CHECKING:
    from torch import nn

    from paceline.lab.tasks.fashion import Images

QUICK, FULL = ("bundled",), ("fashion-mnist", "cifar10", "banking77")
WORDS, VOCABULARY = 32, 4096
_CIFAR_BATCHES = [f"data_batch_{number}.bin" for number in range(1, 6)]
_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True, kw_only=True)
class TaskSetting:
    """The epochs and the batch size per worker of a task."""

    epochs: int
    batch_size: int = 16


SETTINGS = {
    "bundled": TaskSetting(epochs=4),
    "fashion-mnist": TaskSetting(epochs=2),
    "cifar10": TaskSetting(epochs=8),
    "banking77": TaskSetting(epochs=12),
}


def check_data(folder: Path | None) -> None:
    """Raise :class:`UsageError` if the folder lacks one of the whole data sets."""
    if folder is None:
        raise UsageError("--full needs --data, the folder of CIFAR-10, Fashion-MNIST and BANKING77")
    _fashion_folder(folder)
    _cifar_file(folder)
    for part in ("train", "test"):
        _existing_file(folder / "banking77" / f"{part}.csv")


@cache
def load(task: str, folder: str | None) -> Images:
    """The samples of a task; each process reads them once."""
    from paceline.lab.tasks.fashion import load_images

    if task == "bundled":
        return load_images()
    assert folder is not None, "check_data refuses a missing folder"
    if task == "fashion-mnist":
        return load_images(str(_fashion_folder(Path(folder))))
    return _cifar(Path(folder)) if task == "cifar10" else _banking(Path(folder) / "banking77")


def make_network(task: str) -> nn.Module:
    """The network of a task."""
    from torch import nn

    from paceline.lab.tasks.fashion import make_model

    if task == "bundled":
        return make_model("mlp")
    if task == "fashion-mnist":
        return make_model("cnn")
    if task == "cifar10":
        return nn.Sequential(
            nn.Conv2d(3, 24, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(48, 48, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(48 * 4 * 4, 10),
        )
    bag = nn.EmbeddingBag(VOCABULARY, 32, mode="mean", padding_idx=0)
    return nn.Sequential(bag, nn.Linear(32, 77))


# Fashion-MNIST -----------------------------------------------------------------------------------


def _fashion_folder(folder: Path) -> Path:
    for candidate in (folder / "fashion-mnist", folder / "FashionMNIST" / "raw", folder):
        if any((candidate / f"{IDX_FILES[0]}{suffix}").is_file() for suffix in ("", ".gz")):
            return candidate
    return Path(find_folder()).expanduser()


# CIFAR-10 ----------------------------------------------------------------------------------------


def _cifar_file(folder: Path) -> Path:
    for path in (folder / "cifar-10-batches-bin", folder / "cifar10_20k4k.npz"):
        if path.exists():
            return path
    raise UsageError(
        f"data ({folder}) must hold CIFAR-10: cifar-10-batches-bin (its binary version)"
        " or cifar10_20k4k.npz"
    )


def _cifar(folder: Path) -> Images:
    import numpy as np

    path = _cifar_file(folder)
    if path.suffix == ".npz":
        with np.load(path) as bundle:
            parts = [
                (_mosaic(bundle[f"x_{part}"], int(bundle[f"cols_{part}"])), bundle[f"y_{part}"])
                for part in ("train", "test")
            ]
    else:
        parts = [_records(path, names) for names in (_CIFAR_BATCHES, ["test_batch.bin"])]
    (x_train, y_train), (x_test, y_test) = parts
    return _images(_scaled(x_train), y_train, _scaled(x_test), y_test)


def _records(folder: Path, names: list[str]) -> tuple[Any, Any]:
    """Images (n, 3, 32, 32) and labels of CIFAR-10's binary files: a label byte, then 3,072."""
    import numpy as np

    raw = np.concatenate([np.fromfile(_existing_file(folder / name), np.uint8) for name in names])
    if raw.size % 3073:
        raise UsageError(f"data ({folder}) must hold records of 3,073 bytes")
    records = raw.reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _mosaic(encoded: Any, columns: int) -> Any:
    """The images (n, 3, 32, 32) in a mosaic."""
    import numpy as np

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
    import numpy as np

    mean, std = (np.array(value, np.float32)[:, None, None] for value in (_CIFAR_MEAN, _CIFAR_STD))
    return (pixels.astype(np.float32) / 255 - mean) / std


# BANKING77 ---------------------------------------------------------------------------------------


def _banking(folder: Path) -> Images:
    import numpy as np

    train, test = (
        _read_questions(_existing_file(folder / f"{part}.csv")) for part in ("train", "test")
    )
    number = {label: index for index, label in enumerate(sorted({label for _, label in train}))}
    x_train, x_test = (np.array([words_of(text) for text, _ in part]) for part in (train, test))
    y_train, y_test = (np.array([number[label] for _, label in part]) for part in (train, test))
    return _images(x_train, y_train, x_test, y_test)


def _read_questions(path: Path) -> list[tuple[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return [(row["text"], row["category"]) for row in csv.DictReader(lines)]


def words_of(text: str) -> list[int]:
    """The first words of a text as numbers from 1, padded with 0."""
    words = re.findall(r"[a-z0-9']+", text.lower())[:WORDS]
    numbers = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
    return numbers + [0] * (WORDS - len(numbers))


# Shared helpers ----------------------------------------------------------------------------------


def _images(x_train: Any, y_train: Any, x_test: Any, y_test: Any) -> Images:
    import numpy as np
    import torch

    from paceline.lab.tasks.fashion import Images

    labels = [torch.from_numpy(y.astype(np.int64)) for y in (y_train, y_test)]
    return Images(torch.from_numpy(x_train), labels[0], torch.from_numpy(x_test), labels[1])


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        raise UsageError(f"data ({path.parent}) must hold {path.name}")
    return path
