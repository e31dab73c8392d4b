"""What this process has open, by name: what a test leaves is told from what an earlier one left and a late
finalizer closes, such as a file of fonts."""

from __future__ import annotations

import os
from contextlib import suppress


def opened() -> frozenset[tuple[int, str]]:
    """The descriptors of this process with what they are: a path, or a pipe or socket by its inode.

    What has neither, as an epoll, is told by its number alone.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return frozenset(found)
