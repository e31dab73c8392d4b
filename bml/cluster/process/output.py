"""Output that never fails: no training ends because its terminal or pipe has gone."""

from __future__ import annotations

import io
import select
import sys
from contextlib import suppress


class Descriptor(io.FileIO):
    """A file descriptor that takes all output. Output that cannot be written is dropped; see `lost`.

    It is not closed with this object.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.lost: OSError | None = None

    def write(self, data: object, /) -> int:
        """Write, and wait for room if need be. Returns how many bytes were taken; raises nothing."""
        view = memoryview(data)  # type: ignore[arg-type]
        try:
            while (nbytes := super().write(view)) is None:  # another process has made it non-blocking
                select.select([], [self.fileno()], [])
        except OSError as error:
            self.lost = self.lost or error
            return view.nbytes
        return nbytes


def lasting(number: int, encoding: str, *, by_line: bool) -> io.TextIOWrapper:
    """Make a stream to a file descriptor. A print to it never raises, also if its reader has gone.

    Characters that the encoding does not have are written as escapes. With `by_line` a line is written when
    it is complete.
    """
    buffered = io.BufferedWriter(Descriptor(number))
    return io.TextIOWrapper(buffered, encoding=encoding, errors="backslashreplace", line_buffering=by_line)


def outlive_readers() -> None:
    """Make standard output and error such streams, written in whole lines: many processes may share them."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if is_real(stream, number):
            with suppress(OSError):
                stream.flush()
            setattr(sys, name, lasting(number, stream.encoding, by_line=True))


def is_real(stream: object, number: int) -> bool:
    """Whether a stream writes to this descriptor: it may have been replaced."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    except (OSError, ValueError):
        return False
