"""Memory of this process outside of Python's heap: private, or in an anonymous file that others may map.

A mapping keeps no descriptor, and it exists until its last view is gone. A forked process does not share this
memory with its parent. If Python forks the process, it gets the bytes as private memory
(`SharedMemory.forked`). If C code forks it, nothing is mapped at these addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np

from bml.io import forks
from bml.io.limits import with_room

_NAME = "bml"
MEMFD_LINK = f"/memfd:{_NAME}"
"""The links in /proc to files of `SharedMemory` begin so."""
_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Pages(np.ndarray[Any, Any]):
    """The base of all views of a mapping: numpy skips a plain array as a base, but not a subclass."""


class Mapping:
    """Mapped pages, unmapped when the last view of `view` is gone. Raises OSError."""

    __slots__ = ("__array_interface__", "__weakref__", "_unmap", "nbytes", "start")

    def __init__(self, nbytes: int, protection: int, flags: int, fd: int = -1):
        self.nbytes = nbytes
        self.start = _map(None, nbytes, protection, flags, fd)
        self._unmap = weakref.finalize(self, _libc.munmap, self.start, nbytes)
        self._unmap.atexit = False
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.start, not protection & mmap.PROT_WRITE),
        }

    @property
    def view(self) -> memoryview:
        """All bytes of the mapping; read-only if the pages are."""
        return np.asarray(self).view(_Pages).data

    def cover(self, offset: int, nbytes: int, fd: int) -> None:
        """Map the first `nbytes` of a file, read-only, at `offset` of this mapping. Raises OSError."""
        flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        _map(self.start + offset, nbytes, mmap.PROT_READ, flags, fd)

    def become_private(self, fd: int) -> None:
        """Keep the bytes, which are those of this file, but share no later change of them. Raises OSError."""
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        _map(self.start, self.nbytes, protection, flags, fd)

    def forget(self) -> None:
        """Nothing is mapped here in this process: what is, or will be at these addresses is another's."""
        self._unmap.detach()

    def advise(self, advice: int) -> bool:
        """Advise the kernel (mmap.MADV_*); returns whether it knows this advice."""
        return not _libc.madvise(self.start, self.nbytes, advice)


def reserved(nbytes: int) -> Mapping:
    """Reserve addresses, in which `Mapping.cover` maps files. Raises OSError."""
    return Mapping(nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


def read_only(fd: int, nbytes: int) -> memoryview:
    """Map the first `nbytes` of a file, read-only. Raises OSError, ValueError if the file is shorter."""
    if os.fstat(fd).st_size < nbytes:
        raise ValueError(f"there are only {os.fstat(fd).st_size} bytes, not {nbytes}")
    return Mapping(nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd).view


class PrivateMemory:
    """Zeroed memory of this process alone, in huge pages where the kernel has them. Raises NoRoom."""

    def __init__(self, nbytes: int):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        with with_room(nbytes):
            mapping = Mapping(nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags)
        mapping.advise(mmap.MADV_HUGEPAGE)  # a kernel without them says so, and gives others
        self.memory = mapping.view
        self.start = mapping.start

    def close(self) -> None:
        """Do nothing: the memory is unmapped with its last view."""


class SharedMemory:
    """Zeroed memory in an anonymous file. Raises OSError when there is not enough.

    A child that C code forks does not have it. One that Python forks has it until `forked` makes it private:
    if nothing were mapped there at first, the child might allocate other memory in that place, such as one of
    Python's arenas, which this would overwrite.
    """

    def __init__(self, nbytes: int):
        with forks.no_fork():
            self._make(nbytes)

    def _make(self, nbytes: int) -> None:
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            mapping = Mapping(nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self._fd)
        except OSError:
            os.close(self._fd)
            raise
        mapping.advise(mmap.MADV_DONTFORK)
        self.memory = mapping.view
        self.start = mapping.start
        self._mapping: weakref.ref[Mapping] = weakref.ref(mapping)
        self._is_hidden = False
        forks.on_fork(self)
        forks.inherit(self)

    def close(self) -> None:
        """Close the file, so that no process can open it any more. Idempotent.

        The bytes stay: as private memory here, and in the processes that have the file mapped.
        """
        with forks.no_fork():
            mapping = self._mapping()
            if self._fd >= 0 and mapping is not None:
                with contextlib.suppress(OSError):
                    mapping.become_private(self._fd)
            self._close_file()

    def hide(self) -> None:
        """Close the file, but keep sharing the memory with the processes that have it mapped. Idempotent.

        In processes that are forked later, nothing is mapped there.
        """
        with forks.no_fork():
            self._is_hidden = self._is_hidden or self._fd >= 0
            self._close_file()

    def before_fork(self) -> None:
        """See forks.Inherited."""
        self._advise(mmap.MADV_DOFORK)

    def after_fork(self) -> None:
        """See forks.Inherited."""
        self._advise(mmap.MADV_DONTFORK)

    def forked(self) -> None:
        """In a child: make the memory private, so that its writes do not reach the parent."""
        mapping = self._mapping()
        if self._is_hidden and mapping is not None:
            mapping.forget()
        self.close()

    def _advise(self, advice: int) -> None:
        mapping = self._mapping()
        if self._fd >= 0 and mapping is not None:
            mapping.advise(advice)

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


OwnMemory = PrivateMemory | SharedMemory


def _map(start: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    address: Any = _libc.mmap(start, nbytes, protection, flags, fd, 0)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(address)
