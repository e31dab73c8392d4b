"""Segments: memory that one process writes and other processes of its host read.

A segment is a sealed memfd, without a name in any file system. Its owner maps it, and then seals it, so that
the kernel refuses every other writer. Other processes open it through /proc, which the kernel allows to the
same user only, and can map it only to read.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import platform
import sys
from typing import NamedTuple

from bml.io import mapping
from bml.io.limits import NoRoom, with_room
from bml.topology.errors import FabricError

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4 | 0x10  # no more seals, no shrinking, no growing, no writing but through our map
_serials = itertools.count(1)


class SegmentAddress(NamedTuple):
    """The address of a segment; no two segments of a process have the same."""

    process: int
    fd: int
    serial: int
    nbytes: int

    @property
    def path(self) -> str:
        """The path to open."""
        return f"/proc/{self.process}/fd/{self.fd}"


class Segment(mapping.SharedMemory):
    """Zeroed memory of this process that others can read. `nbytes` is a multiple of the page size.

    Raises NoRoom when there is not enough.
    """

    def __init__(self, nbytes: int):
        with with_room(nbytes):
            super().__init__(nbytes)
        try:
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)
        except OSError:
            self.close()
            raise
        self.address = SegmentAddress(os.getpid(), self._fd, next(_serials), nbytes)

    def has(self, address: int, nbytes: int) -> bool:
        """Whether all these bytes lie in the segment."""
        return self.start <= address and address + nbytes <= self.start + self.address.nbytes


def open_to_read(address: SegmentAddress) -> int:
    """Open a segment of any process of this user; returns a file descriptor.

    Raises OSError if the segment is gone, belongs to another user, or if the number is now another file's;
    NoRoom if this process may open no more.
    """
    with with_room(address.nbytes):
        if not os.readlink(address.path).startswith(mapping.MEMFD_LINK):
            raise OSError(f"{address.path} is no memory of ours")
        fd = os.open(address.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError(f"{address.path} is not sealed: it may change while it is read")
    except OSError:
        os.close(fd)
        raise
    return fd


def map_to_read(address: SegmentAddress) -> memoryview:
    """Map a segment to read; raises OSError and NoRoom as `open_to_read`, ValueError if it is too short."""
    fd = open_to_read(address)
    try:
        with with_room(address.nbytes):
            return mapping.read_only(fd, address.nbytes)
    finally:
        os.close(fd)


def why_not() -> str:
    """The reason why this machine cannot share memory in this way; empty if it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        # Words are published without memory fences, which needs a processor that keeps stores in order.
        return f"shared memory needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    try:
        segment = Segment(mmap.PAGESIZE)
        try:
            map_to_read(segment.address)
        finally:
            segment.close()
    except (OSError, NoRoom) as error:
        return f"this kernel does not let processes share anonymous files: {error}"
    return ""


def check() -> None:
    """Raise FabricError where memory cannot be shared."""
    reason = why_not()
    if reason:
        raise FabricError(f"{reason}; ask for the transport tcp")
