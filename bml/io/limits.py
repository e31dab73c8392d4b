"""What this process and its machine allow, and errors that name what they do not."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator

from bml.topology.errors import FabricError

PROCESS_LIMIT = (
    "no more processes or threads may be started here: allow more (ulimit -u, pids.max of the container, "
    "TasksMax= of its service)"
)


class NoRoom(FabricError):
    """This process may map or open no more; the text says which limit was reached, and how to raise it.

    The process whose memory was to be mapped is not to blame.
    """


@contextlib.contextmanager
def with_room(nbytes: int) -> Iterator[None]:
    """Turn an OSError about a limit of this process or machine into NoRoom; `nbytes` were asked for."""
    try:
        yield
    except OSError as error:
        limit = _limit(error.errno)
        if not limit:
            raise
        wanted = f"no room for {nbytes / 2**20:.3g} MiB more of memory"
        raise NoRoom(f"{wanted}: {error.strerror}; {limit}") from error


def is_process_limit(error: BaseException) -> bool:
    """Whether this is how Python says that no more threads or processes may be started."""
    if "can't start new thread" in str(error):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    at = "" if last is None else os.path.basename(last.tb_frame.f_code.co_filename)
    return isinstance(error, BlockingIOError) and at in ("subprocess.py", "popen_fork.py")


def check_loopback() -> None:
    """Raise FabricError if processes of this machine cannot speak over loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("127.0.0.1", 9))
        except OSError as error:
            raise FabricError(
                f"servers on one machine speak over loopback, but 127.0.0.1 cannot be reached here "
                f"({error.strerror}): ip link set lo up"
            ) from None


def _limit(code: int | None) -> str:
    """The limit behind this errno, and how to raise it; empty if it is not a limit."""
    if code == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process may have {most} files open: allow more (ulimit -n, LimitNOFILE= of its service)"
    if code == errno.ENFILE:
        return "this machine may have no more files open: raise fs.file-max"
    if code in (errno.ENOMEM, errno.EAGAIN):
        return (
            "allow this process more (ulimit -v, ulimit -l, vm.max_map_count, the memory of its container), "
            "or reduce smaller vectors at a time"
        )
    return ""
