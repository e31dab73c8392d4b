"""Checkpoints in object stores, and all other file systems that the library fsspec knows, by their URL.

An object has its name when it was written whole, and not before: no rename is needed, and there is none that
is not a copy. That it stays is the store's promise; nothing is synced. Other stores, and file systems, may
show a torn object, which its hash gives away.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from bml.topology.errors import UsageError
from bml.train.keeping.files import PIECE_NBYTES, Files, Folder

_LOCAL = ("file://", "local://")
_WAS_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/")
_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})
"""Protocols of stores that show an object when it was written whole, and not before."""
_INSTALL = "pip install 'bml[store]'"


def is_url(path: str) -> bool:
    """Whether it is a URL, such as s3://bucket/kept, and no path of this machine."""
    return "://" in path


def place_of(path: str | os.PathLike[str]) -> str:
    """Return a URL as it is, without slashes at its end, and the folder at a path in full, also of file://.

    Raises UsageError for what was a URL before it was a path: pathlib.Path("s3://bucket") is s3:/bucket.
    """
    text = os.fspath(path)
    for prefix in _LOCAL:
        text = text.removeprefix(prefix)
    if is_url(text):
        bare = text.rstrip("/")
        return bare if is_url(bare) else text
    if _WAS_URL.match(text):
        raise UsageError(
            f"{text} is neither a URL nor a folder: give the URL as a text, such as s3://bucket/kept, "
            f"or the folder as {os.path.join('.', text)}"
        )
    return os.path.abspath(text)


def folder_of(path: str | os.PathLike[str]) -> str:
    """Return the folder at a path in full. Raises UsageError for URLs."""
    place = place_of(path)
    if is_url(place):
        raise UsageError(f"{place} is a URL: give a folder of this machine")
    return place


def files_of(directory: str | os.PathLike[str] | Files) -> Files:
    """Return the folder at a path, as all servers of the machine find it, that at a URL, or what is neither.

    Raises UsageError for a URL that fsspec cannot open, and as `place_of`.
    """
    if not isinstance(directory, str | os.PathLike):
        return directory
    place = place_of(directory)
    return Store.at(place) if is_url(place) else Folder(place)


class Store:
    """A folder `path` of a file system of fsspec. `url` is what the user calls it."""

    def __init__(self, system: Any, path: str, url: str):
        self._system, self._path, self._url = system, path.rstrip("/"), url
        protocol = system.protocol
        self.names_are_whole = not _WHOLE.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

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
        """See Files; no object is ever called `unfinished`.

        Files that cannot be committed, as those of hdfs, have their name from the first byte on.
        """
        with _refusals():
            if not getattr(self._system, "async_impl", False):  # the others have no folders, only buckets
                self._system.makedirs(self._path, exist_ok=True)
            with self._system.transaction, self._system.open(self._at(name), "wb") as file:
                if not hasattr(file, "commit"):
                    self._system.transaction.files.clear()
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
