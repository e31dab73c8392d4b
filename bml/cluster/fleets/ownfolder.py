"""Temporary folders. If a process is killed, the next process with such a folder removes its folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_LOCK = "in-use"
_OPENING = "in-use.new"


class OwnFolder:
    """A private folder, `path`, in `place`. Folders of the same prefix without a process are removed."""

    def __init__(self, prefix: str, place: str):
        for stale in Path(place).glob(f"{prefix}*"):
            _remove_if_stale(stale)
        self.path = tempfile.mkdtemp(prefix=prefix, dir=place)
        lock = Path(self.path) / _OPENING
        self._lock = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        lock.rename(lock.with_name(_LOCK))  # no other process sees it without its lock

    def remove(self) -> None:
        """Remove it with its content. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_if_stale(folder: Path) -> None:
    """Remove a folder of this user that no process holds; the kernel frees the lock of one that is killed."""
    with suppress(OSError):  # it is being removed, or belongs to another user
        if folder.lstat().st_uid != os.geteuid():
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
