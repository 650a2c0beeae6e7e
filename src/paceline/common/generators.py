"""The global random generators of torch, numpy and Python: seed, save and restore them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paceline.common.seeds import user_seed


def seed_user_generators(seed: int, rank: int) -> None:
    """Seed the global generators for the user's code on ``rank``."""
    _seed(user_seed(seed, rank))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def all_seeded(seed: int, parts: Iterable[object], device: torch.device) -> Iterator[None]:
    """Seed the global generators, and the torch generators of ``parts``, with ``seed``.

    Afterwards each generator has its former state.
    """
    found = [getattr(part, "generator", None) for part in parts]
    generators = [generator for generator in found if isinstance(generator, torch.Generator)]
    states, former = [generator.get_state() for generator in generators], read_generators(device)
    _seed(seed)
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        write_generators(former, device)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def read_generators(device: torch.device) -> dict[str, Any]:
    """The states of the global random generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "python": (version, torch.tensor(words), gauss),
    }


def write_generators(state: dict[str, Any], device: torch.device) -> None:
    """Put the global random generators into the states that :func:`read_generators` gave."""
    kind, keys, *rest = state["numpy"]
    version, words, gauss = state["python"]
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate((version, tuple(words.tolist()), gauss))
