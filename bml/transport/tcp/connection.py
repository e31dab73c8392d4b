"""The connection of one link over TCP: it reads and writes the link's stream of frames."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial

from bml.io.poller import Poller
from bml.io.sendqueue import SendQueue
from bml.protocol.wire.frame import FrameError
from bml.transport.interface import LostKind
from bml.transport.stream import PASS_NBYTES, Stream
from bml.transport.tcp.incoming import Incoming

_LONG_NBYTES = 16 << 10
"""Bytes of payload from which on a frame is not gathered with others into one system call."""


class TcpConnection(Stream):
    """Reads through an `Incoming`, writes from the link's queue; `on_heard` is called when bytes came."""

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        queue: SendQueue,
        incoming: Incoming,
        on_heard: Callable[[], None],
        on_end: Callable[[LostKind, str], None],
    ) -> None:
        super().__init__(sock, poller, queue, on_end)
        self._incoming = incoming
        self._on_heard = on_heard
        self._resume_is_due = False

    @property
    def is_ready(self) -> bool:
        """Whether frames can move."""
        return True

    @property
    def pending(self) -> tuple[int, int]:
        """(0, 0): frames that are not written are in the queue."""
        return (0, 0)

    def send(self, priority: int, head: bytes, payload: memoryview | None) -> None:
        """Queue one frame, unless writing has failed: then the end is about to be reported."""
        if self._write_error:
            return
        idle = self.queue.nbytes == 0
        self.queue.push(priority, head, payload)
        if idle and payload is not None and len(payload) >= _LONG_NBYTES:
            self._write_now()
        elif not self._flush_is_due:
            self.flush_soon()

    def resume(self) -> None:
        """Ask `admit` again for the frame that waits, before the poller next waits."""
        if self._paused and not self._resume_is_due:
            self._resume_is_due = True
            self._poller.soon(self._resume)

    def fence(self) -> None:
        """Use no buffer of the old epoch any more; see `Transport.fence`."""
        self.queue.finish_partial()
        self._incoming.fence()

    def unmute(self) -> None:
        """See `Stream`."""
        super().unmute()
        self.resume()

    def _stopped(self) -> None:
        self._incoming.stop()

    def _write_now(self) -> None:
        """Write at once to an idle connection: until the end of the pass much more may be queued."""
        sock = self._sock
        if sock is None or self._muted:
            return
        try:
            self.queue.write(sock)
        except OSError as error:  # no callback may be called from here
            self._poller.soon(partial(self._write_failed_before, sock, error))
            return
        if self.queue.nbytes:
            self._set_blocked(True)
            self._watch()

    def _write_failed_before(self, sock: socket.socket, error: OSError) -> None:
        if self._sock is sock and not self._muted:
            self._write_failed(error)

    def _resume(self) -> None:
        self._resume_is_due = False
        if self._sock is None or self._muted:
            return
        try:
            self._incoming.resume()
        except FrameError as error:
            self._end("malformed", str(error))
        self._pause(self._incoming.paused)

    def _yield_turn(self) -> None:
        """Let other connections have their turn; continue after them."""
        raise NotImplementedError

    def _read(self, sock: socket.socket) -> None:
        incoming, fd = self._incoming, self._fd
        nbytes_read = 0
        while nbytes_read < PASS_NBYTES and not incoming.budget_spent:
            buffers = incoming.buffers()
            try:
                nbytes = os.readv(fd, buffers)
            except BlockingIOError:
                return
            except OSError as error:
                self._end_by(error)
                return
            if nbytes == 0:
                self._end_of_file()
                return
            if nbytes_read == 0:
                self._on_heard()
            nbytes_read += nbytes
            try:
                if self._sock is sock:
                    incoming.advance(nbytes)
            except FrameError as error:
                self._end("malformed", str(error))
            if self._sock is not sock:
                return
            if incoming.paused or self._muted:
                self._pause(incoming.paused)
                return
            if incoming.budget_spent:
                self._yield_turn()
                return
            if nbytes < sum(map(len, buffers)):
                return  # all is read: another read would only return that it would block
