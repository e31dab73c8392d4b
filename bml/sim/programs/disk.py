"""The folder of checkpoints of a modelled job: it may die at any operation, and loses what was not synced.

Or it is an object store: an object is there when it was written whole, stays, and may be listed late.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator


class Gone(OSError):
    """The machines of the folder have died."""


class Disk:
    """Files in memory. At operation `dies_at` it calls `on_death`, and refuses all that comes later.

    A file that was not synced then has any prefix of its bytes, or none, or is damaged. A name that was
    changed and not synced may be the old one or the new one. `files`: what a later job finds. With `late` it
    is an object store: a new object is missing in up to so many listings, also in those of later jobs.
    """

    names_are_whole = True

    def __init__(
        self,
        chance: random.Random,
        files: dict[str, bytes],
        dies_at: int | None = None,
        late: int | None = None,
    ):
        self.files = dict(files)
        self.unlisted: dict[str, int] = {}
        """In how many listings an object will be missing."""
        self.n_operations = 0
        self.on_death: Callable[[], None] = lambda: None
        self.on_write: Callable[[], None] = lambda: None
        """May wait: the disk is slow then."""
        self._chance, self._dies_at, self._late = chance, dies_at, late
        self._lock = threading.Lock()
        self._is_dead = False
        self._unsynced: set[str] = set()
        self._renamed: dict[str, tuple[str, bytes | None]] = {}

    def __str__(self) -> str:
        return "the folder"

    def names(self) -> list[str]:
        """See Files."""
        with self._lock:
            found = sorted(name for name in self.files if not self.unlisted.get(name))
            self.unlisted = {name: left - 1 for name, left in self.unlisted.items() if left > 1}
            return found

    def write(self, name: str, pieces: Iterable[bytes | memoryview], unfinished: str = "") -> None:
        """See Files."""
        if self._late is not None:
            self._put(name, pieces, self._late)
            return
        with self._lock:
            self._operate()
            self.files[unfinished or name] = b""
            self._unsynced.add(unfinished or name)
        self.on_write()
        for piece in pieces:
            with self._lock:
                self._operate()
                self.files[unfinished or name] += bytes(piece)
        with self._lock:
            self._operate()
            self._unsynced.discard(unfinished or name)
        if unfinished:
            self._rename(unfinished, name)

    def _put(self, name: str, pieces: Iterable[bytes | memoryview], late: int) -> None:
        """Write an object; if all die before it is whole, it is not there, or torn, as in some stores."""
        with self._lock:
            self._operate()
        self.on_write()
        found = b"".join(map(bytes, pieces))
        with self._lock:
            try:
                self._operate()
            except Gone:
                if name not in self.files and self._chance.random() < 0.2:
                    self.files[name] = found[: self._chance.randint(0, len(found))]
                raise
            if name not in self.files:
                self.unlisted[name] = self._chance.randint(0, late)
            self.files[name] = found

    def _rename(self, name: str, new: str) -> None:
        with self._lock:
            self._operate()
            self._renamed[new] = name, self.files.get(new)
            self.files[new] = self.files.pop(name)
        with self._lock:
            self._operate()
            self._renamed.pop(new, None)

    def remove(self, name: str) -> None:
        """See Files."""
        with self._lock:
            self._operate()
            self.files.pop(name, None)

    def read(self, name: str) -> Iterator[bytes]:
        """See Files; in small pieces, of which the first has the header."""
        if name not in self.files:
            raise FileNotFoundError(name)
        found = self.files[name]
        yield found[:400]
        for at in range(400, len(found), 100):
            yield found[at : at + 100]

    def die(self) -> None:
        """All machines die now."""
        with self._lock:
            self._die()

    def _operate(self) -> None:
        if self._is_dead:
            raise Gone("the machine has died")
        self.n_operations += 1
        if self.n_operations == self._dies_at:
            self._die()
            self.on_death()
            raise Gone("the machine has died")

    def _die(self) -> None:
        if self._is_dead:
            return
        self._is_dead = True
        for new, (name, before) in self._renamed.items():
            if new in self.files and self._chance.random() < 0.5:
                self.files[name] = self.files.pop(new)
                if before is not None:
                    self.files[new] = before
        for name in self._unsynced & set(self.files):
            found = bytearray(self.files[name])
            del found[self._chance.randint(0, len(found)) :]
            if found and self._chance.random() < 0.3:
                found[self._chance.randrange(len(found))] ^= 1 << self._chance.randrange(8)
            self.files[name] = bytes(found)
