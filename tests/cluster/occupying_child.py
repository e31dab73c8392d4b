"""Prints the status of a child that maps memory, once it is forked, where that of its parent was shared.

The child ends with 0 if its copy of the shared memory is whole, and so is what it has mapped.
"""

import ctypes
import mmap
import os

NBYTES = 1 << 20
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
wanted: list[int] = []
found: list[int] = []


def occupy() -> None:
    """As the allocators of Python and C do: the kernel gives a wanted address if nothing is mapped there."""
    for start in wanted:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        at = _libc.mmap(start, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        ctypes.memset(at, 0x55, NBYTES)
        found.append(at)


os.register_at_fork(after_in_child=occupy)  # before the handlers of bml, which are called in this order

from bml.io.mapping import SharedMemory  # noqa: E402

shared, hidden = SharedMemory(NBYTES), SharedMemory(NBYTES)
shared.memory[:] = b"\x11" * NBYTES
hidden.hide()
wanted[:] = [shared.start, hidden.start]
child = os.fork()
if child == 0:
    del hidden
    whole = bytes(shared.memory) == b"\x11" * NBYTES
    kept = all(ctypes.string_at(at, NBYTES) == b"\x55" * NBYTES for at in found)
    os._exit(0 if whole and kept and len(found) == 2 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
