"""One open socket on the poller: when to write, when to read, how it ends. Frames and messages build on it.

Writing is put off to the end of the poller's pass, so that what is queued in one pass leaves by priority
and in few system calls; a subclass may write at once what cannot wait. Each pass does a bounded amount of
work for each stream.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Literal

from bml.io.poller import BROKEN, PEER_CLOSED, READ, WRITE, Poller
from bml.io.sendqueue import SendQueue
from bml.transport.interface import LostKind

PASS_NBYTES = 512 << 10
"""How much one stream may read, and may write, in one pass of the poller."""

_GONE = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED})


def kind_of(error: OSError) -> Literal["reset", "refused", "timeout"]:
    """Say what an error of a socket means for the peer: `timeout` stands for all troubles of the path."""
    if error.errno in _GONE:
        return "reset"
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    return "timeout"


class Stream:
    """Base of everything that owns an open socket; a subclass says how to read.

    `on_end(kind, why)` is called at most once, from within a poll, with the socket closed already.
    """

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        queue: SendQueue,
        on_end: Callable[[LostKind, str], None],
    ) -> None:
        self.queue = queue
        self._sock: socket.socket | None = sock
        self._fd = sock.fileno()
        self._poller = poller
        self._on_end = on_end
        self._muted = False
        self._blocked = False
        self._flush_is_due = False
        self._write_error = ""
        self._paused = False
        self._interest = 0

    def start(self) -> None:
        """Watch the socket, and write what is queued."""
        self._interest = self._wanted_events()
        self._poller.add(self._fd, self._interest, self._ready)
        self.flush_soon()

    @property
    def is_open(self) -> bool:
        """Whether there is still a socket."""
        return self._sock is not None

    def flush_soon(self) -> None:
        """Write what is queued before the poller next waits; to be called after a push."""
        if not (self._muted or self._flush_is_due or self._blocked):
            self._flush_is_due = True
            self._poller.soon(self._flush)

    def detach(self) -> socket.socket | None:
        """Give the socket away without closing it; the stream is over, without `on_end`."""
        sock, self._sock = self._sock, None
        if sock is not None:
            self._poller.remove(self._fd)
            self._stopped()
        return sock

    def close(self) -> None:
        """Close the socket without `on_end`. Idempotent."""
        sock = self.detach()
        if sock is not None:
            sock.close()

    def mute(self) -> None:
        """Neither read nor write nor notice anything until `unmute`.

        What is queued stays so: the kernel too would go on sending it when a dead cable works again.
        """
        if self._sock is not None and not self._muted:
            self._muted = True
            self._poller.remove(self._fd)

    def unmute(self) -> None:
        """End `mute`."""
        if self._sock is not None and self._muted:
            self._muted = False
            self._blocked = False
            self.start()

    def _read(self, sock: socket.socket) -> None:
        """Read up to PASS_NBYTES; end the stream if it is over."""
        raise NotImplementedError

    def _stopped(self) -> None:
        """The socket is gone; nobody is to be called any more."""

    def _end(self, kind: LostKind, why: str) -> None:
        if self._sock is not None:
            self.close()
            self._on_end(kind, why)

    def _end_by(self, error: OSError) -> None:
        self._end(kind_of(error), error.strerror or str(error))

    def _end_of_file(self) -> None:
        if self._write_error:
            self._end("reset", self._write_error)
        else:
            self._end("eof", "the other side closed the connection")

    def _pause(self, paused: bool) -> None:
        # The poller hears of it when more comes: often reading goes on before.
        self._paused = paused
        if not paused:
            self._watch()

    def _wanted_events(self) -> int:
        return PEER_CLOSED | (0 if self._paused else READ) | (WRITE if self._blocked else 0)

    def _watch(self) -> None:
        events = self._wanted_events()
        if events != self._interest and self._sock is not None and not self._muted:
            self._interest = events
            self._poller.modify(self._fd, events)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        sock = self._sock
        if sock is None or events == WRITE:
            return
        if not self._paused:
            self._read(sock)
            return
        self._watch()
        if events & (PEER_CLOSED | BROKEN):
            # Nobody reads, so this is the only way to learn that the peer is gone.
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._end_by(OSError(code, errno.errorcode.get(code, str(code))))
            else:
                self._end_of_file()

    def _flush(self) -> None:
        self._flush_is_due = False
        sock = self._sock
        if sock is None or self._muted:
            return
        queue = self.queue
        limit = queue.nbytes - PASS_NBYTES
        try:
            while queue.nbytes:
                if not queue.write(sock) or queue.nbytes < limit:
                    break
        except OSError as error:
            self._write_failed(error)
            return
        blocked = queue.nbytes > 0
        if blocked is not self._blocked:
            self._blocked = blocked
            self._watch()

    def _write_failed(self, error: OSError) -> None:
        """Stop writing; if the peer is gone, what it sent before may still be read, and then the end."""
        self.queue.clear()
        if error.errno not in _GONE or self._paused:
            self._end_by(error)
            return
        self._write_error = error.strerror or str(error)
        self._blocked = False
        self._watch()
