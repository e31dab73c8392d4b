"""Checkpoints in object stores, and all other file systems that the library fsspec knows, by their URL.

An object has its name when it was written whole, and not before: no rename is needed, and there is none that
is not a copy. That it stays is the store's promise; nothing is synced. Stores that write otherwise may show a
torn object, which its hash gives away.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from bml.topology.errors import UsageError
from bml.train.keeping.files import PIECE_NBYTES, Files, Folder

_LOCAL = ("file://", "local://")
_INSTALL = "pip install 'bml[store]'"


def is_url(path: str) -> bool:
    """Whether it is a URL, such as s3://bucket/kept, and no path of this machine."""
    return "://" in path


def files_of(directory: str | os.PathLike[str] | Files) -> Files:
    """Return the folder at a path, as all servers of the machine find it, that at a URL, or what is neither.

    Raises UsageError for a URL that fsspec cannot open.
    """
    if not isinstance(directory, str | os.PathLike):
        return directory
    path = os.fspath(directory)
    for prefix in _LOCAL:
        path = path.removeprefix(prefix)
    return Store.at(path) if is_url(path) else Folder(os.path.abspath(path))


class Store:
    """A folder `path` of a file system of fsspec. `url` is what the user calls it."""

    def __init__(self, system: Any, path: str, url: str):
        self._system, self._path, self._url = system, path.rstrip("/"), url

    @classmethod
    def at(cls, url: str) -> Store:
        """Open a URL; access keys and the like come from the environment, or fsspec's configuration.

        Raises UsageError if fsspec or the package of the store is not installed, and for other URLs.
        """
        try:
            import fsspec
        except ImportError:
            raise UsageError(f"{url} is a URL, which takes the library fsspec: {_INSTALL}") from None
        try:
            # A listing that is kept would show neither what others have written nor what they removed.
            opened = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
        except ImportError as error:
            raise UsageError(f"{url} cannot be opened: {error}") from None
        except Exception as error:  # of the store's package
            raise UsageError(
                f"{url} cannot be opened: {error}; give a folder, or a URL such as s3://bucket/kept"
            ) from None
        system, path = opened
        return cls(system, path, url)

    def __str__(self) -> str:
        return self._url

    def names(self) -> list[str]:
        """See Files."""
        with _refusals():
            self._system.invalidate_cache()
            try:
                found = self._system.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
            return sorted(filter(None, (each.rsplit("/", 1)[-1] for each in found)))

    def write(self, name: str, pieces: Iterable[bytes | memoryview], unfinished: str = "") -> None:
        """See Files; no object is ever called `unfinished`."""
        with _refusals():
            if not getattr(self._system, "async_impl", False):  # the others have no folders, only buckets
                self._system.makedirs(self._path, exist_ok=True)
            with self._system.transaction, self._system.open(self._at(name), "wb") as file:
                for piece in pieces:
                    for at in range(0, len(piece), PIECE_NBYTES):
                        file.write(piece[at : at + PIECE_NBYTES])

    def remove(self, name: str) -> None:
        """See Files."""
        with _refusals(), suppress(FileNotFoundError):
            self._system.rm_file(self._at(name))

    def read(self, name: str) -> Iterator[bytes]:
        """See Files."""
        with _refusals():
            n = self._system.info(self._at(name))["size"]
        for start in range(0, n, PIECE_NBYTES):
            with _refusals():
                piece = self._system.cat_file(self._at(name), start=start, end=min(start + PIECE_NBYTES, n))
            yield piece

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"


@contextmanager
def _refusals() -> Iterator[None]:
    """Make an OSError of whatever the package of a store raises."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
