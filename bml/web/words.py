"""The states of parts of a fabric in words. The page shows each as a word, a sign and a colour."""

from __future__ import annotations

from typing import Literal, TypeAlias

State: TypeAlias = Literal["working", "slow", "suspected", "silent", "dead", "joining", "absent", "ended"]

WORST_FIRST: tuple[State, ...] = (
    *("dead", "suspected", "silent", "slow"),
    *("joining", "absent", "ended", "working"),
)
TROUBLE: frozenset[State] = frozenset(("dead", "suspected", "silent", "slow", "joining"))
"""States that are listed as what is the matter."""
SAID: dict[State, str] = {
    "working": "works",
    "slow": "is slow",
    "suspected": "is suspected",
    "silent": "does not answer",
    "dead": "is dead",
    "joining": "joins",
    "absent": "is not in the job",
    "ended": "has ended",
}


def plural(number: int, word: str) -> str:
    """`1 server`, `2 servers`."""
    ending = "es" if word.endswith("h") else "s"
    return f"{number} {word}{'' if number == 1 else ending}"


def listed(numbers: list[int], most: int = 6) -> str:
    """`1, 2 and 3`; of more than `most`, the first and how many more."""
    said = [str(each) for each in numbers[:most]]
    if len(numbers) > most:
        said = [*said, f"{len(numbers) - most} more"]
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}" if said else "none"
