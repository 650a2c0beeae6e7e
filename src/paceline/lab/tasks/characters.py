"""The characters of a text: the next one is to be told from those before it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

from paceline.errors import UsageError
from paceline.lab.tasks.fashion import Images
from paceline.lab.tasks.files import text_file

CONTEXT, CHARACTERS = 128, 256
_TEST_SHARE = 0.1


@cache
def load_text(folder: str) -> Images:
    """Windows of the text in a folder, each with the same one character later; bytes as numbers.

    The last tenth of the text is the test set.
    """
    path = text_file(Path(folder).expanduser())
    text = torch.from_numpy(np.fromfile(path, np.uint8).astype(np.int64))
    windows = (len(text) - 1) // CONTEXT
    tests = int(windows * _TEST_SHARE)
    if not tests:
        raise UsageError(f"{path} must have at least {round(CONTEXT / _TEST_SHARE) + 1} characters")
    inputs, targets = (text[at : at + windows * CONTEXT].view(windows, CONTEXT) for at in (0, 1))
    return Images(inputs[:-tests], targets[:-tests], inputs[-tests:], targets[-tests:])
