"""Processes that end together, and folders that only they have: what makes a machine of a network namespace.

Needs root. Both functions are for processes of one thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable

from bml.topology.errors import FabricError

_CLONE_NEWNS, _CLONE_NEWPID = 0x20000, 0x20000000
_MS_REC, _MS_SLAVE = 16384, 1 << 19
_PR_SET_PDEATHSIG = 1
_STANDARD = 3
_MOST_DESCRIPTORS = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


def isolate() -> None:
    """Go on as the first process of a PID namespace of its own, with mounts of its own.

    Whatever it will start, and whatever that leaves behind, the kernel ends with it. The process that called
    stays outside, waits, and ends as it does; when that one is killed, all inside are.

    Raises FabricError if this process may not.
    """
    _call("a PID namespace", _libc.unshare(_CLONE_NEWPID | _CLONE_NEWNS))
    inner = os.fork()
    if inner:
        os.closerange(_STANDARD, _MOST_DESCRIPTORS)
        _, status = os.waitpid(inner, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _call("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    # Mounts made inside stay inside, those made outside (new network namespaces) are seen.
    _call("private mounts", _libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None))
    _call("/proc", _libc.mount(b"proc", b"/proc", b"proc", 0, None))


def own_folders(paths: Iterable[str]) -> None:
    """Put an empty folder in memory over each of these, for this process and its children; gone with them."""
    _call("own mounts", _libc.unshare(_CLONE_NEWNS))
    for path in paths:
        _call(path, _libc.mount(b"tmpfs", path.encode(), b"tmpfs", 0, None))


def _call(what: str, result: int) -> None:
    if result != 0:
        why = os.strerror(ctypes.get_errno())
        raise FabricError(f"cannot have {what}: {why}; machines of their own need root and CAP_SYS_ADMIN")
