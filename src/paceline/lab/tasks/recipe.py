"""The hyperparameters of the built-in task, for any number of workers; does not load torch.

A global batch of 128, but at least 4 per worker; 12 epochs; SGD with momentum; one learning rate
per method, from the recorded sweep in ``learning_rates.json``. It falls with the number of workers
if the method asks for that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError, unknown
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
DEFAULT_RATE = 0.05


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
        raise unknown("model", name, MODELS)
