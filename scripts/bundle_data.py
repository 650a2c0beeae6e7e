"""Write the bundled subset of Fashion-MNIST: the first 400 train and 100 test images of a class.

Reads the four IDX files of Debian's package ``dataset-fashion-mnist`` (or of any other copy):

    python scripts/bundle_data.py /usr/share/datasets/fashion-mnist
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from paceline.lab.tasks.fashion import BUNDLED, read_folder

TRAIN, TEST = 400, 100


def first_of_each(labels: np.ndarray, count: int) -> np.ndarray:
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c in range(10)]))


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/usr/share/datasets/fashion-mnist")
    x_train, y_train, x_test, y_test = read_folder(folder)
    train, test = first_of_each(y_train, TRAIN), first_of_each(y_test, TEST)
    np.savez_compressed(
        BUNDLED,
        x_train=x_train[train],
        y_train=y_train[train],
        x_test=x_test[test],
        y_test=y_test[test],
    )
    print(f"{BUNDLED}: {BUNDLED.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
