"""Processes beside the command's own, for work that keeps every core busy."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.pool import Pool


def workers(n: int) -> Pool:
    """Start so many; a context, which ends them.

    Ctrl-C reaches all processes of a terminal. These ignore it, and the command's own ends them.
    """
    return multiprocessing.get_context("spawn").Pool(n, signal.signal, (signal.SIGINT, signal.SIG_IGN))
