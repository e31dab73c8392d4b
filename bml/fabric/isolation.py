"""A PID namespace and folders of its own for a process: with them a network namespace behaves as a machine.

Both functions need root, and a process with one thread.
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
    """Continue as the first process of a new PID namespace, with mounts of its own.

    When the first process ends, the kernel ends all processes of the namespace. The process that called stays
    outside, waits, and exits with the same status; when it is killed, so are all processes inside.

    Raises FabricError if this process may not do so.
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
    """Mount an empty folder in memory over each path, for this process and its children only.

    Raises FabricError if this process may not do so.
    """
    _call("own mounts", _libc.unshare(_CLONE_NEWNS))
    for path in paths:
        _call(path, _libc.mount(b"tmpfs", path.encode(), b"tmpfs", 0, None))


def _call(what: str, result: int) -> None:
    if result != 0:
        why = os.strerror(ctypes.get_errno())
        raise FabricError(f"cannot have {what}: {why}; machines of their own need root and CAP_SYS_ADMIN")
