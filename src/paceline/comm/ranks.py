"""Ranks in order, of which a thousand cost as little as two: shared, hashed once, found at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, cast, overload


class Ranks(tuple[int, ...]):
    """Some ranks, in order; made with :func:`ranks` they are the same object for all who ask."""

    @cached_property
    def places(self) -> dict[int, int]:
        """The place of each rank."""
        return {rank: place for place, rank in enumerate(self)}

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash

    def __contains__(self, rank: object) -> bool:
        return rank in self.places


@lru_cache(maxsize=256)
def ranks(members: tuple[int, ...]) -> Ranks:
    """These ranks, of which equal ones are shared."""
    return Ranks(members)


@lru_cache(maxsize=16)
def everyone(size: int) -> Ranks:
    """All ranks of a world."""
    return ranks(tuple(range(size)))


class Gone(Collection[int]):
    """Ranks that were lost; one that comes again, in another ``life``, is no more among them."""

    def __init__(self, life: Callable[[int], int]) -> None:
        self._life, self._lives = life, dict[int, int]()

    def add(self, rank: int, life: int) -> None:
        """Hear that this life of a rank is over."""
        self._lives[rank] = life

    def last(self, rank: int) -> int:
        """The last life of a rank that is known to be over; 0 when none is."""
        return self._lives.get(rank, 0)

    def __contains__(self, rank: object) -> bool:
        known = self._lives.get(cast(int, rank))
        return known is not None and self._life(cast(int, rank)) == known

    def __iter__(self) -> Iterator[int]:
        return (rank for rank in self._lives if rank in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Others(Sequence[int]):
    """The members of a group but one, and but those that are ``gone``; never copied."""

    def __init__(self, members: Ranks, own: int, gone: Collection[int] = ()) -> None:
        self._members, self._own, self._gone = members, own, gone

    def __len__(self) -> int:
        return len(self._members) - 1 - len(self._gone)

    def __contains__(self, rank: object) -> bool:
        return rank in self._members and rank != self._own and rank not in self._gone

    def __iter__(self) -> Iterator[int]:
        return (rank for rank in self._members if rank != self._own and rank not in self._gone)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: Any) -> Any:
        return [*self][place]
