"""A folder of checkpoints without a disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Memory:
    """A folder in a dict, and an error with which the next writes end."""

    names_are_whole = True

    def __init__(self, files: dict[str, bytes], error: OSError | None = None):
        self.files, self.error = files, error

    def names(self) -> list[str]:
        return sorted(self.files)

    def write(self, name: str, pieces: Iterable[bytes | memoryview], unfinished: str = "") -> None:
        self.files[unfinished or name] = b"".join(map(bytes, pieces))
        if self.error is not None:
            raise self.error
        self.files[name] = self.files.pop(unfinished or name)

    def remove(self, name: str) -> None:
        self.files.pop(name, None)

    def read(self, name: str) -> Any:
        if name not in self.files:
            raise FileNotFoundError(name)
        return iter([self.files[name]])
