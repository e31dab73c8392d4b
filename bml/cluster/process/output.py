"""Output that nobody need be able to read: no training ends because its terminal, or its pipe, does."""

from __future__ import annotations

import io
import select
import sys
from contextlib import suppress


class Descriptor(io.FileIO):
    """A file descriptor that takes everything: what cannot be written is dropped, and `lost` says why.

    It is not closed with this object.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.lost: OSError | None = None

    def write(self, data: object, /) -> int:
        """Write, waiting for room if need be. Returns how many bytes are done with; raises nothing."""
        view = memoryview(data)  # type: ignore[arg-type]
        try:
            while (nbytes := super().write(view)) is None:  # somebody has made it non-blocking
                select.select([], [self.fileno()], [])
        except OSError as error:
            self.lost = self.lost or error
            return view.nbytes
        return nbytes


def lasting(number: int, encoding: str, *, by_line: bool) -> io.TextIOWrapper:
    """A stream to a file descriptor to which a print never raises, whatever becomes of what is behind it.

    Letters that the encoding does not have are written as escapes. `by_line`: a line is written when it is
    complete.
    """
    buffered = io.BufferedWriter(Descriptor(number))
    return io.TextIOWrapper(buffered, encoding=encoding, errors="backslashreplace", line_buffering=by_line)


def outlive_readers() -> None:
    """Make such streams of standard output and error, in whole lines: many processes may share them."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if is_real(stream, number):
            with suppress(OSError):
                stream.flush()
            setattr(sys, name, lasting(number, stream.encoding, by_line=True))


def is_real(stream: object, number: int) -> bool:
    """Whether a stream writes to this descriptor, and nobody has put another in its place."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    except (OSError, ValueError):
        return False
