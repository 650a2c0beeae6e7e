"""The tasks of the claims: the bundled images, and CIFAR-10 from a folder for the full form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from paceline.lab.tasks.fashion import Images

QUICK = ("bundled",)


@dataclass(frozen=True, kw_only=True)
class TaskSetting:
    """How long a task of the quick form is trained."""

    epochs: int
    batch_size: int = 16


SETTINGS = {"bundled": TaskSetting(epochs=4)}


@cache
def load(task: str, folder: str | None = None) -> Images:
    """The samples of a task; each process reads them once."""
    from paceline.lab.tasks.cifar import load_cifar
    from paceline.lab.tasks.fashion import load_images

    if task == "bundled":
        return load_images()
    assert folder is not None, "the command checks it"
    return load_cifar(folder)


def make_network(name: str) -> nn.Module:
    """The network ``mlp``, ``cnn`` or ``resnet20``."""
    from paceline.lab.tasks import networks
    from paceline.lab.tasks.fashion import make_model
    from paceline.lab.tasks.recipe import MODELS

    return make_model(name) if name in MODELS else networks.make_network(name)
