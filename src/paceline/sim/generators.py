"""The global random generators of every rank, in one process.

User code draws from the global generators of torch, numpy and Python. Each rank has its own state
of each, which the simulator installs before it runs that rank. That happens once a step, so it has
to be fast: copying the memory of Python's generator takes a microsecond, ``getstate`` and
``setstate`` take twenty.
"""

from __future__ import annotations

import _random
import ctypes
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

CPU = torch.device("cpu")
_numpy: Any = np.random  # its stubs lack the two functions that swap bit generators
_python: Any = random._inst
_HEADER = object.__basicsize__
_STATE_BYTES = _random.Random.__basicsize__ - _HEADER


class _Place(NamedTuple):
    """All that a GPU's generator has: its seed, and how far it has come."""

    seed: int
    offset: int


class _Set(NamedTuple):
    """The state of one rank's generators."""

    torch: Tensor
    device: _Place | None
    numpy: Any
    python: Any
    gauss_next: float | None


class Generators:
    """The generators of all ranks, of which one rank's are active at a time.

    As a context manager it saves those of the calling program, and restores them at the end.

    Args:
        seeds: of each rank.
        device: where the ranks compute; a GPU has a generator of its own.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device = CPU) -> None:
        self._seeds, self._device = seeds, _generator_of(device)
        self._saved: dict[int, _Set] = {}
        self._active = -1

    def __enter__(self) -> Generators:
        return self

    def __exit__(self, *exc: object) -> None:
        self.switch_to(-1)

    def switch_to(self, rank: int) -> None:
        """Activate the generators of ``rank``; -1 is the calling program."""
        if rank == self._active:
            return
        self._saved[self._active] = _Set(
            torch.default_generator.get_state(),
            None if self._device is None else _place_of(self._device),
            _numpy.get_bit_generator(),
            save_python(),
            _python.gauss_next,
        )
        own = self._saved.pop(rank) if rank in self._saved else self._new(rank)
        torch.default_generator.set_state(own.torch)
        if self._device is not None and own.device is not None:
            self._device.manual_seed(own.device.seed)
            self._device.set_offset(own.device.offset)
        _numpy.set_bit_generator(own.numpy)
        load_python(own.python)
        _python.gauss_next = own.gauss_next
        self._active = rank

    def _new(self, rank: int) -> _Set:
        seed = self._seeds[rank]
        bits = np.random.MT19937()
        np.random.RandomState(bits).seed(seed)
        before = save_python()
        _python.seed(seed)
        python = save_python()
        load_python(before)
        fresh = torch.Generator().manual_seed(seed).get_state()
        return _Set(fresh, _Place(seed, 0), bits, python, None)


def _generator_of(device: torch.device) -> torch.Generator | None:
    """The default generator of a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _place_of(generator: torch.Generator) -> _Place:
    return _Place(generator.initial_seed(), generator.get_offset())


def _copy_out() -> Any:
    state = ctypes.create_string_buffer(_STATE_BYTES)
    ctypes.memmove(state, id(_python) + _HEADER, _STATE_BYTES)
    return state


def _copy_in(state: Any) -> None:
    ctypes.memmove(id(_python) + _HEADER, state, _STATE_BYTES)


def _can_copy() -> bool:
    """Whether copying the memory of a generator copies its state, on this interpreter."""
    if not 2500 <= _STATE_BYTES <= 2512:
        return False
    before = _python.getstate()
    copied = _copy_out()
    drawn = [_python.random() for _ in range(700)]
    _copy_in(copied)
    same = _python.getstate() == before and [_python.random() for _ in range(700)] == drawn
    _python.setstate(before)
    return same


if _can_copy():
    save_python, load_python = _copy_out, _copy_in
else:
    save_python, load_python = _python.getstate, _python.setstate
