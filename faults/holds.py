"""Keeps parts broken while several faults of the same part come and go."""

from collections import Counter
from collections.abc import Hashable


class Holds:
    """Counts the faults that hold a part down: it is free again when the last of them has let go."""

    def __init__(self) -> None:
        self._held: Counter[Hashable] = Counter()

    def take(self, part: Hashable) -> bool:
        """One more fault holds the part; returns True if it was free, so that it is to be broken now."""
        self._held[part] += 1
        return self._held[part] == 1

    def let_go(self, part: Hashable) -> bool:
        """One of these faults ends; returns True if it was the last, so that the part is to be healed now."""
        self._held[part] -= 1
        return self._held[part] == 0
