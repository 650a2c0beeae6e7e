"""Seeds: the user's one number becomes a named random stream for every rank and purpose.

Streams are independent: drawing more numbers from one (for an added fault, another strategy) does
not change the others.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.common.options import MOST, shown
from paceline.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

MAX_SEED = MOST


def check_seed(seed: int) -> None:
    """Refuse a seed that random generators do not accept."""
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"seed ({shown(seed)}) must be from 0 to {MAX_SEED}")


def stream(seed: int, purpose: str, *path: int) -> np.random.Generator:
    """The random stream of ``purpose``, with ``path`` (a rank, an epoch) below it."""
    import numpy as np

    return np.random.default_rng(_sequence(seed, purpose, *path))


def user_seed(seed: int, rank: int) -> int:
    """The seed of the generators that the user's code on ``rank`` draws from."""
    return int(_sequence(seed, "user", rank).generate_state(1)[0])


def seed_user_generators(seed: int, rank: int) -> None:
    """Seed torch's, numpy's and Python's global generators for the user's code on ``rank``."""
    import numpy as np
    import torch

    value = user_seed(seed, rank)
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


@contextmanager
def all_seeded(seed: int, others: Iterable[Any]) -> Iterator[None]:
    """Seed the global generators, and the torch generators in ``others``, with ``seed``.

    Afterwards each generator has its former state.
    """
    import numpy as np
    import torch

    generators = [other for other in others if isinstance(other, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    former = random.getstate(), np.random.get_state(legacy=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        for generator in generators:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(former[0])
            np.random.set_state(former[1])
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _sequence(seed: int, purpose: str, *path: int) -> np.random.SeedSequence:
    import numpy as np

    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *path])
