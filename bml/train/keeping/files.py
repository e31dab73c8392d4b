"""The folder of checkpoints: the few operations on files that writing and reading them takes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Protocol

PIECE_NBYTES = 8 << 20
"""The largest piece that is read or written at once."""


class Files(Protocol):
    """A folder of checkpoints, such as one of an object store. Methods raise OSError for what is refused."""

    @property
    def names_are_whole(self) -> bool:
        """Whether a file that has its name is whole, as `write` should see to; else it is read to know it."""
        ...

    def names(self) -> list[str]:
        """The names of the files; none if there is no folder."""
        ...

    def write(self, name: str, pieces: Iterable[bytes | memoryview], unfinished: str = "") -> None:
        """Write a file, and return when its bytes and its name are kept; the folder is made if it is missing.

        Until then it should not have the name: where a file can be renamed it is called `unfinished`, if that
        is given. A file that is not whole costs a checkpoint, but is never taken for one.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file in large pieces."""
        ...


def why(error: OSError) -> str:
    """What an error of files says, without their names."""
    return error.strerror or str(error) or type(error).__name__


class Folder:
    """A folder of the file system."""

    names_are_whole = True

    def __init__(self, path: str):
        self._path = path

    def __str__(self) -> str:
        return self._path

    def names(self) -> list[str]:
        """See Files."""
        try:
            return sorted(os.listdir(self._path))
        except FileNotFoundError:
            return []

    def write(self, name: str, pieces: Iterable[bytes | memoryview], unfinished: str = "") -> None:
        """See Files."""
        os.makedirs(self._path, exist_ok=True)
        with open(self._at(unfinished or name), "wb", buffering=0) as file:
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    left = left[file.write(left[:PIECE_NBYTES]) :]
            os.fsync(file.fileno())
        if unfinished:
            os.replace(self._at(unfinished), self._at(name))
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, name: str) -> None:
        """See Files."""
        with suppress(FileNotFoundError):
            os.remove(self._at(name))

    def read(self, name: str) -> Iterator[bytes]:
        """See Files."""
        with open(self._at(name), "rb", buffering=0) as file:
            while piece := file.read(PIECE_NBYTES):
                yield piece

    def _at(self, name: str) -> str:
        return os.path.join(self._path, name)
