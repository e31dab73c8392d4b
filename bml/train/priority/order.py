"""The order in which begun steps are sent, piece by piece: pure, and the same on every server.

Entries are numbered as they are begun, which is in the same order everywhere. But one server begins an entry
sooner than another, so what is begun here may not decide. `agreed` is what all know: the entries with lower
numbers have been begun by all contributors. Of those the most urgent one is next, and if all of them are
done, the next in order of begin. An entry without priority is a fence: it comes after all entries before it
and before all entries behind it.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

SLOTS = 32
"""Of how many entries beyond the agreed ones a step tells whether all have begun them."""


class Entry(Protocol):
    """A step that was begun. A lower `priority` is needed sooner; None: it keeps its place."""

    @property
    def priority(self) -> int | None:  # noqa: D102
        ...


AnyEntry = TypeVar("AnyEntry", bound=Entry)


class Order(Generic[AnyEntry]):
    """The entries of one server that are not done yet."""

    def __init__(self) -> None:
        self._left: dict[int, AnyEntry] = {}
        self._n_begun = 0
        self._agreed = 0

    def begin(self, entry: AnyEntry) -> None:
        """This server has begun another entry."""
        self._left[self._n_begun] = entry
        self._n_begun += 1

    def next(self) -> tuple[int, AnyEntry] | None:
        """The number and the entry of which a piece is the next step; None: it is not begun here yet."""
        if self._n_begun < self._agreed:
            return None  # this server follows: the others may have chosen what it has yet to begin
        best: tuple[int, AnyEntry] | None = None
        urgency = 0
        for number, entry in self._left.items():
            if number >= self._agreed or entry.priority is None:
                return best or (number, entry)
            if best is None or entry.priority < urgency:
                best, urgency = (number, entry), entry.priority
        return best

    def missing(self) -> list[bool]:
        """For each of the `SLOTS` entries beyond the agreed ones, whether it is not begun here."""
        return [self._agreed + slot >= self._n_begun for slot in range(SLOTS)]

    def committed(self, number: int, missing: list[bool] | None = None) -> None:
        """A step of this entry is committed, in which any contributor said that those are `missing`."""
        if missing is not None:
            self._agreed += missing.index(True) if True in missing else SLOTS
        self._agreed = max(self._agreed, number + 1)

    def end(self, number: int) -> None:
        """All steps of an entry are done, or it has failed."""
        del self._left[number]
