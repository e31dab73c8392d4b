"""Writes files so that a reader finds the old one or the new one, also if the disk is full."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all; any threads may. Raises OSError, and the old file stays.

    Pipes and devices are written in place, and so is a file in a folder in which none can be made.
    """
    target = path.resolve()
    if _is_stream(path) or not os.access(target.parent, os.W_OK):
        path.write_bytes(data)
        return
    opening = _beside(target)
    try:
        opening.write_bytes(data)
        if target.exists():
            shutil.copymode(target, opening)
        opening.replace(target)
    except BaseException:
        with suppress(OSError):  # no such folder, or one that is now a file
            opening.unlink()
        raise


def check_folder(path: Path) -> None:
    """Raise OSError if `write_whole` could not make this file. Nobody sees the file itself meanwhile."""
    opening = _beside(path.resolve())  # a link may lead to a file that does not exist yet
    opening.touch()
    opening.unlink()


def _beside(target: Path) -> Path:
    """The file that takes the name of the target once it is whole."""
    return target.with_name(f".bml-{os.getpid()}-{threading.get_ident()}")


def _is_stream(path: Path) -> bool:
    """Whether it is no plain file, or one that is open under a name of /dev or /proc, such as /dev/stdout."""
    folder = str(path.parent.resolve())
    return (path.exists() and not path.is_file()) or folder == "/dev" or folder.startswith("/proc/")
