"""The hyperparameters of the built-in task, for any number of workers; does not load torch.

A global batch of 128, but at least 4 per worker; 12 epochs; SGD with momentum; one learning rate
per method, from the recorded sweep in ``learning_rates.json``. It falls with the number of workers
if the method asks for that.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError, unknown
from paceline.lab.tasks.files import cifar_file, text_file
from paceline.strategies import STRATEGIES, make_strategy, strategy_name

if TYPE_CHECKING:
    from paceline.strategies.base import Strategy

RATES = Path(__file__).with_name("learning_rates.json")
FOLDERS = (
    "/usr/share/datasets/fashion-mnist",
    "data/FashionMNIST/raw",
    "~/.cache/torchvision/FashionMNIST/raw",
)
GLOBAL_BATCH, LEAST_BATCH, EPOCHS, MOMENTUM = 128, 4, 12, 0.9
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
BUILT_IN = {"module": "paceline.lab.tasks.fashion", "name": "train"}
"""The reference to the training function of the task."""
MODELS = ("cnn", "mlp")
DEEP_TASK = {"module": "paceline.lab.tasks.deep", "name": "train"}
"""The reference to the training function of the models in :data:`DEEP`."""
DEFAULT_RATE = 0.05


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a larger network is trained.

    Attributes:
        data: ``cifar10``, or ``text``.
        optimizer: ``sgd`` with momentum 0.9, or ``adamw``.
        lr: the highest rate, of a worker in lockstep; a method's ``lr_factor`` changes it.
        warm_up: the share of the run in which the rate rises to that.
        drops: the shares of the run after which it falls to a tenth; without any, it falls along a
            cosine to a tenth at the end.
        batch_size: of one worker.
    """

    data: str
    epochs: int
    lr: float
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    warm_up: float = 0.0
    drops: tuple[float, ...] = ()
    batch_size: int = 32

    @property
    def augments(self) -> bool:
        """Whether images are shifted and mirrored."""
        return self.data == "cifar10"

    def share_of_rate(self, progress: float) -> float:
        """The share of the highest rate at this point of the run, from 0 to 1.

        >>> resnet = DEEP["resnet20"]
        >>> [round(resnet.share_of_rate(at), 3) for at in (0.01, 0.3, 0.6, 0.9)]
        [0.28, 1.0, 0.1, 0.01]
        """
        if progress < self.warm_up:
            return 0.1 + 0.9 * progress / self.warm_up
        if self.drops:
            return 0.1 ** sum(progress >= drop for drop in self.drops)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    def check_data(self, folder: Path | None) -> None:
        """Refuse a folder without the data set."""
        if folder is None:
            what = "CIFAR-10" if self.data == "cifar10" else "a text"
            raise UsageError(f"--data is missing: a folder with {what}")
        (cifar_file if self.data == "cifar10" else text_file)(folder.expanduser())


_RESNET = Recipe(
    data="cifar10", epochs=164, lr=0.1, weight_decay=1e-4, warm_up=0.05, drops=(0.5, 0.75)
)
DEEP = {
    "resnet20": _RESNET,
    "resnet18": replace(_RESNET, epochs=90, weight_decay=5e-4),
    "gpt": Recipe(
        data="text",
        epochs=20,
        lr=1e-3,
        optimizer="adamw",
        weight_decay=0.1,
        warm_up=0.05,
        batch_size=16,
    ),
}
"""The recipes of the networks that need a folder of data."""


def batch_of(workers: int) -> int:
    """The batch size of one worker.

    >>> batch_of(2), batch_of(8), batch_of(64)
    (64, 16, 4)
    """
    return max(LEAST_BATCH, GLOBAL_BATCH // workers)


def learning_rate(strategy: Strategy, model: str, workers: int) -> float:
    """The method's rate from the recorded sweep; a moderate one if the method is not in it.

    The sweep covers the method with default options at one number of workers; the rate is scaled
    from there by the method's ``lr_factor``.
    """
    record: dict[str, Any] = json.loads(RATES.read_text())
    name = strategy_name(strategy)
    rate = float(record["rates"].get(model, {}).get(name, DEFAULT_RATE))
    swept = make_strategy(name) if name in STRATEGIES else strategy
    return rate * strategy.lr_factor(workers) / swept.lr_factor(record["sweep"]["workers"])


def find_folder() -> str:
    """The folder of the whole data set on this machine."""
    for folder in FOLDERS:
        if Path(folder).expanduser().is_dir():
            return folder
    raise UsageError(
        f"the whole Fashion-MNIST was not found in {', '.join(FOLDERS)}: install Debian's"
        " dataset-fashion-mnist, or name its folder with --data"
    )


def check_folder(folder: Path) -> None:
    """Raise :class:`UsageError` if the folder does not hold the whole data set."""
    for name in IDX_FILES:
        idx_file(folder, name)


def idx_file(folder: Path, name: str) -> Path:
    """One of the data set's files, plain or gzipped."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise UsageError(f"data ({folder}) must hold the IDX files of Fashion-MNIST: no {name}[.gz]")


def check_model(name: str) -> None:
    """Raise an error if there is no network of this name."""
    if name not in MODELS:
        raise unknown("model", name, [*MODELS, *DEEP])
