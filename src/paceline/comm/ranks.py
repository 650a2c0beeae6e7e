"""Tuples of ranks that stay cheap when they hold thousands: shared, hashed once, with an index."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, cast, overload


class Ranks(tuple[int, ...]):
    """Some ranks, in order. Make them with :func:`ranks`, which shares equal ones."""

    @cached_property
    def index_of(self) -> dict[int, int]:
        """The index of each rank in this tuple."""
        return {rank: index for index, rank in enumerate(self)}

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash

    def __contains__(self, rank: object) -> bool:
        return rank in self.index_of


@lru_cache(maxsize=256)
def ranks(members: tuple[int, ...]) -> Ranks:
    """These ranks as :class:`Ranks`; equal tuples give the same object."""
    return Ranks(members)


@lru_cache(maxsize=16)
def everyone(size: int) -> Ranks:
    """All ranks of a world."""
    return ranks(tuple(range(size)))


class Gone(Collection[int]):
    """Ranks whose current incarnation has ended. A rank that rejoins is no longer one of them.

    Args:
        incarnation: gives the current incarnation of a rank.
    """

    def __init__(self, incarnation: Callable[[int], int]) -> None:
        self._incarnation, self._ended = incarnation, dict[int, int]()

    def add(self, rank: int, incarnation: int) -> None:
        """Record that this incarnation of ``rank`` has ended."""
        self._ended[rank] = incarnation

    def last(self, rank: int) -> int:
        """The last incarnation of ``rank`` that was recorded; 0 when there is none."""
        return self._ended.get(rank, 0)

    def __contains__(self, rank: object) -> bool:
        ended = self._ended.get(cast(int, rank))
        return ended is not None and self._incarnation(cast(int, rank)) == ended

    def __iter__(self) -> Iterator[int]:
        return (rank for rank in self._ended if rank in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Others(Sequence[int]):
    """A view of a group without its ``own`` rank and without those that are ``gone``."""

    def __init__(self, members: Ranks, own: int, gone: Collection[int] = ()) -> None:
        self._members, self._own, self._gone = members, own, gone

    def __len__(self) -> int:
        return len(self._members) - 1 - len(self._gone)

    def __contains__(self, rank: object) -> bool:
        return rank in self._members and rank != self._own and rank not in self._gone

    def __iter__(self) -> Iterator[int]:
        return (rank for rank in self._members if rank != self._own and rank not in self._gone)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: Any) -> Any:
        return [*self][index]
