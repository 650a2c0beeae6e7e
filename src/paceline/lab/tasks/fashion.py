"""The built-in task: Fashion-MNIST with a small convolutional network or an MLP.

A subset of 4,000 train and 1,000 test images comes with the package (Fashion-MNIST is by Zalando
SE, MIT license); the whole data set is read from a folder of IDX files.
:mod:`paceline.lab.tasks.recipe` has the hyperparameters.
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import UsageError
from paceline.lab.tasks.recipe import (
    EPOCHS,
    IDX_FILES,
    MOMENTUM,
    batch_of,
    check_model,
    idx_file,
    learning_rate,
)
from paceline.training.worker import Worker

BUNDLED = Path(__file__).with_name("fashion_mnist.npz")
_MEAN, _STD = 0.2860, 0.3530

Raw = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]


class Images(NamedTuple):
    """Samples, as normalized images, and their labels."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


def as_images(
    x_train: NDArray[Any], y_train: NDArray[Any], x_test: NDArray[Any], y_test: NDArray[Any]
) -> Images:
    """Samples and labels as tensors."""
    labels = [torch.from_numpy(y.astype(np.int64)) for y in (y_train, y_test)]
    return Images(torch.from_numpy(x_train), labels[0], torch.from_numpy(x_test), labels[1])


def train(
    worker: Worker,
    model: str = "cnn",
    epochs: int = EPOCHS,
    steps: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    data: str | None = None,
) -> None:
    """Train on Fashion-MNIST and log the answer's loss and accuracy after each epoch.

    At the end it also logs the accuracy of one worker's own replica (``replica_accuracy``): if
    replicas differ, as under gossip, it is lower than that of the answer.

    Args:
        worker: this worker.
        model: ``cnn`` or ``mlp``.
        epochs: passes over the data.
        steps: end after this many steps of this worker, if that comes first.
        lr: the learning rate; by default the method's, from the recorded sweep.
        batch_size: samples in a worker's batch; by default 128 / workers, at least 4.
        data: the folder of the whole data set; by default the bundled subset.
    """
    images = load_images(data)
    torch.manual_seed(worker.seed)
    net: nn.Module = make_model(model)
    rate = learning_rate(worker.strategy, model, worker.size) if lr is None else lr
    sgd: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=MOMENTUM)
    net, sgd = worker.setup(net, sgd)
    loader = make_loader(images, batch_size or batch_of(worker.size))
    batches = worker.setup_dataloaders(loader, epochs=epochs)
    for epoch in range(epochs):
        for x, y in batches:
            sgd.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
            sgd.step()
            if worker.steps == steps:
                break
        if worker.steps == steps or epoch == epochs - 1:
            break
        log_test(worker, net, images, epoch)
    _, own = evaluate(net, images, worker.device) if worker.leads else (0.0, 0.0)
    worker.finish()
    log_test(worker, net, images, epoch, replica_accuracy=own)


def log_test(worker: Worker, net: nn.Module, images: Images, epoch: int, **more: float) -> None:
    """Log loss and accuracy of the method's answer on the test set, on one worker."""
    if worker.leads:
        with worker.answer():
            loss, accuracy = evaluate(net, images, worker.device)
        worker.log(epoch=epoch + 1, loss=loss, accuracy=accuracy, **more)


def evaluate(net: nn.Module, images: Images, device: torch.device) -> tuple[float, float]:
    """Loss and accuracy on the test images."""
    net.eval()
    with torch.no_grad():
        outputs = torch.cat([net(x.to(device)).cpu() for x in images.x_test.split(500)])
    net.train()
    accuracy = (outputs.argmax(-1) == images.y_test).double().mean()
    loss = cross_entropy(outputs.flatten(0, -2), images.y_test.flatten())
    return float(loss), float(accuracy)


def make_model(name: str) -> nn.Module:
    """The network ``cnn`` (21 thousand parameters) or ``mlp`` (102 thousand)."""
    check_model(name)
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 10),
        )
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def make_loader(images: Images, batch_size: int) -> DataLoader[Any]:
    """A shuffling loader of the training images."""
    pairs = TensorDataset(images.x_train, images.y_train)
    return DataLoader(pairs, batch_size=batch_size, shuffle=True)


@cache
def load_images(folder: str | None = None) -> Images:
    """The images in a folder of IDX files, or the bundled ones; each process reads them once."""
    if folder is None:
        with np.load(BUNDLED) as bundle:
            raw: Raw = tuple(bundle[name] for name in Images._fields)
    else:
        raw = read_folder(Path(folder).expanduser())
    x_train, y_train, x_test, y_test = raw
    return Images(_pixels(x_train), _labels(y_train), _pixels(x_test), _labels(y_test))


def read_folder(folder: Path) -> Raw:
    """The four IDX files of Fashion-MNIST, plain or gzipped."""
    x_train, y_train, x_test, y_test = (_read(idx_file(folder, name)) for name in IDX_FILES)
    return x_train, y_train, x_test, y_test


def _read(path: Path) -> NDArray[np.uint8]:
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    dimensions = content[3] if content[:3] == b"\0\0\x08" else 0
    shape = np.frombuffer(content, ">u4", dimensions, 4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if not dimensions or values.size != shape.prod():
        raise UsageError(f"{path} is not an IDX file of bytes")
    return values.reshape(shape)


def _pixels(images: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy((images[:, None].astype(np.float32) / 255 - _MEAN) / _STD)


def _labels(labels: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))
