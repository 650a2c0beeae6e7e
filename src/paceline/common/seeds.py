"""Seeds: the user's one number becomes a named random stream for every rank and purpose.

Streams are independent: drawing more numbers from one (for an added fault, another strategy) does
not change the others.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

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


def _sequence(seed: int, purpose: str, *path: int) -> np.random.SeedSequence:
    import numpy as np

    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *path])
