"""Limits of this process and its machine: which of them memory or descriptors were refused for."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

from bml.topology.errors import FabricError


class NoRoom(FabricError):
    """This process, not the one whose memory it wants, may map or open no more: says which limit it is."""


@contextlib.contextmanager
def with_room(nbytes: int) -> Iterator[None]:
    """Turn an OSError that speaks of a limit of this process, or machine, into NoRoom."""
    try:
        yield
    except OSError as error:
        limit = _limit(error.errno)
        if not limit:
            raise
        wanted = f"no room for {nbytes / 2**20:.3g} MiB more of memory"
        raise NoRoom(f"{wanted}: {error.strerror}; {limit}") from error


def _limit(code: int | None) -> str:
    """What to look at; empty if it is not a limit."""
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
