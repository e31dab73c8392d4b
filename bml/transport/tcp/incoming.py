"""The receiving half of a tcp connection, without its socket: bytes become frames, payloads land in place.

The owner of the socket reads into `buffers()`, and passes the number of bytes to `advance`. Between frames,
the buffer is a scratch buffer, from which many small frames are parsed at once. Inside a long payload, it is
the rest of the payload's place, followed by the scratch buffer. So a slice and the next header cost one
system call.
"""

from __future__ import annotations

from collections.abc import Callable

from bml.io.sendqueue import Counters
from bml.protocol.wire.frame import HEADER_NBYTES, Header, unpack
from bml.topology.errors import InvariantError
from bml.transport.interface import Verdict

SCRATCH_NBYTES = 64 << 10
_TAIL_NBYTES = 4 << 10
"""Bytes to read behind a payload: more of them would be copied if another slice follows."""

_SINK = memoryview(bytearray(256 << 10))
"""Unwanted payloads are read into this; all connections write to it, and none reads it."""


class Incoming:
    """Parses the stream of one connection; `admit` and `received` are `LinkCallbacks`.

    They may call `fence` and `stop`. `max_nbytes` is the longest payload that is accepted.
    """

    __slots__ = (
        "_admit",
        "_counters",
        "_dropped",
        "_header",
        "_high",
        "_low",
        "_max_nbytes",
        "_missing",
        "_received",
        "_rest",
        "_scratch",
        "_stopped",
        "_tail",
        "budget_spent",
        "paused",
    )

    def __init__(
        self,
        admit: Callable[[Header], memoryview | Verdict],
        received: Callable[[Header], None],
        counters: Counters,
        max_nbytes: int,
    ) -> None:
        self.paused = False
        """Whether a header waits until `admit` returns something else than WAIT."""
        self.budget_spent = False
        """Whether frames wait so that other connections have their turn; always False in this class."""
        self._admit = admit
        self._received = received
        self._counters = counters
        self._max_nbytes = max_nbytes
        self._scratch = memoryview(bytearray(SCRATCH_NBYTES))
        self._tail = self._scratch[:_TAIL_NBYTES]
        # scratch[low:high] is read and not parsed yet; it is empty while bytes of a payload are missing.
        self._low = self._high = 0
        self._header: Header | None = None
        self._rest = _SINK[:0]
        self._missing = 0
        self._dropped = False
        self._stopped = False

    def buffers(self) -> list[memoryview]:
        """Where to read next, not only empty views. Not to be called while `paused` or `budget_spent`."""
        missing = self._missing
        if missing:
            if not self._dropped:
                return [self._rest, self._tail]
            if missing > len(_SINK):
                return [_SINK]
            return [_SINK[:missing], self._tail]
        low, high = self._low, self._high
        if low == high:
            self._low = self._high = 0
            return [self._scratch]
        if low:
            self._scratch[: high - low] = self._scratch[low:high].tobytes()
            self._low, self._high = 0, high - low
        return [self._scratch[self._high :]]

    def advance(self, nbytes: int) -> None:
        """Take in `nbytes` that were read into `buffers()`; raises FrameError if they are no frames."""
        self._counters.nbytes_received += nbytes
        missing = self._missing
        if not missing:
            self._high += nbytes
        elif nbytes < missing:
            self._missing = missing - nbytes
            if not self._dropped:
                self._rest = self._rest[nbytes:]
            return
        else:
            self._missing = 0
            self._low, self._high = 0, nbytes - missing
            self._finish()
        self._parse()

    def resume(self) -> None:
        """Ask `admit` again, and parse on if it does not return WAIT; raises FrameError as `advance` does."""
        if self.paused:
            self.paused = False
            if self._ask() and (not self._missing or self._fill()):
                self._finish()
                self._parse()

    def fence(self) -> None:
        """Write no more into a view that `admit` returned; the payload in progress is discarded."""
        if self._missing:
            self._dropped = True
        self._rest = _SINK[:0]

    def stop(self) -> None:
        """The connection is gone: forget everything, and call no callback any more."""
        self._stopped = True
        self.paused = False
        self._low = self._high = self._missing = 0
        self._header = None
        self._rest = _SINK[:0]

    def _parse(self) -> None:
        while self._high - self._low >= HEADER_NBYTES and not self._stopped:
            if not self._take():
                return

    def _take(self) -> bool:
        """Take the next frame; return whether to parse on."""
        self._header = unpack(self._scratch, self._low, self._max_nbytes)
        self._low += HEADER_NBYTES
        if not self._ask() or (self._missing and not self._fill()):
            return False
        self._finish()
        return True

    def _ask(self) -> bool:
        """Ask `admit` where the payload goes; return whether to continue."""
        header = self._header
        assert header is not None
        verdict = self._admit(header)
        if self._stopped:
            return False
        if verdict is Verdict.WAIT:
            self.paused = True
            return False
        self._missing = header.nbytes
        if isinstance(verdict, Verdict):
            self._dropped = True
            return True
        if verdict.nbytes != header.nbytes or verdict.readonly:
            raise InvariantError(f"admit gave {verdict!r} of {verdict.nbytes} bytes for {header}")
        self._dropped = False
        if header.nbytes:
            self._rest = verdict if verdict.format == "B" and verdict.ndim == 1 else verdict.cast("B")
        return True

    def _fill(self) -> bool:
        """Copy bytes of the payload that are read already; return whether it is complete."""
        low, missing = self._low, self._missing
        have = min(self._high - low, missing)
        if have and not self._dropped:
            self._rest[:have] = self._scratch[low : low + have]
            self._counters.nbytes_copied_received += have
            self._rest = self._rest[have:]
        self._low = low + have
        self._missing = missing - have
        return have == missing

    def _finish(self) -> None:
        header, self._header = self._header, None
        self._counters.frames_received += 1
        if not self._dropped:
            self._rest = _SINK[:0]
            assert header is not None
            self._received(header)
