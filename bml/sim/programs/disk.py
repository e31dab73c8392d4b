"""The folder of checkpoints of a modelled job: it may die at any operation, and loses what was not synced."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator


class Gone(OSError):
    """The machines of the folder have died."""


class Disk:
    """Files in memory. At operation `dies_at` it calls `on_death`, and refuses all that comes later.

    A file that was not synced then has any prefix of its bytes, or none, or is damaged. A name that was
    changed and not synced may be the old one or the new one. `files`: what a later job finds.
    """

    def __init__(self, chance: random.Random, files: dict[str, bytes], dies_at: int | None = None):
        self.files = dict(files)
        self.n_operations = 0
        self.on_death: Callable[[], None] = lambda: None
        self.on_write: Callable[[], None] = lambda: None
        """May wait: the disk is slow then."""
        self._chance, self._dies_at = chance, dies_at
        self._lock = threading.Lock()
        self._is_dead = False
        self._unsynced: set[str] = set()
        self._renamed: dict[str, tuple[str, bytes | None]] = {}

    def __str__(self) -> str:
        return "the folder"

    def names(self) -> list[str]:
        """See Files."""
        with self._lock:
            return sorted(self.files)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        with self._lock:
            self._operate()
            self.files[name] = b""
            self._unsynced.add(name)
        self.on_write()
        for piece in pieces:
            with self._lock:
                self._operate()
                self.files[name] += bytes(piece)
        with self._lock:
            self._operate()
            self._unsynced.discard(name)

    def rename(self, name: str, new: str) -> None:
        """See Files."""
        with self._lock:
            self._operate()
            self._renamed[new] = name, self.files.get(new)
            self.files[new] = self.files.pop(name)
            if name in self._unsynced:
                self._unsynced.discard(name)
                self._unsynced.add(new)
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
