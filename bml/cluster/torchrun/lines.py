"""Cuts the output of a rank into lines, each with the rank before it. Pure."""

from __future__ import annotations

import re

LONGEST_NBYTES = 1 << 16
"""A longer line is shown in pieces."""
_END = re.compile(rb"\r\n|\r(?=[^\n])|\n")


class Lines:
    """The lines of one stream. A progress bar ends its lines with a carriage return, and keeps it."""

    def __init__(self, prefix: str):
        self._prefix = prefix.encode()
        self._rest = b""

    def take(self, data: bytes) -> bytes:
        """Return all lines that are complete with these bytes, with their prefix."""
        self._rest += data
        found, at = [], 0
        for match in _END.finditer(self._rest):
            found.append(self._prefix + self._rest[at : match.end()])
            at = match.end()
        self._rest = self._rest[at:]
        while len(self._rest) > LONGEST_NBYTES:
            found.append(self._prefix + self._rest[:LONGEST_NBYTES] + b"\n")
            self._rest = self._rest[LONGEST_NBYTES:]
        return b"".join(found)

    def end(self) -> bytes:
        """Return what is left as a line, when the stream has ended; nothing if nothing is left."""
        rest, self._rest = self._rest, b""
        return self._prefix + rest.rstrip(b"\r") + b"\n" if rest else b""
