"""The tasks of the claims: the bundled images, and whole data sets from a folder.

=================  ============================  ===============================================
name               where, in the data folder     network
=================  ============================  ===============================================
``bundled``        comes with the package        the built-in MLP, 102 thousand parameters
``fashion-mnist``  ``fashion-mnist/*.gz`` (IDX)  the built-in convolutional network, 21 thousand
``cifar10``        ``cifar-10-batches-bin/``     a convolutional network, 39 thousand
``banking77``      ``banking77/*.csv``           a bag of hashed words, 134 thousand
=================  ============================  ===============================================

Fashion-MNIST is also found where Debian's package puts it;
:mod:`paceline.lab.tasks.cifar` says how CIFAR-10 is found.
"""

from __future__ import annotations

import csv
import re
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.lab.tasks.files import cifar_file, existing_file
from paceline.lab.tasks.recipe import IDX_FILES, find_folder

if TYPE_CHECKING:
    from torch import nn

    from paceline.lab.tasks.fashion import Images

QUICK, FULL = ("bundled",), ("fashion-mnist", "cifar10", "banking77")
WORDS, VOCABULARY = 32, 4096


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
    cifar_file(folder)
    for part in ("train", "test"):
        existing_file(folder / "banking77" / f"{part}.csv")


@cache
def load(task: str, folder: str | None) -> Images:
    """The samples of a task; each process reads them once."""
    from paceline.lab.tasks.cifar import load_cifar
    from paceline.lab.tasks.fashion import load_images

    if task == "bundled":
        return load_images()
    assert folder is not None, "check_data refuses a missing folder"
    if task == "fashion-mnist":
        return load_images(str(_fashion_folder(Path(folder))))
    return load_cifar(folder) if task == "cifar10" else _banking(Path(folder) / "banking77")


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


# BANKING77 ---------------------------------------------------------------------------------------


def _banking(folder: Path) -> Images:
    import numpy as np

    from paceline.lab.tasks.fashion import as_images

    train, test = (
        _read_questions(existing_file(folder / f"{part}.csv")) for part in ("train", "test")
    )
    number = {label: index for index, label in enumerate(sorted({label for _, label in train}))}
    x_train, x_test = (np.array([words_of(text) for text, _ in part]) for part in (train, test))
    y_train, y_test = (np.array([number[label] for _, label in part]) for part in (train, test))
    return as_images(x_train, y_train, x_test, y_test)


def _read_questions(path: Path) -> list[tuple[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return [(row["text"], row["category"]) for row in csv.DictReader(lines)]


def words_of(text: str) -> list[int]:
    """The first words of a text as numbers from 1, padded with 0."""
    words = re.findall(r"[a-z0-9']+", text.lower())[:WORDS]
    numbers = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
    return numbers + [0] * (WORDS - len(numbers))
