"""Words that a rank sets when its device has read what they acknowledge.

A rank only asks its device to read a message, and goes on. Its receipt is due once the device has
done so: whoever wrote the message may then use its memory again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.comm.shared.memory import SharedWords

if TYPE_CHECKING:
    from paceline.comm.shared.drivers import Milestone


class Due(NamedTuple):
    """A word that is to be set once a device has come to a milestone."""

    milestone: Milestone
    word: int
    value: int


class DeferredWords:
    """The words that one rank still has to set."""

    def __init__(self, words: SharedWords) -> None:
        self._words = words
        self._due: list[Due] = []
        self._values: dict[int, int] = {}

    def __getitem__(self, index: int) -> int:
        """The word as it is, or will be."""
        return self._values.get(index, self._words[index])

    def announce(self, index: int, value: int, milestone: Milestone | None) -> None:
        """Set a word: at once, or when the device has come to ``milestone``."""
        if milestone is None:
            self._words.announce(index, value)
        else:
            self._due.append(Due(milestone, index, value))
            self._values[index] = value

    def settle(self, wait: bool = False) -> None:
        """Set the words whose milestones the device has come to; with ``wait``, all of them."""
        while self._due and (wait or self._due[0].milestone.query()):
            milestone, word, value = self._due.pop(0)
            milestone.synchronize()
            self._words.announce(word, value)
            if self._values.get(word) == value:
                del self._values[word]
