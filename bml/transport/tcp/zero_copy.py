"""The connection of servers that share a host: long payloads stay in place (bml.sharedmem.zero_copy)."""

from __future__ import annotations

import socket
from collections.abc import Callable

from bml.io.poller import Poller
from bml.io.sendqueue import Counters, SendQueue
from bml.protocol.wire.frame import (
    REFERENCE_AT,
    REFERENCE_BYTE,
    REFERENCE_FRAME_NBYTES,
    FrameError,
    Header,
    Reference,
    pack_reference,
    unpack_reference,
)
from bml.sharedmem.zero_copy import LEAST_NBYTES, ZeroCopy
from bml.transport.interface import LostKind, Verdict
from bml.transport.tcp.connection import TcpConnection
from bml.transport.tcp.incoming import Incoming

_TURN_NBYTES = 4 << 20
"""The bytes that are received by reference before it is the turn of other descriptors: the headers of a whole
step come at once."""


class ZeroCopyIncoming(Incoming):
    """An `Incoming` that takes reference frames, too; after `budget_spent` it waits for `go_on`."""

    __slots__ = ("_peer", "_reference", "_taken", "_zero_copy")

    def __init__(
        self,
        admit: Callable[[Header], memoryview | Verdict],
        received: Callable[[Header], None],
        counters: Counters,
        max_nbytes: int,
        zero_copy: ZeroCopy,
        peer: int,
    ) -> None:
        super().__init__(admit, received, counters, max_nbytes)
        self._zero_copy = zero_copy
        self._peer = peer
        self._reference: Reference | None = None
        self._taken = 0

    def resume(self) -> None:
        """See Incoming."""
        if self.paused and self._reference is not None:
            self.paused = False
            if self._take_referenced(self._reference):
                self._parse()
        else:
            super().resume()

    def go_on(self) -> None:
        """Continue: it is this connection's turn again; raises FrameError as `advance` does."""
        self.budget_spent = False
        self._taken = 0
        if not self.paused:
            self._parse()

    def stop(self) -> None:
        """See Incoming."""
        super().stop()
        self._reference = None
        self.budget_spent = False

    def _take(self) -> bool:
        low, scratch = self._low, self._scratch
        if scratch[low + REFERENCE_AT] != REFERENCE_BYTE:
            return Incoming._take(self)  # quicker than super()
        if self._taken >= _TURN_NBYTES:
            self.budget_spent = True
            return False
        if self._high - low < REFERENCE_FRAME_NBYTES:
            return False
        self._header, reference = unpack_reference(scratch, low, self._max_nbytes)
        self._low += REFERENCE_FRAME_NBYTES
        return self._take_referenced(reference)

    def _take_referenced(self, reference: Reference) -> bool:
        """Take the payload by reference; returns whether to continue."""
        header = self._header
        assert header is not None
        if not self._ask():
            self._reference = reference if self.paused else None
            return False
        self._reference = None
        self._missing = 0  # nothing of it follows
        if not self._dropped:
            self._taken += header.nbytes
            zero_copy, counters = self._zero_copy, self._counters
            copied = zero_copy.nbytes_copied
            self._dropped = not zero_copy.receive(self._peer, header, reference, self._rest)
            if not self._dropped:
                counters.nbytes_zero_copy_received += header.nbytes
                counters.nbytes_copied_received += zero_copy.nbytes_copied - copied
        self._finish()
        return True


class ZeroCopyConnection(TcpConnection):
    """A connection that sends references to payloads that the peer can read."""

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        queue: SendQueue,
        incoming: ZeroCopyIncoming,
        on_heard: Callable[[], None],
        on_end: Callable[[LostKind, str], None],
        reference_for: Callable[[memoryview], Reference | None],
        counters: Counters,
    ) -> None:
        super().__init__(sock, poller, queue, incoming, on_heard, on_end)
        self._zero_copy_incoming = incoming
        self._reference_for = reference_for
        self._counters = counters

    def send(self, priority: int, head: bytes, payload: memoryview | None) -> None:
        """See TcpConnection."""
        if payload is not None and len(payload) >= LEAST_NBYTES:
            reference = self._reference_for(payload)
            if reference is not None:
                self._counters.nbytes_zero_copy_sent += len(payload)
                self._send_reference(priority, pack_reference(head, reference))
                return
        TcpConnection.send(self, priority, head, payload)  # quicker than super()

    def _send_reference(self, priority: int, frame: bytes) -> None:
        if self._write_error:
            return
        idle = self.queue.nbytes == 0
        self.queue.push(priority, frame, None)
        if idle and not self._flush_is_due:
            self._write_now()
        self.flush_soon()

    def unmute(self) -> None:
        """See Stream."""
        super().unmute()
        if self._zero_copy_incoming.budget_spent:
            self._yield_turn()

    def _resume(self) -> None:
        super()._resume()
        if self._zero_copy_incoming.budget_spent:
            self._yield_turn()

    def _yield_turn(self) -> None:
        """See TcpConnection."""
        self._poller.soon(self._go_on)

    def _go_on(self) -> None:
        """Continue after the other connections have had their turn."""
        incoming = self._zero_copy_incoming
        if self._sock is None or self._muted or not incoming.budget_spent:
            return
        try:
            incoming.go_on()
        except FrameError as error:
            self._end("malformed", str(error))
        self._pause(incoming.paused)
        if incoming.budget_spent:
            self._yield_turn()
