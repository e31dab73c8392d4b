"""What the streams of a page are given: the newest value of each part, never a queue of old ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping

PARTS = ("fabric", "history", "page")
"""The parts, in the order in which a stream sends them. Each is whole: a reader needs only the newest."""


class Board:
    """The newest bytes of each part, and a number that grows with each change."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[int, bytes]] = {}
        self._number = 0
        self.is_last = False
        """Whether nothing will change any more."""

    def put(self, parts: Mapping[str, bytes], is_last: bool = False) -> None:
        """Take new values; those that are as before change nothing."""
        changed = {name: data for name, data in parts.items() if self.get(name) != data}
        self.is_last = self.is_last or is_last
        if changed:
            self._number += 1
            self._parts.update({name: (self._number, data) for name, data in changed.items()})

    def get(self, name: str) -> bytes:
        """The newest value of a part; empty if there is none."""
        return self._parts.get(name, (0, b""))[1]

    def since(self, number: int) -> tuple[int, bytes]:
        """Return what a stream that has seen `number` is to be sent, and what it has seen then.

        These are server-sent events, named as the parts; empty if it has seen all.
        """
        events = [
            b"event: %s\ndata: %s\n\n" % (name.encode(), self._parts[name][1])
            for name in PARTS
            if name in self._parts and self._parts[name][0] > number
        ]
        return self._number, b"".join(events)
