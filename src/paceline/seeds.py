"""Seeds: one number of the user's becomes a named stream for every rank and purpose.

Streams are independent of each other, so that drawing more from one (an added fault, another
strategy) shifts nothing in the rest.
"""

from __future__ import annotations

import random
import zlib

import numpy as np

MAX_SEED = 2**63 - 1


def stream(seed: int, purpose: str, *path: int) -> np.random.Generator:
    """The random stream of ``purpose``, with ``path`` (a rank, an epoch) below it."""
    return np.random.default_rng(_sequence(seed, purpose, *path))


def user_seed(seed: int, rank: int) -> int:
    """The seed of the generators that the user's code on ``rank`` draws from."""
    return int(_sequence(seed, "user", rank).generate_state(1)[0])


def seed_user_generators(seed: int, rank: int) -> None:
    """Seed torch's, numpy's and Python's global generators for the user's code on ``rank``."""
    import torch

    value = user_seed(seed, rank)
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def _sequence(seed: int, purpose: str, *path: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *path])
