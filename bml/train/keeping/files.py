"""The folder of checkpoints: the few operations on files that writing and reading them takes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Protocol

_PIECE_NBYTES = 8 << 20


class Files(Protocol):
    """A folder of checkpoints, such as one of an object store. Methods raise OSError for what is refused."""

    def names(self) -> list[str]:
        """The names of the files; none if there is no folder."""
        ...

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a file, and return when its bytes are on the disk; the folder is made if it is missing."""
        ...

    def rename(self, name: str, new: str) -> None:
        """Give a file another name, in one step, and return when that is on the disk."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file in large pieces."""
        ...


def files_of(directory: str | os.PathLike[str] | Files) -> Files:
    """Return the folder at a path, as all servers of the machine find it, or what is no path."""
    return Folder(os.path.abspath(directory)) if isinstance(directory, str | os.PathLike) else directory


class Folder:
    """A folder of the file system."""

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

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        os.makedirs(self._path, exist_ok=True)
        with open(self._at(name), "wb", buffering=0) as file:
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    left = left[file.write(left[:_PIECE_NBYTES]) :]
            os.fsync(file.fileno())

    def rename(self, name: str, new: str) -> None:
        """See Files."""
        os.replace(self._at(name), self._at(new))
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
            while piece := file.read(_PIECE_NBYTES):
                yield piece

    def _at(self, name: str) -> str:
        return os.path.join(self._path, name)
