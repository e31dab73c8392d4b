"""A stream: one open socket on the poller, which reads, writes and ends. Frames and messages build on it.

Writing is deferred to the end of the poller's pass. So all that is queued in a pass leaves by priority and in
few system calls; a subclass may write at once what cannot wait. In each pass a stream reads and writes a
bounded number of bytes.
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
"""Bytes that a stream may read, and may write, in one pass of the poller."""

# ENOTCONN: the peer had reset the connection before it was accepted.
_GONE = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED, errno.ENOTCONN})


def kind_of(error: OSError) -> Literal["reset", "refused", "timeout"]:
    """Return what an error of a socket means: `timeout` stands for all errors of the path."""
    if error.errno in _GONE:
        return "reset"
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    return "timeout"


class Stream:
    """The owner of an open socket; a subclass implements `_read`.

    `on_end(kind, why)` is called at most once, from within a poll, when the socket is closed already.
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
        """Whether the stream still has its socket."""
        return self._sock is not None

    def flush_soon(self) -> None:
        """Write what is queued before the poller next waits; call it after a push."""
        if not (self._muted or self._flush_is_due or self._blocked):
            self._flush_is_due = True
            self._poller.soon(self._flush)

    def detach(self) -> socket.socket | None:
        """End the stream, without `on_end`, and return its socket, which stays open."""
        self._set_blocked(False)
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

        Queued frames stay queued, as the kernel would also continue when a dead cable works again.
        """
        if self._sock is not None and not self._muted:
            self._muted = True
            self._set_blocked(False)
            self._poller.remove(self._fd)

    def unmute(self) -> None:
        """End `mute`."""
        if self._sock is not None and self._muted:
            self._muted = False
            self.start()

    def _read(self, sock: socket.socket) -> None:
        """Read up to PASS_NBYTES; end the stream if it is over."""
        raise NotImplementedError

    def _stopped(self) -> None:
        """Called when the socket is gone: no callback may be called any more."""

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
        # A pause is told to the poller when more bytes come; often reading is resumed before.
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
            # Nothing is read now, so this is the only way to learn that the peer is gone.
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
            self._set_blocked(blocked)
            self._watch()

    def _set_blocked(self, blocked: bool) -> None:
        """Bytes wait until the kernel takes more, or not any longer."""
        if blocked is not self._blocked:
            self._blocked = blocked
            if self.queue.backlog is not None and self._sock is not None:
                self.queue.backlog.note(self._sock, blocked)

    def _write_failed(self, error: OSError) -> None:
        """Stop writing. If the peer is gone, bytes that it sent before may still be read before the end."""
        self.queue.clear()
        if error.errno not in _GONE or self._paused:
            self._end_by(error)
            return
        self._write_error = error.strerror or str(error)
        self._set_blocked(False)
        self._watch()
