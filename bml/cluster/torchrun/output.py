"""The output of ranks: read from their pipes as it comes, and passed on in whole lines."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from bml.cluster.torchrun.lines import Lines

Show = Callable[[int, bytes], None]
"""Shows lines that a rank wrote to standard output (1) or standard error (2)."""
_READ_NBYTES = 1 << 16


class Pipe:
    """One stream of a process of a rank: the reading end of its pipe."""

    def __init__(self, rank: int, number: int, show: Show):
        self.rank, self._number, self._show = rank, number, show
        self.descriptor, self.writes = os.pipe()
        """The reading end; the end that the process gets, which is closed by `given`."""
        os.set_blocking(self.descriptor, False)
        self._lines = Lines(f"[rank {rank}] ")

    def given(self) -> None:
        """Close the end of the process: it has its own now."""
        os.close(self.writes)

    def read(self) -> bool:
        """Show what is there to be read; returns False when the stream has ended."""
        with suppress(BlockingIOError):
            if data := os.read(self.descriptor, _READ_NBYTES):
                self._shown(self._lines.take(data))
                return True
            self._shown(self._lines.end())
            return False
        return True

    def drain(self) -> bool:
        """Show everything that is in the pipe: all that a process wrote that has ended.

        Returns False when the stream has ended: nobody else can write to it.
        """
        while True:
            try:
                data = os.read(self.descriptor, _READ_NBYTES)
            except BlockingIOError:
                self._shown(self._lines.end())
                return True
            if not data:
                self._shown(self._lines.end())
                return False
            self._shown(self._lines.take(data))

    def close(self) -> None:
        """Show the rest and close the pipe."""
        self._shown(self._lines.end())
        os.close(self.descriptor)

    def _shown(self, lines: bytes) -> None:
        if lines:
            self._show(self._number, lines)
