"""Whether what a command wants to measure fits into the memory of this machine."""

from __future__ import annotations

import os

from bml.errors import UsageError
from bml.lab.bench.rows import size_text


def check_room(n_servers: int, nbytes: int, what: str, instead: str) -> None:
    """Raise UsageError, with `what` they are and what to do, if `nbytes` for each server do not fit."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes * n_servers > memory:
        raise UsageError(
            f"{n_servers} servers with {what} do not fit into the memory of this machine, "
            f"{size_text(memory)}: {instead}"
        )
